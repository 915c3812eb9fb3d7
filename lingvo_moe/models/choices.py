"""Fields of models that have one of a few values."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lingvo_moe.errors import UserError, did_you_mean

ACTIVATION_DTYPES = ("float32", "bfloat16")


def check_choices(model: object, choices: Mapping[str, Collection[str]]):
    """Raises UserError for a field of a model with another value than its choices, which are given by field."""
    for field, values in choices.items():
        if (value := getattr(model, field)) not in values:
            raise UserError(f"model.{field} is {value!r}; use one of {', '.join(values)}.{did_you_mean(value, values)}")
