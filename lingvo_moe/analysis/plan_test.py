"""Protects plans: bytes by category, collectives per layer, times, and the reason why a program does not fit."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lingvo_moe import experiment, tree
from lingvo_moe.analysis import plan, plan_text
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.engines.cluster import Cluster
from lingvo_moe.engines.topology import Slice
from lingvo_moe.errors import UserError
from lingvo_moe.layers import mixture_of_experts
from lingvo_moe.program import Argument, Program
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.testing.plans import training_plan

pytestmark = pytest.mark.slow

_REPEATS = 2
_TINY = [
    "model.num_layers=8",
    "model.model_dim=128",
    "model.hidden_dim=256",
    "model.num_heads=2",
    "model.head_dim=64",
    "model.num_groups=16",
    "model.source_vocabulary=512",
    "model.target_vocabulary=256",
    "model.tied_embeddings=false",
    "optimizer.beta1=0",
    "model.unroll=false",
    "model.remat=full",
    "input.source_length=32",
    "input.target_length=32",
    "input.batch_size=32",
    "search.max_length=8",
    "decoding_batch=16",
]
_TINY_LANGUAGE_MODEL = [
    "model.num_layers=4",
    "model.hidden_dim=256",
    "model.num_heads=2",
    "model.head_dim=64",
    "model.target_vocabulary=256",
    "model.remat=full",
    "input.target_length=32",
    "input.batch_size=32",
]
_WITHOUT_DROPOUT = "model.residual_dropout=0"  # compiles in less time


def tiny(*changes: str) -> experiment.Experiment:
    return experiment.get("m4.Quickstart", [*_TINY, *changes], DeviceMesh((8,)))


def tiny_language_model(*changes: str) -> experiment.Experiment:
    """The same layers in one stack without cross-attention, which compiles in less than half of the time."""
    return experiment.get("sparse_lm.Small", [*_TINY_LANGUAGE_MODEL, *changes], DeviceMesh((8,)))


def make(config: experiment.Experiment, program: str = "train") -> plan.Plan:
    return plan.make("tiny", config, Slice.of("v3:2x2x1"), program)


@pytest.fixture(scope="module")
def planned() -> plan.Plan:
    return make(tiny_language_model())


def test_memory_has_the_programs_inputs_by_category(planned):
    """Experts are sharded over 8 cores, all else is replicated."""
    weights = tree.flatten(tiny_language_model().model.weights())
    experts = sum(weight.size for weight in weights.values() if "E" in weight.logical_axes)
    assert planned.memory.distributed_weights == 4 * experts // 8 > 0
    assert planned.memory.replicated_weights == 4 * (planned.weights - experts)
    assert 0 < planned.memory.optimizer_state < planned.memory.replicated_weights / 8  # factored
    assert planned.memory.temporaries > 0 and planned.fits


def test_weights_are_distributed_where_devices_have_different_shards():
    """A layout that shards a weight along an axis of one device distributes nothing."""
    weight = Argument("theta/weight", (8, 4), "float32", (-1, 0))
    kinds = [plan._kind(weight, Program("train", DeviceMesh(mesh), (weight,), (), (), b"")) for mesh in ((1,), (2,))]
    assert kinds == ["replicated_weights", "distributed_weights"]


def test_each_moe_layer_has_six_all_to_alls(planned):
    """Two forward, two rematerialised, two backward; no mask, activation or weight is gathered.

    The only AllGather is of counters of random numbers, once, smaller than one activation of one core.
    """
    collectives = {collective.kind: collective for collective in planned.collectives}
    assert collectives["all-to-all"].runs == 6 * _REPEATS and collectives.keys() <= {
        "all-to-all",
        "all-reduce",
        "all-gather",
    }
    assert "all-gather" not in collectives or collectives["all-gather"].bytes < 32 * 32 // 8 * 128 * 4


def test_time_is_cycles_and_collectives(planned):
    """With the published clock and the model of the links."""
    assert planned.compute_seconds == pytest.approx(planned.cycles / 940e6)
    assert planned.step_seconds == planned.compute_seconds + sum(e.seconds for e in planned.collectives)
    assert 0.05 < planned.rematerialised_cycles / planned.cycles < 0.5
    steps = 1e6 / (32 * 32)  # source tokens
    assert planned.device_years(1e6) == pytest.approx(steps * planned.step_seconds * 8 / (365.25 * 86400))


@pytest.fixture(scope="module")
def other() -> plan.Plan:
    """With two changes, of which each concerns other figures: nothing is recomputed, and dense weights are sharded."""
    return make(tiny_language_model("model.remat=none", "layout=gshard_sharded_update", _WITHOUT_DROPOUT))


def test_without_rematerialisation_nothing_is_recomputed(other):
    """Four AllToAll per layer are left, as many as without shards of dense weights."""
    assert other.rematerialised_cycles == 0
    assert {e.kind: e.runs for e in other.collectives}["all-to-all"] == 4 * _REPEATS


def test_sharded_update_shards_dense_weights(planned, other):
    """Dense hidden weights are sharded over 8 cores."""
    dense = sum(
        weight.size
        for path, weight in tree.flatten(tiny_language_model().model.weights()).items()
        if "H" in weight.logical_axes and "E" not in weight.logical_axes
    )
    moved = other.memory.distributed_weights - planned.memory.distributed_weights
    assert moved == 4 * dense // 8 > 0
    assert other.memory.replicated_weights == planned.memory.replicated_weights - 4 * dense


def test_decoding_of_a_language_model_has_a_plan(monkeypatch):
    """Its rows are prompts; no gradient is computed. Each step reads the keys and values of a layer in place.

    Where a step read its cache after the write, XLA copied each layer's part, 16 MiB of keys here.
    """
    compiled, compile_program = [], Slice.compile
    monkeypatch.setattr(
        Slice, "compile", lambda target, program: compiled.append(compile_program(target, program)) or compiled[-1]
    )
    sizes = ["model.model_dim=1024", "model.hidden_dim=1024", "model.num_heads=8", "model.target_vocabulary=512"]
    settings = [*sizes, "model.num_layers=8", "input.target_length=320"]
    config = experiment.get("dense_lm.Dense64BMesh8x16", settings, DeviceMesh((1, 8)))
    result = make(config, "decode")
    assert result.fits and result.memory.optimizer_state == 0 and result.model_flops is None
    printed = plan_text.text(result, 1e12)
    assert "prompts/s" in printed and "all of its prompts have ended" in printed
    prompts, hypotheses, steps = config.decoding_batch, config.search.beam_size, config.search.max_length
    keys = prompts * config.model.head_dim * (320 - steps + hypotheses * steps)  # of the one head of a core
    copied = [
        instruction.name
        for instruction, runs in Module(compiled[0].hlo(), 8).runs()
        if runs == 8 * steps and instruction.opcode in ("fusion", "copy") and instruction.result_bytes == 2 * keys
    ]
    assert 2 * keys == 2**24 and not copied


def test_experts_compute_few_rows_in_a_step_of_decoding(monkeypatch):
    """It has 1024 positions for each expert, those of 8 cores, of which a pass computes 128."""
    sizes = {"num_layers": 4, "num_experts": 32, "model_dim": 256, "hidden_dim": 8192, "num_heads": 2}
    sizes |= {"source_vocabulary": 512, "target_vocabulary": 512, "num_groups": 8, "inference_num_groups": 8}
    settings = [f"model.{name}={value}" for name, value in sizes.items()]
    settings += ["input.source_length=32", "input.target_length=32", "search.max_length=32", "input.batch_size=32"]
    config = experiment.get("m4.MoE128E12L", [*settings, "decoding_batch=256"], DeviceMesh((8,)))
    compacted = make(config, "decode")
    monkeypatch.setattr(mixture_of_experts, "rows_of_a_pass", lambda *arguments: None)
    complete = make(config, "decode")
    assert (compacted.unknown_loops, complete.unknown_loops) == (1, 0)
    assert compacted.cycles_by_part["experts"] < complete.cycles_by_part["experts"] / 2


def test_decoding_has_a_plan():
    """Beam search may stop early; its loop counts with its limit. Replicated weights need no all-gather."""
    result = make(tiny("layout=gshard"), "decode")
    assert result.fits and result.memory.optimizer_state == 0 and result.tokens == 16 * 32
    assert "all-gather" not in {collective.kind for collective in result.collectives}


def test_program_that_does_not_fit_has_largest_buffers_and_remedies():
    """The user learns which tensor is too large and which settings help."""
    changes = ["model.target_vocabulary=32_000_000", "model.num_experts=0", "model.num_layers=2", _WITHOUT_DROPOUT]
    result = make(tiny_language_model(*changes))
    assert (
        not result.fits and result.cycles is None and result.step_seconds is None and result.device_years(1e9) is None
    )
    text = plan_text.text(result, 1e12)
    assert "DOES NOT FIT" in text and "input.batch_size" in text
    largest = result.largest_buffers[0]
    assert largest.shape == "f32[4,32,32000000]" and largest.shape in text, "the logits of one core's rows"
    assert largest.bytes == 4 * 32 * 32_000_000 * 4
    assert [b.bytes for b in result.largest_buffers] == sorted((b.bytes for b in result.largest_buffers), reverse=True)


def test_text_marks_the_origin_of_every_figure(planned):
    """Compiler, program or our model."""
    text = plan_text.text(planned, 1e12)
    for part in ("replicated weights", "[c]", "[p]", "[m]", "all-to-all", "rematerialisation", "core-years", "Jouppi"):
        assert part in text


def test_operand_precision_is_what_is_sent_and_multiplied(planned):
    """A TPU rounds float32 operands to bfloat16, before it sends tokens to the experts; `highest` does neither."""
    rounded, exact = planned, make(tiny_language_model("matmul_precision=highest"))
    sent = [{c.kind: c.bytes for c in found.collectives}["all-to-all"] for found in (rounded, exact)]
    assert sent[1] == 2 * sent[0]
    assert exact.cycles > rounded.cycles


def test_a_plan_for_gpus_has_the_collectives_of_the_module():
    """The reading of XLA's text for GPUs: loops, asynchronous collectives, and the work of every kernel."""
    planned = plan.make("sparse_lm.Small", tiny_language_model(_WITHOUT_DROPOUT), Cluster.of("h100:2x4"))
    runs = {(found.kind, found.group): found.runs for found in planned.collectives}
    assert runs["all-to-all", 8] == 6 * _REPEATS, "two forward, two rematerialised, two backward"
    assert planned.fits and planned.device == "GPU" and planned.memory.temporaries > 0
    assert planned.compute_seconds > 0 and planned.collective_seconds > 0
    # No part is free, and the roofline counts at least the model's own operations at the peak.
    assert all(planned.cycles_by_part[part] > 0 for part in ("self_attention", "experts", "softmax", "optimizer"))
    assert 0 < planned.utilisation < 1
    page = plan_text.text(planned, 1e9, price=2.0)
    assert planned.scheduled_seconds and "collectives overlapped, at the compiler's estimates" in page
    assert (
        "on h100:2x4, 8 GPUs" in page
        and "memory per GPU" in page
        and "GPU-years" in page
        and "at 2 per GPU-hour" in page
    )


