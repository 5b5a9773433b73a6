# `make demo` and `make test` set up all they need; both are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check format bench diagrams clean

demo: $(STAMP)
	$(BIN)/fsm-rollout run configs/runs/demo.yaml

test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_scheduler.py
	$(BIN)/python benchmarks/bench_chat.py
	$(BIN)/python benchmarks/bench_engine.py

# A test compares the DOT inside these with what the agents give now.
diagrams: $(STAMP)
	for agent in configs/agents/*.yaml; do \
		$(BIN)/fsm-rollout draw $$agent -o diagrams/$$(basename $$agent .yaml).svg || exit 1; \
	done

# torch first and exactly: whatever else wants torch must find this one.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(f"fsm-rollout needs Python 3.11 or newer, this is {sys.version}" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
