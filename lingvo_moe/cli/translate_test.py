"""`translate` writes a line for each line; an interrupted run is continued, and doubtful lines are listed."""

from __future__ import annotations

import itertools
import json
import pathlib
import re

import polib
import pytest

from lingvo_moe.cli import main, released
from lingvo_moe.inference import released as released_files
from lingvo_moe.inference import translator
from lingvo_moe.testing import experiments as tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

_CATALOG = """msgid "der old"
msgstr ""

msgid "neerg"
msgstr "kept"

msgid "gib"
msgid_plural "gib eert"
msgstr[0] ""
msgstr[1] ""
"""
_WORDS = ("der", "neerg", "eulb", "eert", "gib")


def _run(*arguments: str) -> int:
    return main.main(["lingvo_moe", *arguments])


def _lines(path: pathlib.Path, *lines: str) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return f"--input={path}"


def test_translate_writes_as_many_lines_as_it_reads(trained, tmp_path, capsys):
    """Line n of the output is the translation of line n, empty lines and repeated ones included.

    Of two translations with the same text, the second one is left out.
    """
    given = _lines(tmp_path / "in.txt", "der old", "", "neerg der der", "der old", "eert")
    assert _run("translate", *trained, given, f"--output={tmp_path / 'out.txt'}") == 0
    lines = (tmp_path / "out.txt").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 6 and lines[5] == "" and lines[0] == lines[3]
    assert _run("translate", *trained, given, "--n_best=2") == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    by_line = {number: list(of_line) for number, of_line in itertools.groupby(rows, key=lambda row: row[0])}
    assert list(by_line) == ["1", "2", "3", "4", "5"] and max(map(len, by_line.values())) == 2
    for of_line in by_line.values():
        assert len({text for _, _, text in of_line}) == len(of_line)
        assert float(of_line[0][1]) >= float(of_line[-1][1])
    best = [of_line[0] for of_line in by_line.values()]
    assert [row[2] for row in best] == lines[:5]
    assert _run("translate", *trained, given, "--scores") == 0
    assert [line.split("\t") for line in capsys.readouterr().out.splitlines()] == [row[1:] for row in best]


def test_white_space_and_line_ends_are_kept(trained, tmp_path):
    """Those of Windows, tabs, and blanks at both ends; each column is translated by itself."""
    (tmp_path / "in.txt").write_bytes(b"  der old\r\n\r\ngib\tder \r\n12\r\n")
    assert _run("translate", *trained, f"--input={tmp_path / 'in.txt'}", f"--output={tmp_path / 'out.txt'}") == 0
    found = (tmp_path / "out.txt").read_bytes().decode()
    assert re.fullmatch(r"  [^\t\r\n]+\r\n\r\n[^\t\r\n]+\t[^\t\r\n]+ \r\n12\r\n", found)


def test_a_catalog_becomes_a_catalog(trained, tmp_path, capsys):
    """Each text without a translation has one; what is doubtful is fuzzy, and listed by the line of its entry."""
    (tmp_path / "app.po").write_text(_CATALOG, encoding="utf-8")
    flags = [f"--input={tmp_path / 'app.po'}", f"--doubtful={tmp_path / 'doubtful.txt'}", "--doubt_below=1"]
    assert _run("translate", *trained, *flags, f"--output={tmp_path / 'en.po'}") == 0
    assert "doubtful texts, with a confidence below 1 or something lost: 3 of 3, marked as fuzzy" in (
        capsys.readouterr().err
    )
    found = polib.pofile(str(tmp_path / "en.po"))
    texts = [entry.msgstr or "|".join(entry.msgstr_plural.values()) for entry in found]
    assert texts[1] == "kept" and all(texts) and [entry.fuzzy for entry in found] == [True, False, True]
    doubtful = [line.split("\t") for line in (tmp_path / "doubtful.txt").read_text(encoding="utf-8").splitlines()]
    assert [(line, source) for line, _, source, _ in doubtful] == [("1", "der old"), ("7", "gib"), ("7", "gib eert")]
    assert [row[3].split() for row in doubtful[1:]] == [form.split() for form in texts[2].split("|")]
    found[0].msgstr, found[0].flags = "corrected", []
    found.save()
    assert _run("translate", *trained, *flags, f"--output={tmp_path / 'en.po'}") == 0
    assert "en.po exists: its translations of 2 entries are kept" in capsys.readouterr().err
    assert polib.pofile(str(tmp_path / "en.po"))[0].msgstr == "corrected"
    assert _run("translate", *trained, *flags[:1]) == 0 and capsys.readouterr().out.startswith("#\nmsgid")
    complete = [f"--input={tmp_path / 'complete.po'}"]
    (tmp_path / "complete.po").write_text('msgid "der"\nmsgstr "kept"\n', encoding="utf-8")
    assert _run("translate", *trained, *complete) == 0
    captured = capsys.readouterr()
    assert 'msgstr "kept"' in captured.out and "has no text without a translation" in captured.err


