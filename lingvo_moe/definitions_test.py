"""What a user defines or returns is compared with what is expected; the message has the user's name and line for it."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import inspect
import re
import runpy
import types
from typing import Any, Protocol

import pytest

from lingvo_moe import definitions
from lingvo_moe.errors import UserError


class Scaler(Protocol):
    """What these tests require."""

    limit: int = 0

    @abc.abstractmethod
    def scale(self, value: float) -> float: ...

    def __call__(self, first: float, second: float) -> float: ...


@dataclasses.dataclass(frozen=True)
class Whole:
    limit: int = 1

    def scale(self, value):
        return value

    def __call__(self, first, second, third=0):
        return first


def changed(**attributes: Any) -> type:
    """Returns a frozen dataclass that has other attributes than `Whole`; without those that are None."""
    named = {name: value for name, value in vars(Whole).items() if name in ("limit", "scale", "__call__")}
    kept = {name: value for name, value in (named | attributes).items() if value is not None}
    return dataclasses.dataclass(frozen=True)(type("Own", (), kept))


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"scale": None}, "^own has no scale, which Scaler in lingvo_moe/definitions_test.py lists"),
        ({"scale": Scaler.scale}, "^own has no scale, "),  # abstract
        ({"__call__": None}, "^own has no __call__, "),  # a class itself can be called
        ({"limit": None, "scale": None}, "^own has no limit, scale, "),
        ({"scale": 3.0}, r"^own: scale is a float; expected a function of \(value\)"),
        ({"scale": lambda: 0}, r"own: scale takes \(\); it is called with \(self, value\), as Scaler in .* says"),
        ({"scale": lambda self, *, value: 0}, r"own: scale takes \(self, \*, value\); it is called with"),
        ({"scale": lambda self, value, more: 0}, r"own: scale takes \(self, value, more\); it is called with"),
        ({"scale": staticmethod(lambda value: 0)}, None),
        ({"scale": lambda self, other, more=0: 0}, None),
        ({}, None),
    ],
)
def test_a_class_has_what_its_protocol_lists(attributes, message):
    """Names, and parameters by their number; other names of parameters and more of them with defaults will do."""
    cls = changed(**attributes)
    for defined in (cls, cls()) if "scale" not in attributes else (cls,):
        if message is None:
            definitions.check_dataclass("own", defined if isinstance(defined, type) else type(defined), Scaler)
            definitions.check("own", defined, Scaler)
        else:
            with pytest.raises(UserError, match=message):
                definitions.check("own", defined, Scaler)


class Plain:
    pass


class Undecorated(Whole):
    size: int


@pytest.mark.parametrize("cls", [Plain, Undecorated, dataclasses.make_dataclass("Mutable", ["size"]), Whole(), 3])
def test_what_is_no_frozen_dataclass_is_refused(cls):
    """Also a subclass of one that is not decorated: it would not have its own fields."""
    with pytest.raises(
        UserError, match=r"^own: expected a frozen dataclass; write @dataclasses.dataclass\(frozen=True"
    ):
        definitions.check_dataclass("own", cls)
    definitions.check_dataclass("own", type("Inherits", (Whole,), {}))


def tensor(dtype: str, *shape: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(dtype=dtype, shape=shape)


@pytest.mark.parametrize(
    "value, text",
    [
        (tensor("float32", 4, 8), "float32 [4, 8]"),
        (tensor("int32"), "int32 scalar tensor"),
        (0.5, "float"),
        (None, "None"),
    ],
)
def test_values_are_described_by_dtype_and_shape_or_their_class(value, text):
    assert definitions.form(value) == text


@pytest.mark.parametrize(
    "metrics, dtype, message",
    [
        ([], "", "^own returned metrics that are a list; expected a dict"),
        ({"m": tensor("float32", 2)}, "", r"^own: metric m is a float32 \[2\]; expected a float32 scalar tensor"),
        ({"m": 0.5}, "", "^own: metric m is a float; expected a float32 scalar tensor"),
        ({"m": tensor("int32")}, "float32", "^own: metric m is an int32 scalar tensor; expected a float32 scalar"),
        ({"m": tensor("int32")}, "", None),
        ({"m": tensor("float32")}, "float32", None),
    ],
)
def test_metrics_are_scalar_tensors(metrics, dtype, message):
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        definitions.check_scalars("own", metrics, dtype)


@pytest.mark.parametrize("result", [None, 3, (3,), (1, 2, 3), [1, 2]])
def test_other_results_than_a_pair_are_refused(result):
    definitions.check_pair("own", (1, 2), "outputs, metrics")
    with pytest.raises(UserError, match=r"^own returned .*; expected the pair \(outputs, metrics\)\."):
        definitions.check_pair("own", result, "outputs, metrics")


@pytest.mark.parametrize(
    "returned, message",
    [
        ({}, r"own returned no m/w, which state declares \(float32 \[2\]\)"),
        ({"m/w": "bfloat16 [2]"}, r"own returned m/w as bfloat16 \[2\]; state declares it as float32 \[2\]"),
        ({"m/w": "float32 [2]", "n": "float32 [2]"}, "own returned n, which state does not declare"),
    ],
)
def test_leaves_that_are_not_the_declared_ones_are_named(returned, message):
    """A missing one would be missing in a checkpoint, too."""
    definitions.check_leaves("own", {"m/w": "float32 [2]"}, {"m/w": "float32 [2]"}, "state")
    with pytest.raises(UserError, match=message):
        definitions.check_leaves("own", returned, {"m/w": "float32 [2]"}, "state")


OWN = """
from lingvo_moe.errors import UserError

