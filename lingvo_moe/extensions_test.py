"""A registry refuses what would hide a mistake, and a user's file that cannot be imported is a clear error."""

from __future__ import annotations

import sys

import pytest

from lingvo_moe import extensions
from lingvo_moe.errors import UserError
from lingvo_moe.extensions import Registry


def test_registered_entries_are_found_by_name():
    """The order is that of registration, as help and errors list it."""
    registry: Registry[int] = Registry("number")
    assert registry.register("two", 2) == 2 == registry.get("two")
    registry.register("one", 1)
    assert registry.names() == ("two", "one")


def test_unknown_name_suggests_the_nearest_and_lists_all():
    """A reserved name is a choice, too."""
    registry: Registry[int] = Registry("number", reserved=("auto",))
    registry.register("seven", 7)
    with pytest.raises(UserError, match="number 'sevn' is unknown. Did you mean seven.* Known: auto, seven. --import"):
        registry.get("sevn")


def test_label_names_what_was_registered():
    """A message about a user's class names what the user wrote in a flag."""
    registry: Registry[type] = Registry("thing")
    registry.register("whole", int)
    assert (registry.label(int), registry.label(float)) == ("thing 'whole'", "thing 'float'")


@pytest.mark.parametrize("name", ["", " two", "a b", "-two", "a=b", "a/b", None, 2])
def test_malformed_name_is_an_error(name):
    """A name is one word of a flag."""
    with pytest.raises(UserError, match=f"number name {name!r}: use letters"):
        Registry("number").register(name, 2)


def test_name_clash_is_an_error():
    """An entry is never silently replaced; a file may be imported twice."""
    registry: Registry = Registry("thing", reserved=("auto",))
    for _ in range(2):
        registry.register("pair", (1, 2))
        registry.register("function", _function())
    with pytest.raises(UserError, match="thing 'pair' is already registered; choose another name"):
        registry.register("pair", (1, 3))
    with pytest.raises(UserError, match="thing 'function' is already registered"):
        registry.register("function", test_name_clash_is_an_error)
    with pytest.raises(UserError, match="thing name 'auto' is reserved"):
        registry.register("auto", 0)


def _function():
    def function():
        """Of the same module and qualified name at every call."""

    return function


def test_a_decorator_without_a_name_is_an_error():
    """The class would be taken for the name, and never be registered."""
    registry: Registry = Registry("thing")
    for above in (Registry, _function):
        with pytest.raises(
            UserError, match='@register_thing needs a name: write @register_thing."mine". above (class|def)'
        ):
            registry.decorator("register_thing", above)
    assert registry.decorator("register_thing", "mine")(Registry) is Registry is registry.get("mine")


def test_a_malformed_entry_is_not_registered():
    """What is registered has been checked, and the message has the line of its definition."""

    def check(what: str, entry: type):
        raise UserError(f"{what} is malformed.")

    registry: Registry = Registry("thing", check=check)
    with pytest.raises(UserError, match="^thing 'mine' is malformed"):
        registry.register("mine", Registry)
    assert registry.names() == ()


def test_isolated_removes_what_was_registered_inside():
    """Tests leave a registry as it was."""
    registry: Registry[int] = Registry("number")
    registry.register("one", 1)
    with registry.isolated():
        registry.register("two", 2)
    assert registry.names() == ("one",)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("no_such_module", "No module named"),
        ("no/such/file.py", "no such file"),
        ("no_such/file", "write no_such/file.py"),
        ("{tmp}", "this is a directory; name a file in it"),
        ("{tmp}/broken.py", r"ZeroDivisionError while importing it: division by zero \({tmp}/broken.py, line 2\)"),
        ("{tmp}/needs.py", r"ModuleNotFoundError .* 'numppy' \({tmp}/needs.py, line 1\)"),
        ("{tmp}/elsewhere.py", r"JSONDecodeError .* \({tmp}/elsewhere.py, line 2\)"),
        ("{tmp}/wrong.py", r"SyntaxError .*invalid syntax \(wrong.py, line 1\)$"),
        ("{tmp}/leaves.py", "SystemExit while importing it: 3"),
        ("{tmp}/clash.py", "layout 'gshard' is already registered; choose another name"),
    ],
)
def test_failing_import_names_the_flag_and_the_reason(tmp_path, where, message):
    """The message names the flag, the module, the reason and the line of the user's file."""
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    (tmp_path / "needs.py").write_text("import numppy\n")
    (tmp_path / "elsewhere.py").write_text("import json\njson.loads('{')\n")
    (tmp_path / "wrong.py").write_text("1 +\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "clash.py").write_text(
        "from lingvo_moe.sharding.layout import AxisRule, register_layout\n"
        "register_layout('gshard', [AxisRule('E', ('x',))], num_mesh_axes=1)\n"
    )
    with pytest.raises(UserError, match=f"^--import=.*{message.format(tmp=tmp_path)}"):
        extensions.import_module(where.format(tmp=tmp_path))
    assert not {"broken", "needs", "elsewhere", "wrong", "leaves", "clash"} & sys.modules.keys(), (
        "a module is half made"
    )


def test_a_file_does_not_replace_another_module(tmp_path):
    """Whatever imports that module later would get the user's file."""
    first = tmp_path / "first" / "extension_of_two.py"
    first.parent.mkdir()
    first.write_text("value = 1\n")
    for _ in range(2):  # a file may be imported again
        extensions.import_module(str(first))
    for name, owner in (
        ("queue", "a module of Python's standard library"),
        ("telnetlib", "a module of Python's standard library"),  # which nothing imports
        ("sentencepiece", "the module .*/sentencepiece/__init__.py"),  # which is imported when it is needed
        ("extension_of_two", f"the module {first}"),
        ("__main__", "the running program"),
    ):
        (tmp_path / f"{name}.py").write_text("value = 2\n")
        before = sys.modules.get(name)
        with pytest.raises(UserError, match=f"{name} is the name of {owner}, .*; give it another name"):
            extensions.import_module(f"{tmp_path}/{name}.py")
        assert sys.modules.get(name) is before


def test_a_directory_of_the_same_name_is_no_module(tmp_path, monkeypatch):
    """Such as the log directory of the model, where the command starts."""
    (tmp_path / "start" / "extension_and_directory").mkdir(parents=True)
    (tmp_path / "extension_and_directory.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "start")
    extensions.import_module(f"{tmp_path}/extension_and_directory.py")
    assert sys.modules["extension_and_directory"].value == 1
