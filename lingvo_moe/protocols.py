"""What the steps require of models and optimizers, as structural types: a user's class need not inherit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context


class Model(Protocol):
    """What the steps require of a model."""

    def weights(self) -> dict:
        """Returns the tree of `Weight`s."""
        ...

    def loss(self, theta: dict, batch: dict, context: Context) -> tuple[tf.Tensor, dict]:
        """Returns the loss to minimise and scalar metrics, which include `cross_entropy` and `tokens`."""
        ...


class ExperimentModel(Model, Protocol):
    """What an experiment requires of a model beside `Model`: for its checks against input and mesh, and for reports.

    Attributes of the class will do, such as `pipeline = "none"`; `layers.base.Layer` has `num_weights`.
    """

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides of a batch that the model reads: `("target",)`, or `("source", "target")`."""
        ...

    @property
    def vocabularies(self) -> dict[str, int]:
        """The sizes of the vocabularies, by the side that the model reads or writes in tokens."""
        ...

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        ...

    @property
    def num_experts(self) -> int:
        """The number of experts of a layer that has some; 0 for none."""
        ...

    @property
    def pipeline(self) -> str:
        """The schedule of the pipeline; `none` without one."""
        ...

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline; 1 without one."""
        ...

    @property
    def microbatches(self) -> int:
        """The number of parts that a batch is computed in, one after the other."""
        ...

    def num_weights(self) -> int:
        """Returns the number of all weights."""
        ...

    def positions_of(self, path: str, lengths: dict[str, int]) -> float:
        """Returns how many positions of each row the weight `path` is applied to, in rows of these lengths."""
        ...

    def settings_of_layers(self, field: str) -> list[tuple[str, str, Any]]:
        """Returns (stack, name for messages, value) of each setting `field` of the layers: `num_groups` of experts."""
        ...


@runtime_checkable
class DecodingModel(Model, Protocol):
    """What `decode` requires of a model beside `Model`."""

    def prepare_decoding(self, theta: dict, context: Context) -> dict:
        """Returns the weights in the form that `start_decoding` and `decode_step` take."""
        ...

    def start_decoding(self, theta: dict, source: dict, cache_length: int, context: Context) -> dict:
        """Returns the decoding state before the first token that is searched for.

        Args:
          theta: the weights, as `prepare_decoding` returns them.
          source: ids, segment_ids, positions `[B, S] int32`: a sentence a row; for a language model a prompt, with bos.
          cache_length: T*K.
          context: of the call, without a seed.
        """
        ...

    def decode_step(
        self,
        theta: dict,
        state: dict,
        ids: tf.Tensor,
        paddings: tf.Tensor,
        position: tf.Tensor,
        start: tf.Tensor,
        mask: tf.Tensor,
        context: Context,
    ) -> tuple[tf.Tensor, dict]:
        """Returns (logits `[B, K, V] float32`, decoding state) after one token for each of K hypotheses.

        Args:
          theta: the weights, as `prepare_decoding` returns them.
          state: the decoding state before this token.
          ids: `[B, K] int32`, the last token of each hypothesis; at first bos.
          paddings: `[B, K] bool`, true for hypotheses that can have no effect.
          position: t, scalar int32: how many tokens precede this one.
          start: t * K, scalar int32: hypothesis k writes its keys and values to position start + k of the cache.
          mask: `[B, K, T*K] bool`, the positions of the cache that each hypothesis attends to: its ancestors' and its
            own.
          context: of the call, without a seed.
        """
        ...


@runtime_checkable
class RowSelectingModel(DecodingModel, Protocol):
    """What `decode` requires of a model, beside `DecodingModel`, to leave out sentences whose search has ended."""

    @property
    def independent_sentences(self) -> bool:
        """Whether the logits of a sentence depend on no other sentence of its batch but for rounding."""
        ...

    def select_rows(self, state: dict, rows: tf.Tensor) -> dict:
        """Returns the decoding state of these rows `[B'] int32` of the batch."""
        ...


@runtime_checkable
class TiedModel(Model, Protocol):
    """What initial embeddings require of a model beside `Model`."""

    @property
    def model_dim(self) -> int:
        """M, the size of an embedding."""
        ...

    @property
    def tied_tables(self) -> dict[str, str]:
        """The paths of the tables `[V, M]` of tied embeddings, by side of the corpus; none if they are not tied."""
        ...


@runtime_checkable
class RoutingModel(Model, Protocol):
    """What `explain` requires of a model beside `Model`."""

    def routing(self, theta: dict, batch: dict, context: Context) -> dict[str, dict[str, tf.Tensor]]:
        """Returns `experts` and `weights`, both `[B, T, K]`, by the name of the layer with experts."""
        ...


@runtime_checkable
class RecognisingModel(Model, Protocol):
    """What `transcribe` requires of a model beside `Model`."""

    def transcribe(self, theta: dict, source: dict, context: Context) -> tf.Tensor:
        """Returns the class of each position of each recording, `[B, T] int32`, with CTC's blanks and repetitions."""
        ...


@runtime_checkable
class SegmentingModel(Model, Protocol):
    """What `segment`, and the check of an experiment, require of a model beside `Model`."""

    def segment(self, theta: dict, source: dict, context: Context) -> tf.Tensor:
        """Returns the class of each voxel of each volume, `[B, X, Y, Z] int32`."""
        ...

    def check_size(self, size: tuple[int, ...], devices: tuple[int, ...]):
        """Raises UserError for volumes of X, Y, Z voxels that it cannot segment with `devices` along each side."""
        ...


class Optimizer(Protocol):
    """What the steps require of an optimizer; see `optimizers.adafactor`."""

    @property
    def learning_rate(self) -> Callable[[tf.Tensor], tf.Tensor]:
        """The learning rate as a function of the step, a scalar int32."""
        ...

    def state(self, weights: dict) -> dict:
        """Returns the tree of `Weight`s that declares the optimizer state of a model with these weights."""
        ...

    def update(
        self,
        weights: dict,
        theta: dict,
        gradients: dict,
        optimizer_state: dict,
        step: tf.Tensor,
        is_finite: tf.Tensor,
        context: Context,
    ) -> tuple[dict, dict]:
        """Returns (theta, optimizer_state) after one step, or as they are if loss or gradients are not finite."""
        ...
