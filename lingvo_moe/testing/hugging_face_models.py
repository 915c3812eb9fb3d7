"""Tiny random models as directories of the Hugging Face Hub: translators, and Switch Transformers.

It needs NumPy and safetensors alone. Names and shapes of the weights are those that Hugging Face's `save_pretrained`
writes; the golden files, which its code wrote, have them too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np
from safetensors.numpy import save_file

from lingvo_moe.testing.hugging_face_configs import CONFIGS, GENERATION

TOKENIZERS = pathlib.Path(__file__).parents[2] / "testdata" / "golden" / "hugging_face"
INDEX = "model.safetensors.index.json"

# The directory of each model's tokenizer below TOKENIZERS.
TOKENIZER_OF = {name: "nllb" if name == "nllb_moe" else name for name in CONFIGS}
# The ids that a text's pieces have; other rows of the table are special tokens, languages or unused.
_PIECES = {
    "nllb": range(4, 301),
    "nllb_moe": range(4, 301),
    "m2m": range(4, 299),
    "marian": range(2, 162),
    "madlad": range(8, 300),
    "switch": range(3, 300),
}
# Chosen so that beam search ends by itself and its best hypotheses differ in score.
_SEEDS = {"nllb": 77, "nllb_moe": 14, "m2m": 51, "marian": 590, "madlad": 1, "switch": 7}
# The standard deviation of the table, and how much larger it is in the end's row, so that its chance varies.
_SPREAD, _END_SPREAD = 0.3, 2.0
# The standard deviation of the last norm's bias.
_LAST_BIAS = 0.3
# Marian's final_logits_bias: its mean, which makes padding likely, and its standard deviation.
_LOGITS_BIAS = "final_logits_bias"
_LOGITS_BIAS_MEAN, _LOGITS_BIAS_SPREAD = -5.0, 0.5
# What Marian's attention adds is small, or the norms that follow would leave little of the token, and of its successor.
_WEAK, _WEAK_SPREAD = "out_proj.weight", 0.45
# How much of a token's successor the last feed-forward layer adds, and how much of the token it takes away from that.
_SUCCESSOR, _OWN = 5.0, 1.0
# Of T5's weights without a rule; its queries are not divided by the root of a head's dimension.
_SPREADS_OF_T5 = {"shared.weight": 1.0, "lm_head.weight": 0.2}
_QUERY_SPREAD = 0.25
# How much of a token is added to the softmax's row of its successor, and of the last of every five to that of the end.
_SUCCESSOR_OF_T5, _END_OF_T5, _LAST_OF = 0.35, 0.08, 5
_END_OF_SWITCH = 1.7
# How much likelier the weights make the end, and how much less likely the rows of no piece: logits.
_END, _NO_PIECE = 3.0, -4.0
_OF_T5 = ("madlad", "switch")
_MAX_SHARD_BYTES = {"nllb_moe": 160_000}
_WITHOUT_ADDED_TOKENS = ("nllb_moe",)


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's weights by their names in model.safetensors."""
    config = CONFIGS[model]
    width = config["d_model"]
    if model in _OF_T5:
        return dict(_shapes_of_t5(config))
    return {
        "model.shared.weight": (config["vocab_size"], width),
        **dict(_side(config, "encoder")),
        **dict(_side(config, "decoder")),
        **({_LOGITS_BIAS: (1, config["vocab_size"])} if config["model_type"] == "marian" else {}),
    }


