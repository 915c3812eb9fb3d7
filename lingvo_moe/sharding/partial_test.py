"""Partial sums have the values of their products, communicate when they are reduced and not before, refuse misuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from lingvo_moe.errors import UserError
from lingvo_moe.lazy import tf
from lingvo_moe.sharding.layout import AxisRule, DeviceMesh, Layout
from lingvo_moe.sharding.partial import Partial, partial_sum, product, reduce
from lingvo_moe.testing import harness

# Of random signs, so that a term that is lost or counted twice shows. Rows B, contracted M, columns H.
RANDOM = np.random.default_rng(0)
LEFT, RIGHT = (RANDOM.normal(size=(16, 16)).astype(np.float32) for _ in range(2))
EQUATION = "BM,MH->BH"
# Sums of 16 products, in an order that depends on the devices; the terms of a partial factor are four times as large.
TOLERANCE = 64 * harness.FLOAT32_ROUNDING

# Which logical axis of a factor a state shards, by the factor's position; B (broadcast) and P (partial) shard none.
SHARDED = ({"S0": "B", "S1": "M"}, {"S0": "M", "S1": "H"})
STATES = ("S0", "S1", "B", "P")
# OneFlow's table of the legal matrix products, and of what their outputs are.
LEGAL = {
    ("S0", "B"): "S0",
    ("B", "S1"): "S1",
    ("S1", "S0"): "P",
    ("B", "B"): "B",
    ("P", "B"): "P",
    ("B", "P"): "P",
}
PAIRS = set(itertools.product(STATES, STATES))


def layout_of(*signatures: tuple[str, str], mesh: tuple[int, ...] = (8,)) -> Layout:
    """The layout in which one pair of states holds along each mesh axis, and partial factors have their terms there."""
    device_mesh, rules = DeviceMesh(mesh), []
    for axis, pair in zip(device_mesh.axis_names, signatures, strict=True):
        letters = {SHARDED[side][state] for side, state in enumerate(pair) if state in SHARDED[side]}
        letters |= {"U"} if "P" in pair or pair == ("S1", "S0") else set()
        # U is the first dimension of a tensor that has it, so it comes before what else the rule shards.
        rules += [AxisRule("".join(sorted(letters, reverse=True)), (axis,))] if letters else []
    return Layout(device_mesh, tuple(rules))


def terms_of(matrix: np.ndarray, count: int) -> np.ndarray:
    """Random terms of a sum, which is `matrix`."""
    terms = RANDOM.normal(size=(count, *matrix.shape)).astype(np.float32)
    terms[-1] = matrix - terms[:-1].sum(axis=0)
    return terms


def inputs_of(pairs: tuple[tuple[str, str], ...], layout: Layout) -> tuple[dict, dict]:
    """The factors, partial ones as their terms; and their logical axes."""
    inputs, axes = {"left": LEFT, "right": RIGHT}, {"left": "BM", "right": "MH", "y": "BH", "terms": "UBH"}
    for (mesh_axis, pair), (side, name) in itertools.product(
        zip(layout.mesh.axis_names, pairs), enumerate(("left", "right"))
    ):
        if pair[side] == "P":
            inputs[name] = terms_of(inputs[name], layout.mesh.axis_size(mesh_axis))
            axes[name] = "U" + axes[name]
    return inputs, axes


def multiply(pairs: tuple[tuple[str, str], ...], layout: Layout) -> Callable[[dict], tf.Tensor | Partial]:
    """The product of the factors in these states."""
    partial_axes = {
        side: axis for axis, pair in zip(layout.mesh.axis_names, pairs) for side in range(2) if pair[side] == "P"
    }

    def function(inputs: dict) -> tf.Tensor | Partial:
        factors = [inputs["left"], inputs["right"]]
        for side, axis in partial_axes.items():
            factors[side] = Partial(factors[side], EQUATION.partition("->")[0].split(",")[side], axis, layout)
        if partial_axes:
            return product(EQUATION, *factors)
        if ("S1", "S0") in pairs:
            return partial_sum(EQUATION, *factors, layout)
        return tf.einsum(EQUATION, *(layout.annotate(f, axes) for f, axes in zip(factors, ("BM", "MH"))))

    return function


def compile_product(pairs: tuple[tuple[str, str], ...], layout: Layout, complete: bool):
    """The product as the states leave it, or completed."""

    def function(inputs: dict) -> dict:
        result = multiply(pairs, layout)(inputs)
        if not isinstance(result, Partial):
            return {"y": layout.annotate(result, "BH")}
        return {"y": reduce(result)} if complete else {"terms": result.terms}

    inputs, axes = inputs_of(pairs, layout)
    return harness.compile_for(function, inputs, layout, axes), inputs


def check(pairs: tuple[tuple[str, str], ...], layout: Layout):
    """The product needs no communication, the sum of its terms one AllReduce, and its value is that of NumPy."""
    is_partial = "P" in [LEGAL[pair] for pair in pairs]
    unreduced, inputs = compile_product(pairs, layout, complete=False)
    assert harness.collectives(unreduced) == {}, "the product itself communicates"
    if is_partial:
        terms = unreduced(inputs)["terms"]
        np.testing.assert_allclose(np.sum(terms, axis=0), LEFT @ RIGHT, rtol=0, atol=TOLERANCE * 16)
        assert terms.addressable_shards[0].data.shape[0] == 1, "a device has more than its own term"
    completed, _ = compile_product(pairs, layout, complete=True)
    assert harness.collectives(completed) == ({"all-reduce": 1} if is_partial else {})
    np.testing.assert_allclose(completed(inputs)["y"], LEFT @ RIGHT, rtol=0, atol=TOLERANCE * 16)


@pytest.mark.parametrize("mesh", [2, 8])
@pytest.mark.parametrize("pair", LEGAL, ids="-".join)
def test_legal_products_of_oneflows_table(pair, mesh):
    """All six rows, with the collectives of each: none, and one AllReduce where a partial sum is completed."""
    check((pair,), layout_of(pair, mesh=(mesh,)))


@pytest.mark.parametrize("pair", sorted(PAIRS - set(LEGAL)), ids="-".join)
def test_all_other_products_communicate_or_are_refused(pair):
    """The table is complete: XLA moves a factor or a result for the others, and a partial factor is an error."""
    layout = layout_of(pair)
    if "P" not in pair:
        (inputs, axes), function = inputs_of((pair,), layout), multiply((pair,), layout)
        executable = harness.compile_for(lambda i: {"y": layout.annotate(function(i), "BH")}, inputs, layout, axes)
        assert sum(harness.collectives(executable).values()) >= 1
        return
    factors = [
        Partial(tf.zeros((8, 16, 16)), axes, "x", layout) if state == "P" else tf.zeros((16, 16))
        for state, axes in zip(pair, ("BM", "MH"))
    ]
    with pytest.raises(UserError, match="no linear product|is sharded along mesh axis x"):
        product(EQUATION, *factors)


# Along the two axes, different dimensions are sharded, or one sum is deferred along one axis alone.
COMBINED = [
    pairs
    for pairs in itertools.product(LEGAL, LEGAL)
    if [LEGAL[pair] for pair in pairs].count("P") < 2 and (pairs[0] != pairs[1] or pairs[0] == ("B", "B"))
]


@pytest.mark.parametrize("pairs", COMBINED, ids=lambda pairs: "_".join("-".join(pair) for pair in pairs))
def test_products_on_two_axes_are_products_of_the_table(pairs):
    """Two-dimensional signatures: along each mesh axis a row of the table; S0-B with B-S1 is SUMMA's local product."""
    check(pairs, layout_of(*pairs, mesh=(2, 2)))


