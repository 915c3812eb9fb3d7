"""Imported translators compute what Hugging Face's own code computes: the golden values are of that code."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lingvo_moe import experiment as experiments
from lingvo_moe import tree
from lingvo_moe.data.batching import Example
from lingvo_moe.data.tokenizer import SIDES, SPECIAL_IDS, Tokenizers
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.importing import hugging_face
from lingvo_moe.layers.base import Context
from lingvo_moe.layers.relative_bias import RelativeBias
from lingvo_moe.lazy import tf
from lingvo_moe.models.translation import Translation
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing import hugging_face_models

pytestmark = pytest.mark.slow

NAMES = list(hugging_face_models.CONFIGS)
# Of log-probabilities of -1 to -12, each after some 30 float32 products and sums in a row, which PyTorch orders
# otherwise; the golden values have seven digits.
TOLERANCE = 5e-5
LANGUAGE = "fra_Latn"  # of the targets that are searched for; each has a program of its own
LENGTH = 64  # of a row
# M2M-100's names of languages.
SHORT_NAMES = {"eng_Latn": "en", "fra_Latn": "fr", "deu_Latn": "de", "rus_Cyrl": "ru", "swh_Latn": "sw"}


@dataclasses.dataclass(frozen=True)
class Case:
    """An imported model, and its golden values."""

    found: hugging_face.Imported
    rows: list[int]  # their ids, in the order of ours
    golden: dict

    @property
    def experiment(self) -> Experiment:
        return experiments.unchecked(self.found.name, self.found.settings)

    @property
    def model(self) -> Translation:
        return dataclasses.replace(self.experiment.model, unroll=True, remat="none")

    @functools.cached_property
    def theta(self) -> dict:
        return tree.map_leaves(tf.constant, tree.unflatten(self.found.theta))

    @property
    def forces_first(self) -> bool:
        """Whether targets begin with their language."""
        return self.experiment.search.force_first

    @property
    def examples(self) -> list[dict]:
        """All, but of a source that names the target's language not the empty one, which there has a space."""
        names_target = self.found.tokenizers["source"].names_target
        return [each for each in self.golden["examples"] if each["source"] or not names_target]

    def ours(self, ids: list[int]) -> list[int]:
        """Our ids of theirs; the last of two."""
        ours = {row: number for number, row in enumerate(self.rows)}
        return [ours[number] for number in ids]

    def tokens(self, side: str, pair: dict) -> list[int]:
        """Our ids of the text of one side."""
        languages = {each: pair[f"{each}_language"] for each in SIDES}
        if self.golden["config"]["model_type"] == "marian":
            languages = dict.fromkeys(SIDES, "")
        elif "fr" in self.found.tokenizers["source"].language_names:
            languages = {each: SHORT_NAMES[language] for each, language in languages.items()}
        tokenizers = Tokenizers(**self.found.tokenizers, manifest={}).in_languages(languages)
        return tokenizers.by_side[side].encode([pair[side]])[0].tolist()

    def batch(self, *pairs: dict) -> dict:
        """The source and the target of examples, one a row."""
        config = dataclasses.replace(
            self.experiment.texts, batch_size=len(pairs), source_length=LENGTH, target_length=LENGTH, packing=False
        )
        rows = config.empty_rows(len(pairs))
        for number, pair in enumerate(pairs):
            source, target = (self.tokens(side, pair) for side in SIDES)
            assert rows.add(Example(number, np.int32(source), np.int32(target)))
        return rows.batch


def write_changed(directory: pathlib.Path, name: str, changes: dict):
    """Writes a tiny model whose config.json has other values."""
    hugging_face_models.write(directory, name)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory) -> Case:
    directory = tmp_path_factory.mktemp("models") / request.param
    hugging_face_models.write(directory, request.param)
    golden = json.loads((hugging_face_models.TOKENIZERS / f"{request.param}.json").read_text(encoding="utf-8"))
    rows = hugging_face.describe(directory, "it").places.rows.tolist()
    return Case(hugging_face.read(pathlib.Path(directory), f"--input={directory}"), rows, golden)


