# `make demo` and `make test` set up all they need; both are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests start many programs: each would compile the package again where the environment keeps Python from writing that.
unexport PYTHONDONTWRITEBYTECODE

TRAINERS := .venv-trainers
.PHONY: nightly demo test test-trainers quick check format bench diagrams docs mutants clean

demo: $(STAMP)
	$(BIN)/fsm-rollout run configs/runs/demo.yaml --replace

# Three processes, also on two cores: where servers start, tests wait.
test: $(STAMP)
	$(BIN)/python -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder

# Against the trainers' own packages. What they pin clashes with what this project does, so each environment lies over
# .venv and holds only what differs.
test-trainers: $(TRAINERS)/verl/.installed $(TRAINERS)/others/.installed $(TRAINERS)/verifiers/.installed
	for trainers in verl others verifiers; do \
		$(TRAINERS)/$$trainers/bin/python -m pytest -q -W default tests/trainers || exit 1; \
	done

$(TRAINERS)/%/.installed: tests/trainers/requirements/%.txt $(STAMP)
	test -x $(@D)/bin/python || $(BIN)/python -m venv --without-pip $(@D)
	echo "$$(cd $(VENV) && pwd)/lib/$$(cd $(VENV)/lib && echo python3.*)/site-packages" > $$(echo $(@D)/lib/python3.*/site-packages)/over.pth
	$(BIN)/python -m pip --python $(@D)/bin/python install -q --no-deps -r $<
	touch $@

# What needs no server, browser or other program: under a minute.
quick: $(STAMP)
	HYPOTHESIS_PROFILE=fast $(BIN)/python -m pytest -q -n 2 tests/unit

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/bench_scheduler.py
	$(BIN)/python benchmarks/bench_context.py
	$(BIN)/python benchmarks/bench_chat.py
	$(BIN)/python benchmarks/bench_simulation.py
	$(BIN)/python benchmarks/bench_engine.py
	$(BIN)/python benchmarks/bench_sglang.py
	$(BIN)/python benchmarks/bench_ray.py

# A test compares what these carry (the DOT; a fingerprint of the page) with what the agents and pages give now.
diagrams: $(STAMP)
	for agent in configs/agents/*.yaml; do \
		$(BIN)/fsm-rollout draw $$agent -o diagrams/$$(basename $$agent .yaml).svg || exit 1; \
	done
	$(BIN)/python diagrams/photograph.py

# These pages as a site, in site/: whatever is wrong with a page, a link or a table ends it.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# torch first and exactly: whatever else wants torch must find this one. Without a GPU, SGLang comes without its own
# requirements, which are several gigabytes of CUDA packages that nothing there could load. Of trl only the chat templates
# are read, by the tests, so its requirements (pandas, datasets, …) stay out.
$(STAMP): pyproject.toml constraints.txt requirements-sglang-cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(f"fsm-rollout needs Python 3.11 or newer, this is {sys.version}" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,sglang]'; \
	else \
		$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]' -r requirements-sglang-cpu.txt \
		&& $(BIN)/python -m pip install -q --no-deps "$$(sed -n 's/^sglang = \["\(.*\)"\]/\1/p' pyproject.toml)"; \
	fi
	$(BIN)/python -m pip install -q --no-deps "$$(grep '^trl==' constraints.txt)"
	touch $(STAMP)

# Breaks the code in many ways, one at a time, and prints which law caught each: a few minutes.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

# What takes long: a run is killed at 200 random moments, its replicas at 20 each, and must come to the same rows each
# time; 100,000 mutated inputs are taken or refused; a million trajectories leave memory as it was.
nightly: $(STAMP)
	$(BIN)/python -m tests.integration.kill_points --points 200
	KILL_POINTS=20 $(BIN)/python -m pytest -q tests/integration/test_ray_pool.py tests/integration/test_sglang.py -k killed_in_a_run
	$(BIN)/python -m tests.fuzz --count 100000
	$(BIN)/python -m tests.soak --trajectories 1000000
	SANDBOX_SESSIONS=256 $(BIN)/python -m pytest -q tests/integration/test_sandbox.py -k sessions_at_once

clean:
	rm -rf $(VENV) $(TRAINERS) runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