def test_lines_of_a_catalog_are_named(trained, tmp_path, capsys):
    """On standard input, or under another name, it is translated line by line, msgids included."""
    (tmp_path / "app.txt").write_text('msgid "der"\nmsgstr ""\n', encoding="utf-8")
    assert _run("translate", *trained, f"--input={tmp_path / 'app.txt'}") == 0
    assert "app.txt has lines of a gettext catalog, which are translated one by one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("app.xlf", (), "a catalog of this format is not read.*Convert it to .po"),
        ("app.po", ("--n_best=2",), "is a catalog, which has one translation of each text and no scores"),
        ("app.po", ("--scores",), "leave --n_best and --scores out"),
        ("app.pot", (), "app.pot: not a readable .po catalog"),
    ],
)
def test_catalogs_that_cannot_be_translated_are_refused(trained, tmp_path, capsys, name, flags, expected):
    """Their lines are no sentences."""
    (tmp_path / name).write_text("<file>\n", encoding="utf-8")
    assert _run("translate", *trained, f"--input={tmp_path / name}", *flags) == 2
    assert re.search(expected, capsys.readouterr().err)


def test_a_sentence_that_is_too_long_is_named(trained, tmp_path, capsys):
    """By its line, which is doubtful, whatever the confidence; of many lines, ten are named."""
    lines = ["neerg der " * 40, *["der"] * 2, *(f"neerg {'der ' * count}gib" for count in range(60, 70))]
    flags = [_lines(tmp_path / "in.txt", *lines), f"--doubtful={tmp_path / 'doubtful.txt'}", "--doubt_below=0"]
    assert _run("translate", *trained, *flags) == 0
    message = capsys.readouterr().err
    assert "lines 1, 4, 5, 6, 7, 8, 9, 10, 11, 12 and 1 more: a sentence has more than" in message
    doubtful = [line.split("\t")[0] for line in (tmp_path / "doubtful.txt").read_text(encoding="utf-8").splitlines()]
    assert {"1", *map(str, range(4, 14))} <= set(doubtful)


def test_translate_with_no_model_uses_the_released_one(trained, data, tmp_path, capsys, monkeypatch):
    """If it is there, in int8; a log directory that is named is of another model, which must be named too."""
    model, *settings = tiny.settings()
    assert model == f"--model={tiny.MODEL}"
    monkeypatch.setattr(released_files, "MODEL", tiny.MODEL)
    monkeypatch.setattr(released_files, "DIRECTORY", tmp_path)
    own = tuple(flag.removeprefix("--set=") for flag in settings if flag.startswith("--set="))
    specs_of = released_files._specs
    monkeypatch.setattr(
        released_files, "_specs", lambda assignments, mesh=None: specs_of(assignments or own, mesh)
    )  # as if registered so
    given = _lines(tmp_path / "in.txt", "der old", "eert")
    assert _run("translate", *settings, given) == 2
    assert "--model is missing" in capsys.readouterr().err
    (tmp_path / "tokenizers").symlink_to(data.tokenizers)
    weights = tmp_path / "weights.safetensors"
    assert _run("checkpoint", "convert", trained[-1], f"--output={weights}", "--dtype=int8") == 0
    assert _run("translate", *settings, given) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert _run("translate", *settings, given, f"--logdir={tmp_path}") == 2
    assert "--model is missing" in capsys.readouterr().err


