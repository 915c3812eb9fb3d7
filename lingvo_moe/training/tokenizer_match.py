"""Checks that weights were trained with the same tokenizers."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_moe.experiment import Experiment


def uses_tokenizers(experiment: Experiment) -> bool:
    """Returns whether a model's weights stand for the pieces of tokenizers; not if it reads recordings or volumes."""
    return bool(experiment.model.vocabularies) and not experiment.recognises


def same_tokenizers(
    experiment: Experiment, tokenizer_hashes: Sequence[str] | None, tokenizers: str | None = None
) -> bool:
    """Returns whether weights fit tokenizers, as far as is known; true for a model of recordings or volumes.

    Args:
      experiment: of the model.
      tokenizer_hashes: of the weights, see `checkpoint_reader.Reader.tokenizer_hashes`.
      tokenizers: their directory; None for the experiment's own.

    Raises:
      UserError: the directory is missing or corrupt.
    """
    if tokenizer_hashes is None or not uses_tokenizers(experiment):
        return True
    return list(tokenizer_hashes) == list(experiment.texts.fingerprints(tokenizers or experiment.tokenizers))
