"""The hyperparameters in a log directory: every registered model's survive, and a file that is damaged is named."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from lingvo_moe import experiment, overrides, registry
from lingvo_moe.errors import UserError
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.training import hyperparameters

MODEL = "m4.Quickstart"


def _saved(logdir: pathlib.Path, trained: experiment.Experiment, name: str = MODEL) -> hyperparameters.Recorded:
    """Returns what is read of what is saved."""
    hyperparameters.save(logdir, hyperparameters.of(name, trained))
    found = hyperparameters.load(logdir)
    assert found is not None and found.model == name
    return found


@pytest.mark.parametrize("name", registry.names())
def test_every_value_of_every_model_is_read_as_it_was(name, tmp_path):
    """A later version may have other defaults: the log directory's are those of its training."""
    trained = experiment.unchecked(name)
    values = _saved(tmp_path, trained, name).values
    assert hyperparameters.Recorded(name, values).resolve("it") == (name, ())
    for path, _ in overrides.fields(trained):
        if path in values and path not in ("corpus", "tokenizers"):
            assert overrides.apply(trained, [f"{path}={overrides.text(values[path])}"]) == trained
    assert {path for path, _ in overrides.fields(trained)} - values.keys() == {
        "mesh",
        "platform",
        "windowed_einsum_mib",
        "training.steps",
    }


def test_differences_are_assignments(tmp_path, monkeypatch):
    """What differs from the registered model is read; not where and how long the training ran."""
    changes = [
        "model.router=switch",
        "model.inference_capacity_factor=2.5",
        "input.packing=false",
        "search.beam_size=3",
    ]
    ran = [*changes, "training.steps=7", "mesh=4", "layout=gshard_few", "tokenizers=own", "search.forbidden_ids=0,3"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    found = _saved(tmp_path, experiment.unchecked(MODEL, ran))
    name, portable = found.portable.resolve("it")
    assert name == MODEL and sorted(portable) == sorted([*changes, "search.forbidden_ids=0,3"])
    _, assignments = found.resolve("it")
    assert set(assignments) - set(portable) == {f"tokenizers={tmp_path}/own"}
    again = experiment.unchecked(MODEL, assignments)
    assert again.model == experiment.unchecked(MODEL, ran).model and again.mesh == experiment.unchecked(MODEL).mesh


def test_a_field_that_was_removed_is_left_out_if_it_had_no_effect(tmp_path):
    """Log directories of earlier versions are read; one that had an effect is named."""
    found = hyperparameters.of(MODEL, experiment.unchecked(MODEL, ["router=switch"]))
    earlier = found._replace(values={**found.values, "search.first_id": None})
    hyperparameters.save(tmp_path, earlier)
    loaded = hyperparameters.load(tmp_path) or pytest.fail("nothing was saved")
    assert loaded.resolve("it") == (MODEL, ("model.router=switch",))
    with pytest.raises(UserError, match="it: search.first_id: no such field"):
        found._replace(values={**found.values, "search.first_id": 7}).resolve("it")


def test_the_same_hyperparameters_are_not_written_again(tmp_path):
    """Each restart would risk the file; others replace it."""
    _saved(tmp_path, experiment.unchecked(MODEL))
    before = (tmp_path / hyperparameters.FILE).stat().st_ino
    _saved(tmp_path, experiment.unchecked(MODEL))
    assert (tmp_path / hyperparameters.FILE).stat().st_ino == before
    found = _saved(tmp_path, experiment.unchecked(MODEL, ["router=switch"]))
    assert found.resolve("it") == (MODEL, ("model.router=switch",)) and len(list(tmp_path.iterdir())) == 1


def test_values_that_no_flag_can_set_are_left_out(tmp_path):
    """An extension may have them; the others are kept."""

    @dataclasses.dataclass(frozen=True)
    class Special(Adafactor):
        table: dict = dataclasses.field(default_factory=dict)

    own = experiment.unchecked(MODEL)
    special = Special(**{field.name: getattr(own.optimizer, field.name) for field in dataclasses.fields(Adafactor)})
    trained = dataclasses.replace(own, optimizer=dataclasses.replace(special, beta1=0.5))
    assert _saved(tmp_path, trained).resolve("it") == (MODEL, ("optimizer.beta1=0.5",))


@pytest.mark.parametrize(
    "content, pattern",
    [
        ("{", "expected the model and the hyperparameters that training wrote"),
        ("[1]", "expected the model and the hyperparameters that training wrote"),
        ('{"model": "m4.Quickstart"}', "expected the model and the hyperparameters that training wrote"),
        ('{"model": "m4.Nowhere", "hyperparameters": {}}', "m4.Nowhere.* or need the file of an --import"),
        ('{"model": "m4.Quickstart", "hyperparameters": {"model.depth": 3}}', "model.depth: no such field.*version"),
        ('{"model": "m4.Quickstart", "hyperparameters": {"model.model_dim": "x"}}', "model_dim=x: expected a whole"),
        ('{"model": "m4.Quickstart", "hyperparameters": {"model.model_dim": {}}}', "model_dim={}: expected a whole"),
        ('{"model": "m4.Quickstart", "hyperparameters": {"model.num_groups": -1}}', "num_groups"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(content, pattern, tmp_path):
    (tmp_path / hyperparameters.FILE).write_text(content)
    file = tmp_path / hyperparameters.FILE
    with pytest.raises(UserError, match=f"{file}: .*{pattern}"):
        found = hyperparameters.load(tmp_path)
        assert found is not None
        found.resolve(str(file))


def test_no_file(tmp_path):
    """Of log directories of earlier versions, and of those that are not there yet."""
    assert hyperparameters.load(tmp_path) is None and hyperparameters.load(tmp_path / "new") is None


def test_own_tokenizers_are_found_where_the_log_directory_was_moved(tmp_path):
    """An imported model has them below its log directory; others stay where they were."""
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "tokenizers").mkdir(parents=True)
    values = _saved(old, experiment.unchecked(MODEL, [f"tokenizers={old / 'tokenizers'}"])).values
    assert values["tokenizers"] == str(old / "tokenizers")
    old.rename(new)
    moved = hyperparameters.load(new) or pytest.fail("no hyperparameters")
    assert moved.values == {**values, "tokenizers": str(new / "tokenizers")}
    (old / "tokenizers").mkdir(parents=True)
    assert hyperparameters.load(new) == moved._replace(values=values)  # no log directory: somebody's tokenizers
    (old / hyperparameters.FILE).touch()
    assert hyperparameters.load(new) == moved
    hyperparameters.save(new, hyperparameters.of(MODEL, experiment.unchecked(MODEL, ["tokenizers=elsewhere"])))
    elsewhere = hyperparameters.load(new) or pytest.fail("no hyperparameters")
    assert elsewhere.values["tokenizers"].endswith("/elsewhere")
