"""What is measured: a piece of work in plain numbers, which our worker and the peers' make the same thing of."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A training step, a decoding, one layer, or one product of matrices.

    Attributes:
      kind: `train`, `decode`, `reorder` (a decoding that moves its caches), `layer` or `product`.
      sides: 2 for an encoder-decoder, 1 for a language model.
      layers: of each side; every other one has experts.
      model_dim, hidden_dim, heads, head_dim, vocabulary: of the model; a product's matrices have `model_dim` rows.
      experts: E of each layer that has them.
      rows, length: of a batch, on each side.
      groups: G, of each side's tokens.
      capacity_factor: C = factor * N / (G E); None for room for all.
      beam_size, max_length: of decoding, which goes on to the end whatever it finds.
      mesh: of virtual devices of our worker, all on one core.
      times: the work is done so often in one measurement; its seconds are divided by it.
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
    mesh: str = "1"
    times: int = 1
    seed: int = 1

    @property
    def tokens(self) -> int:
        """N, of each side."""
        return self.rows * self.length

    @property
    def capacity(self) -> int:
        """C: the tokens of a group that an expert has room for."""
        of_group = self.tokens // self.groups
        return of_group if self.capacity_factor is None else max(1, int(self.capacity_factor * of_group / self.experts))


# A of shared notes and README alike: 4 + 4 layers, 512 tokens on each side, one group.
TRANSLATION = Work()
LAYER = Work(kind="layer", times=5)
# Lingvo's UniTransformer with experts: 4 blocks, two of them with experts, 8 x 128 tokens.
LANGUAGE_MODEL = Work(sides=1, vocabulary=8192, length=128)
PRODUCT = Work(kind="product", model_dim=1024, times=20)


def wide_layer(experts: int) -> Work:
    """A layer of more experts with more tokens, as GShard scales: each expert's share, and each token's capacity, stay."""
    return dataclasses.replace(LAYER, experts=experts, rows=experts, groups=experts // 8, times=max(1, 40 // experts))
