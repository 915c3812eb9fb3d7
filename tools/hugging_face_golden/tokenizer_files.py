"""Writes the tokenizers' files of the tiny models as `save_pretrained` does: NLLB's and M2M-100's.

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

from tools.hugging_face_golden import sentences

_PIECES = 300
# Pieces of M2M-100's SentencePiece model that its vocab.json lacks: letters, whose words have an unknown token.
_NOT_IN_VOCABULARY = ("z", "ж")


def main(arguments: list[str]):
    """Writes DIRECTORY/nllb and DIRECTORY/m2m."""
    directory = pathlib.Path(arguments[1])
    model = _train()
    for name, write in {"nllb": _write_nllb, "m2m": _write_m2m}.items():
        (directory / name).mkdir(parents=True, exist_ok=True)
        file = directory / name / "sentencepiece.bpe.model"
        file.write_bytes(model)
        write(file)


def _train() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences.TRAINING),
        model_writer=model,
        model_type="bpe",
        vocab_size=_PIECES,
        character_coverage=1.0,
        normalization_rule_name="identity",
        minloglevel=1,
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
    import sentencepiece
    import transformers
    from transformers.models.m2m_100 import tokenization_m2m_100

    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    pieces = [processor.IdToPiece(index) for index in range(3, len(processor))]
    pieces = [piece for piece in pieces if piece not in _NOT_IN_VOCABULARY]
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


def _minify(directory: pathlib.Path):
    for file in directory.glob("*.json"):
        values = json.loads(file.read_text(encoding="utf-8"))
        text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        file.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv)
