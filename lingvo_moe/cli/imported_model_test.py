"""A model in Hugging Face's format is imported, inspected, trained and exported; it translates and explains experts."""

from __future__ import annotations

import errno
import json
import pathlib
import re

import numpy as np
import pytest

from lingvo_moe.cli import main
from lingvo_moe.data.corpus import Corpus
from lingvo_moe.data.tokenizer import SIDES
from lingvo_moe.importing import hugging_face
from lingvo_moe.inference.translator import Translator
from lingvo_moe.testing import hugging_face_models
from lingvo_moe.testing.experiments import Data
from lingvo_moe.training import hyperparameters
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.checkpoint_reader import Reader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

_ONE = ("--devices=1", "--platform=cpu", "--set=model.num_groups=1")
_FAST = (*_ONE, "--set=search.max_length=8", "--set=decoding_batch=4", "--beam_size=2")
_EXPORT = ("checkpoint", "convert", "--logdir={log}", "--like={log}/../model")
_LANGUAGES = ("--source_language=deu_Latn", "--target_language=eng_Latn")


def _run(*arguments: str) -> int:
    return main.main(["lingvo_moe", *arguments])


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> pathlib.Path:
    """The log directory of an imported model with experts."""
    directory = tmp_path_factory.mktemp("imported")
    hugging_face_models.write(directory / "model", "nllb_moe")
    hugging_face_models.write(directory / "other", "nllb")
    assert _run("checkpoint", "convert", f"--input={directory / 'model'}", f"--logdir={directory / 'log'}") == 0
    return directory / "log"


@pytest.fixture(scope="module")
def tuned(imported, data: Data) -> pathlib.Path:
    """The log directory of two steps of training with the imported weights."""
    train = ("train", f"--initial_weights={imported}", *_LANGUAGES, *_ONE, "--set=input.batch_size=2", "--steps=2")
    logdir = imported.parent / "tuned"
    train += (f"--corpus={data.corpus}", f"--logdir={logdir}", "--set=training.evaluate_every=0")
    assert _run(*train) == 0
    return logdir


@pytest.fixture
def lines(tmp_path) -> str:
    (tmp_path / "in.txt").write_text("Das Brot ist nass.\n\n1.234,5\n")
    return f"--input={tmp_path / 'in.txt'}"


def test_it_translates_between_any_two_languages(imported, lines, capsys):
    """Also explained: both sides begin with the language, and the decoder with the end of the sentence."""
    explained = imported.parent / "explained.jsonl"
    assert _run("translate", f"--logdir={imported}", *_FAST, *_LANGUAGES, lines, f"--explain={explained}") == 0
    into_english = capsys.readouterr().out.splitlines()
    first, *_ = map(json.loads, explained.read_text().splitlines())
    assert (first["source"][0], first["source"][-1]) == ("deu_Latn", "</s>")
    assert first["translation"][:2] == ["</s>", "eng_Latn"] and len(first["encoder/2"]) == len(first["source"])
    french = ("--source_language=deu_Latn", "--target_language=fra_Latn")
    assert _run("translate", f"--logdir={imported}", *_FAST, *french, lines) == 0
    into_french = capsys.readouterr().out.splitlines()
    assert len(into_english) == len(into_french) == 3 and into_english[1] == "" != into_english[0] != into_french[0]
    assert (into_english[2], into_french[2]) == ("1,234.5", "1.234,5"), "numbers are those of the target language"


def test_a_translator_of_one_pair_of_languages_needs_no_flags(tmp_path, lines, capsys):
    """Its languages are recorded; a line is translated, not copied for being English, if that is not the target."""
    hugging_face_models.write(tmp_path / "model", "marian")
    config = tmp_path / "model" / "tokenizer_config.json"
    config.write_text(json.dumps({"source_lang": "en", "target_lang": "de"}))
    logdir = f"--logdir={tmp_path / 'log'}"
    assert _run("checkpoint", "convert", f"--input={tmp_path / 'model'}", logdir) == 0
    assert "weights of opus.Base, and tokenizers of en and de." in capsys.readouterr().err
    (tmp_path / "english.txt").write_text("The house is old and the garden is green.\n\n1,234.5\n")
    assert _run("translate", logdir, *_FAST, f"--input={tmp_path / 'english.txt'}") == 0
    sentence, empty, number = capsys.readouterr().out.splitlines()
    assert sentence not in ("", "The house is old and the garden is green.") and (empty, number) == ("", "1,234.5")
    assert _run("translate", logdir, *_FAST, "--source_language=fr", lines) == 2
    assert "input.source_language is 'fr', but the tokenizer is of 'en' alone; leave" in capsys.readouterr().err


