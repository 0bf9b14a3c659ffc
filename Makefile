# The commands of this repository; `make help` lists them. Everything happens in .venv.
# On Linux the Metal side runs on softmetal, which is built first; on macOS it is Apple's Metal.

# The versions of torch and transformers for builds and tests. An environment gets torch first; everything else is built
# against it.
VERSIONS := requirements/oldest.txt

VENV   := .venv
PY     := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
LINUX  := $(filter Linux,$(shell uname -s))

find_sources = $(shell find $(1) -type f \( -name CMakeLists.txt $(foreach end,$(2),-o -name '*.$(end)') \) \
                 -not -path '*/_build/*' -not -path '*/generated/*' 2>/dev/null)
PRODUCT_SOURCES   := setup.py pyproject.toml tools/embed_kernels.py $(call find_sources,csrc,cpp h mm metal)
SOFTMETAL_SOURCES := softmetal/pyproject.toml $(call find_sources,softmetal/src,cpp h mm S)
SOFTMETAL_HEADERS := $(call find_sources,softmetal/src/softmetal/framework/include,h)
# clang-format must not change the conformance programs.
FORMATTED         := $(filter-out %.txt softmetal/tests/msl/conformance/%,$(call find_sources,csrc softmetal bench tests,cpp h mm cu metal))

# How the extension is compiled: DEBUG=1 for a debugger, SANITIZE=address (or undefined, thread) with a sanitizer.
MODE := $(strip $(if $(filter-out 0,$(DEBUG)),FATTN_DEBUG=1) $(if $(SANITIZE),FATTN_SANITIZE=$(SANITIZE)))

# softmetal's part of the build, which a Mac does not need.
SOFTMETAL_STAMP := $(if $(LINUX),$(STAMPS)/softmetal)
BUILD_ENV       := $(if $(LINUX),eval "$$($(PY) -m softmetal config --env)";)
# clang, which a Mac has too, but none has built with the header yet.
PRECOMPILE      := $(if $(LINUX),FATTN_PCH=1)
TESTS           := tests $(if $(LINUX),softmetal/tests)
PYTEST          := $(PY) -m pytest -n 2 --dist worksteal $(if $(NAMING),--naming $(NAMING))

# The extras of pyproject.toml that the other targets install; `make build` installs its own requirements.
FOR_DEMO := $(STAMPS)/demo
FOR_DOCS := $(STAMPS)/docs
FOR_TEST := $(STAMPS)/test

.PHONY: FORCE help build agx compile-commands first-mac demo docs check test test-all newest test-newest coverage wheel check-wheel test-slow sweep mutants pytest lint format golden bench-host clean

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

build: $(STAMPS)/product  ## create the environment and build the extension (DEBUG=1, SANITIZE=address)

agx: $(STAMPS)/product  ## build Mesa's compiler for M1 and M2, for `python -m bench agx`
	$(PY) -m softmetal build --agx

compile-commands: $(STAMPS)/product  ## write compile_commands.json, for editors and clang-tidy
	$(BUILD_ENV) $(MODE) $(PY) tools/compile_commands.py compile_commands.json

first-mac: $(FOR_TEST)  ## on a Mac: compile kernels, run doctor, tests, bench and tune in ten minutes, and write one archive to send
	$(PY) tools/first_mac.py

demo: $(FOR_DEMO)  ## generate with a transformers model on device="mps" through torch.ops.fattn (MODEL=path: your own)
	$(PY) -m torch_fattn demo $(if $(MODEL),--model "$(MODEL)")

docs: $(FOR_DOCS)  ## build the documentation site in out/site
	$(PY) -m mkdocs build --strict

check: TIER := check
check:  ## run lint, types and a cross-section of the tests: at most 2.5 minutes on 2 cores

test: TIER := test
test:  ## run lint, types and tests of every operator, option, refusal and integration: at most 5 minutes on 2 cores

test-all: TIER := $(if $(LINUX),gpu host,all)
test-all:  ## run lint, types and every test except the sweeps, like CI: at most 40 minutes on 2 cores

# Lint keeps one core busy, so the tests run meanwhile; what it says comes last.
check test test-all: $(FOR_TEST)
	@said=$$(mktemp); $(MAKE) --no-print-directory lint >$$said 2>&1 & lint=$$!; trap "kill $$lint" INT TERM; \
	$(MAKE) --no-print-directory pytest TIER="$(TIER)"; tests=$$?; \
	wait $$lint; lint=$$?; cat $$said; rm $$said; echo "exit status of the tests: $$tests, of lint: $$lint"; \
	exit $$((tests | lint))

