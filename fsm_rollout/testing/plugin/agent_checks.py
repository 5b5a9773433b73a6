"""What the pytest plugin holds an agent to, item by item.

Invariant: a check returns one line that says what it saw, or raises: :class:`LawBroken` with the run that broke a law
(and the plan that replays it), or :class:`~fsm_rollout.errors.ConfigError` for an agent that does not load. Runs are
drawn by Hypothesis under the settings in force, so a breach comes with the smallest plan found.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.loader import dump, loads, read_agent
from fsm_rollout.agent.proof import Bound, prove, reachable_rows
from fsm_rollout.errors import ConfigError
from fsm_rollout.testing.plugin import handler_laws
from fsm_rollout.testing.plugin.walks import Walker, row_name, taken
from fsm_rollout.testing.simulation import laws
from fsm_rollout.testing.simulation.blocked_loop import LoopInterrupted
from fsm_rollout.testing.simulation.laws import Law, LawBroken
from fsm_rollout.testing.simulation.plan import Plan
from fsm_rollout.testing.simulation.simulate import Simulation, embedded_tokenizer, quietly, simulate, without_clocks
from fsm_rollout.testing.simulation.virtual_time import Endless
from fsm_rollout.testing.strategies.plans import engine_scripts, plans
from fsm_rollout.trajectory import journal
from fsm_rollout.trajectory.events import AnyEvent, Transitioned
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory

WALKS_PER_EXAMPLE = 20
SHRINKING_RUNS = 200
"""Runs spent on making a breach smaller; each takes milliseconds, and the first few hundred do nearly all of it."""
EAGERNESS = (0.5, 0.8, 0.95, 1.0)


@dataclass(frozen=True)
class Subject:
    """An agent's file, and how it is to be tested.

    Attributes:
        path: the YAML.
        examples: how many runs each check draws; ``None``: as many as the Hypothesis settings in force say.
        seed: of the drawing; ``None``: Hypothesis chooses.
        replay: the one plan to run instead of drawing.
        real_tools: call the agent's own tools and interactions.
        prompts: what trajectories begin from.
        tokenizer: the engine's; ``None``: the embedded model's.
        blocking_seconds: real seconds that one callback may keep the event loop.
    """

    path: Path
    examples: int | None = None
    seed: int | None = None
    replay: Plan | None = None
    real_tools: bool = False
    prompts: tuple[Prompt, ...] = ()
    tokenizer: Any = None
    blocking_seconds: float | None = None
    notes: dict[str, str] = field(default_factory=dict, compare=False)

    @cached_property
    def graph(self) -> AgentGraph:
        """The agent.

        Raises:
            ConfigError: it does not load; all problems.
        """
        reading = read_agent(self.path)
        if reading.graph is None or reading.problems:
            raise ConfigError(reading.problems)
        return reading.graph

    @cached_property
    def bound(self) -> Bound:
        """The proven bound."""
        return prove(self.graph)

    @property
    def count(self) -> int:
        """How many runs are drawn."""
        return settings().max_examples if self.examples is None else self.examples

    def simulate(self, plan: Plan, graph: AgentGraph | None = None, **more: Any) -> Simulation:
        """Run a plan."""
        return simulate(
            graph or self.graph, plan, tokenizer=self.tokenizer, real_tools=self.real_tools, prompts=self.prompts,
            blocking_seconds=self.blocking_seconds, **more,
        )  # fmt: skip

    def plans(self, *, failures: bool = True, **what: bool) -> st.SearchStrategy[Plan]:
        """Return a strategy for runs of the agent."""
        script = engine_scripts(self.graph, self.tokenizer or embedded_tokenizer(), failures=failures)
        return plans(self.graph, script, failures=failures, **what)


class _AtOnce(BaseException):
    """Carries a breach past Hypothesis, which would try the run again and again: each try would take seconds."""

    def __init__(self, broken: LawBroken) -> None:
        self.broken = broken


def search(subject: Subject, drawn: st.SearchStrategy[Plan], holds: Callable[[Plan], None]) -> int:
    """Run ``holds`` on drawn plans (or on the one to replay); return on how many.

    Raises:
        LawBroken: on the smallest plan found.
    """
    if subject.replay is not None:
        holds(subject.replay)
        return 1
    runs = since = 0
    smallest: LawBroken | None = None

    def test(plan: Plan) -> None:
        nonlocal runs, since, smallest
        runs += 1
        since += smallest is not None
        try:
            holds(plan)
        except LawBroken as broken:
            if smallest is None or _size(broken) < _size(smallest):
                smallest = broken
            if broken.run is not None and _is_slow(broken.run):
                raise _AtOnce(broken) from None
            raise
        finally:
            if smallest is not None and since >= SHRINKING_RUNS:
                raise _AtOnce(smallest) from None

    searched = settings(
        max_examples=subject.count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],  # explaining runs it all again, traced line by line
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )(given(drawn)(test))
    try:
        with quietly():
            (searched if subject.seed is None else seed(subject.seed)(searched))()
    except _AtOnce as early:
        raise early.broken from None
    except Flaky:
        if smallest is None:
            raise
        smallest.add_note("and not when the same plan ran again: something is kept between runs")
        raise smallest from None
    return runs


def _size(broken: LawBroken) -> int:
    return 0 if broken.run is None else len(repr(broken.run.plan))


def _is_slow(run: Simulation) -> bool:
    return isinstance(run.crash, Endless | LoopInterrupted)


def judge(run: Simulation, held: Sequence[Law]) -> Simulation:
    """Hold a run to laws.

    Raises:
        LawBroken: with the run.
    """
    for law in held:
        try:
            law(run)
        except LawBroken as broken:
            broken.run = broken.run or run
            raise
    return run


# -- the checks -----------------------------------------------------------------------------------------------------


def rules(subject: Subject) -> str:
    """Law 1 and the numbered rules: the agent loads, and survives being written and read."""
    graph = subject.graph
    if loads(dump(graph), base=subject.path.parent) != graph:
        raise LawBroken(1, "written by dump() and loaded again it is another agent")
    return f"{len(graph.working_states)} working states, {len(graph.transitions)} rows, no rule broken"


def bound(subject: Subject) -> str:
    """Law 2 without engines: no walk through the machine takes more transitions than the proof allows."""
    most = subject.bound.transitions
    walker, rng = Walker(subject.graph), Random(subject.seed or 0)
    own = prove(_alone(subject.graph)).transitions
    longest = 0
    number = subject.count * WALKS_PER_EXAMPLE
    for _ in range(number):
        walk = walker.walk(rng, own + 1, rng.choice(EAGERNESS))
        longest = max(longest, len(walk))
        if len(walk) > own:
            raise LawBroken(2, f"a walk of more than {own} transitions:\n  {' -> '.join(walk.path)}")
        if not walk.ended:
            raise LawBroken(2, f"a walk that does not end:\n  {' -> '.join(walk.path)}")
    return f"{subject.bound}; the longest of {number:,} walks took {longest} of {most}"


def _alone(graph: AgentGraph) -> AgentGraph:
    """Return the agent with its sub-agents' runs left out: a walk makes no calls."""
    tools = {name: tool for name, tool in graph.tools.items() if tool.agent is None}
    return graph.model_copy(update={"tools": tools})


