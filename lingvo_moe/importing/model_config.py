"""The fields of a config.json of Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_moe.errors import UserError
from lingvo_moe.importing.model_directory import CONFIG

MOST_LAYERS = 1000  # of a corrupt file; a pattern has a word for each of these layers
_MOST = 2**24  # of anything else


class Fields:
    """The fields of a config.json; each method raises UserError, which names the field, for an unexpected value."""

    def __init__(self, config: Mapping[str, Any], name: str):
        """Takes the contents of the file, and what messages call its directory."""
        self._config, self._name = config, name

    @property
    def model_type(self) -> Any:
        """What kind of model it is; None where the file does not say."""
        return self._config.get("model_type")

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return self.count("vocab_size")

    def require(self, expected: Mapping[str, Any], defaults: Mapping[str, Any]):
        """Checks the values of fields, of which only these can be imported.

        Args:
          expected: the values by field.
          defaults: what Hugging Face's library takes where the file lacks a field, if that is another value.
        """
        for field, value in expected.items():
            if (found := self._config.get(field, defaults.get(field, value))) != value:
                said = "has" if field in self._config else "lacks a field, so it has"
                raise UserError(f"{self._name}: {CONFIG} {said} {field} {found!r}; only {value!r} can be imported.")

    def check_ids(self, ids: Mapping[str, int], file: str):
        """Checks ids, such as `pad_token_id`, where the file has them; they are those of a file of the tokenizer."""
        for field, expected in ids.items():
            if self._config.get(field, expected) != expected:
                raise self.wrong(field, f"{expected}, that of {file}")

    def check_pieces(self, count: int, are_all: bool = False):
        """Checks that the vocabulary has the pieces of a tokenizer, and, if these `are_all`, no others."""
        if count > self.vocabulary or (are_all and count != self.vocabulary):
            raise UserError(
                f"{self._name}: the tokenizer has {count} pieces, but {CONFIG} has vocab_size {self.vocabulary}, so "
                f"they are of two models; copy the files again."
            )

    def count(self, field: str, most: int = _MOST, default: int | None = None) -> int:
        """Returns a whole number from 1 to `most`; `default` where the file lacks the field, or has null."""
        value = self._config.get(field)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(field, f"a whole number from 1 to {most:,}")
        return value

    def share(self, field: str, default: float) -> float:
        """Returns a number of at least 0 and less than 1."""
        value = self._config.get(field, default)
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise self.wrong(field, "a share below 1")
        return value

    def flag(self, field: str, default: bool) -> bool:
        """Returns true or false."""
        value = self._config.get(field, default)
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def choice(self, field: str, choices: Sequence[str], default: str | None = None) -> str:
        """Returns one of the choices."""
        value = self._config.get(field, default)
        if value not in choices:
            raise self.wrong(field, f"one of {', '.join(choices)}")
        return value

    def wrong(self, field: str, expected: str) -> UserError:
        """Returns the error of a field."""
        return UserError(f"{self._name}: {CONFIG} has {field} {self._config.get(field)!r}; expected {expected}.")
