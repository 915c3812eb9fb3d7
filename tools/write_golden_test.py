"""Tests that the collectives of the large models are those of the golden texts, and those of M4 the paper's.

Other `*_golden_test`s compile some of the miniatures, because one process with all of them needs 5 GB: TensorFlow keeps
parts of every graph that it has lowered.
"""

from __future__ import annotations

import re

import pytest

from lingvo_moe.analysis import miniature
from tools import plan_zoo, write_golden

_slow = pytest.mark.slow


def test_an_interruption_destroys_no_text(tmp_path):
    """The texts are of minutes of compiling; those of removed models go last."""
    write_golden._write(tmp_path, {"m4.a": "old", "m4.b": "old", "m4.removed": "old"})
    with pytest.raises(TypeError):
        write_golden._write(tmp_path, {"m4.a": "new", "m4.b": None})  # pyright: ignore[reportArgumentType]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "m4.a.txt": "new",
        "m4.b.txt": "old",
        "m4.removed.txt": "old",
    }
    write_golden._write(tmp_path, {"m4.a": "new", "m4.b": "new"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"m4.a.txt": "new", "m4.b.txt": "new"}


@pytest.mark.parametrize(
    ("name", "other"), [("sparse_lm.MoE10B32E", "sparse_lm.MoE577B2048E"), ("dense_lm.Dense64B", "dense_lm.Dense1T")]
)
def test_models_that_differ_in_size_share_a_miniature(name, other):
    """Each further one is ten seconds of compiling in these tests."""
    assert miniature.of(name) == miniature.of(other)


@_slow
@pytest.mark.parametrize("name", [name for name in plan_zoo.large_models() if not name.startswith(("m4.", "unet."))])
def test_collectives_of_the_miniature(name):
    """Protects the annotations: without one, the partitioner gathers a mask, an activation or a weight."""
    assert write_golden.golden_collectives(name) == write_golden.collectives(name), "`make golden`, if this is intended"


@_slow
def test_every_golden_text_has_a_model():
    """Protects against texts of removed models."""
    texts = (write_golden.DIRECTORY / "collectives").glob("*.txt")
    assert {path.stem for path in texts} == set(plan_zoo.large_models())


@_slow
@pytest.mark.parametrize("name", [name for name in plan_zoo.large_models() if re.match(r"m4.MoE|sparse_lm", name)])
def test_two_all_to_all_forward_and_two_backward_per_moe_layer(name):
    """Protects GShard section 3.2 and Algorithm 2 in the golden texts themselves.

    The outputs of collectives are saved for the backward pass, not communicated again, and nothing is gathered but the
    dense weights that the 1T model's layout shards.
    """
    small = miniature.of(name)
    found = dict(re.findall(r"([\w-]+) among \d+: (\d+)", write_golden.golden_collectives(name)))
    layers_with_experts = small.model.num_layers // 2
    assert int(found["all-to-all"]) == 4 * layers_with_experts
    assert set(found) <= {"all-to-all", "all-reduce", "all-gather"}
    assert ("all-gather" in found) == (small.layout == "gshard_sharded_update")
