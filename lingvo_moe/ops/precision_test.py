"""Operand precision reaches the program that is lowered, and does not outlive it."""

from __future__ import annotations

import pytest

from lingvo_moe.lazy import tf
from lingvo_moe.ops.precision import matmul_precision


def lowered() -> str:
    """The StableHLO of a matrix product and an einsum."""

    def function(a, b):
        return tf.matmul(a, b), tf.einsum("ab,cb->ac", a, b)

    spec = tf.TensorSpec((4, 4))
    return tf.function(function, jit_compile=True).experimental_get_compiler_ir(spec, spec)(stage="stablehlo")


@pytest.mark.parametrize(("precision", "stated"), [("default", "DEFAULT"), ("highest", "HIGHEST")])
def test_products_have_the_precision_of_the_block(precision, stated):
    with matmul_precision(precision):
        assert lowered().count(f"precision = [{stated}, {stated}]") == 2


def test_the_precision_before_is_set_again():
    """Also after an error, and inside another block."""
    with matmul_precision("highest"):
        with pytest.raises(ZeroDivisionError), matmul_precision("default"):
            raise ZeroDivisionError
        assert lowered().count("HIGHEST") == 4
    assert "HIGHEST" not in lowered()
