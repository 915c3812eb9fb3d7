"""The registered M4 family is the paper's: weights, layers and cores of GShard table 1."""

from __future__ import annotations

import pytest

from lingvo_moe import experiment, tree
from lingvo_moe.analysis.collectives import find_collectives
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.engines.pjrt import Engine
from lingvo_moe.layers.routers.base import expert_capacity

TABLE_1 = {  # GShard table 1 and section 4.2: weights, experts per layer, experts in total, layers, cores
    "m4.MoE2048E36L": (600e9, 2048, 36_864, 36, 2048),
    "m4.MoE2048E12L": (200e9, 2048, 12_288, 12, 2048),
    "m4.MoE512E36L": (150e9, 512, 9_216, 36, 512),
    "m4.MoE512E12L": (50e9, 512, 3_072, 12, 512),
    "m4.MoE128E36L": (37e9, 128, 2_304, 36, 128),
    "m4.MoE128E12L": (12.5e9, 128, 768, 12, 128),
    "m4.MoE2048E60L": (1e12, 2048, 61_440, 60, 2048),
    "m4.Dense96L": (2.3e9, 0, 0, 96, 2048),
    "m4.Dense96LGPipe": (2.3e9, 0, 0, 96, 2048),
    "m4.TransformerBig": (0.4e9, 0, 0, 12, 8),
}
# Counted by hand from appendix A.2. The paper prints one or two digits of them, partly of binary billions: 39.5e9
# weights are 36.8 x 2^30, its 37B.
_ROUNDED = 0.075
WEIGHTS = {
    "m4.MoE2048E36L": 619_399_274_496,
    "m4.MoE2048E12L": 206_553_808_896,
    "m4.MoE512E36L": 155_514_494_976,
    "m4.MoE512E12L": 51_925_549_056,
    "m4.MoE128E36L": 39_543_300_096,
    "m4.MoE128E12L": 13_268_484_096,
    "m4.MoE2048E60L": 1_032_244_740_096,
    "m4.Dense96L": 2_346_160_128,
    "m4.Dense96LGPipe": 2_346_160_128,
    "m4.TransformerBig": 375_193_600,
}


def by_hand(experts: int, layers: int, attention_width: int, vocabularies: int) -> int:
    """Counts the weights of a model of width 1024 and hidden width 8192; `vocabularies` is the sum of their sizes."""
    attention = 4 * 1024 * attention_width  # query, key, value, output
    feed_forward = 2 * 1024 * 8192
    attentions = layers // 2 + 2 * (layers // 2)  # self-attention everywhere, cross-attention in the decoder
    norms = attentions + layers + 2  # before each attention and feed-forward layer, and after each stack
    moe = layers // 2 if experts else 0
    routed = moe * (experts * feed_forward + 1024 * experts)  # with the gate
    return (
        attentions * attention
        + norms * 2 * 1024
        + (layers - moe) * feed_forward
        + routed
        + vocabularies * 1024  # source and target embeddings, and the softmax
    )


@pytest.mark.parametrize("name", sorted(TABLE_1))
def test_weights_experts_layers_and_cores_are_table_1s(name):
    """A wrong dimension anywhere in a model changes its number of weights."""
    published, experts, total, layers, cores = TABLE_1[name]
    config = experiment.get(name)
    width = 1024 if name.startswith(("m4.Dense96L", "m4.TransformerBig")) else 2048
    vocabularies = 3 * 32_000 if name == "m4.TransformerBig" else 64_000 + 2 * 32_000
    assert config.model.num_weights() == by_hand(experts, layers, width, vocabularies) == WEIGHTS[name]
    assert WEIGHTS[name] == pytest.approx(published, rel=_ROUNDED)
    assert (config.model.num_experts, config.model.num_layers, config.mesh.size) == (experts, layers, cores)
    expert_size = 2 * 1024 * 8192
    assert experts * (layers // 2) == total
    declared = sum(w.size for path, w in tree.flatten(config.model.weights()).items() if "E" in w.logical_axes)
    assert declared == total * expert_size


@pytest.mark.parametrize(("name", "sentences"), [("MoE2048E36L", 2), ("MoE512E36L", 8), ("MoE128E36L", 32)])
def test_decoding_has_room_for_the_hypotheses_of_several_sentences(name, sentences):
    """A core decodes 32 sentences of 4 hypotheses, one group, and an expert takes all hypotheses of `sentences`.

    Hypotheses of a sentence differ by a word or two and often choose the same experts.
    """
    config = experiment.get(f"m4.{name}")
    model, hypotheses = config.model, config.decoding_batch * config.search.beam_size
    assert (config.decoding_batch, config.search.beam_size) == (32 * config.mesh.size, 4)
    assert model.inference_num_groups == config.mesh.size
    group = hypotheses // model.inference_num_groups
    factor = expert_capacity(group, model.num_experts, model.inference_capacity_factor)
    assert max(factor, min(model.inference_min_capacity, group)) == 4 * sentences


@pytest.mark.parametrize(("name", "capacity"), [("m4.MoE2048E36L", 1), ("m4.MoE512E12L", 4), ("m4.MoE128E36L", 64)])
def test_groups_and_capacity_are_the_papers(name, capacity):
    """G = 2 D groups of N/G source tokens; the capacity per group is C = 2N/(G E) (section 2.2)."""
    config = experiment.get(name)
    tokens = config.input.batch_size * config.input.source_length
    assert config.model.num_groups == 2 * config.mesh.size
    tokens_per_group = tokens // config.model.num_groups
    assert expert_capacity(tokens_per_group, config.model.num_experts, config.model.capacity_factor) == capacity


def test_pocket_fits_into_40_megabytes():
    """In int8, with a float32 scale for each vector: the file is to be shipped."""
    model = experiment.get("m4.Pocket").model
    weights = tree.flatten(model.weights()).values()
    scales = sum(4 * weight.size // weight.shape[-1] for weight in weights if len(weight.shape) > 1)
    vectors = sum(4 * weight.size for weight in weights if len(weight.shape) < 2)
    assert sum(weight.size for weight in weights if len(weight.shape) > 1) + scales + vectors < 40e6
    assert model.layer_patterns == {"encoder": ("dense",) * 5 + ("moe",), "decoder": ("dense", "moe")}


@pytest.mark.slow
def test_devices_of_the_quickstart_rarely_wait_for_each_other():
    """A step of its two devices has 31 collectives; with all dense weights sharded along M it had 170, and took longer.

    Only the embedding tables are sharded, and the gradients of the other weights are added up together.
    """
    own = experiment.get("m4.Quickstart", ["platform=cpu"])
    module = Engine(2, "cpu").compile(own.steps.train(own.batch_specs())).hlo()
    assert 0 < len(find_collectives(Module(module, 2))) <= 40
