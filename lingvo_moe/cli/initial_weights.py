"""Where the weights of a new training come from, if not from random numbers: the flags of `train`."""

from __future__ import annotations

import dataclasses
import logging
import pathlib

import numpy as np

from lingvo_moe import overrides, tree
from lingvo_moe.cli.run_config import TrainConfig
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.data.vocabularies import embedding_transfer, piece_vectors
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.protocols import Model
from lingvo_moe.steps import weight_specs
from lingvo_moe.training.tokenizer_match import same_tokenizers, uses_tokenizers

_logger = logging.getLogger(__name__)


def weights(
    config: TrainConfig, name: str, experiment: Experiment
) -> tuple[pathlib.Path | None, dict[str, np.ndarray]]:
    """Returns the log directory that --initial_weights names, or None and the weights of the file by their path.

    None and no weights without the flag, and where training resumes: what it names may be gone by then. With
    --initial_set, the file is of a shallower model, and stacks are deepened. With --initial_tokenizers, the embeddings
    of the file are those of the experiment's tokenizers.

    Raises:
      UserError: there are no checkpoints, the file is not of this model or not finite, or --initial_set or
        --initial_tokenizers do not fit.
    """
    if config.initial_weights is None:
        for flag in ("initial_tokenizers", "initial_set"):
            if getattr(config, flag):
                raise UserError(f"--{flag} belongs to --initial_weights; pass that flag, too.")
        return None, {}
    from lingvo_moe.training import checkpoint_arrays, weights_conversion  # they import JAX, see `train.train`

    if _resumes(config, "--initial_weights"):
        return None, {}
    given = pathlib.Path(config.initial_weights)
    config.check_initial_weights()
    if given.suffix == weights_conversion.SUFFIX:
        specs = weight_specs(_initial_model(config, name, experiment.model).weights())
        remedy = _remedy_of_other_weights(config, experiment)
        found = weights_conversion.read_safetensors(given, name, specs, f"--initial_weights={given}", remedy)
        checkpoint_arrays.check_finite(found.theta, f"--initial_weights={given}", "use another file")
        _check_tokenizers(config, found.tokenizer_hashes, experiment)
        values = found.theta
        _logger.info("starting with the weights of step %d (%s)", found.step, given)
        if config.initial_set:
            values = _deepened(values, name, experiment)
        return None, _with_new_tokenizers(values, config.initial_tokenizers, name, experiment)
    for flag in ("initial_tokenizers", "initial_set"):
        if getattr(config, flag):
            raise UserError(
                f"--{flag} needs a file; make one: `python -m lingvo_moe checkpoint convert --logdir={given} "
                f"--output=weights{weights_conversion.SUFFIX}`, and pass it with --initial_weights."
            )
    if not (given / "checkpoints").is_dir():
        raise UserError(
            f"--initial_weights={given}: there are no checkpoints; expected a log directory, or a file whose name ends "
            f"with {weights_conversion.SUFFIX}."
        )
    return given, {}


def _remedy_of_other_weights(config: TrainConfig, experiment: Experiment) -> str:
    """Returns what may help, besides another model or file, where a file has other weights than the model."""
    vocabularies = [f"model.{side}_vocabulary" for side in experiment.model.vocabularies]
    fields = {assignment.partition("=")[0].strip() for assignment in config.assignments}
    if config.initial_tokenizers and any(
        path == field or path.endswith(f".{field}") for path in vocabularies for field in fields
    ):
        return (
            f"With --initial_tokenizers, the vocabularies keep the sizes of the initial model, so leave "
            f"{' and '.join(f'--set {path}' for path in vocabularies)} out."
        )
    if isinstance(experiment.model, Transformer) and not config.initial_set:
        return "If a shallower model has them, name its settings with --initial_set."
    return ""


def _check_tokenizers(config: TrainConfig, tokenizer_hashes: list[str] | None, experiment: Experiment):
    """Raises UserError if a file says that its weights were trained with other tokenizers than those of the flags.

    A file that says nothing is a warning.
    """
    if tokenizer_hashes is None and uses_tokenizers(experiment):
        given = (
            f"--initial_tokenizers={config.initial_tokenizers}"
            if config.initial_tokenizers
            else f"--tokenizers={experiment.tokenizers}"
        )
        _logger.warning(
            "--initial_weights=%s does not say which tokenizers its weights were trained with; that it was %s is not "
            "checked.",
            config.initial_weights,
            given,
        )
    if same_tokenizers(experiment, tokenizer_hashes, config.initial_tokenizers):
        return
    if config.initial_tokenizers:
        raise UserError(
            f"--initial_tokenizers={config.initial_tokenizers}: not the tokenizers that {config.initial_weights} was "
            f"trained with; pass those."
        )
    raise UserError(
        f"--initial_weights={config.initial_weights}: trained with other tokenizers than "
        f"--tokenizers={experiment.tokenizers}. Pass those, or name theirs with --initial_tokenizers."
    )