def test_translate_explains_which_experts_took_each_token(trained, tmp_path):
    """One JSON object a line; the translations are those of a run without --explain."""
    given, explained = _lines(tmp_path / "in.txt", "der old", "", "eert"), tmp_path / "experts.jsonl"
    outputs = [tmp_path / name for name in ("plain.txt", "explained.txt")]
    assert _run("translate", *trained, given, f"--output={outputs[0]}") == 0
    assert _run("translate", *trained, given, f"--output={outputs[1]}", f"--explain={explained}") == 0
    assert outputs[0].read_text() == outputs[1].read_text()
    found = [json.loads(line) for line in explained.read_text(encoding="utf-8").splitlines()]
    assert [explanation["line"] for explanation in found] == [1, 3]
    assert all(len(explanation["decoder/1"]) == len(explanation["translation"]) for explanation in found)


@pytest.mark.parametrize("flag", ["--explain", "--doubtful"])
@pytest.mark.parametrize("name", ["no/experts.jsonl", "", "-", "out.txt", "in.txt"])
def test_a_bad_file_beside_the_output_is_an_error_before_the_work(trained, tmp_path, capsys, flag, name):
    """A missing directory, no name, standard output, the file of the translations or of the sentences."""
    path = name if name in ("", "-") else tmp_path / name
    given = _lines(tmp_path / "in.txt", "der old")
    assert _run("translate", *trained, given, f"--output={tmp_path / 'out.txt'}", f"{flag}={path}") == 2
    assert f"{flag}={path}: " in capsys.readouterr().err


def test_a_model_without_experts_has_nothing_to_explain(data, tmp_path, capsys):
    changes = ("model.layer_pattern=dense", "model.num_experts=0")
    flags = [*tiny.settings(*changes), f"--tokenizers={data.tokenizers}", f"--logdir={tmp_path}"]
    given = _lines(tmp_path / "in.txt", "der old")
    assert _run("translate", *flags, given, f"--explain={tmp_path / 'experts.jsonl'}") == 2
    assert "no layer of the model has experts" in capsys.readouterr().err


def test_one_long_line_does_not_stop_the_others(trained, tmp_path, capsys):
    """It is translated up to the limit, and a warning names it."""
    given = _lines(tmp_path / "in.txt", "der old", "neerg der " * 40, "eert")
    assert _run("translate", *trained, given) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 3 and "warning: line 2: a sentence has more than" in captured.err


@pytest.mark.parametrize(
    ("content", "flags", "pattern"),
    [
        (b"der\n\xff\xfe\n", [], "line 2: not UTF-8"),
        (b"a\0b\n", [], "line 1: holds a NUL byte"),
        (b"der\n", ["--n_best=9"], "--n_best=9: expected 1 to 2"),
        (b"der\n", ["--n_best=0"], "--n_best=0: expected 1 to 2"),
    ],
)
def test_bad_input_leaves_the_output_as_it_was(trained, content, flags, pattern, tmp_path, capsys):
    """The error names the line, and an earlier result stays."""
    (tmp_path / "in.txt").write_bytes(content)
    (tmp_path / "out.txt").write_text("earlier\n", encoding="utf-8")
    capsys.readouterr()
    status = _run("translate", *trained, f"--input={tmp_path / 'in.txt'}", f"--output={tmp_path / 'out.txt'}", *flags)
    message = capsys.readouterr().err
    assert status == 2 and re.search(f"error: .*{pattern}", message), message
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == "earlier\n"


def test_an_empty_input_gives_an_empty_output(data, tmp_path, capsys):
    """As of `cat`, so that a pipeline does not end; a warning says so, and no model is needed for it."""
    (tmp_path / "in.txt").touch()
    files = [tmp_path / name for name in ("out.txt", "doubtful.txt", "experts.jsonl")]
    outputs = [f"--{flag}={file}" for flag, file in zip(("output", "doubtful", "explain"), files, strict=True)]
    model = [*tiny.settings(), f"--tokenizers={data.tokenizers}", f"--logdir={tmp_path}"]
    assert _run("translate", *model, f"--input={tmp_path / 'in.txt'}", *outputs) == 0
    assert f"warning: --input={tmp_path / 'in.txt'} is empty" in capsys.readouterr().err
    assert all(file.read_bytes() == b"" for file in files)


@pytest.fixture
def many(tmp_path, monkeypatch) -> list[str]:
    """Returns the flags of an input of several chunks, of 2, 4, 8 and 16 batches of four sentences, and an output."""
    monkeypatch.setattr(translator, "_CHUNK_BATCHES", 16)
    lines = [f"{first} {second} {third}" for first in _WORDS for second in _WORDS for third in _WORDS]
    return [_lines(tmp_path / "in.txt", *lines), f"--output={tmp_path / 'out.txt'}"]


