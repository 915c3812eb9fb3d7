"""An experiment whose parts do not fit each other is an error before anything is compiled."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lingvo_moe import experiment, tree
from lingvo_moe.data.batching import Example
from lingvo_moe.data.speech import SpeechInput
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, Weight
from lingvo_moe.layers.convolution import Subsampling
from lingvo_moe.lazy import tf
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.sharding.layout import GSPMD_2D, DeviceMesh
from lingvo_moe.testing import experiments


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> experiments.Data:
    return experiments.make_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize(
    "assignments, mesh, message",
    [
        (
            [],
            3,
            r"input.batch_size is 16, which 3 devices \(mesh 3\) do not divide. Use --devices with a divisor of 16",
        ),
        (["decoding_batch=6"], 4, "decoding_batch is 6, which 4 devices"),
        (["reread_below=1.5"], 4, "reread_below is 1.5; expected at least 0 and at most 1"),
        (["matmul_precision=high"], 4, "use one of default, highest, bfloat16. Did you mean"),
        (["windowed_einsum_mib=-2"], 4, "windowed_einsum_mib is -2; expected a size in MiB, 0 for all matmuls, or -1"),
        (["model.num_experts=12"], 8, "model.num_experts is 12, which 8 devices"),
        (["model.num_groups=12"], 8, "model.num_groups is 12, which 8 devices"),
        (
            ["input.source_length=95", "model.num_groups=64"],
            2,
            "a batch has 16 x 95 = 1520 tokens in the encoder, which model.num_groups, 64, does not divide",
        ),
        (
            ["model.layer_pattern=dense,moe:num_experts=12"],
            8,
            "num_experts of layer moe:num_experts=12 is 12, which 8 devices.* the layer pattern with a multiple of 8",
        ),
        (
            ["model.encoder_layer_pattern=moe:num_groups=128", "input.source_length=60"],
            2,
            "a batch has 16 x 60 = 960 tokens in the encoder, which num_groups of layer moe:num_groups=128, 128,",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_errors_with_a_remedy(assignments, mesh, message):
    """The message names the field, both numbers and the flag to change."""
    with pytest.raises(UserError, match=message):
        experiment.get("m4.Quickstart", assignments, DeviceMesh((mesh,)))


def test_a_command_that_reads_no_batches_accepts_any_size_of_them():
    """`translate` decodes `decoding_batch` sentences at a time; before, its first error named another setting."""
    with pytest.raises(UserError, match="input.batch_size is 6, which 4 devices"):
        experiment.get("m4.Quickstart", ["input.batch_size=6"], DeviceMesh((4,)))
    experiment.get("m4.Quickstart", ["input.batch_size=6"], DeviceMesh((4,)), reads_batches=False)
    with pytest.raises(UserError, match="decoding_batch is 64, which 3 devices"):
        experiment.get("m4.Quickstart", [], DeviceMesh((3,)), reads_batches=False)


@pytest.mark.parametrize(
    "name, assignments, mesh, message",
    [
        (
            "m4.Quickstart",
            ["model.target_vocabulary=119", "layout=BGE:x,V~x"],
            (2,),
            r"^model.target_vocabulary is 119, which 2 devices \(layout BGE:x,V~x, mesh 2\) do not divide. Use "
            r"--set=model.target_vocabulary=120 in a new training, or --devices with a divisor of 119, .* 1.$",
        ),
        (
            "m4.Quickstart",
            ["model.source_vocabulary=511", "model.target_vocabulary=511"],
            (2, 2),
            "Use --set=model.source_vocabulary=512 --set=model.target_vocabulary=512 in",
        ),
        ("dense_lm.Small", ["model.target_vocabulary=518", "layout=gspmd"], (1, 4), "Use --set=.*=520 .* instance 2.$"),
    ],
)
def test_vocabularies_that_devices_do_not_divide_are_errors(name, assignments, mesh, message):
    """Before anything is traced, with the flag that sets the next size that fits."""
    with pytest.raises(UserError, match=message):
        experiment.get(name, assignments, DeviceMesh(mesh))
    experiment.get(name, [*assignments, "layout=auto"], DeviceMesh((2,)))


_PIPELINED = ("model.pipeline=gpipe", "model.stages=2")


@pytest.mark.parametrize(
    "assignments, mesh, message",
    [
        (["model.microbatches=3"], "2x2x2", "microbatches is 3, .*not divide input.batch_size, 16.*for instance 2"),
        (
            ["model.microbatches=8"],
            "2x4x1",
            "input.batch_size is 16, which 8 microbatches on 4 devices .*multiple of 32",
        ),
        (
            [*_PIPELINED, "model.stages=3", "model.num_layers=6"],
            "2x2x2",
            "stages is 3, which 2 devices .*multiple of 2",
        ),
        ([*_PIPELINED, "model.stages=8"], "8x1x1", "stages is 8, but a stack repeats its pattern of layers 4 times"),
        ([*_PIPELINED, "model.microbatches=4", "model.remat=none"], "2x2x2", "remat none. Use .*model.remat=full"),
    ],
)
def test_pipelines_that_do_not_fit_are_errors_with_the_numbers_that_do(assignments, mesh, message):
    """Stages and devices, microbatches and the batch; the message names the setting."""
    with pytest.raises(UserError, match=message):
        experiment.get("dense_lm.Small", assignments, DeviceMesh.parse(mesh))


def test_groups_of_held_out_losses_are_those_of_a_microbatch():
    """They are evaluated in microbatches, as training is; each of them has a part of the groups."""
    settings = ["model.unroll=false", "model.remat=full", "model.microbatches=4", "model.num_groups=16"]
    with pytest.raises(UserError, match="inference_num_groups is 4, which 4 microbatches on 4 .*multiple of 16"):
        experiment.get("m4.Quickstart", [*settings, "model.inference_num_groups=4"], DeviceMesh((4,)))


def test_pipeline_needs_settings_alone():
    """The same model, layers and weights, on stages x data x in-layer shards."""
    piped = experiment.get("dense_lm.Small", [*_PIPELINED, "model.microbatches=4"], DeviceMesh((2, 2, 2)))
    plain = experiment.get("dense_lm.Small")
    assert piped.steps.state_specs() == plain.steps.state_specs() and piped.model.stages == 2


@pytest.mark.parametrize(
    "name, source_length, message",
    [
        (
            "m4.Quickstart",
            0,
            "source_length is 0, but a translation model reads sources; set it to the tokens of a row",
        ),
        ("dense_lm.Small", 96, "source_length is 96, but a language model reads targets alone; set it to 0"),
    ],
)
def test_input_has_the_sides_of_the_model(name, source_length, message):
    """A translation model needs a source side; a language model has none."""
    with pytest.raises(UserError, match=message):
        experiment.get(name, [f"input.source_length={source_length}"])


def test_a_language_model_has_no_names_to_copy():
    """Name substitution changes a name in the source, too."""
    with pytest.raises(UserError, match="input.name_substitution is 0.5, but LanguageModel reads no source"):
        experiment.get("dense_lm.Small", ["input.name_substitution=0.5"])


@pytest.mark.parametrize(
    "assignments, mesh, message",
    [
        (["input.size=36,32,30"], 1, "input.size is 36x32x30; 3 levels .* multiples of 4"),
        (["input.size=36,32,32"], 8, "36 voxels along X, 9 at the last of 3 levels; the 8 devices along X must divide"),
        (["model.num_layers=4"], 8, "32 voxels along X, 4 at the last of 4 levels; the 8 devices along X"),
        (["model.channels=2"], 1, "model.channels is 2, but the input has 1; use --set model.channels=1"),
        (["model.classes=2"], 1, "model.classes is 2, but the input has 3"),
        (["corpus=texts"], 1, "--corpus=texts: a program makes the volumes of this model; leave --corpus out"),
        (["tokenizers=texts"], 1, "--tokenizers=texts: .* leave --tokenizers out"),
        (["input.source_length=8"], 1, "no such field"),
    ],
)
def test_volumes_that_do_not_fit_are_errors(assignments, mesh, message):
    """Levels, devices that share a volume, and what the volumes are."""
    with pytest.raises(UserError, match=message):
        experiment.get("unet.Small", assignments, DeviceMesh((mesh,)))


@pytest.mark.parametrize(
    "layout, mesh, message",
    [
        ("spatial", (2, 2), "layout spatial is for a mesh of 1 axis, .* --set layout=NAME: .*, spatial_data"),
        (
            "auto",
            (2, 2),
            "layout auto shares volumes among 2 of the 4 devices .* --set layout=spatial_data with --mesh",
        ),
        ("pipeline", (2,), "layout pipeline shares volumes among 1 of the 2 devices"),
        ("pipeline_gspmd", (1, 2, 2), "layout pipeline_gspmd shares volumes among 2 of the 4 devices"),
    ],
)
def test_devices_without_a_share_of_the_volumes_are_an_error(layout, mesh, message):
    """They would repeat the work of others, on copies that XLA makes."""
    with pytest.raises(UserError, match=message):
        experiment.get("unet.Small", [f"layout={layout}"], DeviceMesh(mesh))


@pytest.mark.parametrize("layout, mesh", [("auto", (2,)), ("auto", (2, 1)), ("spatial_data", (2, 2))])
def test_devices_share_the_batch_or_a_volume(layout, mesh):
    assert experiment.get("unet.Small", [f"layout={layout}"], DeviceMesh(mesh)).mesh == DeviceMesh(mesh)


def test_a_model_of_volumes_reads_no_texts():
    volumes = experiment.get("unet.Small")
    with pytest.raises(UserError, match="UNet reads an input of VolumeInput, which has no texts"):
        _ = volumes.texts
    mixed = dataclasses.replace(experiment.get("m4.Quickstart"), input=volumes.input)
    with pytest.raises(UserError, match="Translation reads an input of InputConfig, not of VolumeInput"):
        mixed.check()


def test_groups_of_a_dense_stack_are_not_checked():
    """Without experts there is no gating, nor are the tokens of a stack without them divided into groups."""
    assert experiment.get("m4.Quickstart", ["model.num_experts=0", "model.num_groups=7"]).model.num_experts == 0
    experts_in_decoder = ["model.encoder_layer_pattern=dense", "model.num_groups=64", "input.source_length=95"]
    assert experiment.get("m4.Quickstart", experts_in_decoder).input.lengths["source"] == 95


@pytest.mark.parametrize(
    "change, message",
    [
        (
            "search.eos_id=99999",
            "search.eos_id has 99999, which is no token of a vocabulary of 8000; expected 0 to 7999",
        ),
        ("search.bos_id=8000", "search.bos_id has 8000, which"),
        ("search.bos_id=1", "search.bos_id is 1, and input.bos_id 2; the decoder begins with the same token"),
        ("search.beam_size=8001", "search.beam_size is 8001; expected at most 8000, the tokens of"),
        ("search.forbidden_ids=0,-1", "search.forbidden_ids has -1, which"),
        (
            "search.max_length=2147483647",
            "search.beam_size 4 x search.max_length 2147483647 are .* expected at most 16777",
        ),
    ],
)
def test_a_search_has_tokens_of_the_vocabulary(change, message):
    """A lookup would take the nearest token instead, and translate with it."""
    assert experiment.get("m4.Quickstart", ["search.eos_id=7999"]).search.eos_id == 7999
    with pytest.raises(UserError, match=message):
        experiment.get("m4.Quickstart", [change])


def test_a_language_model_has_room_for_a_prompt():
    """For bos and one token at least, beside the longest continuation; training needs no room."""
    assert experiment.get("sparse_lm.Small", ["search.max_length=126"]).decoding_specs()["ids"].shape[1] == 2
    config = experiment.get("sparse_lm.Small", ["search.max_length=127"])
    with pytest.raises(UserError, match="search.max_length is 127, .* in input.target_length=128 tokens.* at most 126"):
        config.decoding_specs()


def test_mesh_determines_the_layout():
    """`layout=auto` on a 2-D mesh is GSPMD's."""
    config = experiment.get("m4.Quickstart", ["layout=auto"], DeviceMesh((2, 2)))
    assert config.steps.layout.rules == GSPMD_2D and config.steps.layout.mesh == config.mesh == DeviceMesh((2, 2))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("training.steps=5",),
            r"assignments: 'training.steps=5' is one text; expected a list of texts, \['training.steps=5'\]",
        ),
        (([5],), "assignments: 5 is an int; expected a text"),
        (([], (2,)), "the mesh is a tuple; expected a DeviceMesh"),
    ],
)
def test_arguments_of_another_type_are_errors(arguments, message):
    """From Python, where no command has parsed them; a text is a list of letters, too."""
    with pytest.raises(UserError, match=message):
        experiment.get("m4.Quickstart", *arguments)


