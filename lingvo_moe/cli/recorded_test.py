"""A command uses the model and the hyperparameters of its log directory, then those of its flags."""

from __future__ import annotations

import logging
import pathlib

import pytest
from absl import flags

from lingvo_moe import experiment
from lingvo_moe.cli import command_flags, recorded, run_config
from lingvo_moe.errors import UserError
from lingvo_moe.training import hyperparameters

MODEL = "m4.Quickstart"
LAYOUT = "--set=layout=gshard_sharded_update"


def _config(*arguments: str, kind: type[run_config.MeshConfig] = run_config.TranslateConfig) -> run_config.MeshConfig:
    values = flags.FlagValues()
    command_flags.define_flags(kind, values)
    values(["command", *arguments])
    return command_flags.read(kind, values)


def _save(logdir: pathlib.Path, *assignments: str):
    hyperparameters.save(logdir, hyperparameters.of(MODEL, experiment.unchecked(MODEL, assignments)))


@pytest.fixture
def logdir(tmp_path):
    """Of a training with another router."""
    _save(tmp_path, "router=switch", "search.beam_size=2")
    return tmp_path


@pytest.mark.parametrize("model", [(), ("--model=Quickstart",)])
def test_what_a_training_recorded_is_used(logdir, model, caplog):
    """Without the flags of the training, and said in the log."""
    with caplog.at_level(logging.INFO):
        found = recorded.by_default(_config(*model, f"--logdir={logdir}"))
    assert isinstance(found, run_config.ModelConfig) and found.model == MODEL
    assert found.assignments == ("model.router=switch", "search.beam_size=2")
    assert f"{logdir}/hyperparameters.json: {MODEL}, with 2 hyperparameters of its own." in caplog.text
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_flags_come_last_and_a_change_of_the_model_is_a_warning(logdir, caplog):
    """Weights of one router would be used with another without a word."""
    found = recorded.by_default(_config(f"--logdir={logdir}", "--set=router=top2", "--set=search.beam_size=3"))
    assert isinstance(found, run_config.ModelConfig)
    changed = experiment.unchecked(MODEL, found.assignments)
    assert changed.model == experiment.unchecked(MODEL).model and changed.search.beam_size == 3
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"model.router is top2 here; it is switch in {logdir}/hyperparameters.json."]


@pytest.mark.parametrize("flag, warnings", [(None, ["BGE:x,V~x"]), ("--set=layout=gspmd", ["gspmd"]), (LAYOUT, [])])
def test_training_that_resumes_with_another_layout_says_so(tmp_path, flag, warnings, caplog):
    """It may have fitted into memory only with the first one. Other commands have a layout of their own."""
    _save(tmp_path, "layout=gshard_sharded_update")
    arguments = [f"--logdir={tmp_path}", *filter(None, [flag])]
    recorded.by_default(_config(*arguments))
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    recorded.by_default(_config(*arguments, kind=run_config.TrainConfig))
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"layout is {layout}; the last run had gshard_sharded_update ({LAYOUT})." for layout in warnings
    ]