def test_summa_gathers_rows_and_columns_of_blocks():
    """Both factors in blocks [S0, S1]: rows of blocks are gathered along y, columns along x, and nothing is summed.

    Van de Geijn and Watts 1997; the 2-D method that the article names. Each device keeps its block of the product.
    """
    layout = Layout(DeviceMesh((2, 2)), (AxisRule("BT", ("x",)), AxisRule("MH", ("y",))))
    annotate = layout.annotate

    def function(inputs: dict) -> dict:
        left, right = annotate(annotate(inputs["left"], "BM"), "Bm"), annotate(annotate(inputs["right"], "TH"), "tH")
        return {"y": annotate(tf.einsum("BM,MH->BH", left, right), "BH")}

    axes = {"left": "BM", "right": "TH", "y": "BH"}
    executable = harness.compile_for(function, {"left": LEFT, "right": RIGHT}, layout, axes)
    assert harness.collectives(executable) == {"all-gather": 2}
    found = executable({"left": LEFT, "right": RIGHT})["y"]
    assert found.addressable_shards[0].data.shape == (8, 8)
    np.testing.assert_allclose(found, LEFT @ RIGHT, rtol=0, atol=TOLERANCE * 16)


def test_a_dimension_split_along_two_axes_is_two_logical_axes():
    """OneFlow's [S0, S0]: rows over groups of devices, then within each group: four devices, four quarters."""
    layout = Layout(DeviceMesh((2, 2)), (AxisRule("G", ("x",)), AxisRule("S", ("y",))))
    value = np.arange(16, dtype=np.float32).reshape(8, 2)
    executable = harness.compile_for(
        lambda i: {"y": layout.annotate(tf.reshape(i["x"], (2, 4, 2)), "GSm")}, {"x": value}, layout, {"y": "GSm"}
    )
    shards = executable({"x": value})["y"].addressable_shards
    quarters = {shard.device.id: np.asarray(shard.data).reshape(2, 2) for shard in shards}
    for device in range(4):
        np.testing.assert_array_equal(quarters[device], value[2 * device : 2 * device + 2])


