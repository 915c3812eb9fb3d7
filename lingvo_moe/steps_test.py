"""The state is created sharded and donated; a seed determines training, bit for bit on one mesh, else to rounding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest

from lingvo_moe import tree
from lingvo_moe.engines.pjrt import Executable
from lingvo_moe.errors import UserError
from lingvo_moe.layers.base import Context, Layer, Weight
from lingvo_moe.layers.embedding import Embedding, Softmax, cross_entropy
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.lazy import tf
from lingvo_moe.optimizers.adafactor import Adafactor
from lingvo_moe.optimizers.schedules import InverseSquareRoot
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.steps import Steps
from lingvo_moe.testing import harness

MESHES = ["1", "2", "4", "8", "4x2"]
VOCABULARY, BATCH, LENGTH = 16, 8, 4
OPTIMIZER = Adafactor(learning_rate=InverseSquareRoot(peak_value=0.1, decay_after=25))
BATCH_SPECS = {name: Spec((BATCH, LENGTH), "int32", "BT") for name in ("ids", "labels")}

# A loss of about 3 nats, a few sums of float32 products, and four Adafactor steps, which divide a gradient and its
# rounding error by its root mean square.
TRAINED_TOLERANCE = 1e-5
# The same with bfloat16 activations, which have 8 significant bits.
BFLOAT16_TOLERANCE = 8 * harness.BFLOAT16_ROUNDING


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneLayer(Layer):
    """The smallest model with everything a step has to handle: lookup, dropout, experts, projection."""

    hidden_dim: int = 16
    dtype: str = "float32"

    @property
    def _layers(self) -> dict:
        return {
            "embedding": Embedding(vocabulary=VOCABULARY, model_dim=8),
            "experts": MixtureOfExperts(model_dim=8, hidden_dim=self.hidden_dim, num_experts=8, num_groups=8),
            "softmax": Softmax(vocabulary=VOCABULARY, model_dim=8),
        }

    def weights(self) -> dict:
        return {name: layer.weights() for name, layer in self._layers.items()}

    def loss(self, theta: dict, batch: dict, context: Context) -> tuple[tf.Tensor, dict]:
        context = dataclasses.replace(context, dtype=self.dtype)
        positions, paddings = tf.zeros_like(batch["ids"]), tf.zeros(batch["ids"].shape, tf.bool)
        inputs = self._layers["embedding"](theta["embedding"], batch["ids"], positions, context)
        inputs = context.dropout(inputs, 0.1, "inputs", "BTM")
        outputs, metrics = self._layers["experts"](theta["experts"], inputs, paddings, context)
        nll, _ = cross_entropy(self._layers["softmax"](theta["softmax"], inputs + outputs, context), batch["labels"])
        nll = tf.reduce_mean(nll)
        # Without it, the gates of experts that no token chose have no gradient but rounding, which Adafactor magnifies.
        loss, tokens = nll + 0.01 * metrics["aux_loss"], tf.constant(float(BATCH * LENGTH))
        return loss, {"cross_entropy": nll, "tokens": tokens, "overflow": metrics["overflow"]}


def steps_of(mesh: str, **fields) -> Steps:
    return Steps(OneLayer(**fields), OPTIMIZER, Layout.of(DeviceMesh.parse(mesh)))


@functools.cache
def initialiser(mesh: str) -> Executable:
    return harness.engine(steps_of(mesh).layout).compile(steps_of(mesh).init())


@functools.cache
def trainer(mesh: str, dtype: str = "float32") -> Executable:
    steps = steps_of(mesh, dtype=dtype)
    return harness.engine(steps.layout).compile(steps.train(BATCH_SPECS))


def new_state(seed: int = 0, mesh: str = "8") -> dict:
    """Returns an initial state as numpy arrays, which any mesh takes."""
    return tree.map_leaves(np.asarray, initialiser(mesh)({"seed": np.array([0, seed], np.int32)})["state"])


def batch_of(step: int) -> dict:
    ids = np.random.default_rng(step).integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
    return {"ids": ids, "labels": (ids + 1) % VOCABULARY}


def train(executable: Executable, state: dict, steps: range) -> tuple[dict, list[dict[str, float]]]:
    """Returns the state as numpy arrays, and the metrics of each step."""
    history = []
    for step in steps:
        outputs = executable({"state": state, "batch": batch_of(step)})
        state = outputs["state"]
        history.append({name: float(value) for name, value in outputs["metrics"].items()})
    return tree.map_leaves(np.asarray, state), history


def assert_same_bits(one: dict, other: dict):
    one, other = tree.flatten(one), tree.flatten(other)
    assert one.keys() == other.keys()
    for path in one:
        assert one[path].tobytes() == other[path].tobytes(), path


def test_state_matches_its_specs():
    """Checkpoints and programs rely on the specs."""
    specs, state = tree.flatten(steps_of("8").state_specs()), tree.flatten(new_state())
    assert {path: (spec.shape, spec.dtype) for path, spec in specs.items()} == {
        path: (value.shape, value.dtype.name) for path, value in state.items()
    }
    assert state["step"] == 0 and state["seed"].tolist() == [0, 0]
    assert not any(value.any() for path, value in state.items() if path.startswith("optimizer_state/"))


@pytest.mark.slow
def test_state_is_created_sharded():
    """Each device holds its own expert and that expert's optimizer state; the gates and the table are replicated."""
    state = tree.flatten(initialiser("8")({"seed": np.array([0, 1], np.int32)})["state"])
    shards = {path: state[path].addressable_shards[0].data.shape for path in state}
    assert shards["theta/experts/wi"] == (1, 8, 16) and shards["theta/experts/wo"] == (1, 16, 8)
    assert shards["optimizer_state/experts/wi/row"] == (1, 8)
    assert shards["theta/experts/gate"] == (8, 8) and shards["theta/embedding/table"] == (VOCABULARY, 8)


