"""The fuzzer's cases pass, the same seed draws the same ones, and what goes wrong is seen."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import pathlib
import random
import sys

import pytest

from lingvo_moe.cli import app
from lingvo_moe.engines.pjrt import Engine
from tools.fuzz import (
    __main__ as fuzz,
)
from tools.fuzz import (
    case as judging,
)
from tools.fuzz import (
    file_targets,
    flag_targets,
    mutations,
    runner,
)
from tools.fuzz import (
    fixtures as inputs,
)
from tools.fuzz.case import Case, Outcome

_GOOD = Outcome(2, "", "error: --model=x: no such model. `list` shows all of them.\n")
_numbers = itertools.count()
_CASE = Case("flags", "lingvo_moe", ("show", "x"), ("--model",))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    """A directory with the sound inputs, for cases to run in."""
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / "world").mkdir()
    (directory / "cases").mkdir()
    Engine(8, "cpu")
    inputs.make(directory / "world")
    return directory


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("maker", [*fuzz.OF_FLAGS, *fuzz.OF_FILES], ids=lambda maker: maker.__name__)
def test_cases_of_every_door_pass(place, maker):
    """A handful of each; those whose inputs are sound by chance end well."""
    world = inputs.Fixtures(place / "world")
    for seed in range(3):
        generator = random.Random(seed)
        case = maker(generator) if maker in fuzz.OF_FLAGS else maker(world, generator)
        if case.entry == "train_tokenizer" or case.arguments[:1] in (("train",), ("export",)):
            continue  # seconds each, in the tool itself
        found = fuzz.run_one(next(_numbers), case, place, processes=0, loud=False)
        assert not found["problems"], found


def test_a_case_depends_on_seed_and_number_alone(place):
    """So that --only finds it again."""
    world = inputs.Fixtures(place / "world")

    def calls(seed: int) -> list[tuple]:
        cases = (fuzz.draw(world, seed, number) for number in range(60))
        return [(case.entry_point, case.entry, case.arguments, case.input) for case in cases]

    assert calls(0) == calls(0) != calls(1)
    assert len({entry_point for entry_point, *_ in calls(0)}) > 10


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome(None, "", "", "ValueError: x"), "no exit status: ValueError"),
        (Outcome(1, "", "Traceback (most recent call last):\n"), "a traceback was printed"),
        (Outcome(1, "", ""), "status 1"),
        (Outcome(2, "", ""), "0 lines begin with error"),
        (
            Outcome(2, "", "error: --model is wrong, it seems\nerror: --model is wrong, it seems\n"),
            "2 lines begin with error",
        ),
        (Outcome(2, "", "error: --model\n"), "next to nothing"),
        (Outcome(2, "", "error: something has gone wrong somewhere\n"), "names none of --model"),
        (Outcome(0, "", "error: but all is well, says the exit status\n"), "status 0, but"),
    ],
)
def test_an_unclear_end_is_seen(outcome, said):
    found = judging.judge(_CASE, outcome, {}, {})
    assert len(found) == 1 and said in found[0]


def test_a_clear_end_passes():
    assert judging.judge(_CASE, _GOOD, {"a": "1"}, {"a": "1"}) == []
    assert judging.judge(_CASE, Outcome(0, "done", ""), {}, {"new": "1"}) == []
    told = dataclasses.replace(_CASE, tells_on_stdout=True)
    assert judging.judge(told, Outcome(2, "step 8: damaged", ""), {}, {}) == []


def test_files_that_change_go_or_are_left_are_seen(tmp_path):
    """Links count as what they lead to by name; what they lead to is not read."""
    for name in ("changed", "gone", "kept", "out"):
        (tmp_path / name).write_text("before")
    (tmp_path / "link").symlink_to("nowhere")
    before = judging.snapshot(tmp_path)
    (tmp_path / "changed").write_text("after")
    (tmp_path / "out").write_text("after")
    (tmp_path / "gone").unlink()
    (tmp_path / "x.partial").write_text("half")
    case = dataclasses.replace(_CASE, writes=("out",))
    ended = {
        status: judging.judge(
            case, Outcome(status, "", _GOOD.stderr if status else ""), before, judging.snapshot(tmp_path)
        )
        for status in (0, 2)
    }
    assert sorted(problem.replace(f"{tmp_path}/", "") for problem in ended[0]) == [
        "changed has changed",
        "gone is gone",
        "x.partial was left behind",
    ]
    assert any("out has changed" in problem for problem in ended[2])


def test_what_comes_out_of_a_door_is_caught(place, monkeypatch):
    """An exception, an exit, a call that does not end; streams are a process's, and are put back."""
    ends = {
        "raises": lambda arguments: 1 // 0,
        "exits": lambda arguments: sys.exit(3),
        "hangs": lambda arguments: _for_ever(),
        "says": lambda arguments: print(sys.stdin.read().upper(), os.getcwd()),
    }
    streams = sys.stdin, sys.stdout, sys.stderr
    monkeypatch.setattr(runner, "SECONDS", 1)
    found = {}
    for name, end in ends.items():
        monkeypatch.setitem(runner.ENTRIES, name, end)
        found[name] = runner.call(Case("x", name, (), (), input=b"words"), place, place)
    assert "ZeroDivisionError" in found["raises"].raised and "SystemExit: 3" in found["exits"].raised
    assert found["hangs"].status is None and "not done within" in found["hangs"].raised
    assert found["says"].stdout == f"WORDS {place}\n"
    assert (sys.stdin, sys.stdout, sys.stderr) == streams


def test_every_mutation_changes_something():
    """Of a file of some length, nearly always; JSON stays JSON."""
    data = b'{"a": [1, {"b": "text"}], "c": 2}\n' * 20
    for mutation in mutations.BYTES:
        changed = [mutation(data, random.Random(seed)) != data for seed in range(20)]
        assert sum(changed) > 10, mutation
    texts = collections.Counter(mutations.change_json(data[:35], random.Random(seed)) for seed in range(20))
    assert len(texts) > 10 and all(text.startswith((b"{", b"null")) for text in texts)


def test_a_wrong_call(capsys, tmp_path):
    """What the fuzzer asks of others holds for itself."""
    assert app.execute(fuzz.main, ["fuzz", f"--json={tmp_path}/missing/x.json"], fuzz._VALUES) == 2
    assert "x.json: there is no such directory" in capsys.readouterr().err


def test_doors_are_the_commands_own_flags():
    """A new command or flag is fuzzed without a word here."""
    calls = [flag_targets.flag(random.Random(seed)) for seed in range(400)]
    assert {"lingvo_moe", "build_corpus", "report"} <= {case.entry for case in calls}
    assert len({case.arguments[0] for case in calls if case.entry == "lingvo_moe"}) >= 8
    assert not any("--dry_run=" in argument for case in calls for argument in case.arguments)
    assert file_targets.STEPS == inputs.STEPS


def _for_ever():
    while True:
        pass
