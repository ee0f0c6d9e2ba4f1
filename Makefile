# make help says what there is. Environments are made from PYTHON (python3 unless given):
#   without PYTHON=   in .venv, with the torch that constraints.txt pins
#   with PYTHON=path  in .venv-<path>, using the torch of that interpreter if it has one
# PIP_ARGS= goes to every pip install, PYTEST_ARGS= to pytest; JOBS= is how many tests run at a time.

ifeq ($(origin PYTHON),undefined)
  PYTHON := python3
  VENV ?= .venv
else ifneq ($(filter $(abspath .venv)/bin/%,$(abspath $(PYTHON))),)
  VENV ?= .venv
else
  VENV ?= .venv-$(subst /,-,$(patsubst /%,%,$(PYTHON)))
  REUSE := --reuse-torch-of "$(PYTHON)"
endif
PIP_ARGS ?=
PYTEST_ARGS ?=
JOBS ?=
export PIP_ARGS
# Where it is set, as in many images, each program that a test starts compiles the whole package anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# Under another name, since `make -n` runs a line that has the name MAKE.
SELF := $(MAKE)
# The tests of a file stay together: some share what took long to make. tests/conftest.py puts long files first.
# The argument is how many run at a time unless JOBS says it.
parallel = -n $(or $(JOBS),$(1)) --dist loadscope --no-loadscope-reorder --max-worker-restart 0
STAMP := $(VENV)/.elastic-launch-env
DEMO := $(VENV)/.elastic-launch-demo
FRAMEWORKS := $(VENV)/.elastic-launch-frameworks
CACHES := .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

.PHONY: help env demo check docs dist test test-all test-gpu soak chaos matrix clean distclean
.DEFAULT_GOAL := help

help:
	@echo 'make demo       install torch, scikit-learn and the package, train on two workers, kill one, compare the weights with an undisturbed run'
	@echo 'make test       make the environment, check, and run the tests'
	@echo 'make test-all   the tests that make test leaves out: they take long, or need root and Debian packages,'
	@echo '                which ALLOW_APT=1 installs, or transformers, Lightning and so on, which are added to the environment'
	@echo 'make test-gpu   the tests that need a GPU, with PYTHON= of an interpreter whose torch has CUDA; one GPU is enough'
	@echo 'make soak       the exhaustive tests, which repeat what may fail once in a hundred times: hours, and outside CI'
	@echo 'make chaos      random plans of faults against real runs, outside CI: SEED=1 PLANS=100 [PAIRS=1]'
	@echo 'make matrix     the tests of single parts, one node, exactness and torch'\''s launcher with each Python and torch that'
	@echo '                pyproject.toml declares, or with MATRIX="3.11:2.13 3.12:2.14"; KEEP=1 keeps the environments (gigabytes)'
	@echo 'make check      linter, formatter, types, who may import whom, that no class name is there twice, that no module uses'
	@echo '                what another one keeps for itself, and the length of lines in the pages'
	@echo 'make docs       build the documentation as a site in build/site; a warning is an error'
	@echo 'make dist       build the source distribution and the wheel in dist, with REPOSITORY=https://HOST/OWNER/NAME in their links'
	@echo 'make env        make the environment, or bring it up to date'
	@echo 'make clean      remove what the other targets made, except environments'
	@echo 'make distclean  remove the environments that make made, too'
	@echo 'PYTHON=path     use that interpreter, and its torch if it has one'
	@echo 'PIP_ARGS=...    further arguments for every pip install'
	@echo 'PYTEST_ARGS=... further arguments for pytest'
	@echo 'JOBS=N          how many tests run at a time (3, of test 4, of test-all 5; 0: one, in the process of pytest itself)'

env: $(STAMP)

# An environment that is already there, made by hand perhaps, is brought up to date and kept.
define install
	@test -x "$(BIN)/python" || { scripts/preflight "$(PYTHON)" && "$(PYTHON)" -m venv "$(VENV)"; }
	@"$(BIN)/python" scripts/make_env.py $(REUSE) --extra $(1)
endef

# With all that the tests need comes all that the demo needs.
$(STAMP): pyproject.toml constraints.txt scripts/make_env.py
	$(call install,dev)
	@touch "$@" "$(DEMO)"

$(DEMO): pyproject.toml constraints.txt scripts/make_env.py
	$(call install,examples)
	@touch "$@"

# Only what test-all runs needs it, so that test does not wait for it.
$(FRAMEWORKS): $(STAMP)
	@"$(BIN)/python" scripts/make_env.py --frameworks
	@touch "$@"

demo: $(DEMO)
	@"$(BIN)/python" examples/demo.py

check: env
	"$(BIN)/ruff" check
	"$(BIN)/ruff" format --check
	"$(BIN)/mypy"
	"$(BIN)/lint-imports" --no-logo
	"$(BIN)/python" scripts/check_names.py
	"$(BIN)/python" scripts/check_seams.py
	"$(BIN)/python" scripts/check_pages.py

# Anew each time (-E): Sphinx's index for searches loses the entries of pages that have not changed.
docs: env
	"$(BIN)/python" -m sphinx -E -q -W --keep-going -c docs . build/site
	@echo 'docs: ready in build/site/index.html'

dist: env
	@test -n "$(REPOSITORY)" || { echo 'dist: name the public repository: make dist REPOSITORY=https://HOST/OWNER/NAME' >&2; exit 2; }
	"$(BIN)/python" scripts/build_dist.py "$(REPOSITORY)" dist

# In a new clone, each of pytest's processes would compile the tests; one does it while mypy uses one processor.
test: env
	@{ test -d tests/__pycache__ || "$(BIN)/python" -m pytest -qq --collect-only; } >/dev/null 2>&1 & \
	"$(SELF)" --no-print-directory check; code=$$?; wait; exit $$code
	@echo 'test: takes 6 to 9 minutes on two free processors; the number at the end of a line is how much is done'
	"$(BIN)/python" -m pytest -rfEs $(call parallel,4) -m "not system and not slow and not soak" --junitxml=build/junit-test.xml $(PYTEST_ARGS)

test-all: env $(FRAMEWORKS)
	@scripts/system-packages
	@echo 'test-all: takes 25 to 35 minutes on two free processors; the number at the end of a line is how much is done'
	"$(BIN)/python" -m pytest -rfEs $(call parallel,5) -m "(system or slow) and not soak" --junitxml=build/junit-test-all.xml $(PYTEST_ARGS)

test-gpu: env
	"$(BIN)/python" -m pytest -rfEs $(call parallel,3) -m gpu --junitxml=build/junit-test-gpu.xml $(PYTEST_ARGS)

soak: env
	"$(BIN)/python" -m pytest -rfEs $(call parallel,3) -m soak --junitxml=build/junit-soak.xml $(PYTEST_ARGS)

chaos: env
	"$(BIN)/python" tests/chaos --seed $(or $(SEED),1) --plans $(or $(PLANS),100) $(if $(PAIRS),--pairs)

# Each pair has an environment of its own; nothing of VENV is used.
matrix:
	@"$(PYTHON)" scripts/matrix.py $(if $(KEEP),--keep)

clean:
	rm -rf build dist $(CACHES)
	find elastic_launch agents tests examples scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	@for stamp in .venv*/.elastic-launch-env .venv*/.elastic-launch-demo; do \
	  test ! -e "$$stamp" || { echo "rm -rf $${stamp%/*}"; rm -rf "$${stamp%/*}"; }; \
	done
