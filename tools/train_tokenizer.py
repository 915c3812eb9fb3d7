"""Trains the two SentencePiece tokenizers of a corpus: source.model (all languages) and target.model (English).

  python -m tools.train_tokenizer --corpus=corpus --output=tokenizer --source_vocabulary=8000 --target_vocabulary=4000

They are trained on the sentences that a training stream with this temperature draws first (`lingvo_moe.data.mixture`), so a
small language has the weight in the vocabulary that it has in training. Both are unigram models over nmt_nfkc text. The
source model covers 99.95 % of the characters, which keeps the frequent part of the Chinese and Japanese scripts, and
spells the rest in bytes: nothing is unknown. The same corpus and flags give the same bytes; a tokenizer that is there already
is left as it is. Takes half a minute for the quickstart corpus.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
import sys
from collections import Counter
from typing import Any

import numpy as np
import sentencepiece
from absl import flags

from lingvo_moe import cli, progress
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.mixture import Mixture
from lingvo_moe.data.tokenizer import MANIFEST, SIDES, SPECIAL_IDS, Tokenizers, read_manifest, sha256
from lingvo_moe.errors import UserError

FLAGS = flags.FlagValues()
flags.DEFINE_string("corpus", None, "The directory of the corpus, as tools.build_corpus made it.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "The directory to make.", flag_values=FLAGS)
flags.DEFINE_integer("source_vocabulary", 8000, "Pieces of source.model, 256 bytes among them.", lower_bound=300, flag_values=FLAGS)
flags.DEFINE_integer("target_vocabulary", 4000, "Pieces of target.model.", lower_bound=50, flag_values=FLAGS)
flags.DEFINE_float("temperature", 5.0, "Of the mixture of languages: 1 as in the corpus, inf all equal.", flag_values=FLAGS)
flags.DEFINE_integer("max_sentences", 200_000, "How many sentence pairs to draw, repetitions included.", lower_bound=1,
                     flag_values=FLAGS)
flags.DEFINE_bool("force", False, "Replace a tokenizer of another corpus or of other flags.", flag_values=FLAGS)

# SentencePiece adds up in the order of its threads, and writes their number into the model: another number, other bytes.
_THREADS = 2
_SIDE_OPTIONS = {
    "source": {"character_coverage": 0.9995, "byte_fallback": True},
    "target": {"character_coverage": 0.99999},
}


def train(corpus: Corpus, output: pathlib.Path, vocabulary: dict[str, int], temperature: float, max_sentences: int,
          force: bool = False) -> tuple[Tokenizers, bool]:
    """Trains and writes the tokenizers, unless they are there.

    Args:
      corpus: its training split is read.
      output: the directory to make.
      vocabulary: the wanted number of pieces, by side.
      temperature: of the mixture of languages.
      max_sentences: how many pairs to draw from the mixture.
      force: whether to replace a tokenizer of another corpus or of other settings.

    Returns:
      The tokenizers, and whether they are new.

    Raises:
      UserError: a vocabulary too small for the characters of the corpus, or another tokenizer in the way.
    """
    _check_output(output)
    settings = {"corpus": corpus.fingerprint, "vocabulary": vocabulary, "temperature": str(temperature),
                "max_sentences": max_sentences, "sentencepiece": sentencepiece.__version__}
    if _is_up_to_date(output, settings, force):
        return Tokenizers.load(output), False
    sentences = _draw(corpus, temperature, max_sentences)
    files, manifest = {}, {"ids": SPECIAL_IDS, "settings": settings}
    for side in SIDES:
        model = _train_side(side, sentences[side], vocabulary[side])
        size = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
        files[f"{side}.model"] = model
        manifest[side] = {"file": f"{side}.model", "vocabulary_size": size, "sha256": sha256(model)}
    files[MANIFEST] = (json.dumps(manifest, indent=1) + "\n").encode()
    output.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():  # the manifest last: until then its checksums tell that the models are not its own
        _write(output / name, data)
    return Tokenizers.load(output), True


def _check_output(output: pathlib.Path):
    """Raises UserError if `output` is there and is anything but a directory of tokenizer files."""
    ours = {MANIFEST, *(f"{side}.model" for side in SIDES)}
    if output.exists() and not (output.is_dir() and {entry.name for entry in output.iterdir()} <= ours):
        raise UserError(f"--output={output} holds something other than a tokenizer and is left alone; name another directory")


def _is_up_to_date(output: pathlib.Path, settings: dict[str, Any], force: bool) -> bool:
    """Whether `output` holds, undamaged, what `settings` would make; raises UserError if it holds something else."""
    if not (output / MANIFEST).exists():
        return False
    try:
        found = read_manifest(output).get("settings")
    except UserError:
        found = None
    if found != settings:
        if force:
            return False
        raise UserError(f"--output={output} holds a tokenizer of another corpus or of other flags, and models may depend on it; "
                        "name another directory, or replace it with --force")
    try:
        Tokenizers.load(output)
    except UserError:
        return False  # an interrupted run or a damaged file: training again gives the same bytes
    return True


def _draw(corpus: Corpus, temperature: float, count: int) -> dict[str, Counter[str]]:
    """Returns how often each sentence comes in the first `count` examples of the training stream, by side."""
    languages = corpus.languages_of("train")
    drawn = np.stack(Mixture(tuple(corpus.count("train", language) for language in languages), temperature).draw(np.arange(count)))
    pairs, repetitions = np.unique(drawn, axis=1, return_counts=True)
    sentences: dict[str, Counter[str]] = {side: Counter() for side in SIDES}
    for (language, index), times in progress.track(list(zip(pairs.T.tolist(), repetitions.tolist(), strict=True)),
                                                   "reading the corpus", unit="pairs"):
        for side, text in zip(SIDES, corpus.pairs("train", languages[language])[index], strict=True):
            sentences[side][text] += times
    return sentences


def _train_side(side: str, sentences: Counter[str], vocabulary: int) -> bytes:
    """Returns the bytes of a SentencePiece model with at most `vocabulary` pieces."""
    print(f"training {side}.model on {len(sentences)} different sentences", file=sys.stderr, flush=True)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(f"{text}\t{times}" for text, times in sentences.items()), input_format="tsv",
            model_writer=model, model_type="unigram", vocab_size=vocabulary,
            hard_vocab_limit=False,  # a small corpus has fewer pieces to give; with enough of them the limit is met exactly
            **{f"{name}_id": number for name, number in SPECIAL_IDS.items()}, **_SIDE_OPTIONS[side],
            num_threads=_THREADS, minloglevel=2)
    except RuntimeError as error:
        needed = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
        if not needed:
            raise
        raise UserError(f"--{side}_vocabulary={vocabulary} is too small: the characters of this corpus, the bytes and the special "
                        f"ids alone are {needed[1]} pieces; pass a good deal more than that") from None
    return model.getvalue()


def _write(path: pathlib.Path, data: bytes):
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        error.filename = str(path)  # the system names the file only when opening it fails
        raise
    finally:
        partial.unlink(missing_ok=True)


def main(argv: list[str]):
    """Trains what the flags describe and says what came of it."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; the corpus is named with --corpus={argv[1]}")
    for name in ("corpus", "output"):
        if not FLAGS[name].value:
            raise UserError(f"--{name}=DIR is missing")
    wanted = {side: FLAGS[f"{side}_vocabulary"].value for side in SIDES}
    output = pathlib.Path(FLAGS.output)
    tokenizers, is_new = train(Corpus.open(FLAGS.corpus), output, wanted, FLAGS.temperature, FLAGS.max_sentences, FLAGS.force)
    sizes = {side: getattr(tokenizers, side).vocabulary_size for side in SIDES}
    for side in SIDES:
        if sizes[side] < wanted[side]:
            print(f"note: {side}.model has {sizes[side]} pieces, not {wanted[side]}: the corpus has no more to give. A model's "
                  f"vocabulary must be at least {sizes[side]}.")
    print(f"{output} {'trained' if is_new else 'is up to date'}: {sizes['source']} source and {sizes['target']} target pieces.")


if __name__ == "__main__":
    cli.run(main, FLAGS)