def test_a_translator_into_several_languages_needs_the_one_to_translate_into(tmp_path, lines, data: Data, capsys):
    """The source begins with it; pairs of a corpus are read from English into those languages that the model has."""
    hugging_face_models.write(tmp_path / "model", "marian")
    vocabulary = tmp_path / "model" / "vocab.json"
    texts = sorted(ids := json.loads(vocabulary.read_text()), key=ids.__getitem__)
    texts[5], texts[7] = ">>fra<<", ">>por<<"
    vocabulary.write_text(json.dumps({text: number for number, text in enumerate(texts)}))
    logdir = f"--logdir={tmp_path / 'log'}"
    assert _run("checkpoint", "convert", f"--input={tmp_path / 'model'}", logdir) == 0
    assert "tokenizers of 2 languages; `translate` takes --target_language." in capsys.readouterr().err
    found = []
    for language in ("fra", "por"):
        assert _run("translate", logdir, *_FAST, f"--target_language={language}", lines) == 0
        found.append(capsys.readouterr().out.splitlines())
    assert found[0][0] != found[1][0] != "" and found[0][1:] == found[1][1:] == ["", "1.234,5"]
    assert _run("translate", logdir, *_FAST, lines) == 2
    assert "input.target_language is empty, but the tokenizers have 2 languages, of which each source begins with " in (
        capsys.readouterr().err
    )
    evaluate = ("eval", logdir, *_FAST, "--target_language=corpus", f"--corpus={data.corpus}", "--max_pairs=3")
    assert _run(*evaluate, "--set=input.batch_size=2") == 0
    printed = capsys.readouterr()
    assert "the model has none of the languages de; their pairs are left out" in printed.err
    assert re.search("(?m)^fr ", printed.out) and not re.search("(?m)^de ", printed.out)


def test_it_is_inspected_and_verified_like_others(imported, capsys):
    """The origin is shown."""
    assert _run("checkpoint", "inspect", f"--logdir={imported}", "--grep=norm/bias") == 0
    out = capsys.readouterr().out
    assert "nllb.MoE54B" in out and "weights only: imported from model" in out
    assert _run("checkpoint", "verify", f"--logdir={imported}") == 0


def test_training_goes_on_with_it(tuned, tmp_path, capsys):
    """Its languages are recorded, so that translation with the tuned weights needs no flags for them."""
    (tmp_path / "in.txt").write_text("Das Brot ist nass.\n")
    capsys.readouterr()
    assert _run("translate", f"--logdir={tuned}", *_FAST, f"--input={tmp_path / 'in.txt'}") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_tuned_weights_go_back_to_hugging_face(imported, tuned, tmp_path):
    """What is exported is imported as the same weights. Without training, these are the original ones."""
    model, reader = imported.parent / "model", Reader(tuned / "checkpoints" / "2")
    export = ("checkpoint", "convert", f"--like={model}")
    assert _run(*export, f"--logdir={tuned}", "--step=2", f"--output={tmp_path / 'tuned'}") == 0
    theta = hugging_face.read(tmp_path / "tuned", "it").theta
    for path, value in theta.items():
        np.testing.assert_array_max_ulp(value, reader.read(f"theta/{path}"), 1 if "wo" in path else 0)
    assert _run(*export, f"--logdir={imported}", "--dtype=bfloat16", f"--output={tmp_path / 'same'}") == 0
    same, original = (hugging_face.read(directory, "it").theta for directory in (tmp_path / "same", model))
    for path, value in original.items():
        np.testing.assert_allclose(same[path], value, rtol=2**-8, atol=0)
    assert not np.allclose(theta["embedding/table"], original["embedding/table"], rtol=0.001)