CONTRACTED = Layout(DeviceMesh((8,)), (AxisRule("M", ("x",)),))


def test_one_delayed_reduction_of_u_v_w():
    """Y = U V W: the partial product U V is multiplied by W, and Y alone is summed, which is smaller than U V."""
    narrow = RANDOM.normal(size=(16, 4)).astype(np.float32)
    inputs = {"u": LEFT, "v": RIGHT, "w": narrow}
    axes = {"u": "BM", "v": "MH"}

    def delayed(i: dict) -> dict:
        return {"y": reduce(product("BH,HD->BD", partial_sum(EQUATION, i["u"], i["v"], CONTRACTED), i["w"]))}

    def at_once(i: dict) -> dict:
        return {"y": tf.matmul(reduce(partial_sum(EQUATION, i["u"], i["v"], CONTRACTED)), i["w"])}

    for function, summed in ((delayed, "f32[16,4]"), (at_once, "f32[16,16]")):
        executable = harness.compile_for(function, inputs, CONTRACTED, axes)
        assert harness.collectives(executable) == {"all-reduce": 1}
        assert any(summed in line and " all-reduce(" in line for line in executable.hlo().splitlines())
        found = executable(inputs)["y"]
        np.testing.assert_allclose(found, LEFT @ RIGHT @ narrow, rtol=0, atol=TOLERANCE * 256)


def test_linear_operators_share_one_reduction_and_gradients_need_none():
    """Two products, added and scaled: one AllReduce of one tensor, and the gradient of a sum is a broadcast."""
    inputs = {"a": LEFT, "b": RIGHT, "c": LEFT[::-1].copy(), "d": RIGHT[::-1].copy(), "scale": np.float32(3.0)}

    def deferred(i: dict) -> dict:
        first = partial_sum(EQUATION, i["a"], i["b"], CONTRACTED)
        second = partial_sum(EQUATION, i["c"], i["d"], CONTRACTED)
        return {"y": reduce((+first - -second) * i["scale"] / 2.0 + 0.5 * second)}

    def complete(i: dict) -> dict:
        second = tf.matmul(i["c"], i["d"])
        return {"y": (tf.matmul(i["a"], i["b"]) + second) * i["scale"] / 2.0 + 0.5 * second}

    axes = {"a": "BM", "b": "MH", "c": "BM", "d": "MH"}
    assert harness.collectives(harness.compile_for(deferred, inputs, CONTRACTED, axes)) == {"all-reduce": 1}
    axes |= {f"gradients/{name}": letters for name, letters in axes.items()}
    inputs.pop("scale")
    executable = harness.compile_for(
        harness.with_gradients(lambda i: deferred({**i, "scale": 3.0})), inputs, CONTRACTED, axes
    )
    assert harness.collectives(executable) == {"all-reduce": 1}
    found = harness.arrays(executable(inputs))
    expected = harness.run(harness.with_gradients(lambda i: complete({**i, "scale": 3.0})), inputs)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=0, atol=TOLERANCE * np.abs(value).max(), err_msg=path)


