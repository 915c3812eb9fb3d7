"""The files of the released model are complete and fit the registered one, and Python translates with them."""

from __future__ import annotations

import pytest

from lingvo_moe import experiment
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.errors import UserError
from lingvo_moe.inference import released
from lingvo_moe.training import hyperparameters, weights_conversion


def test_files_are_small_and_of_the_registered_model():
    """A clone has them: at most 40 MB. The tokenizers' sizes are those of the embeddings."""
    files = [path for path in released.DIRECTORY.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 40e6
    tokenizers = Tokenizers.load(released.tokenizers())
    model = experiment.get(released.MODEL).model
    assert tokenizers.source.vocabulary_size == model.source_vocabulary
    assert tokenizers.target.vocabulary_size == model.target_vocabulary


def test_the_file_names_its_tokenizers():
    """So that `train --initial_weights` refuses others; and its model's values are those of the registered one."""
    file, own = released.DIRECTORY / "weights.safetensors", experiment.get(released.MODEL)
    facts = weights_conversion.facts_of_safetensors(file, str(file))
    assert facts.tokenizer_hashes == list(own.texts.open_readers("", released.tokenizers()).fingerprints)
    recorded = hyperparameters.Recorded(facts.model, facts.hyperparameters or {})
    assert recorded.of_weights and recorded.resolve("it") == (released.MODEL, ())


def test_other_weights_are_refused():
    """Before anything is compiled; the message names the argument and the first weight that differs."""
    with pytest.raises(UserError, match="assignments: the released weights are of m4.Pocket .* weight decoder/"):
        released.translator(["model.model_dim=64"])


def test_a_copy_without_the_files_says_so(monkeypatch, tmp_path):
    """As a package that someone builds without them."""
    monkeypatch.setattr(released, "DIRECTORY", tmp_path)
    with pytest.raises(UserError, match="weights.safetensors: no such file; this copy of the package has no"):
        released.translator()
