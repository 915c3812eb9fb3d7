"""Hugging Face's NllbMoe with the dimensions of a `Work`: a training step, or generation with beams.

The optimizer is the default of its Trainer, with fused updates. The loss is the cross-entropy alone.
"""

# Its packages are in an environment of its own: see environments.py.
# pyright: reportMissingImports=false

from __future__ import annotations

import sys

from tools.benchmarks import protocol


def start(work: dict) -> protocol.Started:
    """See `protocol.serve`."""
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(work["seed"])
    model = _model(work)
    batch = protocol.token_ids(work)
    tensors = {name: torch.tensor(ids) for name, ids in batch.items()}
    facts, run = (_training if work["kind"] == "train" else _decoding)(model, tensors, work)
    return {**_facts(model, batch), **facts}, run


def _model(work: dict):
    import transformers

    sizes = {
        "layers": work["layers"],
        "ffn_dim": work["hidden_dim"],
        "attention_heads": work["heads"],
        "layerdrop": 0.0,
        "sparse_step": 2,
    }
    by_side = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()}
    return transformers.NllbMoeForConditionalGeneration(
        transformers.NllbMoeConfig(
            vocab_size=work["vocabulary"],
            d_model=work["model_dim"],
            num_experts=work["experts"],
            expert_capacity=2 * work["rows"] * work["length"] // work["experts"],
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            moe_token_dropout=0.0,
            second_expert_policy="all",
            normalize_router_prob_before_dropping=True,
            moe_eval_capacity_token_fraction=-1,
            **by_side,
        )
    )


def _facts(model, batch: dict) -> dict:
    """Returns facts counted in the model itself, not copied from the work."""
    import torch
    import transformers

    sparse = _sparse_layers(model)
    layers = len(model.model.encoder.layers) + len(model.model.decoder.layers)
    return {
        "weights": sum(weight.numel() for weight in model.parameters()),
        "layers": layers,
        "expert_layers": len(sparse),
        "experts": len(sparse[0].experts),
        "capacity": sparse[0].router.expert_capacity,
        "tokens": sum(map(len, batch["source"])),
        "batch": protocol.digest(batch),
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }


def _sparse_layers(model) -> list:
    return [
        layer.ffn for stack in (model.model.encoder, model.model.decoder) for layer in stack.layers if layer.is_sparse
    ]


def _training(model, batch: dict, work: dict) -> protocol.Started:
    import torch

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    ones = torch.ones_like(batch["source"])

    def step() -> float:
        optimizer.zero_grad()
        loss = model(
            input_ids=batch["source"], attention_mask=ones, decoder_input_ids=batch["inputs"], labels=batch["labels"]
        ).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    with _RowsOfExperts(_sparse_layers(model)) as rows:
        first_loss = step()
    return {"first_loss": first_loss, "expert_rows": rows.total}, lambda times: [step() for _ in range(times)]


def _decoding(model, batch: dict, work: dict) -> protocol.Started:
    import torch

    model.eval()
    ones = torch.ones_like(batch["source"])

    def decode() -> int:
        with torch.no_grad():
            ids = model.generate(
                batch["source"],
                attention_mask=ones,
                num_beams=work["beam_size"],
                do_sample=False,
                min_new_tokens=work["max_length"],
                max_new_tokens=work["max_length"],
            )
        return ids.shape[0] * (ids.shape[1] - 1)  # without the token that starts the decoder

    def run(times: int) -> list[float]:
        for _ in range(times):
            decode()
        return []

    return {"decoded": decode(), "beams": work["beam_size"]}, run


class _RowsOfExperts:
    """Counts the rows that all experts compute while the context is open."""

    def __init__(self, sparse_layers: list):
        self._experts = [expert for layer in sparse_layers for expert in layer.experts.values()]
        self.total = 0

    def __enter__(self):
        self._hooks = [expert.register_forward_hook(self._count) for expert in self._experts]
        return self

    def __exit__(self, kind, value, traceback):
        for hook in self._hooks:
            hook.remove()

    def _count(self, expert, arguments, outputs):
        self.total += outputs.shape[0]


if __name__ == "__main__":
    protocol.serve(start, sys.argv[1:])
