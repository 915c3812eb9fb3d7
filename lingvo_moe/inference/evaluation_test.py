"""Scores are sacreBLEU's, of the right sentences, beside those of the copied sources."""

from __future__ import annotations

import dataclasses

import pytest
import sacrebleu

from lingvo_moe.data.corpus import Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.inference.evaluation import LanguageScore, Translated, groups, score, translate_held_out
from lingvo_moe.inference.lines.translation import Translation
from lingvo_moe.testing import experiments as tiny


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return Corpus.open(tiny.make_data(tmp_path_factory.mktemp("data")).corpus)


@dataclasses.dataclass
class Mirror:
    """Translates `de`, reversed English words, without a mistake, and everything else into one word."""

    limit: int = 1000

    def fits(self, sentences):
        return [len(sentence) <= self.limit for sentence in sentences]

    def translate(self, sentences):
        return [[Translation(self._translate(sentence), -1.0), Translation("worse", -2.0)] for sentence in sentences]

    def _translate(self, sentence: str) -> str:
        words = [word[::-1] for word in sentence.split()]
        return " ".join(words) if set(words) <= set(tiny.WORDS) else "nothing"


def test_scores_are_of_the_best_hypotheses_and_of_the_sources(corpus):
    translated, left_out = translate_held_out(Mirror(), corpus, max_pairs=5)
    scores = score(corpus, translated)
    assert left_out == 0 and [score.train_pairs for score in scores] == sorted(
        (corpus.count("train", language) for language in ("de", "fr")), reverse=True
    )
    german, french = sorted(scores, key=lambda score: score.language)
    assert german.bleu == pytest.approx(100) and german.chrf == pytest.approx(100)
    assert french.bleu < 1 and french.chrf < 10
    count = corpus.count("test", "de")
    pairs = [corpus.pairs("test", "de")[i * count // 5] for i in range(5)]
    copied = sacrebleu.corpus_bleu([source for source, _ in pairs], [[target for _, target in pairs]]).score
    assert german.copy_bleu == copied and german.test_pairs == 5
    assert german.train_pairs == corpus.count("train", "de")
    assert [(s.source, s.reference) for s in translated if s.language == "de"] == pairs


@pytest.mark.parametrize("label, tokenization", [("ja", "char"), ("zh_Hans", "zh"), ("de", "13a"), ("th", "char")])
def test_bleu_of_languages_without_spaces_is_of_characters(corpus, label, tokenization, monkeypatch):
    """If references are in the language; those in English are divided into words."""
    used = []

    def bleu(hypotheses, references, tokenize):
        used.append(tokenize)
        return sacrebleu.metrics.BLEU().corpus_score(hypotheses, references)

    monkeypatch.setattr(sacrebleu, "corpus_bleu", bleu)
    monkeypatch.setattr(corpus, "count", lambda split, language: 1)
    translated = [Translated(label, "house", Translation("Haus", 0.0), "Haus")]
    score(corpus, translated, from_english=True)
    score(corpus, translated)
    assert used == [tokenization] * 2 + ["13a"] * 2


def test_long_sentences_are_left_out_and_counted(corpus):
    lengths = [len(source) for source, _ in corpus.pairs("test", "de")]
    limit = sorted(lengths)[len(lengths) // 2]
    translated, left_out = translate_held_out(Mirror(limit), corpus, ["de"], max_pairs=1000)
    assert left_out == sum(length > limit for length in lengths) > 0
    assert len(translated) == score(corpus, translated)[0].test_pairs == len(lengths) - left_out
    with pytest.raises(UserError, match="all .* test sentences are longer than the model's limit"):
        translate_held_out(Mirror(1), corpus)


@pytest.mark.parametrize(
    "languages, pattern", [(["dee"], "no such language; it has de, fr. Did you mean de"), (["xx"], "no such language")]
)
def test_an_unknown_language_is_named(corpus, languages, pattern):
    with pytest.raises(UserError, match=f"--languages={languages[0]}: .*{pattern}"):
        translate_held_out(Mirror(), corpus, languages)


def test_a_language_in_the_place_of_a_list_is_an_error(corpus):
    """A text is a list of letters, which would be unknown languages."""
    with pytest.raises(UserError, match=r"languages: 'de' is one text; expected a list of texts, \['de'\]"):
        translate_held_out(Mirror(), corpus, "de")


def test_groups_keep_the_order_and_all_languages():
    """The sizes of groups differ by at most one; fewer languages than groups make fewer groups."""
    scores = [LanguageScore(str(n), 100 - n, 1, 0, 0, 0, 0) for n in range(10)]
    cut = groups(scores)
    assert [name for name, _ in cut] == ["high resource", "middle resource", "low resource"]
    assert [score for _, members in cut for score in members] == scores
    assert {len(members) for _, members in cut} == {3, 4}
    assert [len(members) for _, members in groups(scores[:1])] == [1]
