"""What training starts from: data, checkpoints and initial weights, checked before anything is compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from lingvo_moe import overrides, tree
from lingvo_moe.data.pipeline import EvalInput, State, TrainInput
from lingvo_moe.distributed.process_group import ProcessGroup
from lingvo_moe.engines.base import Training
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.experiment import Experiment
from lingvo_moe.sharding.layout import Spec
from lingvo_moe.training import checkpoint_arrays, disk_errors
from lingvo_moe.training.checkpoint import Checkpoints
from lingvo_moe.training.tokenizer_match import same_tokenizers
from lingvo_moe.utils.hashes import sha256

_logger = logging.getLogger(__name__)
# Directories in the log directory that training writes to, some after hours: checkpoints, curves of training and of the
# held-out evaluation, and skipped steps. Its files, `lock` and `hyperparameters.json`, are in the log directory itself.
_WRITTEN = ("checkpoints", "train", "valid", "replay")


class StartCheckpoints(NamedTuple):
    """The checkpoints that training may start from.

    Attributes:
      own: those of its log directory.
      initial: those of the initial weights; None without such weights.
      trained: the newest step of `own`; None if there is none.
    """

    own: Checkpoints
    initial: Checkpoints | None
    trained: int | None


@dataclasses.dataclass(frozen=True)
class Start:
    """What training starts from; the attributes are the arguments of `loop.train`."""

    name: str
    experiment: Experiment
    logdir: pathlib.Path
    process_group: ProcessGroup
    initial_weights: str | pathlib.Path | None
    initial_values: Mapping[str, np.ndarray]

    def open_data(self) -> tuple[TrainInput, EvalInput]:
        """Opens the training and the validation split; raises UserError if the tokenizers do not fit the model."""
        self.experiment.check_tokenizers()
        config, directories = self.experiment.input, (self.experiment.corpus, self.experiment.tokenizers)
        return TrainInput(*directories, config), EvalInput(*directories, config, split="valid")

    def check_processes(self, train_input: TrainInput):
        """Raises UserError if processes have other settings or data, or if one of them cannot use the log directory."""
        given = {"--initial_weights": str(self.initial_weights), **self._settings()}
        data = {"the hash of --tokenizers": train_input.readers_id, "the hash of --corpus": train_input.stream_id}
        self.process_group.require_same(given | data)  # the data last: their hashes are of settings, too
        self.process_group.broadcast(lambda: _require_writable(self.logdir))
        self.process_group.require_shared(self.logdir)
        # Not earlier: in a log directory that is not shared, one process may resume, without initial values.
        values = {f"the initial {path}": sha256(value.tobytes()) for path, value in self.initial_values.items()}
        self.process_group.require_same(values)

    @contextlib.contextmanager
    def open_checkpoints(self, train_input: TrainInput) -> Iterator[StartCheckpoints]:
        """Opens the checkpoints of the log directory and of the initial weights, and closes them on exit.

        Raises:
          UserError: those that training starts with are of another model, or were trained with other tokenizers or
            data, or with another seed; or the log directory has weights only; or an initial value is of no weight,
            or has another shape.
        """
        specs = self.experiment.steps.state_specs()
        with contextlib.ExitStack() as stack:

            def opened(logdir: str | pathlib.Path, keep: int | None = None) -> Checkpoints:
                return stack.enter_context(contextlib.closing(Checkpoints(logdir, keep, self.process_group)))

            own = opened(self.logdir, self.experiment.training.keep)
            initial = None if self.initial_weights is None else opened(self.initial_weights)
            trained = own.latest()
            if trained is not None:
                trained, seed = own.newest_compatible_state(self.name, specs)
                if trained < self.experiment.training.steps:
                    self._check_resumed(own, trained, seed, train_input)
            else:
                self._check_values(tree.flatten(specs["theta"]))
                if initial is not None:
                    self._check_tokenizers(initial, initial.newest_compatible_step(self.name, specs["theta"]))
            yield StartCheckpoints(own, initial, trained)

    def load_state(self, training: Training, checkpoints: StartCheckpoints) -> tuple[int, State | None]:
        """Loads the newest checkpoint, or creates the initial state, with the initial weights and values.

        Returns:
          (the steps made, the state of the input).
        """
        specs = self.experiment.steps.state_specs()
        if checkpoints.trained is not None:
            restored = checkpoints.own.restore(self.name, specs, training.shardings, training.load)
            _logger.info("resuming from step %d (%s)", restored.step, checkpoints.own.directory)
            return restored.step, restored.data_state
        training.initialise(self.experiment.training.seed)
        if (initial := checkpoints.initial) is not None:
            shardings = None if training.shardings is None else training.shardings["theta"]
            step, _ = initial.restore_theta(self.name, specs["theta"], shardings, load=training.load_weights)
            self._require_finite(training.state["theta"], initial.path(step))
            _logger.info("starting with the weights of step %d (%s)", step, initial.directory)
        for path, value in self.initial_values.items():
            training.set_weight(path, value)
        return 0, None

    def _require_finite(self, theta: dict, checkpoint: pathlib.Path):
        """Raises UserError, in all processes, if one of them holds initial weights that are not finite."""
        remedy = "delete it to use the checkpoint before it, or pass another --initial_weights"
        self.process_group.run_in_all(lambda: checkpoint_arrays.check_finite(theta, str(checkpoint), remedy))

    def _check_values(self, weights: Mapping[str, Spec]):
        """Raises UserError unless each initial value is of a weight of the model, and has its shape."""
        for path, value in self.initial_values.items():
            if path not in weights:
                raise UserError(f"initial values: the model has no weight {path}.{did_you_mean(path, weights)}")
            if value.shape != (shape := weights[path].shape):
                raise UserError(f"initial values: that of {path} has shape {value.shape}; expected {shape}.")

    def _check_tokenizers(self, initial: Checkpoints, step: int):
        """Raises UserError if initial weights were trained with other tokenizers."""
        if not same_tokenizers(self.experiment, initial.tokenizer_hashes(step)):
            raise UserError(
                f"--initial_weights={initial.directory.parent}: trained with other tokenizers than "
                f"--tokenizers={self.experiment.tokenizers}. Pass those, or make a file of the weights "
                f"(`checkpoint convert --output`) and name theirs with --initial_tokenizers."
            )

    def _check_resumed(self, own: Checkpoints, trained: int, seed: int, train_input: TrainInput):
        """Raises UserError if training would go on with other data or random numbers than it began with."""
        if seed != self.experiment.training.seed:
            raise UserError(
                f"training.seed is {self.experiment.training.seed}, but {own.path(trained)} was trained with seed "
                f"{seed}, with which training goes on. Use --set training.seed={seed}, or another --logdir for a new "
                f"training run."
            )
        if (state := own.data_state(trained)) is not None:
            train_input.check(state)

    def _settings(self) -> dict[str, str]:
        """Returns all that processes must agree on; the directories of the data may differ between machines."""
        fields = overrides.fields(self.experiment)
        return {"model": self.name} | {
            path: str(value) for path, value in fields if path not in ("corpus", "tokenizers")
        }


def _require_writable(logdir: pathlib.Path):
    """Makes the directory; raises UserError if training cannot write to it, before a compiler has run for minutes."""
    disk_errors.require_directory(f"--logdir={logdir}", logdir)
    for name in _WRITTEN:
        if os.path.lexists(logdir / name):
            disk_errors.require_directory(f"{logdir / name}", logdir / name)
