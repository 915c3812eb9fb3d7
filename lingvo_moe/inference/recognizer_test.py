"""The error rates of a speech model are of its transcripts: by voice, of groups of voices, and beside the baseline."""

from __future__ import annotations

import pytest

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.inference import recognizer
from lingvo_moe.inference.error_rates import ErrorRates
from lingvo_moe.testing.corpora import write_corpus

# Of recording 3, too long for a row, there is no transcript.
TRANSCRIPTS = {"r1": "ab cd", "r2": "ab xd", "r3": None, "r4": "ab cd ef"}


class FakeRecognizer:
    """Hears what the test says, whatever is recorded."""

    def transcribe(self, recordings):
        return [TRANSCRIPTS[recording] for recording in recordings]


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    """Two trained voices and a held-out one; half of the words that are trained on are `the`, two in a transcript."""
    train = [("t1", "the cat"), ("t2", "the dog")]
    tests = {"en_a": [("r1", "ab cd")], "en_b": [("r2", "ab cd"), ("r3", "gh")], "en_held": [("r4", "ab cd")]}
    splits = {
        voice: {"train": [] if voice == "en_held" else train, "valid": [], "test": pairs}
        for voice, pairs in tests.items()
    }
    corpus = Corpus.open(write_corpus(tmp_path / "corpus", splits))
    corpus.manifest["audio"] = {}
    return corpus


def test_rates_are_of_the_transcripts(corpus):
    """Counted by hand: of five characters one is wrong in `ab xd`, and three are too many in `ab cd ef`."""
    scores, left_out = recognizer.score(corpus, recognizer.transcribe_held_out(FakeRecognizer(), corpus))
    found = {score.voice: (score.rates, score.train_recordings, score.test_recordings) for score in scores}
    assert found == {
        "en_a": (ErrorRates(0.0, 0.0), 2, 1),
        "en_b": (ErrorRates(20.0, 50.0), 2, 1),
        "en_held": (ErrorRates(60.0, 50.0), 0, 1),
        "trained voices": (ErrorRates(10.0, 25.0), 4, 2),
        "held-out voices": (ErrorRates(60.0, 50.0), 0, 1),
    }
    assert left_out == 1


def test_transcripts_are_written_beside_their_references(corpus, tmp_path):
    """All but the recording that is too long, which has none."""
    recognizer.write(str(tmp_path / "out.tsv"), recognizer.transcribe_held_out(FakeRecognizer(), corpus))
    lines = ["en_a\tr1\tab cd\tab cd", "en_b\tr2\tab xd\tab cd", "en_held\tr4\tab cd ef\tab cd"]
    assert (tmp_path / "out.tsv").read_text() == "\n".join([*lines, ""])


def test_the_baseline_has_not_listened(corpus):
    """`the the` for `ab cd`: no word is right, and of the characters the space alone, so six edits of five."""
    scores, _ = recognizer.score(corpus, recognizer.transcribe_held_out(FakeRecognizer(), corpus))
    assert {score.majority for score in scores} == {ErrorRates(120.0, 100.0)}


def test_recordings_that_are_all_too_long_are_an_error(corpus, monkeypatch):
    """There is nothing to take a rate of; the error names the setting."""
    monkeypatch.setitem(TRANSCRIPTS, "r1", None)
    with pytest.raises(UserError, match="none of the 1 test recordings fits input.source_length; raise it with --set"):
        recognizer.transcribe_held_out(FakeRecognizer(), corpus, ["en_a"])


@pytest.mark.parametrize(
    "voices, split, message",
    [
        (["en_bb"], "test", "--languages=en_bb: .* has no such voice; it has en_a, en_b, en_held. Did you mean en_b"),
        (["en_a"], "valid", "--languages=en_a: the corpus has no valid recordings of it; see its report.txt"),
        ([], "valid", "/corpus: the corpus has no valid recordings; see its report.txt"),
    ],
)
def test_voices_without_recordings_are_an_error(corpus, voices, split, message):
    """It names the flag of `eval`, or says that the corpus has none, and blames no length."""
    with pytest.raises(UserError, match=message):
        recognizer.transcribe_held_out(FakeRecognizer(), corpus, voices, split=split)
