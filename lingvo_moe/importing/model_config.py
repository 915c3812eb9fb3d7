"""A config.json of Hugging Face's format as fields of our models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lingvo_moe import experiment as experiments
from lingvo_moe import overrides, registry
from lingvo_moe.errors import UserError
from lingvo_moe.importing import weights
from lingvo_moe.importing.model_directory import CONFIG
from lingvo_moe.models.translation import Translation

MARIAN, _DENSE, _SPARSE = "marian", "m2m_100", "nllb-moe"  # NLLB-200 without experts is of the class of M2M-100
_SIDES = ("encoder", "decoder")
_COMMON = {"scale_embedding": True, "tie_word_embeddings": True}
_PLAIN_SWISH = ("dense:activation=swish",)
_MOST_LAYERS = 1000  # of a corrupt file; a pattern has a word for each of these layers
_MOST = 2**24  # of anything else
_LAYER_PATTERNS: dict[str, tuple[str, ...]] = {"relu": (), "swish": _PLAIN_SWISH, "silu": _PLAIN_SWISH}


class Kind(NamedTuple):
    """What models of a `model_type` have in common.

    Attributes:
      description: of the type, for messages.
      families: of registered models with such weights.
      required: what config.json must have, where it has these fields, for our layers to compute the model.
      names: of the parts of a layer.
    """

    description: str
    families: tuple[str, ...]
    required: Mapping[str, Any]
    names: weights.Names


_OF_FAIRSEQ = ("m2m100", "nllb")
KINDS = {
    _DENSE: Kind("M2M-100, NLLB-200", _OF_FAIRSEQ, {"activation_function": "relu", **_COMMON}, weights.DENSE),
    _SPARSE: Kind(
        "NLLB-MoE",
        _OF_FAIRSEQ,
        {
            "activation_function": "relu",
            "router_bias": False,
            "moe_eval_capacity_token_fraction": 1.0,
            "second_expert_policy": "all",
            **_COMMON,
        },
        weights.SPARSE,
    ),
    MARIAN: Kind(
        "Opus-MT",
        ("opus",),
        {
            "normalize_before": False,
            "normalize_embedding": False,
            "add_final_layer_norm": False,
            "static_position_embeddings": True,
            "share_encoder_decoder_embeddings": True,
            **_COMMON,
        },
        weights.DENSE,
    ),
}
FAMILIES = tuple(dict.fromkeys(family for kind in KINDS.values() for family in kind.families))


class Fields:
    """The fields of a config.json.

    Attributes:
      kind: of its model_type.
      is_marian: whether that is Marian's.
    """

    def __init__(self, config: Mapping[str, Any], name: str):
        """Checks what models of the type must have.

        Args:
          config: the contents of the file.
          name: what messages call the directory.

        Raises:
          UserError: another type, or a field with which our layers do not compute the model.
        """
        self._config, self._name, given = config, name, config.get("model_type")
        if not isinstance(given, str) or given not in KINDS:
            expected = ", ".join(f"{each} ({kind.description})" for each, kind in KINDS.items())
            raise UserError(f"{name}: {CONFIG} has model_type {given!r}; expected one of {expected}.")
        self.kind, self.is_marian = KINDS[given], given == MARIAN
        for field, expected in self.kind.required.items():
            if config.get(field, expected) != expected:
                raise UserError(f"{name}: {CONFIG} has {field} {config[field]!r}; only {expected!r} can be imported.")

    @property
    def expert_scale(self) -> float:
        """What multiplies the outputs of experts in inference."""
        # Hugging Face's default where the file lacks it; models without experts do not use it.
        dropped = self._config.get("moe_token_dropout", 0.2)
        if not isinstance(dropped, (int, float)) or not 0 <= dropped < 1:
            raise self._wrong("moe_token_dropout", "a share below 1")
        return 1.0 - dropped

    def closest(self, fields: Mapping[str, Any]) -> tuple[str, Translation, tuple[str, ...]]:
        """See `_closest`; raises UserError for fields with which there is no model."""
        try:
            return _closest(fields, self.kind.families)
        except UserError as error:
            raise UserError(f"{self._name}: {CONFIG} is of no model that can be imported: {error}") from None

    def of_model(self) -> dict[str, Any]:
        """The fields of our model, by name."""
        encoder, decoder = (self._layer_count(side) for side in _SIDES)
        heads, width = self._of_both_sides("attention_heads"), self._count("d_model")
        if width % heads:
            raise self._wrong("d_model", f"a multiple of the {heads} heads")
        vocabulary = self.vocabulary + 1 if self.is_marian else self.vocabulary
        return {
            "num_layers": encoder + decoder,
            "num_encoder_layers": encoder,
            "model_dim": width,
            "hidden_dim": self._of_both_sides("ffn_dim"),
            "num_heads": heads,
            "head_dim": width // heads,
            "source_vocabulary": vocabulary,
            "target_vocabulary": vocabulary,
            **self._layers(),
        }

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return self._count("vocab_size")

    def check_ids(self, ids: Mapping[str, int], file: str):
        """Raises UserError for another `pad_token_id`, for instance, than that of a file of the tokenizer."""
        for field, expected in ids.items():
            if self._config.get(field, expected) != expected:
                raise self._wrong(field, f"{expected}, that of {file}")

    def _layers(self) -> dict[str, Any]:
        """Which feed-forward layers there are."""
        if not self.is_marian:
            return self._experts()
        pattern = _LAYER_PATTERNS.get(str(self._config.get("activation_function")))
        if pattern is None:
            raise self._wrong("activation_function", f"one of {', '.join(_LAYER_PATTERNS)}")
        return {"num_experts": 0, "layer_pattern": pattern, "encoder_layer_pattern": ()}

    def _experts(self) -> dict[str, Any]:
        if self._config["model_type"] == _DENSE:
            return {"num_experts": 0, "layer_pattern": (), "encoder_layer_pattern": ()}
        steps = [self._sparse_step(side) for side in _SIDES]
        encoder, decoder = (("dense",) * (step - 1) + ("moe",) for step in steps)
        return {
            "num_experts": self._count("num_experts"),
            "layer_pattern": decoder,
            "encoder_layer_pattern": encoder if encoder != decoder else (),
        }

    def _sparse_step(self, side: str) -> int:
        step, layers = self._count(f"{side}_sparse_step"), self._layer_count(side)
        if layers % step:
            raise self._wrong(f"{side}_sparse_step", f"a divisor of the {layers} layers")
        return step

    def _of_both_sides(self, field: str) -> int:
        encoder, decoder = (self._count(f"{side}_{field}") for side in _SIDES)
        if encoder != decoder:
            raise self._wrong(f"decoder_{field}", f"{encoder}, as encoder_{field}: our stacks have the same")
        return encoder

    def _layer_count(self, side: str) -> int:
        return self._count(f"{side}_layers", _MOST_LAYERS)

    def _count(self, field: str, most: int = _MOST) -> int:
        value = self._config.get(field)
        if type(value) is not int or not 1 <= value <= most:
            raise self._wrong(field, f"a whole number from 1 to {most:,}")
        return value

    def _wrong(self, field: str, expected: str) -> UserError:
        return UserError(f"{self._name}: {CONFIG} has {field} {self._config.get(field)!r}; expected {expected}.")


def _closest(fields: Mapping[str, Any], families: tuple[str, ...]) -> tuple[str, Translation, tuple[str, ...]]:
    """Returns the registered model that differs in the fewest fields, its model with these fields, and these.

    One with experts if the fields have some, and one without otherwise.
    """
    found = []
    for registered in registry.names():
        if registered.partition(".")[0] in families:
            model = experiments.unchecked(registered).model
            changed = {field: value for field, value in fields.items() if getattr(model, field) != value}
            is_other_kind = bool(model.num_experts) != bool(fields["num_experts"])
            found.append((is_other_kind, len(changed), registered, changed))
    *_, name, changed = min(found, key=lambda each: each[:3])
    settings = tuple(f"model.{field}={overrides.text(value)}" for field, value in changed.items())
    model = experiments.unchecked(name, settings).model
    assert isinstance(model, Translation)  # as all of these families
    return name, model, settings