def test_a_translator_of_t5s_class_is_trained_on_and_exported(tmp_path, lines, data: Data, capsys):
    """Sources begin with the language of their translation, those of a corpus with that of English, too."""
    hugging_face_models.write(tmp_path / "model", "madlad")
    logdir, tuned = tmp_path / "log", tmp_path / "tuned"
    assert _run("checkpoint", "convert", f"--input={tmp_path / 'model'}", f"--logdir={logdir}") == 0
    assert "tokenizers of 5 languages; `translate` takes --target_language." in capsys.readouterr().err
    found = []
    for language in ("de", "fr"):
        assert _run("translate", f"--logdir={logdir}", *_FAST, f"--target_language={language}", lines) == 0
        found.append(capsys.readouterr().out.splitlines())
    assert found[0][0] != found[1][0] != "" and found[0][1:] == found[1][1:] == ["", "1.234,5"]
    for language, labels in (("corpus", {"de", "fr"}), ("fr", {"fr"}), ("en", {"de", "fr"})):
        evaluate = ("eval", f"--logdir={logdir}", *_FAST, f"--target_language={language}", f"--corpus={data.corpus}")
        assert _run(*evaluate, "--max_pairs=2", "--set=input.batch_size=2") == 0
        assert set(re.findall("(?m)^(de|fr) ", capsys.readouterr().out)) == labels
    train = ("train", f"--initial_weights={logdir}", "--target_language=en", *_ONE, "--set=input.batch_size=2")
    train += ("--steps=1", "--set=training.evaluate_every=0", f"--corpus={data.corpus}", f"--logdir={tuned}")
    assert _run(*train) == 0
    assert _run(*_EXPORT[:2], f"--logdir={tuned}", f"--like={tmp_path / 'model'}", f"--output={tmp_path / 'out'}") == 0
    theta, reader = hugging_face.read(tmp_path / "out", "it").theta, Reader(tuned / "checkpoints" / "1")
    for path, value in theta.items():
        expected = reader.read(f"theta/{path}")
        if path in ("embedding/table", "softmax/projection"):  # bos, which is not used, has the values of unknown
            found, expected = (rows if path == "embedding/table" else rows.T for rows in (value, expected))
            assert (found[2] == found[3]).all() and found.shape == (301, 32)
            np.testing.assert_array_max_ulp(np.delete(found, 2, 0), np.delete(expected, 2, 0), 1)
        else:
            np.testing.assert_array_max_ulp(value, expected, 1)


def test_a_switch_transformer_fills_in_gaps_and_explains_its_experts(tmp_path, capsys):
    """Without flags, as it knows no languages; each token has one expert."""
    hugging_face_models.write(tmp_path / "model", "switch")
    logdir, explained = f"--logdir={tmp_path / 'log'}", tmp_path / "explained.jsonl"
    assert _run("checkpoint", "convert", f"--input={tmp_path / 'model'}", logdir) == 0
    assert re.search(r"weights of switch.Base\d+, and tokenizers of an unknown language", capsys.readouterr().err)
    (tmp_path / "gaps.txt").write_text("The <extra_id_0> is cold in the <extra_id_1>.\n")
    assert _run("translate", logdir, *_FAST, f"--input={tmp_path / 'gaps.txt'}", f"--explain={explained}") == 0
    assert capsys.readouterr().out.strip()
    (line,) = map(json.loads, explained.read_text().splitlines())
    assert line["source"][1] == "▁<extra_id_0>" and line["translation"][0] == "<pad>"
    assert all(len(experts) == 1 for experts in line["encoder/2"]) and "encoder/1" not in line


