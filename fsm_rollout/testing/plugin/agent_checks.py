"""What the pytest plugin holds an agent to, item by item.

Invariant: a check returns one line that says what it saw, or raises: :class:`LawBroken` with the run that broke a law
(and the plan that replays it), or :class:`~fsm_rollout.errors.ConfigError` for an agent that does not load. Runs are
drawn by Hypothesis under the settings in force, so a breach comes with the smallest plan found.

What users' handlers and predicates are held to is reported as law 0: the fault is the user's. A handler is blamed only
for what it did itself, and not for drawn failures of the engine, tools and users, or for being cancelled. So what these
may have caused is checked again in a run without them.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings

from fsm_rollout.agent.graph import AgentGraph, TransitionSpec
from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.agent.loader import dump, loads, read_agent
from fsm_rollout.agent.proof import Bound, prove, reachable_rows
from fsm_rollout.diagrams.picture import conditions_of
from fsm_rollout.errors import ConfigError, PromptTooLong, RolloutError
from fsm_rollout.testing.conformance import runner
from fsm_rollout.testing.simulation import laws
from fsm_rollout.testing.simulation.blocked_loop import LoopInterrupted
from fsm_rollout.testing.simulation.laws import Law, LawBroken
from fsm_rollout.testing.simulation.plan import Plan
from fsm_rollout.testing.simulation.simulate import Simulation, embedded_tokenizer, simulate, without_clocks
from fsm_rollout.testing.simulation.virtual_time import Endless
from fsm_rollout.testing.simulation.visits import HandlerVisit
from fsm_rollout.testing.strategies.plans import engine_scripts, plans
from fsm_rollout.trajectory import journal
from fsm_rollout.trajectory.enums import Trigger
from fsm_rollout.trajectory.events import Transitioned
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory

T = TypeVar("T")

COVERAGE_ROUNDS = 4  # as often runs are drawn while a transition has never been taken


@dataclass(frozen=True)
class CheckedAgent:
    """An agent's file, and how it is to be tested."""

    path: Path
    examples: int | None = None  # runs that each check draws; `None`: as many as the Hypothesis settings in force say
    seed: int | None = None  # of the drawing; `None`: Hypothesis chooses
    replay: Plan | None = None  # the one plan to run instead of drawing
    real_tools: bool = False  # call the agent's own tools and interactions
    prompts: tuple[Prompt, ...] = ()  # what trajectories begin from
    tokenizer: Any = None  # the engine's; `None`: the embedded model's
    texts: tuple[str, ...] = ()  # texts that turns may say beside those that the agent's own conditions ask for
    blocking_seconds: float | None = None  # real seconds that one callback may keep the event loop
    notes: dict[str, str] = field(default_factory=dict, compare=False)  # what a check has to say beyond its line

    @cached_property
    def graph(self) -> AgentGraph:
        """The agent; ConfigError has all problems of one that does not load."""
        reading = read_agent(self.path)
        if reading.graph is None or reading.problems:
            raise ConfigError(reading.problems)
        return reading.graph

    @cached_property
    def bound(self) -> Bound:
        """The proven bound."""
        return prove(self.graph)

    def simulate(self, plan: Plan, *laws_to_check: Law, graph: AgentGraph | None = None, **more: Any) -> Simulation:
        """Run a plan; hold the run to laws, first of all that it ends by itself.

        Raises:
            LawBroken: with the run.
        """
        run = simulate(
            graph or self.graph, plan, tokenizer=self.tokenizer, real_tools=self.real_tools, prompts=self.prompts,
            blocking_seconds=self.blocking_seconds, **more,
        )  # fmt: skip
        return judge(run, [handlers_stay, laws.keeps_running, *laws_to_check])

    def search(self, look: Callable[[Plan], T], *, failures: bool = True, another: int = 0, **what: bool) -> list[T]:
        """Return what ``look`` sees of drawn plans, or of the one to replay; or raise what it does for the smallest.

        ``another``: of a number greater than 0 the plans are others.
        """
        if self.replay is not None:
            return [look(self.replay)]
        tokenizer = self.tokenizer or embedded_tokenizer()
        script = engine_scripts(self.graph, tokenizer, failures=failures, texts=self.texts)
        drawn = plans(self.graph, script, failures=failures, **what)
        seed = None if self.seed is None else self.seed + another
        count = settings().max_examples if self.examples is None else self.examples
        seen: list[T] = []
        runner.search(drawn, lambda plan: seen.append(look(plan)), count, seed=seed, slow=_is_slow)
        return seen