def test_texts_have_the_same_tokens(case):
    """Of both sides, with unknown characters, white space, and none at all."""
    for example in case.examples:
        for side, ids in (("source", "source_ids"), ("target", "labels")):
            found = [*case.tokens(side, example), SPECIAL_IDS["eos"]]
            assert found == case.ours(example[ids]), example[side]


def test_the_encoder_computes_the_same(case):
    """Attention, feed-forward layers, experts and positions, through all layers."""
    first = case.golden["examples"][0]
    source = tree.map_leaves(tf.constant, case.batch(first)["source"])
    outputs, _ = case.model.encode(case.theta, source, Context())
    expected = np.array(first["encoder_output"])
    np.testing.assert_allclose(outputs[0, : len(expected), :4], expected, rtol=0, atol=TOLERANCE)


def test_targets_have_the_same_log_probabilities(case):
    """Of each label of the first example, and all of each other example together."""

    def nats(batch: dict) -> float:
        _, metrics = case.model.loss(case.theta, tree.map_leaves(tf.constant, batch), Context())
        return float(metrics["cross_entropy"] * metrics["tokens"])

    first, *others = case.examples
    batch, sums = case.batch(first), [0.0]
    segments = batch["target"]["segment_ids"].copy()
    for end in range(1, len(first["labels"]) + 1):
        batch["target"]["segment_ids"] = segments * (np.arange(segments.shape[1]) < end)
        sums.append(nats(batch))
    np.testing.assert_allclose(-np.diff(sums), first["log_probabilities"], rtol=0, atol=TOLERANCE)
    for example in others:
        expected = -sum(example["log_probabilities"])
        assert nats(case.batch(example)) == pytest.approx(expected, abs=TOLERANCE * len(example["labels"]))