def _side(config: dict, side: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = config["d_model"]
    has_experts = config["model_type"] == "nllb-moe"
    attentions = ["self_attn"] + ["cross_attention" if has_experts else "encoder_attn"] * (side == "decoder")
    for layer in range(config[f"{side}_layers"]):
        prefix = f"model.{side}.layers.{layer}"
        for attention in attentions:
            for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
                yield from _linear(f"{prefix}.{attention}.{projection}", width, width)
            yield from _norm(f"{prefix}.{attention}_layer_norm", width)
        yield from _feed_forward(config, side, layer, prefix)
        yield from _norm(f"{prefix}.{'ff_layer_norm' if has_experts else 'final_layer_norm'}", width)
    if config.get("add_final_layer_norm", True):
        yield from _norm(f"model.{side}.layer_norm", width)


def _feed_forward(config: dict, side: str, layer: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, hidden = config["d_model"], config[f"{side}_ffn_dim"]
    owners = [prefix]
    if config["model_type"] == "nllb-moe":
        owners = [f"{prefix}.ffn"]
        if (layer + 1) % config[f"{side}_sparse_step"] == 0:
            yield f"{prefix}.ffn.router.classifier.weight", (config["num_experts"], width)
            owners = [f"{prefix}.ffn.experts.expert_{expert}" for expert in range(config["num_experts"])]
    for owner in owners:
        yield from _linear(f"{owner}.fc1", width, hidden)
        yield from _linear(f"{owner}.fc2", hidden, width)


def _shapes_of_t5(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, heads = config["d_model"], config["num_heads"]
    joined = heads * config["d_kv"]
    attention = {**dict.fromkeys("qkv", (joined, width)), "o": (width, joined)}
    yield "shared.weight", (config["vocab_size"], width)
    if not config.get("tie_word_embeddings", True):
        yield "lm_head.weight", (config["vocab_size"], width)
    for side, layers in (("encoder", config["num_layers"]), ("decoder", config["num_decoder_layers"])):
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield table, (config["relative_attention_num_buckets"], heads)
        attentions = ["SelfAttention"] + ["EncDecAttention"] * (side == "decoder")
        for layer in range(layers):
            prefix = f"{side}.block.{layer}.layer"
            for index, name in enumerate(attentions):
                yield f"{prefix}.{index}.layer_norm.weight", (width,)
                yield from ((f"{prefix}.{index}.{name}.{matrix}.weight", shape) for matrix, shape in attention.items())
            yield f"{prefix}.{len(attentions)}.layer_norm.weight", (width,)
            yield from _feed_forward_of_t5(config, side, layer, f"{prefix}.{len(attentions)}")
        yield f"{side}.final_layer_norm.weight", (width,)


def _feed_forward_of_t5(config: dict, side: str, layer: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, hidden = config["d_model"], config["d_ff"]
    owners, inputs = [f"{prefix}.DenseReluDense"], ("wi_0", "wi_1")
    if config["model_type"] == "switch_transformers":
        owners, inputs = [f"{prefix}.mlp"], ("wi",)
        if layer % config[f"{side}_sparse_step"] == 1:
            yield f"{prefix}.mlp.router.classifier.weight", (config["num_experts"], width)
            owners = [f"{prefix}.mlp.experts.expert_{expert}" for expert in range(config["num_experts"])]
    for owner in owners:
        yield from ((f"{owner}.{matrix}.weight", (hidden, width)) for matrix in inputs)
        yield f"{owner}.wo.weight", (width, hidden)


def _linear(name: str, inputs: int, outputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def weights(model: str, seed: int | None = None) -> dict[str, np.ndarray]:
    """Returns a model's weights in float32, by their names in model.safetensors.

    Args:
      model: a key of CONFIGS.
      seed: another seed than the model's own.
    """
    seed = _SEEDS[model] if seed is None else seed
    values = {name: _values(f"{model}/{seed}/{name}", shape) for name, shape in shapes(model).items()}
    if model == "madlad":
        _shape_logits(model, values)
    elif model == "switch":
        _add_successors(model, values)
        _shape_table(model, values)
    else:
        _add_successors(model, values)
        _shape_outputs(model, values)
    return {name: value.astype(np.float32) for name, value in values.items()}


def _values(key: str, shape: tuple[int, ...]) -> np.ndarray:
    normal = np.random.default_rng(_hash(key)).standard_normal(shape)
    name = key.rpartition("/")[2]
    if name == "model.shared.weight":
        return _SPREAD * normal
    if name == "model.decoder.layer_norm.bias":
        return _LAST_BIAS * normal  # the direction that `_shape_outputs` uses
    if name == _LOGITS_BIAS:
        return _LOGITS_BIAS_MEAN + _LOGITS_BIAS_SPREAD * normal
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * normal
    if name.endswith("bias"):
        return 0.2 * normal
    if name in _SPREADS_OF_T5:
        return _SPREADS_OF_T5[name] * normal
    if name.endswith("relative_attention_bias.weight"):
        return normal
    spread = _WEAK_SPREAD if name.endswith(_WEAK) and key.startswith("marian/") else 1.5
    spread *= _QUERY_SPREAD if name.endswith(".q.weight") else 1.0
    return spread * shape[1] ** -0.5 * normal


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


def _add_successors(model: str, values: dict[str, np.ndarray]):
    """Makes another piece the likely successor of each, or beam search would repeat a token that it once chose.

    The pieces' rows of the table are a chain, each the rotation of the one before it; the last feed-forward layer
    rotates what it reads, and takes away some of it: x is relu(x) - relu(-x), and also swish(x) - swish(-x).
    """
    table = values["shared.weight" if model in _OF_T5 else "model.shared.weight"]
    width = table.shape[1]
    draw = np.random.default_rng(_hash(model))
    rotation = np.linalg.qr(draw.standard_normal((width, width)))[0]
    for row, following in itertools.pairwise(draw.permutation(_PIECES[model])):
        table[following] = 0.95 * rotation @ table[row] + 0.3 * table[following]
    step = _SUCCESSOR * (rotation - _OWN * np.eye(width))
    both, rotated = np.concatenate([np.eye(width), -np.eye(width)]), np.concatenate([step, -step], axis=1)
    if model in _OF_T5:
        parts = {"wi.weight": both, "wo.weight": rotated}
        last = f"decoder.block.{CONFIGS[model]['num_decoder_layers'] - 1}.layer.2."
    else:
        parts = {"fc1.weight": both, "fc2.weight": rotated}
        last = f"model.decoder.layers.{CONFIGS[model]['decoder_layers'] - 1}."
    for name in values:
        for suffix, part in parts.items():
            if name.startswith(last) and name.endswith(suffix):
                values[name] += part


def _shape_logits(model: str, values: dict[str, np.ndarray]):
    """Does what `_add_successors` and `_shape_outputs` do, in a softmax with weights of its own, and without biases."""
    table, softmax = values["shared.weight"], values["lm_head.weight"]
    rows = np.random.default_rng(_hash(model)).permutation(_PIECES[model])
    softmax[: _PIECES[model].start] *= 0.2
    for row, following in itertools.pairwise(rows):
        softmax[following] += _SUCCESSOR_OF_T5 * table[row]
    softmax[CONFIGS[model]["eos_token_id"]] += _END_OF_T5 * table[rows[::_LAST_OF]].sum(0)


def _shape_table(model: str, values: dict[str, np.ndarray]):
    """Does what `_shape_outputs` does, without any bias: the end's row is larger, and those of no piece are small."""
    config, table = CONFIGS[model], values["shared.weight"]
    end = config["eos_token_id"]
    table[[row for row in range(len(table)) if row not in _PIECES[model] and row != end]] *= 0.1
    table[end] *= _END_OF_SWITCH


def _shape_outputs(model: str, values: dict[str, np.ndarray]):
    """Makes the end likelier, and less likely what is no piece. Padding's row is zero, as in the public models."""
    config, table = CONFIGS[model], values["model.shared.weight"]
    end, padding = config["eos_token_id"], config["pad_token_id"]
    others = [row for row in range(len(table)) if row not in _PIECES[model] and row != end]
    table[end] *= _END_SPREAD
    _add_to_logits(values, others, _NO_PIECE)
    _add_to_logits(values, [end], _END)
    table[padding] = 0.0
    if _LOGITS_BIAS in values:
        values[_LOGITS_BIAS][:, padding] = 0.0


def _add_to_logits(values: dict[str, np.ndarray], rows: list[int], amount: float):
    """Makes some rows likelier by the bias of the logits, or else by that of the last norm."""
    if _LOGITS_BIAS in values:
        values[_LOGITS_BIAS][:, rows] += amount
        return
    bias = values["model.decoder.layer_norm.bias"]
    values["model.shared.weight"][rows] += amount * (bias / (bias @ bias))


def digest(model: str) -> str:
    """Returns the SHA-256 of a model's weights in the order of their names, as little-endian bytes."""
    values = weights(model)
    return hashlib.sha256(b"".join(values[name].astype("<f4").tobytes() for name in sorted(values))).hexdigest()


def write(directory: pathlib.Path, model: str, seed: int | None = None):
    """Writes a model's directory as the Hub has it: configuration, weights, and the tokenizer's files.

    Args:
      directory: is made.
      model: a key of CONFIGS; the weights of `nllb_moe` are in several files.
      seed: another seed than the model's own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", CONFIGS[model])
    _write_json(directory / "generation_config.json", GENERATION[model])
    shards = _shards(weights(model, seed), _MAX_SHARD_BYTES.get(model))
    files = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        stored = [value for shard in shards for value in shard.values()]
        metadata = {
            "total_parameters": sum(value.size for value in stored),
            "total_size": sum(value.nbytes for value in stored),
        }
        places = {name: file for file, shard in zip(files, shards) for name in shard}
        _write_json(directory / INDEX, {"metadata": metadata, "weight_map": dict(sorted(places.items()))})
    for file, shard in zip(files, shards):
        save_file(shard, directory / file, metadata={"format": "pt"})
    _write_tokenizer(directory, model)


def _write_tokenizer(directory: pathlib.Path, model: str):
    """Copies the tokenizer's files; of `nllb_moe`, as of 2022, only tokenizer.json has the ids of the added tokens."""
    for file in (TOKENIZERS / TOKENIZER_OF[model]).iterdir():
        shutil.copyfile(file, directory / file.name)
    if model in _WITHOUT_ADDED_TOKENS:
        (directory / "added_tokens.json").unlink()
        path = directory / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        _write_json(path, {key: value for key, value in config.items() if key != "added_tokens_decoder"})


def _write_json(path: pathlib.Path, value: dict):
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _shards(values: dict[str, np.ndarray], max_bytes: int | None) -> list[dict[str, np.ndarray]]:
    """Returns the weights in consecutive parts of at most `max_bytes`, unless a single one is larger."""
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, value in values.items():
        if max_bytes and shards[-1] and size + value.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    return shards
