"""Checks of what users define: classes and functions when they are registered, and the results of their calls.

A message begins with what it is about, such as `router 'mine'`; inside of `named` it ends with the file and the line.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lingvo_moe.errors import UserError

SCALAR = "float32 scalar tensor"  # the `form` of losses, metrics and learning rates
_PLACE = re.compile(r", line \d+\)\.?$")  # in the message of a layer inside of a layer, say
_ABSENT = abc.abstractmethod(lambda: None)  # stands for what a class does not have


def place(defined: object) -> str:
    """Returns ` (FILE, line N)` of a class, a function or an object's class; empty where that is not known."""
    try:
        line = inspect.findsource(_definition(defined))[1]
    except (OSError, TypeError):  # without a file, or not written in Python
        return ""
    return f" ({_source(defined)}, line {line + 1})"


def raised_at(error: BaseException, file: str | None) -> str:
    """Returns ` (FILE, line N)` of the last line of a file that an error came through; empty where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == file), None)
    return f" ({file}, line {line})" if line else ""


def missing(instance: object, *protocols: type) -> list[str]:
    """Returns the names of these protocols that an object, or a class, lacks or leaves abstract."""
    names = [name for protocol in protocols for name in _names(protocol)]
    return [name for name in names if getattr(_attribute(instance, name), "__isabstractmethod__", False)]


def check(what: str, defined: object, *protocols: type):
    """Raises UserError unless a class, or an object, has all names of the protocols, and methods that can be called."""
    for protocol in protocols:
        listed = f"{protocol.__name__} in {protocol.__module__.replace('.', '/')}.py"
        if lacking := missing(defined, protocol):
            raise UserError(f"{what} has no {', '.join(lacking)}, which {listed} lists.")
        for name, method in vars(protocol).items():
            if name in _names(protocol) and inspect.isfunction(method):
                expected = [*inspect.signature(method).parameters][1:]
                _check_call(f"{what}: {name}", getattr(defined, name), expected, _is_unbound(defined, name), listed)


def check_dataclass(what: str, cls: object, *protocols: type):
    """Raises UserError unless `cls` is a frozen dataclass, fields that it declares included, and has the protocols."""
    fields: Mapping[str, Any] = getattr(cls, "__dataclass_fields__", {})
    is_frozen = isinstance(cls, type) and getattr(getattr(cls, "__dataclass_params__", None), "frozen", False)
    if not is_frozen or vars(cls).get("__annotations__", {}).keys() - fields.keys():
        raise UserError(
            f"{what}: expected a frozen dataclass; write @dataclasses.dataclass(frozen=True, kw_only=True)."
        )
    check(what, cls, *protocols)


def check_call(what: str, function: object, *arguments: str):
    """Raises UserError unless a function can be called with these arguments, whose names are for the message."""
    _check_call(what, function, arguments)


def check_scalars(what: str, metrics: object, dtype: str = ""):
    """Raises UserError unless `metrics` are scalar tensors by name, of this dtype if one is given."""
    if not isinstance(metrics, Mapping):
        raise UserError(f"{what} returned metrics that are {_a(form(metrics))}; expected a dict of scalar tensors.")
    for name, value in metrics.items():
        if not form(value).endswith(f"{dtype} scalar tensor"):
            check_form(f"{what}: metric {name}", value, form_of(dtype or "float32", ()))


def check_pair(what: str, result: object, names: str):
    """Raises UserError unless a call returned a pair, which `names` describes in the message."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(f"{what} returned {_a(form(result))}; expected the pair ({names}).")


def check_form(what: str, value: object, expected: str):
    """Raises UserError unless a value has the `form` that is expected."""
    if form(value) != expected:
        raise UserError(f"{what} is {_a(form(value))}; expected {_a(expected)}.")


def check_type(what: str, value: object, expected: type):
    """Raises UserError unless a value is of this class."""
    if not isinstance(value, expected):
        raise UserError(f"{what} is {_a(form(value))}; expected {_a(expected.__name__)}.")


def check_texts(what: str, value: object):
    """Raises UserError unless a value is a sequence of texts; one text is a sequence, too, but of letters."""
    if isinstance(value, str):
        raise UserError(f"{what}: {value[:40]!r} is one text; expected a list of texts, [{value[:40]!r}].")
    if not isinstance(value, Sequence):
        raise UserError(f"{what} is {_a(form(value))}; expected a list of texts.")
    for text in value:
        if not isinstance(text, str):
            raise UserError(f"{what}: {text!r} is {_a(form(text))}; expected a text.")


