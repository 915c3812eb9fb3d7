"""Writes the lock files: the packages of pyproject.toml and all that they require, each with the hash of its wheel.

    python -m tools.lock            # after a change of pyproject.toml
    python -m tools.lock --upgrade  # also take the newest versions of what pyproject.toml does not pin

requirements.txt has the dependencies and the extras that commands of this repository need to run. requirements-dev.txt
adds the other extras: the compilers of `plan`, the tests and the checks. requirements-tpu.txt has what
`tools.launch_tpu` installs on a Cloud TPU machine, where a TensorFlow with TPU support replaces the usual one. pip
resolves all of them for this platform.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.engines.tpu_strategy import TPU_TENSORFLOW
from lingvo_moe.errors import UserError
from lingvo_moe.utils import output_files

_VALUES = flags.FlagValues()
flags.DEFINE_boolean("upgrade", False, "take the newest version of what is not pinned", flag_values=_VALUES)

ROOT = Path(__file__).resolve().parent.parent
LOCK = "requirements.txt"
DEV_LOCK = "requirements-dev.txt"
TPU_LOCK = "requirements-tpu.txt"
_DEV_EXTRAS = ("dev", "gpu-compiler", "tpu-compiler")
_TPU_VERSION = TPU_TENSORFLOW.partition("==")[2].rpartition(".")[0]
# The TPU's TensorFlow stands for `tensorflow`, which tensorflow-text asks for: it is resolved and left out.
_TPU_REPLACED = ("tensorboard", "tensorflow", "tensorflow-text")
_TPU_PACKAGES = (
    TPU_TENSORFLOW,
    "libtpu==0.0.14",  # a newer one ends the process when this TensorFlow is imported
    f"tensorflow=={_TPU_VERSION}.*",
    f"tensorflow-text=={_TPU_VERSION}.*",
)
_HEADER = "# Written by `make lock` from pyproject.toml, for {python} on {platform}. Do not edit.\n"


def main(arguments: list[str]):
    """Writes the files; raises UserError where pip finds no versions that go together."""
    app.no_arguments(arguments[1:])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    direct, extras = project["dependencies"], project["optional-dependencies"]
    running = [*direct, *(pin for extra, pins in extras.items() if extra not in _DEV_EXTRAS for pin in pins)]
    development = [pin for extra in _DEV_EXTRAS for pin in extras[extra]]
    everything = _resolve([*running, *development], _known(LOCK, DEV_LOCK))
    needed_to_run = lock_text(_resolve(running, versions(lock_text(everything))))
    _write(LOCK, needed_to_run)
    _write(DEV_LOCK, lock_text(everything, left_out=versions(needed_to_run), on_top_of=LOCK))
    kept = [pin for pin in direct if pin.partition("==")[0] not in _TPU_REPLACED]
    _write(TPU_LOCK, lock_text(_resolve([*kept, *_TPU_PACKAGES], _known(TPU_LOCK)), left_out=("tensorflow",)))


def _write(name: str, text: str):
    with output_files.atomic_writer(str(ROOT / name)) as file:
        file.write(text)
    print(f"{name}: {len(versions(text))} packages")


def lock_text(report: Mapping[str, Any], left_out: Collection[str] = (), on_top_of: str = "") -> str:
    """Returns the text of a lock file.

    Args:
      report: what `pip install --report` wrote.
      left_out: names of packages to leave out.
      on_top_of: the lock file that this one adds packages to, if any.
    """
    environment = report["environment"]
    lines = [
        "{name}=={version} --hash=sha256:{digest}\n".format(
            name=found["metadata"]["name"].lower().replace("_", "-"),
            version=found["metadata"]["version"],
            digest=found["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for found in report["install"]
    ]
    header = _HEADER.format(
        python=f"Python {environment['python_version']}",
        platform=f"{environment['sys_platform']} {environment['platform_machine']}",
    )
    included = f"--requirement {on_top_of}\n" if on_top_of else ""
    return header + included + "".join(sorted(line for line in lines if line.partition("==")[0] not in left_out))


def versions(text: str) -> dict[str, str]:
    """Returns the version of each package in the text of a lock file, without those of a file that it includes."""
    return dict(line.split()[0].split("==") for line in text.splitlines() if "==" in line)


def _known(*names: str) -> dict[str, str]:
    """Returns the versions in these lock files; none if they are to be upgraded, or do not exist."""
    paths = [] if _VALUES.upgrade else [path for name in names if (path := ROOT / name).exists()]
    return {package: pin for path in paths for package, pin in versions(path.read_text(encoding="utf-8")).items()}


def _resolve(requirements: list[str], known: Mapping[str, str]) -> dict[str, Any]:
    """Returns pip's report of what it would install into an empty environment, with `known` versions if they fit."""
    pinned = {pin.partition("==")[0].partition("[")[0].lower() for pin in requirements}
    with tempfile.TemporaryDirectory() as directory:
        constraints, report = Path(directory, "constraints.txt"), Path(directory, "report.json")
        constraints.write_text(
            "".join(f"{name}=={version}\n" for name, version in known.items() if name not in pinned),
            encoding="utf-8",
        )
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--dry-run",
            "--ignore-installed",
            "--only-binary=:all:",
            f"--report={report}",
            f"--constraint={constraints}",
            *requirements,
        ]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            reason = finished.stderr.strip().rpartition("\n")[2]
            raise UserError(f"pip cannot resolve the packages of pyproject.toml ({reason}). Try --upgrade.")
        return json.loads(report.read_text(encoding="utf-8"))


if __name__ == "__main__":
    app.run(main, _VALUES)
