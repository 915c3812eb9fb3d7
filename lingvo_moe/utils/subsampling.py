"""How many frames of speech the layers make one position of, which bounds the labels that a recording may have."""

from __future__ import annotations

SUBSAMPLING = 4  # by two convolutions of stride 2
