"""The human-readable report of a corpus: a table of languages, rejected pairs by reason, and warnings."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from lingvo_moe.data.corpora import splitting
from lingvo_moe.data.corpora.rejection import Rejection
from lingvo_moe.data.corpus import SPLITS
from lingvo_moe.utils.counts import counted

_COLUMNS = ("read", *SPLITS, "rejected", "duplicate")


def report(manifest: Mapping[str, Any]) -> str:
    """Returns the report's text. In each line, read = train + valid + test + rejected + duplicate."""
    columns = ("voice" if _is_spoken(manifest) else "language", *_COLUMNS)
    languages = {**manifest["languages"], **manifest["languages_without_pairs"]}
    rows = [_row(language, languages[language]) for language in sorted(languages)]
    rows.append(("all", *(sum(column) for column in zip(*(row[1:] for row in rows)))))
    width = max(len(row[0]) for row in [*rows, columns])
    table = ["".join([f"{name:<{width}}", *(f"{cell:>11}" for cell in cells)]) for name, *cells in [columns, *rows]]
    head = [
        _title(manifest),
        f"from {counted(len(manifest['inputs']), 'input')}: {', '.join(manifest['inputs'])}",
        *(f"{split} split: {', '.join(names)}" for split, names in manifest.get("held_out_inputs", {}).items()),
        f"fingerprint {manifest['fingerprint']}",
        _sentences(manifest),
    ]
    return "\n".join(
        [
            *head,
            "",
            *(f"WARNING: {warning}" for warning in warnings(manifest)),
            *_skipped(manifest),
            "",
            *table,
            "",
            "rejected, by reason:",
            *_reasons(languages),
            "",
        ]
    )


def summary(manifest: Mapping[str, Any]) -> str:
    """Returns a line: how many entries were read, and how many of them are in no split, with the commonest reasons."""
    facts = [*manifest["languages"].values(), *manifest["languages_without_pairs"].values()]
    rejected = sum((collections.Counter(each["rejected"]) for each in facts), collections.Counter())
    reasons = f" ({listing(rejected, 3)})" if rejected else ""
    read = sum(each["read"] for each in facts)
    return f"{read:,} {'entry' if read == 1 else 'entries'} read, {rejected.total():,} of them rejected{reasons}"


def warnings(manifest: Mapping[str, Any]) -> list[str]:
    """Returns what limits the trust in scores on this corpus."""
    keys, messages = manifest["english_keys"], []
    for split, fraction in (("test", splitting.TEST), ("valid", splitting.VALID)):
        if keys[split] < fraction.min_keys and split not in manifest.get("held_out_inputs", {}):
            noun = "transcript" if _is_spoken(manifest) else "English sentence"
            few = f"the {split} split has {counted(keys[split], noun)} (fewer than {fraction.min_keys})"
            words = f"{splitting.MIN_WORDS} to {splitting.MAX_WORDS} words and no placeholder"
            why = "" if _is_spoken(manifest) else f": only {keys['eligible']} have {words}"
            messages.append(f"{few}{why}.")
    if shared := manifest.get("held_out_twice"):
        messages.append(f"{shared} English sentences are in both --valid_input and --test_input.")
    if manifest["missing_packages"]:
        messages.append(f"packages that the distribution does not have: {', '.join(manifest['missing_packages'])}.")
    return messages + _unlabelled(manifest) + manifest.get("unread_files", []) + manifest.get("doubtful_files", [])


def listing(counts: Mapping[str, int], limit: int = 10) -> str:
    """Returns `a 3, b 2`, largest count first, with at most `limit` names."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    more = f", and {len(ranked) - limit} more" if len(ranked) > limit else ""
    return ", ".join(f"{name} {count:,}" for name, count in ranked[:limit]) + more


def _unlabelled(manifest: Mapping[str, Any]) -> list[str]:
    """Returns a sentence about the user's own files whose language is not known; a preset's package may have some."""
    own = {
        name: count
        for name, count in manifest["unlabelled"].items()
        if any(name == given or name.startswith(f"{given}/") for given in manifest.get("own_inputs", []))
    }
    if not own:
        return []
    entries = counted(sum(own.values()), "entry", "entries")
    return [
        f"{entries} of catalogs whose language is not known were not read: {listing(own, 3)}. Name the file or its "
        f"directory after the language, such as de.po or de/app.po."
    ]


def _is_spoken(manifest: Mapping[str, Any]) -> bool:
    return bool(manifest.get("audio"))


def _title(manifest: Mapping[str, Any]) -> str:
    count, preset = len(manifest["languages"]), manifest["preset"]
    if _is_spoken(manifest):
        return f"Speech corpus of {counted(count, 'voice')}, preset {preset}"
    return f"Corpus of {counted(count, 'language')} into English, preset {preset}"


def _sentences(manifest: Mapping[str, Any]) -> str:
    keys = manifest["english_keys"]
    held_out = f"{keys['test']} are in the test and {keys['valid']} in the validation split"
    if _is_spoken(manifest):
        return f"different transcripts: {keys['all']}; {held_out}"
    return (
        f"different English sentences (keys): {keys['all']}, of which {keys['eligible']} are eligible for a held-out "
        f"split; {held_out}"
    )


def _row(language: str, facts: Mapping[str, Any]) -> tuple:
    rejected = dict(facts["rejected"])
    duplicates = rejected.pop(Rejection.DUPLICATE, 0)
    pairs = (facts[split]["pairs"] if split in facts else 0 for split in SPLITS)
    return (language, facts["read"], *pairs, sum(rejected.values()), duplicates)


def _skipped(manifest: Mapping[str, Any]) -> list[str]:
    skipped = {
        "skipped entries whose language is English": manifest["english_labels"],
        "skipped entries whose language is not known": manifest["unlabelled"],
        "skipped links that lead out of their input": manifest["skipped_links"],
    }
    return [f"{what}: {listing(counts)}" for what, counts in skipped.items() if counts]


def _reasons(languages: Mapping[str, Mapping[str, Any]]) -> list[str]:
    total: collections.Counter[str] = collections.Counter()
    for facts in languages.values():
        total.update(facts["rejected"])
    return [f"{count:>11}  {reason}" for reason, count in total.most_common()]
