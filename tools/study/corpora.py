"""The corpora of a study: some languages of a corpus, with a part of their training pairs."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Mapping

from lingvo_moe.data.corpora.corpus_writer import OutputDirectory, Pair
from lingvo_moe.data.corpus import SPLITS, Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.utils.hashes import sha256

_LEFT_OUT = "left out by the study"
# What is rewritten, because it describes the new corpus.
_OWN = ("format", "version", "fingerprint", "inputs_identity", "pairs", "languages", "languages_without_pairs")


def restrict(
    corpus: Corpus,
    limits: Mapping[str, int],
    directory: pathlib.Path,
    remedy: str = "Name a new --directory for this study.",
) -> Corpus:
    """Writes a corpus of some languages, unless it is there; held-out pairs are all there, so splits stay as they are.

    Args:
      corpus: to take pairs from.
      limits: the training pairs to take of each language at most, evenly spaced (see `Corpus.sample`); 0 for all.
      directory: to write to.
      remedy: the end of the error where the directory has another corpus.

    Raises:
      UserError: a language that the corpus lacks, or that has no pairs of a split; or the directory has another corpus.
    """
    identity = sha256(repr((corpus.fingerprint, sorted(limits.items()))))
    output = OutputDirectory(directory, identity)
    if output.is_up_to_date():
        return Corpus.open(directory)
    if directory.exists():
        raise UserError(f"{directory} has the pairs of another corpus, or of other languages. {remedy}")
    with output.atomic_writer(force=False) as writer:
        for language in sorted(limits):
            pairs: dict[str, list[Pair]] = {split: list(corpus.pairs(split, language)) for split in SPLITS}
            pairs["train"] = list(corpus.sample("train", language, limits[language] or None))
            facts = corpus.manifest["languages"][language]
            left_out = {_LEFT_OUT: corpus.count("train", language) - len(pairs["train"])}
            writer.add(language, pairs, facts["read"], collections.Counter(facts["rejected"] | left_out))
        kept = {name: value for name, value in corpus.manifest.items() if name not in _OWN}
        writer.finish({**kept, "inputs_identity": identity})
    return Corpus.open(directory)