def test_bubbles_of_a_pipeline_are_the_schedules_share_of_its_iterations(monkeypatch):
    """(L - 1) / (M + L - 1) of the cycles in the loop of iterations, which the compiled module runs M + L - 1 times."""
    compile_program, modules = Slice.compile, []

    def remember(self, program):
        compiled = compile_program(self, program)
        modules.append(Module(compiled.hlo(), 8))
        return compiled

    monkeypatch.setattr(Slice, "compile", remember)
    stages, microbatches = 2, 4
    changes = ["layout=pipeline_gshard", "model.pipeline=gpipe", f"model.stages={stages}", "model.remat=full"]
    changes += [f"model.microbatches={microbatches}", _WITHOUT_DROPOUT]
    config = experiment.get("dense_lm.Small", changes, DeviceMesh((2, 4)))
    planned = plan.make("dense_lm.Small", config, Slice.of("v3:2x2x1"))

    iterations = microbatches + stages - 1
    in_iterations = [(i, times) for i, times in modules[0].runs() if f"_of_{iterations}_iterations" in i.op_name]
    cycles = sum(instruction.cycles * times for instruction, times in in_iterations)
    assert cycles > planned.cycles / 4 and all(times % iterations == 0 for _, times in in_iterations if times > 1)
    assert planned.bubble_cycles == pytest.approx(cycles * (stages - 1) / iterations, rel=1e-6)
    assert "% bubbles" in plan_text.text(planned, 1e12)


