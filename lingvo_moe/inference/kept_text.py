"""What a program reads in a line, and a translation must keep as it is: placeholders, tags, entities, addresses."""

from __future__ import annotations

import re

from lingvo_moe.data.cleaning import ENTITY, PLACEHOLDER

# The letters of scripts that have spaces between words: in `https://a.de/를` the address ends before the Korean letter.
_IN_ADDRESS = r"[A-Za-z0-9À-ɏͰ-ϿЀ-ԯ%&#@~$+=/_:?!.,;*'-]"
_AT_ITS_END = r"[A-Za-z0-9À-ɏͰ-ϿЀ-ԯ%&#@~$+=/-]"
_BEFORE = r"(?<![A-Za-z0-9.+%_-])"
ADDRESS = re.compile(
    rf"{_BEFORE}(?i:https?://|ftp://|www\.){_IN_ADDRESS}*{_AT_ITS_END}"
    rf"|{_BEFORE}[A-Za-z0-9_+-][A-Za-z0-9._+-]*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+"
)
_TAG = r"</?[A-Za-z][^<>]*>"
_ESCAPE = r"\\[abfnrtv\"'\\]"
_VARIABLE = r"@\w+@"
KEPT = re.compile("|".join([_TAG, ENTITY.pattern, ADDRESS.pattern, _ESCAPE, _VARIABLE, PLACEHOLDER.pattern]))
