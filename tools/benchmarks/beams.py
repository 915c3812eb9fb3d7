"""The flat beam search against one that reorders its caches, by beam size and length.

    python -m tools.benchmarks.beams [--beams=1,2,4,8] [--lengths=16,64,256] [--rounds=4]

The paper leaves open which is faster where. Both are our own programs for the same model and search, whose results
differ by rounding alone; they are measured in turn, in CPU time of one core. Writes the table to docs/performance.md;
takes a quarter of an hour.
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
flags.DEFINE_string("output", "docs/performance.md", "page that the numbers are written to", flag_values=_VALUES)


def main(arguments: list[str]):
    """Measures and writes the table."""
    app.no_arguments(arguments[1:])
    beams, lengths = _numbers("beams"), _numbers("lengths")
    markdown.around(pathlib.Path(_VALUES.output), "beams")  # reports a mistake before the measurements
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
    markdown.replace(pathlib.Path(_VALUES.output), "beams", text)


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
