"""Stacked layers, scanned: graph size, compile time and (with rematerialisation) memory do not grow with depth.

`repeat` applies one body R times to weights whose leading dimension is R. Three ways compute the same numbers:

  unroll        R copies in the graph; fastest to run for few layers.
  scan          one loop; the backward pass reads what the forward pass saved.
  scan + remat  one loop; only each layer's input is saved, and the backward loop computes the layer again (GShard 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lingvo_moe import tree
from lingvo_moe.layers.base import Context
from lingvo_moe.lazy import tf

# (theta of one repeat, inputs [B, T, M], float constants, context) -> (outputs [B, T, M], scalar metrics)
Body = Callable[[dict, "tf.Tensor", dict, Context], tuple["tf.Tensor", dict]]


def repeat(body: Body, weights: dict, theta: dict, inputs: tf.Tensor, constants: dict, context: Context, *,
           metric_names: Sequence[str] = (), unroll: bool = False, remat: bool = False) -> tuple[tf.Tensor, dict]:
    """Applies `body` R times; random numbers of repeat i are those of `context.fold(i)`.

    Args:
      body: a pure function. What it closes over gets no gradient: tensors that need one go into `constants`.
      weights: the tree of stacked `Weight`s that `theta` holds values for; their letters are the slices' sharding.
      theta: tensors `[R, ...]`.
      inputs: `[B, T, M]`.
      constants: tree of float tensors that every repeat reads (the encoder's outputs, in a decoder).
      context: of the call.
      metric_names: the names of the metrics that `body` returns.
      unroll, remat: see the module's docstring; `unroll` with `remat` is an error.

    Returns:
      (`[B, T, M]`, metrics averaged over repeats).
    """
    if unroll and remat:
        raise ValueError("repeat: unroll and remat exclude each other; rematerialisation needs the loop.")
    run = _Repeat(body, weights, theta, constants, context, metric_names)
    if unroll:
        outputs, metrics = run.unrolled(inputs)
    elif remat:
        outputs, metrics = run.rematerialised(inputs)
    else:
        outputs, metrics = run.scanned(inputs)
    return outputs, {name: value / run.times for name, value in metrics.items()}


class _Repeat:
    """The flat view of one call of `repeat`: lists of tensors instead of trees, as loops and gradients want them."""

    def __init__(self, body: Body, weights: dict, theta: dict, constants: dict, context: Context,
                 metric_names: Sequence[str]):
        stacked = tree.flatten(theta)
        self._body, self._context = body, context
        self._names, self._theta = list(stacked), list(stacked.values())
        self._letters = [tree.flatten(weights)[name].letters for name in self._names]
        self._constant_names, self._constants = list(tree.flatten(constants)), list(tree.flatten(constants).values())
        self.times = int(self._theta[0].shape[0])
        self._metric_names = list(metric_names)

    def unrolled(self, inputs: tf.Tensor) -> tuple[tf.Tensor, dict]:
        slices = [tf.unstack(weight) for weight in self._theta]
        outputs, totals = inputs, [0.0] * len(self._metric_names)
        for i in range(self.times):
            outputs, metrics = self._call(i, [weight[i] for weight in slices], outputs, self._constants)
            totals = [total + metric for total, metric in zip(totals, metrics)]
        return outputs, dict(zip(self._metric_names, totals))

    def scanned(self, inputs: tf.Tensor) -> tuple[tf.Tensor, dict]:
        def step(i, outputs, totals):
            outputs, metrics = self._call(i, self._slices(i), outputs, self._constants)
            return i + 1, outputs, tf.add(totals, self._packed(metrics))

        start = (tf.constant(0), inputs, tf.zeros(len(self._metric_names)))
        _, outputs, totals = tf.while_loop(lambda i, *_: i < self.times, step, start, maximum_iterations=self.times)
        return outputs, self._unpacked(totals)

    def rematerialised(self, inputs: tf.Tensor) -> tuple[tf.Tensor, dict]:
        @tf.custom_gradient
        def run(inputs, *rest):
            saved, outputs, totals = self._forward_loop(inputs, *self._split(rest))

            def gradient(outputs_gradient, totals_gradient):
                return self._backward_loop(saved, outputs_gradient, totals_gradient, *self._split(rest))

            return (outputs, totals), gradient

        outputs, totals = run(inputs, *self._theta, *self._constants)
        return outputs, self._unpacked(totals)

    def _forward_loop(self, inputs, theta, constants):
        def step(i, outputs, totals, saved):
            saved = self._annotate_saved(_store(saved, i, outputs))
            outputs, metrics = self._call(i, self._slices(i, theta), outputs, constants)
            return i + 1, outputs, tf.add(totals, self._packed(metrics)), saved

        saved = self._annotate_saved(tf.zeros((self.times, *inputs.shape), inputs.dtype))
        start = (tf.constant(0), inputs, tf.zeros(len(self._metric_names)), saved)
        _, outputs, totals, saved = tf.while_loop(
            lambda i, *_: i < self.times, step, start, maximum_iterations=self.times)
        return saved, outputs, totals

    def _backward_loop(self, saved, outputs_gradient, totals_gradient, theta, constants):
        def step(i, gradient, constant_gradients, theta_gradients):
            slices, inputs = self._slices(i, theta), self._context.annotate(saved[i], "BTM")
            with tf.GradientTape() as tape:
                tape.watch([inputs, *slices, *constants])
                with tf.name_scope("rematerialised"):  # `analysis.plan` finds it by this name
                    outputs, metrics = self._call(i, slices, inputs, constants)
                totals = self._packed(metrics)
            found = tape.gradient([outputs, totals], [inputs, *slices, *constants],
                                  output_gradients=[gradient, totals_gradient],
                                  unconnected_gradients=tf.UnconnectedGradients.ZERO)
            of_slices, of_constants = found[1:1 + len(slices)], found[1 + len(slices):]
            theta_gradients = [self._annotate_weight(k, _store(total, i, self._annotate_slice(k, part)))
                               for k, (total, part) in enumerate(zip(theta_gradients, of_slices))]
            constant_gradients = [tf.add(a, b) for a, b in zip(constant_gradients, of_constants)]
            return [i - 1, self._context.annotate(found[0], "BTM"), constant_gradients, theta_gradients]

        zeros = [self._annotate_weight(k, tf.zeros_like(weight)) for k, weight in enumerate(theta)]
        start = [tf.constant(self.times - 1), outputs_gradient, [tf.zeros_like(c) for c in constants], zeros]
        _, gradient, constant_gradients, theta_gradients = tf.while_loop(
            lambda i, *_: i >= 0, step, start, maximum_iterations=self.times)
        return [gradient, *theta_gradients, *constant_gradients]

    def _call(self, i, slices, inputs, constants) -> tuple[tf.Tensor, list[tf.Tensor]]:
        theta = tree.unflatten(dict(zip(self._names, slices)))
        outputs, metrics = self._body(theta, inputs, tree.unflatten(dict(zip(self._constant_names, constants))),
                                      self._context.fold(i))
        return self._context.annotate(outputs, "BTM"), [metrics[name] for name in self._metric_names]

    def _split(self, tensors):
        return tensors[:len(self._names)], tensors[len(self._names):]

    def _slices(self, i, theta=None) -> list[tf.Tensor]:
        return [self._annotate_slice(k, weight[i]) for k, weight in enumerate(theta or self._theta)]

    def _annotate_slice(self, k: int, tensor: tf.Tensor) -> tf.Tensor:
        return self._context.annotate(tensor, self._letters[k].removeprefix("R"))

    def _annotate_weight(self, k: int, tensor: tf.Tensor) -> tf.Tensor:
        return self._context.annotate(tensor, self._letters[k])

    def _annotate_saved(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._context.annotate(tensor, "RBTM")

    def _packed(self, metrics: list[tf.Tensor]) -> tf.Tensor:
        return tf.stack(metrics) if metrics else tf.zeros(0)

    def _unpacked(self, totals: tf.Tensor) -> dict:
        return dict(zip(self._metric_names, tf.unstack(totals) if self._metric_names else []))


def _store(stack: tf.Tensor, i: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """`stack` with row i replaced, in place where the compiler can: `[R, ...]`, scalar, `[...]`."""
    return dynamic_update(stack, value[None], [i] + [0] * (stack.shape.rank - 1))


def dynamic_update(tensor: tf.Tensor, update: tf.Tensor, start: list) -> tf.Tensor:
    """`tensor` with the block that begins at `start` replaced by `update`; only in compiled programs."""
    from tensorflow.compiler.tf2xla.python import xla  # TensorFlow's own slice updates become scatters
    return xla.dynamic_update_slice(tensor, update, tf.stack([tf.cast(index, tf.int32) for index in start]))