# TIER=check, test or all selects their cases (tests/tiers.py).
pytest: $(FOR_TEST)
	$(foreach tier,$(or $(TIER),all),$(PYTEST) --tier $(tier) $(if $(filter gpu,$(tier)),--modules check) $(TESTS) &&) true

NEWEST := $(MAKE) --no-print-directory -C .newest VERSIONS=requirements/newest.txt

# Its files are large: CI fetches them while the other tests run.
newest:
	tools/copy_tree.sh .newest
	$(NEWEST) $(STAMPS)/python

# softmetal's libraries but one do not depend on torch, nor do the files of tests that do not name it.
test-newest: newest $(SOFTMETAL_STAMP)  ## run what torch and transformers can change of make test with the newest of both, in a copy of the sources in .newest
	SOFTMETAL_LIBRARIES=$(CURDIR)/softmetal/src/softmetal/_build \
	  $(NEWEST) TIER=$(or $(TIER),test) NAMING=torch,torch_fattn,transformers pytest

coverage: $(FOR_TEST)  ## measure the line coverage of torch_fattn by the tests of make test
	$(PYTEST) --tier test --cov --cov-report=term $(TESTS)

wheel: $(FOR_TEST)  ## build the source archive, and from it the wheel for this torch, in dist
	rm -rf dist
	$(BUILD_ENV) FATTN_LOCAL_VERSION=1 $(PY) -m build --no-isolation

check-wheel: wheel  ## test the wheel in a bare environment: doctor, and 30 families of transformers
	tools/check_wheel.sh out/bare $(VERSIONS)

sweep: $(FOR_TEST)  ## run 500 random problems for each seed (SEEDS=FIRST-LAST)
	$(PYTEST) -m slow --timeout 0 tests/operators/test_random.py $(if $(SEEDS),--seeds $(SEEDS))

mutants: $(FOR_TEST)  ## test a mutation of each operator and constant in the kernels (SAMPLE=200 SEED=1: a sample)
	$(PY) -m tests.mutation $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED))

test-slow: $(FOR_TEST)  ## the sweeps, hours of them (SWEEPS in tests/tiers.py)
	$(PY) -m pytest -m "slow or rotating" --third all --timeout 0 $(TESTS)

lint: $(FOR_TEST)  ## run ruff, mypy, clang-format, actionlint and the rules of the repository
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	@echo "clang-format --dry-run -Werror ($(words $(FORMATTED)) files)"
	@$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED)
	$(PY) tools/check_sources.py
	$(VENV)/bin/actionlint -shellcheck= -pyflakes=

format: $(FOR_TEST)  ## format the sources with ruff and clang-format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	@$(VENV)/bin/clang-format -i $(FORMATTED)

golden: $(FOR_TEST)  ## rewrite tests/golden with the current planner
	$(PY) -m tests.golden

bench-host: build  ## time planning and encoding of a call on the host
	$(PY) -m bench host-cost

clean:  ## remove build outputs, keep the environment
	rm -rf build dist out softmetal/src/softmetal/_build csrc/generated torch_fattn/*.so *.egg-info softmetal/src/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache $(STAMPS)/softmetal $(STAMPS)/product

$(STAMPS)/python: tools/setup_env.sh $(VERSIONS)
	tools/setup_env.sh $(VENV) $(VERSIONS)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/softmetal: $(STAMPS)/python $(SOFTMETAL_SOURCES)
	$(PY) -m pip install --quiet --no-build-isolation -e softmetal
	$(PY) -m softmetal build
	@touch $@

# Changes only with the mode.
$(STAMPS)/mode: FORCE
	@mkdir -p $(@D) && { [ "$$(cat $@ 2>/dev/null)" = "$(MODE)" ] && [ -f $@ ] || echo "$(MODE)" > $@; }

$(STAMPS)/product: $(STAMPS)/python $(STAMPS)/mode $(PRODUCT_SOURCES) $(if $(LINUX),$(SOFTMETAL_HEADERS)) | $(SOFTMETAL_STAMP)
	$(BUILD_ENV) $(PRECOMPILE) $(MODE) $(PY) tools/show_progress.py $(PY) -m pip install --verbose --no-build-isolation -e .
	@touch $@

# The product is installed: pip reads the extra's names from it, and rebuilds nothing.
$(FOR_DEMO) $(FOR_DOCS) $(FOR_TEST): pyproject.toml $(VERSIONS) | $(STAMPS)/product
	@echo "installing what make $(@F) needs: the extra [$(@F)] of pyproject.toml"
	$(PY) -m pip install --quiet 'torch-fattn[$(@F)]' $(if $(filter docs,$(@F)),,-r $(VERSIONS))
	@touch $@
