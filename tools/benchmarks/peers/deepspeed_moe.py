"""One layer of DeepSpeed's MoE, forward and backward, in a group of one process."""

# Its packages are in an environment of its own: see environments.py.
# pyright: reportMissingImports=false

from __future__ import annotations

import atexit
import os
import pathlib
import sys
import tempfile

from tools.benchmarks import protocol


def start(work: dict) -> protocol.Started:
    """See `protocol.serve`."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(work["seed"])
    _init_process_group(torch)
    layer = _layer(work)
    values = protocol.numbers(work)
    inputs = torch.tensor(values).reshape(work["rows"], work["length"], work["model_dim"]).requires_grad_()
    weights = list(layer.parameters())

    def step() -> float:
        for tensor in (inputs, *weights):
            tensor.grad = None
        outputs, aux_loss, _ = layer(inputs)
        loss = outputs.square().mean() + aux_loss
        loss.backward()
        return loss.item()

    first_loss = step()
    dispatched = layer.deepspeed_moe
    tokens = inputs.shape[0] * inputs.shape[1]
    facts = {
        "weights": sum(w.numel() for w in weights),
        "experts": layer.num_experts,
        "tokens": tokens,
        "capacity": _capacity(dispatched.gate, tokens),
        "batch": protocol.digest(values[:1000]),
        "first_loss": first_loss,
        "versions": {"deepspeed": deepspeed.__version__, "torch": torch.__version__},
    }
    return facts, lambda times: [step() for _ in range(times)]


def _init_process_group(torch):
    """Makes the process group of one process that DeepSpeed's layer needs."""
    import deepspeed

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    store = pathlib.Path(directory.name, "store")
    deepspeed.init_distributed(
        dist_backend="gloo", auto_mpi_discovery=False, init_method=f"file://{store}", rank=0, world_size=1
    )


def _layer(work: dict):
    from deepspeed.moe.layer import MoE
    from torch import nn

    model_dim, hidden_dim = work["model_dim"], work["hidden_dim"]
    expert = nn.Sequential(nn.Linear(model_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, model_dim))
    # DeepSpeed doubles the capacity factor for k = 2.
    layer = MoE(
        hidden_size=model_dim,
        expert=expert,
        num_experts=work["experts"],
        k=2,
        capacity_factor=work["capacity_factor"] / 2,
        min_capacity=1,
    )
    layer.set_deepspeed_parallelism()
    # DeepSpeed makes all experts equal; after a step each has weights of its own.
    for module in layer.deepspeed_moe.experts.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    layer.train()
    return layer


def _capacity(gate, tokens: int) -> int:
    """Returns the capacity of each expert by the gate's own function."""
    import torch
    from deepspeed.moe.sharded_moe import top2gating

    _, combine, _, _ = top2gating(torch.zeros(tokens, gate.wg.weight.shape[0]), gate.capacity_factor, gate.min_capacity)
    return combine.shape[-1]


if __name__ == "__main__":
    protocol.serve(start, sys.argv[1:])