@pytest.mark.parametrize("deferred, runs", [(True, 0), (False, 1)])
def test_microbatches_in_a_loop_are_reduced_once(deferred, runs):
    """Gradient accumulation: a loop carries the terms, and the sum over devices follows it."""
    layout = Layout(DeviceMesh((8,)), (AxisRule("B", ("x",)),))
    inputs = {"x": RANDOM.normal(size=(3, 16, 4)).astype(np.float32), "dy": RANDOM.normal(size=(3, 16, 8))}
    inputs["dy"] = inputs["dy"].astype(np.float32)

    def function(i: dict) -> dict:
        def gradient(k: tf.Tensor) -> Partial:
            return partial_sum("Bm,Bh->mh", i["x"][k], i["dy"][k], layout)

        def step(k: tf.Tensor, total: tf.Tensor):
            return k + 1, total + (gradient(k).terms if deferred else reduce(gradient(k)))

        start = tf.zeros((8, 4, 8) if deferred else (4, 8))
        _, total = tf.while_loop(lambda k, _: k < 3, step, (tf.constant(0), start), maximum_iterations=3)
        return {"y": reduce(Partial(total, "mh", "x", layout)) if deferred else total}

    executable = harness.compile_for(function, inputs, layout, {"x": "rBm", "dy": "rBh"})
    reductions = [line for line in executable.hlo().splitlines() if " all-reduce(" in line]
    assert len(reductions) == 1 and sum("while/" in line for line in reductions) == runs
    expected = np.einsum("rbm,rbh->mh", inputs["x"], inputs["dy"])
    np.testing.assert_allclose(executable(inputs)["y"], expected, rtol=0, atol=TOLERANCE * 16)


def test_a_layout_with_a_second_mesh_axis_for_a_dimension_defers_the_whole_sum():
    """By `gspmd`, M is sharded along y, or else along x: what is left of M must not be summed over x at once."""
    layout = Layout.of(DeviceMesh((2, 4)), "gspmd")
    assert layout.unreduced("y").mesh_axes("UTM") == ("y", None, None)
    inputs = {"left": LEFT, "right": RIGHT}

    def function(given: dict) -> dict:
        return {"y": reduce(partial_sum("TM,Mh->Th", given["left"], given["right"], layout))}

    executable = harness.compile_for(function, inputs, layout, {"left": "TM", "right": "Mh", "y": "Th"})
    assert harness.collectives(executable) == {"all-reduce": 1}
    np.testing.assert_allclose(executable(inputs)["y"], LEFT @ RIGHT, rtol=0, atol=TOLERANCE * 16)


NON_LINEAR = {
    "relu": tf.nn.relu,
    "softmax": tf.nn.softmax,
    "exp": tf.exp,
    "square": tf.square,
    "reduce_max": tf.reduce_max,
    "matmul": lambda p: tf.matmul(p, p),
    "einsum": lambda p: tf.einsum("BH,HM->BM", p, tf.zeros((16, 16))),
    "conversion": tf.convert_to_tensor,
    "complete + partial": lambda p: tf.zeros((16, 16)) + p,
    "complete - partial": lambda p: tf.zeros((16, 16)) - p,
    "maximum": lambda p: tf.maximum(tf.zeros((16, 16)), p),
    "abs": abs,
    "**": lambda p: p**2,
    "1 /": lambda p: 1 / p,
    "//": lambda p: p // 2,
    "1 //": lambda p: 1 // p,
    "%": lambda p: p % 2,
    "1 %": lambda p: 1 % p,
    ">": lambda p: p > 0,
    "==": lambda p: p == 0,
    "!=": lambda p: p != 0,
    "bool": bool,
    "NumPy's conversion": np.asarray,
    "slice": lambda p: p[0],
}


@pytest.mark.parametrize("name", NON_LINEAR)
@pytest.mark.parametrize("eager", [True, False])
def test_operators_that_may_not_be_linear_refuse_a_partial_sum(name, eager):
    """The error names the tensor, its mesh axis and the remedy; there is no silent reduction, and no wrong sum.

    In a graph TensorFlow reports it as its own ValueError, with the same text.
    """
    with tf.init_scope() if eager else tf.Graph().as_default():
        partial = partial_sum(EQUATION, tf.constant(LEFT), tf.constant(RIGHT), CONTRACTED)
        with pytest.raises(ValueError, match=r"partial sum BH \(16, 16\), unreduced along mesh axis x.*Call `reduce`"):
            NON_LINEAR[name](partial)


