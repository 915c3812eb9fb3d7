"""What training starts from: the processes of a run compare it, and the error names the cause."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib

import pytest

from lingvo_moe.data.corpora import corpus_builder
from lingvo_moe.data.vocabularies import tokenizer_trainer
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.testing import experiments as tiny
from lingvo_moe.training.start import Start


class _Recording(ProcessGroup):
    """Keeps the settings that processes are asked to agree on."""

    def __init__(self):
        self.asked: dict[str, str] = {}

    def require_same(self, settings):
        """See the base class."""
        self.asked |= settings


def _asked(data: tiny.Data, logdir: pathlib.Path, *changes: str) -> dict[str, str]:
    group = _Recording()
    start = Start(tiny.MODEL, tiny.tiny(data, *changes), logdir, group, None, {})
    train_input, _ = start.open_data()
    start.check_processes(train_input)
    return group.asked


@pytest.mark.slow
def test_settings_that_decide_the_data_are_compared_before_the_hashes_of_the_data(data, tmp_path):
    """The first difference is reported: of another seed, the hash of the data would not tell the cause."""
    texts = tmp_path / "texts"
    texts.mkdir()
    english = [" ".join(words) for words in itertools.islice(itertools.permutations(tiny.WORDS, 4), 0, 900_000, 3000)]
    (texts / "de.tsv").write_text("".join(f"{line[::-1]}\t{line}\n" for line in english), encoding="utf-8")
    corpus, _ = corpus_builder.build("none", [texts], tmp_path / "corpus")
    tokenizer_trainer.train(corpus, tmp_path / "tokenizers", {"source": 400, "target": 240}, 5.0, 5000)
    other_tokenizers = dataclasses.replace(data, tokenizers=tmp_path / "tokenizers")
    other_corpus = dataclasses.replace(data, corpus=tmp_path / "corpus")
    ours = _asked(data, tmp_path / "log")
    for theirs, named in (
        (_asked(data, tmp_path / "log", "input.seed=1"), "input.seed"),
        (_asked(data, tmp_path / "log", "input.temperature=2"), "input.temperature"),
        (_asked(other_tokenizers, tmp_path / "log"), "the hash of --tokenizers"),
        (_asked(other_corpus, tmp_path / "log"), "the hash of --corpus"),
    ):
        assert next(key for key in ours | theirs if ours.get(key) != theirs.get(key)) == named
