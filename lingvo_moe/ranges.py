"""Valid ranges of hyperparameters, checked before training starts.

Numbers must be 0 or normal float32 numbers: magnitudes from 1.2e-38 to 3.4e38.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import typing
from collections.abc import Mapping
from typing import Any

from lingvo_moe.errors import UserError

_FLOAT32_MOST = (2 - 2**-23) * 2.0**127
_FLOAT32_LEAST = 2.0**-126  # of normal numbers; others may become zero


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `minimum` to `maximum`, both included unless they are exclusive.

    Attributes:
      minimum: the lower end.
      maximum: the upper end.
      exclusive_minimum: whether the lower end itself is out of range.
      exclusive_maximum: whether the upper end itself is out of range.
      infinite: whether infinity is in a range without an upper end.
      whole: whether a number with a fraction, such as 8.5, is out of range.
    """

    minimum: float = 0
    maximum: float = math.inf
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False
    infinite: bool = False
    whole: bool = False

    def __contains__(self, value: float) -> bool:
        return (
            self.minimum <= value <= self.maximum
            and (_is_float32(value) or (self.infinite and math.isinf(value)))
            and not (self.exclusive_minimum and value == self.minimum)
            and not (self.exclusive_maximum and value == self.maximum)
        )

    def __str__(self) -> str:
        lower = f"a number above {self.minimum:g}" if self.exclusive_minimum else f"at least {self.minimum:g}"
        if math.isinf(self.maximum):
            return f"{lower}, or inf" if self.infinite else lower
        return f"{lower} and {'below' if self.exclusive_maximum else 'at most'} {_text(self.maximum)}"


ABOVE_0 = Range(exclusive_minimum=True)
SHARE = Range(maximum=1)
SHARE_BELOW_1 = Range(maximum=1, exclusive_maximum=True)
# Programs count in int32.
COUNT = Range(1, 2**31 - 1, whole=True)
COUNT_OR_0 = Range(0, 2**31 - 1, whole=True)


def check(prefix: str, owner: object, ranges: Mapping[str, Range]):
    """Checks fields of an object; a dataclass's may be None where its type says so (`float | None`).

    Args:
      prefix: of the fields' names in `--set`, for instance `optimizer.`.
      owner: has the fields.
      ranges: by field.

    Raises:
      UserError: a field is out of its range, or no number.
    """
    for name, allowed in ranges.items():
        value = getattr(owner, name)
        if value is None:
            if _may_be_none(type(owner), name):
                continue
            raise UserError(f"{prefix}{name} is None; expected {allowed}.")
        if not _is_number(value):
            raise UserError(f"{prefix}{name} is {value!r}, of type {type(value).__name__}; expected {allowed}.")
        if value not in allowed:
            in_float32 = (
                "" if _is_float32(value) or not math.isfinite(value) else ", and 0 or from 1.2e-38 to 3.4e38 in float32"
            )
            raise UserError(f"{prefix}{name} is {value}; expected {allowed}{in_float32}.")
        if allowed.whole and value % 1:
            raise UserError(f"{prefix}{name} is {value}; expected a whole number, {allowed}.")


@functools.cache
def _may_be_none(owner: type, name: str) -> bool:
    """Whether the type of a dataclass's field has None; of other classes no types are known."""
    if not dataclasses.is_dataclass(owner):
        return True
    hint = typing.get_type_hints(owner)[name]
    return hint in (Any, type(None)) or type(None) in typing.get_args(hint)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real)  # NumPy's are, too


def _is_float32(value: float) -> bool:
    return value == 0 or _FLOAT32_LEAST <= abs(value) <= _FLOAT32_MOST


def _text(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"
