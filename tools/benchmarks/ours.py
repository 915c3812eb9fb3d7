"""Our worker: a registered model's programs, one layer, or one matrix product, on the PJRT engine and one core.

XLA_FLAGS=--xla_cpu_multi_thread_eigen=false python -m tools.benchmarks.ours WORK
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable

import numpy as np

from lingvo_moe import experiment, program_cache, tree
from lingvo_moe.analysis import flops
from lingvo_moe.cli import process_setup
from lingvo_moe.experiment import Experiment
from lingvo_moe.layers.base import Context, initial_value
from lingvo_moe.layers.mixture_of_experts import MixtureOfExperts
from lingvo_moe.lazy import tf
from lingvo_moe.models.transformer import Transformer
from lingvo_moe.program import lower
from lingvo_moe.sharding.layout import DeviceMesh, Layout, Spec
from lingvo_moe.steps import Steps, weight_specs
from lingvo_moe.utils import allocator
from tools.benchmarks import protocol, reordering
from tools.benchmarks.work import Work

_MODELS = {2: "m4.Quickstart", 1: "sparse_lm.Small"}
_FORBIDDEN = tuple(range(4))  # forbidden, with the end of sentence: so a search runs to its maximum length


def start(fields: dict) -> protocol.Started:
    """See `protocol.serve`."""
    work = Work(**fields)
    facts, run = {"train": _training, "decode": _decoding, "reorder": _decoding, "layer": _layer, "product": _product}[
        work.kind
    ](work)
    return {**facts, "versions": versions()}, run


def experiment_of(work: Work) -> Experiment:
    """Returns the registered model with the work's dimensions; only the choice of the second expert is random."""
    model = {
        "num_layers": work.sides * work.layers,
        "target_vocabulary": work.vocabulary,
        "model_dim": work.model_dim,
        "hidden_dim": work.hidden_dim,
        "num_heads": work.heads,
        "head_dim": work.head_dim,
        "num_experts": work.experts,
        "num_groups": work.groups,
        "capacity_factor": work.capacity_factor or 2.0,  # without a limit, which is for inference, it is not used
        "aux_loss_weight": 0.01 * work.experts**2,
        "input_dropout": 0.0,
        "residual_dropout": 0.0,
        "attention_dropout": 0.0,
        "label_smoothing": 0.0,
        "sampled_softmax": 0,
        "remat": "none",
        "unroll": True,
        "tied_embeddings": False,
        "twin_keys": False,
    }
    if work.sides == 2:
        model |= {"source_vocabulary": work.vocabulary, "word_dropout": 0.0}
    lengths = {"batch_size": work.rows, "source_length": work.length * (work.sides - 1), "target_length": work.length}
    rate = {"warmup_steps": 0, "cooldown_steps": 0, "peak_value": 0.05, "decay_after": 400}
    others = {
        "search.beam_size": work.beam_size,
        "search.max_length": work.max_length,
        "decoding_batch": work.rows,
        "search.forbidden_ids": ",".join(map(str, _FORBIDDEN)),
        "optimizer.beta1": 0.0,
        "platform": "cpu",
        "layout": "auto",
        "matmul_precision": work.matmul_precision,
    }
    parts = (("model.", model), ("input.", lengths), ("optimizer.learning_rate.", rate), ("", others))
    assignments = [f"{prefix}{name}={value}" for prefix, fields in parts for name, value in fields.items()]
    return experiment.get(_MODELS[work.sides], assignments, DeviceMesh.parse(work.mesh))


def batch_of(work: Work) -> dict:
    """Returns `protocol.token_ids` as a model's batch without padding, a segment per row."""
    ids = protocol.token_ids(vars(work))
    arrays = {name: np.array(rows, np.int32) for name, rows in ids.items()}
    shape = arrays["inputs"].shape
    rest = {
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
    }
    target = {"ids": arrays["inputs"], "labels": arrays["labels"], **rest}
    return {"target": target} if work.sides == 1 else {"source": {"ids": arrays["source"], **rest}, "target": target}


class Trainer:
    """A model that is trained on the work's batch.

    Attributes:
      executable: the training step.
    """

    def __init__(self, work: Work):
        from lingvo_moe.engines.pjrt import Engine

        own = experiment_of(work)
        engine = Engine(own.mesh.size, "cpu")
        self._batch = batch_of(work)
        self.executable = engine.compile(own.steps.train(own.batch_specs()))
        self._state = engine.compile(own.steps.init())({"seed": np.array([0, work.seed], np.int32)})["state"]

    def step(self) -> float:
        """Makes a step; returns the cross-entropy before it."""
        outputs = self.executable({"state": self._state, "batch": self._batch})
        self._state = outputs["state"]
        return float(outputs["metrics"]["cross_entropy"])


def _training(work: Work) -> protocol.Started:
    trainer, own = Trainer(work), experiment_of(work)
    return {**_facts(own, work), "first_loss": trainer.step()}, lambda times: [trainer.step() for _ in range(times)]


def _decoding(work: Work) -> protocol.Started:
    from lingvo_moe.engines.pjrt import Decoding, Engine

    own, engine, source = experiment_of(work), Engine(1, "cpu"), batch_of(work)["source"]
    decode = reordering.decode if work.kind == "reorder" else Steps.decode_prepared
    program = decode(own.steps, {name: own.batch_specs()["source"][name] for name in source}, own.search)
    decoding = Decoding(engine.compile(program), engine.compile(own.steps.prepare_decoding()))
    decoding.load(engine.compile(own.steps.init())({"seed": np.array([0, work.seed], np.int32)})["state"]["theta"])

    def search() -> int:
        return int(np.asarray(decoding.decode(source)["lengths"])[:, 0].sum())

    def run(times: int) -> list[float]:
        for _ in range(times):
            search()
        return []

    return {**_facts(own, work), "decoded": search(), "beams": own.search.beam_size}, run


