"""The external repositories of this workspace, all of them written on the spot: nothing is downloaded."""

def _written_repository_impl(repository):
    for path, content in repository.attr.files.items():
        repository.file(path, content)

_written_repository = repository_rule(
    implementation = _written_repository_impl,
    attrs = {"files": attr.string_dict(doc = "The text of every file, by path.")},
)

def _aliases(*rules):
    return "\n".join(["{0} = native.{0}".format(rule) for rule in rules])

def built_in_rules():
    """Stands in for the repositories that Bazel's own BUILD files load rules from and would download.

    Bazel 4 still has these rules built in, so aliases are enough. Nothing here measures coverage.
    """
    _written_repository(
        name = "rules_cc",
        files = {
            "cc/BUILD": "",
            "cc/defs.bzl": _aliases(
                "cc_binary",
                "cc_import",
                "cc_library",
                "cc_test",
                "cc_toolchain",
                "cc_toolchain_suite",
                "objc_library",
            ),
        },
    )
    _written_repository(
        name = "rules_java",
        files = {
            "java/BUILD": "",
            "java/defs.bzl": _aliases("java_import", "java_runtime", "java_toolchain"),
        },
    )
    _written_repository(
        name = "remote_coverage_tools",
        files = {"BUILD": """
package(default_visibility = ["//visibility:public"])
filegroup(name = "coverage_report_generator")
filegroup(name = "lcov_merger")
"""},
    )

_TOOLCHAIN = """
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

py_runtime(
    name = "runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
    stub_shebang = "#!{python}",
)

py_runtime_pair(
    name = "runtimes",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtimes",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

def _virtual_environment_impl(repository):
    python = repository.path(Label("@//:WORKSPACE")).dirname.get_child(".venv").get_child("bin").get_child("python")
    if not python.exists:
        fail("There is no virtual environment at {}. Create it with: make setup".format(python))
    repository.file("BUILD", _TOOLCHAIN.format(python = python))

virtual_environment = repository_rule(
    implementation = _virtual_environment_impl,
    doc = "A Python toolchain of the interpreter in `.venv`, which holds the packages of requirements-dev.txt.",
    local = True,
)
