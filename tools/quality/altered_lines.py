"""Measures how well lines are translated that are written unlike those of a corpus.

  python -m tools.quality.altered_lines --corpus=build/pocket/corpus --max_pairs=20

The model is that of `translate`: the released one unless --model and --logdir name another. Held-out sentences are
written in capitals, with the mark of an accelerator (`_File`, `Pr&int`), and with soft hyphens. A table in Markdown has
BLEU and chrF of these, beside those of the same sentences as they are; means over languages. Sentences that an
alteration leaves as they are do not count for it. Translations and references in capitals are compared as such. With
--json=FILE the scores are written, too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import statistics
from collections.abc import Callable, Sequence

from absl import flags

from lingvo_moe.cli import app, command_flags, recorded, released, run_config, run_setup
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.inference.evaluation import LanguageScore, Translated, score, translate_held_out
from lingvo_moe.inference.lines.capitals import upper_case
from lingvo_moe.inference.translator import Translator
from lingvo_moe.utils import output_files
from tools import markdown

FLAGS = flags.FlagValues()
command_flags.define_flags(run_config.HeldOutConfig, FLAGS)

_WORD = re.compile(r"(?<![\w&~./@:\\%$<-])[^\W\d_]{4,}(?![\w&~./@:\\>-])")
_SOFT_HYPHEN = "\u00ad"


@dataclasses.dataclass(frozen=True)
class Altered:
    """The scores of an alteration.

    Attributes:
      sentences: the name of the alteration.
      number: of sentences that it changes.
      bleu, chrf: of their translations, means over languages; None without a sentence.
      plain_bleu, plain_chrf: of the same sentences as they are.
    """

    sentences: str
    number: int
    bleu: float | None = None
    plain_bleu: float | None = None
    chrf: float | None = None
    plain_chrf: float | None = None


def with_mark(text: str, mark: str) -> str:
    """Returns the text with a mark before one of the first four letters of a word; which one, its hash decides."""
    if "_" in text or "&" in text or "~" in text:
        return text
    words = [word for word in _WORD.finditer(text) if word[0].lower() != word[0].upper()]
    if not words:
        return text
    drawn = hashlib.sha256(text.encode()).digest()
    place = words[drawn[0] % len(words)].start() + drawn[1] % 4
    return text[:place] + mark + text[place:]


def with_soft_hyphens(text: str) -> str:
    """Returns the text with a soft hyphen after the third letter of each word of six or more."""
    return re.sub(r"([^\W\d_]{3})(?=[^\W\d_]{3})", rf"\1{_SOFT_HYPHEN}", text)


ALTERATIONS: dict[str, Callable[[str], str]] = {
    "in capitals": upper_case,
    "with `_` before an accelerator": lambda text: with_mark(text, "_"),
    "with `&` before an accelerator": lambda text: with_mark(text, "&"),
    "with soft hyphens": with_soft_hyphens,
}


def main(arguments: list[str]):
    """Translates, prints the table, and writes the scores if asked for."""
    app.no_arguments(arguments[1:])
    given = recorded.read(run_config.HeldOutConfig, FLAGS)
    output_files.check_path("--json", given.json)
    if not given.corpus:
        raise UserError("--corpus is missing: a directory of tools.build_corpus, with held-out sentences.")
    corpus = Corpus.open(given.corpus)
    with released.by_default(given) as config:
        name, experiment, engine = run_setup.set_up(config, "decode", {"search.beam_size": config.beam_size})
        translator = Translator(name, experiment, engine, config.log_directory())
        found, _ = translate_held_out(translator, corpus, config.languages, config.max_pairs, config.split)
        scores = [_score(corpus, translator, found, *alteration) for alteration in ALTERATIONS.items()]
    if given.json:
        with output_files.atomic_writer(given.json) as file:
            json.dump([dataclasses.asdict(one) for one in scores], file, indent=1)
    print(table(scores), file=output_files.table_stream(given.json))


def table(scores: Sequence[Altered]) -> str:
    """Returns the scores as Markdown."""
    rows = [
        (one.sentences, str(one.number), *map(_text, (one.bleu, one.plain_bleu, one.chrf, one.plain_chrf)))
        for one in scores
    ]
    return markdown.table(("sentences", "number", "BLEU", "as they are", "chrF", "as they are"), rows)


def _text(score: float | None) -> str:
    return "-" if score is None else f"{score:.1f}"


def _score(
    corpus: Corpus, translator: Translator, found: Sequence[Translated], name: str, alter: Callable[[str], str]
) -> Altered:
    changed = [one for one in found if alter(one.source) != one.source]
    if not changed:
        return Altered(name, 0)
    translations = [best for best, *_ in translator.translate([alter(one.source) for one in changed])]
    altered = [dataclasses.replace(one, translation=best) for one, best in zip(changed, translations, strict=True)]
    if alter is upper_case:
        altered, changed = [_in_capitals(one) for one in altered], [_in_capitals(one) for one in changed]
    of_altered, as_they_are = score(corpus, altered), score(corpus, changed)
    bleu, chrf = (_means(of_altered, as_they_are, measure) for measure in ("bleu", "chrf"))
    return Altered(name, len(changed), *bleu, *chrf)


def _in_capitals(one: Translated) -> Translated:
    best = dataclasses.replace(one.translation, text=one.translation.text.upper())
    return dataclasses.replace(one, translation=best, reference=one.reference.upper())


def _means(altered: Sequence[LanguageScore], as_they_are: Sequence[LanguageScore], measure: str) -> tuple[float, float]:
    first, second = (statistics.fmean(getattr(one, measure) for one in scores) for scores in (altered, as_they_are))
    return first, second


if __name__ == "__main__":
    app.run(main, FLAGS)
