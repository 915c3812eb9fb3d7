"""The readable report of a corpus: a table of languages, what was dropped and why, and what to know about it."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from lingvo_moe.data import splitting
from lingvo_moe.data.corpus import SPLITS
from lingvo_moe.data.drop import Drop

_COLUMNS = ("language", "read", *SPLITS, "dropped", "duplicate")


def report(manifest: Mapping[str, Any]) -> str:
    """Returns the report's text. In each line: read = train + valid + test + dropped + duplicate."""
    every = {**manifest["languages"], **manifest["languages_without_pairs"]}
    rows = [_row(language, every[language]) for language in sorted(every)]
    rows.append(("all", *(sum(column) for column in zip(*(row[1:] for row in rows)))))
    width = max(len(row[0]) for row in [*rows, _COLUMNS])
    table = ["".join([f"{name:<{width}}", *(f"{cell:>11}" for cell in cells)]) for name, *cells in [_COLUMNS, *rows]]
    keys = manifest["english_keys"]
    head = [
        f"Corpus of {len(manifest['languages'])} languages into English, preset {manifest['preset']}",
        f"from {len(manifest['inputs'])} inputs: {', '.join(manifest['inputs'])}",
        f"fingerprint {manifest['fingerprint']}",
        f"different English sentences (keys): {keys['all']}, of them {keys['eligible']} might be held out, "
        f"{keys['test']} are test and {keys['valid']} validation sentences",
    ]
    return "\n".join(
        [
            *head,
            "",
            *(f"WARNING: {warning}" for warning in warnings(manifest)),
            *_left_out(manifest),
            "",
            *table,
            "",
            "dropped, by reason:",
            *_reasons(every),
            "",
        ]
    )


def warnings(manifest: Mapping[str, Any]) -> list[str]:
    """Returns what a user of this corpus should know before trusting its scores."""
    keys, found = manifest["english_keys"], []
    for split, share in (("test", splitting.TEST), ("valid", splitting.VALID)):
        if keys[split] < share.enough:
            found.append(
                f"the {split} split has {keys[split]} English sentences (fewer than {share.enough}): only "
                f"{keys['eligible']} have {splitting.MIN_WORDS} to {splitting.MAX_WORDS} words and no "
                "placeholder."
            )
    if manifest["missing_packages"]:
        found.append(f"packages that the distribution does not have: {', '.join(manifest['missing_packages'])}.")
    return found


def listing(counts: Mapping[str, int], limit: int = 10) -> str:
    """Returns `a 3, b 2`, largest first, at most `limit` of them."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    more = f", and {len(ranked) - limit} more" if len(ranked) > limit else ""
    return ", ".join(f"{name} {count}" for name, count in ranked[:limit]) + more


def _row(language: str, facts: Mapping[str, Any]) -> tuple:
    dropped = dict(facts["dropped"])
    duplicates = dropped.pop(Drop.DUPLICATE, 0)
    pairs = (facts[split]["pairs"] if split in facts else 0 for split in SPLITS)
    return (language, facts["read"], *pairs, sum(dropped.values()), duplicates)


def _left_out(manifest: Mapping[str, Any]) -> list[str]:
    left_out = {
        "not read, their language is English (entries)": manifest["english_labels"],
        "not read, nothing tells their language (entries)": manifest["unlabelled"],
        "not read, links that lead out of their input": manifest["links_left_out"],
    }
    return [f"{what}: {listing(counts)}" for what, counts in left_out.items() if counts]


def _reasons(every: Mapping[str, Mapping[str, Any]]) -> list[str]:
    total = collections.Counter()
    for facts in every.values():
        total.update(facts["dropped"])
    return [f"{count:>11}  {reason}" for reason, count in total.most_common()]