@pytest.mark.slow
def test_no_device_holds_a_full_sharded_weight_during_initialisation():
    """Two weights of 8 x 8 x 4096 floats take 2 MiB over all devices; each device uses less than one of them takes."""
    steps = steps_of("8", hidden_dim=4096)
    memory = harness.engine(steps.layout).compile(steps.init()).memory()
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 8 * 8 * 4096 * 4


@pytest.mark.parametrize("mesh", ["1", "4x2"])
def test_initial_weights_are_the_same_bits_on_every_mesh(mesh):
    """Random numbers do not depend on the sharding."""
    assert_same_bits(new_state(1, mesh), new_state(1, "8"))


def test_another_seed_makes_other_weights():
    """Every weight depends on the seed."""
    one, other = tree.flatten(new_state(1)["theta"]), tree.flatten(new_state(2)["theta"])
    assert all((one[path] != other[path]).any() for path in one)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[1:])
def test_losses_do_not_depend_on_the_mesh(mesh):
    """With dropout, random routing and dropped tokens, over updated weights."""
    _, expected = train(trainer("1"), new_state(), range(4))
    assert max(metrics["overflow"] for metrics in expected) > 0
    _, history = train(trainer(mesh), new_state(), range(4))
    for one, many in zip(expected, history, strict=True):
        for name, value in one.items():
            np.testing.assert_allclose(many[name], value, rtol=TRAINED_TOLERANCE, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1", "8", "4x2"])
def test_two_runs_on_one_mesh_are_equal_bit_for_bit(mesh):
    """A step is deterministic."""
    assert_same_bits(train(trainer(mesh), new_state(), range(4))[0], train(trainer(mesh), new_state(), range(4))[0])


def test_resumed_run_equals_an_uninterrupted_one():
    """All randomness is a function of (seed, step), so the state is all that a run needs."""
    straight, _ = train(trainer("8"), new_state(), range(4))
    halfway, _ = train(trainer("8"), new_state(), range(2))
    assert halfway["step"] == 2
    assert_same_bits(train(trainer("8"), halfway, range(2, 4))[0], straight)


def test_random_numbers_depend_on_step_and_seed():
    """Weights and batch are the same; dropout alone differs."""
    state = new_state()
    losses = {
        float(trainer("8")({"state": dict(state, **changed), "batch": batch_of(0)})["metrics"]["loss"])
        for changed in ({}, {"step": np.int32(1)}, {"seed": np.array([0, 9], np.int32)})
    }
    assert len(losses) == 3


def test_state_is_donated():
    """The new state uses the memory of the old one, on each device."""
    state = initialiser("8")({"seed": np.array([0, 1], np.int32)})["state"]
    size = sum(leaf.addressable_shards[0].data.nbytes for leaf in tree.flatten(state).values())
    outputs = trainer("8")({"state": state, "batch": batch_of(0)})
    assert trainer("8").memory().alias_size_in_bytes >= size
    assert all(leaf.is_deleted() for leaf in tree.flatten(state).values())
    assert not any(leaf.is_deleted() for leaf in tree.flatten(outputs["state"]).values())


def test_metrics_are_those_of_the_model_and_of_the_step():
    """The training curves."""
    _, (metrics,) = train(trainer("1"), new_state(), range(1))
    assert metrics.keys() == {
        "cross_entropy",
        "tokens",
        "overflow",
        "loss",
        "gradient_norm",
        "learning_rate",
        "skipped",
        "skipped_in_a_row",
    }
    assert metrics["loss"] > metrics["cross_entropy"] and metrics["tokens"] == BATCH * LENGTH
    assert metrics["learning_rate"] == pytest.approx(0.1)


class Poisoned(OneLayer):
    """Its loss, or a gradient alone, is not finite if a batch begins with LOSS or GRADIENT."""

    LOSS, GRADIENT = VOCABULARY - 1, VOCABULARY - 2

    def loss(self, theta: dict, batch: dict, context: Context) -> tuple[tf.Tensor, dict]:
        loss, metrics = super().loss(theta, batch, context)
        first, weight = batch["ids"][0, 0], theta["softmax"]["projection"][0, 0]
        # The root of zero is zero, its slope infinite.
        steep = tf.sqrt(tf.where(first == self.GRADIENT, tf.square(weight - tf.stop_gradient(weight)), 1.0))
        return loss + tf.where(first == self.LOSS, np.inf, 0.0) + steep - tf.stop_gradient(steep), metrics


@pytest.mark.slow
@pytest.mark.parametrize("ema_decay", [0.0, 0.6])
def test_non_finite_step_is_counted_and_changes_no_weight(ema_decay):
    """Weights, their average and the optimizer state stay as they are, and the next step continues from them."""
    steps = Steps(Poisoned(), OPTIMIZER, Layout.of(DeviceMesh((2,))), ema_decay=ema_decay)
    engine = harness.engine(steps.layout)
    step, state = (
        engine.compile(steps.train(BATCH_SPECS)),
        engine.compile(steps.init())({"seed": np.array([0, 1], np.int32)})["state"],
    )
    counted = []
    for number, poison in enumerate([None, Poisoned.LOSS, Poisoned.GRADIENT, None, Poisoned.LOSS]):
        batch = batch_of(number)
        batch["ids"][0, 0] = 0 if poison is None else poison
        before = tree.map_leaves(
            np.asarray, {name: state[name] for name in ("theta", "ema_gap", "optimizer_state") if name in state}
        )
        outputs = step({"state": state, "batch": batch})
        state, metrics = outputs["state"], outputs["metrics"]
        same = [
            np.array_equal(old, np.asarray(new))
            for old, new in zip(
                tree.flatten(before).values(), tree.flatten({name: state[name] for name in before}).values()
            )
        ]
        assert all(same) == (poison is not None)
        assert np.isfinite(float(metrics["loss"])) == (poison != Poisoned.LOSS)
        assert np.isfinite(float(metrics["gradient_norm"])) == (poison != Poisoned.GRADIENT)
        counted.append((int(state["skipped"]), int(state["skipped_in_a_row"])))
        assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == counted[-1]
    assert counted == [(0, 0), (1, 1), (2, 2), (2, 0), (3, 1)] and int(state["step"]) == 5


def scalar(value: float = 1.0, dtype: str = "float32") -> tf.Tensor:
    return tf.constant(value, dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneWeight(Layer):
    """A model whose loss and metrics are `result`, of a weight's sum."""

    result: Callable = lambda total: (total, {"cross_entropy": total, "tokens": total})

    def weights(self) -> dict:
        return {"w": Weight((2,), "M")}

    def loss(self, theta: dict, batch: dict, context: Context):
        return self.result(tf.reduce_sum(theta["w"]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Momentum:
    """An optimizer whose update returns `result`, of the gradients."""

    learning_rate: Callable = lambda step: scalar()
    result: Callable = lambda gradients: (gradients, {"m": gradients})

    def state(self, weights: dict) -> dict:
        return {"m": tree.map_leaves(lambda weight: weight.zeros(), weights)}

    def update(self, weights, theta, gradients, optimizer_state, step, is_finite, context):
        return self.result(gradients)


@pytest.mark.parametrize(
    "loss, message",
    [
        (lambda total: total, r"loss returned a float32 scalar tensor; expected the pair \(loss, metrics\)"),
        (lambda total: (total[None], {}), r"loss is a float32 \[1\]; expected a float32 scalar tensor"),
        (lambda total: (total, {"v": total[None]}), r"loss: metric v is a float32 \[1\]; expected a float32 scalar"),
        (lambda total: (total, {"tokens": total}), "loss returned no metric cross_entropy, which reports need"),
        (lambda total: (total, {}), "loss returned no metric cross_entropy and no metric tokens, which reports need"),
    ],
)
def test_a_malformed_loss_is_an_error_before_anything_is_compiled(loss, message):
    """Some would fail only when training has ended."""
    for program in ("train", "evaluate"):
        with pytest.raises(UserError, match=f"^model OneWeight: {message}"):
            getattr(Steps(OneWeight(result=loss), Momentum(), Layout()), program)(BATCH_SPECS)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"result": lambda gradients: (gradients, {})},
            r"optimizer Momentum: update returned no m/w, which state declares \(float32 \[2\]\)",
        ),
        (
            {"result": lambda gradients: (gradients, {"m": {"w": tf.cast(gradients["w"], tf.bfloat16)}})},
            r"optimizer Momentum: update returned m/w as bfloat16 \[2\]; state declares it as float32 \[2\]",
        ),
        (
            {"result": lambda gradients: ({"w": scalar()}, {"m": gradients})},
            r"optimizer Momentum: update returned w as float32 scalar tensor; the model declares it as float32 \[2\]",
        ),
        ({"result": lambda gradients: gradients}, "optimizer Momentum: update returned a dict; expected the pair"),
        (
            {"result": lambda gradients: (gradients, None)},
            "optimizer Momentum: update: the returned optimizer_state is None; expected a dict",
        ),
        ({"learning_rate": lambda step: 0.1}, "learning rate function: the result of a call is a float; expected a"),
        ({"learning_rate": lambda step: step}, "learning rate function: the result of a call is an int32 scalar"),
    ],
)
def test_a_malformed_update_is_an_error_before_anything_is_compiled(fields, message):
    """A checkpoint without a part of the state could not be restored."""
    Steps(OneWeight(), Momentum(), Layout()).train(BATCH_SPECS)
    with pytest.raises(UserError, match=f"^{message}"):
        Steps(OneWeight(), Momentum(**fields), Layout()).train(BATCH_SPECS)


