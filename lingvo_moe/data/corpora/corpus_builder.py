"""Builds a corpus from data sources: read, clean, deduplicate, split into train/valid/test, write."""

from __future__ import annotations

import collections
import itertools
import os
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lingvo_moe.data.corpora import (
    debian,
    debian_more,
    doubtful_tables,
    pocket,
    sources,
    splitting,
    unread,
    wheels,
)
from lingvo_moe.data.corpora.collected_pairs import CollectedPairs, collect_pairs, reject_wrong_script
from lingvo_moe.data.corpora.corpus_report import listing
from lingvo_moe.data.corpora.corpus_writer import OutputDirectory, Pair, check_writable, prepare_output_directory
from lingvo_moe.data.corpora.rejection import Rejection
from lingvo_moe.data.corpora.sources import SourceList
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.utils import progress
from lingvo_moe.utils.counts import counted
from lingvo_moe.utils.hashes import sha256

PRESET_MODULES = (sources, debian, debian_more, wheels, pocket)  # importing them registers the presets
HELD_OUT_CAP = 1000  # pairs per language, in test and in valid each
# A part of a corpus's identity: increase it with every change of reading, cleaning or splitting.
_RULES_VERSION = 6


class GivenSplit(NamedTuple):
    """A held-out split that the user has chosen.

    Attributes:
      inputs: the names of its directories and files.
      pairs: by language.
    """

    inputs: list[str]
    pairs: Mapping[str, set[Pair]]


def build(
    preset: str,
    inputs: Sequence[str | Path],
    output: str | Path,
    packages: str | Path | None = None,
    force: bool = False,
    selected: Collection[str] = (),
    unseen_by: Corpus | None = None,
    held_out: Mapping[str, Sequence[str | Path]] = types.MappingProxyType({}),
) -> tuple[Corpus, bool]:
    """Builds a corpus, unless `output` already has one of the same inputs.

    Args:
      preset: the name of a registered preset, see `sources.register_source`.
      inputs: the user's own directories and files, read after the preset's sources.
      output: the directory to make.
      packages: the download cache of the presets; None for `sources.default_cache()`.
      force: build again, and replace a corpus of other inputs.
      selected: the languages to read, normalised labels; empty for those of `unseen_by`, else for all that the preset
        has.
      unseen_by: a corpus that a model is trained on. The result is for testing alone: its test split has every eligible
        sentence that is not in (or within one word of) that training split.
      held_out: the user's own directories and files of the splits `valid` and `test`, which are those splits. Their
        sentences, and those within one word of them, are left out of the training split. A split without files is made
        of the other inputs.

    Returns:
      The corpus, and whether it was built by this call.

    Raises:
      UserError: an input cannot be read, no training pair remains, or `output` has something else.
    """
    output = Path(output).absolute()
    _check_apart(output, inputs, held_out, unseen_by)
    prepare_output_directory(output)
    wanted = selected or (unseen_by.languages if unseen_by else ())
    own_inputs = _own_inputs(preset, inputs)
    given = {
        split: [sources.user_input(path, f"--{split}_input") for path in paths]
        for split, paths in sorted(held_out.items())
        if paths
    }
    check_writable(output, force)
    read_from = _with_preset(preset, own_inputs, packages, wanted)
    read = wanted or read_from.languages
    target = OutputDirectory(output, _identity(preset, read_from, read, unseen_by, given))
    if not force and target.is_up_to_date():
        return Corpus.open(output), False
    target.check_replaceable(force)
    collected = collect_pairs(read_from.sources, read)
    not_read = unread_files(inputs, held_out)
    _check_not_empty(collected, selected, not_read)
    reject_wrong_script(collected)
    chosen = {split: _collect_given(split, own, held_out[split], read, collected) for split, own in given.items()}
    names = [source.name for source in (*own_inputs, *itertools.chain(*given.values()))]
    doubtful = doubtful_tables.warnings([*inputs, *itertools.chain(*held_out.values())])
    own = {"own_inputs": names, "unread_files": not_read, "doubtful_files": doubtful}
    _write(target, preset, read_from, collected, unseen_by, chosen, force, own)
    return Corpus.open(output), True


