"""Gradients that are written out have the names by which the parts of a model are found."""

from __future__ import annotations

from lingvo_moe.lazy import tf
from lingvo_moe.ops.gradients import named_gradient


def test_the_gradient_has_the_name_scope_of_the_caller():
    """Not that of where the tape is asked for it; and it is the gradient that was written."""

    @tf.function
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tf.name_scope("experts"):
                y = named_gradient(lambda x: (x * 2.0, lambda upstream: tf.sin(upstream) * 5.0))(x)
        return tape.gradient(y, x)

    names = [op.name for op in gradient.get_concrete_function(tf.TensorSpec(())).graph.get_operations()]
    assert [name for name in names if name.endswith("Sin")] == ["gradient_tape/experts/Sin"]
    assert float(gradient(tf.constant(3.0))) == float(tf.sin(1.0) * 5.0)
