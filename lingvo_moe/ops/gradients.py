"""Gradients that are written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lingvo_moe.lazy import tf


def named_gradient(function: Callable[..., tuple[Any, Callable]]) -> Callable[..., Any]:
    """Returns `tf.custom_gradient(function)`, whose gradient has the name scope of the caller.

    `analysis` finds the part of the model by this name. TensorFlow names its own gradients in the same way, but custom
    gradients have no name scope.
    """
    scope = f"gradient_tape/{tf.get_current_name_scope()}"

    def scoped(*inputs: tf.Tensor) -> tuple[Any, Callable]:
        outputs, gradient = function(*inputs)

        def named(*upstream: tf.Tensor) -> Any:
            with tf.name_scope(scope):
                return gradient(*upstream)

        return outputs, named

    return tf.custom_gradient(scoped)