def _layer(work: Work) -> protocol.Started:
    import jax

    from lingvo_moe.engines.pjrt import Engine

    layer = MixtureOfExperts(
        model_dim=work.model_dim,
        hidden_dim=work.hidden_dim,
        num_experts=work.experts,
        num_groups=work.groups,
        capacity_factor=work.capacity_factor,
    )
    specs = {
        "theta": weight_specs(layer.weights()),
        "seed": Spec((2,), "int32", "s"),
        "inputs": Spec((work.rows, work.length, work.model_dim), "float32", "btm"),
    }
    logical_axes = {f"gradients/{path}": spec.logical_axes for path, spec in tree.flatten(specs).items()}
    executable = Engine(1, "cpu").compile(
        lower("layer", _differentiated(layer), {"given": specs}, logical_axes, Layout())
    )
    values, seed = protocol.numbers(vars(work)), np.array([0, work.seed], np.int32)
    theta = {name: initial_value(weight, name, tf.constant(seed)).numpy() for name, weight in layer.weights().items()}
    given = {"theta": theta, "seed": seed, "inputs": np.reshape(np.array(values, np.float32), specs["inputs"].shape)}
    placed = jax.device_put(given, executable.shardings("given"))

    def step() -> float:
        return float(executable({"given": placed})["loss"])

    facts = {
        "weights": layer.num_weights(),
        "experts": theta["gate"].shape[-1],
        "tokens": math.prod(given["inputs"].shape[:2]),
        "capacity": _capacity(layer, work.tokens, work),
        "batch": protocol.digest(values[:1000]),
        "first_loss": step(),
    }
    return facts, lambda times: [step() for _ in range(times)]


def _differentiated(layer: MixtureOfExperts) -> Callable[[dict], dict]:
    """Returns `{given: {theta, inputs, seed}} -> {loss, gradients}` of a loss that depends on every output."""

    def function(inputs: dict) -> dict:
        given = inputs["given"]
        leaves = tree.flatten({"theta": given["theta"], "inputs": given["inputs"]})
        with tf.GradientTape() as tape:
            tape.watch(list(leaves.values()))
            outputs, metrics = layer(
                given["theta"],
                given["inputs"],
                tf.zeros(given["inputs"].shape[:2], tf.bool),
                Context(seed=given["seed"], platform="cpu"),
            )
            loss = tf.reduce_mean(tf.square(outputs)) + metrics["aux_loss"]
        gradients = tape.gradient(loss, list(leaves.values()))
        return {"loss": loss, "gradients": tree.unflatten(dict(zip(leaves, gradients)))}

    return function


def _product(work: Work) -> protocol.Started:
    """The product of two square matrices: the peak of one core in the same runtime."""
    import jax

    size = work.model_dim
    factors = np.random.default_rng(work.seed).normal(size=(2, size, size)).astype(np.float32)
    left, right = (jax.device_put(factor) for factor in factors)
    multiply = jax.jit(jax.numpy.matmul)
    multiply(left, right).block_until_ready()

    def run(times: int) -> list[float]:
        for _ in range(times):
            multiply(left, right).block_until_ready()
        return []

    return {"flop": 2.0 * size**3}, run


def _facts(own: Experiment, work: Work) -> dict:
    """Returns facts of the model, its layers and weights, not copied from the work."""
    weights = tree.flatten(own.model.weights())
    layers = sum(weight.shape[0] for path, weight in weights.items() if path.endswith("self_attention/query"))
    gates = [weight for path, weight in weights.items() if path.endswith("/gate")]
    expert_layers, experts = sum(gate.shape[0] for gate in gates), gates[0].shape[-1]
    tokens = own.input.batch_size * own.input.lengths["target"]
    assert isinstance(own.model, Transformer), "the work is a language model's or a translation's"
    layer = own.model.feed_forwards("decoder")[-1]
    assert isinstance(layer, MixtureOfExperts), "every other layer is one, the last too"
    capacity, buffers = _capacity(layer, tokens, work), expert_layers * own.model.num_groups * experts
    # Without a capacity limit only rows that hold a token are computed; their number is not known before the run.
    rows = {} if work.capacity_factor is None else {"expert_rows": buffers * capacity}
    return {
        "weights": own.model.num_weights(),
        "layers": layers,
        "expert_layers": expert_layers,
        "experts": experts,
        "capacity": capacity,
        "tokens": tokens,
        **rows,
        "batch": protocol.digest(protocol.token_ids(vars(work))),
        "flop": flops.training_step(own.model, own.input),
    }


def _capacity(layer: MixtureOfExperts, tokens: int, work: Work) -> int:
    """Returns the capacity of an expert for a group of tokens, by the layer's own rule."""
    factor = layer.inference_capacity_factor if work.capacity_factor is None else layer.capacity_factor
    return layer.make_router().capacity(tokens // layer.num_groups, layer.num_experts, factor)


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that our workers use, by name."""
    import jax

    return {"jax": jax.__version__, "tensorflow": tf.__version__}


def main(started: Callable[[dict], protocol.Started]):
    """Serves the work of this process's arguments, with the settings that our commands have."""
    process_setup.set_up_process()
    allocator.keep_freed_memory()
    program_cache.use(os.environ.get("LINGVO_MOE_CACHE", program_cache.OFF))
    protocol.serve(started, sys.argv[1:])


if __name__ == "__main__":
    main(start)