def test_plan_round_trips_as_json(planned, tmp_path):
    """docs/plans has plans that other tools read."""
    planned.save(tmp_path / "plan.json")
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["version"] == 4 and saved["memory"]["optimizer_state"] == planned.memory.optimizer_state
    assert plan.Plan.load(tmp_path / "plan.json") == planned


def test_a_plan_is_written_completely_or_not_at_all(tmp_path, capsys):
    """By a file of this process's own; `plan --json=-` prints the plan, as `eval` prints its scores."""
    one, path = training_plan("m4.MoE128E12L", 128), tmp_path / "plan.json"
    (tmp_path / "plan.json.partial").mkdir()
    one.save(path)
    with pytest.raises(TypeError):
        dataclasses.replace(one, tokens=object()).save(path)
    assert plan.Plan.load(path) == one and len(list(tmp_path.iterdir())) == 2
    one.save("-")
    assert json.loads(capsys.readouterr().out)["model"] == "m4.MoE128E12L"


def test_options_of_the_compiler_are_recorded(planned, tmp_path):
    """A plan made with other options is another plan; one without the field, of an older version, has none."""
    changed = dataclasses.replace(planned, compiler_options=("xla_tpu_run_space_to_batch=false",))
    changed.save(tmp_path / "plan.json")
    assert plan.Plan.load(tmp_path / "plan.json") == changed != planned
    assert "compiler options: xla_tpu_run_space_to_batch=false\n" in plan_text.text(changed, 1e12)
    values = json.loads((tmp_path / "plan.json").read_text())
    del values["compiler_options"]
    (tmp_path / "plan.json").write_text(json.dumps(values))
    assert plan.Plan.load(tmp_path / "plan.json") == planned


@pytest.mark.parametrize("text", ["", "[]", '{"version": 4}', '{"version": 4, "collectives": 3, "changes": []}'])
def test_other_file_is_an_error(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match="plan.json: not a plan"):
        plan.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("text, version", [("{}", 1), ('{"version": 3}', 3), ('{"version": 5}', 5)])
def test_a_plan_of_another_version_is_refused(text, version, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(
        UserError,
        match=f"^[^(]*plan.json: a plan of version {version}, this program reads version 4.*regenerate it with",
    ):
        plan.Plan.load(tmp_path / "plan.json")


def test_missing_file_is_an_error_that_names_it(tmp_path):
    """Not a traceback."""
    with pytest.raises(UserError, match="absent.json: cannot be read"):
        plan.Plan.load(tmp_path / "absent.json")
