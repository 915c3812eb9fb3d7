"""Protects the figures of a model's card: tokens and means by hand, licences as the packages name them."""

from __future__ import annotations

import json
import pathlib
import subprocess
import tarfile
import zipfile

import pytest

from lingvo_moe.cli import app
from lingvo_moe.data.corpora import npm_packages
from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.testing import corpora
from lingvo_moe.training.summary import SummaryWriter
from tools import model_card

_NPM = npm_packages.PACKAGES[0]
_CONTROL = (
    "Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@example.org>\nDescription: test\n"
)


def _package(directory: pathlib.Path, name: str, copyright_file: str):
    root = directory / f"{name}_root"
    for path, text in (
        ("DEBIAN/control", _CONTROL.format(name=name)),
        (f"usr/share/doc/{name}/copyright", copyright_file),
    ):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(text, encoding="utf-8")
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "--build", root, directory / f"{name}_1_all.deb"],
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> pathlib.Path:
    """A corpus of packages, which are there but for one that is installed; of one, help pages are read too."""
    directory = tmp_path_factory.mktemp("packages") / "corpus"
    corpora.write_corpus(directory, {"de": {"train": [("Hallo", "Hello")]}})
    manifest = json.loads((directory / "corpus.json").read_text(encoding="utf-8"))
    manifest["inputs"] = [
        "zeta_1_all.deb",
        "zeta_1_all.deb, help pages",
        "free_1_all.deb",
        "wheeled",
        "numpy",
        _NPM.name,
    ]
    (directory / "corpus.json").write_text(json.dumps(manifest), encoding="utf-8")
    paragraph = "Files: *\nCopyright: somebody\nLicense: {}\n Text of it.\n\n"
    _package(directory, "zeta", "".join(map(paragraph.format, ("MIT", "GPL-2 or GPL-3+ with Bison exception", "MIT"))))
    _package(directory, "free", "Everybody may copy this.\nLicense: none that has a name\n")
    with zipfile.ZipFile(directory / "wheeled-2-py3-none-any.whl", "w") as archive:
        archive.writestr(
            "wheeled-2.dist-info/METADATA", "Metadata-Version: 2.4\nName: wheeled\nLicense-Expression: MIT\n"
        )
    (directory / "package.json").write_text('{"license": "ISC"}', encoding="utf-8")
    with tarfile.open(directory / _NPM.file_name, "w:gz") as archive:
        archive.add(directory / "package.json", "package/package.json")
    return directory


@pytest.fixture(scope="module")
def logdir(tmp_path_factory) -> pathlib.Path:
    """Curves of 200 steps, of which a quarter of the positions is padding."""
    directory = tmp_path_factory.mktemp("log")
    for name, step, scalars in (
        ("train", 100, {"padding/target": 0.2}),
        ("train", 200, {"padding/target": 0.3}),
        ("valid", 150, {"cross_entropy": 3.25, "source_gain": 1.5}),
    ):
        writer = SummaryWriter(directory, name)
        writer.write(step, scalars)
        writer.close()
    (directory / "train" / "notes.txt").write_text("no events\n", encoding="utf-8")
    return directory


def test_tokens_are_positions_without_padding(logdir):
    run = model_card.read_curves(logdir, positions=1000)
    assert run.steps == 200 and run.tokens == pytest.approx(150_000) and run.losses == [(150, 3.25, 1.5)]
    assert 0 <= run.hours < 0.1


def test_licences_are_those_that_the_packages_name(corpus):
    """Each once, and a licence without a name is not invented."""
    found = model_card.by_licence(model_card.Corpus.open(corpus), corpus)
    assert found["GPL-2 or GPL-3+ with Bison exception, MIT"] == ["zeta"] and found["MIT"] == ["wheeled"]
    assert found["named in free text alone"] == ["free"] and found["ISC"] == [_NPM.name]
    assert next(names for names, packages in found.items() if "numpy" in packages).startswith("BSD")


def test_a_package_that_is_not_there_is_an_error(corpus, tmp_path):
    """Its licence would be missing from the card."""
    with pytest.raises(UserError, match="--packages=.*: zeta_1_all.deb of the corpus is not there"):
        model_card.by_licence(model_card.Corpus.open(corpus), tmp_path)
    for path in corpus.glob("*.deb"):
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(UserError, match=f"{_NPM.file_name} of the corpus is not there"):
        model_card.by_licence(model_card.Corpus.open(corpus), tmp_path)


def test_card_has_scores_by_language_and_their_mean(corpus, logdir, tmp_path, monkeypatch):
    """Languages by decreasing training data; a language that the second file lacks has empty cells.

    Packages are in the user's cache if the flag does not name another directory.
    """
    (tmp_path / "lingvo_moe").mkdir()
    (tmp_path / "lingvo_moe" / "packages").symlink_to(corpus)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def score(language: str, pairs: int, bleu: float) -> dict:
        counts = {"language": language, "train_pairs": pairs, "test_pairs": 10}
        return counts | {"bleu": bleu, "chrf": 30.0, "copy_bleu": 2.0, "copy_chrf": 8.0}

    files = {"own": [score("fi", 50, 11.0), score("de", 900, 20.0)], "other": [score("de", 0, 7.0)]}
    for name, scores in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"scores": scores}), encoding="utf-8")
    arguments = [
        "--model=m4.Pocket",
        f"--corpus={corpus}",
        f"--logdir={logdir},{logdir}",
        f"--scores={tmp_path}/own.json,{tmp_path}/other.json",
        f"--output={tmp_path}/card.md",
    ]
    assert app.execute(model_card.main, ["model_card", *arguments], model_card.FLAGS) == 0
    card = (tmp_path / "card.md").read_text(encoding="utf-8")
    assert "400 steps" in card  # both log directories
    assert "| 150 | 3.250 | 1.500 |" in card and "| 350 | 3.250 | 1.500 |" in card, "steps are counted through"
    rows = [line for line in card.splitlines() if line.startswith(("| de", "| fi", "| mean"))]
    assert rows == [
        "| de | 900 | 10 | 20.0 | 2.0 | 30.0 | 8.0 | 10 | 7.0 | 2.0 | 30.0 | 8.0 |",
        "| fi | 50 | 10 | 11.0 | 2.0 | 30.0 | 8.0 |  |  |  |  |  |",
        "| mean of the first 2 |  | 20 | 15.5 | 2.0 | 30.0 | 8.0 | 10 | 7.0 | 2.0 | 30.0 | 8.0 |",
    ]