def averaging(mesh: str) -> Steps:
    return Steps(OneLayer(), OPTIMIZER, Layout.of(DeviceMesh.parse(mesh)), ema_decay=0.6)


def trained_weights(state: dict) -> dict[str, np.ndarray]:
    """Returns the weights, of which `theta` is the average, by path."""
    gaps = tree.flatten(state["ema_gap"])
    return {path: average + gaps[path] for path, average in tree.flatten(state["theta"]).items()}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1", "8"])
def test_theta_is_the_moving_average_of_the_weights_of_training_without_it(mesh):
    """`ema_decay` does not change what is trained; the oracle averages the other run's weights, in numpy."""
    steps = averaging(mesh)
    executable = harness.engine(steps.layout).compile(steps.train(BATCH_SPECS))
    plain, weights = new_state(), tree.flatten(new_state()["theta"])
    state, average = {**plain, "ema_gap": tree.map_leaves(np.zeros_like, plain["theta"])}, weights
    for step in range(16):  # the decay reaches 0.6 at the 14th
        plain, _ = train(trainer(mesh), plain, range(step, step + 1))
        state, _ = train(executable, state, range(step, step + 1))
        weights, decay = tree.flatten(plain["theta"]), min(0.6, (1 + step) / (10 + step))
        average = {path: decay * average[path] + (1 - decay) * weights[path] for path in weights}
        for path, value in tree.flatten(state["theta"]).items():
            np.testing.assert_allclose(value, average[path], atol=TRAINED_TOLERANCE, err_msg=path)
            np.testing.assert_allclose(
                trained_weights(state)[path], weights[path], atol=TRAINED_TOLERANCE, err_msg=path
            )