def coverage(subject: Subject) -> str:
    """Every row can fire; says how often each did in drawn runs, and which did not."""
    graph = subject.graph
    possible = reachable_rows(graph)
    if possible is not None:
        dead = [row for number, row in enumerate(graph.transitions) if number not in possible]
        if dead:
            listed = "".join(f"\n  {row_name(row)}" for row in dead)
            raise LawBroken(2, f"{len(dead)} row(s) can never fire, whatever happens:{listed}")
    walker, rng = Walker(graph), Random(subject.seed or 0)
    walked = taken([walker.walk(rng, 10_000, rng.choice(EAGERNESS)) for _ in range(subject.count * WALKS_PER_EXAMPLE)])
    impossible = set() if possible is None else walked.keys() - possible - {None}
    if impossible:
        listed = ", ".join(row_name(graph.transitions[number]) for number in impossible if number is not None)
        raise LawBroken(2, f"a walk took what the proof holds for impossible: {listed}")
    fired: Counter[int | None] = Counter()
    reasons: Counter[str] = Counter()

    def run(plan: Plan) -> None:
        result = judge(subject.simulate(plan), [laws.keeps_running])
        reasons.update(str(t.stop_reason) for t in result.trajectories)
        fired.update(
            event.row
            for name, trajectory in result.live.items()
            if trajectory.agent == graph.agent
            for event in result.events[name]
            if isinstance(event, Transitioned)
        )

    runs = search(subject, subject.plans(faults=False), run)
    if not fired.keys() - {None}:
        raise LawBroken(2, f"no row was ever taken in {runs} runs: every trajectory ended as {_listed(reasons)}")
    missed = [number for number in range(len(graph.transitions)) if not fired[number]]
    lines = [f"{len(graph.transitions) - len(missed)} of {len(graph.transitions)} rows taken in {runs} runs"]
    for number, row in enumerate(graph.transitions):
        never = "" if fired[number] else "   NEVER TAKEN" + ("" if walked[number] else ", nor in walks without engines")
        lines.append(f"  {fired[number]:>6}  {row_name(row)}{never}")
    lines.append(f"  {fired[None]:>6}  (rows of the machine's own: failures, time-outs and limits without a row)")
    subject.notes["coverage"] = "\n".join(lines)
    return lines[0] + (f"; never: {'; '.join(row_name(graph.transitions[n]) for n in missed)}" if missed else "")


