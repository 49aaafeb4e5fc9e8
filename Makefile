# Every target that needs Python makes its own virtual environment, so nothing is installed elsewhere.
PYTHON ?= python3
WORKERS ?= 2
# What CI installs, exactly, with Python 3.11 and 3.12. For the newest of everything, or another Python:
# CONSTRAINTS=/dev/null
CONSTRAINTS ?= .ci/constraints.txt
CONSTRAINTS_NEWEST ?= .ci/constraints-newest.txt
# JAX 0.11 and later need Python 3.12. It is looked for on the path and among the versions of pyenv.
PYTHON312 ?= $(shell .ci/python312)
CONSTRAINTS_DOCS ?= .ci/constraints-docs.txt
CONSTRAINTS_MAXTEXT ?= .ci/constraints-maxtext.txt
CONSTRAINTS_TRAINERS ?= .ci/constraints-trainers.txt
export JAX_PLATFORMS ?= cpu

.PHONY: help environments demo audit test test-long test-all test-newest test-trainers lint format typecheck pytest bench bench-dense bench-accuracy bench-fidelity bench-collectives bench-recipes bench-gpu what-works notebooks docs dist clean

help:
	@echo "make demo          train a small language model in bf16 and FP8 (some minutes on 2 cores)"
	@echo "make audit         show which matmuls of the demo would run in FP8 on an H200 (no GPU needed)"
	@echo "make test          lint, format check, types, doctests, tests (3 to 7 minutes on 2 cores)"
	@echo "make test ARGS='-k scan'  only the tests with scan in their name"
	@echo "make test-long     the tests of whole models and programs; each takes 2 seconds or more (4 to 10 minutes)"
	@echo "make test-all      all tests, also those that make test leaves out for their time"
	@echo "make test-newest   some tests of every folder, on the newest JAX; it needs Python 3.12 or later: PYTHON312=/path/to/python"
	@echo "make test-trainers Tunix, Equinox and MaxText from the package index, with FP8 (8 minutes, then 2); it needs Python 3.12"
	@echo "make lint typecheck pytest  the parts of make test"
	@echo "make bench         the time of training steps on this CPU, beside bf16 and Flax's ops"
	@echo "make bench-dense   one Dense layer: FP8 matmuls, GPU kernels and bytes on an H200, which need not be there"
	@echo "make bench-accuracy  the error that each recipe adds to a Dense layer, on three kinds of data"
	@echo "make bench-fidelity  the loss of FP8 training, compared with bf16 and with chance; hours on 2 cores, resumable"
	@echo "make bench-collectives  the bytes that GPUs send to each other for one layer, by recipe and layout; no GPU needed"
	@echo "make bench-recipes the predicted time of a training step on an H200 and a B200, by recipe and width; no GPU needed"
	@echo "make bench-gpu     measurements on a GPU, resumable; the JAX of PYTHON= must see the GPU"
	@echo "make what-works    test every recipe with every transformation and sharding, and write docs/what_works.md"
	@echo "make notebooks     execute the notebooks, and save their outputs"
	@echo "make docs          build the documentation as a site, in build/site"
	@echo "make dist          build the wheel and the source distribution, in dist/"
	@echo "make format        format the code, and fix what the linter can fix"
	@echo "make environments  make .venv and .venv-newest; other targets also make the one that they need"
	@echo "make clean         remove the virtual environments and caches"

.venv/installed: pyproject.toml $(CONSTRAINTS)
	@echo "making .venv, once, 1 to 2 minutes"
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) \
	  --editable '.[dev]'
	touch $@

.venv-newest/installed: pyproject.toml $(CONSTRAINTS_NEWEST)
	@test -n "$(PYTHON312)" || { echo "The newest JAX needs Python 3.12 or later, and none was found on the path \
	or among pyenv's. Name one: make test-newest PYTHON312=/path/to/python3.12"; exit 1; }
	@echo "making .venv-newest, once, 1 to 2 minutes"
	test -x .venv-newest/bin/python || $(PYTHON312) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint $(CONSTRAINTS_NEWEST) --editable '.[test]'
	touch $@

# MaxText lists the packages of every use of it as its requirements. Those that its trainer imports are enough.
.venv-maxtext/installed: pyproject.toml $(CONSTRAINTS_MAXTEXT)
	@test -n "$(PYTHON312)" || { echo "Name a Python: make test-trainers PYTHON312=/path/to/python3.12"; exit 1; }
	@echo "making .venv-maxtext, once, 1 to 2 minutes"
	test -x .venv-maxtext/bin/python || $(PYTHON312) -m venv .venv-maxtext
	.venv-maxtext/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --requirement $(CONSTRAINTS_MAXTEXT) --editable .
	touch $@