@pytest.mark.parametrize("side", ["source", "target"])
def test_tokenizer_larger_than_the_vocabulary_is_an_error(data, side):
    """Ids beyond the embedding never reach a program."""
    with pytest.raises(
        UserError, match=rf"the {side} tokenizer in .* has \d+ pieces, .* Pass --set model.{side}_vocabulary="
    ):
        experiments.tiny(data, f"model.{side}_vocabulary=20").open_tokenizers()
    assert experiments.tiny(data).open_tokenizers().source.vocabulary_size <= 512


@pytest.mark.parametrize(
    "changes", [["model.target_vocabulary=256"], ["model.target_vocabulary=512", "model.tied_embeddings=false"]]
)
def test_two_tokenizers_never_share_a_table(data, changes):
    """Vocabularies of equal size are not one vocabulary: unrelated pieces would train one vector."""
    settings = ["model.tied_embeddings=true", "model.source_vocabulary=512"]
    assert not experiments.tiny(data, *settings, *changes).open_tokenizers().is_shared
    with pytest.raises(UserError, match="share one table, but .* two tokenizers.*--shared_vocabulary.*different sizes"):
        experiments.tiny(data, *settings, "model.target_vocabulary=512").open_tokenizers()


def test_text_has_a_line_for_every_field():
    """`show` and the golden texts contain the whole configuration."""
    lines = experiment.text("m4.Quickstart", experiment.get("m4.Quickstart", ["model.num_heads=2"])).splitlines()
    assert lines[0].startswith("m4.Quickstart: ") and lines[0].endswith(" weights")
    assert {
        "model.num_heads = 2",
        "mesh = 2",
        "input.batch_size = 16",
        "optimizer.learning_rate.warmup_steps = 150",
    } <= set(lines)