def _sum(equation: str = EQUATION, layout: Layout = CONTRACTED, rows: int = 16, contracted: int = 16) -> Partial:
    return partial_sum(equation, tf.zeros((rows, contracted)), tf.zeros((contracted, 16)), layout)


TWO_AXES = Layout(DeviceMesh((4, 2)), (AxisRule("BMH", ("x",)), AxisRule("T", ("y",))))
MISUSES = {
    "would count once for each term": lambda: _sum() + tf.zeros((16, 16)),
    "H and h are two logical axes": lambda: partial_sum(
        "BH,Hh->Bh", tf.zeros((8, 8)), tf.zeros((8, 4)), Layout(DeviceMesh((2,)), (AxisRule("H", ("x",)),))
    ),
    "is multiplied by the partial sum": lambda: _sum() * _sum(),
    "tensor of rank 2; write a `product`": lambda: _sum() * tf.zeros((16, 16)),
    "tensor of rank 1; write a `product`": lambda: [1.0, 2.0] * _sum(),
    "tensor of rank 3; write a `product`": lambda: np.ones((1, 16, 16)) * _sum(),
    "subtracted from a complete tensor": lambda: 1.0 - _sum(),
    "not sums of the same kind": lambda: _sum() + _sum(rows=8),
    "not sums of the same kind; `reduce` one": lambda: _sum() - _sum(rows=8),
    "shards 0 of the contracted axes; one must be. Use tf.einsum": lambda: _sum("BT,TH->BH"),
    "shards 2 of the contracted axes": lambda: partial_sum(
        "BMT,MTh->Bh",
        tf.zeros((4, 4, 4)),
        tf.zeros((4, 4, 4)),
        Layout(DeviceMesh((2, 2)), (AxisRule("M", ("x",)), AxisRule("T", ("y",)))),
    ),
    "M is sharded along None in BM and along x in MH": lambda: _sum(layout=TWO_AXES),
    "M is 12, which the 8 devices along mesh axis x do not divide": lambda: _sum(contracted=12),
    "cannot be parsed; expected the logical axes": lambda: _sum("BM,MH"),
    "without U": lambda: _sum("UM,MH->UH"),
    "one of the factors must be a partial sum. Use tf.einsum": lambda: product(
        EQUATION, tf.zeros((16, 16)), tf.zeros((16, 16))
    ),
    "have no linear product": lambda: product("BH,HM->BM", _sum(), _sum()),
    "has other logical axes than BT": lambda: product("BT,TH->BH", _sum(), tf.zeros((16, 16))),
    "the factor HM is sharded along mesh axis x": lambda: product("BH,HM->BM", _sum(), tf.zeros((16, 16))),
}


@pytest.mark.parametrize("message", MISUSES)
def test_misuse_is_an_error_with_a_remedy(message):
    """No misuse becomes a wrong value or a hidden communication."""
    with pytest.raises(UserError, match=message):
        MISUSES[message]()


def test_scaled_and_added_by_python_and_numpy():
    """A factor of NumPy is a number, too, and `sum` begins with 0."""
    of_one = _ones()
    for partial, factor in ((np.float32(2) * of_one, 2), (sum([of_one, of_one, of_one]), 3), (of_one / 2, 0.5)):
        np.testing.assert_array_equal(reduce(partial), np.full((16, 16), 16 * factor))


def _ones() -> Partial:
    return partial_sum(EQUATION, tf.ones((16, 16)), tf.ones((16, 16)), CONTRACTED)


def test_on_one_device_a_partial_sum_has_one_term():
    """The same program without a mesh, bit for bit."""
    layout = Layout(DeviceMesh((1,)), (AxisRule("M", ("x",)),))
    found = harness.run(lambda i: {"y": reduce(partial_sum(EQUATION, i["l"], i["r"], layout))}, {"l": LEFT, "r": RIGHT})
    expected = harness.run(lambda i: {"y": tf.matmul(i["l"], i["r"])}, {"l": LEFT, "r": RIGHT})
    np.testing.assert_array_equal(found["y"], expected["y"])
