"""Protects figure 9's measurement: which collective is timed, of what size, and how the times of processes add up."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest

from lingvo_moe.analysis.collectives import find_collectives
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.cli import app
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.engines import pjrt
from tools import launch_processes
from tools.partitioning import collective_times
from tools.report import charts, clusters, measured, style
from tools.report.measured import Measured, Time

_SAVED = pathlib.Path(__file__).parents[2] / "docs" / "collective_times.json"
_KINDS = {"AllReduce": ["all-reduce"], "AllToAll": ["all-to-all"], "Add": []}
_SIZE = 2**16


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("operation", measured.OPERATIONS)
def test_the_partitioner_inserts_exactly_one_collective(operation, devices):
    """Of all that a device has, among all devices; an addition has none."""
    engine = pjrt.Engine(devices, platform="cpu")
    compiled = engine.compile(collective_times.program(operation, devices, _SIZE))
    found = find_collectives(Module(compiled.hlo(), devices))
    expected = [(kind, _SIZE, devices, 1) for kind in _KINDS[operation]]
    assert [(c.kind, c.bytes, c.group_size, c.times) for c in found] == expected
    assert compiled.memory().argument_size_in_bytes == _SIZE == compiled.memory().output_size_in_bytes


@pytest.mark.parametrize("operation", measured.OPERATIONS)
def test_values_are_those_of_the_whole_tensor(operation):
    """A device has its number: AllReduce returns their sum, and after AllToAll each device has a part of every one."""
    engine = pjrt.Engine(8, platform="cpu")
    x = engine.compile(collective_times.filled(8, _SIZE))({"seed": np.float32(0)})["x"]
    assert {float(np.asarray(shard.data).mean()) for shard in x.addressable_shards} == set(range(8))
    y = engine.compile(collective_times.program(operation, 8, _SIZE))({"x": x})["y"]
    whole = np.broadcast_to(np.arange(8, dtype=np.float32)[:, None, None], x.shape)
    expected = {"AllReduce": whole.sum(0).ravel(), "AllToAll": whole, "Add": whole + 1}[operation]
    np.testing.assert_array_equal(np.asarray(y), expected)
    if operation == "AllToAll":
        shape = (8, 1, x.shape[2])
        assert [shard.data.shape for shard in y.addressable_shards] == [shape] * 8


def test_a_run_lasts_from_the_first_start_to_the_last_end():
    """CPU time is that of all processes; the first run does not count, and of the others the least."""

    class Two(ProcessGroup):
        def gather(self, value: list) -> list:
            assert len(value) == 4
            first = [(0.0, 1.0, 0.1), (10.0, 14.0, 3.0), (20.0, 29.0, 1.0), (30.0, 33.0, 2.0)]
            other = [(0.0, 1.0, 0.1), (11.0, 13.0, 3.0), (21.0, 22.0, 1.5), (32.5, 32.75, 2.0)]
            return [first, other]

    engine = pjrt.Engine(2, platform="cpu")
    least = collective_times._least(Two(), engine, "Add", _SIZE, runs=3)
    assert least == (3.0, 2.5)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_processes_measure_every_operation(processes):
    """Protects the start of the processes and their connection; no time is checked beyond that it is one."""
    times = collective_times.measure(processes, 2, runs=1)
    assert [(time.operation, time.mebibytes) for time in times] == [
        (name, size) for size in measured.SIZES for name in measured.OPERATIONS
    ]
    assert all((time.processes, time.devices) == (processes, 2) for time in times)
    assert all(time.wall_seconds > 0 < time.cpu_seconds for time in times)


@pytest.mark.parametrize("shape", ["8", "0x8", "1x1", "1x3", "2x128", "x", f"1x{'2' * 5000}"])
def test_impossible_shapes_are_one_line(shape, capsys):
    status = app.execute(collective_times.main, ["tool", f"--shapes={shape}"], collective_times._VALUES)
    assert status == 2
    assert f"error: --shapes={shape}: expected PROCESSESxDEVICES, together a power" in capsys.readouterr().err


@pytest.mark.parametrize("code", ["raise SystemExit(130)", "import os; os.kill(os.getpid(), 15)"])
def test_an_interrupted_measurement_has_no_remedy(code, tmp_path, monkeypatch, capsys):
    """It is not the shape that was wrong; Ctrl-C and SIGTERM reach the processes."""
    run = launch_processes.run
    monkeypatch.setattr(launch_processes, "run", lambda commands: run([[sys.executable, "-c", code]]))
    arguments = ["tool", "--shapes=1x2", f"--output={tmp_path / 'times.json'}"]
    assert app.execute(collective_times.main, arguments, collective_times._VALUES) == app.INTERRUPTED
    printed = capsys.readouterr().err
    assert "interrupted\n" in printed and "error" not in printed and not list(tmp_path.iterdir())


@pytest.mark.parametrize("argument", ["{}", "stray", '{"processes": 1}', "[" * 100_000])
def test_an_argument_of_a_user_is_no_task(argument, capsys):
    """The tool passes tasks to its own processes, which no flag does."""
    assert app.execute(collective_times.main, ["tool", argument], collective_times._VALUES) == 2
    assert "unexpected argument" in capsys.readouterr().err
    assert "task" not in collective_times._VALUES


def test_no_shapes_are_an_error_and_not_an_empty_file(tmp_path, capsys):
    output = tmp_path / "times.json"
    output.write_text("measured before", encoding="utf-8")
    arguments = ["tool", "--shapes=", f"--output={output}"]
    assert app.execute(collective_times.main, arguments, collective_times._VALUES) == 2
    assert "error: --shapes= is empty: expected PROCESSESxDEVICES" in capsys.readouterr().err
    assert output.read_text(encoding="utf-8") == "measured before"


@pytest.mark.parametrize("given", ["--shapes=1x2", "--runs=1"])
def test_a_trial_does_not_replace_the_published_results(given, tmp_path, monkeypatch, capsys):
    """It names a file of its own, before anything is measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(collective_times, "measure", lambda *arguments: [])
    values = collective_times._VALUES
    for name in ("shapes", "runs", "output"):
        values[name].unparse()
    assert app.execute(collective_times.main, ["tool", given], values) == 2
    assert "error: --output is missing: docs/collective_times.json has the default" in capsys.readouterr().err
    assert app.execute(collective_times.main, ["tool", given, "--output=trial.json"], values) == 0
    assert (tmp_path / "trial.json").exists()