@pytest.mark.parametrize("devices", [1, 2])
def test_the_search_finds_the_same(case, devices):
    """Hypotheses and their scores, of all sources with one target language, on one device and on two."""
    examples = case.examples
    if case.forces_first:
        examples = [each for each in examples if each["target_language"] == LANGUAGE]
    examples = examples[: len(examples) // devices * devices]
    config = dataclasses.replace(case.experiment, mesh=DeviceMesh((devices,)), decoding_batch=len(examples))
    batch = case.batch(*examples)["source"]
    config = dataclasses.replace(config, input=dataclasses.replace(config.texts, source_length=LENGTH))
    is_marian = case.golden["config"]["model_type"] == "marian"
    # Without a length penalty, and with the forbidden tokens of the golden values: Marian's padding.
    search = dataclasses.replace(
        config.search,
        beam_size=case.golden["facts"]["beams"],
        max_length=case.golden["facts"]["max_new_tokens"],
        length_alpha=0.0,
        forbidden_ids=(SPECIAL_IDS["pad"],) if is_marian else (),
    )
    config = dataclasses.replace(config, search=search)
    decoding = Engine(devices, "cpu").decoding(config.steps, config.decoding_specs(), search)
    decoding.load(tree.unflatten(case.found.theta))
    if case.forces_first:
        batch["first_ids"] = np.full(len(examples), case.tokens("target", examples[0])[0], np.int32)
    found = {name: np.asarray(value) for name, value in decoding.decode(batch).items()}
    same, compared = 0, 0
    for row, example in enumerate(examples):
        own = {
            tuple(found["ids"][row, k, : found["lengths"][row, k]].tolist()): float(found["scores"][row, k])
            for k in range(search.beam_size)
        }
        expected = example["renormalized_hypotheses" if is_marian else "hypotheses"]
        theirs = {tuple(case.ours(each["ids"][1:])): each["score"] for each in expected if each["ends"]}
        for ids, score in theirs.items():
            if score > min(own.values()) + TOLERANCE * LENGTH:
                assert own[ids] == pytest.approx(score, abs=TOLERANCE * len(ids)), example["source"]
                compared += 1
        # Hugging Face's lets only the best K of 2K candidates of a step end, so ours may be better.
        same += tuple(case.ours(expected[0]["ids"][1:])) in own
        assert max(own.values()) > max(theirs.values(), default=-np.inf) - TOLERANCE * LENGTH
    assert same >= len(examples) - 1 and compared >= len(examples)


@pytest.fixture
def directory(tmp_path):
    hugging_face_models.write(tmp_path / "model", "nllb_moe")
    return tmp_path / "model"


def test_experts_are_scaled_by_the_default_of_hugging_face(directory):
    """A config.json may lack the field."""
    expected = hugging_face.read(directory, "--input").theta
    config = json.loads((directory / "config.json").read_text())
    assert config.pop("moe_token_dropout") == 0.2
    (directory / "config.json").write_text(json.dumps(config))
    for path, value in hugging_face.read(directory, "--input").theta.items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": ["m2m_100"]}, "config.json has model_type .'m2m_100'.; expected one of m2m_100"),
        ({"model_type": "t6"}, "config.json has model_type 't6'; expected one of m2m_100 .*, t5 .MADLAD-400., switch"),
        ({"activation_function": "gelu"}, "activation_function 'gelu'; only 'relu' can be imported"),
        ({"scale_embedding": False}, "scale_embedding False; only True can be imported"),
        ({"d_model": 30}, "d_model 30; expected a multiple of the 4 heads"),
        ({"d_model": "32"}, "d_model '32'; expected a whole number from 1"),
        ({"encoder_layers": 0}, "encoder_layers 0; expected a whole number from 1"),
        ({"decoder_ffn_dim": 128}, "decoder_ffn_dim 128; expected 64, as encoder_ffn_dim"),
        ({"moe_token_dropout": 1}, "moe_token_dropout 1; expected a share below 1"),
        ({"encoder_sparse_step": 3}, "encoder_sparse_step 3; expected a divisor of the 4 layers"),
        ({"vocab_size": 10**7}, "by config.json, the model has 320,136,448 weights, but .* only 152,640; copy"),
        ({"vocab_size": 10**9}, "vocab_size 10+; expected a whole number from 1 to 16,777,216"),
        (
            {"encoder_layers": 10**7, "encoder_sparse_step": 10**7},
            "encoder_layers 10+; expected a whole number from 1 to 1,000",
        ),
        ({"vocab_size": 502}, "the tokenizer has 503 pieces, but config.json has vocab_size 502, so .* two models"),
        (
            {"num_experts": 8},
            r"router.classifier.weight has the shape \[4, 32\]; by config.json, \[8, 32\] is expected",
        ),
        ({"d_model": 64}, r"k_proj.weight has the shape \[32, 32\]; by config.json, \[64, 64\] is expected"),
        (
            {"encoder_layers": 6},
            "there is no tensor model.encoder.layers.4.ff_layer_norm.bias, which config.json requires",
        ),
        (
            {"decoder_layers": 2},
            r"model.decoder.layers.2.cross_attention.k_proj.bias', and the files have \d+ such tensors",
        ),
    ],
)
def test_a_model_of_another_kind_is_an_error(directory, changes, message):
    """One that our layers do not compute, or of other dimensions than the weights."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=message):
        hugging_face.read(directory, f"--input={directory}")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"normalize_before": True}, "normalize_before True; only False can be imported"),
        ({"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings False; only True can be"),
        ({"activation_function": "gelu"}, "activation_function 'gelu'; expected one of relu, swish, silu"),
        ({"activation_function": ["swish"]}, "activation_function .'swish'.; expected one of relu, swish, silu"),
        ({"vocab_size": 10**9}, "vocab_size 10+; expected a whole number from 1 to 16,777,216"),
        ({"decoder_start_token_id": 0}, "decoder_start_token_id 0; expected 162, that of vocab.json"),
        ({"eos_token_id": 7}, "eos_token_id 7; expected 0, that of vocab.json"),
        ({"vocab_size": 162}, "has 163 pieces, .* vocab_size 162"),
    ],
)
def test_a_model_of_marian_that_is_another_kind_is_an_error(tmp_path, changes, message):
    write_changed(tmp_path, "marian", changes)
    with pytest.raises(UserError, match=message):
        hugging_face.read(tmp_path, "--input")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"feed_forward_proj": "relu"}, "feed_forward_proj 'relu'; only 'gated-gelu' can be imported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True; only False can be imported"),
        ({"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon 1e-05; only 1e-06 can be imported"),
        ({"relative_attention_num_buckets": 31}, "is of no model that can be imported: .*relative_buckets is 31"),
        ({"relative_attention_num_buckets": 10**9}, "buckets 10+; expected a whole number from 1 to"),
        (
            {"num_decoder_layers": 4},
            "there is no tensor decoder.block.2.layer.1.EncDecAttention.k.weight, which config",
        ),
        ({"d_kv": 8}, r"EncDecAttention.k.weight has the shape \[64, 32\]; by config.json, \[32, 32\] is expected"),
        ({"decoder_start_token_id": 1}, "decoder_start_token_id 1; expected 0, that of spiece.model"),
        ({"vocab_size": 299}, "the tokenizer has 300 pieces, but config.json has vocab_size 299, so they are of two"),
        (
            {"tie_word_embeddings": None},
            "config.json lacks a field, so it has tie_word_embeddings True; only False can",
        ),
        (
            {"feed_forward_proj": None},
            "config.json lacks a field, so it has feed_forward_proj 'relu'; only 'gated-gelu'",
        ),
    ],
)
def test_a_model_of_t5_that_is_another_kind_is_an_error(tmp_path, changes, message):
    hugging_face_models.write(tmp_path, "madlad")
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    kept = {field: value for field, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(UserError, match=message):
        hugging_face.read(tmp_path, "--input")


def test_a_decoder_has_as_many_layers_as_the_encoder_if_nothing_else_is_said(tmp_path):
    """As Hugging Face's library reads null."""
    write_changed(tmp_path, "madlad", {"num_decoder_layers": None})
    assert hugging_face.describe(tmp_path, "it").model.stack_layers == {"encoder": 3, "decoder": 3}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"feed_forward_proj": "gated-gelu"}, "feed_forward_proj 'gated-gelu'; only 'relu' can be imported"),
        ({"router_bias": True}, "router_bias True; only False can be imported"),
        ({"num_sparse_encoder_layers": 3}, "num_sparse_encoder_layers 3; expected a divisor of the 4 layers"),
        ({"num_sparse_encoder_layers": None}, "num_sparse_encoder_layers None; expected a divisor of the 4 layers"),
        ({"num_sparse_decoder_layers": 0}, "num_sparse_decoder_layers 0; expected a whole number from 1 to 1,000"),
        ({"num_sparse_encoder_layers": 4}, "there is no tensor encoder.block.0.layer.1.mlp.router.classifier.weight"),
        (
            {"num_sparse_encoder_layers": 1},
            "there is no tensor encoder.block.3.layer.1.mlp.wi.weight, which config.json",
        ),
        ({"num_experts": 8}, r"mlp.router.classifier.weight has the shape \[4, 32\]; by config.json, \[8, 32\] is exp"),
        ({"decoder_start_token_id": 2}, "decoder_start_token_id 2; expected 0, that of spiece.model"),
        ({"vocab_size": 309}, "the tokenizer has 310 pieces, but config.json has vocab_size 309, so they are of two"),
    ],
)
def test_a_switch_transformer_that_is_another_kind_is_an_error(tmp_path, changes, message):
    write_changed(tmp_path, "switch", changes)
    with pytest.raises(UserError, match=message):
        hugging_face.read(tmp_path, "--input")