def _deepened(values: dict[str, np.ndarray], name: str, experiment: Experiment) -> dict[str, np.ndarray]:
    """Returns weights for the layers of the experiment's model, from those of a model with fewer; see `deepening`."""
    from lingvo_moe.training.deepening import deepen

    shapes = {path: spec.shape for path, spec in tree.flatten(weight_specs(experiment.model.weights())).items()}
    try:
        deeper = deepen(values, shapes)
    except UserError as error:
        raise UserError(f"--initial_set: {error}") from None
    for path in sorted(shapes.keys() | deeper.keys()):
        there, here = deeper[path].shape if path in deeper else "absent", shapes.get(path, "absent")
        if there != here:
            raise UserError(
                f"--initial_set: only the number of layers may differ, but the weight {path} of {name} is {here}, and "
                f"{there} with these settings."
            )
    return deeper


def _initial_model(config: TrainConfig, name: str, model: Model) -> Model:
    """Returns the model of --initial_weights: with --initial_set, a shallower one than the experiment's.

    Raises:
      UserError: the model has no stacks of layers, or has no such field or value.
    """
    if not config.initial_set:
        return model
    if not isinstance(model, Transformer):
        raise UserError(f"--initial_set: {name} has no stacks of layers, so leave it out.")
    if model.post_norm:
        raise UserError(
            f"--initial_set: copies of layers of {name} would change it much (model.post_norm); leave it out."
        )
    # Weights do not depend on the stages that they are divided among.
    whole = dataclasses.replace(model, pipeline="none", stages=1, microbatches=1)
    try:
        return overrides.apply(whole, [text.removeprefix("model.") for text in config.initial_set])
    except UserError as error:
        raise UserError(f"--initial_set: {str(error).removeprefix('--set ')}") from None


def _with_new_tokenizers(
    values: dict[str, np.ndarray], old: str | None, name: str, experiment: Experiment
) -> dict[str, np.ndarray]:
    """Returns weights with the embeddings of the experiment's tokenizers, from those of the tokenizers `old`."""
    if old is None:
        return values
    if experiment.tied_model is None:
        raise UserError(
            f"--initial_tokenizers={old}: {name} has no tied embeddings (model.tied_embeddings), the only ones "
            "that can go to other tokenizers. Leave the flag out, and use the tokenizers of the initial weights."
        )
    if not getattr(experiment.model, "tied_softmax", True):
        raise UserError(
            f"--initial_tokenizers={old}: {name} has a softmax of its own (model.tied_softmax), whose pieces cannot go "
            "to other tokenizers. Leave the flag out, and use the tokenizers of the initial weights."
        )
    if getattr(experiment.model, "logits_bias", False):
        raise UserError(
            f"--initial_tokenizers={old}: {name} has a bias for each piece (model.logits_bias), which cannot go to "
            "other tokenizers. Leave the flag out, and use the tokenizers of the initial weights."
        )
    before, after = Tokenizers.load(old), experiment.open_tokenizers()
    moved = dict(values)
    for side, path in experiment.tied_model.tied_tables.items():
        used = before.by_side[side]
        if used.vocabulary_size > len(values[path]):
            raise UserError(
                f"--initial_tokenizers={old}: the {side} tokenizer has {used.vocabulary_size} pieces, the initial "
                f"weights only {len(values[path])}; pass the tokenizers that they were trained with."
            )
        moved[path] = embedding_transfer.transfer(values[path], used, after.by_side[side])
    return moved


def embeddings(config: TrainConfig, name: str, experiment: Experiment) -> dict[str, np.ndarray]:
    """Returns the embeddings of --initial_embeddings by their path; nothing without the flag or where training resumes.

    Raises:
      UserError: another flag gives all weights, the model has no tied embeddings, or the tokenizer is larger than the
        model's vocabulary, or the file is not of this tokenizer and size.
    """
    file = config.initial_embeddings
    if file is None or _resumes(config, "--initial_embeddings"):
        return {}
    if config.initial_weights is not None:
        raise UserError("--initial_weights has embeddings too; leave --initial_embeddings out.")
    tied = experiment.tied_model
    if tied is None:
        raise UserError(
            f"--initial_embeddings={file}: {name} has no tied embeddings (model.tied_embeddings), which are as long as "
            f"the vectors of the softmax."
        )
    paths, tokenizers = tied.tied_tables, experiment.open_tokenizers()
    vectors = piece_vectors.read(file, tokenizers, "--initial_embeddings")._asdict()
    return {path: _fit(vectors[side], experiment, path, file) for side, path in paths.items()}


def _fit(vectors: np.ndarray, experiment: Experiment, path: str, file: str) -> np.ndarray:
    """Returns the vectors and random rows after them, as the weight has; raises UserError where dimensions differ."""
    rows, dim = tree.flatten(weight_specs(experiment.model.weights()))[path].shape
    if vectors.shape[1] != dim:
        raise UserError(
            f"--initial_embeddings={file} has vectors of {vectors.shape[1]}, the model's model_dim is {dim}. Make it "
            f"again: `python -m tools.train_embeddings --model_dim={dim}`."
        )
    return piece_vectors.extend(vectors, rows)


def _resumes(config: TrainConfig, flag: str) -> bool:
    """Whether the log directory has checkpoints, where `flag` has no effect; what it names may be gone by then."""
    from lingvo_moe.training.checkpoint import Checkpoints  # imports JAX, see `train.train`

    if not Checkpoints(config.log_directory()).steps():
        return False
    _logger.info("%s has no effect: --logdir=%s has checkpoints", flag, config.logdir)
    return True