@pytest.mark.slow
def test_average_starts_with_the_initial_weights():
    """So weights that are loaded into `theta` are those that training goes on with."""
    steps = averaging("8")
    state = harness.engine(steps.layout).compile(steps.init())({"seed": np.array([0, 0], np.int32)})["state"]
    assert tree.flatten(state).keys() == tree.flatten(steps.state_specs()).keys()
    assert_same_bits(tree.map_leaves(np.asarray, state["theta"]), new_state()["theta"])
    assert not any(np.asarray(gap).any() for gap in tree.flatten(state["ema_gap"]).values())


@pytest.mark.slow
def test_gradient_norm_is_that_of_all_gradients():
    """The curve shows the global norm."""

    def function(inputs: dict) -> dict:
        return {"loss": OneLayer().loss(inputs["theta"], inputs, Context())[0]}

    batch, layout = batch_of(0), Layout()
    steps = dataclasses.replace(steps_of("1"), model=Deterministic())
    executable = harness.engine(layout).compile(steps.train(BATCH_SPECS))
    metrics = executable({"state": new_state(), "batch": batch})["metrics"]
    gradients = harness.run(harness.with_gradients(function), {"theta": new_state()["theta"], **batch})
    norm = np.sqrt(
        sum((value.astype(np.float64) ** 2).sum() for path, value in gradients.items() if "gradients" in path)
    )
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=TRAINED_TOLERANCE)


