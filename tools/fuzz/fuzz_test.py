"""Tests that the fuzzer's cases pass, that a seed draws the same cases, and that problems are found and shrunk."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator

import pytest

from lingvo_moe.cli import app
from tools.fuzz import __main__ as fuzz
from tools.fuzz import case as checks
from tools.fuzz import cases, file_targets, fixtures, flag_targets, mutations, runner
from tools.fuzz.case import Case, Outcome

pytestmark = pytest.mark.slow

_GOOD = Outcome(2, "", "error: --model=x: no such model. `list` shows all of them.\n")
_CASE = Case("flags", "lingvo_moe", ("show", "x"), ("--model",))


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory) -> Iterator[fuzz.Fuzzer]:
    """A fuzzer with its valid inputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINGVO_MOE_CACHE", "")  # put back afterwards
        yield fuzz.Fuzzer(tmp_path_factory.mktemp("fuzz"), seed=0, count=60)


@pytest.fixture(scope="module")
def inputs(fuzzer) -> fixtures.Fixtures:
    return fixtures.Fixtures(fuzzer._fixtures)


@pytest.mark.parametrize("target", [*flag_targets.TARGETS, *file_targets.TARGETS], ids=lambda target: target.__name__)
def test_cases_of_every_target_pass(fuzzer, inputs, target):
    """A small fuzz run of every target."""
    strategy = target() if target in flag_targets.TARGETS else target(inputs)
    for case in cases.draw(strategy, seed=1, count=3):
        if case.entry_point == "train_tokenizer" or case.arguments[:1] in (("train",), ("export",)):
            continue  # seconds each, in the tool itself
        result, _ = fuzzer.run(0, case)
        assert not result.problems, result


def test_cases_depend_on_seed_alone(inputs):
    """Protects --only, which draws the cases again."""

    def calls(seed: int) -> list[tuple]:
        drawn = cases.draw(cases.strategy(inputs), seed, 60)
        return [(case.target, case.entry_point, case.arguments, case.input) for case in drawn]

    assert calls(0) == calls(0) != calls(1)
    assert len(calls(0)) == 60 and len({target for target, *_ in calls(0)}) > 10


def test_failing_case_is_shrunk():
    """The simplest failing value is found from the value of that number; a passing one is not shrunk."""
    strategy = mutations.st.integers(0, 10**6)
    drawn = cases.draw(strategy, seed=0, count=50)
    number = next(index for index, value in enumerate(drawn) if value > 1000)
    assert cases.shrink(strategy, 0, 50, number, lambda value: value > 1000) == 1001
    assert cases.shrink(strategy, 0, 50, number, lambda value: False) is None


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (Outcome(None, "", "", "ValueError: x"), "no exit status: ValueError"),
        (Outcome(1, "", "Traceback (most recent call last):\n"), "a traceback was printed"),
        (Outcome(1, "", ""), "status 1"),
        (Outcome(2, "", ""), "0 lines begin with error"),
        (
            Outcome(2, "", "error: --model is wrong, it seems\nerror: --model is wrong, it seems\n"),
            "2 lines begin with error",
        ),
        (Outcome(2, "", "error: --model\n"), "too short to help"),
        (Outcome(2, "", "error: something has gone wrong somewhere\n"), "names none of --model"),
        (Outcome(0, "", "error: but the exit status says success\n"), "status 0, but"),
    ],
)
def test_unclear_end_is_a_problem(outcome, problem):
    """Every way to end badly is found."""
    found = checks.check(_CASE, outcome, {}, {})
    assert len(found) == 1 and problem in found[0]


def test_clear_end_passes():
    """Status 2 with one clear line, status 0, and a summary on standard output are no problems."""
    assert checks.check(_CASE, _GOOD, {"a": "1"}, {"a": "1"}) == []
    assert checks.check(_CASE, Outcome(0, "done", ""), {}, {"new": "1"}) == []
    summary = dataclasses.replace(_CASE, summary_on_stdout=True)
    assert checks.check(summary, Outcome(2, "step 8: corrupt", ""), {}, {}) == []