def unread_files(inputs: Sequence[str | Path], held_out: Mapping[str, Sequence[str | Path]]) -> list[str]:
    """Returns sentences about files of the user's inputs, of any split, that are not read; see `unread.warnings`."""
    return unread.warnings([*inputs, *(path for paths in held_out.values() for path in paths)])


def _check_apart(
    output: Path,
    inputs: Sequence[str | Path],
    held_out: Mapping[str, Sequence[str | Path]],
    unseen_by: Corpus | None,
):
    """Raises UserError if the output is something that is read, or one is inside of the other.

    It would replace what is read, or be read by the next build.
    """
    read = [("--input", path) for path in inputs]
    read += [(f"--{split}_input", path) for split, paths in held_out.items() for path in paths]
    read += [("--unseen_by", unseen_by.directory)] if unseen_by else []
    own = Path(os.path.realpath(output))  # `resolve` raises an error at a loop of links
    for flag, path in read:
        other = Path(os.path.realpath(path))
        if own.is_relative_to(other) or other.is_relative_to(own):
            raise UserError(
                f"--output={output} and {flag}={path}: they are the same, or one is inside of the other. Name another "
                "--output."
            )


def _collect_given(
    split: str,
    read_from: Sequence[sources.Source],
    paths: Sequence[str | Path],
    selected: Collection[str],
    collected: CollectedPairs,
) -> GivenSplit:
    """Reads a held-out split, of the user's `paths`; counts entries and rejections in `collected`.

    Raises:
      UserError: no pair is left.
    """
    given = collect_pairs(read_from, selected)
    if not given.pairs:
        raise UserError(f"--{split}_input: no pairs to hold out: {_why_empty(given, unread.warnings(paths))}")
    collected.add_counts(given)
    return GivenSplit([source.name for source in read_from], given.pairs)


def _shared_keys(given: Mapping[str, GivenSplit]) -> int:
    """Returns the number of English keys that two given splits have in common."""
    return len(set.intersection(*(_keys(own.pairs) for own in given.values()))) if len(given) > 1 else 0


def _identity(
    preset: str,
    read_from: SourceList,
    selected: Collection[str],
    unseen_by: Corpus | None,
    held_out: Mapping[str, Sequence[sources.Source]],
) -> str:
    """Returns a hash of all that decides the corpus."""
    lines = [f"rules {_RULES_VERSION}", preset]
    lines += [f"language {language}" for language in sorted(selected)]
    lines += [f"unseen by {unseen_by.fingerprint}"] if unseen_by else []
    lines += [f"{source.name} {source.identity()}" for source in read_from.sources]
    lines += [f"{split} {each.name} {each.identity()}" for split, own in held_out.items() for each in own]
    return sha256("\n".join(lines))


def _write(
    target: OutputDirectory,
    preset: str,
    read_from: SourceList,
    collected: CollectedPairs,
    unseen_by: Corpus | None,
    given: Mapping[str, GivenSplit],
    force: bool,
    own: Mapping[str, Sequence[str]],
):
    english = {english for pairs in collected.pairs.values() for _, english in pairs}
    if unseen_by:
        split = splitting.split_unseen(english, _training_keys(unseen_by))
    else:
        split = splitting.split_keys(english, {name: _keys(own.pairs) for name, own in given.items()})
    # The keys of the pairs that are written: of those of `split`, the cap and other rules reject some.
    held_out: dict[str, set[str]] = {"test": set(), "valid": set()}
    with target.atomic_writer(force) as writer:
        for language in progress.track(sorted(collected.read), "writing the corpus", unit="languages"):
            rejected = collected.rejected[language]
            pairs = collected.pairs.pop(language, set())
            if unseen_by:
                divided = unseen_pairs(pairs, split, _training_sources(unseen_by, language), rejected)
            else:
                chosen = {name: own.pairs.get(language, set()) for name, own in given.items()}
                divided = split_pairs(pairs, split, rejected, chosen)
            writer.add(language, divided, collected.read[language], rejected)
            for name, keys in held_out.items():
                keys.update(splitting.english_key(text) for _, text in divided[name])
        writer.finish(
            {
                "preset": preset,
                "inputs": [source.name for source in read_from.sources],
                "held_out_inputs": {name: own.inputs for name, own in given.items()},
                "held_out_twice": _shared_keys(given),
                "inputs_identity": target.identity,
                "unseen_by": unseen_by.fingerprint if unseen_by else None,
                "missing_packages": list(read_from.missing_packages),
                **{field: list(texts) for field, texts in own.items()},
                "english_keys": split.counts() | {name: len(keys) for name, keys in held_out.items()},
                "english_labels": _sorted_counts(collected.english_labels),
                "unlabelled": _sorted_counts(collected.unlabelled),
                "skipped_links": _sorted_counts(collected.skipped_links),
            }
        )


