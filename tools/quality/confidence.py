"""Measures what the confidence of translations says about their quality, on held-out sentences.

  python -m tools.quality.confidence --corpus=build/pocket/corpus

The model is that of `translate`: the released one unless --model and --logdir name another. It prints two tables in
Markdown: quality by tenths of the sentences, from the least confidence to the greatest, and what `translate --doubtful`
would list at several values of --doubt_below. Quality is chrF against the one reference of each sentence, which a
translation in other words misses; a translation is poor if its chrF is below 30. A line below the tables has the rank
correlation with chrF, of the confidence and of the score. With --json=FILE every sentence is written, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Sequence

from absl import flags

from lingvo_moe.cli import app, command_flags, recorded, released, run_config, run_setup
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.errors import UserError
from lingvo_moe.inference.evaluation import translate_held_out
from lingvo_moe.inference.translator import Translator
from lingvo_moe.utils import output_files
from tools import correlation, markdown

FLAGS = flags.FlagValues()
command_flags.define_flags(run_config.HeldOutConfig, FLAGS)

POOR = 30.0  # chrF
_BANDS = 10
_THRESHOLDS = (0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8)


@dataclasses.dataclass(frozen=True)
class Scored:
    """A held-out sentence and its translation.

    Attributes:
      language: its label.
      source, translation, reference: the texts.
      confidence, score: see `translation.Translation`.
      chrf: of this translation, 0 to 100.
    """

    language: str
    source: str
    translation: str
    reference: str
    confidence: float
    score: float
    chrf: float

    @property
    def is_exact(self) -> bool:
        """Whether it is the reference, but for case."""
        return self.translation.casefold() == self.reference.casefold()

    @property
    def is_poor(self) -> bool:
        """Whether chrF is low."""
        return self.chrf < POOR


def main(arguments: list[str]):
    """Translates and prints the tables."""
    app.no_arguments(arguments[1:])
    given = recorded.read(run_config.HeldOutConfig, FLAGS)
    output_files.check_path("--json", given.json)
    if not given.corpus:
        raise UserError("--corpus is missing: a directory of tools.build_corpus, with held-out sentences.")
    with released.by_default(given) as config:
        found = sorted(_translated(config, Corpus.open(given.corpus)), key=lambda sentence: sentence.confidence)
    if given.json:
        with output_files.atomic_writer(given.json) as file:
            json.dump([dataclasses.asdict(sentence) for sentence in found], file, indent=1, ensure_ascii=False)
    tables = f"{bands(found)}\n\n{thresholds(found)}\n\n{correlations(found)}"
    print(tables, file=output_files.table_stream(given.json))


def _translated(config: run_config.HeldOutConfig, corpus: Corpus) -> list[Scored]:
    from sacrebleu import sentence_chrf  # slow to import

    name, experiment, engine = run_setup.set_up(config, "decode", {"search.beam_size": config.beam_size})
    translator = Translator(name, experiment, engine, config.log_directory())
    found, _ = translate_held_out(translator, corpus, config.languages, config.max_pairs, config.split)
    return [
        Scored(
            one.language,
            one.source,
            one.translation.text,
            one.reference,
            one.translation.confidence,
            one.translation.score,
            sentence_chrf(one.translation.text, [one.reference]).score,
        )
        for one in found
    ]


def bands(found: Sequence[Scored]) -> str:
    """Returns a table: quality by tenths of the sentences, which are in the order of their confidence."""
    rows = []
    bounds = [len(found) * i // _BANDS for i in range(_BANDS + 1)]
    for start, stop in itertools.pairwise(bounds):
        if band := found[start:stop]:
            rows.append(
                (
                    f"{band[0].confidence:.2f} to {band[-1].confidence:.2f}",
                    str(len(band)),
                    f"{statistics.fmean(s.chrf for s in band):.1f}",
                    _percent([s.is_exact for s in band]),
                    _percent([s.is_poor for s in band]),
                )
            )
    return markdown.table(("confidence", "sentences", "mean chrF", "the reference", "poor"), rows)


def thresholds(found: Sequence[Scored]) -> str:
    """Returns a table: for some thresholds, how many sentences are below, and how many of the poor ones."""
    rows = []
    poor = [sentence for sentence in found if sentence.is_poor]
    for threshold in _THRESHOLDS:
        below = [sentence.confidence < threshold for sentence in found]
        is_poor = [sentence.is_poor for sentence in found if sentence.confidence < threshold]
        caught = [sentence.confidence < threshold for sentence in poor]
        rows.append((f"{threshold:g}", *map(_percent, (below, is_poor, caught))))
    return markdown.table(("`--doubt_below`", "lines below it", "of these poor", "of all poor below it"), rows)


def correlations(found: Sequence[Scored]) -> str:
    """Returns a line: Spearman's rank correlation of chrF with the confidence and with the score."""
    chrf = [sentence.chrf for sentence in found]
    confidence = correlation.text({"chrF": chrf, "values": [sentence.confidence for sentence in found]})
    score = correlation.text({"chrF": chrf, "values": [sentence.score for sentence in found]})
    return f"rank correlation with chrF: confidence {confidence}, score {score}"


def _percent(values: Sequence[bool]) -> str:
    return f"{100 * statistics.fmean(values):.0f} %" if values else "-"


if __name__ == "__main__":
    app.run(main, FLAGS)
