"""Gradients that are written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lingvo_moe.lazy import tf


def named_gradient(function: Callable[..., tuple[Any, Callable]]) -> Callable[..., Any]:
    """Returns `tf.custom_gradient(function)`; the gradient has the name scope of here, by which `analysis` finds it.

    TensorFlow names its own gradients so, and those that are written out like nothing.
    """
    scope = f"gradient_tape/{tf.get_current_name_scope()}"

    def scoped(*inputs: tf.Tensor) -> tuple[Any, Callable]:
        outputs, gradient = function(*inputs)

        def named(*upstream: tf.Tensor) -> Any:
            with tf.name_scope(scope):
                return gradient(*upstream)

        return outputs, named

    return tf.custom_gradient(scoped)