@pytest.mark.parametrize(
    "languages, expected",
    [
        (("corpus", "eng_Latn"), [("deu_Latn", "eng_Latn"), ("fra_Latn", "eng_Latn")]),
        (("eng_Latn", "corpus"), [("eng_Latn", "deu_Latn"), ("eng_Latn", "fra_Latn")]),
    ],
)
def test_scores_are_of_the_languages_of_a_corpus(
    imported, data: Data, tmp_path, languages, expected, capsys, monkeypatch
):
    """Each is read and written as itself, with one program for all of them, in both directions."""
    used = []
    between = Translator.between

    def recorded(translator, source_language, target_language):
        used.append((source_language, target_language))
        return between(translator, source_language, target_language)

    monkeypatch.setattr(Translator, "between", recorded)
    flags = [f"--{side}_language={language}" for side, language in zip(SIDES, languages)]
    evaluate = ("eval", f"--logdir={imported}", *_FAST, *flags, f"--corpus={data.corpus}", "--max_pairs=3")
    assert _run(*evaluate, f"--translations={tmp_path / 'pairs.tsv'}", "--set=input.batch_size=2") == 0
    assert re.search("(?m)^de .*\n(.*\n)*average of 2", capsys.readouterr().out) and sorted(used) == expected
    rows = [row.split("\t") for row in (tmp_path / "pairs.tsv").read_text().splitlines()]
    english = {text for label in ("de", "fr") for _, text in Corpus.open(data.corpus).pairs("test", label)}
    from_english = languages[1] == "corpus"
    assert len(rows) == 6 and all(
        (row[2] in english, row[4] in english) == (from_english, not from_english) for row in rows
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("translate", "--logdir={log}", *_FAST),
            "input.source_language is empty, but the tokenizers have 202 languag",
        ),
        (
            ("translate", "--logdir={log}", *_FAST, "--source_language=german", "--target_language=eng_Latn"),
            "input.source_language is 'german', but the tokenizers have 202 languages: ",
        ),
        (
            ("translate", "--logdir={log}", *_FAST, "--source_language=corpus", "--target_language=eng_Latn"),
            "input.source_language is corpus, the language of each pair of a corpus, but the texts are of no corpus",
        ),
        (
            ("translate", "--logdir={log}", *_FAST, *_LANGUAGES, "--set=search.force_first=false"),
            "search.force_first is false, but by the tokenizers in .*, translations begin with their language. Pass",
        ),
        (
            ("checkpoint", "convert", "--input={log}/../model", "--logdir={log}"),
            "already has checkpoints; name a new directory",
        ),
        (
            ("checkpoint", "convert", "--input={log}/nowhere", "--logdir={log}/new"),
            "--input=.*nowhere: there is no such file or directory; expected FILE.safetensors, or the directory",
        ),
        (
            ("checkpoint", "convert", "--input={log}/../model/model-00001-of-00004.safetensors", "--logdir={log}/new"),
            "its metadata lacks format.*A model in Hugging Face's format is imported by the name of its directory",
        ),
        (("checkpoint", "convert", "--input={log}", "--logdir={log}/new"), "cannot read config.json .No such file"),
        (
            ("checkpoint", "convert", "--input={log}/../model", "--logdir={log}/new", "--dtype=int8"),
            "--dtype is not for --input=.*model: config.json there says what the model is",
        ),
        (
            (*_EXPORT, "--output={log}/new", "--dtype=int8"),
            "--dtype=int8 is not for --like=.*model: pass float32 or bfloat16, which Hugging Face's library quantizes",
        ),
        ((*_EXPORT, "--output={log}/new.safetensors"), "is the name of a file, but with --like=.*, a directory is wri"),
        ((*_EXPORT, "--output={log}"), "--output=.* is not empty; name a new directory"),
        (_EXPORT, "--like=.*model is for export: pass --output=DIRECTORY, the directory to write, and not --input"),
        (
            (*_EXPORT, "--input={log}/../model"),
            "--like=.*model is for export: pass --output=DIRECTORY, the directory to write, and not --input",
        ),
        (
            ("checkpoint", "convert", "--logdir={log}", "--output={log}/new"),
            "ends with .safetensors. With --like, the directory of an imported model, a directory is written",
        ),
        (
            ("checkpoint", "convert", "--logdir={log}", "--output={log}/new", "--like={log}/nowhere"),
            "--like=.*nowhere: cannot read config.json .No such file.*expected the directory of a model in Hugging",
        ),
        (
            ("checkpoint", "convert", "--logdir={log}", "--output={log}/new", "--like={log}/../other"),
            "--logdir=.*: model.num_layers is 8, but that of --like=.*other, as it is imported, is 5; name the direc",
        ),
    ],
)
def test_errors_name_the_remedy(imported, lines, arguments, message, capsys):
    """Nothing is written."""
    given = [argument.format(log=imported) for argument in arguments]
    assert _run(*given, *([lines] if given[0] == "translate" else [])) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (imported / "new").exists()


def test_an_interrupted_import_is_run_again(imported, tmp_path, monkeypatch, capsys):
    """The checkpoint comes last: without it, no command takes the log directory for a complete one."""
    logdir = tmp_path / "log"
    convert = ("checkpoint", "convert", f"--input={imported.parent / 'model'}", f"--logdir={logdir}")
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save_weights", _fail)
        assert _run(*convert) == 2
    assert "no space left" in capsys.readouterr().err and (logdir / "tokenizers").is_dir()
    assert _run("checkpoint", "verify", f"--logdir={logdir}") == 2
    assert "there is no checkpoint in" in capsys.readouterr().err
    assert _run(*convert) == 0 and _run("checkpoint", "verify", f"--logdir={logdir}") == 0
    for file in (hyperparameters.FILE, "tokenizers/shared.model", "tokenizers/tokenizer.json"):
        made = (logdir / file).read_bytes().replace(bytes(logdir), bytes(imported))
        assert made == (imported / file).read_bytes()


def _fail(*_):
    raise OSError(errno.ENOSPC, "No space left on device")