def test_experts_are_in_the_layers_of_the_sparse_step(tmp_path):
    """The second layer, and every third one from there on."""
    changes = {"num_layers": 6, "num_sparse_encoder_layers": 2, "num_decoder_layers": 3, "num_sparse_decoder_layers": 3}
    write_changed(tmp_path, "switch", changes)
    model = hugging_face.describe(tmp_path, "it").model
    assert model.layer_patterns == {"encoder": ("dense", "moe", "dense"), "decoder": ("moe",)}


@pytest.mark.parametrize("name", ["madlad", "switch"])
def test_distances_have_the_buckets_of_hugging_faces_code(name):
    """In the encoder and in the decoder, up to beyond the largest distance that counts."""
    facts = json.loads((hugging_face_models.TOKENIZERS / f"{name}.json").read_text())["facts"]
    table = {"relative_bias": tf.range(32, dtype=tf.float32)[:, None]}
    for side, expected in facts["buckets"].items():
        bias = RelativeBias(model_dim=1, num_heads=1, buckets=32, distance=128, bidirectional=side == "encoder")
        found = bias(table, tf.constant([150]), tf.range(301), Context())[0, 0].numpy()
        last = 301 if side == "encoder" else 151  # a decoder sees no key after the query
        assert found[:last].tolist() == expected[:last]


