# Every target sets up what it needs on a bare Debian 12.
# PYTHON chooses the Python 3.11 that .venv is made from, BAZEL the Bazel 4.
BAZEL ?= bazel
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help quickstart test pytest bazel golden docs setup clean
.NOTPARALLEL:

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: setup  ## corpus, tokenizer, a small model, its BLEU: everything once, end to end
	.venv/bin/python -m tools.quickstart

test: pytest bazel  ## all tests with pytest, and all targets with Bazel

pytest: setup  ## all tests, two files at a time
	.venv/bin/python -m pytest --numprocesses=2 --dist=loadfile

# The tests themselves have been run; what only Bazel can tell is whether the BUILD files declare all that they import.
bazel: setup  ## collect each test file by itself, where it sees only what its BUILD file declares; `bazel test //...` runs them
	@tools/setup.sh bazel $(BAZEL)
	$(BAZEL) test --test_env=PYTEST_ADDOPTS=--collect-only //...

golden: setup  ## rewrite testdata/golden, the hyperparameters of every registered model, after a change that is meant
	.venv/bin/python -m tools.write_golden

docs: setup  ## write build/report.html, the plans beside the published figures, and redraw docs/figures
	.venv/bin/python -m tools.report --figures=docs/figures

setup: .venv/.complete  ## the virtual environment .venv with the packages of requirements.txt

clean:  ## remove .venv and the caches; what you trained stays
	rm -rf .venv .hypothesis .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.complete: requirements.txt
	tools/setup.sh venv
