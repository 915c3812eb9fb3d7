"""Whether weights were trained on texts that the same tokenizers had read."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_moe.experiment import Experiment


def read_tokens(experiment: Experiment) -> bool:
    """Returns whether a model's weights stand for the pieces of tokenizers; not if it reads recordings or volumes."""
    return bool(experiment.model.vocabularies) and not experiment.recognises


def same_readers(experiment: Experiment, readers: Sequence[str] | None, tokenizers: str | None = None) -> bool:
    """Returns whether weights fit tokenizers, as far as is known; true for a model of recordings or volumes.

    Args:
      experiment: of the model.
      readers: of the weights, see `checkpoint_reader.Reader.readers`.
      tokenizers: their directory; None for the experiment's own.

    Raises:
      UserError: the directory is missing or corrupt.
    """
    if readers is None or not read_tokens(experiment):
        return True
    return list(readers) == list(experiment.texts.identities(tokenizers or experiment.tokenizers))