def find_sources(
    preset: str, inputs: Sequence[str | Path], packages: str | Path | None, selected: Collection[str] = ()
) -> SourceList:
    """Returns the preset's sources followed by the user's inputs. Raises UserError if there is no source."""
    return _with_preset(preset, _own_inputs(preset, inputs), packages, selected)


def check_preset(flag: str, preset: str):
    """Raises UserError for a preset that does not exist, or has no sources of its own.

    Args:
      flag: that names the preset, for the error.
      preset: its value.
    """
    known = [name for name in sources.PRESETS.names() if name != "none"]
    if preset not in known:
        raise UserError(
            f"{flag}={preset}: no such preset of tools.build_corpus.{did_you_mean(preset, known)} Known: "
            f"{', '.join(known)}."
        )


def _own_inputs(preset: str, inputs: Sequence[str | Path]) -> list[sources.Source]:
    """Returns the user's inputs; nothing is downloaded.

    Raises:
      UserError: an input does not exist, the preset does not, or neither is named.
    """
    if preset == "none" and not inputs:
        raise UserError(
            "nothing to build a corpus from: name your files with --input=DIR_OR_FILE, or a preset: --preset=pypi."
        )
    sources.PRESETS.get(preset)
    return [sources.user_input(path) for path in inputs]


def _with_preset(
    preset: str, own_inputs: Sequence[sources.Source], packages: str | Path | None, selected: Collection[str]
) -> SourceList:
    """Returns the preset's sources, which it may download, followed by the user's inputs."""
    cache = Path(packages) if packages else sources.default_cache()
    from_preset = sources.of_preset(preset, cache, selected)
    return from_preset._replace(sources=[*from_preset.sources, *own_inputs])


def split_pairs(
    pairs: Iterable[Pair],
    split: splitting.KeySplit,
    rejected: collections.Counter[str],
    given: Mapping[str, Collection[Pair]] = types.MappingProxyType({}),
) -> dict[str, list[Pair]]:
    """Returns the pairs of one language by split, sorted by English.

    Args:
      pairs: of the language.
      split: of `splitting.split_keys`.
      rejected: counts by reason, increased by the pairs that are in no split.
      given: all pairs of the held-out splits that are given.
    """
    result: dict[str, list[Pair]] = {
        "train": [],
        "valid": [],
        "test": [],
        **{name: [*own] for name, own in given.items()},
    }
    for pair in pairs:
        name = _split_of(pair[1], split)
        if isinstance(name, Rejection):
            rejected[name] += 1
        else:
            result[name].append(pair)
    held_out_sources = {source for source, _ in result["test"] + result["valid"]}
    # Training on the same source with another English wording would still teach the held-out sentence.
    train = [pair for pair in result["train"] if pair[0] not in held_out_sources]
    rejected[Rejection.SOURCE_HELD_OUT] += len(result["train"]) - len(train)
    result["train"] = train
    for held_out in {"test", "valid"} - given.keys():
        result[held_out] = _capped(result[held_out], rejected)
    return {name: sorted(chosen, key=lambda pair: pair[::-1]) for name, chosen in result.items()}