def test_changed_removed_and_partial_files_are_problems(tmp_path):
    """Files are compared by content, links by their targets' names."""
    for name in ("changed", "gone", "kept", "out"):
        (tmp_path / name).write_text("before")
    (tmp_path / "link").symlink_to("nowhere")
    before = checks.snapshot(tmp_path)
    (tmp_path / "changed").write_text("after")
    (tmp_path / "out").write_text("after")
    (tmp_path / "gone").unlink()
    (tmp_path / "x.partial").write_text("half")
    case, after = dataclasses.replace(_CASE, writes=("out",)), checks.snapshot(tmp_path)
    done, mistake = (
        [
            problem.replace(f"{tmp_path}/", "")
            for problem in checks.check(case, Outcome(status, "", _GOOD.stderr if status else ""), before, after)
        ]
        for status in (0, 2)
    )
    assert sorted(done) == ["changed has changed", "gone is gone", "x.partial was left behind"]
    assert "out has changed" in mistake


def test_every_outcome_of_an_entry_point_is_recorded(tmp_path, monkeypatch):
    """Exceptions, exits, timeouts and output are recorded; the standard streams are restored."""
    ends = {
        "raises": lambda arguments: 1 // 0,
        "exits": lambda arguments: sys.exit(3),
        "hangs": lambda arguments: _hang(),
        "prints": lambda arguments: print(sys.stdin.read().upper(), os.getcwd()),
    }
    streams = sys.stdin, sys.stdout, sys.stderr
    monkeypatch.setattr(runner, "SECONDS", 1)
    outcomes = {}
    for name, end in ends.items():
        monkeypatch.setitem(runner.ENTRY_POINTS, name, end)
        outcomes[name] = runner.call(Case("x", name, (), (), input=b"words"), tmp_path, tmp_path)
    assert "ZeroDivisionError" in outcomes["raises"].raised and "SystemExit: 3" in outcomes["exits"].raised
    assert outcomes["hangs"].status is None and "not finished within" in outcomes["hangs"].raised
    assert outcomes["prints"].stdout == f"WORDS {tmp_path}\n"
    assert (sys.stdin, sys.stdout, sys.stderr) == streams


def test_mutations_change_files():
    """Nearly every edit changes a file of some length; edited JSON is mostly JSON of other content."""
    data = b'{"a": [1, {"b": "text"}], "c":\t2}\n' * 20
    edits = cases.draw(mutations.byte_edits(), seed=0, count=100)
    assert sum(edit(data) != data for edit in edits) > 80
    texts = {edit(data.splitlines()[0]) for edit in cases.draw(mutations.json_edits(), seed=0, count=40)}
    assert len(texts) > 10 and all(text.startswith((b"{", b"null")) for text in texts)


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--json={tmp}/missing/x.json", "there is no directory {tmp}/missing"), ("--only=5", "a number below --cases=3")],
)
def test_invalid_flags(capsys, tmp_path, flag, message):
    """The fuzzer's own flags are checked before any work."""
    arguments = ["fuzz", "--cases=3", flag.format(tmp=tmp_path)]
    assert app.execute(fuzz.main, arguments, fuzz._VALUES) == 2
    assert message.format(tmp=tmp_path) in capsys.readouterr().err


def test_summary_counts_targets():
    """A row for each target, and the sum."""
    results = [fuzz.Result(0, "plans", "x", 2, False, []), fuzz.Result(1, "plans", "x", None, True, ["bad"])]
    rows = [line.split() for line in fuzz.summary(results, 60).splitlines()[3:]]
    assert rows == [["plans", "2", "0", "1", "1", "1"], ["together", "2", "0", "1", "1", "1"], ["in", "1.0", "minutes"]]


def test_flags_are_found_by_introspection():
    """A new command or flag is fuzzed without an entry in the fuzzer."""
    drawn = cases.draw(flag_targets.flag(), seed=0, count=400)
    assert {"lingvo_moe", "build_corpus", "report"} <= {case.entry_point for case in drawn}
    assert len({case.arguments[0] for case in drawn if case.entry_point == "lingvo_moe"}) >= 8
    assert not any("--dry_run=" in argument for case in drawn for argument in case.arguments)


def _hang():
    while True:
        pass
