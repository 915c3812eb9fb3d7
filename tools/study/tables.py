"""The tables of a study, as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from lingvo_moe.inference.evaluation import LanguageScore, groups
from tools import markdown
from tools.study.results import Results, Routing, RunResult

_NOTHING = "not measured"
_NEVER = "not reached"


def text(results: Results) -> str:
    """Returns all tables, with a line about what is missing."""
    parts = [
        f"{results.minutes:g} CPU minutes of training for each run, {len(results.runs)} runs."
        + (f" **Not measured: {', '.join(results.missing)}.**" if results.missing else ""),
        *_models(results),
        *_languages(results),
        *_reached(results),
        *_experts(results),
    ]
    return "\n".join(parts)


def _models(results: Results) -> Iterator[str]:
    """GShard table 3 and figure 6's legend: quality of each run."""
    yield "\n### Models\n"
    yield (
        "Losses and source gain in nats per target token of the test sentences of a run's languages; those of "
        "bilingual models are of other sentences, and cannot be compared. Lowest: of the curve on the validation "
        "split.\n"
    )
    compared = _with_baseline(results)
    header = ("model", "seed", "weights", "steps", "target tokens", "CPU minutes", "loss", "lowest", "source gain")
    yield markdown.table(
        (*header, "BLEU", "copying", *(f"above bilingual, {label}" for label, _ in compared)),
        [
            (
                run.model,
                str(run.seed),
                f"{run.weights / 1e6:.1f}M",
                f"{run.steps:,}",
                f"{run.tokens / 1e6:.2f}M",
                f"{run.cpu_seconds / 60:.1f}",
                f"{run.cross_entropy:.3f}",
                f"{min((loss for *_, loss, _ in run.curve if math.isfinite(loss)), default=math.nan):.3f}",
                f"{run.source_gain:.3f}",
                f"{statistics.fmean(score.bleu for score in run.scores):.1f}",
                f"{statistics.fmean(score.copy_bleu for score in run.scores):.1f}",
                *(_above_bilingual(results, run, languages) for _, languages in compared),
            )
            for run in results.runs
        ],
    )


def _with_baseline(results: Results) -> list[tuple[str, list[str]]]:
    """Returns the languages with a bilingual model: all, and in groups by resource."""
    chosen = [score for score in _scores(results) if score.language in results.baselines]
    found = [("all", chosen)] if chosen else []
    found += groups(chosen) if len(chosen) >= 3 else []
    return [(label, [score.language for score in members]) for label, members in found]


def _above_bilingual(results: Results, run: RunResult, languages: Sequence[str]) -> str:
    """Returns the mean difference of BLEU; nothing for a bilingual model."""
    scored = {language: run.bleu(language) for language in languages}
    gains = [bleu - results.baselines[language] for language, bleu in scored.items() if bleu is not None]
    return f"{statistics.fmean(gains):+.1f}" if gains and not run.language else ""


def _scores(results: Results) -> list[LanguageScore]:
    """Returns a score of each language, from high to low resource; all runs have the same sentences."""
    found = {score.language: score for run in results.runs for score in run.scores}
    return [found[language] for language in results.languages]


def _languages(results: Results) -> Iterator[str]:
    """BLEU by language, and by group of resource."""
    yield "\n### BLEU by language\n"
    yield "Means over seeds. The last rows are means of equal groups of languages, by their training pairs.\n"
    models, scores = list(results.models), _scores(results)
    rows = [(score.language, [score]) for score in scores]
    rows += groups(scores) if len(scores) >= 3 else []
    yield markdown.table(
        ("language", "training pairs", "sentences", "copying", "bilingual", *models),
        [
            (
                label,
                f"{sum(member.train_pairs for member in members):,}",
                str(sum(member.test_pairs for member in members)),
                f"{statistics.fmean(member.copy_bleu for member in members):.1f}",
                # Some of a group have no baseline.
                _mean([results.baselines.get(member.language) for member in members]) if len(members) == 1 else "",
                *(_mean(_of_seeds(results, model, [member.language for member in members])) for model in models),
            )
            for label, members in rows
        ],
    )


def _of_seeds(results: Results, model: str, languages: Sequence[str]) -> list[float | None]:
    scored = results.bleu(model)
    return [statistics.fmean(scored[language]) if language in scored else None for language in languages]


def _reached(results: Results) -> Iterator[str]:
    """GShard table 2, for the validation loss."""
    if not results.losses:
        return
    yield "\n### Million target tokens (CPU minutes) to a validation loss\n"
    rows = []
    for run in (run for runs in results.models.values() for run in runs):
        reached = [run.reached(loss) for loss in results.losses]
        cells = [f"{found[0] / 1e6:.2f} ({found[1] / 60:.1f})" if found else _NEVER for found in reached]
        rows.append((run.model, str(run.seed), *cells))
    yield markdown.table(("model", "seed", *(f"{loss:g}" for loss in results.losses)), rows)


def _experts(results: Results) -> Iterator[str]:
    """Overflow, load and specialisation of each layer."""
    routed = [run for runs in results.models.values() for run in runs if run.routing]
    if not routed:
        return
    yield "\n### Experts\n"
    yield (
        "Dropped tokens are of training's last part, in all layers together. The load is of the most used expert, the "
        "unused are those with less than a tenth of an equal share; both on test sentences, where nothing is dropped. "
        "Mutual information: how many bits a choice gives about its language, where all languages are equally "
        "frequent; by chance: the same where the languages of the sentences are shuffled.\n"
    )
    rows = []
    for run in routed:
        dropped = f"{100 * run.overflow[-1][1]:.2f} %" if run.overflow else _NOTHING
        for layer, found in run.routing.items():
            unused = sum(load < 0.1 for load in found.load)
            cells = (f"{max(found.load):.2f}", f"{unused} of {run.experts}", f"{found.information:.3f}", _chance(found))
            rows.append((run.model, str(run.seed), dropped, layer, *cells))
    header = ("model", "seed", "dropped tokens", "layer", "largest load", "unused", "mutual information", "by chance")
    yield markdown.table(header, rows)


def _chance(routing: Routing) -> str:
    return _NOTHING if routing.chance is None else f"{routing.chance:.3f}"


def _mean(values: Sequence[float | None]) -> str:
    """Returns the mean of the values that there are."""
    present = [value for value in values if value is not None]
    return f"{statistics.fmean(present):.1f}" if present else ""