def test_export_takes_the_hyperparameters_of_a_training_and_reads_no_texts(tmp_path, caplog):
    """The weights of that training fit no other program. Tokenizers that are gone do not matter."""
    _save(tmp_path, "model.target_vocabulary=512", f"tokenizers={tmp_path / 'gone'}")
    found = recorded.by_default(_config(f"--logdir={tmp_path}", kind=run_config.ExportConfig))
    assert found.model == MODEL and found.assignments == ("model.target_vocabulary=512",)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_new_training_takes_the_model_of_its_initial_weights(tmp_path, caplog):
    """Not how that was trained, nor on what. What the new one records comes first when it resumes."""
    old, new = tmp_path / "old", tmp_path / "new"
    for directory in (old, new):
        directory.mkdir()
    trained = ("optimizer.beta1=0.5", "training.seed=7", "layout=gspmd", f"corpus={tmp_path}")
    _save(old, "model.num_heads=2", "input.source_length=32", f"tokenizers={tmp_path}", *trained)
    flags = (f"--logdir={new}", f"--initial_weights={old}", "--set=input.source_length=64")
    found = recorded.by_default(_config(*flags, kind=run_config.TrainConfig))
    assert found.model == MODEL
    own = {"model.num_heads=2", f"tokenizers={tmp_path}", "input.source_length=32", "input.source_length=64"}
    assert set(found.assignments) == own and found.assignments[-1] == "input.source_length=64"
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    _save(new, "model.num_heads=8")
    assert recorded.by_default(_config(*flags, kind=run_config.TrainConfig)).assignments[0] == "model.num_heads=8"
    named = recorded.by_default(
        _config(*flags[1:], f"--logdir={tmp_path}", f"--model={MODEL}", kind=run_config.TrainConfig)
    )
    assert named.assignments == ("input.source_length=64",), "with --model, its own hyperparameters"
    missing = "--model is missing, and --initial_weights=.* is no log directory with"
    for end, message in (("", missing), ("/none", "--initial_weights=.*/none: there is no such file or directory; ")):
        flags = (f"--logdir={tmp_path}", f"--initial_weights={tmp_path}{end}")
        with pytest.raises(UserError, match=message):
            recorded.by_default(_config(*flags, kind=run_config.TrainConfig))


def test_another_model_has_its_own_hyperparameters(logdir, caplog):
    """The weights may fit it; the settings of the first need not."""
    config = _config(f"--logdir={logdir}", "--model=m4.QuickstartShort")
    assert recorded.by_default(config) == config
    assert "has the hyperparameters of m4.Quickstart, which are not used" in caplog.text


def test_nothing_is_recorded(tmp_path):
    """As ever without a log directory, or with one of an earlier version."""
    for config in (_config(), *(_config("--model=Small", f"--logdir={tmp_path}{end}") for end in ("", "/new"))):
        assert recorded.by_default(config) == config
    with pytest.raises(
        UserError, match="--model is missing, and there is no .*new/hyperparameters.json: check --logdir"
    ):
        recorded.by_default(_config(f"--logdir={tmp_path}/new"))


def test_a_wrong_flag_is_reported(logdir):
    with pytest.raises(UserError, match="roter: no such field. Did you mean"):
        recorded.by_default(_config(f"--logdir={logdir}", "--set=roter=top2"))


@pytest.mark.parametrize(
    "kind, flags, missing",
    [
        (run_config.TranslateConfig, (), "tokenizers"),
        (run_config.TranslateConfig, ("--tokenizers=own",), None),
        (run_config.TranslateConfig, ("--set=tokenizers=own",), None),
        (run_config.EvalConfig, (), "corpus"),
        (run_config.EvalConfig, ("--corpus=own",), "tokenizers"),
        (run_config.EvalConfig, ("--set=corpus=own", "--tokenizers=own"), None),
        (run_config.TrainConfig, (), "corpus"),
        (run_config.DiagnoseConfig, (), "corpus"),
        (run_config.DiagnoseConfig, ("--batch=log/replay/7.npz",), None),
    ],
)
def test_a_directory_that_is_gone_is_an_error_where_it_is_read(tmp_path, kind, flags, missing):
    """The scores of another corpus, the registered model's, would look like those of the training's."""
    _save(tmp_path, f"corpus={tmp_path}/gone", f"tokenizers={tmp_path}/gone")
    config = _config(f"--logdir={tmp_path}", *flags, kind=kind)
    if missing is None:
        found = recorded.by_default(config)
        assert not [each for each in found.assignments if each.endswith("/gone")]
        return
    verb = "is" if missing == "corpus" else "are"
    message = f"hyperparameters.json: the {missing} of the training, {tmp_path}/gone, {verb} gone; pass --{missing}="
    with pytest.raises(UserError, match=message):
        recorded.by_default(config)


def test_directories_are_no_changed_hyperparameters(tmp_path, caplog):
    """A run without any change is not said to have some, wherever its data is."""
    _save(tmp_path, f"tokenizers={tmp_path}")
    with caplog.at_level(logging.INFO):
        found = recorded.by_default(_config(f"--logdir={tmp_path}", "--model=Quickstart"))
    assert isinstance(found, run_config.ModelConfig) and found.assignments == (f"tokenizers={tmp_path}",)
    assert not caplog.records
