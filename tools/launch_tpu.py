"""Creates a Cloud TPU slice, installs this project on it and trains, by `gcloud`; see docs/cloud_tpu.md.

    python -m tools.launch_tpu --slice=NAME --zone=ZONE --accelerator=v3-8 --dry_run -- --model=m4.Small

The arguments after `--` are flags of `python -m lingvo_moe train`, which are checked first. Relative paths among them,
such as those of --corpus and --import, are of this repository; what they name is copied to the same paths on the slice.
A --flagfile is read here. Every step can be repeated: an existing slice is kept, and training resumes from the newest
checkpoint. --dry_run prints the commands and runs none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import re
import shlex
import shutil
import subprocess

from absl import flags

from lingvo_moe import extensions, overrides
from lingvo_moe.cli import app, command_flags, run_config, run_setup
from lingvo_moe.engines import topology
from lingvo_moe.engines.tpu_strategy import TPU_TENSORFLOW
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.experiment import get as get_experiment
from lingvo_moe.ranges import Range
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.utils import field_values
from tools import lock

_VALUES = flags.FlagValues()
flags.DEFINE_string("slice", None, "the slice's name", flag_values=_VALUES)
flags.DEFINE_string("zone", None, "the slice's zone, for instance europe-west4-a", flag_values=_VALUES)
flags.DEFINE_string(
    "accelerator", "v3-8", "the slice's generation and cores, for instance v3-8 or v3-2048", flag_values=_VALUES
)
flags.DEFINE_string("logdir", "log", "directory of checkpoints and curves, on the first machine", flag_values=_VALUES)
flags.DEFINE_string("project", None, "the Google Cloud project; default: gcloud's", flag_values=_VALUES)
flags.DEFINE_boolean("spot", False, "a spot slice: cheaper, but may be reclaimed at any time", flag_values=_VALUES)
flags.DEFINE_boolean("dry_run", False, "print the commands, run none", flag_values=_VALUES)
flags.DEFINE_boolean("delete", False, "delete the slice instead", flag_values=_VALUES)

# In the generations whose accelerator names count cores.
_CORES_PER_HOST, _CORES_PER_CHIP = 8, 2
_ACCELERATOR = re.compile(r"(v[234])-(\d+)")
_REPOSITORY = pathlib.Path(__file__).parents[1]
_DIRECTORY = "lingvo_moe_run"
_COPIED = ("lingvo_moe", "params")
# The flags of `train` that name what it reads; the model has directories of its own for the first two.
_DATA = ("corpus", "tokenizers")
_READ = (*_DATA, "initial_weights", "initial_tokenizers", "initial_embeddings")
# What the launcher passes to `train` itself.
_OWN_FLAGS = ("logdir", "engine", "tpu")
_FLAGS_OF_TRAIN = "`python -m lingvo_moe train --help`"
_VERSION = TPU_TENSORFLOW.partition("==")[2]
_logger = logging.getLogger("tools.launch_tpu")


@dataclasses.dataclass(frozen=True)
class Launch:
    """A slice and the training run on it; see the flags.

    Attributes:
      copied: paths below the repository that the flags of `train` name.
    """

    slice: str
    zone: str
    accelerator: str
    logdir: str
    train_flags: tuple[str, ...]
    copied: tuple[str, ...] = ()
    project: str | None = None
    spot: bool = False

    @property
    def num_cores(self) -> int:
        """The number of the slice's cores."""
        return int(self.accelerator.partition("-")[2])

    @property
    def num_hosts(self) -> int:
        """The number of the slice's virtual machines."""
        return self.num_cores // _CORES_PER_HOST

    @property
    def runtime(self) -> str:
        """The software version; with several hosts, each runs a TensorFlow server."""
        return f"tpu-vm-tf-{_VERSION}-{'pod-' if self.num_hosts > 1 else ''}pjrt"

    def exists(self) -> list[str]:
        """Returns the command that succeeds if the slice exists."""
        return self._gcloud("describe")

    def create(self) -> list[str]:
        """Returns the command that creates the slice."""
        return [
            *self._gcloud("create"),
            f"--accelerator-type={self.accelerator}",
            f"--version={self.runtime}",
            *(["--spot"] if self.spot else []),
        ]

    def commands(self) -> list[list[str]]:
        """Returns the commands that install and train, in order."""
        # One process, on the first machine, builds the graphs. The others run the TensorFlow server of their image.
        places = {path: str(pathlib.PurePath(_DIRECTORY, path).parent) for path in self.copied}
        return [
            self._ssh(shlex.join(["mkdir", "-p", *dict.fromkeys([_DIRECTORY, *places.values()])])),
            self._copy([*_COPIED, lock.TPU_LOCK], _DIRECTORY),
            *(self._copy([path], directory) for path, directory in places.items()),
            self._ssh(_install()),
            self._ssh(self._train()),
        ]

    def delete(self) -> list[str]:
        """Returns the command that deletes the slice."""
        return [*self._gcloud("delete"), "--quiet"]

    def _train(self) -> str:
        """Returns the command that starts training; it survives the end of the connection, and logs to train.log."""
        tpu, environment = ("local", "") if self.num_hosts == 1 else (self.slice, "TPU_LOAD_LIBRARY=0 ")
        flags_of_train = [*self.train_flags, "--engine=tpu_strategy", f"--tpu={tpu}", f"--logdir={self.logdir}"]
        return (
            f"cd {_DIRECTORY} && {environment}nohup .venv/bin/python -m lingvo_moe train {shlex.join(flags_of_train)} "
            f">> train.log 2>&1 < /dev/null &"
        )

    def _ssh(self, command: str) -> list[str]:
        return [*self._gcloud("ssh"), "--worker=0", f"--command={command}"]

    def _copy(self, paths: list[str], directory: str) -> list[str]:
        """Returns the command that copies files of the repository, with what is below them, into a directory there."""
        local = [str(_REPOSITORY / path) for path in paths]
        command = ["gcloud", "compute", "tpus", "tpu-vm", "scp", "--recurse", *local, f"{self.slice}:{directory}"]
        return [*command, *self._where(), "--worker=0"]

    def _gcloud(self, verb: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "tpu-vm", verb, self.slice, *self._where()]

    def _where(self) -> list[str]:
        return [f"--zone={self.zone}", *([f"--project={self.project}"] if self.project else [])]


