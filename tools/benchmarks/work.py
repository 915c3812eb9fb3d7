"""The measured work in plain numbers, from which our worker and the peers' build the same model."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A training step, a beam search, one layer, or one matrix product.

    Attributes:
      kind: `train`, `decode`, `reorder` (a beam search that reorders its caches), `layer` or `product`.
      sides: 2 for an encoder-decoder, 1 for a language model.
      layers: of each side; every other one is an MoE layer.
      model_dim, hidden_dim, heads, head_dim, vocabulary: of the model; a product's matrices have `model_dim` rows.
      experts: E of each layer that has them.
      rows, length: of a batch, on each side.
      groups: G, of each side's tokens.
      capacity_factor: C = factor * N / (G E); None for a capacity of all tokens.
      beam_size, max_length: of the beam search, which always runs to max_length.
      matmul_precision: of our training step; a peer multiplies float32 whatever it is.
      mesh: of virtual devices of our worker, all on one core.
      times: repetitions in one measurement; its seconds are divided by them.
      seed: of batch and weights.
    """

    kind: str = "train"
    sides: int = 2
    layers: int = 4
    model_dim: int = 256
    hidden_dim: int = 1024
    heads: int = 4
    head_dim: int = 64
    vocabulary: int = 8000
    experts: int = 8
    rows: int = 8
    length: int = 64
    groups: int = 1
    capacity_factor: float | None = 2.0
    beam_size: int = 4
    max_length: int = 32
    matmul_precision: str = "default"
    mesh: str = "1"
    times: int = 1
    seed: int = 1

    @property
    def tokens(self) -> int:
        """N, of each side."""
        return self.rows * self.length

    @property
    def capacity(self) -> int:
        """C: the capacity of an expert for the tokens of a group."""
        of_group = self.tokens // self.groups
        if self.capacity_factor is None:
            return of_group
        return min(of_group, max(1, int(self.capacity_factor * of_group / self.experts)))


# 4 + 4 layers, 512 tokens on each side, one group.
TRANSLATION = Work()
LAYER = Work(kind="layer", times=5)
# Lingvo's UniTransformer with experts: 4 Transformer blocks, two of them MoE layers, 8 x 128 tokens.
LANGUAGE_MODEL = Work(sides=1, vocabulary=8192, length=128)
PRODUCT = Work(kind="product", model_dim=1024, times=20)


def wide_layer(experts: int) -> Work:
    """Returns a layer with more experts and tokens, as GShard scales: tokens and capacity per expert stay constant."""
    return dataclasses.replace(LAYER, experts=experts, rows=experts, groups=experts // 8, times=max(1, 40 // experts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learning:
    """The training of a dense encoder-decoder with tied embeddings, without dropout and label smoothing.

    Attributes:
      batches: the file of `batches.write` that it trains on, one batch a step, and is evaluated on.
      steps: of the whole training, which the learning rate follows; see `protocol.rate_factor`.
      rate: the peer's largest learning rate; 0 for ours, whose recipe has one.
      settings: further `field=value`s of our model.
      layers: of each side.
      model_dim, hidden_dim, heads, head_dim, vocabulary: of the model.
      rows, source_length, target_length: of a batch.
      seed: of the weights.
    """

    batches: str
    steps: int
    rate: float = 0.0
    settings: tuple[str, ...] = ()
    layers: int = 2
    model_dim: int = 256
    hidden_dim: int = 512
    heads: int = 4
    head_dim: int = 64
    vocabulary: int
    rows: int = 32
    source_length: int = 40
    target_length: int = 32
    seed: int = 1
