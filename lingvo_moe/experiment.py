"""An experiment: everything that a name of the registry stands for, as one tree of plain values.

A registered class is a `Recipe`: a few class attributes, and `experiment()`, which spells them out. `show` prints the result,
`--set` changes it, and the programs are made from it; nothing else knows how a model is configured.
"""

from __future__ import annotations

import dataclasses

from lingvo_moe import overrides, registry
from lingvo_moe.data.batching import InputConfig, input_specs
from lingvo_moe.data.tokenizer import Tokenizers
from lingvo_moe.decoding.flat_beam_search import BeamSearch
from lingvo_moe.errors import UserError, did_you_mean
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.sharding.layout import DeviceMesh, Layout
from lingvo_moe.steps import Steps

PLATFORMS = ("", "cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSchedule:
    """How long to train and how often to do what; all in steps.

    Attributes:
      steps: how many in all.
      seed: of weights and of everything random in a step.
      log_every: scalars are written to TensorBoard.
      evaluate_every: the held-out loss is measured; 0 for never.
      evaluation_batches: on how many batches, at most.
      checkpoint_every: a checkpoint is saved (and at the end).
      keep: how many checkpoints stay.
      steps_per_loop: made by one call of the engine; on a TPU, without leaving the device. The others are multiples of it.
      max_skipped: training stops when so many steps in a row were skipped, see `steps`.
      grace_seconds: from SIGTERM to the end of the process, at most; the step in progress and a checkpoint must fit in.
    """

    steps: int = 1_000_000
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 500
    evaluation_batches: int = 16
    checkpoint_every: int = 500
    keep: int = 3
    steps_per_loop: int = 1
    max_skipped: int = 10
    grace_seconds: float = 25.0

    def __post_init__(self):
        for name, least in (
            ("steps", 1),
            ("log_every", 1),
            ("evaluate_every", 0),
            ("evaluation_batches", 1),
            ("checkpoint_every", 1),
            ("keep", 1),
            ("steps_per_loop", 1),
            ("max_skipped", 1),
            ("grace_seconds", 0),
        ):
            if getattr(self, name) < least:
                raise UserError(f"training.{name} is {getattr(self, name)}; it must be at least {least}.")
        for name in ("log_every", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) % self.steps_per_loop:
                raise UserError(
                    f"training.{name} is {getattr(self, name)}; it must be a multiple of training.steps_per_loop, "
                    f"{self.steps_per_loop}: a loop of steps is not interrupted."
                )

    def steps_at(self, step: int) -> int:
        """How many steps the engine makes next, after `step`: to the end of a loop, or of training."""
        return min(self.steps_per_loop - step % self.steps_per_loop, self.steps - step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A model with all that training and decoding it takes.

    Attributes:
      model, optimizer, input, training, search: the parts.
      mesh: the devices it is made for; `--devices` and `--mesh` replace it.
      layout: the sharding of tensors over it: a registered layout, or `auto` for the one of the papers.
      platform: what its programs are made to be fast on, `cpu`, `gpu` or `tpu`; empty for what they are run on.
      decoding_batch: sentences translated at a time.
      corpus, tokenizers: directories of `tools.build_corpus` and `tools.train_tokenizer`; `--corpus`, `--tokenizers`.
    """

    model: Transformer
    optimizer: Adafactor = Adafactor()
    input: InputConfig = InputConfig()
    training: TrainingSchedule = TrainingSchedule()
    search: BeamSearch = BeamSearch()
    mesh: DeviceMesh = DeviceMesh()
    layout: str = "auto"
    platform: str = ""
    decoding_batch: int = 64
    corpus: str = "build/corpus"
    tokenizers: str = "build/tokenizers"

    @property
    def steps(self) -> Steps:
        """The step functions on this experiment's mesh."""
        return Steps(self.model, self.optimizer, Layout.of(self.mesh, self.layout), self.platform)

    @property
    def translates(self) -> bool:
        """Whether there is a source to translate from; a language model has none."""
        return "source" in self.model.sides

    def check(self):
        """Raises UserError where sizes do not fit the mesh; called once flags have had their say."""
        Layout.of(self.mesh, self.layout)
        if self.platform not in PLATFORMS:
            raise UserError(
                f"platform is {self.platform!r}; use one of {', '.join(filter(None, PLATFORMS))}, or leave it empty."
                f"{did_you_mean(self.platform, PLATFORMS)}"
            )
        self._check_sides()
        along_x = self.mesh.shape[0]
        sizes = {"input.batch_size": self.input.batch_size}
        if self.translates:
            sizes["decoding_batch"] = self.decoding_batch
        if self.model.num_experts:
            sizes["model.num_experts"] = self.model.num_experts
            sizes["model.num_groups"] = self.model.num_groups
        for name, size in sizes.items():
            if size % along_x:
                raise UserError(
                    f"{name} is {size}, which {along_x} devices (mesh {self.mesh}) do not divide. Use --devices "
                    f"with a divisor of {size}, or --set {name}=N with a multiple of {along_x}."
                )
        for side, length in self.input.lengths.items():
            tokens = self.input.batch_size * length
            if self.model.num_experts and tokens % self.model.num_groups:
                raise UserError(
                    f"a batch has {self.input.batch_size} x {length} = {tokens} {side} tokens, which "
                    f"model.num_groups={self.model.num_groups} does not divide; change one of them."
                )

    def _check_sides(self):
        """Raises UserError where the input has another number of sides than the model."""
        if self.model.sides == tuple(self.input.lengths):
            return
        if self.translates:
            raise UserError(
                "input.source_length is 0, but a translation model reads sources; set it to the tokens of a row."
            )
        raise UserError(
            f"input.source_length is {self.input.source_length}, but a language model reads targets alone; set it to 0."
        )

    def open_tokenizers(self) -> Tokenizers:
        """Reads the tokenizers; raises UserError where one makes ids that the model has no embedding for."""
        tokenizers = Tokenizers.load(self.tokenizers)
        for side in self.model.sides:
            pieces, size = getattr(tokenizers, side).vocabulary_size, getattr(self.model, f"{side}_vocabulary")
            if pieces > size:
                raise UserError(
                    f"the {side} tokenizer in {self.tokenizers} has {pieces} pieces, the model's {side}_vocabulary "
                    f"is {size}. Pass --set model.{side}_vocabulary={pieces}, or train a smaller tokenizer."
                )
        return tokenizers

    def batch_specs(self) -> dict:
        """The tree of `Spec`s of a training batch."""
        return input_specs(self.input)


class Recipe:
    """Base of registered classes."""

    def experiment(self) -> Experiment:
        """Returns the experiment this class stands for."""
        raise NotImplementedError


def get(name: str, assignments: tuple[str, ...] | list[str] = (), mesh: DeviceMesh | None = None) -> Experiment:
    """Returns the experiment of a registered name, changed by `--set` assignments and given another mesh.

    Raises:
      UserError: an unknown name or field, or values that do not fit each other.
    """
    experiment = overrides.apply(registry.get(name)().experiment(), assignments)
    if mesh is not None:
        experiment = dataclasses.replace(experiment, mesh=mesh)
    experiment.check()
    return experiment


def text(name: str, experiment: Experiment) -> str:
    """Every hyperparameter, one `path = value` a line, after the name and the number of weights."""
    lines = [f"{name}: {experiment.model.num_weights():,} weights"]
    for path, value in overrides.fields(experiment):
        shown = str(value) if isinstance(value, DeviceMesh) else repr(value)
        lines.append(f"{path} = {shown}")
    return "\n".join(lines) + "\n"
