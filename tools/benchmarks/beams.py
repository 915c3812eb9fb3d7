"""The flat beam search against one that reorders its caches, by beam size and length.

    python -m tools.benchmarks.beams [--beams=1,2,4,8] [--lengths=16,64,256] [--rounds=4] [--output=PAGE]

The paper leaves open which is faster where. Both are our own programs for the same model and search, whose results
differ by rounding alone; they are measured in turn, in CPU time of one core. Prints the table, and writes it to
--output: by default, docs/performance.md for the default measurements, and no page for others. Takes a quarter of an
hour.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.errors import UserError
from lingvo_moe.utils import progress
from tools import markdown
from tools.benchmarks import comparisons, work
from tools.benchmarks.comparisons import Comparison, Directories, Result

_VALUES = flags.FlagValues()
flags.DEFINE_list("beams", ["1", "2", "4", "8"], "hypotheses per sentence", flag_values=_VALUES)
flags.DEFINE_list("lengths", ["16", "64", "256"], "tokens of a translation", flag_values=_VALUES)
flags.DEFINE_integer("rounds", 4, "measurements of each side", lower_bound=2, flag_values=_VALUES)
flags.DEFINE_string(
    "directory", "build/benchmarks", "directory of the workers' logs and the cache of programs", flag_values=_VALUES
)
flags.DEFINE_string(
    "output",
    None,
    "page that the numbers are written to; by default docs/performance.md, with the other flags' defaults alone",
    flag_values=_VALUES,
)
_PAGE = "docs/performance.md"


def main(arguments: list[str]):
    """Measures and writes the table."""
    app.no_arguments(arguments[1:])
    beams, lengths = _numbers("beams"), _numbers("lengths")
    published = all(_VALUES[flag].value == _VALUES[flag].default for flag in ("beams", "lengths", "rounds"))
    page = _VALUES.output if _VALUES.output is not None else _PAGE if published else None
    if page is not None:
        markdown.check("--output", page, "beams")  # reports a mistake before the measurements
    directories = Directories(pathlib.Path(_VALUES.directory).absolute(), pathlib.Path())
    results = {}
    with progress.bar("measuring", len(beams) * len(lengths) * _VALUES.rounds, "rounds") as advance:
        for beam in beams:
            for length in lengths:
                case = comparison(beam, length)
                count = functools.partial(advance, note=case.name)
                results[beam, length] = comparisons.run(case, _VALUES.rounds, directories, count)
    text = table(results)
    print(text)
    if page is not None:
        markdown.replace(pathlib.Path(page), "beams", text)


def comparison(beam: int, length: int) -> Comparison:
    """Returns the comparison of both searches."""
    flat = dataclasses.replace(work.TRANSLATION, kind="decode", capacity_factor=None, beam_size=beam, max_length=length)
    return Comparison(
        name=f"beam_{beam}_{length}",
        title=f"beam {beam}, {length} tokens",
        ours=flat,
        other=dataclasses.replace(flat, kind="reorder"),
        goal=1.0,
        equal=("weights", "batch", "beams", "decoded"),
    )


def table(results: dict[tuple[int, int], Result]) -> str:
    """Returns ratios by beam size (rows) and length (columns); below 1 the flat beam search is faster."""
    beams, lengths = (sorted({key[index] for key in results}) for index in (0, 1))
    rows = []
    for beam in beams:
        members = [results[beam, length] for length in lengths]
        cells = [f"{row.ratio:.2f} ({row.ours:.3f} s against {row.other:.3f} s)" for row in members]
        rows.append((str(beam), *cells))
    return markdown.table(("hypotheses", *(f"{length} tokens" for length in lengths)), rows)


def _numbers(flag: str) -> list[int]:
    given = getattr(_VALUES, flag)
    if not given or not all(text.strip().isdecimal() and int(text) > 0 for text in given):
        raise UserError(
            f"--{flag}={','.join(given)}: expected whole numbers above 0 with commas between them, like 1,4."
        )
    return [int(text) for text in given]


if __name__ == "__main__":
    app.run(main, _VALUES)