def _interrupt(monkeypatch, after: int, error: type[BaseException] = KeyboardInterrupt):
    """Makes the translator fail after some chunks."""
    stream = translator.Translator.stream

    def interrupted(self, sentences, start=0):
        for number, chunk in enumerate(stream(self, sentences, start)):
            if number == after:
                raise error
            yield chunk

    monkeypatch.setattr(translator.Translator, "stream", interrupted)


def _truncated(capsys, expected: str = "") -> list[str]:
    """Returns the warnings of truncated translations in an output with the text `expected`."""
    message = capsys.readouterr().err
    assert expected in message
    return [line for line in message.splitlines() if "is truncated at" in line]


def test_an_interrupted_run_continues(trained, many, tmp_path, capsys, monkeypatch):
    """What was translated is kept, nothing is translated again, and all files are those of an undisturbed run."""
    flags = [*trained, *many, "--n_best=2", f"--doubtful={tmp_path / 'doubtful.txt'}", "--doubt_below=1"]
    flags.append(f"--explain={tmp_path / 'experts.jsonl'}")
    files = [tmp_path / name for name in ("out.txt", "doubtful.txt", "experts.jsonl")]
    assert _run("translate", *flags) == 0
    truncated = _truncated(capsys)
    expected = [file.read_text(encoding="utf-8") for file in files]
    assert sorted(tmp_path.iterdir()) == sorted([*files, tmp_path / "in.txt"])
    for file in files:
        file.unlink()
    with monkeypatch.context() as patch:
        _interrupt(patch, after=3)
        assert _run("translate", *flags) == 130
    message = capsys.readouterr().err
    (kept,) = tmp_path.glob("out.txt.*.partial")
    assert f"56 lines are translated and kept in {kept}; the same command continues" in message
    assert not any(file.exists() for file in files)
    with open(kept, "ab") as file:
        file.write(b'[["half a')  # a process that was killed while it wrote
    assert _run("translate", *flags) == 0
    (again,) = _truncated(capsys, "the first 56 of 125 lines were translated before")
    assert truncated == [again] and " more: the" in again and "translation is truncated at 12 tokens" in again
    assert [file.read_text(encoding="utf-8") for file in files] == expected and not kept.exists()


def test_lines_in_english_are_copied(trained, tmp_path, capsys):
    """With a word about it; none of them is doubtful, and none has experts to explain."""
    output, explained, english = tmp_path / "out", tmp_path / "experts.jsonl", "the _big red house"
    flags = [*trained, _lines(tmp_path / "in.txt", "der old", english), f"--output={output}", f"--explain={explained}"]
    assert _run("translate", *flags, "--scores") == 0
    assert "1 of 2 lines are in English already, and are copied" in capsys.readouterr().err
    assert output.read_text(encoding="utf-8").splitlines()[1] == f"0.0000\t{english}"
    assert [json.loads(line)["line"] for line in explained.read_text(encoding="utf-8").splitlines()] == [1]
    assert _run("translate", *flags, "--nocopy_english") == 0
    assert english not in output.read_text(encoding="utf-8")


def test_lines_without_their_placeholders_are_named(trained, tmp_path, capsys):
    """Once, by their numbers; they are doubtful, however confident the model is."""
    doubtful = tmp_path / "doubtful.txt"
    given = _lines(tmp_path / "in.txt", "12", "der %s", "", "{name} neerg")
    assert (
        _run("translate", *trained, given, f"--output={tmp_path / 'out'}", f"--doubtful={doubtful}", "--doubt_below=0")
        == 0
    )
    message = capsys.readouterr().err
    assert "lines 2, 4: the translation lacks a placeholder, tag, address, number, code or quote of the line" in message
    listed = [line.split("\t")[0] for line in doubtful.read_text(encoding="utf-8").splitlines()]
    assert {"2", "4"} <= set(listed) and f"or something lost: {len(listed)} of 4." in message


