"""Protects the weights of a deeper model: old layers keep their values and order, new ones are weak copies."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.training.deepening import deepen

_DENSE = {"attention/output": (2, 3), "attention/output_bias": (3,), "wi": (3, 4), "wi_bias": (4,), "wo": (4, 3)}
_MOE = {"attention/output": (2, 3), "wo": (2, 4, 3), "wo_bias": (2, 3)}


def _shapes(stack: str, pattern: list[dict], repeats: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{stack}/layer_{index}/{name}": (repeats, *shape)
        for index, layer in enumerate(pattern)
        for name, shape in layer.items()
    }


def _values(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Each repeat of each weight has a number of its own."""
    return {
        path: np.broadcast_to(
            np.arange(shape[0], dtype=np.float32).reshape(-1, *[1] * (len(shape) - 1)) + 10 * number + 1, shape
        ).copy()
        for number, (path, shape) in enumerate(sorted(shapes.items()))
    }


def test_new_layers_are_copies_whose_outputs_are_a_quarter():
    """Dense, MoE becomes dense, dense, MoE twice: the first dense and the first MoE are the old ones."""
    old = _values(_shapes("encoder", [_DENSE, _MOE], 1))
    new = deepen(old, _shapes("encoder", [_DENSE, _DENSE, _MOE], 2))
    for name in _DENSE:
        (value,) = old[f"encoder/layer_0/{name}"]
        copy = value if name.startswith("wi") else value / 4
        np.testing.assert_array_equal(new[f"encoder/layer_0/{name}"], [value, copy])
        np.testing.assert_array_equal(new[f"encoder/layer_1/{name}"], [copy, copy])
    for name in _MOE:
        (value,) = old[f"encoder/layer_1/{name}"]
        np.testing.assert_array_equal(new[f"encoder/layer_2/{name}"], [value, value / 4])


def test_repeats_become_layers_of_the_new_order():
    """Layers are matched in the order of computation, however they are stacked: d m d m to d d m d d m."""
    old = _values(_shapes("encoder", [_DENSE, _MOE], 2))
    new = deepen(old, _shapes("encoder", [_DENSE, _DENSE, _MOE], 2))
    first, second = old["encoder/layer_0/wi"]
    np.testing.assert_array_equal(new["encoder/layer_0/wi"], [first, second])
    np.testing.assert_array_equal(new["encoder/layer_1/wi"], [first, second])
    np.testing.assert_array_equal(new["encoder/layer_2/wo"], old["encoder/layer_1/wo"])


def test_a_new_layer_before_all_of_its_kind_copies_the_next():
    """There is none before it."""
    old = _values(_shapes("encoder", [_DENSE, _MOE], 1))
    new = deepen(old, _shapes("encoder", [_MOE, _DENSE, _MOE], 1))
    np.testing.assert_array_equal(new["encoder/layer_0/wo"] * 4, new["encoder/layer_2/wo"])


def test_the_rest_is_as_it_was():
    """Embeddings, norms of stacks, and stacks of the same depth."""
    shapes = _shapes("encoder", [_DENSE], 1) | _shapes("decoder", [_DENSE], 3)
    old = _values(shapes) | {"embedding/table": np.ones((5, 2), np.float32), "encoder/norm/scale": np.ones(3)}
    new = deepen(old, shapes)
    assert new.keys() == old.keys()
    for path in old:
        np.testing.assert_array_equal(new[path], old[path])


@pytest.mark.parametrize(
    ("pattern", "repeats", "message"),
    [
        ([_DENSE], 3, "the encoder has 3 layers, without a place for 1 of the 2 layers of the initial weights"),
        (
            [_DENSE, _DENSE | {"wi": (3, 5)}, _MOE],
            1,
            "layer 2 of the encoder has weights of other names or shapes than all 2 layers",
        ),
    ],
)
def test_other_layers_are_refused(pattern, repeats, message):
    """Instead of a model that forgets a layer, or that is random in part."""
    with pytest.raises(UserError, match=message):
        deepen(_values(_shapes("encoder", [_DENSE, _MOE], 1)), _shapes("encoder", pattern, repeats))
