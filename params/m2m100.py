"""M2M-100: public translators of 100 languages, in all directions (Fan et al. 2020, arXiv 2010.11125).

Their weights are imported, see docs/imported_models.md. Dimensions are those of the published configurations; the other
settings are those of `params.nllb`.
"""

from __future__ import annotations

from lingvo_moe import registry
from params.nllb import Imported


class M2m100(Imported):
    """What both have in common."""

    vocabulary = 128_112


@registry.register
class Dense418M(M2m100):
    """M2M-100-418M: 0.5B weights, as each stack has 12 layers and the table 128,112 rows."""

    num_layers, model_dim, hidden_dim = 24, 1024, 4096


@registry.register
class Dense1200M(M2m100):
    """M2M-100-1.2B."""

    num_layers, model_dim, hidden_dim = 48, 1024, 8192