class Own:
    def fail(self):
        raise RuntimeError("no more\\nand more")

    def refuse(self):
        raise UserError("too large.")

def fail_elsewhere(parse):
    return parse("x")
"""


@pytest.fixture
def own(tmp_path):
    """The module of a user's file."""
    file = tmp_path / "own_definitions.py"
    file.write_text(OWN)
    return types.SimpleNamespace(**runpy.run_path(str(file)) | {"__file__": str(file)})


def test_an_error_of_a_users_code_ends_with_its_line(own):
    """The traceback stays; the calls of layers are nested, and the innermost one is named."""
    file = own.__file__
    stack, layer = definitions.named(lambda: "stack", Whole), definitions.named(lambda: "own in decoder", own.Own.fail)
    with pytest.raises(RuntimeError) as raised, stack, layer:
        own.Own().fail()
    assert raised.value.__notes__ == [f"own in decoder: RuntimeError: no more ({file}, line 6)"]
    with pytest.raises(ValueError, match="invalid literal") as raised, definitions.named(str, own.fail_elsewhere):
        own.fail_elsewhere(int)
    assert raised.value.__notes__[0].endswith(f"({file}, line 12)")


def test_a_mistake_names_the_line_of_the_definition_once(own):
    """Ours have none: what is wrong is what was passed to them."""
    place = f" ({own.__file__}, line 8)."
    stack, layer = definitions.named(str, own.fail_elsewhere), definitions.named(str, own.Own.refuse)
    with pytest.raises(UserError) as raised, stack, layer:
        own.Own().refuse()
    assert str(raised.value) == f"too large{place}"
    with pytest.raises(UserError, match=r"^too large\.$"), definitions.named(str, Whole):
        raise UserError("too large.")


def test_the_place_of_what_python_does_not_define_is_unknown():
    assert definitions.place(int) == definitions.place(3) == ""
    assert re.fullmatch(rf" \({re.escape(__file__)}, line \d+\)", definitions.place(Whole()))
    assert definitions.place(Whole).endswith(f"line {inspect.getsourcelines(Whole)[1]})")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("es", r"languages: 'es' is one text; expected a list of texts, \['es'\]."),
        (iter(["es"]), "languages is a list_iterator; expected a list of texts"),
        (None, "languages is None; expected a list of texts"),
        (["es", b"it"], "languages: b'it' is a bytes; expected a text"),
    ],
)
def test_what_is_no_list_of_texts_is_an_error(value, message):
    """One text is a sequence of letters, each of which would be taken for a text."""
    definitions.check_texts("languages", ("es", "it"))
    with pytest.raises(UserError, match=message):
        definitions.check_texts("languages", value)
