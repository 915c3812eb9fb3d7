"""Transformer layers, pre-norm or post-norm, and stacks of them, over whole sequences and one step at a time."""

from __future__ import annotations

import dataclasses

from lingvo_moe import tree
from lingvo_moe.layers.attention import MultiHeadAttention
from lingvo_moe.layers.base import Context, Layer
from lingvo_moe.layers.feed_forward import FeedForward, call_feed_forward, feed_forward_weights
from lingvo_moe.layers.normalization import LAYER, NORMS, LayerNorm, RMSNorm
from lingvo_moe.layers.pipeline import pipeline
from lingvo_moe.layers.pipeline_schedule import Schedule
from lingvo_moe.layers.relative_bias import RelativeBias
from lingvo_moe.layers.repeat import repeat
from lingvo_moe.layers.summaries import magnitude
from lingvo_moe.lazy import tf
from lingvo_moe.ops.attention import CACHED_AXES, attend_to_written, reads_written_cache
from lingvo_moe.ops.projection import prefers_unstacked_weights, project_by_layer
from lingvo_moe.ops.slices import dynamic_update_slice


@dataclasses.dataclass(frozen=True)
class Masks:
    """Which positions see which in one stack, and which hold no token.

    Attributes:
      self_attention: `[B, T, T] bool`, or `[B, T, L]` over a cache.
      paddings: `[B, T] bool`.
      cross_attention: `[B, T, L] bool` over the encoder's outputs; None in an encoder.
      bias: `[N, T, T] float32`, or `[N, 1, L]` over a cache, by which a query sees some keys of `self_attention` more
        than others; None without relative positions. A stack adds it to the masks that it is given.
    """

    self_attention: tf.Tensor
    paddings: tf.Tensor
    cross_attention: tf.Tensor | None = None
    bias: tf.Tensor | None = None

    @property
    def over_memory(self) -> tf.Tensor:
        """`cross_attention` of a decoder; raises ValueError in an encoder."""
        if self.cross_attention is None:
            raise ValueError("a decoder needs the mask of its cross-attention.")
        return self.cross_attention

    def tensors(self) -> dict[str, tf.Tensor]:
        """The masks that there are, by name."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: mask for name, mask in named.items() if mask is not None}


# What all layers of a stack read, by path.
_CONSTANT_AXES = {
    "memory": "BLM",
    "masks": {"self_attention": "BTL", "paddings": "BT", "cross_attention": "BTL"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerLayer(Layer):
    """Self-attention, cross-attention in a decoder, and a feed-forward layer.

    Each sublayer f is `x + dropout(f(norm(x)))` or, post-norm, `norm(x + dropout(f(x)))`.

    Attributes:
      attention: self-attention, and cross-attention with weights of its own; `twin_keys` is for the latter alone.
      feed_forward: the feed-forward layer, or what takes its place.
      has_cross_attention: whether the layer also attends to the encoder's outputs.
      residual_dropout: the rate of dropout of each sublayer's outputs.
      norm_name: of the normalisation, one of `NORMS`.
      norm_epsilon: of the normalisation.
      post_norm: whether the sum after each sublayer is normalised (Vaswani et al. 2017, section 3.1), instead of the
        inputs of each sublayer and the outputs of the stack.
    """

    attention: MultiHeadAttention
    feed_forward: FeedForward
    has_cross_attention: bool = False
    residual_dropout: float = 0.0
    norm_name: str = LAYER
    norm_epsilon: float = LayerNorm.epsilon
    post_norm: bool = False

    @property
    def norm(self) -> LayerNorm | RMSNorm:
        """The normalisation of each sublayer, with weights of its own."""
        return NORMS[self.norm_name](model_dim=self.attention.model_dim, epsilon=self.norm_epsilon)

    @property
    def independent_rows(self) -> bool:
        """See `Layer.independent_rows`; attention reads the positions of one row."""
        return self.feed_forward.independent_rows

    def weights(self) -> dict:
        """See `Layer.weights`."""
        # A token that attends to itself from the start gains nothing, a target token that finds its source does.
        attention = dataclasses.replace(self.attention, twin_keys=False)
        sublayers = {"self_attention": attention.weights()}
        if self.has_cross_attention:
            sublayers["cross_attention"] = self.attention.weights()
        sublayers["feed_forward"] = feed_forward_weights(self.feed_forward)
        return {name: {"norm": self.norm.weights(), **weights} for name, weights in sublayers.items()}

    def __call__(
        self, theta: dict, inputs: tf.Tensor, memory: tf.Tensor | None, masks: Masks, context: Context
    ) -> tuple[tf.Tensor, dict]:
        """`[B, T, M]`, and the encoder's outputs `[B, L, M]` for a decoder, to (`[B, T, M]`, metrics)."""
        outputs = self._attend("self_attention", theta, inputs, None, masks.self_attention, context, masks.bias)
        if self.has_cross_attention:
            outputs = self._attend("cross_attention", theta, outputs, memory, masks.over_memory, context)
        return self._feed_forward(theta, outputs, masks, context)

    def step(
        self,
        theta: dict,
        inputs: tf.Tensor,
        caches: dict,
        repeat_index: tf.Tensor,
        start: tf.Tensor | None,
        masks: Masks,
        context: Context,
    ) -> tuple[tf.Tensor, dict]:
        """One decoding step over a KV cache that is written once per position.

        Args:
          theta: tensors for `weights()`, or what `prepare_decoding` returns.
          inputs: `[B, K, M]`, K new positions.
          caches: `keys` and `values` of self-attention over L positions and, with cross-attention, its `memory_keys`
            and `memory_values`; with the logical axes `CACHED_AXES` after R.
          repeat_index: which of the R layers this is.
          start: the new positions are written at L = start .. start + K - 1; None for 0, where the cache is empty.
          masks: over the cache, which includes the new positions; over these alone if `start` is None.
          context: of the call.

        Returns:
          (`[B, K, M]`, the caches with the new keys and values).
        """
        with tf.name_scope("self_attention"):
            of_attention = theta["self_attention"]
            normed = self._before(of_attention, inputs, context)
            new = self.attention.keys_values(of_attention, normed, context)
            written = self._write(new, caches, repeat_index, start, context)
            of_layer = _of_layer(caches, repeat_index), _of_layer(written, repeat_index)
            attended = self._attend_to_cache(of_attention, normed, new, of_layer, start, masks, context)
            outputs = self._after(of_attention, inputs + attended, context)
        if self.has_cross_attention:
            outputs = self._attend_to_cached_memory(theta, outputs, caches, repeat_index, masks, context)
        outputs, _ = self._feed_forward(theta, outputs, masks, context)
        return outputs, written

    def prepare_decoding(self, theta: dict, context: Context) -> dict:
        """See `Layer.prepare_decoding`; for `step`."""
        parts = {"feed_forward": self.feed_forward.prepare_decoding(theta["feed_forward"], context)}
        parts["self_attention"] = self.attention.prepare_decoding(theta["self_attention"], context)
        if self.has_cross_attention:
            cross = theta["cross_attention"]
            # Keys and values of the source are projected once, see `TransformerStack.start`.
            of_memory = {name: cross[name] for name in ("key", "value")}
            parts["cross_attention"] = {**self.attention.prepare_decoding(cross, context), **of_memory}
        return {**theta, **parts}

    def _attend_to_cache(
        self,
        theta: dict,
        normed: tf.Tensor,
        new: tuple[tf.Tensor, tf.Tensor],
        caches: tuple[tuple[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
        start: tf.Tensor | None,
        masks: Masks,
        context: Context,
    ) -> tf.Tensor:
        """Self-attention in `step`; `caches` are this layer's keys and values before and after `new` is written."""
        (before, (keys, values)), mask, bias = caches, masks.self_attention, masks.bias
        if start is None:
            return self.attention.attend(theta, normed, *new, mask, context, bias=bias)
        if not reads_written_cache(context):
            return self.attention.attend_cached(theta, normed, before, new, mask, start, context, bias)

        def attend(positions: int) -> tf.Tensor:
            return self.attention.attend(
                theta,
                normed,
                keys[..., :positions],
                values[:, :, :positions],
                mask[..., :positions],
                context,
                logical_axes=CACHED_AXES,
                bias=None if bias is None else bias[..., :positions],
            )

        return attend_to_written(attend, start + normed.shape[1], keys.shape[-1], context)

    def _attend_to_cached_memory(
        self, theta: dict, inputs: tf.Tensor, caches: dict, repeat_index: tf.Tensor, masks: Masks, context: Context
    ) -> tf.Tensor:
        """The sublayer of cross-attention in `step`."""
        with tf.name_scope("cross_attention"):
            of_attention = theta["cross_attention"]
            normed = self._before(of_attention, inputs, context)
            keys, values = (caches[f"memory_{name}"][repeat_index] for name in ("keys", "values"))
            attended = self.attention.attend(
                of_attention, normed, keys, values, masks.over_memory, context, logical_axes=CACHED_AXES
            )
            return self._after(of_attention, inputs + attended, context)

    @staticmethod
    def _write(
        new: tuple[tf.Tensor, tf.Tensor],
        caches: dict,
        repeat_index: tf.Tensor,
        start: tf.Tensor | None,
        context: Context,
    ) -> dict:
        """The caches with the keys and values of new positions, each `[B, K, N, D]`; see `step`."""
        caches, first = dict(caches), 0 if start is None else start
        for logical_axes, name, tensor in zip(CACHED_AXES, ("keys", "values"), new):
            offset = [repeat_index, *(first if axis == "L" else 0 for axis in logical_axes)]
            update = tf.einsum(f"BLND->{logical_axes}", tensor)[None]
            caches[name] = context.annotate(dynamic_update_slice(caches[name], update, offset), f"R{logical_axes}")
        return caches

    def _attend(
        self,
        name: str,
        theta: dict,
        inputs: tf.Tensor,
        memory: tf.Tensor | None,
        mask: tf.Tensor,
        context: Context,
        bias: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """The attention sublayer `name`, over `memory`, or over `inputs` themselves where there is none."""
        with tf.name_scope(name):
            normed = self._before(theta[name], inputs, context)
            attended = self.attention(
                theta[name], normed, normed if memory is None else memory, mask, context.fold(name), bias
            )
            return self._after(theta[name], self._add(inputs, attended, name, context), context)

    def _feed_forward(
        self,
        theta: dict,
        inputs: tf.Tensor,
        masks: Masks,
        context: Context,
        name: str = "feed_forward",
        weight: float = 1.0,
    ) -> tuple[tf.Tensor, dict]:
        with tf.name_scope(name):
            normed = self._before(theta[name], inputs, context)
            of_layer = context.fold(name)
            fed, metrics = call_feed_forward(self.feed_forward, theta[name], normed, masks.paddings, of_layer)
            added = self._add(inputs, fed if weight == 1.0 else weight * fed, name, context)
            return self._after(theta[name], added, context), metrics

    def _before(self, theta: dict, inputs: tf.Tensor, context: Context) -> tf.Tensor:
        """What a sublayer reads: its inputs, normalised unless that follows."""
        return inputs if self.post_norm else self.norm(theta["norm"], inputs, context)

    def _after(self, theta: dict, added: tf.Tensor, context: Context) -> tf.Tensor:
        """The outputs of a sublayer, which are `added` to its inputs."""
        return self.norm(theta["norm"], added, context) if self.post_norm else added

    def _add(self, residual: tf.Tensor, outputs: tf.Tensor, key: str, context: Context) -> tf.Tensor:
        dropped = context.dropout(outputs, self.residual_dropout, f"{key}/residual", "BTM")
        added = residual + dropped
        context.summarize(key, lambda: magnitude(added))
        return added


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerStack(Layer):
    """The layers of a pattern, repeated with stacked weights: (dense, MoE) puts experts in every other layer.

    That is the model of GShard (section 2.2).

    Attributes:
      pattern: the layers of one repeat.
      repeats: R; the stack has R * len(pattern) layers.
      relative_bias: of the self-attention of all layers; None for none. Not with a pipeline or microbatches.
      unroll, remat: see `repeat`.
      pipeline, stages, microbatches: see `layers.pipeline_schedule`; by default the whole batch passes at once.
    """

    pattern: tuple[TransformerLayer, ...]
    repeats: int
    relative_bias: RelativeBias | None = None
    unroll: bool = False
    remat: str = "none"
    pipeline: str = "none"
    stages: int = 1
    microbatches: int = 1

    @property
    def schedule(self) -> Schedule:
        """Which stage computes which microbatch when."""
        return Schedule.of(self.pipeline, self.stages, self.microbatches, self.repeats)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics of a call: those that its layers declare."""
        return tuple(dict.fromkeys(name for layer in self.pattern for name in layer.feed_forward.metric_names))

    def weights(self) -> dict:
        """See `Layer.weights`."""
        norm = {} if self._is_normalised else {"norm": self._norm.weights()}
        return {**self._stacked_weights(), **norm, **(self.relative_bias.weights() if self.relative_bias else {})}

    def __call__(
        self, theta: dict, inputs: tf.Tensor, memory: tf.Tensor | None, masks: Masks, context: Context
    ) -> tuple[tf.Tensor, dict]:
        """`[B, T, M]` to (`[B, T, M]`, normalised; metrics). `memory`: see `TransformerLayer`.

        Each metric is the mean over the layers that declare it.
        """
        num_declaring = {
            name: sum(name in layer.feed_forward.metric_names for layer in self.pattern) for name in self.metric_names
        }

        def body(theta, inputs, constants, context):
            outputs, totals = inputs, dict.fromkeys(self.metric_names, 0.0)
            for index, layer in enumerate(self.pattern):
                name = f"layer_{index}"
                of_layer = context.fold(index).named(name)
                masks = Masks(**constants["masks"])
                outputs, metrics = layer(theta[name], outputs, constants.get("memory"), masks, of_layer)
                totals = {name: total + metrics.get(name, 0.0) for name, total in totals.items()}
            return outputs, {name: total / num_declaring[name] for name, total in totals.items()}

        masks = self._with_bias(theta, masks, None, context)
        stacked = {name: theta[name] for name in self._stacked_weights()}
        constants = {"masks": masks.tensors()} | ({} if memory is None else {"memory": memory})
        arguments = body, self._stacked_weights(), stacked, inputs, constants
        options = {"metric_names": self.metric_names, "remat": self.remat}
        if self.pipeline == "none" and self.microbatches == 1:
            outputs, metrics = repeat(*arguments, context, unroll=self.unroll, **options)
        else:
            options["independent_rows"] = all(layer.independent_rows for layer in self.pattern)
            outputs, metrics = pipeline(*arguments, _CONSTANT_AXES, context, self.schedule, **options)
        return self._normalised(theta, outputs, context), metrics

    def prepare_decoding(self, theta: dict, context: Context) -> dict:
        """The weights for `start` and `step`, in parts: the whole stack, or each of its repeats.

        It is divided if it is unrolled, and for one CPU, where a loop would copy the weights of each repeat in every
        step. Called outside of the decoding loop, it makes the slices once for all steps.
        """
        divides = self.unroll or prefers_unstacked_weights(context)
        parts = [slice(i, i + 1) for i in range(self.repeats)] if divides else [slice(None)]
        layers = {f"layer_{index}": layer for index, layer in enumerate(self.pattern)}

        def unstacked(part: slice) -> dict:
            # A part first: other forms of the whole stack would be in memory beside it.
            of_part = tree.map_leaves(lambda weight: weight[part], {name: theta[name] for name in layers})
            return {name: layer.prepare_decoding(of_part[name], context) for name, layer in layers.items()}

        of_parts = {f"part_{index}": unstacked(part) for index, part in enumerate(parts)}
        return {**{name: weight for name, weight in theta.items() if name not in layers}, "parts": of_parts}

    def start(
        self, theta: dict, batch_size: int, cache_length: int, context: Context, memory: tf.Tensor | None = None
    ) -> dict:
        """The caches of all layers for `step`, by part (see `TransformerLayer.step`).

        Those of self-attention have `cache_length` empty positions, those of cross-attention the keys and values of
        `memory [B, L, M]`.
        """
        return {
            name: self._caches(part, batch_size, cache_length, context, memory) for name, part in theta["parts"].items()
        }

    def step(
        self, theta: dict, inputs: tf.Tensor, caches: dict, start: tf.Tensor | None, masks: Masks, context: Context
    ) -> tuple[tf.Tensor, dict]:
        """One decoding step of all layers, see `TransformerLayer.step`; outputs are normalised.

        With a relative bias, each step writes one position of K hypotheses, as all steps before it.
        """
        masks = self._with_bias(theta, masks, start, context)
        outputs, caches = inputs, dict(caches)
        for name, part in theta["parts"].items():
            outputs, caches[name] = self._step_part(part, outputs, caches[name], start, masks, context)
        return self._normalised(theta, outputs, context), caches

    def select_rows(self, caches: dict, rows: tf.Tensor) -> dict:
        """The caches of these rows `[B'] int32` of the batch."""
        batch_dim = 1 + CACHED_AXES[0].index("B")  # after R; the same of keys and values
        return tree.map_leaves(lambda cache: tf.gather(cache, rows, axis=batch_dim), caches)

    def _step_part(
        self, theta: dict, inputs: tf.Tensor, caches: dict, start: tf.Tensor | None, masks: Masks, context: Context
    ) -> tuple[tf.Tensor, dict]:
        def layers(i, outputs, caches):
            caches = dict(caches)
            for index, layer in enumerate(self.pattern):
                name = f"layer_{index}"
                sliced = tree.map_leaves(lambda weight: weight[i], theta[name])
                outputs, caches[name] = layer.step(sliced, outputs, caches[name], i, start, masks, context)
            return i + 1, outputs, caches

        repeats = _num_repeats(theta)
        if repeats == 1:
            return layers(0, inputs, caches)[1:]
        return tf.while_loop(
            lambda i, *_: i < repeats, layers, (tf.constant(0), inputs, caches), maximum_iterations=repeats
        )[1:]

    def _with_bias(self, theta: dict, masks: Masks, start: tf.Tensor | None, context: Context) -> Masks:
        """The masks with the relative bias, if the stack has one; `start` of a step, None for whole sequences."""
        if not self.relative_bias:
            return masks
        _, size, length = masks.self_attention.shape
        queries, keys = tf.range(size), tf.range(length)
        if start is not None:
            # The K hypotheses of a step share a position: cache position s is that of step s // K.
            queries, keys = (start // size)[None], keys // size
        return dataclasses.replace(masks, bias=self.relative_bias(theta, queries, keys, context))

    def _caches(
        self, theta: dict, batch_size: int, cache_length: int, context: Context, memory: tf.Tensor | None
    ) -> dict:
        """The caches of the layers with the stacked weights `theta`."""
        caches = {}
        for index, layer in enumerate(self.pattern):
            cache = {}
            sizes = {"N": layer.attention.num_heads, "D": layer.attention.head_dim}
            sizes |= {"L": cache_length, "B": batch_size}
            for logical_axes, name in zip(CACHED_AXES, ("key", "value")):
                shape = (_num_repeats(theta), *(sizes[axis] for axis in logical_axes))
                cache[f"{name}s"] = context.annotate(tf.zeros(shape, context.dtype), f"R{logical_axes}")
                if memory is not None:
                    of_layer = theta[f"layer_{index}"]["cross_attention"]
                    projected = project_by_layer(memory, of_layer[name], context, of_layer.get(f"{name}_bias"))
                    of_memory = tf.einsum(f"RBLND->R{logical_axes}", projected)
                    cache[f"memory_{name}s"] = context.annotate(of_memory, f"R{logical_axes}")
            caches[f"layer_{index}"] = cache
        return caches

    @property
    def _norm(self) -> LayerNorm | RMSNorm:
        return self.pattern[0].norm

    @property
    def _is_normalised(self) -> bool:
        """Whether the outputs of the last layer are normalised already."""
        return self.pattern[0].post_norm

    def _normalised(self, theta: dict, outputs: tf.Tensor, context: Context) -> tf.Tensor:
        """The outputs of the stack from those of the last layer."""
        normed = outputs if self._is_normalised else self._norm(theta["norm"], outputs, context)
        context.summarize("norm", lambda: magnitude(normed))
        return normed

    def _stacked_weights(self) -> dict:
        # Devices hold equal parts of a weight: where stages do not divide the layers, all devices store all of them.
        axis = "r" if self.repeats % self.schedule.stages else "R"
        return {
            f"layer_{index}": _repeated(layer.weights(), self.repeats, axis) for index, layer in enumerate(self.pattern)
        }


def _of_layer(caches: dict, repeat_index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The cached keys and values of one repeat."""
    return caches["keys"][repeat_index], caches["values"][repeat_index]


def _num_repeats(theta: dict) -> int:
    """R of stacked weights."""
    return next(iter(tree.flatten(theta).values())).shape[0]


def _repeated(weights: dict, times: int, axis: str) -> dict:
    """The weights of stacked layers, in the order of one layer's, which is the order of computation."""
    return {
        name: _repeated(node, times, axis) if isinstance(node, dict) else node.repeated(times, axis)
        for name, node in weights.items()
    }
