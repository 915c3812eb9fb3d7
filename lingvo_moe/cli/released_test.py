"""`translate` and `eval` without a model use the released one."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from lingvo_moe.cli import main, released
from lingvo_moe.cli.run_config import TranslateConfig
from lingvo_moe.testing import corpora
from lingvo_moe.training.checkpoint import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

# Frequent strings of many applications, which a model of their catalogs knows by heart.
SENTENCES = {
    "Datei nicht gefunden": "File not found",
    "Fichier introuvable": "File not found",
    "Abrir archivo": "Open File",
    "Filen blev ikke fundet": "File not found",
}


def test_translate_without_a_model_translates(tmp_path, capsys):
    """From four languages, without a flag that names them; most words of the expected English are there."""
    given = tmp_path / "in.txt"
    given.write_text("".join(f"{line}\n" for line in SENTENCES), encoding="utf-8")
    assert main.main(["lingvo_moe", "translate", f"--input={given}"]) == 0
    found = capsys.readouterr().out.splitlines()
    words = [
        (set(line.lower().split()), set(SENTENCES[source].lower().split())) for source, line in zip(SENTENCES, found)
    ]
    assert len(found) == len(SENTENCES) and all(len(line & expected) * 2 > len(expected) for line, expected in words), (
        found
    )


def test_eval_without_a_model_scores_the_released_one(tmp_path, capsys):
    """On a corpus of the user's own, most translations are the references."""
    pairs = list(SENTENCES.items())
    corpus = corpora.write_corpus(tmp_path / "corpus", {"de": {"train": pairs[:1], "test": pairs}})
    assert main.main(["lingvo_moe", "eval", f"--corpus={corpus}", f"--json={tmp_path / 'scores.json'}"]) == 0
    (score,) = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))["scores"]
    assert score["test_pairs"] == len(pairs) and score["chrf"] > 60 > score["copy_chrf"]
    assert "average of 1" in capsys.readouterr().out


def test_the_released_model_runs_on_several_devices():
    """In a process of its own, where JAX has not started; --set is checked on the mesh that is given."""
    command = [sys.executable, "-m", "lingvo_moe", "translate", "--mesh=2x2", "--platform=cpu", "--set=layout=gspmd"]
    found = subprocess.run(command, input="Abrir archivo\n", capture_output=True, text=True, check=False)
    assert found.returncode == 0 and found.stdout.lower() == "open file\n", found.stderr


def test_settings_that_change_the_weights_are_refused(capsys):
    """The error names --set, which the user gave, and no file, which the user did not."""
    assert main.main(["lingvo_moe", "translate", "--set=model.model_dim=64"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: --set: ") and "weight decoder/" in message and "safetensors" not in message


def test_the_released_model_by_name_needs_no_name(capsys):
    """A new user finds it in the list of models, and its log directory nowhere."""
    assert main.main(["lingvo_moe", "translate", "--model=Pocket"]) == 2
    assert "For the weights that come with the package, leave --model out." in capsys.readouterr().err


def test_a_terminated_command_leaves_no_temporary_copy(monkeypatch, tmp_path):
    """SIGTERM, which `kill` and `timeout` send, would leave 100 MB each time; afterwards it is what it was."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), released.by_default(TranslateConfig()) as config:
        assert config.logdir and os.listdir(config.logdir)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert not list(tmp_path.iterdir()) and signal.getsignal(signal.SIGTERM) == before


def test_a_full_disk_for_the_temporary_copy_is_one_line(monkeypatch, capsys, tmp_path):
    """It names the directory of temporary files, not the one inside it that is gone by then."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Checkpoints, "_open_manager", refuse)
    assert main.main(["lingvo_moe", "translate"]) == 2
    message = capsys.readouterr().err
    assert f"error: {tmp_path}: a temporary copy of " in message and "TMPDIR" in message
    assert not list(tmp_path.iterdir())
