"""What the registered giants exchange between cores is what the golden texts say, and M4's is what the paper says."""

from __future__ import annotations

import re

import pytest

from lingvo_moe.analysis import miniature
from tools import write_golden

pytestmark = pytest.mark.slow

_GOLDEN = write_golden.DIRECTORY / "collectives"


@pytest.mark.parametrize("name", write_golden.giants())
def test_exchanges_of_the_miniature(name):
    """A mask, activation or weight that the partitioner begins to gather shows here, whichever annotation was lost."""
    golden = _GOLDEN / f"{name}.txt"
    assert golden.read_text(encoding="utf-8") == write_golden.collectives(name), (
        f"{name} no longer exchanges what {golden.name} says; if that is meant, run `make golden` and commit the difference."
    )


def test_no_golden_text_without_a_model():
    assert {path.stem for path in _GOLDEN.glob("*.txt")} == set(write_golden.giants())


@pytest.mark.parametrize("name", [name for name in write_golden.giants() if re.match(r"m4.MoE|sparse_lm", name)])
def test_two_all_to_all_forward_and_two_backward_per_layer_with_experts(name):
    """GShard section 3.2 and Algorithm 2, in the golden texts themselves. What was exchanged is kept, not exchanged again, and
    nothing is gathered but the dense weights that the 1T model's layout cuts."""
    small = miniature.of(name)
    found = dict(re.findall(r"([\w-]+) among \d+: (\d+)", (_GOLDEN / f"{name}.txt").read_text(encoding="utf-8")))
    layers_with_experts = small.model.num_layers // 2
    assert int(found["all-to-all"]) == 4 * layers_with_experts
    assert set(found) <= {"all-to-all", "all-reduce", "all-gather"}
    assert ("all-gather" in found) == (small.layout == "gshard_sharded_update")