def _is_slow(broken: Exception) -> bool:
    run = broken.run if isinstance(broken, LawBroken) else None
    return run is not None and isinstance(run.crash, Endless | LoopInterrupted)


def judge(run: Simulation, laws_to_check: Sequence[Law]) -> Simulation:
    """Hold a run to laws; LawBroken has the run."""
    for law in laws_to_check:
        try:
            law(run)
        except LawBroken as broken:
            broken.run = broken.run or run
            raise
    return run


# -- the checks -----------------------------------------------------------------------------------------------------


def rules(subject: CheckedAgent) -> str:
    """Law 1 and the numbered rules: the agent loads, and survives being written and read."""
    graph = subject.graph
    if loads(dump(graph), base=subject.path.parent) != graph:
        raise LawBroken(1, "written by dump() and loaded again it is another agent")
    return f"{len(graph.working_states)} working states, {len(graph.transitions)} transitions, no rule broken"


def bound(subject: CheckedAgent) -> str:
    """Law 2: no run is longer than the proof says."""

    def longest(plan: Plan) -> int:
        run = subject.simulate(plan, laws.stays_within(subject.bound))
        return max((trajectory.transitions for trajectory in run.trajectories), default=0)

    took = subject.search(longest, faults=False)
    return f"{subject.bound}; the longest of {len(took)} runs took {max(took)} of {subject.bound.transitions}"


def coverage(subject: CheckedAgent) -> str:
    """Every transition can fire; says how often each did in drawn runs, and which did not (``notes["missed"]``)."""
    names = {number: _name(row) for number, row in enumerate(subject.graph.transitions)}
    # 1. By the proof.
    possible = reachable_rows(subject.graph)
    if possible is not None and (dead := [name for number, name in names.items() if number not in possible]):
        raise LawBroken(2, f"{len(dead)} transition(s) can never fire, whatever happens:\n  " + "\n  ".join(dead))
    # 2. In drawn runs: in more of them, as long as one is missing.
    fired: Counter[int | None] = Counter()
    reasons: Counter[str] = Counter()

    def holds(plan: Plan) -> None:
        run = subject.simulate(plan)
        reasons.update(str(t.stop_reason) for t in run.trajectories)
        ids = [name for name, trajectory in run.live.items() if trajectory.agent == subject.graph.agent]
        fired.update(event.row for name in ids for event in run.events[name] if isinstance(event, Transitioned))

    runs = len(subject.search(holds, faults=False))
    for another in range(1, COVERAGE_ROUNDS if subject.replay is None else 1):
        if names.keys() <= fired.keys():
            break
        runs += len(subject.search(holds, faults=False, another=another))
    if not fired.keys() - {None}:
        raise LawBroken(2, f"no transition was ever taken in {runs} runs: every trajectory ended as {_listed(reasons)}")
    missed = [name for number, name in names.items() if not fired[number]]
    summary = f"{len(names) - len(missed)} of {len(names)} transitions taken in {runs} runs"
    never = {number: "" if fired[number] else "   NEVER TAKEN" for number in names}
    lines = [f"  {fired[number]:>6}  {name}{never[number]}" for number, name in names.items()]
    own = f"  {fired[None]:>6}  (of the machine's own: failures, time-outs and limits without a transition)"
    subject.notes["coverage"] = "\n".join([summary, *lines, own])
    if missed and subject.replay is None:
        advice = "draw more (--fsm-examples), or give what they ask for (--fsm-texts, --fsm-prompts, --fsm-real-tools)"
        subject.notes["missed"] = f"{summary}; never: {'; '.join(missed)}; {advice}"
    return subject.notes.get("missed", summary)


