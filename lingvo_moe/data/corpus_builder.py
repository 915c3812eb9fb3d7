"""From catalogs to a corpus: read, clean, split, write."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from lingvo_moe.data import catalogs, cleaning, debian, languages, sources, splitting, wheels
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.corpus_report import listing
from lingvo_moe.data.corpus_writer import Pair, Target, check_place
from lingvo_moe.data.drop import Drop
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.utils import progress

PRESETS = ("quickstart", "django", "debian", "none")
HELD_OUT_CAP = 1000  # pairs of a language, in test and in valid
# Part of a corpus's identity: raise it with every change of what cleaning or splitting does.
_RULES = 1


@dataclasses.dataclass
class Gathered:
    """The clean pairs of every language, and what was left out on the way."""

    pairs: dict[str, set[Pair]] = dataclasses.field(default_factory=lambda: collections.defaultdict(set))
    read: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    dropped: dict[str, collections.Counter[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    english_labels: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unlabelled: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


def build(
    preset: str,
    inputs: Sequence[str | Path],
    output: str | Path,
    packages: str | Path | None = None,
    force: bool = False,
) -> tuple[Corpus, bool]:
    """Builds a corpus, or finds it built.

    Args:
      preset: one of `PRESETS`.
      inputs: directories and files of one's own, read besides the preset.
      output: the directory to make.
      packages: where presets keep what they download; None stands for `sources.default_directory()`.
      force: build again, and replace a corpus of other inputs.

    Returns:
      the corpus, and whether it had to be built.

    Raises:
      UserError: an input cannot be read, nothing is left to train on, or `output` holds something else.
    """
    output = Path(output).absolute()
    check_place(output)
    found, missing = find_sources(preset, inputs, packages)
    parts = [f"rules {_RULES}", preset, *(f"{source.name} {source.identity()}" for source in found)]
    target = Target(output, hashlib.sha256("\n".join(parts).encode()).hexdigest())
    if not force and target.is_up_to_date():
        return Corpus.open(output), False
    target.check_replaceable(force)
    gathered = gather(found)
    if not gathered.pairs:
        raise UserError(f"nothing to build a corpus from: {_nothing_found(gathered)}")
    drop_wrong_script(gathered)
    split = splitting.split_keys({english for pairs in gathered.pairs.values() for _, english in pairs})
    with target.writing() as writer:
        for language in progress.track(sorted(gathered.read), "writing the corpus", unit="languages"):
            dropped = gathered.dropped[language]
            pairs = assign(gathered.pairs.pop(language, set()), split, dropped)
            writer.add(language, pairs, gathered.read[language], dropped)
        links = collections.Counter({source.name: source.links_left_out for source in found})
        writer.finish(
            {
                "preset": preset,
                "inputs": [source.name for source in found],
                "inputs_identity": target.identity,
                "missing_packages": missing,
                "english_keys": split.counts(),
                "english_labels": _sorted_counts(gathered.english_labels),
                "unlabelled": _sorted_counts(gathered.unlabelled),
                "links_left_out": _sorted_counts(links),
            }
        )
    return Corpus.open(output), True


def find_sources(
    preset: str, inputs: Sequence[str | Path], packages: str | Path | None
) -> tuple[list[sources.Source], list[str]]:
    """Returns the sources, and the packages that the distribution lacks. Raises UserError if there is no source."""
    if preset not in PRESETS:
        raise UserError(f"no preset {preset!r}; expected one of {', '.join(PRESETS)}.{did_you_mean(preset, PRESETS)}")
    if preset == "none" and not inputs:
        raise UserError(
            "nothing to build a corpus from: name your files with --input=DIR_OR_FILE, or a preset: "
            "--preset=quickstart."
        )
    found, missing = [], []
    directory = Path(packages) if packages else sources.default_directory()
    if preset == "django":
        found = [sources.django()]
    elif preset == "quickstart":
        found = [sources.django(), *wheels.fetch(directory)]
    elif preset == "debian":
        found, missing = debian.fetch(directory)
    return found + [sources.own(path) for path in inputs], missing


def gather(found: Iterable[sources.Source]) -> Gathered:
    """Reads and cleans all entries."""
    gathered = Gathered()
    texts: dict[str, str] = {}  # one string object for each English text, however many languages translate it
    with progress.bar("reading catalogs", sum(source.size for source in found) // 1000, "kB") as advance:
        for source in found:
            done = 0.0
            for part in source.parts():
                for entry in part.entries:
                    _take(entry, part.name, gathered, texts)
                advance(int((done + part.size) / 1000) - int(done / 1000), source.name)
                done += part.size
            advance((source.size - int(done)) // 1000)
    return gathered


def _take(entry: catalogs.Entry, part: str, gathered: Gathered, texts: dict[str, str]):
    if entry.language is None:
        gathered.unlabelled[part] += 1
        return
    if languages.is_english(entry.language):
        gathered.english_labels[entry.language] += 1
        return
    gathered.read[entry.language] += 1
    cleaned = Drop.FUZZY if entry.fuzzy else cleaning.clean(entry.translation, entry.english)
    if not isinstance(cleaned, Drop):
        source, english = cleaned
        pair = source, texts.setdefault(english, english)
        known = gathered.pairs[entry.language]
        if pair not in known:
            known.add(pair)
            return
        cleaned = Drop.DUPLICATE
    gathered.dropped[entry.language][cleaned] += 1


def drop_wrong_script(gathered: Gathered):
    """Drops the pairs whose source has no letter of the script that its language is by large majority written in."""
    for language, pairs in gathered.pairs.items():
        script = cleaning.dominant_script(sorted(source for source, _ in pairs))
        if script:
            wrong = {pair for pair in pairs if not cleaning.is_written_in(pair[0], script)}
            pairs -= wrong
            gathered.dropped[language].update({Drop.WRONG_SCRIPT: len(wrong)} if wrong else {})


def assign(pairs: Iterable[Pair], split: splitting.Split, dropped: collections.Counter[str]) -> dict[str, list[Pair]]:
    """Returns the pairs of one language by split, each sorted by English; counts in `dropped` what goes into none."""
    result: dict[str, list[Pair]] = {"train": [], "valid": [], "test": []}
    for pair in pairs:
        place = _place(pair[1], split)
        if isinstance(place, Drop):
            dropped[place] += 1
        else:
            result[place].append(pair)
    held_out_sources = {source for source, _ in result["test"] + result["valid"]}
    # The same source with another English wording would still teach the model the held-out sentence.
    kept = [pair for pair in result["train"] if pair[0] not in held_out_sources]
    dropped[Drop.SOURCE_HELD_OUT] += len(result["train"]) - len(kept)
    result["train"] = kept
    for held_out in ("test", "valid"):
        dropped[Drop.OVER_CAP] += max(0, len(result[held_out]) - HELD_OUT_CAP)
        result[held_out] = sorted(result[held_out], key=lambda pair: splitting.position("\t".join(pair)))[:HELD_OUT_CAP]
    return {name: sorted(chosen, key=lambda pair: pair[::-1]) for name, chosen in result.items()}


def _place(english: str, split: splitting.Split) -> str | Drop:
    key = splitting.english_key(english)
    if key in split.test or key in split.valid:
        if not splitting.can_be_held_out(english):
            return Drop.HELD_OUT_WORDING
        return "test" if key in split.test else "valid"
    if key in split.near:
        return Drop.NEAR_HELD_OUT
    return Drop.OVERLAPPING if key in split.overlapping else "train"


def _sorted_counts(counts: collections.Counter[str]) -> dict[str, int]:
    """Returns the counts above 0 in the order of their names."""
    return dict(sorted((+counts).items()))


def _nothing_found(gathered: Gathered) -> str:
    if gathered.read:
        reasons = sum(gathered.dropped.values(), collections.Counter())
        return f"all {gathered.read.total()} entries were dropped ({listing(reasons)})."
    if gathered.unlabelled:
        return (
            f"the names of these files do not tell their language: {', '.join(sorted(gathered.unlabelled)[:5])}. "
            "Use LANG/LC_MESSAGES/x.mo, LANG.po or LANG.tsv."
        )
    return "the inputs have no translations into a language other than English."
