"""Computes a tiny model's golden values with Hugging Face's own code, and prints them as JSON.

    python -m tools.hugging_face_golden.worker DIRECTORY

DIRECTORY has a model and its tokenizer as `hugging_face_models.write` writes them. `python -m
tools.hugging_face_golden` starts this worker, in the environment of requirements.txt. It shares no code with
lingvo_moe.
"""

# Its packages are in an environment of its own: see __main__.py.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

from tools.hugging_face_golden import families
from tools.hugging_face_golden.families import Family
from tools.hugging_face_golden.sentences import Example

BEAMS, MAX_NEW_TOKENS = 4, 24
_DIGITS = 7
_SIDES = ("encoder", "decoder")
# Of what padding may change, by the order of float32's sums.
_TOLERANCE = 1e-4


def main(arguments: list[str]):
    """Prints the golden values of a directory."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    print(json.dumps(golden(pathlib.Path(arguments[1]))))


def golden(directory: pathlib.Path) -> dict:
    """Returns the golden values of a model; __main__.py describes them."""
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, dtype="float32").eval()
    family = families.of(model)
    tokenizers = _tokenizers(directory)
    encoded = [_encoded(family, tokenizers, example) for example in family.examples]
    values = _teacher_forced(family, model, tokenizers["slow"], encoded)
    hypotheses = _all_hypotheses(model, tokenizers["slow"], encoded)
    return {
        "versions": _versions(),
        "facts": _facts(family, model, tokenizers),
        "weights": _saved_weights(model),
        "tied_names": _tied_names(family, model),
        "positions": _positions(family, model),
        "tokens": tokenizers["slow"].convert_ids_to_tokens(range(len(tokenizers["slow"]))),
        "examples": [
            {**vars(example), **ids, **own, **best}
            for example, ids, own, best in zip(family.examples, encoded, values, hypotheses)
        ],
    }


def _tokenizers(directory: pathlib.Path) -> dict:
    """Returns the directory's tokenizers, `slow` and, if there is such a class, `fast`, which AutoTokenizer prefers."""
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(directory, use_fast=False)
    fast = AutoTokenizer.from_pretrained(directory)
    return {"slow": slow, **({"fast": fast} if fast.is_fast else {})}


def _positions(family: Family, model) -> list[list[float]]:
    """Returns the first rows of the table of positions, which both sides have."""
    rows, others = ([_rounded(row.tolist()) for row in family.positions(model, side)[:5]] for side in _SIDES)
    if rows != others:
        raise ValueError("the encoder and the decoder have different positions")
    return rows


def _encoded(family: Family, tokenizers: dict, example: Example) -> dict:
    """Returns an example's ids: of the slow tokenizer, and those of the fast one where they differ."""
    ids = _ids(family, tokenizers["slow"], example)
    if "fast" in tokenizers:
        others = _ids(family, tokenizers["fast"], example)
        ids |= {f"{name}_fast": other for name, other in others.items() if other != ids[name]}
    return ids


def _ids(family: Family, tokenizer, example: Example) -> dict:
    first = family.choose_languages(tokenizer, example)
    return {
        "source_ids": tokenizer(family.source(example))["input_ids"],
        "labels": tokenizer(text_target=example.target)["input_ids"],
        "forced_bos_token_id": first,
    }


def _padded(tokenizer, rows: list[list[int]]):
    return tokenizer.pad({"input_ids": rows}, return_tensors="pt")


def _teacher_forced(family: Family, model, tokenizer, encoded: list[dict]) -> list[dict]:
    """Returns the log-probabilities of all labels, in one batch with padding, and more of the first example."""
    import torch

    rows = [family.decoder_input(model, ids["labels"]) for ids in encoded]
    source = _padded(tokenizer, [ids["source_ids"] for ids in encoded])
    out = model(**source, decoder_input_ids=_padded(tokenizer, rows)["input_ids"])
    log_probabilities = torch.log_softmax(out.logits, -1)
    results = []
    for index, (row, ids) in enumerate(zip(rows, encoded)):
        own = [log_probabilities[index, place, label].item() for place, label in enumerate(ids["labels"])]
        results.append({"decoder_input_ids": row, "log_probabilities": _rounded(own)})
        _check_equal(own, _alone(model, ids["source_ids"], row, ids["labels"]), "padding changes a log-probability")
    length = len(encoded[0]["source_ids"])
    results[0]["logits"] = [_rounded(row) for row in out.logits[0, :2].tolist()]
    results[0]["encoder_output"] = [_rounded(row) for row in out.encoder_last_hidden_state[0, :length, :4].tolist()]
    return results


def _alone(model, source_ids: list[int], decoder_input: list[int], labels: list[int], excluded=()) -> list[float]:
    """Returns the log-probabilities of labels in a batch of one, without padding, and those of no `excluded` token."""
    import torch

    logits = model(
        input_ids=torch.tensor([source_ids]),
        attention_mask=torch.ones(1, len(source_ids), dtype=torch.long),
        decoder_input_ids=torch.tensor([decoder_input]),
    ).logits[0]
    logits[:, list(excluded)] = -torch.inf
    log_probabilities = torch.log_softmax(logits, -1)
    return [log_probabilities[place, label].item() for place, label in enumerate(labels)]


def _check_equal(values: list[float], others: list[float], what: str):
    gap = max(abs(value - other) for value, other in zip(values, others, strict=True))
    if gap > _TOLERANCE:
        raise ValueError(f"{what} by {gap}")