@pytest.mark.parametrize(
    "change", [["--n_best=2"], ["--nocopy_english"], ["--set=search.length_alpha=0"], ["--input=other.txt"]]
)
def test_another_run_does_not_continue_it(trained, many, change, tmp_path, capsys, monkeypatch):
    """Other flags or another input: nothing of the interrupted run is used, or lost."""
    monkeypatch.chdir(tmp_path)
    _lines(tmp_path / "other.txt", "der old")
    with monkeypatch.context() as patch:
        _interrupt(patch, after=1)
        assert _run("translate", *trained, *many) == 130
    assert _run("translate", *trained, *many, *change) == 0
    message = capsys.readouterr().err
    assert "were translated before" not in message
    assert ".partial has translations of an interrupted run with other settings, weights or lines" in message
    assert len(list(tmp_path.glob("out.txt.*.partial"))) == 1


def test_standard_output_is_written_as_translations_are_made(trained, many, capsys, monkeypatch):
    """An interrupted run has written the lines of whole chunks."""
    _interrupt(monkeypatch, after=3)
    assert _run("translate", *trained, many[0]) == 130
    assert capsys.readouterr().out.count("\n") == 56


def test_doubtful_lines_are_listed(trained, tmp_path, capsys):
    """Those with less confidence than the threshold, with number and source; without a file they are counted."""
    given = [*trained, _lines(tmp_path / "in.txt", "der old", "", "neerg\tder der")]
    assert _run("translate", *given, "--doubt_below=1", f"--doubtful={tmp_path / 'doubtful.txt'}") == 0
    captured = capsys.readouterr()
    translations = captured.out.split("\n")
    rows = [line.split("\t") for line in (tmp_path / "doubtful.txt").read_text(encoding="utf-8").splitlines()]
    assert [(row[0], *row[2:]) for row in rows] == [
        ("1", "der old", " ".join(translations[0].split())),
        ("3", "neerg der der", " ".join(translations[2].split())),
    ]
    assert all(0 < float(row[1]) < 1 for row in rows)
    assert "doubtful lines, with a confidence below 1 or something lost: 2 of 3." in captured.err
    assert _run("translate", *given, "--doubt_below=0", f"--doubtful={tmp_path / 'doubtful.txt'}") == 0
    truncated = re.search(r"lines? ([\d, ]+): the translation is truncated", capsys.readouterr().err)
    listed = (tmp_path / "doubtful.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split("\t")[0] for line in listed] == (truncated[1].split(", ") if truncated else [])
    assert _run("translate", *given, "--doubt_below=1") == 0
    assert "--doubtful=FILE lists them" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_an_error_before_the_work(trained, tmp_path, capsys):
    """Whatever the reason; here, as for a privileged user too, a name too long for the file system."""
    path = tmp_path / ("o" * 250)
    assert _run("translate", *trained, _lines(tmp_path / "in.txt", "der old"), f"--output={path}") == 2
    message = capsys.readouterr().err
    assert (
        f"error: --output={path} cannot be written to (File name too long)" in message and "translating" not in message
    )


def test_the_input_is_not_replaced(trained, tmp_path, capsys):
    """By its translation, whatever the path is called."""
    given = _lines(tmp_path / "in.txt", "der old")
    assert _run("translate", *trained, given, f"--output={tmp_path}/./in.txt") == 2
    assert "expected the name of a file of its own, beside --input" in capsys.readouterr().err
    assert (tmp_path / "in.txt").read_text() == "der old\n"


def test_an_input_that_is_not_there_is_named(capsys, monkeypatch):
    """With its flag, before the released weights are unpacked, which takes seconds."""
    monkeypatch.setattr(released, "applies", lambda config: True)
    monkeypatch.setattr(released, "by_default", pytest.fail)
    assert _run("translate", "--input=nowhere.txt") == 2
    assert "error: --input=nowhere.txt: there is no such file" in capsys.readouterr().err


def test_an_input_that_cannot_be_read_is_named(trained, capsys):
    """The system does not say which file it was."""
    assert _run("translate", *trained, "--input=/proc/self/mem") == 2
    assert "--input=/proc/self/mem: cannot be read (" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_text(trained, tmp_path):
    """Editors on Windows write one."""
    files = [tmp_path / name for name in ("plain.txt", "marked.txt", "doubtful.txt")]
    files[0].write_text("der old\n", encoding="utf-8")
    files[1].write_bytes("\ufeffder old\r\n".encode())
    flags = [*trained, f"--doubtful={files[2]}", "--doubt_below=1", f"--output={tmp_path / 'out.txt'}"]
    found = []
    for file in files[:2]:
        assert _run("translate", *flags, f"--input={file}") == 0
        found.append(files[2].read_text(encoding="utf-8"))
    assert found[0] == found[1]