@pytest.mark.parametrize(
    "change, message",
    [
        ("input.batch_size=12", "input.batch_size is 12, which 4 microbatches on 1 devices .* multiple of 8"),
        ("input.features.num_bins=80", "model.num_bins is 40, but the input has 80; use --set model.num_bins=80"),
    ],
)
def test_a_batch_of_recordings_fits_the_devices_and_the_model(change, message):
    """The devices of the stages divide the whole batch before and after the pipeline, not each microbatch."""
    pipelined = ["layout=pipeline_data", "model.pipeline=gpipe", "model.stages=8", "model.num_layers=8"]
    pipelined += ["model.microbatches=4", "model.unroll=false", "model.remat=full"]
    assert experiment.get("conformer.Small", pipelined, DeviceMesh((8,))).input.batch_size == 16
    with pytest.raises(UserError, match=message):
        experiment.get("conformer.Small", [*pipelined, change], DeviceMesh((8,)))


def test_a_model_that_lacks_something_is_refused():
    """Whatever uses it later would end with a traceback."""

    class Half:
        pipeline = "none"

        def weights(self) -> dict:
            return {}

    with pytest.raises(UserError, match="^model Half has no loss, which Model in lingvo_moe/protocols.py lists"):
        experiment.Experiment(model=Half())  # type: ignore[arg-type]
    Half.loss = lambda self, theta, batch: None  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"^model Half: loss takes \(theta, batch\); .* \(theta, batch, context\), as "):
        experiment.Experiment(model=Half())  # type: ignore[arg-type]
    del Half.loss  # type: ignore[attr-defined]
    Half.loss = lambda self, theta, batch, context: None  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="^model Half has no sides, .*settings_of_layers, which ExperimentModel in"):
        experiment.Experiment(model=Half())  # type: ignore[arg-type]


