"""Virtual environments of peers and others: made on first use, each from its own pinned requirements, and kept."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

from lingvo_moe.errors import UserError


class PeerMissingError(UserError):
    """A peer's environment cannot be made here."""


_REQUIREMENTS = pathlib.Path(__file__).parent / "peers"
_LAST_LINES = 4


def python_of(peer: str, directory: pathlib.Path, requirements: pathlib.Path | None = None) -> pathlib.Path:
    """Returns the interpreter of a peer's environment below `directory`.

    The environment is made if it is missing or its pins have changed.

    Args:
      peer: the environment's name.
      directory: of all environments.
      requirements: the file of its pins, by default that of the benchmarks' peer.

    Raises:
      PeerMissingError: the environment cannot be made.
    """
    remedy = "Check the network and the free disk space." if requirements else "Fix that, or omit its rows with --only."
    requirements = requirements or _REQUIREMENTS / f"{peer}.txt"
    own = directory / peer
    python, complete = own / "bin" / "python", own / ".complete"
    if complete.exists() and complete.read_text(encoding="utf-8") == requirements.read_text(encoding="utf-8"):
        return python
    shutil.rmtree(own, ignore_errors=True)
    _run(peer, [sys.executable, "-m", "venv", str(own)], remedy)
    # One line after another: a package that is built from source uses the versions installed before.
    for line in _pins(requirements):
        _run(peer, [str(python), "-m", "pip", "install", "--quiet", "--no-build-isolation", *line.split()], remedy)
    complete.write_text(requirements.read_text(encoding="utf-8"), encoding="utf-8")
    return python


def _pins(requirements: pathlib.Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in requirements.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def _run(peer: str, command: list[str], remedy: str):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if result.returncode:
        last = "\n".join(result.stdout.strip().splitlines()[-_LAST_LINES:])
        raise PeerMissingError(
            f"{peer}: its environment cannot be made here, `{' '.join(command)}` failed:\n{last}\n{remedy}"
        )