def test_other_rows_of_the_table_are_never_predicted(tmp_path):
    """Of more rows than pieces, as some files of T5's class have, each has a place, and its own value."""
    write_changed(tmp_path, "madlad", {"vocab_size": 304})
    weights = load_file(tmp_path / "model.safetensors")
    for name in ("shared.weight", "lm_head.weight"):
        weights[name] = np.concatenate([weights[name], np.full((4, 32), 3, np.float32)])
    save_file(weights, tmp_path / "model.safetensors")
    found = hugging_face.read(tmp_path, "it")
    assert found.theta["embedding/table"].shape == (305, 32) and (found.theta["softmax/projection"][:, 301:] == 3).all()


def test_special_pieces_of_marian_may_have_any_ids(tmp_path):
    """As in the large models of Opus-MT: each piece has the same embedding and bias as with the usual ids."""
    hugging_face_models.write(tmp_path / "usual", "marian")
    hugging_face_models.write(tmp_path / "other", "marian")
    vocabulary = json.loads((tmp_path / "usual" / "vocab.json").read_text())
    ids = dict(zip(vocabulary, np.random.default_rng(0).permutation(len(vocabulary)).tolist()))
    order = np.argsort([ids[text] for text in sorted(vocabulary, key=vocabulary.__getitem__)])
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights["model.shared.weight"] = weights["model.shared.weight"][order]
    weights["final_logits_bias"] = weights["final_logits_bias"][:, order]
    save_file(weights, tmp_path / "other" / "model.safetensors")
    (tmp_path / "other" / "vocab.json").write_text(json.dumps(ids))
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    special = {"eos_token_id": ids["</s>"], **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), ids["<pad>"])}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | special))
    usual, other = (hugging_face.read(tmp_path / each, "it") for each in ("usual", "other"))
    for path in ("embedding/table", "softmax/bias"):
        of_pieces = [dict(zip(each.tokenizers["source"].all_pieces, each.theta[path])) for each in (usual, other)]
        assert len(of_pieces[0]) == len(vocabulary) + 1 and of_pieces[0].keys() == of_pieces[1].keys()
        for piece, value in of_pieces[0].items():
            np.testing.assert_array_equal(of_pieces[1][piece], value, err_msg=piece)
    text = "Der Fluss ist kalt."
    pieces = [each.pieces(each.encode([text])[0]) for each in (usual.tokenizers["source"], other.tokenizers["source"])]
    assert pieces[0] == pieces[1]


def test_a_model_of_marian_may_have_relu_and_tables_of_positions(tmp_path):
    """The large ones of Opus-MT have; the tables are computed."""
    write_changed(tmp_path, "marian", {"activation_function": "relu"})
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {
        f"model.{side}.embed_positions.weight": np.zeros((64, 32), np.float32) for side in ("encoder", "decoder")
    }
    save_file(weights, tmp_path / "model.safetensors")
    found = hugging_face.read(tmp_path, "it")
    model = experiments.unchecked(found.name, found.settings).model
    assert isinstance(model, Translation) and model.layer_patterns == dict.fromkeys(("encoder", "decoder"), ("dense",))


@pytest.mark.parametrize(
    "model, name, copy",
    [
        ("nllb", "model.shared.weight", "lm_head.weight"),
        ("madlad", "shared.weight", "decoder.embed_tokens.weight"),  # as the published files
        ("switch", "shared.weight", "lm_head.weight"),
    ],
)
def test_a_copy_of_the_embeddings_stands_for_them(tmp_path, model, name, copy):
    """Some programs write the table that all sides share under one of its other names."""
    hugging_face_models.write(tmp_path / "model", model)
    expected = hugging_face.read(tmp_path / "model", "it").theta
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    weights[copy] = weights.pop(name)
    save_file(weights, file)
    found = hugging_face.read(tmp_path / "model", "it").theta
    assert found.keys() == expected.keys() and all(np.array_equal(found[path], expected[path]) for path in found)