def test_a_directory_without_curves_is_an_error(tmp_path):
    with pytest.raises(UserError, match="--logdir=.* there are no curves of training"):
        model_card.read_curves(tmp_path, 1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model=unet.Small"], "unet.Small does not translate"),
        (["--model=m4.Pocket", "--scores=a,b,c"], "--scores=a,b,c: expected at most 2 files: own packages, unseen"),
        (["--model=m4.Pocket", "--set=input.batch=2"], "no such field"),
    ],
)
def test_mistakes_are_errors(arguments, message, tmp_path, capsys):
    """Before anything is read."""
    given = ["--corpus=x", "--logdir=x", "--scores=x", f"--output={tmp_path}/card.md", *arguments]
    assert app.execute(model_card.main, ["model_card", *given], model_card.FLAGS) == 2
    assert message in capsys.readouterr().err


_SCORE = {"language": "de", "train_pairs": 1, "test_pairs": 1, **dict.fromkeys(model_card._MEASURES, 1.0)}


@pytest.mark.parametrize(
    "scores",
    [
        [{"name": "tube", "dice": 0.5}],
        *([_SCORE | {"train_pairs": value}] for value in ("many", "3", None, True, 1.5, -1, 10**400)),
        *([_SCORE | {"bleu": value}] for value in (float("nan"), float("inf"), "nan", None, [])),
        *([_SCORE | {"language": value}] for value in (None, "", 3, [])),
        [_SCORE, _SCORE],
        [3],
        None,
    ],
)
def test_scores_of_another_kind_are_an_error(scores, tmp_path):
    """Of other models, of wrong types, not finite, or two of a language, of which one would be left out."""
    (tmp_path / "scores.json").write_text(json.dumps({"scores": [_SCORE | {"bleu": 7}]}), encoding="utf-8")
    assert model_card._read_scores(f"{tmp_path}/scores.json") == [_SCORE | {"bleu": 7}]
    (tmp_path / "scores.json").write_text(json.dumps({"scores": scores}), encoding="utf-8")
    with pytest.raises(UserError, match="scores.json: not a file of `eval --json` of a translation model"):
        model_card._read_scores(f"{tmp_path}/scores.json")


def test_a_package_that_cannot_be_read_is_an_error(corpus, tmp_path):
    """Not a package without a licence."""
    (tmp_path / "zeta_1_all.deb").write_bytes(b"cut off")
    with pytest.raises(UserError, match="zeta_1_all.deb cannot be read by dpkg-deb"):
        model_card.by_licence(model_card.Corpus.open(corpus), tmp_path)


def _wheel(path: pathlib.Path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("wheeled/__init__.py", "")


def _npm(path: pathlib.Path, manifest: str | None):
    text = path.parent / "package.json"
    text.write_text(manifest or "", encoding="utf-8")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(text, "package/package.json" if manifest is not None else "package/other.json")


@pytest.mark.parametrize(
    "name, file, write, reason",
    [
        ("wheeled", "wheeled-2-py3-none-any.whl", lambda path: path.write_bytes(b"cut off"), "not a zip file"),
        ("wheeled", "wheeled-2-py3-none-any.whl", _wheel, "it has no METADATA"),
        (_NPM.name, _NPM.file_name, lambda path: path.write_bytes(b"cut off"), ""),
        (_NPM.name, _NPM.file_name, lambda path: _npm(path, None), "package/package.json"),
        (_NPM.name, _NPM.file_name, lambda path: _npm(path, "{"), ""),
        (_NPM.name, _NPM.file_name, lambda path: _npm(path, "[]"), ""),
    ],
)
def test_a_wheel_or_npm_package_that_cannot_be_read_is_an_error(name, file, write, reason, tmp_path):
    write(tmp_path / file)
    with pytest.raises(UserError, match=rf"{file} cannot be read \(.*{reason}.*\); delete it, and build the corpus"):
        model_card._licences_of(name, tmp_path)


def test_only_scalars_are_read_of_curves_and_losses_are_required(tmp_path):
    """A callback may write texts and histograms; held-out curves of another program are an error."""
    for name, tag in (("train", "padding/target"), ("valid", "accuracy")):
        writer = SummaryWriter(tmp_path, name)
        writer.write(7, {tag: 0.5})
        writer.close()
    with tf.summary.create_file_writer(str(tmp_path / "train")).as_default():
        tf.summary.text("note", "words", step=9)
        tf.summary.histogram("weights", [1.0, 2.0], step=9)
    with pytest.raises(UserError, match=f"--logdir={tmp_path}: the held-out curves have no cross_entropy at step 7;"):
        model_card.read_curves(tmp_path, 1)
    for file in (tmp_path / "valid").iterdir():
        file.unlink()
    assert model_card.read_curves(tmp_path, 1).steps == 7
    (tmp_path / "train" / "events.out.tfevents.2").mkdir()
    with pytest.raises(IsADirectoryError):
        model_card.read_curves(tmp_path, 1)
