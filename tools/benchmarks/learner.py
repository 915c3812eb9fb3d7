"""Our worker for `losses`: m4.Quickstart's recipe without experts, trained and evaluated on the batches of a file.

    XLA_FLAGS=--xla_cpu_multi_thread_eigen=false python -m tools.benchmarks.learner WORK

A request for a number of steps makes them and returns the loss of each, then the validation loss after them, in nats
per target token.
"""

from __future__ import annotations

import numpy as np

from lingvo_moe import experiment, overrides
from lingvo_moe.data.batching import Batch
from lingvo_moe.errors import UserError
from lingvo_moe.experiment import Experiment
from lingvo_moe.sharding.layout import DeviceMesh
from lingvo_moe.training.loss import total_loss
from tools.benchmarks import ours, protocol
from tools.benchmarks.batches import Batches, Rows
from tools.benchmarks.work import Learning

_MODEL = "m4.Quickstart"


def start(fields: dict) -> protocol.Started:
    """See `protocol.serve`."""
    from lingvo_moe.engines.pjrt import Engine

    work = Learning(**fields)
    own, data = experiment_of(work), Batches(work.batches)
    training = Engine(1, "cpu").training(own.steps, own.batch_specs())
    training.initialise(work.seed)
    left = map(of_model, data.of("train"))

    def held_out() -> float:
        tokens, nats = total_loss(training.evaluate, map(of_model, data.of("held_out")))
        return nats / tokens

    def run(times: int) -> list[float]:
        losses = [float(training.train([next(left)])["cross_entropy"]) for _ in range(times)]
        return [*losses, held_out()]

    facts = {
        "weights": own.model.num_weights(),
        "layers": own.model.num_layers,
        "batches": data.digest,
        "first_loss": held_out(),
        "versions": ours.versions(),
    }
    return facts, run


def experiment_of(work: Learning) -> Experiment:
    """Returns the recipe with the work's dimensions and number of steps.

    Raises:
      UserError: the work's `settings` do not fit it, or change what the peer has too.
    """
    lengths = {f"input.{name}": getattr(work, name) for name in ("source_length", "target_length")}
    given = {
        "input.batch_size": work.rows,
        **lengths,
        "platform": "cpu",
        "matmul_precision": "default",  # float32, as the peer
    }
    common = _common(work)
    assignments = [f"{path}={value}" for path, value in (common | given).items()]
    own = experiment.get(_MODEL, [*assignments, *work.settings], DeviceMesh())
    for path, value in overrides.fields(own):
        if path in common and value != common[path]:
            raise UserError(
                f"--set={path}={value}: the peer has {common[path]}, and both sides are equal in it; leave it out."
            )
    return own


def _common(work: Learning) -> dict[str, int | bool]:
    """Returns the fields that both sides have equal, whatever the `settings` are."""
    # `protocol.rate_factor`
    warmup = work.steps // 10
    rate = {
        "decay_after": work.steps,
        "warmup_steps": warmup,
        "cooldown_after": warmup,
        "cooldown_steps": (work.steps - warmup) * 9 // 10,
    }
    model = {
        "num_experts": 0,
        "num_layers": 2 * work.layers,
        "num_encoder_layers": 0,
        "model_dim": work.model_dim,
        "hidden_dim": work.hidden_dim,
        "num_heads": work.heads,
        "head_dim": work.head_dim,
        "source_vocabulary": work.vocabulary,
        "target_vocabulary": work.vocabulary,
        "sampled_softmax": 0,
    }
    parts = (("model.", model), ("input.", {"packing": False}), ("optimizer.learning_rate.", rate))
    return {f"{prefix}{name}": value for prefix, fields in parts for name, value in fields.items()}


def of_model(rows: Rows) -> Batch:
    """Returns a batch of a file as the input pipeline makes it: each row is one segment, from position 0 on."""

    def side(ids: np.ndarray) -> dict[str, np.ndarray]:
        present = (ids != 0).astype(np.int32)
        return {"ids": ids, "segment_ids": present, "positions": np.arange(ids.shape[1], dtype=np.int32) * present}

    return {"source": side(rows["source"]), "target": {**side(rows["inputs"]), "labels": rows["labels"]}}


if __name__ == "__main__":
    ours.main(start)