def _name(row: TransitionSpec) -> str:
    """Return a transition in one line: ``GENERATING --generated [has_tool_calls]--> PROCESSING_TOOLS``."""
    conditions = ", ".join(conditions_of(row))
    return f"{'|'.join(row.source)} --{row.trigger}{f' [{conditions}]' if conditions else ''}--> {row.dest}"


def ends(subject: CheckedAgent) -> str:
    """Laws 2 and 8: whatever fails, hangs, or is cancelled, every trajectory comes back, within the bound."""
    of_all_runs = laws.comes_back, laws.stays_within(subject.bound), laws.keeps_limits

    def reasons(plan: Plan) -> list[str]:
        run = subject.simulate(plan, handlers_behave, fails_as_drawn, *of_all_runs)
        if may_be_the_worlds(run):
            subject.simulate(plan.at_once(), handlers_manage)
        return [str(t.stop_reason or f"set aside: {t.suspended}") for t in run.trajectories]

    runs = subject.search(reasons)
    found = Counter(chain.from_iterable(runs))
    return f"{found.total()} trajectories in {len(runs)} runs: {_listed(found)}"


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())


def streams(subject: CheckedAgent) -> str:
    """Laws 3, 4, 5 and 7: masks, logprobs, versions and spans against the engine's own log."""

    def counts(plan: Plan) -> tuple[int, int]:
        run = subject.simulate(plan, laws.keeps_streams)
        streams = [stream.tokens for trajectory in run.trajectories for stream in trajectory.streams]
        return sum(map(len, streams)), sum(stream.trained_length for stream in streams)

    tokens, trained = zip(*(runs := subject.search(counts)), strict=True)
    return f"{sum(tokens):,} tokens, {sum(trained):,} of them trained, in {len(runs)} runs"


def schedule(subject: CheckedAgent) -> str:
    """Law 6: order of completion, batch size, admission and the number of replicas change no result."""
    graph = without_clocks(subject.graph)

    def holds(plan: Plan) -> None:
        second_run = subject.simulate(plan.rescheduled(), graph=graph)
        schedules = zip(plan.schedule, plan.other_schedule, strict=True)  # of (field, value) each
        changes = [f"{name} {first} or {second}" for (name, first), (_, second) in schedules if first != second]
        what = ", ".join(changes) or "a second run"
        subject.simulate(plan, lambda run: laws.same_results(run, second_run, what), graph=graph)

    runs = subject.search(holds, failures=False, faults=False, compared=True)
    return f"the same rows under two schedules each, in {len(runs)} runs"


def journalled(subject: CheckedAgent) -> str:
    """Law 6, of the journal: what is journalled folds to the trajectories, in memory and from the file."""
    # In memory, where that can be: disks take longer to be sure than a drawn run takes.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

    def events(plan: Plan) -> int:
        with tempfile.TemporaryDirectory(prefix="fsm-journal-", dir=memory) as folder:
            file = Path(folder) / "journal.sqlite"
            run = subject.simulate(plan, laws.keeps_events, journal=file)
            trajectories = {trajectory.trajectory_id: trajectory for trajectory in journal.read(file)}
        for name, trajectory in run.live.items():
            if trajectories.get(name) != trajectory:
                raise LawBroken(6, "its journal folds to something else", trajectory_id=name, run=run)
        return sum(map(len, run.events.values()))

    counts = subject.search(events)
    return f"{sum(counts):,} events in {len(counts)} journals"


def resume(subject: CheckedAgent) -> str:
    """Law 6: a run that is killed anywhere and goes on from its journal comes to what it would have come to."""
    graph = without_clocks(subject.graph)

    def holds(plan: Plan) -> None:
        uninterrupted = subject.simulate(plan, graph=graph)
        histories = uninterrupted.killed(plan.killed_after)
        resumed = subject.simulate(plan, laws.comes_back, graph=graph, resume=histories)
        cut = [Trajectory.fold(events) for events in histories]
        if any(trajectory.parent_id is not None and not trajectory.ended for trajectory in cut):
            return  # a sub-agent's call is made again, as another trajectory (same seed, another id)
        what = f"being killed after {min(plan.killed_after, len(uninterrupted.order))} events"
        judge(uninterrupted, [lambda run: laws.same_results(run, resumed, what, resumed=True)])

    runs = subject.search(holds, failures=False, faults=False, killed=True)
    return f"the same results after a kill, in {len(runs)} runs"