def _measured() -> Measured:
    """AllToAll takes 2 ms for each device and 3 of CPU time, with 32 MiB four times that."""
    shapes = [(1, 2), (1, 16), (2, 2)]
    return Measured(
        "a processor",
        2,
        20,
        tuple(
            Time(name, size, processes, devices, 0.002 * devices * size / 8, 0.003 * devices * size / 8)
            for processes, devices in shapes
            for size in measured.SIZES
            for name in measured.OPERATIONS[: 3 if devices == 2 else 2]
        ),
    )


def test_the_table_shows_times_for_each_byte():
    """2 devices with 32 MiB have 64 MiB together, a sixteenth of a GiB, and take 24 ms; what is missing is a dash."""
    rows = {row[:2]: row for row in map(tuple, measured.table(_measured()).rows)}
    assert rows["2", "1"][2:] == ("4.0, 6.0",) * 3 + ("16.0, 24.0",) * 3 + ("0.38",) * 3
    assert rows["16", "1"][2:5] == ("32.0, 48.0", "32.0, 48.0", "–") and rows["16", "1"][-1] == "–"


def test_saved_results_are_read_and_drawn(tmp_path):
    """The file in docs has every shape of the defaults, and the figure's name says that it is measured."""
    saved = measured.load(_SAVED)
    shapes = [collective_times._shape(text) for text in collective_times._VALUES["shapes"].default]
    assert set(saved.shapes) == set(shapes) and len(saved.times) == len(shapes) * 6
    measured.save(saved, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == _SAVED.read_bytes()
    assert "milliseconds of CPU time, measured" in style.svg(charts.measured_collectives(saved)).decode()
    table = clusters.text(measured.table(saved))
    assert table.count("\n") == 1 + len(shapes)
    page = (_SAVED.parent / "planning.md").read_text(encoding="utf-8")
    assert f"<!-- collective_times: begin -->\n{table}\n<!-- collective_times: end -->" in page
