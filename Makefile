# The front door: `make help`. Works with GNU make 3.81 and newer; safe with -j.
# make turns every failure into its own exit code 2; `.venv/bin/python -m kda_lib.lab --help` lists the codes behind it.

GPU =
ONLY =
PYTHON = python3

VENV = .venv
PY = $(VENV)/bin/python
LAB = $(PY) -m kda_lib.lab
STAMP = $(VENV)/.setup-done

.DEFAULT_GOAL = help
.PHONY: help setup reproduce test lint lab notebooks check-fresh verify-claims compile-matrix dsl-matrix device-tests ptx-table clean

help: ## This list
	@echo "make <target> [GPU=<profile>] [ONLY=<notebook number>] [PYTHON=<python 3.11 or newer>]"
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  %-16s%s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## Build .venv from the lock, once; every other target does it when needed

# The stamp comes last: a setup that failed or was interrupted is done again.
$(STAMP): pyproject.toml requirements/lock-cpu.txt requirements/lock-cuda.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
	  "error: '$(PYTHON)' is not Python 3.11 or newer; give one: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo \
	  "error: '$(PYTHON)' lacks the venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@rm -f $@
	$(PYTHON) -m venv $(VENV)
	@if nvidia-smi >/dev/null 2>&1; then lock=cuda; else lock=cpu; fi; \
	  echo "installing requirements/lock-$$lock.txt"; \
	  $(PY) -m pip install --quiet --disable-pip-version-check --requirement requirements/lock-$$lock.txt
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

reproduce: $(STAMP) ## Run the notebooks for GPU (default: the device that is there, else cpu) and regenerate the reports
	@$(LAB) reproduce $(if $(GPU),--gpu "$(GPU)") $(if $(ONLY),--only "$(ONLY)",--matrix)

test: $(STAMP) ## Run every test that this machine can run, and print the coverage
	$(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --cov=kda_lib

lint: $(STAMP) ## Check style, types and the structure of the notebooks
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(LAB) check-notebooks

lab: $(STAMP) ## Open the notebooks in JupyterLab
	$(PY) -m jupyter lab notebooks/

notebooks: $(STAMP) ## Bring the notebooks into their stored form (outputs stripped but for the checked ones)
	@$(LAB) strip

check-fresh: $(STAMP) ## List the reports that no longer match the repository
	@$(LAB) check-fresh $(if $(GPU),--gpu "$(GPU)")

verify-claims: $(STAMP) ## Print every claim of every result file and whether it holds
	@$(LAB) verify-claims

compile-matrix: $(STAMP) ## Compile every kernel for every target and record the outcome
	@$(LAB) compile-matrix

dsl-matrix: $(STAMP) ## Record the failure under several DSL versions, each in a throw-away environment
	@$(LAB) dsl-matrix

device-tests: $(STAMP) ## Run the GPU tests and compute-sanitizer on the device that is there, and record the outcome
	@$(LAB) device-tests $(if $(GPU),--gpu "$(GPU)")

ptx-table: $(STAMP) ## Ask the assembler which target takes which PTX instruction, about 6 minutes
	@$(LAB) ptx-table

clean: ## Remove caches, logs and executed copies; the reports and .venv stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .coverage htmlcov
	rm -rf reports/*/executed reports/*/failed reports/*/logs
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name .venv -prune -o -name .ipynb_checkpoints -type d -prune -exec rm -rf {} +
