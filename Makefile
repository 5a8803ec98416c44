PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.stamp

# Many tests wait for a disk or for each other's threads, so two processes are faster even on two cores.
PROCESSES ?= 2

NATIVE := CMakeLists.txt $(wildcard optimizer_cpu/csrc/*)

.PHONY: run test acceptance sanitize sanitize-address sanitize-thread clean

# Train the built-in example: parameters, gradients and optimizer states in swap files.
run: $(STAMP)-run
	$(BIN)/offload train

test: $(STAMP)-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not acceptance and not gpu" -n $(PROCESSES) --dist worksteal

acceptance: $(STAMP)-test
	$(BIN)/python -m pytest -m "acceptance and not gpu" --timeout 3600
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=searching --timeout 3600

# The native kernels and their thread pool without Python, under AddressSanitizer + UBSan and under ThreadSanitizer.
sanitize:
	$(MAKE) --jobs=$(PROCESSES) --output-sync=target sanitize-address sanitize-thread

sanitize-address: SANITIZE := address,undefined
sanitize-thread: SANITIZE := thread
sanitize-address sanitize-thread:
	cmake -S optimizer_cpu/csrc -B build/$@ -DSANITIZE=$(SANITIZE) -DCMAKE_BUILD_TYPE=Release
	cmake --build build/$@
	ctest --test-dir build/$@ --output-on-failure

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP)-run: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e .
	touch $@

$(STAMP)-test: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) install -q --no-compile -c constraints.txt -e '.[test,hf,report]'  # the first import compiles what is needed
	touch $@ $(STAMP)-run