class Sgd:
    """An optimizer without a mistake."""

    learning_rate = InverseSquareRoot()

    def state(self, weights: dict) -> dict:
        return {}

    def update(self, weights, theta, gradients, optimizer_state, step, is_finite, context):
        return theta, {}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"update": lambda self, theta, gradients: None}, r"own: update takes \(theta, gradients\); it is called with"),
        ({"learning_rate": 0.1}, r"own: learning_rate is a float; expected a function of \(step\)"),
        ({"learning_rate": staticmethod(lambda step, total: 0.1)}, r"own: learning_rate takes \(step, total\); it is"),
        ({"state": lambda self, weights: []}, "own: state: the tree of weights is a list; expected a dict"),
        ({"state": lambda self, weights: {"m": 0.0}}, "own: state: weight m is a float; expected a Weight"),
        ({"state": lambda self, weights: {"m": Weight((1,), "Q")}}, "own: state: weight m: logical axis 'Q' of 'Q'"),
    ],
)
def test_a_malformed_optimizer_is_refused_before_anything_is_compiled(changes, message):
    """And before a checkpoint lacks what it should have returned."""
    made = experiment.get("m4.Quickstart")
    dataclasses.replace(made, optimizer=Sgd()).check()
    with pytest.raises(UserError, match=f"^optimizer {message}"):
        dataclasses.replace(made, optimizer=type("own", (Sgd,), changes)()).check()
    with pytest.raises(UserError, match="^optimizer None has no learning_rate, state, update, which Optimizer in"):
        dataclasses.replace(made, optimizer=None)


