"""One macro for every directory of Python files."""

def _unclaimed():
    """Returns the directory's Python files that no earlier target of its BUILD file has among its sources."""
    claimed = [
        source.lstrip(":")
        for rule in native.existing_rules().values()
        for source in rule.get("srcs", [])
    ]
    return native.glob(["*.py"], exclude = claimed)

def _module(file):
    return "%s.%s" % (native.package_name().replace("/", "."), file[:-len(".py")])

def _test(name, main, size = "small", **attributes):
    native.py_test(
        name = name,
        size = size,
        legacy_create_init = False,
        main = main,
        **attributes
    )

def python_package(name, modules = None, deps = [], test_deps = [], data = [], size = "small", large = []):
    """A py_library of modules, a test that they import no more than is declared, and a py_test for each test file.

    A test sees only what it depends on: no other file of the repository is there.

    Args:
      name: the library's name.
      modules: names of modules, whose tests are the files `MODULE_test.py`; by default all files of the directory that
        no earlier target of the BUILD file took.
      deps: the packages that the modules import.
      test_deps: further packages that the tests import.
      data: further files that the modules or the tests read. `testdata/**` of the directory is always there.
      size: the tests' size: small for tests that take seconds; medium for those that import TensorFlow or compile programs.
      large: the tests that take ten seconds or more, mostly to compile programs or in processes of their own.
    """
    if modules == None:
        files = _unclaimed()
    else:
        files = native.glob([module + suffix for module in modules for suffix in (".py", "_test.py")])
    for test in large:
        if test + ".py" not in files:
            fail("%s: there is no test of this name" % test, attr = "large")
    sources = [file for file in files if not file.endswith("_test.py")]
    native.py_library(
        name = name,
        srcs = sources,
        data = data,
        visibility = ["//visibility:public"],
        deps = deps,
    )
    _test(
        name = name + "_imports_test",
        srcs = ["//bazel:import_main.py"],
        args = [_module(file) for file in sources],
        main = "//bazel:import_main.py",
        deps = [name],
    )
    for file in files:
        if file.endswith("_test.py"):
            _test(
                name = file[:-len(".py")],
                size = "large" if file[:-len(".py")] in large else size,
                srcs = [file, "//bazel:pytest_main.py"],
                args = ["$(location %s)" % file],
                data = data + native.glob(["testdata/**"]),
                main = "//bazel:pytest_main.py",
                deps = [name, "//:pytest"] + test_deps,
            )
