"""Creates a Cloud TPU slice, installs this project on it and trains, by `gcloud`; see docs/cloud_tpu.md.

    python -m tools.launch_tpu --slice=NAME --zone=ZONE --accelerator=v3-8 --dry_run -- --model=m4.Small

The arguments after `--` are flags of `python -m lingvo_moe train`. Every step can be repeated: an existing slice is
kept, and training resumes from the newest checkpoint. --dry_run prints the commands and runs none.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.engines.tpu_strategy import TPU_TENSORFLOW
from lingvo_moe.errors import UserError
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
_CORES_PER_HOST = 8
_ACCELERATOR = re.compile(r"v[234]-(\d+)")
_DIRECTORY = "lingvo_moe_run"
_VERSION = TPU_TENSORFLOW.partition("==")[2]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A slice and the training run on it; see the flags."""

    slice: str
    zone: str
    accelerator: str
    logdir: str
    train_flags: tuple[str, ...]
    project: str | None = None
    spot: bool = False

    @property
    def num_hosts(self) -> int:
        """The number of the slice's virtual machines."""
        return max(1, int(self.accelerator.partition("-")[2]) // _CORES_PER_HOST)

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
        return [self._ssh(f"mkdir -p {_DIRECTORY}"), self._copy(), self._ssh(_install()), self._ssh(self._train())]

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

    def _copy(self) -> list[str]:
        return [
            "gcloud",
            "compute",
            "tpus",
            "tpu-vm",
            "scp",
            "--recurse",
            "lingvo_moe",
            "params",
            lock.TPU_LOCK,
            "build",
            f"{self.slice}:{_DIRECTORY}",
            *self._where(),
            "--worker=0",
        ]

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
    for name in ("slice", "zone"):
        if not _VALUES[name].value:
            raise UserError(f"--{name} is missing: {_VALUES[name].help}.")
    if not _ACCELERATOR.fullmatch(_VALUES.accelerator):
        raise UserError(
            f"--accelerator={_VALUES.accelerator}: expected v2, v3 or v4 and the number of cores, for instance v3-8."
        )
    if _VALUES.logdir.startswith("gs://"):
        raise UserError(
            f"--logdir={_VALUES.logdir}: expected a directory; mount the bucket on the first machine "
            f"(docs/cloud_tpu.md)."
        )
    if not _VALUES.delete and "model" not in map(app.flag_name, train_flags):
        raise UserError("no --model among the flags of train; put them after --, for instance -- --model=m4.Small.")
    return Launch(
        _VALUES.slice, _VALUES.zone, _VALUES.accelerator, _VALUES.logdir, train_flags, _VALUES.project, _VALUES.spot
    )


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