def check_leaves(what: str, returned: Mapping[str, str], declared: Mapping[str, str], declares: str):
    """Raises UserError unless a call returned a tensor of every declared path and form, and no other.

    Args:
      what: the call, with which messages begin.
      returned: the forms of tensors by path, see `form`.
      declared: likewise.
      declares: what declares them.
    """
    for path, expected in declared.items():
        if path not in returned:
            raise UserError(f"{what} returned no {path}, which {declares} declares ({expected}).")
        if returned[path] != expected:
            raise UserError(f"{what} returned {path} as {returned[path]}; {declares} declares it as {expected}.")
    if unknown := sorted(returned.keys() - declared.keys()):
        raise UserError(f"{what} returned {unknown[0]}, which {declares} does not declare.")


def form(value: Any) -> str:
    """Describes a tensor: `float32 [4, 8]`, or `float32 scalar tensor`; anything else by its class."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return "None" if value is None else type(value).__name__
    return form_of(getattr(value.dtype, "name", value.dtype), value.shape)


def form_of(dtype: str, shape: Iterable[int | str]) -> str:
    """Describes a tensor of this dtype and shape, as `form` does; a size may be a letter."""
    sizes = ", ".join(map(str, shape))
    return f"{dtype} [{sizes}]" if sizes else f"{dtype} scalar tensor"


@contextlib.contextmanager
def named(what: Callable[[], str], defined: object) -> Iterator[None]:
    """Names a class or function in the errors of a block that checks or calls it.

    A UserError gets its file and line. An error of the user's own code keeps its traceback, and gets a last line: what
    was called, the error, and the line of the class's file that it came from.

    Args:
      what: returns what is called, and where in the model.
      defined: the class or function, or an object of the class.
    """
    try:
        yield
    except UserError as error:
        if _is_ours(defined) or _PLACE.search(str(error)):
            raise
        raise UserError(f"{str(error).rstrip('.')}{place(defined)}.") from error
    except Exception as error:
        if not any(_PLACE.search(note) for note in getattr(error, "__notes__", ())):
            error.add_note(described(what(), error, defined))
        raise


def described(what: str, error: Exception, defined: object) -> str:
    """Returns what was called, the first line of its error, and the line of the class's file that it came from."""
    text = str(error).partition("\n")[0]
    return f"{what}: {type(error).__name__}: {text}{raised_at(error, _source(defined))}"


def _attribute(defined: object, name: str) -> object:
    """Returns an attribute, or _ABSENT; of a class its own, not one of its metaclass, as `__call__` may be."""
    if inspect.isclass(defined) and not any(name in vars(cls) for cls in defined.__mro__):
        return _ABSENT
    return getattr(defined, name, _ABSENT)


def _names(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if name == "__call__" or not name.startswith("_")]


def _definition(defined: Any) -> Any:
    return defined if inspect.isclass(defined) or inspect.isfunction(defined) else type(defined)


def _is_ours(defined: object) -> bool:
    return _definition(defined).__module__.partition(".")[0] == __name__.partition(".")[0]


def _source(defined: object) -> str | None:
    try:
        return inspect.getsourcefile(_definition(defined))
    except TypeError:  # not written in Python, or typed at a prompt
        return None


def _is_unbound(defined: object, name: str) -> bool:
    """Whether a method is read from its class, and so takes `self`, too."""
    return inspect.isclass(defined) and inspect.isfunction(inspect.getattr_static(defined, name))


def _check_call(what: str, function: Any, expected: Sequence[str], with_self: bool = False, listed: str = ""):
    by = f", as {listed} says" if listed else ""
    if not callable(function):
        raise UserError(f"{what} is {_a(form(function))}; expected a function of ({', '.join(expected)}){by}.")
    try:
        signature = inspect.signature(function)
    except ValueError:  # one that is not written in Python
        return
    expected = [*(["self"] if with_self else []), *expected]
    try:
        signature.bind(*expected)
    except TypeError:
        raise UserError(f"{what} takes {signature}; it is called with ({', '.join(expected)}){by}.") from None


def _a(described: str) -> str:
    return described if described == "None" else f"{'an' if described[:1] in 'aeiouAEIOU' else 'a'} {described}"