def unseen_pairs(
    pairs: Iterable[Pair],
    split: splitting.KeySplit,
    training_sources: Collection[str],
    rejected: collections.Counter[str],
) -> dict[str, list[Pair]]:
    """Returns the pairs of one language as a test split, sorted by English; counts in `rejected` the others.

    Args:
      pairs: of the language.
      split: of `splitting.split_unseen`.
      training_sources: the source texts of the language that a model is trained on.
      rejected: counts by reason, increased.
    """
    test = []
    for source, english in pairs:
        if not splitting.can_be_held_out(english):
            rejected[Rejection.NOT_ELIGIBLE] += 1
        elif splitting.english_key(english) not in split.test or source in training_sources:
            rejected[Rejection.SEEN] += 1
        else:
            test.append((source, english))
    return {"train": [], "valid": [], "test": sorted(_capped(test, rejected), key=lambda pair: pair[::-1])}


def _capped(pairs: list[Pair], rejected: collections.Counter[str]) -> list[Pair]:
    """Returns at most `HELD_OUT_CAP` of the pairs, chosen by their hashes; counts the others in `rejected`."""
    rejected[Rejection.OVER_CAP] += max(0, len(pairs) - HELD_OUT_CAP)
    return sorted(pairs, key=lambda pair: splitting.hash_fraction("\t".join(pair)))[:HELD_OUT_CAP]


def _keys(pairs: Mapping[str, Collection[Pair]]) -> set[str]:
    """Returns the English keys of pairs by language."""
    return {splitting.english_key(english) for own in pairs.values() for _, english in own}


def _training_keys(corpus: Corpus) -> set[str]:
    """Returns the English keys of a corpus's training split."""
    english = {english for language in corpus.languages_of("train") for _, english in corpus.pairs("train", language)}
    return set(map(splitting.english_key, english))


def _training_sources(corpus: Corpus, language: str) -> set[str]:
    """Returns the source texts of a language in a corpus's training split."""
    if language not in corpus.languages_of("train"):
        return set()
    return {source for source, _ in corpus.pairs("train", language)}


def _split_of(english: str, split: splitting.KeySplit) -> str | Rejection:
    key = splitting.english_key(english)
    if key in split.given:
        return Rejection.GIVEN
    if key in split.test or key in split.valid:
        if not splitting.can_be_held_out(english):
            return Rejection.HELD_OUT_WORDING
        return "test" if key in split.test else "valid"
    if key in split.near_duplicates:
        return Rejection.NEAR_DUPLICATE
    return Rejection.OVERLAPPING if key in split.overlapping else "train"


def _sorted_counts(counts: collections.Counter[str]) -> dict[str, int]:
    """Returns the counts above 0, sorted by name."""
    return dict(sorted((+counts).items()))


def _check_not_empty(collected: CollectedPairs, selected: Collection[str], not_read: Sequence[str]):
    """Raises UserError if there is no pair at all, or no entry in one of the selected languages."""
    missing = set(selected) - set(collected.read)
    if missing and (collected.read or not collected.unlabelled):
        reasons = " ".join(["the sources of this corpus have no entries in that language.", *not_read])
        raise UserError(f"--languages={min(missing)}: {reasons}")
    if not collected.pairs:
        raise UserError(f"nothing to build a corpus from: {_why_empty(collected, not_read)}")


def _why_empty(collected: CollectedPairs, not_read: Sequence[str]) -> str:
    if collected.read:
        reasons = sum(collected.rejected.values(), collections.Counter())
        read = counted(collected.read.total(), "entry", "entries")
        return f"{read} read, all of them rejected ({listing(reasons)})."
    if collected.unlabelled:
        return (
            f"the names of these files do not contain their language: {', '.join(sorted(collected.unlabelled)[:5])}. "
            "Use LANG/LC_MESSAGES/x.mo, LANG/x.po, LANG.po or LANG.tsv."
        )
    return " ".join(not_read) or "the inputs have no translations into a language other than English."
