"""Tests that nobody had to write, for agents (``--fsm-agents``) and engines (``--fsm-engine``); a fixture for your own.

Invariant: without these options the plugin costs nothing and changes nothing: it is loaded in every pytest run of
everybody who has this package, so everything heavy is imported where it is used.

Each agent is a file with items: ``rules``, ``bound``, ``coverage``, ``ends``, ``streams``, ``schedule``, ``journal``,
``resume`` (:mod:`fsm_rollout.testing.plugin.agent_checks` says what each holds); an engine's are the promises of its
protocol. Node ids, ``-k`` and xdist work as usual.
Named on the command line without test paths, agents are all that runs; set in ``addopts``, or with paths, they run
together with the other tests.

How many runs are drawn is up to the Hypothesis settings in force (``--hypothesis-profile=nightly``) or
``--fsm-examples``.
"""

from __future__ import annotations

import argparse
import glob
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fsm_rollout.testing.plugin.items import AGENTS, COVERAGE, ENGINES, SEEN, AgentFile, EngineFile

if TYPE_CHECKING:
    from fsm_rollout.trajectory.trajectory import Trajectory


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    option = parser.getgroup("fsm-rollout", "agents as state machines (fsm-rollout)").addoption
    option("--fsm-agents", action="append", default=[], metavar="GLOB", help="agent YAML files to test, a quoted glob")
    option("--fsm-examples", type=_count, metavar="N", help="runs to draw per item (default: the Hypothesis settings)")
    option("--fsm-seed", type=int, default=0, metavar="N", help="seed of the drawing (default: 0)")
    option("--fsm-tokenizer", metavar="FOLDER", help="a model's folder (default: the embedded model)")
    option("--fsm-prompts", metavar="FILE", help="prompts to begin from (default: short questions)")
    option("--fsm-texts", metavar="FILE", help="texts that turns may say, one a line (or a .json list)")
    option("--fsm-real-tools", action="store_true", help="call the agent's own tools and interactions for real")
    option("--fsm-replay", metavar="PLAN", help="run this one plan, as a failure printed it")
    option(
        "--fsm-engine", action="append", default=[], metavar="MODULE:FACTORY",
        help="hold the engine that this function or class makes to the engine protocol, one test per promise",
    )  # fmt: skip


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number from 1 on, got {text!r}")
    return int(text)


def pytest_configure(config: pytest.Config) -> None:
    """Find the agents and engines, and choose what to collect."""
    base, wanted = config.invocation_params.dir, config.getoption("fsm_agents") or config.getoption("fsm_engine")
    if wanted and str(base) not in sys.path:  # code is named as `python -m` would find it
        sys.path.insert(0, str(base))
    config.stash[ENGINES] = engines = _find_engines(config)
    config.stash[AGENTS] = agents = _find_agents(config, base)
    own = [*agents, *engines]
    spread = {arg for arg in config.args if _is_yaml(arg)}  # a glob that the shell has expanded
    named = {(base / arg.split("::")[0]).resolve() for arg in config.args} - {(base / arg).resolve() for arg in spread}
    if not own or named & set(own):
        return  # node ids: these items and no others
    requested = any(arg.startswith(("--fsm-agents", "--fsm-engine")) for arg in config.invocation_params.args)
    other_paths = config.args_source is pytest.Config.ArgsSource.ARGS and set(config.args) - spread
    paths = [] if requested and not other_paths else [arg for arg in config.args if arg not in spread]
    config.args = paths + [str(path) for path in own]


def _is_yaml(arg: str) -> bool:
    return arg.endswith((".yaml", ".yml"))


def _find_agents(config: pytest.Config, base: Path) -> dict[Path, str]:
    names: list[str] = []
    for pattern in config.getoption("fsm_agents"):
        matches = sorted(glob.glob(pattern, root_dir=base, recursive=True))
        if not matches:
            raise pytest.UsageError(f"--fsm-agents {pattern!r} matches no file in {base}")
        names += matches
    names += filter(_is_yaml, config.args) if names else ()
    return {(base / name).resolve(): name for name in names}


def _find_engines(config: pytest.Config) -> dict[Path, str]:
    found: dict[Path, str] = {}
    for factory in config.getoption("fsm_engine"):
        module, colon, name = factory.partition(":")
        if not (module and colon and name):
            raise pytest.UsageError(f"--fsm-engine {factory!r}: write module:factory")
        try:
            spec = find_spec(module)
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            raise pytest.UsageError(f"--fsm-engine {factory!r}: there is no module '{module}'")
        path = Path(spec.origin).resolve()
        if path in found:
            raise pytest.UsageError(f"--fsm-engine {factory!r}: name one factory of a module; got {found[path]!r}, too")
        found[path] = factory
    return found


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Take the agents' files, and those of engines' factories."""
    for files, kind in ((AGENTS, AgentFile), (ENGINES, EngineFile)):
        if file_path.resolve() in parent.config.stash.get(files, {}):
            return kind.from_parent(parent, path=file_path)
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was seen, and the coverage of the transitions."""
    verbose = terminalreporter.config.get_verbosity() > 0
    stats = terminalreporter.stats
    ran = [report for kind in ("passed", "xfailed") for report in stats.get(kind, ()) if report.when == "call"]
    findings = [finding for report in ran for finding in report.user_properties]
    seen_texts, covered = ([text for key, text in findings if key == kind] for kind in (SEEN, COVERAGE))
    if seen_texts and verbose:
        terminalreporter.section("what was seen")
        for line in seen_texts:
            terminalreporter.write_line(line)
    if covered:
        terminalreporter.section("transitions taken in drawn runs")
        for text in covered:
            first, *rows = text.splitlines()
            for line in (first, *(row for row in rows if verbose or "NEVER" in row)):
                terminalreporter.write_line(line)


@pytest.fixture
def fsm_trajectory() -> Callable[..., Trajectory]:
    """Run one trajectory in virtual time: ``fsm_trajectory(agent, turns, prompt="…")`` returns it, ended."""
    from fsm_rollout.testing.simulation.simulate import run_one

    return run_one
