"""Hugging Face's Marian from random weights, trained and evaluated on the batches of a file.

The architecture is that of the published Marian models (post-norm, swish, biases, scaled embeddings, sinusoids), with
the dimensions of a `Learning`. The optimizer is Adam as in Vaswani et al. 2017, section 5.3; gradients are clipped to a
norm of 1, the default of the Trainer. See `learner` for requests and answers.
"""

# Its packages are in an environment of its own: see environments.py.
# pyright: reportMissingImports=false

from __future__ import annotations

import sys

from tools.benchmarks import protocol
from tools.benchmarks.batches import Batches, Rows

_IGNORED = -100  # the label that its loss leaves out
_LARGEST_NORM = 1.0


def start(work: dict) -> protocol.Started:
    """See `protocol.serve`."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(work["seed"])
    data = Batches(work["batches"])
    model = _model(work, data.longest)
    step, left = _step_of(model, work), data.of("train")

    def run(times: int) -> list[float]:
        return [*(step(next(left)) for _ in range(times)), _held_out(model, data)]

    facts = {
        "weights": sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        "layers": len(model.model.encoder.layers) + len(model.model.decoder.layers),
        "batches": data.digest,
        "first_loss": _held_out(model, data),
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    return facts, run


def _model(work: dict, longest: int):
    import transformers

    sizes = {"layers": work["layers"], "ffn_dim": work["hidden_dim"], "attention_heads": work["heads"]}
    by_side = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()}
    return transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=work["vocabulary"],
            d_model=work["model_dim"],
            max_position_embeddings=longest,
            activation_function="swish",
            scale_embedding=True,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
            use_cache=False,
            **by_side,
        )
    )


def _step_of(model, work: dict):
    """Returns a function that makes the next training step and returns the loss before it."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=work["rate"], betas=(0.9, 0.98), eps=1e-9, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: protocol.rate_factor(step, work["steps"]))

    def step(rows: Rows) -> float:
        model.train()
        optimizer.zero_grad()
        loss = _loss(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _LARGEST_NORM)
        optimizer.step()
        schedule.step()
        return loss.item()

    return step


def _held_out(model, data: Batches) -> float:
    import torch

    model.eval()
    counts = data.target_tokens("held_out")
    with torch.no_grad():
        nats = [count * _loss(model, rows).item() for count, rows in zip(counts, data.of("held_out"))]
    return sum(nats) / sum(counts)


def _loss(model, rows: Rows):
    """Returns the mean cross-entropy of the labels that are not padding, in nats."""
    import torch

    source, inputs, labels = (torch.tensor(rows[name]).long() for name in ("source", "inputs", "labels"))
    present = source.ne(0).any(1)  # the last held-out batch has empty rows
    source, inputs, labels = source[present], inputs[present], labels[present]
    return model(
        input_ids=source,
        attention_mask=source.ne(0).long(),
        decoder_input_ids=inputs,
        labels=labels.masked_fill(labels.eq(0), _IGNORED),
    ).loss


if __name__ == "__main__":
    protocol.serve(start, sys.argv[1:])
