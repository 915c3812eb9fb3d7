"""Protects figure 8's numbers: which layers they are of, what is counted, and that the saved ones are read."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from lingvo_moe.engines.topology import Slice
from tools.partitioning import layer_pairs
from tools.report import __main__ as report
from tools.report import layers
from tools.report.layers import LayerPair

_SAVED = pathlib.Path(__file__).parents[2] / "docs" / "layer_pairs.json"
# One kernel of each kind: 940 cycles are a microsecond, 450 kB of operands and results, too.
_HLO = """HloModule jit_layers, is_scheduled=true

ENTRY %main (a: f32[56250]) -> f32[56250] {
  %a = f32[56250]{0} parameter(0)
  %looked_up = f32[56250]{0} copy(%a), metadata={op_name="call/embedding/gather"}, \
backend_config={"estimated_cycles":"940"}
  %routed = f32[56250]{0} copy(%a), metadata={op_name="call/feed_forward_1/gating/Max"}, \
backend_config={"estimated_cycles":"1880"}
  %sent = f32[65536]{0} all-to-all(%a), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %unknown = f32[56250]{0} copy(%a), metadata={op_name="call/feed_forward_1/experts/Cast"}
  ROOT %normed = f32[56250]{0} copy(%a), metadata={op_name="call/Mean"}, backend_config={"estimated_cycles":"940"}
}
"""


def pair(experts: int, scale: float = 1.0, **changes) -> LayerPair:
    compute = {"self_attention": 0.002, "gating": 0.001 * scale, "experts": 0.004}
    bound = {"self_attention": 0.001, "gating": 0.001, "experts": 0.003}
    made = LayerPair(
        f"m4.MoE{experts}E12L", experts, experts, 2048 * experts, compute, bound, {"all-to-all": 0.001 * scale}
    )
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize("model", layer_pairs.PAIRS)
def test_the_layers_are_a_dense_and_an_moe_layer_with_equal_tokens(model):
    """The encoder has one layer of each, on as many cores as there are experts; the paper keeps tokens per core."""
    config = layer_pairs.pair_of(model, layer_pairs.PAIRS[model])
    assert config.model.layer_patterns["encoder"] == ("dense", "moe") and config.model.num_layers == 4
    assert config.model.num_experts == config.mesh.size
    assert config.input.batch_size * config.input.lengths["source"] == 2048 * config.mesh.size


def test_embeddings_and_kernels_without_an_estimate_are_left_out():
    """Two copies count; each has 0.45 MB to move, a microsecond at the memory's bandwidth."""
    config = layer_pairs.pair_of("m4.MoE128E12L", ("mesh=8", "input.batch_size=2048"))
    target = Slice("v3:2x2x1", "v3", (2, 2, 1), tuple(range(8)))
    read = layer_pairs.read("m4.MoE128E12L", config, target, _HLO)
    assert read.compute == pytest.approx({"gating": 2e-6, "other": 1e-6})
    assert read.roofline == pytest.approx({"gating": 1e-6, "other": 1e-6})
    # 256 KiB on each of 8 cores, of which a quarter crosses the middle of 2 x 2 chips: two links.
    assert read.collectives == pytest.approx({"all-to-all": 2**18 * 8 / 4 / (2 * 82e9)})


@pytest.mark.slow
def test_a_pair_has_two_all_to_all_and_no_other_collective():
    """The forward pass of one MoE layer: there and back (GShard section 3.2), on a small slice."""
    small = ("mesh=8", "input.batch_size=16", "model.num_experts=8", "model.num_groups=16", "model.model_dim=256")
    sizes = ("model.hidden_dim=512", "model.num_heads=2", "input.source_length=32", "model.inference_num_groups=8")
    made = layer_pairs.compiled("m4.MoE128E12L", (*small, *sizes, "decoding_batch=16"))
    assert set(made.collectives) == {"all-to-all"}
    assert {"self_attention", "feed_forward", "gating", "dispatch", "experts", "combine"} <= set(made.compute)
    assert all(made.compute[part] > 0 for part in made.compute)


def test_saved_pairs_are_those_of_the_tool_and_plausible():
    """Each kernel's bound is below the compiler's estimate but for a little, so their sum is."""
    pairs = layers.load(_SAVED)
    assert [saved.model for saved in pairs] == list(layer_pairs.PAIRS)
    for saved in pairs:
        assert saved.tokens == 2048 * saved.cores and saved.experts == saved.cores
        for part, compiled in saved.compute.items():
            assert 0.3 * compiled < saved.roofline[part] < 1.01 * compiled


def test_the_table_and_the_figure_have_the_same_values(tmp_path):
    """7 + 1 ms against 5 + 1 ms: 75 %; the statements compare the pairs with the fewest and the most experts."""
    pairs = [pair(128), pair(2048, scale=4.0)]
    layers.save(pairs, tmp_path / "pairs.json")
    assert layers.load(tmp_path / "pairs.json") == pairs
    rows = layers.table(pairs).rows
    assert rows[0] == ["m4.MoE128E12L", "128", "2.00", "0.00", "4.00", "1.00", "0.00", "1.00", "0.00", "8.00", ""]
    assert rows[1] == ["roofline [m]", "128", "1.00", "0.00", "3.00", "1.00", "0.00", "1.00", "0.00", "6.00", "75.0 %"]
    page = report.page({}, pairs).decode()
    for text in ("4.00 ×", "1.75 ×", "75.0 %", "64.3 %", "12.5 %", "28.6 %"):
        assert f">{text}</td>" in page
    assert "not compiled" not in page


def test_without_results_the_page_names_the_command():
    page = report.page({}).decode()
    assert (
        "not compiled: python -m tools.partitioning.layer_pairs" in page
        and 'alt="Stacked bars: milliseconds' not in page
    )