def ends(subject: Subject) -> str:
    """Laws 2 and 8: whatever fails, hangs, or is cancelled, every trajectory comes back, within the bound."""
    held = [
        handler_laws.handlers_stay,
        laws.keeps_running,
        handler_laws.handlers_behave,
        handler_laws.fails_as_drawn,
        laws.comes_back,
        laws.stays_within(subject.bound),
        laws.keeps_limits,
    ]
    reasons: Counter[str] = Counter()

    def run(plan: Plan) -> None:
        result = judge(subject.simulate(plan), held)
        if handler_laws.may_be_the_worlds(result):
            judge(subject.simulate(plan.at_once()), [laws.keeps_running, handler_laws.handlers_manage])
        reasons.update(str(t.stop_reason or f"set aside: {t.suspended}") for t in result.trajectories)

    runs = search(subject, subject.plans(), run)
    return f"{sum(reasons.values())} trajectories in {runs} runs: {_listed(reasons)}"


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())


def streams(subject: Subject) -> str:
    """Laws 3, 4, 5 and 7: masks, logprobs, versions and spans against the engine's own log."""
    tokens = Counter[str]()

    def run(plan: Plan) -> None:
        result = judge(subject.simulate(plan), [laws.keeps_running, laws.keeps_streams])
        for trajectory in result.trajectories:
            tokens["all"] += sum(len(stream.tokens) for stream in trajectory.streams)
            tokens["trained"] += sum(stream.tokens.trained_length for stream in trajectory.streams)

    runs = search(subject, subject.plans(), run)
    return f"{tokens['all']:,} tokens, {tokens['trained']:,} of them trained, in {runs} runs"


def schedule(subject: Subject) -> str:
    """Law 6: order of completion, batch size, admission and the number of replicas change no result."""
    graph = without_clocks(subject.graph)

    def run(plan: Plan) -> None:
        one, other = subject.simulate(plan, graph), subject.simulate(plan.rescheduled(), graph)
        judge(one, [laws.keeps_running])
        judge(other, [laws.keeps_running])
        judge(one, [lambda result: laws.same_results(result, other, f"{_differs(plan)}")])

    runs = search(subject, subject.plans(failures=False, faults=False, compared=True), run)
    return f"the same rows under two schedules each, in {runs} runs"


def _differs(plan: Plan) -> str:
    one, other = plan.schedule.model_dump(), plan.other_schedule.model_dump()
    return ", ".join(f"{key} {one[key]} or {other[key]}" for key in one if one[key] != other[key]) or "a second run"


def journalled(subject: Subject) -> str:
    """Law 10: what is journalled folds to the trajectories, in memory and from the file."""
    count = 0

    def run(plan: Plan) -> None:
        nonlocal count
        with tempfile.TemporaryDirectory(prefix="fsm-journal-", dir=_memory()) as folder:
            file = Path(folder) / "journal.sqlite"
            result = judge(subject.simulate(plan, journal=file), [laws.keeps_running, laws.keeps_events])
            read = {trajectory.trajectory_id: trajectory for trajectory in journal.read(file)}
        for name, trajectory in result.live.items():
            if read.get(name) != trajectory:
                raise LawBroken(10, "its journal folds to something else", trajectory_id=name, run=result)
        count += sum(map(len, result.events.values()))

    runs = search(subject, subject.plans(), run)
    return f"{count:,} events in {runs} journals"


def _memory() -> str | None:
    """Return a folder in memory, where there is one: disks take longer to be sure than a drawn run takes."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def resume(subject: Subject) -> str:
    """Law 6: a run that is killed anywhere and goes on from its journal comes to what it would have come to."""
    graph = without_clocks(subject.graph)

    def run(plan: Plan) -> None:
        whole = judge(subject.simulate(plan, graph), [laws.keeps_running])
        histories = whole.killed(plan.killed_after)
        gone_on = judge(subject.simulate(plan, graph, resume=histories), [laws.keeps_running, laws.comes_back])
        if _cut_sub_agent(histories):
            return  # its call is made again, as another trajectory with randomness of its own
        what = f"being killed after {min(plan.killed_after, len(whole.order))} events"
        judge(whole, [lambda result: laws.same_results(result, gone_on, what, resumed=True)])

    runs = search(subject, subject.plans(failures=False, faults=False, killed=True), run)
    return f"the same results after a kill, in {runs} runs"


def _cut_sub_agent(histories: Sequence[Sequence[AnyEvent]]) -> bool:
    trajectories = [Trajectory.fold(events) for events in histories]
    return any(t.parent_id is not None and not t.ended for t in trajectories)


CHECKS: dict[str, Callable[[Subject], str]] = {
    "rules": rules,
    "bound": bound,
    "coverage": coverage,
    "ends": ends,
    "streams": streams,
    "schedule": schedule,
    "journal": journalled,
    "resume": resume,
}
"""The items of an agent, in order."""