def main(arguments: list[str]):
    """Runs or prints the commands. Raises UserError for a missing flag or tool, and if a command fails."""
    launch = _launch(tuple(arguments[1:]))
    if not _VALUES.dry_run and shutil.which("gcloud") is None:
        raise UserError(
            "gcloud is not installed; get it from cloud.google.com/sdk, or pass --dry_run to see the commands."
        )
    if _VALUES.delete:
        _call(launch.delete())
        return
    if _VALUES.dry_run:
        print(f"{shlex.join(launch.exists())} || \\")
    if _VALUES.dry_run or subprocess.run(launch.exists(), capture_output=True, check=False).returncode:
        _call(launch.create())
    for command in launch.commands():
        _call(command)


def _launch(train_flags: tuple[str, ...]) -> Launch:
    """Returns what to run; raises UserError for a mistake in the flags, those of `train` too, before anything is."""
    for name in ("slice", "zone"):
        if not _VALUES[name].value:
            raise UserError(f"--{name} is missing: {_VALUES[name].help}.")
    _check_accelerator(_VALUES.accelerator)
    if _VALUES.logdir.startswith("gs://"):
        raise UserError(
            f"--logdir={_VALUES.logdir}: expected a directory; mount the bucket on the first machine "
            f"(docs/cloud_tpu.md)."
        )
    flags_of_slice = (_VALUES.slice, _VALUES.zone, _VALUES.accelerator, _VALUES.logdir)
    launch = Launch(*flags_of_slice, train_flags, project=_VALUES.project, spot=_VALUES.spot)
    if _VALUES.delete:
        return launch
    # Relative paths are of the repository, that of a --flagfile too.
    with contextlib.chdir(_REPOSITORY):
        config, train_flags = _read_flags_of_train(train_flags)
        named = _named(config)
        experiment = _check_training(config, launch.num_cores)
        own = () if experiment is None else _own_data(config, experiment)
        return dataclasses.replace(launch, train_flags=train_flags, copied=tuple(dict.fromkeys((*own, *named))))


def _check_accelerator(accelerator: str):
    """Raises UserError for an accelerator that is none, or whose cores are not those of whole machines."""
    matched = _ACCELERATOR.fullmatch(accelerator)
    if not matched:
        raise UserError(f"--accelerator={accelerator}: expected v2, v3 or v4 and the number of cores, such as v3-8.")
    most = _CORES_PER_CHIP * topology.most_chips(matched[1])
    cores = field_values.whole_number(matched[2], Range(_CORES_PER_HOST, most))
    if cores is None or cores % _CORES_PER_HOST:
        raise UserError(
            f"--accelerator={accelerator}: there is no such slice; the cores of {matched[1]} come in machines of "
            f"{_CORES_PER_HOST}, up to {most}."
        )