.venv-trainers/installed: pyproject.toml $(CONSTRAINTS_TRAINERS)
	@test -n "$(PYTHON312)" || { echo "The newest JAX needs Python 3.12 or later. Name one: PYTHON312=/path/to/python3.12"; exit 1; }
	@echo "making .venv-trainers, once, 2 to 4 minutes"
	test -x .venv-trainers/bin/python || $(PYTHON312) -m venv .venv-trainers
	.venv-trainers/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint $(CONSTRAINTS_TRAINERS) --editable '.[trainers]'
	touch $@

.venv-docs/installed: pyproject.toml $(CONSTRAINTS) $(CONSTRAINTS_DOCS)
	@echo "making .venv-docs, once, 1 to 2 minutes"
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint $(CONSTRAINTS) --constraint $(CONSTRAINTS_DOCS) --editable '.[docs]'
	touch $@

demo: .venv/installed
	.venv/bin/python -m fp8flax.demo $(ARGS)

audit: .venv/installed
	.venv/bin/python -m fp8flax.demo --audit $(ARGS)

# All virtual environments of the tests; with -j2 two at the same time. That of the newest JAX only where there
# is a Python for it.
environments: .venv/installed $(if $(PYTHON312),.venv-newest/installed)

# With ARGS only pytest, in one process: the first test starts within seconds.
ifdef ARGS
test: pytest
else
test: lint typecheck pytest
endif

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

typecheck: .venv/installed
	.venv/bin/mypy

IN_PARALLEL = --numprocesses $(WORKERS) --dist loadfile
pytest: .venv/installed
	.venv/bin/python -m pytest $(if $(ARGS),$(ARGS),$(IN_PARALLEL))

# Whole runs, in processes of their own: notebooks, kills, several hosts. CI runs them.
test-long: .venv/installed
	.venv/bin/python -m pytest $(IN_PARALLEL) -m long --long $(ARGS) tests

test-all: .venv/installed
	.venv/bin/python -m pytest $(IN_PARALLEL) --all-cells $(ARGS)

# Some tests of every folder, most where much depends on the version of JAX.
FEW = "newest and not long and not all_cells"
test-newest: .venv-newest/installed
	.venv-newest/bin/python -m pytest $(IN_PARALLEL) -m $(FEW) $(ARGS) tests

# Packages of others, as they are in the package index.
test-trainers: .venv-trainers/installed .venv-maxtext/installed
	.venv-trainers/bin/python -m pytest $(ARGS) tests/trainers
	.venv-maxtext/bin/python -m pytest --long $(ARGS) tests/trainers/test_maxtext.py

bench: .venv/installed
	.venv/bin/python -m benchmarks.step_cpu $(ARGS)

bench-dense: .venv/installed
	.venv/bin/python -m benchmarks.dense $(ARGS)

bench-accuracy: .venv/installed
	.venv/bin/python -m benchmarks.accuracy $(ARGS)

bench-fidelity: .venv/installed
	.venv/bin/python -m benchmarks.fidelity $(ARGS)

bench-collectives: .venv/installed
	.venv/bin/python -m benchmarks.collectives $(ARGS)

bench-recipes: .venv/installed
	.venv/bin/python -m benchmarks.recipes $(ARGS)

# In no environment of its own: JAX for the GPU, Flax and Optax are taken to be there.
bench-gpu:
	env -u JAX_PLATFORMS $(PYTHON) -m benchmarks.gpu $(ARGS)

what-works: .venv/installed
	.venv/bin/python -m pytest $(IN_PARALLEL) --all-cells --write-table \
	  tests/linen/test_transformations.py tests/train/test_devices.py tests/nnx/test_transformations.py tests/nnx/test_ops.py $(ARGS)

notebooks: .venv/installed
	.venv/bin/python notebooks/execute.py

# mkdocs.yml says that warnings are errors, so a link to a page or a heading that is not there is one. A notebook is executed anew when its cells have changed.
docs: .venv-docs/installed
	.venv-docs/bin/python notebooks/execute.py --into build/notebooks
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --quiet

dist: .venv/installed
	.venv/bin/python -m build --no-isolation

format: .venv/installed
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv .venv-newest .venv-docs .venv-maxtext .venv-trainers .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
