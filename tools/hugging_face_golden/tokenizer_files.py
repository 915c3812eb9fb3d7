"""Writes the tokenizers' files of the tiny models as the Hub has them.

    python -m tools.hugging_face_golden.tokenizer_files DIRECTORY

`python -m tools.hugging_face_golden --tokenizers` starts it.
"""

# Its packages are in an environment of its own: see __main__.py.
# pyright: reportMissingImports=false

from __future__ import annotations

import io
import json
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from tools.hugging_face_golden import sentences

_PIECES = 300
# Pieces of M2M-100's SentencePiece model that its vocab.json lacks: letters, whose words have an unknown token.
_NOT_IN_VOCABULARY = ("z", "ж")
# Marian's texts and number of pieces by side. The sides share some pieces; these sentences have not many more.
_MARIAN_PIECES = {"source": (sentences.GERMAN, 112), "target": (sentences.ENGLISH, 100)}
# A letter and a longer piece of source.spm that Marian's vocab.json lacks.
_NOT_IN_MARIAN_VOCABULARY = ("ß", "regnet")
# Marian's models have nmt_nfkc, whose table is 240 kB; these are four of its rules.
_RULES = "00A0\t0020\n2026\t002E 002E 002E\nFB01\t0066 0069\n0061 0308\t00E4\n"


def main(arguments: list[str]):
    """Writes the directories of all tokenizers below one."""
    directory = pathlib.Path(arguments[1])
    for name in ("nllb", "m2m", "marian", "madlad", "switch"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    model = _train(sentences.TRAINING, _PIECES, model_type="bpe", normalization_rule_name="identity")
    for name, write in {"nllb": _write_nllb, "m2m": _write_m2m}.items():
        file = directory / name / "sentencepiece.bpe.model"
        file.write_bytes(model)
        write(file)
    _write_marian(directory / "marian")
    _write_madlad(directory / "madlad")
    _write_switch(directory / "switch")


def _train(texts: Iterable[str], pieces: int, **settings: Any) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=pieces,
        character_coverage=1.0,
        minloglevel=1,
        **settings,
    )
    return model.getvalue()


def _write_nllb(file: pathlib.Path):
    import transformers
    from transformers.models.nllb import tokenization_nllb

    # As in the files of the Hub, the languages follow the pieces, and <mask> them. A tokenizer that is made without ids
    # has <mask> before the languages in this version of Transformers.
    codes = tokenization_nllb.FAIRSEQ_LANGUAGE_CODES
    tokens = [transformers.AddedToken(code, normalized=False, special=True) for code in codes]
    tokens.append(transformers.AddedToken("<mask>", normalized=True, lstrip=True, special=True))
    ids = {_PIECES + 1 + index: token for index, token in enumerate(tokens)}
    transformers.NllbTokenizer(str(file), added_tokens_decoder=ids).save_pretrained(file.parent)
    # Converts the slow tokenizer just written and adds tokenizer.json; the other files stay the slow tokenizer's.
    fast = transformers.NllbTokenizerFast.from_pretrained(file.parent, from_slow=True)
    fast.backend_tokenizer.save(str(file.parent / "tokenizer.json"), pretty=False)
    _minify(file.parent)


def _write_m2m(file: pathlib.Path):
    import transformers
    from transformers.models.m2m_100 import tokenization_m2m_100

    pieces = [piece for piece in _pieces(file.read_bytes()) if piece not in _NOT_IN_VOCABULARY]
    random.Random(0).shuffle(pieces)
    names = ["<s>", "<pad>", "</s>", "<unk>", *pieces]
    vocabulary = file.parent / "vocab.json"
    vocabulary.write_text(json.dumps({name: index for index, name in enumerate(names)}), encoding="utf-8")
    languages = tokenization_m2m_100.FAIRSEQ_LANGUAGE_CODES["m2m100"]
    tokenizer = transformers.M2M100Tokenizer(
        str(vocabulary), str(file), additional_special_tokens=[f"__{language}__" for language in languages]
    )
    tokenizer.save_pretrained(file.parent)
    _minify(file.parent)


def _write_marian(directory: pathlib.Path):
    """Writes the files of the Hub's models, which are older than `save_pretrained` of this version."""
    union: dict[str, None] = {}
    for side, (texts, count) in _MARIAN_PIECES.items():
        model = _train_unigrams(texts, count)
        (directory / f"{side}.spm").write_bytes(model)
        union |= dict.fromkeys(_pieces(model))
    pieces = [piece for piece in union if piece not in _NOT_IN_MARIAN_VOCABULARY]
    random.Random(0).shuffle(pieces)
    names = ["</s>", "<unk>", *pieces, "<pad>"]
    _write_json(directory / "vocab.json", {name: index for index, name in enumerate(names)})
    _write_json(directory / "tokenizer_config.json", {"target_lang": "en", "source_lang": "de"})


def _write_madlad(directory: pathlib.Path):
    """Writes the files of the Hub's models."""
    import transformers

    languages = [f"<2{language}>" for language in sentences.SHORT_NAMES.values()]
    settings = {"user_defined_symbols": languages, "remove_extra_whitespaces": False}
    model = _train_unigrams(sentences.TRAINING, _PIECES, **settings)
    file = directory / "spiece.model"
    file.write_bytes(model)
    ends = {"eos_token": "</s>", "pad_token": "<s>", "unk_token": "<unk>"}
    transformers.T5Tokenizer(str(file), extra_ids=0, legacy=False, **ends).save_pretrained(directory)
    _minify(directory)


def _write_switch(directory: pathlib.Path):
    """Writes the files of the Hub's models, with ten sentinels instead of a hundred."""
    import transformers

    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    file = directory / "spiece.model"
    file.write_bytes(_train_unigrams(sentences.TRAINING, _PIECES, **ids))
    transformers.T5Tokenizer(str(file), extra_ids=10, legacy=True).save_pretrained(directory)
    _minify(directory)


def _train_unigrams(texts: Iterable[str], pieces: int, **settings: Any) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.write(_RULES)
        rules.flush()
        # With one thread, for the order of sums.
        rule = {"normalization_rule_tsv": rules.name}
        model = _train(texts, pieces, model_type="unigram", num_threads=1, **rule, **settings)
    messages: Any = sentencepiece_model_pb2  # protobuf makes its classes when it is imported
    proto = messages.ModelProto.FromString(model)
    proto.normalizer_spec.ClearField("normalization_rule_tsv")  # the name of the temporary file
    kinds = messages.ModelProto.SentencePiece.Type
    for piece in proto.pieces:
        if piece.type == kinds.USER_DEFINED:
            piece.type = kinds.NORMAL  # as MADLAD-400's languages, with the score 0
    return proto.SerializeToString(deterministic=True)


def _pieces(model: bytes) -> list[str]:
    """Returns a SentencePiece model's pieces without its special ones."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.IdToPiece(index) for index in range(3, len(processor))]


def _write_json(file: pathlib.Path, values: dict):
    file.write_text(json.dumps(values, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def _minify(directory: pathlib.Path):
    for file in directory.glob("*.json"):
        _write_json(file, json.loads(file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(sys.argv)
