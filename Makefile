# Every target sets up what it needs on a bare Debian 12.
# PYTHON chooses the Python 3.11 that .venv is made from, BAZEL the Bazel 4 (or newer, untried).
BAZEL ?= bazel
export PYTHON
# With this allocator, where tools/setup.sh has installed it, compilers and TensorFlow take a fifth less time in tests.
JEMALLOC = $(wildcard /usr/lib/$(shell uname -m)-linux-gnu/libjemalloc.so.2)
# Where Python may not write what it compiles, as in many containers, each command would compile TensorFlow again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help quickstart check test static format pytest bazel golden docs lock setup clean
.NOTPARALLEL:

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: .venv/.complete  ## corpora, tokenizer, a small model, its BLEU: everything once, end to end
	.venv/bin/python -m tools.quickstart

check: static  ## before a commit: static checks and the fast tests
	LD_PRELOAD=$(JEMALLOC) .venv/bin/python -m pytest --numprocesses=2 --dist=loadfile -m "not slow"

test: static pytest bazel  ## everything: static checks, all tests with pytest, all targets with Bazel

static: setup  ## format, lint and types
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/pyright

format: setup  ## rewrite the sources: import order, fixable lint, format
	.venv/bin/ruff check --fix-only
	.venv/bin/ruff format

# TensorFlow and compilers never return some of their memory: in 26 parts, each in a process of its own, one takes 1 to
# 3.8 GB. The first are the files of large_memory in pytest.ini. Three workers, as tests also wait for processes and the disk,
# pull parts from the queue and print their output; the parts with high numbers take longest as measured and come first, so
# that no worker is left alone for long.
pytest: setup  ## all tests, three parts at a time
	@directory=$$(mktemp -d); trap 'rm -rf "$$directory"' EXIT; export LINGVO_MOE_TEST_CACHE=$$directory/cache; \
	seq 26 -1 1 | xargs -P3 -I{} sh -c 'LD_PRELOAD=$(JEMALLOC) .venv/bin/python -m pytest --quiet --part={}/26 > '$$directory'/{}.log 2>&1; \
	    status=$$?; cat '$$directory'/{}.log; exit $$status'

# pytest has run the tests. Bazel checks that the BUILD files declare every import: it runs the small tests again, each
# among its declared files alone, and looks for the imports of the others there.
bazel: setup  ## run the small tests and check the imports of the others among their declared files; `bazel test //...` runs all
	@tools/setup.sh bazel $(BAZEL)
	$(BAZEL) test --config=ci //...

golden: setup  ## rewrite testdata/golden, the hyperparameters of every registered model and the miniatures' collectives, after a change that is meant
	.venv/bin/python -m tools.write_golden

docs: setup  ## write build/report.html, the plans beside the published figures, redraw docs/figures and the tables of docs/planning.md
	.venv/bin/python -m tools.report --figures=docs/figures --planning=docs/planning.md

lock: setup  ## resolve pyproject.toml into the lock files, requirements*.txt
	.venv/bin/python -m tools.lock

setup: .venv/.complete-dev  ## the virtual environment .venv with the packages of requirements.txt and requirements-dev.txt

clean:  ## remove .venv and the caches; trained models stay
	rm -rf .venv .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The quickstart needs neither the compilers for TPUs and GPUs nor what checks the sources: 1.5 GB once installed.
.venv/.complete: requirements.txt
	tools/setup.sh venv

.venv/.complete-dev: requirements.txt requirements-dev.txt
	tools/setup.sh venv dev