# The items of an agent, in order.
CHECKS: dict[str, Callable[[CheckedAgent], str]] = {
    "rules": rules,
    "bound": bound,
    "coverage": coverage,
    "ends": ends,
    "streams": streams,
    "schedule": schedule,
    "journal": journalled,
    "resume": resume,
}


DRAWN_FAILURES = frozenset({"Overload", "EngineError", "RuntimeError"})  # what plans let engines and users raise


def handlers_stay(run: Simulation) -> None:
    """Hold handlers to this: they do not try to end the program."""
    for visit in run.visits:
        if isinstance(visit.outcome, SystemExit):
            raise _blame(visit, f"raised SystemExit, which fails its trajectory alone\n  at {visit.where}")


def handlers_behave(run: Simulation) -> None:
    """Hold handlers to this: they return what they declare, let cancellation pass, fail only where that is routed."""
    for visit in run.visits:
        for _, what in visit.faults():  # what it may keep shows in whether the schedule matters
            raise _blame(visit, what)
    for visit in _raised(run):
        if not isinstance(visit.outcome, RolloutError | TimeoutError):
            raise _failed(visit)
    for name, history in run.events.items():
        for event in history:
            if isinstance(event, Transitioned) and str(event.detail).startswith("predicate '"):
                raise LawBroken(0, f"a predicate raised: {event.detail}", trajectory_id=name)


def may_be_the_worlds(run: Simulation) -> bool:
    """Say whether a handler was stopped, or raised what a failing world would make it raise."""
    return any(visit.stopped for visit in run.visits) or any(_raised(run))


def handlers_manage(calm: Simulation) -> None:
    """Hold handlers to this in a world where nothing fails and all is at once: they return, by themselves."""
    for visit in calm.visits:
        if visit.stopped:
            never = "never returns by itself: it was stopped by its timeout"
            waits = f"\n  it waits at {visit.where}" if visit.where else ""
            raise _blame(visit, f"{never}, though the engine, the tools and the users answered at once{waits}")
    for visit in _raised(calm):
        raise _failed(visit)


def fails_as_drawn(run: Simulation) -> None:
    """Hold agents to this: a trajectory fails only by what the plan, or a handler that may, has raised."""
    raised = {type(visit.outcome).__name__ for visit in run.visits}
    for trajectory in run.trajectories:
        failed, _, kind = str(trajectory.stop_reason).partition(":")
        if failed == "failed" and kind not in DRAWN_FAILURES | raised:
            what = f"it failed, though nothing was drawn to fail: {kind}: {trajectory.detail}"
            raise LawBroken(0, what, trajectory_id=trajectory.trajectory_id)


def _raised(run: Simulation) -> Iterator[HandlerVisit]:
    """Yield the visits that raised something of their own where no transition takes ``failed``."""
    for visit in run.visits:
        error, graph = visit.outcome, run.graph
        its_fault = isinstance(error, asyncio.CancelledError) and not visit.cancelled
        its_fault = its_fault or (isinstance(error, Exception) and not isinstance(error, PromptTooLong | LimitReached))
        if its_fault and not (visit.state in graph.states and any(graph.rows_of(visit.state, Trigger.FAILED))):
            yield visit


def _failed(visit: HandlerVisit) -> LawBroken:
    error = visit.outcome
    what = f"raised {type(error).__name__}{f': {error}' if str(error) else ''}\n  at {visit.where}"
    return _blame(
        visit, f"{what}\n  no transition takes 'failed' there: handle it in the handler, or write a transition"
    )


def _blame(visit: HandlerVisit, what: str) -> LawBroken:
    return LawBroken(0, f"the handler of '{visit.state}' ({visit.handler}) {what}", trajectory_id=visit.trajectory_id)