def _read_flags_of_train(train_flags: tuple[str, ...]) -> tuple[run_config.TrainConfig, tuple[str, ...]]:
    """Returns the configuration that the flags after `--` stand for, and the flags, with those of a --flagfile."""
    values, arguments = flags.FlagValues(), ["train", *train_flags]
    command_flags.define_flags(run_config.TrainConfig, values)
    app.no_arguments(app.parse(arguments, values, _FLAGS_OF_TRAIN)[1:])
    for flag in _OWN_FLAGS:
        if values[flag].present:
            remedy = f"--{flag}={values[flag].value} goes before --" if flag in _VALUES else "leave it out"
            raise UserError(f"--{flag}={values[flag].value} after --: the launcher passes that itself; {remedy}.")
    config = command_flags.read(run_config.TrainConfig, values)
    if config.model is None:
        raise UserError("no --model among the flags of train; put them after --, for instance -- --model=m4.Small.")
    config = dataclasses.replace(config, engine="tpu_strategy", tpu="local")
    return config, tuple(values.read_flags_from_files(arguments)[1:])


def _check_training(config: run_config.TrainConfig, num_cores: int) -> Experiment | None:
    """Raises UserError for a training that would not start on the slice: a slice is charged from its creation.

    Returns:
      The experiment; None where only the slice has the files of --import.
    """
    run_setup.membership(config)
    # An absolute path is of the slice's machine; without what it registers, nothing is known of the model.
    if not all(os.path.exists(where) for where in config.imports if where.endswith(".py")):
        if not (config.corpus and config.tokenizers):
            _logger.warning(
                "the model is not known here, as --import is a file of the slice: its corpus and tokenizers are not "
                "copied. Pass --corpus and --tokenizers."
            )
        return None
    for where in config.imports:
        extensions.import_module(where)
    name, experiment, assignments = run_setup.configure(config, {"training.steps": config.steps})
    if experiment.mesh.size == num_cores:
        return experiment
    if config.device_mesh() is not None:
        raise UserError(
            f"the mesh {experiment.mesh} has {experiment.mesh.size} devices, and --accelerator={_VALUES.accelerator} "
            f"{num_cores} cores; pass --mesh={num_cores}, or another accelerator."
        )
    return get_experiment(name, assignments, DeviceMesh((num_cores,)), "--accelerator")


def _own_data(config: run_config.TrainConfig, experiment: Experiment) -> tuple[str, ...]:
    """Returns the model's own corpus and tokenizers that flags do not replace; warns of one that is not here."""
    found = []
    for flag in _DATA:
        path = getattr(experiment, flag)
        is_given = getattr(config, flag) or overrides.assigned(config.assignments, flag)
        if is_given or not experiment.model.vocabularies or pathlib.PurePath(path).is_absolute():
            continue
        if (_REPOSITORY / path).exists():
            found.append(path)
        else:
            _logger.warning(
                "%s (--%s, of the model) is not here to be copied: without it on the slice, training ends with an "
                "error. Build it, or pass --%s.",
                path,
                flag,
                flag,
            )
    return tuple(found)


def _named(config: run_config.TrainConfig) -> tuple[str, ...]:
    """Returns the relative paths that the flags of `train` name; raises UserError for one that is not there.

    An absolute path is of the slice's machine.
    """
    found = []
    for flag in _READ:
        if path := getattr(config, flag) or overrides.assigned(config.assignments, flag):
            found += [path] if _is_here(f"--{flag}={path}", path) else []
    for where in config.imports:
        path = where if where.endswith(".py") else _package(where)
        found += [path] if path and _is_here(f"--import={where}", path) else []
    return tuple(dict.fromkeys(found))


def _is_here(given: str, path: str) -> bool:
    """Whether a path is of this repository, not of the slice's machine; raises UserError if there is no such file."""
    if pathlib.PurePath(path).is_absolute():
        return False
    if ".." in pathlib.PurePath(path).parts or not (_REPOSITORY / path).exists():
        raise UserError(
            f"{given}: expected a path below {_REPOSITORY} that exists, to copy to the slice; an absolute path "
            f"is taken to be there."
        )
    return True


def _package(module: str) -> str | None:
    """Returns the path of the package, or of the file, that a module is imported from; None for what is copied anyway.

    Of a module that is not of this repository, the path does not exist: the slice has the packages of the lock file.
    """
    top = module.partition(".")[0]
    if top in _COPIED:
        return None
    return top if (_REPOSITORY / top).is_dir() else f"{top}.py"


def _install() -> str:
    # --no-deps: the lock file is complete, but tensorflow-text requires the TensorFlow without TPU support.
    return (
        f"cd {_DIRECTORY} && python3.11 -m venv .venv && "
        f".venv/bin/python -m pip install --require-hashes --no-deps --requirement {lock.TPU_LOCK}"
    )


def _call(command: list[str]):
    print(shlex.join(command), flush=True)
    if not _VALUES.dry_run and subprocess.run(command, check=False).returncode:
        raise UserError(f"this command failed: {shlex.join(command)}")


if __name__ == "__main__":
    app.run(main, _VALUES)