def test_a_models_weights_are_checked_before_anything_is_compiled():
    """A layout would name no weight."""
    made = experiment.get("dense_lm.Small")
    own = type("Own", (type(made.model),), {"weights": lambda self: {"part": {"table": Weight((1,), "Q")}}})
    with pytest.raises(UserError, match="^model Own: weight part/table: logical axis 'Q' of 'Q' is not one of"):
        dataclasses.replace(made, model=own(**vars(made.model))).check()


def test_as_many_labels_fit_a_recording_as_the_model_has_positions_for_it():
    """The input counts positions by itself; the model's subsampling leaves so many that are no padding."""
    rows, layer = SpeechInput(source_length=8), Subsampling(num_bins=4, channels=1, model_dim=1)
    theta = tree.map_leaves(lambda weight: tf.zeros(weight.shape), layer.weights())
    for frames in range(1, rows.source_length + 1):
        paddings = tf.constant([[frame >= frames for frame in range(rows.source_length)]])
        _, left = layer(theta, tf.zeros((1, rows.source_length, 4)), paddings, Context())
        examples = (Example(0, np.zeros((frames, 80)), np.arange(1, count + 1)) for count in range(1, 9))
        assert sum(map(rows.fits, examples)) == np.count_nonzero(~left.numpy()), f"of {frames} frames"