def _all_hypotheses(model, tokenizer, encoded: list[dict]) -> list[dict]:
    """Returns each example's hypotheses, and those of the scores that generation_config.json asks for, if others."""
    results = [{"hypotheses": best} for best in _hypotheses(model, tokenizer, encoded, renormalized=False)]
    if model.generation_config.renormalize_logits:
        others = _hypotheses(model, tokenizer, encoded, renormalized=True)
        results = [{**own, "renormalized_hypotheses": best} for own, best in zip(results, others)]
    return results


def _hypotheses(model, tokenizer, encoded: list[dict], renormalized: bool) -> list[list[dict]]:
    """Returns the hypotheses of each example, the best first; the examples of a target language are a batch."""
    groups: dict[int | None, list[int]] = {}
    for place, ids in enumerate(encoded):
        groups.setdefault(ids["forced_bos_token_id"], []).append(place)
    results: dict[int, list[dict]] = {}
    for first, batch in groups.items():
        rows = [encoded[place]["source_ids"] for place in batch]
        results |= zip(batch, _search(model, tokenizer, rows, first, renormalized))
    for place, ids in enumerate(encoded):
        (own,) = _search(model, tokenizer, [ids["source_ids"]], ids["forced_bos_token_id"], renormalized)
        if [hypothesis["ids"] for hypothesis in own] != [hypothesis["ids"] for hypothesis in results[place]]:
            raise ValueError(f"padding changes the hypotheses of example {place}")
        for hypothesis in own:
            _check_score(model, ids, hypothesis, renormalized)
    return [results[place] for place in range(len(encoded))]


def _check_score(model, ids: dict, hypothesis: dict, renormalized: bool):
    """Checks that a score is the sum of log-probabilities; forbidden tokens have their share, unless renormalised."""
    tokens = hypothesis["ids"]
    excluded = [token for (token,) in model.generation_config.bad_words_ids or ()] if renormalized else ()
    terms = _alone(model, ids["source_ids"], tokens[:-1], tokens[1:], excluded)
    # The log-probability of a token that is forced does not count.
    counted = terms if ids["forced_bos_token_id"] is None else terms[1:]
    _check_equal([sum(counted)], [hypothesis["score"]], "a score is not the sum of log-probabilities; it differs")


def _search(model, tokenizer, rows: list[list[int]], first: int | None, renormalized: bool) -> list[list[dict]]:
    source = _padded(tokenizer, rows)
    out = model.generate(
        **source,
        num_beams=BEAMS,
        num_return_sequences=BEAMS,
        max_new_tokens=MAX_NEW_TOKENS,
        length_penalty=0.0,
        early_stopping=False,
        do_sample=False,
        forced_bos_token_id=first,
        forced_eos_token_id=None,  # or every hypothesis would end
        renormalize_logits=renormalized,
        output_scores=True,
        return_dict_in_generate=True,
    )
    flat = [
        _hypothesis(model, tokenizer, ids, score)
        for ids, score in zip(out.sequences.tolist(), out.sequences_scores.tolist())
    ]
    return [flat[start : start + BEAMS] for start in range(0, len(flat), BEAMS)]


def _hypothesis(model, tokenizer, ids: list[int], score: float) -> dict:
    """Returns a hypothesis without the padding behind it; `ids` begin with the token that starts the decoder."""
    eos = model.config.eos_token_id
    ends = eos in ids[1:]
    kept = ids[: ids.index(eos, 1) + 1] if ends else ids
    text = tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {"ids": kept, "score": _rounded([score])[0], "ends": ends, "text": text}


def _rounded(values: list[float]) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in values]


def _versions() -> dict:
    import sentencepiece
    import tokenizers
    import torch
    import transformers

    packages = (torch, transformers, tokenizers, sentencepiece)
    return {package.__name__: package.__version__ for package in packages}


def _facts(family: Family, model, tokenizers: dict) -> dict:
    slow = tokenizers["slow"]
    languages = [token for token in slow.additional_special_tokens if token in slow.get_vocab()]
    return {
        "class": type(model).__name__,
        "attention": model.config._attn_implementation,
        "embedding_scale": family.embedding_scale(model),
        "vocabulary": family.shared(model).num_embeddings,
        "layer_norm_epsilon": family.epsilon(model),
        "tokenizers": {kind: type(tokenizer).__name__ for kind, tokenizer in tokenizers.items()},
        "tokens": {kind: len(tokenizer) for kind, tokenizer in tokenizers.items()},
        "special_ids": {token: slow.convert_tokens_to_ids(token) for token in _special_tokens(slow)},
        "languages": {token: slow.convert_tokens_to_ids(token) for token in languages},
        "beams": BEAMS,
        "max_new_tokens": MAX_NEW_TOKENS,
        **family.facts(model, slow),
    }


def _special_tokens(tokenizer) -> list[str]:
    names = ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token")
    tokens = [getattr(tokenizer, name) for name in names]
    return [token for token in tokens if token]


def _saved_weights(model) -> dict:
    """Returns the shapes of the weights that `save_pretrained` writes."""
    import safetensors.torch

    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        weights = safetensors.torch.load_file(pathlib.Path(directory) / "model.safetensors")
    own = model.state_dict()
    if any(own[name].shape != weight.shape for name, weight in weights.items()):
        raise ValueError("save_pretrained writes other shapes than the model has")
    return {name: list(weight.shape) for name, weight in sorted(weights.items())}


def _tied_names(family: Family, model) -> list[str]:
    """Returns the names of the model's own state by which it has the shared table, and which files lack.

    Files may lack positions, too, which are computed.
    """
    saved = _saved_weights(model)
    own = model.state_dict()
    names = sorted(set(own) - set(saved) - set(model._keys_to_ignore_on_save or ()))
    if any(own[name].data_ptr() != family.shared(model).weight.data_ptr() for name in names):
        raise ValueError(f"not all of {names} are tied to the shared table")
    return names


if __name__ == "__main__":
    main(sys.argv)