class Descent:
    """Gradient descent without a state."""

    def learning_rate(self, step: tf.Tensor) -> tf.Tensor:
        return tf.constant(0.5)

    def state(self, weights: dict) -> dict:
        return {}

    def update(self, weights, theta, gradients, optimizer_state, step, is_finite, context) -> tuple[dict, dict]:
        return tree.map_leaves(lambda weight, gradient: weight - 0.5 * gradient, theta, gradients), optimizer_state


def test_an_optimizer_may_have_no_state():
    """Its training state has no entry for that, as no empty tree has; it learns."""
    steps = dataclasses.replace(steps_of("1"), optimizer=Descent())
    outputs, losses = steps.init_function({"seed": tf.constant([0, 1])}), []
    for _ in range(2):
        state = tree.unflatten(tree.flatten(outputs["state"]))  # as an engine passes it on
        batch = tree.map_leaves(tf.constant, batch_of(0))
        outputs = steps.train_function(BATCH_SPECS)({"state": state, "batch": batch})
        losses.append(float(outputs["metrics"]["loss"]))
    assert tree.flatten(outputs["state"]).keys() == tree.flatten(steps.state_specs()).keys()
    assert losses[1] < losses[0]


class Deterministic(OneLayer):
    """Uses no random numbers."""

    def loss(self, theta: dict, batch: dict, context: Context) -> tuple[tf.Tensor, dict]:
        return super().loss(theta, batch, dataclasses.replace(context, seed=None))


@pytest.mark.slow
def test_evaluation_is_deterministic_and_does_not_depend_on_the_mesh():
    """Evaluation uses no random numbers."""
    metrics = {}
    for mesh in ("1", "8"):
        steps = steps_of(mesh)
        executable = harness.engine(steps.layout).compile(steps.evaluate(BATCH_SPECS))
        inputs = {"theta": new_state()["theta"], "batch": batch_of(0)}
        metrics[mesh] = harness.arrays(executable(inputs)["metrics"])
        assert_same_bits(metrics[mesh], harness.arrays(executable(inputs)["metrics"]))
    assert metrics["1"].keys() == {"cross_entropy", "tokens", "overflow"}
    np.testing.assert_allclose(metrics["8"]["cross_entropy"], metrics["1"]["cross_entropy"], rtol=TRAINED_TOLERANCE)


@pytest.mark.slow
def test_bfloat16_activations_train_nearly_alike_with_float32_weights():
    """Activations may be bfloat16; weights stay float32."""
    state, bfloat16 = train(trainer("4x2", "bfloat16"), new_state(), range(4))
    _, float32 = train(trainer("4x2"), new_state(), range(4))
    np.testing.assert_allclose([m["loss"] for m in bfloat16], [m["loss"] for m in float32], rtol=BFLOAT16_TOLERANCE)
    assert {value.dtype.name for value in tree.flatten(state["theta"]).values()} == {"float32"}


def test_training_learns():
    """The loss of predicting each token's successor falls from a uniform guess, ln 16, to less than half."""
    _, history = train(trainer("8"), new_state(), range(30))
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert jax.tree.all(jax.tree.map(np.isfinite, history))
