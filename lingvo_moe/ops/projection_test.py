"""The products of activations and weights that are made for a CPU equal the plain einsums, in value and gradient."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.lazy import tf
from lingvo_moe.ops.context import Context
from lingvo_moe.ops.projection import FEW_ROWS, project, project_by_expert
from lingvo_moe.testing import harness


@pytest.mark.parametrize(
    "inputs, weight, contracted", [((2, 3, 4), (4, 5), 1), ((2, 3, 4), (4, 2, 3), 1), ((2, 3, 2, 4), (2, 4, 5), 2)]
)
def test_project_for_a_cpu_equals_the_einsum(inputs, weight, contracted):
    """In value and gradient, with one or two contracted dimensions and with heads as outputs."""
    check_platforms(
        lambda given, context: project(given["inputs"], given["weight"], context, contracted), inputs, weight
    )


@pytest.mark.parametrize(
    "groups, capacity, fan_in, outputs",
    [
        (2, 4, 5, 6),
        (2, 16, 24, 40),
        (1, 7, 16, 9),
        (1, 1, 8, 8),
        (3, 16, 8, 24),
        (1, FEW_ROWS, 8, 8),
        (1, FEW_ROWS + 1, 8, 8),
    ],
)
def test_project_by_expert_for_a_cpu_equals_the_einsum(groups, capacity, fan_in, outputs):
    """In value and gradient, for few rows and many, with sides that tiles divide and sides that they do not."""
    check_platforms(
        lambda given, context: project_by_expert(given["inputs"], given["weight"], context),
        (3, groups, capacity, fan_in),
        (3, fan_in, outputs),
    )


def check_platforms(product, inputs: tuple[int, ...], weight: tuple[int, ...]):
    random = np.random.default_rng(0)
    given = {"inputs": tf.constant(random.normal(size=inputs)), "weight": tf.constant(random.normal(size=weight))}
    plain, of_cpu = (
        harness.arrays(
            harness.with_gradients(
                lambda given, context=Context(platform=platform, dtype="float64"): {"outputs": product(given, context)}
            )(given)
        )
        for platform in ("", "cpu")
    )
    for path, value in plain.items():
        np.testing.assert_allclose(of_cpu[path], value, rtol=0, atol=1e-13, err_msg=path)
