# `make help` lists what there is. Each target sets up all it needs, and is quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests start many programs: each would compile the package again where the environment keeps Python from writing that.
unexport PYTHONDONTWRITEBYTECODE

# Environments over .venv, for packages that clash with what this project pins: each holds only what differs.
OVER := .venv-over
TRAINERS := verl others verifiers
# Three processes, also on two cores: where servers start, tests wait.
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder
.PHONY: help demo demo-vision quick test test-real test-trainers check format bench diagrams reference docs mutants mutation nightly clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | while IFS='|' read -r name what; do printf '%-14s %s\n' "$$name" "$$what"; done

demo: $(STAMP)  ## run an agent on the embedded model
	$(BIN)/fsm-rollout run configs/runs/demo.yaml --replace

demo-vision: $(STAMP)  ## run an agent that looks, zooms in and answers; and the same on blank and swapped pictures
	$(BIN)/python examples/vision/demo.py

# What needs no server, browser or other program.
quick: $(STAMP)  ## the unit tests, under a minute
	HYPOTHESIS_PROFILE=fast $(BIN)/python -m pytest -q -n 2 tests/unit

test: $(STAMP)  ## all that fits into five minutes: units, laws, one SGLang, one Ray, a browser
	$(PYTEST) -m "not real"

test-real: $(STAMP) $(OVER)/vision/.installed $(OVER)/readers/.installed  ## the rest, marked `real`: clusters, killed servers, training, pictures, MLflow and others
	$(PYTEST) -m real
	$(OVER)/vision/bin/python -m pytest -q tests/pictures tests/unit/chat/test_pictures.py tests/unit/batch/test_media.py \
		tests/unit/engines/transformers/test_picture_rows.py tests/unit/adapters/test_pictures.py tests/laws/test_pictures.py
	$(OVER)/readers/bin/python -m pytest -q -W default tests/readers

test-trainers: $(TRAINERS:%=$(OVER)/%/.installed)  ## the adapters against the trainers' own packages
	for trainers in $(TRAINERS); do \
		$(OVER)/$$trainers/bin/python -m pytest -q -W default tests/trainers || exit 1; \
	done

$(OVER)/%/.installed: tests/environments/%.txt tests/environments/torchvision_ops.py $(STAMP)
	test -x $(@D)/bin/python || $(BIN)/python -m venv --without-pip $(@D)
	ln -sf $(abspath tests/environments/torchvision_ops.py) $(@D)/lib/python3.*/site-packages
	printf '%s\nimport torchvision_ops\n' "$$(cd $(VENV)/lib/python3.*/site-packages && pwd)" > $$(echo $(@D)/lib/python3.*/site-packages)/over.pth
	$(BIN)/python -m pip --python $(@D)/bin/python install -q --no-deps -r $<
	touch $@

check: $(STAMP)  ## ruff and mypy (strict)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## the benchmarks
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/bench_scheduler.py
	$(BIN)/python benchmarks/bench_context.py
	$(BIN)/python benchmarks/bench_chat.py
	$(BIN)/python benchmarks/bench_simulation.py
	$(BIN)/python benchmarks/bench_spans.py
	$(BIN)/python benchmarks/bench_pictures.py
	$(BIN)/python benchmarks/bench_engine.py
	$(BIN)/python benchmarks/bench_sglang.py
	$(BIN)/python benchmarks/bench_ray.py
	$(BIN)/python benchmarks/bench_weights.py

# A test compares what these carry (the DOT; a fingerprint of the page) with what the agents and pages give now.
diagrams: $(STAMP)  ## draw the agents and photograph the pages anew
	for agent in configs/agents/*.yaml; do \
		$(BIN)/fsm-rollout draw $$agent -o diagrams/$$(basename $$agent .yaml).svg || exit 1; \
	done
	$(BIN)/python diagrams/photograph.py

# The tables of docs/reference, from the code; a test compares.
reference: $(STAMP)  ## write docs/reference/ anew, from the code
	$(BIN)/python docs/site/reference.py

# These pages as a site, in site/: whatever is wrong with a page, a link or a table ends it.
docs: $(STAMP)  ## build the documentation as a site, strictly, into site/
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
		&& $(BIN)/python -m pip install -q --no-deps "$$(grep '^sglang==' constraints.txt)"; \
	fi
	$(BIN)/python -m pip install -q --no-deps "$$(grep '^trl==' constraints.txt)"
	touch $(STAMP)

# A few minutes for what is known; some more for N that are drawn by SEED, beside half an hour once to learn which test runs
# which line.
mutants: $(STAMP)  ## break the code in known ways, and print which law notices
	$(BIN)/python -m tests.mutants

N := 60
SEED := 1
mutation: $(STAMP) $(TRAINERS:%=$(OVER)/%/.installed)  ## break the core at random, and print what no test notices
	$(BIN)/python -m tests.mutants.sample $(N) $(SEED)

# What takes long: a run is killed at 200 random moments, its replicas at 20 each, and must come to the same rows each
# time; 100,000 mutated inputs are taken or refused; 2,000 schedules of updates and of replicas that come and go lose no
# token; a million trajectories leave memory as it was.
nightly: $(STAMP)  ## what takes long: kills at 200 moments, a million trajectories
	$(BIN)/python -m tests.integration.kill_points --points 200
	KILL_POINTS=20 $(BIN)/python -m pytest -q tests/integration/test_ray_pool.py tests/integration/test_sglang.py -k killed_in_a_run
	$(BIN)/python -m tests.fuzz --count 100000
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -q tests/laws/test_fleet.py
	$(BIN)/python -m tests.soak --trajectories 1000000
	SANDBOX_SESSIONS=256 $(BIN)/python -m pytest -q tests/integration/test_sandbox.py -k sessions_at_once

clean:  ## remove all that was made here
	rm -rf $(VENV) $(OVER) .mutation runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
