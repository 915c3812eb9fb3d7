"""The lock files: what is written into them, and that they agree with pyproject.toml."""

from __future__ import annotations

import re
import tomllib

import pytest

from lingvo_moe.engines.tpu_strategy import TPU_TENSORFLOW
from lingvo_moe.errors import UserError
from tools import lock

_LINE = re.compile(r"[a-z0-9.-]+==[^ ]+ --hash=sha256:[0-9a-f]{64}")


def locked(name: str) -> list[str]:
    """Returns the lines of a lock file that name packages."""
    lines = (lock.ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines[1:] if line != "--requirement requirements.txt"]


def report(*packages: tuple[str, str, str]) -> dict:
    """Returns what `pip install --report` writes for packages, each with its name, version and hash."""
    return {
        "environment": {"python_version": "3.11", "sys_platform": "linux", "platform_machine": "x86_64"},
        "install": [
            {
                "metadata": {"name": name, "version": version},
                "download_info": {"archive_info": {"hashes": {"sha256": digest}}},
            }
            for name, version, digest in packages
        ],
    }


def test_lock_text():
    """Packages are sorted and spelled as pip compares them; a left-out package is not written."""
    text = lock.lock_text(report(("Some_Name", "1.2", "bb"), ("a", "1", "aa"), ("left", "3", "cc")), ["left"])
    assert text.splitlines() == [
        "# Written by `make lock` from pyproject.toml, for Python 3.11 on linux x86_64. Do not edit.",
        "a==1 --hash=sha256:aa",
        "some-name==1.2 --hash=sha256:bb",
    ]
    assert lock.versions(text) == {"a": "1", "some-name": "1.2"}


def test_lock_text_on_top_of_another():
    """pip reads the other file first; its packages are not repeated."""
    text = lock.lock_text(report(("a", "1", "aa"), ("b", "2", "bb")), ["a"], on_top_of="requirements.txt")
    assert text.splitlines()[1:] == ["--requirement requirements.txt", "b==2 --hash=sha256:bb"]
    assert lock.versions(text) == {"b": "2"}


@pytest.mark.parametrize("name", [lock.LOCK, lock.DEV_LOCK, lock.TPU_LOCK])
def test_every_locked_package_has_a_hash(name):
    """pip refuses the whole file if one hash is missing."""
    assert all(_LINE.fullmatch(line) for line in locked(name))


def test_lock_agrees_with_pyproject():
    """A pin that was changed without `make lock` is found here."""
    project = tomllib.loads((lock.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    direct = {*project["dependencies"], *(pin for pins in project["optional-dependencies"].values() for pin in pins)}
    pins = {line.split()[0] for name in (lock.LOCK, lock.DEV_LOCK) for line in locked(name)}
    assert {re.sub(r"\[.*\]", "", pin).lower() for pin in direct} <= pins


def test_running_needs_no_compilers_of_other_devices():
    """They are 1.5 GB once installed, and the quickstart would install them before it starts."""
    running, added = ({line.partition("==")[0] for line in locked(name)} for name in (lock.LOCK, lock.DEV_LOCK))
    assert {"jax-cuda13-pjrt", "libtpu", "nvidia-cuda-nvcc", "pyright", "pytest"} <= added
    assert {"django", "jaxlib", "matplotlib", "tensorflow"} <= running and not running & added


def test_tpu_lock_has_one_tensorflow():
    """The TensorFlow without TPU support would shadow the other one."""
    pins = {line.split()[0] for line in locked(lock.TPU_LOCK)}
    assert TPU_TENSORFLOW in pins
    assert not any(pin.startswith("tensorflow==") for pin in pins)


def test_unresolvable_packages(monkeypatch):
    """pip's reason is in the error."""
    monkeypatch.setattr(lock.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="pip cannot resolve the packages of pyproject.toml"):
        lock._resolve(["absl-py==0"], {})
