"""The parts of a Transformer's training step, from its hyperparameters alone: products, other work, saved tensors.

It repeats what `layers` compute, in the notation of the papers, for `cost_model`. A test traces the layers and compares
the logical axes of their tensors with the ones of these parts, and another one compares the FLOPs with `flops`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from lingvo_moe.analysis.sharded_product import Product, Tensor
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.layers.feed_forward import DenseFeedForward
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.models.language_model import LanguageModel
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.models.translation import Translation
from lingvo_moe.ops.precision import HIGHEST

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# The gate has the logical axes "me", so it is never sharded; in a product they are those of the other operand.
GATE = "ME"


@dataclasses.dataclass(frozen=True)
class Step:
    """A product of the forward pass, or a resharding where there is none.

    Attributes:
      product: None for a resharding.
      saved: the checkpoint name of the result (see `layers.checkpoint_policy`); "end" for a result that the backward
        pass does not need; empty for one without a name.
      is_exact: whether float32 operands are multiplied without rounding, whatever `matmul_precision` is.
      resharded, before, item_bytes: the tensor, its logical axes before the resharding, and bytes of an element.
    """

    product: Product | None
    saved: str = ""
    is_exact: bool = False
    resharded: Tensor | None = None
    before: str = ""
    item_bytes: int = 2


@dataclasses.dataclass(frozen=True)
class Work:
    """What is not a product: tensors that are read and written element by element.

    Attributes:
      axes: of the tensor.
      kind: which constant of `cost_model` has the bytes for an element.
      has_dropout: whether random numbers are made for it.
    """

    axes: str
    kind: str
    has_dropout: bool = False


@dataclasses.dataclass(frozen=True)
class Saved:
    """A tensor that a repeat saves for its backward pass under policies that save its checkpoint name."""

    axes: str
    name: str
    item_bytes: int
    copies: int = 1


@dataclasses.dataclass(frozen=True)
class Part:
    """A sublayer, an embedding or a softmax.

    Attributes:
      name: one of `plan.PARTS`.
      stack: the stack that repeats it; empty for an embedding or a softmax, which is computed once.
      count: how often it is in one repeat of the stack.
      sizes: of logical axes, as `(axis, size)`.
      steps, work, saved: see the classes.
    """

    name: str
    stack: str
    count: int
    sizes: tuple[tuple[str, int], ...]
    steps: tuple[Step, ...]
    work: tuple[Work, ...]
    saved: tuple[Saved, ...] = ()

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """The logical axes of all tensors, each once."""
        found: dict[str, None] = {}
        for step in self.steps:
            tensors = step.product.tensors if step.product else (step.resharded,)
            found |= dict.fromkeys(tensor.axes for tensor in tensors if tensor)
            found |= {step.before: None} if step.before else {}
        found |= dict.fromkeys(work.axes for work in self.work)
        return tuple(found | dict.fromkeys(saved.axes for saved in self.saved))


def model_of(experiment: Experiment) -> Transformer:
    """Returns the model; raises UserError for one whose parts are not known here."""
    model = experiment.model
    if not isinstance(model, (LanguageModel, Translation)):
        dimensions = "remat,mesh" if "remat" in {field.name for field in dataclasses.fields(model)} else "mesh"
        raise UserError(
            f"--search=layout predicts Transformers of texts, not a {type(model).__name__}; use --search={dimensions}."
        )
    if model.unroll:
        raise UserError("--search=layout predicts scanned layers; use --set model.unroll=false.")
    if model.num_candidates:
        raise UserError("--search=layout predicts the whole softmax; use --set model.sampled_softmax=0.")
    for stack in model.layer_patterns:
        for choice, layer in zip(model.layer_patterns[stack], model.feed_forwards(stack)):
            if type(layer) not in (DenseFeedForward, MixtureOfExperts):
                raise UserError(
                    f"--search=layout predicts the layers dense and moe, and cannot predict {choice!r} of "
                    f"model.layer_pattern; use --search=remat,mesh, which compile every candidate."
                )
    return model


def parts_of(experiment: Experiment, batch_size: int, microbatches: int) -> tuple[Part, ...]:
    """Returns the parts of a training step whose stacks take `batch_size / microbatches` rows at a time."""
    return tuple(_Parts(experiment, batch_size, microbatches).all())


class _Parts:
    """The parts of one experiment."""

    def __init__(self, experiment: Experiment, batch_size: int, microbatches: int):
        self._model = model_of(experiment)
        self._lengths, self._batch, self._microbatches = experiment.input.lengths, batch_size, microbatches
        self._bytes = ITEM_BYTES[self._model.activation_dtype]
        # The matrix units of a TPU round float32 operands, and so do GPUs (to 4 bytes).
        rounded = experiment.matmul_precision != HIGHEST and experiment.platform != "gpu"
        self._operand_bytes = 2 if rounded else self._bytes

    def all(self) -> Iterator[Part]:
        """Yields every part."""
        for stack in self._model.layer_patterns:
            yield from self._stack(stack)
        for side, size in self._model.vocabularies.items():
            yield self._embedding(self._lengths[side], size)
        yield self._softmax(self._lengths["target"], self._model.vocabularies["target"])

    def _stack(self, stack: str) -> Iterator[Part]:
        length = self._lengths["source" if stack == "encoder" else "target"]
        pattern = self._model.feed_forwards(stack)
        yield self._attention("self_attention", stack, len(pattern), length, length)
        if len(self._model.layer_patterns) == 2 and stack == "decoder":
            yield self._attention("cross_attention", stack, len(pattern), length, self._lengths["source"])
        for index, layer in enumerate(pattern):
            is_last = index == len(pattern) - 1
            if isinstance(layer, MixtureOfExperts):
                yield from self._experts(stack, length, layer, is_last)
            elif isinstance(layer, DenseFeedForward):
                yield self._dense(stack, length, layer, is_last)

    def _attention(self, name: str, stack: str, count: int, length: int, keys: int) -> Part:
        inputs, attended = Tensor("inputs", "BTM"), Tensor("attended", "BTND")
        memory = inputs if name == "self_attention" else Tensor("memory", "BLM")
        key_axes = memory.axes.replace("M", "ND")
        query_key_value = [
            (inputs, Tensor("query", "MND", 1, True), Tensor("queries", "BTND")),
            (memory, Tensor("key value", "MND", 2, True), Tensor("keys values", key_axes, 2)),
        ]
        if memory is inputs:
            # The gradients of the inputs are added before they are reduced.
            query_key_value = [(inputs, Tensor("query key value", "MND", 3, True), Tensor("projected", "BTND", 3))]
        steps = (
            *(self._step(*tensors, "hidden") for tensors in query_key_value),
            self._step(Tensor("queries", "BTND"), Tensor("keys", "BLND"), Tensor("logits", "BNTL")),
            self._step(Tensor("probabilities", "BNTL"), Tensor("values", "BLND"), attended, "hidden"),
            self._step(attended, Tensor("output", "NDM", 1, True), Tensor("outputs", "BTM"), "output"),
        )
        saved = (
            Saved("BTM", "input", self._bytes),
            Saved("BTM", "output", self._bytes),
            Saved("BTND", "hidden", self._bytes, 2),
            Saved("BLND", "hidden", self._bytes, 2),
            Saved("BNTL", "", self._bytes, 3),
        )
        sizes = self._sizes(length, keys)
        work = (Work("BNTL", "attention", self._model.attention_dropout > 0), self._residual("BTM"))
        return Part(name, stack, count, sizes, steps, work, saved)

    def _dense(self, stack: str, length: int, layer: DenseFeedForward, is_last: bool) -> Part:
        hidden, matrices = Tensor("hidden", "BTH"), 1 + layer.gated
        projected = Tensor("projected", "BTH", matrices)
        steps = (
            self._step(Tensor("inputs", "BTM"), Tensor("wi", "MH", matrices, True), projected, "hidden"),
            self._step(hidden, Tensor("wo", "HM", 1, True), Tensor("outputs", "BTM"), "end" if is_last else "output"),
        )
        saved = Saved("BTM", "output", self._bytes), Saved("BTH", "hidden", self._bytes, matrices)
        work = self._residual("BTM"), Work("BTH", "activation")
        return Part("feed_forward", stack, 1, self._sizes(length, length), steps, work, saved)

    def _experts(self, stack: str, length: int, layer: MixtureOfExperts, is_last: bool) -> Iterator[Part]:
        sizes = self._routed_sizes(length, layer)
        tokens, rows = Tensor("tokens", "GSM"), Tensor("rows", "EGCM")
        hidden, outputs = Tensor("hidden", "EGCH"), Tensor("outputs", "EGCM")
        # Products of the router are exact (`ops.projection.project_in_float32`).
        gate = Product(tokens, Tensor("gate", GATE, 1, True), Tensor("logits", "GSE"), 4, 4)
        work = Work("GSE", "gating"), self._residual("GSM")
        yield Part(
            "gating", stack, 1, sizes, (Step(gate, "hidden", is_exact=True),), work, (Saved("GSE", "hidden", 4),)
        )
        dispatch = (
            self._step(Tensor("dispatch", "GSEC"), tokens, Tensor("buffers", "GECM")),
            self._reshard(rows, "GECM"),
        )
        saved = (Saved("EGCM", "output", self._bytes),)
        yield Part("dispatch", stack, 1, sizes, dispatch, (Work("GSEC", "one_hot"),), saved)
        products = (
            self._step(rows, Tensor("wi", "EMH", 1, True), hidden, "hidden"),
            self._step(hidden, Tensor("wo", "EHM", 1, True), outputs, "output"),
        )
        saved = (Saved("EGCH", "hidden", self._bytes),)
        yield Part("experts", stack, 1, sizes, products, (Work("EGCH", "activation"),), saved)
        combine = (
            self._reshard(Tensor("returned", "GECM"), "EGCM"),
            self._step(Tensor("combine", "GSEC"), Tensor("returned", "GECM"), tokens, "end" if is_last else ""),
        )
        saved = Saved("GECM", "output", self._bytes), Saved("GSEC", "", self._bytes, 2)
        yield Part("combine", stack, 1, sizes, combine, (Work("GSEC", "one_hot"),), saved)

    def _embedding(self, length: int, vocabulary: int) -> Part:
        lookup = Product(
            Tensor("ids", "BTV"), Tensor("table", "VM", 1, True), Tensor("vectors", "BTM"), 4, 4, is_lookup=True
        )
        sizes = self._outside(length, vocabulary)
        return Part("embedding", "", 1, sizes, (Step(lookup),), (Work("BTM", "residual"),))

    def _softmax(self, length: int, vocabulary: int) -> Part:
        step = self._step(Tensor("inputs", "BTM"), Tensor("projection", "MV", 1, True), Tensor("logits", "BTV"))
        sizes = self._outside(length, vocabulary)
        return Part("softmax", "", 1, sizes, (step,), (Work("BTV", "softmax"),))

    def _residual(self, axes: str) -> Work:
        return Work(axes, "residual", self._model.residual_dropout > 0)

    def _step(self, left: Tensor, right: Tensor, out: Tensor, saved: str = "") -> Step:
        return Step(Product(left, right, out, self._operand_bytes, self._bytes), saved)

    def _reshard(self, tensor: Tensor, before: str) -> Step:
        return Step(None, "output", resharded=tensor, before=before, item_bytes=self._operand_bytes)

    def _sizes(self, length: int, keys: int) -> tuple[tuple[str, int], ...]:
        """The sizes of logical axes inside of a stack."""
        model = self._model
        sizes = {"B": self._batch // self._microbatches, "T": length, "L": keys, "N": model.num_heads}
        sizes |= {"M": model.model_dim, "H": model.hidden_dim, "D": model.head_dim}
        return tuple(sizes.items())

    def _routed_sizes(self, length: int, layer: MixtureOfExperts) -> tuple[tuple[str, int], ...]:
        """The same, with those of groups and experts."""
        groups = max(1, self._model.num_groups // self._microbatches)
        size = self._batch // self._microbatches * length // groups
        capacity = layer.make_router().capacity(size, layer.num_experts, layer.capacity_factor)
        return *self._sizes(length, length), ("G", groups), ("S", size), ("E", layer.num_experts), ("C", capacity)

    def _outside(self, length: int, vocabulary: int) -> tuple[tuple[str, int], ...]:
        """The sizes of logical axes outside of the stacks."""
        return ("B", self._batch), ("T", length), ("M", self._model.model_dim), ("V", vocabulary)
