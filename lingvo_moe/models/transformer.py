"""What the encoder-decoder and the decoder-only Transformer share: dimensions, stacks of layers, and the loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from lingvo_moe import ranges, tree
from lingvo_moe.errors import UserError
from lingvo_moe.layers import mixture_of_experts  # noqa: F401  (registers the layer `moe`)
from lingvo_moe.layers.attention import MultiHeadAttention
from lingvo_moe.layers.base import Context, Layer
from lingvo_moe.layers.embedding import TENSOR2TENSOR, Embedding, Softmax, cross_entropy
from lingvo_moe.layers.feed_forward import FeedForward, make_feed_forward
from lingvo_moe.layers.normalization import LAYER, LayerNorm
from lingvo_moe.layers.routers.base import make_router
from lingvo_moe.layers.sampled_softmax import sampled_cross_entropy
from lingvo_moe.layers.summaries import magnitude
from lingvo_moe.layers.transformer import TransformerLayer, TransformerStack
from lingvo_moe.lazy import tf
from lingvo_moe.models import transformer_checks
from lingvo_moe.ops.dispatch import AUTO, check_dispatch
from lingvo_moe.ops.projection import is_transposed, prepare_weight
from lingvo_moe.ops.routing import AUX_LOSS, Routing
from lingvo_moe.ranges import ABOVE_0, COUNT, COUNT_OR_0, SHARE_BELOW_1, Range

_TIED = "embedding"  # the name of the table that tied embeddings share
_SHORT_ROWS_DIVISOR = 4
_RANGES = {
    **dict.fromkeys(("num_layers", "model_dim", "hidden_dim", "num_heads", "head_dim", "num_groups"), COUNT),
    **dict.fromkeys(("num_experts", "inference_min_capacity", "inference_num_groups", "sampled_softmax"), COUNT_OR_0),
    **dict.fromkeys(("input_dropout", "residual_dropout", "attention_dropout", "label_smoothing"), SHARE_BELOW_1),
    "capacity_factor": ABOVE_0,
    **dict.fromkeys(("aux_loss_weight", "inference_capacity_factor"), Range()),
    "norm_epsilon": ABOVE_0,
    "position_offset": Range(maximum=2**20, whole=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer(Layer):
    """The fields of both kinds of models.

    Attributes:
      num_layers: L, of all stacks together.
      model_dim, hidden_dim: M, and H of the dense feed-forward layers and of each expert.
      num_heads, head_dim: of attention.
      num_experts: E of each feed-forward layer with experts; 0 where no layer of a pattern has them.
      num_groups: G, of each side's tokens; a multiple of the devices along the batch (GShard: twice their number).
      layer_pattern: the registered feed-forward layers (see `layers.feed_forward`) of consecutive Transformer layers,
        repeated to the end of a stack: `dense,moe` has experts in every other layer. Empty: `dense,moe`, or `dense`
        without experts.
      router: of layers with experts, a registered one, see `layers.routers`; `top2` is the papers'.
      capacity_factor, dispatch, inference_capacity_factor, inference_min_capacity, inference_num_groups: see
        `MixtureOfExperts`.
      aux_loss_weight: k in loss = cross-entropy + k * l_aux (GShard section 2.2); l_aux is the mean over the stacks of
        the mean over a stack's layers.
      input_dropout, residual_dropout, attention_dropout: rates (GShard appendix A.2).
      twin_keys: whether cross-attention starts with equal projections of queries and keys, see `MultiHeadAttention`;
        for models that have it.
      biases: whether the projections of attention, of feed-forward layers and of experts have biases; GShard's and
        GSPMD's have none.
      norm: `layer` normalisation, or `rms`, RMSNorm (Zhang and Sennrich 2019), with neither mean nor bias, as in T5.
      norm_epsilon: added to the variance in layer normalisation, to the mean square in RMSNorm.
      post_norm: whether the sum after each sublayer is normalised, as in Vaswani et al. 2017, instead of the inputs of
        each sublayer and the outputs of the stack.
      position_offset: added to positions before their encoding; fairseq's models count from 2.
      wavelengths: of the encoding of positions, see `layers.embedding.sinusoids`: `tensor2tensor`, or `paper`.
      logits_bias: whether each logit of the softmax has a bias, as in Marian; not with a sampled softmax.
      tied_embeddings: whether the target's embedding and the softmax share one table (Press and Wolf 2017),
        `embedding/table`. It is the source's embedding, too, where both sides have one vocabulary.
      tied_softmax: whether tied embeddings include the softmax; if not, it has `softmax/projection` as in T5 v1.1, and
        source and target share one table. Without tied embeddings it always has, and this has no effect.
      excluded_ids: ids with the probability 0, such as bos where its row of the softmax is not trained; not with a
        sampled softmax or label smoothing.
      label_smoothing: of the optimised loss; the reported cross-entropy has none.
      sampled_softmax: number of candidates with which training estimates the cross-entropy, see
        `layers.sampled_softmax`; 0 for the whole vocabulary, as in one that has no more. Not with label smoothing.
      activation_dtype: `float32`, or `bfloat16` for mixed precision; weights are float32.
      unroll: whether the program has a copy of each repeated layer instead of a loop, see `layers.repeat`. Decoding on
        one CPU always has.
      remat: the checkpoint policy: what a repeated layer saves for its backward pass, `full` rematerialisation least,
        then `keep_outputs` and `keep_hidden`; `none` saves everything.
      pipeline: `none`, `gpipe` or `circular`: how the layers of a stack are divided among stages on different devices,
        see `layers.pipeline_schedule` and docs/pipelines.md.
      stages: of a pipeline; a multiple of the devices along the layout's axis of stages.
      microbatches: into which a batch is divided for the layers of the stacks: those of a pipeline or, without one, one
        after another (gradient accumulation within the stacks). Each has its share of the groups; results depend on
        their number, and on nothing else of a pipeline.
    """

    num_layers: int
    model_dim: int
    hidden_dim: int
    num_heads: int
    head_dim: int
    num_experts: int = 0
    num_groups: int = 1
    layer_pattern: tuple[str, ...] = ()
    router: str = "top2"
    capacity_factor: float | None = 2.0
    inference_capacity_factor: float | None = None
    inference_min_capacity: int = 1
    inference_num_groups: int = 0
    dispatch: str = AUTO
    aux_loss_weight: float = 0.01
    input_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    twin_keys: bool = False
    biases: bool = False
    norm: str = LAYER
    norm_epsilon: float = LayerNorm.epsilon
    post_norm: bool = False
    position_offset: int = 0
    wavelengths: str = TENSOR2TENSOR
    logits_bias: bool = False
    tied_embeddings: bool = False
    tied_softmax: bool = True
    excluded_ids: tuple[int, ...] = ()
    label_smoothing: float = 0.0
    sampled_softmax: int = 0
    activation_dtype: str = "float32"
    unroll: bool = False
    remat: str = "none"
    pipeline: str = "none"
    stages: int = 1
    microbatches: int = 1

    # The sides of the corpus that the model reads.
    sides = ()

    def __post_init__(self):
        vocabularies = [field for side in self.sides if hasattr(self, field := f"{side}_vocabulary")]
        ranges.check("model.", self, {**_RANGES, **dict.fromkeys(vocabularies, COUNT)})
        check_dispatch(self.dispatch)
        make_router(self.router)
        self._check_layers()
        transformer_checks.check(self)

    @property
    def vocabularies(self) -> dict[str, int]:
        """The sizes of the vocabularies, by the side of the corpus that the model reads or writes in tokens."""
        sizes = {side: getattr(self, f"{side}_vocabulary", 0) for side in self.sides}
        return {side: size for side, size in sizes.items() if size}

    @property
    def layer_patterns(self) -> dict[str, tuple[str, ...]]:
        """The layer pattern of each stack, by the stack's name."""
        raise NotImplementedError

    @property
    def stack_layers(self) -> dict[str, int]:
        """The number of layers of each stack, by its name; `num_layers` together."""
        return dict.fromkeys(self.layer_patterns, self.num_layers // len(self.layer_patterns))

    @property
    def repeats(self) -> dict[str, int]:
        """R of each stack, by its name: how often it repeats its layer pattern."""
        return {stack: self.stack_layers[stack] // len(pattern) for stack, pattern in self.layer_patterns.items()}

    def loss(self, theta: dict, batch: dict, context: Context) -> tuple[tf.Tensor, dict]:
        """Returns the loss of one batch and its metrics; see `protocols.Model`."""
        raise NotImplementedError

    def routing(self, theta: dict, batch: dict, context: Context) -> dict[str, dict[str, tf.Tensor]]:
        """Returns which experts take each token in `loss`, by layer: `encoder/2` is the second of the encoder.

        Of each layer, `experts [B, T, K] int32` and `weights [B, T, K] float32`, the combine weights: 0 for a choice
        that is not dispatched (a dropped token, padding). Each microbatch is routed by itself, as in `loss`.

        Raises:
          UserError: the model reads no tokens on a side, no layer exposes its routing, or one does so more than once or
            of other tokens.
          ValueError: there are microbatches in training, whose random numbers `loss` draws within its pipeline.
        """
        for side in self.sides:
            if "ids" not in batch[side]:
                raise UserError(f"{type(self).__name__} has no tokens in its {side}, whose experts could be shown.")
        if context.training and self.microbatches > 1:
            raise ValueError("the routing of microbatches is that of inference; the context has a seed.")
        # Row b is in microbatch b modulo their number, see `layers.pipeline`.
        microbatches = (
            tree.map_leaves(lambda tensor, first=first: tensor[first :: self.microbatches], batch)
            for first in range(self.microbatches)
        )
        parts = [self._routing_of_microbatch(theta, rows, context) for rows in microbatches]
        return {
            layer: {name: _interleaved([part[layer][name] for part in parts]) for name in of_layer}
            for layer, of_layer in parts[0].items()
        }

    def _routing_of_microbatch(self, theta: dict, batch: dict, context: Context) -> dict[str, dict[str, tf.Tensor]]:
        """Computes `routing` of the rows of one microbatch."""
        found: dict[str, list[Routing]] = {}

        def record(scope: str, routing: Routing):
            found.setdefault(scope, []).append(routing)

        unrolled = dataclasses.replace(self, unroll=True, remat="none", pipeline="none", microbatches=1)
        unrolled.loss(theta, batch, dataclasses.replace(context, record_routing=record, microbatches=self.microbatches))
        if not found:
            raise UserError("no layer of the model has experts (model.num_experts, model.layer_pattern).")
        layers = {}
        for scope, repeats in found.items():
            stack, layer = scope.split("/")[:2]
            pattern_length, index = len(self.layer_patterns[stack]), int(layer.removeprefix("layer_"))
            tokens = batch["source" if stack == "encoder" else "target"]["ids"]
            rows, length = tokens.shape
            groups, size, _ = repeats[0].shape
            if len(repeats) != self.repeats[stack] or groups * size != rows * length:
                raise UserError(f"{scope}: layers that route twice, or a part of their tokens, cannot be explained.")
            for repeat, routing in enumerate(repeats):
                shape = (*tokens.shape, routing.shape[-1])
                layers[f"{stack}/{repeat * pattern_length + index + 1}"] = {
                    "experts": tf.reshape(routing.expert_indices(), shape),
                    "weights": tf.reshape(routing.weights, shape),
                }
        return layers

    def positions_of(self, path: str, lengths: dict[str, int]) -> float:
        """Returns how many positions of a batch's row a weight multiplies in training, for `analysis.flops`.

        0 for a table that is only looked up. Of the softmax's weight each position may multiply a part.

        Args:
          path: of the weight.
          lengths: of a row, by side.
        """
        if path == (f"{_TIED}/table" if self._softmax_is_tied else "softmax/projection"):
            vocabulary = self.vocabularies["target"]
            return lengths["target"] * (self.num_candidates or vocabulary) / vocabulary
        if path.endswith("embedding/table"):
            return 0.0
        of_memory = "cross_attention/key" in path or "cross_attention/value" in path
        is_source = "source" in lengths and (path.startswith("encoder/") or of_memory)
        return lengths["source" if is_source else "target"]

    def attention_macs(self, lengths: dict[str, int]) -> float:
        """Multiply-accumulates of the attention matmuls (logits and weighted sum of values) for one row of the batch.

        This is for a decoder alone; other models override it.
        """
        return self.num_layers * 2 * lengths["target"] ** 2 * self.num_heads * self.head_dim

    @property
    def num_candidates(self) -> int:
        """The candidates of a sampled softmax; 0 where training, too, uses the whole vocabulary."""
        return self.sampled_softmax if self.sampled_softmax < self.vocabularies["target"] else 0

    @property
    def layers_per_repeat(self) -> int:
        """The layers of one repeat of all patterns, in all stacks together.

        `num_layers` is a multiple of it if all stacks have the same number of layers.
        """
        return len(self.layer_patterns) * math.lcm(*map(len, self.layer_patterns.values()))

    @property
    def registered_classes(self) -> tuple[type, ...]:
        """The layers and routers that the model's fields name: its programs depend on their source."""
        layers = [layer for stack in self.layer_patterns for layer in self.feed_forwards(stack)]
        return tuple(cls for layer in layers for cls in (type(layer), *layer.registered_classes))

    def feed_forwards(self, stack: str) -> tuple[FeedForward, ...]:
        """The feed-forward layers of one repeat of a stack, by its pattern.

        Raises:
          UserError: an unknown layer, or settings that it refuses.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return tuple(make_feed_forward(choice, fields) for choice in self.layer_patterns[stack])

    @property
    def independent_sentences(self) -> bool:
        """See `protocols.RowSelectingModel`."""
        return all(
            layer.independent_in_inference for stack in self.layer_patterns for layer in self.feed_forwards(stack)
        )

    def prepare_decoding(self, theta: dict, context: Context) -> dict:
        """See `protocols.DecodingModel`; of a model with a decoder."""
        decoder, softmax = (
            self._layers["decoder"].prepare_decoding(theta["decoder"], context),
            {**theta.get("softmax", {})},
        )
        if not self._softmax_is_tied:
            of_layers = {"projection": prepare_weight(softmax["projection"][None], context)}  # of one layer
            softmax |= tree.map_leaves(lambda weight: weight[0], of_layers)
        elif not is_transposed(theta[_TIED]["table"].shape, context):
            softmax["projection"] = tf.transpose(theta[_TIED]["table"])
        return {**theta, "decoder": decoder, "softmax": softmax}

    def decoding_logits(self, theta: dict, outputs: tf.Tensor, context: Context) -> tf.Tensor:
        """Logits `[B, T, V] float32` of the decoder's outputs `[B, T, M]`, with the weights of `prepare_decoding`."""
        softmax = theta.get("softmax", {})
        if "projection" not in softmax:  # the tied table is the transposed projection
            softmax = {**softmax, "projection": {"transposed": theta[_TIED]["table"]}}
        return self._softmax(self.vocabularies["target"])(softmax, outputs, context)

    def _for_short_rows(
        self, columns: int, is_short: Callable[[int], tf.Tensor], compute: Callable[[int], Any], context: Context
    ) -> Any:
        """Returns `compute(columns)`; on one device, where the first quarter of the columns suffices, of these alone.

        A row has room for the longest text of all, but most batches have short ones. So decoding on one device has a
        second, compiled form of the pass over its inputs.

        Args:
          columns: of a row.
          is_short: of a number of columns, whether no row has a token after them.
          compute: of a number of columns; both results have the same shapes.
          context: of the call.
        """
        few = columns // _SHORT_ROWS_DIVISOR
        if not (context.layout.is_one_device and self.independent_sentences and few):
            return compute(columns)
        return tf.cond(is_short(few), lambda: compute(few), lambda: compute(columns))

    def settings_of_layers(self, field: str) -> list[tuple[str, str, Any]]:
        """The values of a field of the feed-forward layers that have it; a layer pattern may set it for one of them.

        Returns:
          (stack, name of the setting for messages, value) of each: `model.num_groups` where it has the model's value,
          otherwise `num_groups of layer moe:num_groups=4`.
        """
        found = []
        for stack, pattern in self.layer_patterns.items():
            for choice, layer in zip(pattern, self.feed_forwards(stack)):
                if (value := getattr(layer, field, None)) is not None:
                    is_models = value == getattr(self, field, None)
                    found.append((stack, f"model.{field}" if is_models else f"{field} of layer {choice}", value))
        return found

    def weights(self) -> dict:
        """See `Layer.weights`."""
        return {name: layer.weights() for name, layer in self._layers.items()}

    @property
    def _layers(self) -> dict:
        """The layers by name."""
        raise NotImplementedError

    @property
    def tied_tables(self) -> dict[str, str]:
        """The paths of the tables `[V, M]` of tied embeddings, by side; see `protocols.TiedModel`.

        Whether or not the softmax is tied to them, as both sides may share one.
        """
        if not self.tied_embeddings:
            return {}
        return {side: f"{self._table(f'{side}_embedding')}/table" for side in self.vocabularies}

    def _table(self, name: str) -> str:
        """The table of the embedding `name`."""
        return _TIED if self.tied_embeddings else name

    def _embed(self, name: str, theta: dict, side: dict, context: Context) -> tf.Tensor:
        embedded = self._look_up(name, theta, side["ids"], side["positions"], context)
        context.summarize(name, lambda: magnitude(embedded))
        return context.dropout(embedded, self.input_dropout, name, "BTM")

    def _look_up(self, name: str, theta: dict, ids: tf.Tensor, positions: tf.Tensor, context: Context) -> tf.Tensor:
        """The embeddings `[B, T, M]` of `ids` and `positions` `[B, T]`, of the table `name` or of the tied one."""
        table = self._table(name)
        return self._layers[table](theta[table], ids, positions, context)

    def _softmax_theta(self, theta: dict) -> dict:
        """The weights of the softmax; of tied embeddings, their table."""
        return {**theta.get("softmax", {}), **(theta[_TIED] if self._softmax_is_tied else {})}

    def _total(
        self, theta: dict, outputs: tf.Tensor, target: dict, context: Context, *stack_metrics: dict
    ) -> tuple[tf.Tensor, dict]:
        """(cross-entropy + k * l_aux, metrics) of the last stack's `outputs [B, T, M]`.

        Metrics of layers are means over the stacks that have them.
        """
        nll, smoothed = self._cross_entropy(self._softmax_theta(theta), outputs, target["labels"], context)
        present = tf.cast(tf.not_equal(target["segment_ids"], 0), tf.float32)
        tokens = tf.reduce_sum(present)
        metrics = {"cross_entropy": tf.math.divide_no_nan(tf.reduce_sum(nll * present), tokens), "tokens": tokens}
        for name in dict.fromkeys(name for of_stack in stack_metrics for name in of_stack):
            values = [of_stack[name] for of_stack in stack_metrics if name in of_stack]
            metrics[name] = tf.add_n(values) / len(values)
        loss = tf.math.divide_no_nan(tf.reduce_sum(smoothed * present), tokens)
        return self._with_aux_loss(loss, metrics), metrics

    def _cross_entropy(
        self, theta: dict, outputs: tf.Tensor, labels: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """(reported, optimised) cross-entropy of each label, `[B, T]`, from the weights of the softmax."""
        if self.num_candidates and context.training:
            nll = sampled_cross_entropy(theta, outputs, labels, self.num_candidates, context)
            return nll, nll
        logits = self._softmax(self.vocabularies["target"])(theta, outputs, context)
        return cross_entropy(logits, labels, self.label_smoothing)

    def _with_aux_loss(self, loss: tf.Tensor, metrics: dict) -> tf.Tensor:
        return loss + self.aux_loss_weight * metrics.get(AUX_LOSS, 0.0)

    def _embedding(self, vocabulary: int) -> Embedding:
        return Embedding(
            vocabulary=vocabulary,
            model_dim=self.model_dim,
            position_offset=self.position_offset,
            wavelengths=self.wavelengths,
        )

    def _softmax(self, vocabulary: int) -> Softmax:
        return Softmax(
            vocabulary=vocabulary,
            model_dim=self.model_dim,
            is_tied=self._softmax_is_tied,
            bias=self.logits_bias,
            excluded=self.excluded_ids,
        )

    @property
    def _softmax_is_tied(self) -> bool:
        """Whether the target's table stands for the projection of the softmax."""
        return self.tied_embeddings and self.tied_softmax

    @property
    def _softmax_layers(self) -> dict[str, Softmax]:
        """The softmax, unless an embedding's table is all that it has."""
        softmax = self._softmax(self.vocabularies["target"])
        return {"softmax": softmax} if softmax.weights() else {}

    def _stack(self, name: str, has_cross_attention: bool) -> TransformerStack:
        return TransformerStack(
            pattern=tuple(self._stacked_layer(layer, has_cross_attention) for layer in self.feed_forwards(name)),
            repeats=self.repeats[name],
            unroll=self.unroll,
            remat=self.remat,
            pipeline=self.pipeline,
            stages=self.stages,
            microbatches=self.microbatches,
        )

    def _stacked_layer(self, feed_forward: FeedForward, has_cross_attention: bool) -> TransformerLayer:
        attention = MultiHeadAttention(
            model_dim=self.model_dim,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            dropout=self.attention_dropout,
            twin_keys=self.twin_keys,
            biases=self.biases,
        )
        return TransformerLayer(
            attention=attention,
            feed_forward=feed_forward,
            residual_dropout=self.residual_dropout,
            norm_name=self.norm,
            norm_epsilon=self.norm_epsilon,
            post_norm=self.post_norm,
            has_cross_attention=has_cross_attention,
        )

    @property
    def _pattern(self) -> tuple[str, ...]:
        return self.layer_pattern or (("dense", "moe") if self.num_experts else ("dense",))

    def _check_layers(self):
        """Raises UserError for numbers of layers that the patterns do not divide."""
        if self.num_layers < self.layers_per_repeat or self.num_layers % self.layers_per_repeat:
            halves = "half of the layers are the encoder's and " if len(self.layer_patterns) == 2 else ""
            patterns = " and ".join(dict.fromkeys(map(",".join, self.layer_patterns.values())))
            raise UserError(
                f"model.num_layers is {self.num_layers}; {halves}each stack repeats the layer pattern {patterns}, so "
                f"it must be a multiple of {self.layers_per_repeat}."
            )


def _interleaved(parts: list[tf.Tensor]) -> tf.Tensor:
    """Rows `[B / m, ...]` of each of m microbatches to `[B, ...]`, row b from microbatch b modulo m."""
    return tf.reshape(tf.stack(parts, axis=1), (-1, *parts[0].shape[1:]))
