"""The programs of docs/python.md run as they are printed, with a tiny model and corpus in place of the quickstart's."""

from __future__ import annotations

import pathlib
import re
import runpy

import pytest

from lingvo_moe.testing import experiments

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

_DOCUMENT = (pathlib.Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^`(\w+\.py)`\n\n```python\n(.*?)^```$", _DOCUMENT, re.MULTILINE | re.DOTALL))
# By program: what the document shows of its output. Last digits depend on the processor.
_OUTPUTS = dict(
    re.findall(
        r"^`(\w+\.py)`\n\n```python\n(?:(?!```).*\n)*```\n\n```\n((?:(?!```).*\n)*)```$", _DOCUMENT, re.MULTILINE
    )
)


@pytest.fixture(scope="module")
def directory(data, tmp_path_factory) -> pathlib.Path:
    """A working directory with what `make quickstart` writes."""
    directory = tmp_path_factory.mktemp("python")
    quickstart = directory / "build" / "quickstart"
    quickstart.mkdir(parents=True)
    (quickstart / "corpus").symlink_to(data.corpus)
    (quickstart / "tokenizers").symlink_to(data.tokenizers)
    (quickstart / "log").symlink_to(directory / "log")  # where train.py writes
    return directory


def run(name: str, directory: pathlib.Path, monkeypatch, capsys) -> str:
    """Runs a program of the document in this process; returns what it prints."""
    tiny = [flag.removeprefix("--set=") for flag in experiments.settings() if flag.startswith("--set=")]
    text = PROGRAMS[name].replace("settings = [", f"settings = [*{tiny!r}, ")
    (directory / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(directory)
    capsys.readouterr()
    runpy.run_path(str(directory / name))
    return capsys.readouterr().out


def test_every_program_is_tested():
    """A program that is added to the document has a test here."""
    tested = {"translate.py", "own.py", "inside.py", "train.py", "steps.py", "layer.py", "annotations.py"}
    assert PROGRAMS.keys() == tested


def test_the_released_model_translates(directory, monkeypatch, capsys):
    """The best translations are those that the document shows, with two others each."""
    printed = run("translate.py", directory, monkeypatch, capsys)
    for line, shown in zip(printed.splitlines(), _OUTPUTS["translate.py"].splitlines(), strict=True):
        assert line.partition("[")[0][4:] == shown.partition("[")[0][4:] and line.count("', '") == 1


def test_a_model_is_trained_and_translates(directory, monkeypatch, capsys):
    """The losses fall, training ends once, and the log directory alone says how to use the weights."""
    first, last, held_out = map(float, re.findall(r"[\d.]+", run("train.py", directory, monkeypatch, capsys)))
    assert last < first and 0 < held_out < 10
    assert run("train.py", directory, monkeypatch, capsys) == "[] [] None\n"
    step, _, translations = run("own.py", directory, monkeypatch, capsys).partition(" ")
    assert step == "20" and translations.startswith("[") and translations.count("'") >= 4
    printed = run("inside.py", directory, monkeypatch, capsys)
    assert re.search(r"^\w+: BLEU [\d.]+, chrF [\d.]+\n", printed)
    assert re.search(r"^decoder/1 \[\('<s>', \[\(\d, [01].\d+\)", printed, re.MULTILINE)
    assert re.search(r"^theta/decoder/\S+/gate \(1, 16, 4\) [\d.]+\n\Z", printed, re.MULTILINE)


def test_steps_by_hand_have_metrics_and_sharded_weights(directory, monkeypatch, capsys):
    """Three batches, then each weight with its sharding: experts are sharded, the gate weights are not."""
    lines = run("steps.py", directory, monkeypatch, capsys).splitlines()
    assert sum("'loss'" in line for line in lines) == 3
    shardings = {line.split()[0]: line for line in lines[3:]}
    experts = [line for path, line in shardings.items() if path.endswith("/wi") and "'x'" in line]
    gates = [line for path, line in shardings.items() if path.endswith("/gate")]
    assert experts and gates and not any("'x'" in line for line in gates)


def test_a_layer_alone_has_the_same_values_on_any_mesh(directory, monkeypatch, capsys):
    """Three AllToAlls: two forward and one backward, as nothing asks for the gradient of the tokens."""
    printed = run("layer.py", directory, monkeypatch, capsys)
    *lines, difference = printed.splitlines()
    assert lines == _OUTPUTS["layer.py"].splitlines()[:-1]
    assert float(difference.rpartition(" ")[2]) < 1e-6  # of outputs below 4, in another order of summation


def test_annotations_by_hand_have_the_papers_collectives(directory, monkeypatch, capsys):
    """GShard's Algorithm 2 has an AllToAll before the experts and one after them."""
    assert run("annotations.py", directory, monkeypatch, capsys) == _OUTPUTS["annotations.py"]
