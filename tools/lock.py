"""Writes the lock files: the packages of pyproject.toml and all that they require, each with the hash of its wheel.

    python -m tools.lock            # after a change of pyproject.toml
    python -m tools.lock --upgrade  # also take the newest versions of what pyproject.toml does not pin

requirements.txt has the dependencies and all extras. requirements-tpu.txt has what `tools.launch_tpu` installs on a
Cloud TPU machine, where a TensorFlow with TPU support replaces the usual one. pip resolves both for this platform.
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
TPU_LOCK = "requirements-tpu.txt"
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
    """Writes both files; raises UserError where pip finds no versions that go together."""
    app.no_arguments(arguments[1:])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    direct = project["dependencies"]
    extras = [pin for extra in project["optional-dependencies"].values() for pin in extra]
    _write(ROOT / LOCK, [*direct, *extras], left_out=())
    kept = [pin for pin in direct if pin.partition("==")[0] not in _TPU_REPLACED]
    _write(ROOT / TPU_LOCK, [*kept, *_TPU_PACKAGES], left_out=("tensorflow",))


def _write(path: Path, requirements: list[str], left_out: Collection[str]):
    report = _resolve(requirements, {} if _VALUES.upgrade else _versions(path))
    with output_files.atomic_writer(str(path)) as file:
        file.write(lock_text(report, left_out))
    print(f"{path.name}: {len(report['install']) - len(left_out)} packages")


def lock_text(report: Mapping[str, Any], left_out: Collection[str] = ()) -> str:
    """Returns the text of a lock file.

    Args:
      report: what `pip install --report` wrote.
      left_out: names of packages to leave out.
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
    return header + "".join(sorted(line for line in lines if line.partition("==")[0] not in left_out))


def _versions(path: Path) -> dict[str, str]:
    """Returns the version of each package in a lock file; none if there is no file."""
    if not path.exists():
        return {}
    pins = [line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if "==" in line]
    return dict(pin.split("==") for pin in pins)


def _resolve(requirements: list[str], versions: Mapping[str, str]) -> dict[str, Any]:
    """Returns pip's report of what it would install into an empty environment, with `versions` wherever they fit."""
    pinned = {pin.partition("==")[0].partition("[")[0].lower() for pin in requirements}
    with tempfile.TemporaryDirectory() as directory:
        constraints, report = Path(directory, "constraints.txt"), Path(directory, "report.json")
        constraints.write_text(
            "".join(f"{name}=={version}\n" for name, version in versions.items() if name not in pinned),
            encoding="utf-8",
        )
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--dry-run", "--ignore-installed", "--only-binary=:all:"),
            *(f"--report={report}", f"--constraint={constraints}"),
            *requirements,
        ]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            reason = finished.stderr.strip().rpartition("\n")[2]
            raise UserError(f"pip cannot resolve the packages of pyproject.toml ({reason}). Try --upgrade.")
        return json.loads(report.read_text(encoding="utf-8"))


if __name__ == "__main__":
    app.run(main, _VALUES)
