"""Deterministic simulation: the real scheduler, on a virtual clock, in a world that a plan describes.

Invariant: :func:`simulate` is a function of the agent, the plan and the tokenizer: same input, same events at the same
moments. Nothing is mocked inside: scheduler, dispatch, the pool of replicas, chat templates, tool formats, limits and
the user's own handlers are the real ones; only what is outside (engines, tools, users, time) is drawn. What went wrong
on the way is kept (:attr:`Simulation.crash`), never raised, so that there is always something to look at.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from fsm_rollout.agent.graph import POLICY, AgentGraph
from fsm_rollout.agent.loader import load_agent
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.concurrency.garbage_collection import calm_collection
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import Logged, ScriptedEngine, SessionEnded
from fsm_rollout.engines.scripted.script import Script, Turn
from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import EMBEDDED, load_tokenizer, model_folder
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.resume import History
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.states.external.handler import External
from fsm_rollout.testing.simulation.blocked_loop import Blockage, LoopInterrupted, blocking_detected
from fsm_rollout.testing.simulation.plan import Fault, Plan
from fsm_rollout.testing.simulation.stand_ins import (
    MortalReplicas,
    OneEngine,
    SimulatedAgent,
    SimulatedTool,
    with_agents,
    with_simulated_users,
)
from fsm_rollout.testing.simulation.virtual_time import VirtualTimeLoop, run_virtual
from fsm_rollout.testing.simulation.visits import HandlerVisit, watch_visits
from fsm_rollout.tools.bound_tools import AgentTool
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.prompt import Prompt, as_prompts
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory

WINDOW = 4096  # tokens of the simulated engine's context window, where nothing else is asked for
# Virtual seconds (a day and a bit) after which a run counts as endless, where the agent does not allow for more.
HORIZON = 1e5
# Something around a run, of its scheduler and of what puts simulated tools and handlers into a set of its agents.
Around = Callable[[Scheduler, Callable[[RunAgents], None]], AbstractAsyncContextManager[None]]


@cache
def embedded_tokenizer() -> Any:
    """Return the embedded model's tokenizer; loaded once."""
    return load_tokenizer(model_folder(EMBEDDED))


@cache
def _shared_chats(tokenizer: object) -> dict[object, ChatTemplate]:
    """Return the chat templates of a tokenizer: what one has learnt about its template serves all simulations."""
    return {}


@contextmanager
def quietly() -> Iterator[None]:
    """Keep the log clean: in a simulation failures are drawn, and thousands of warnings would say so."""
    loggers = [logging.getLogger(name) for name in ("fsm_rollout", "asyncio")]
    # Each change costs Python all its loggers' caches, so what is quiet is let be.
    before = [(logger, logger.level) for logger in loggers if logger.level <= logging.CRITICAL]
    for logger, _ in before:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One request as an engine knows it, and all that it sampled for it.

    A request that went on at another replica is two: the second begins with what the first had sampled.
    """

    request: Request
    ids: array[int]
    logprobs: array[float]
    versions: list[int]


@dataclass(slots=True)
class Simulation:
    """One finished run: what came back, and what the other side (engines, handlers, the loop) knows of it."""

    graph: AgentGraph
    plan: Plan
    tokenizer: Any
    engine: EnginePool
    replicas: MortalReplicas
    """Those of the pool."""
    log: Sequence[Logged] = ()
    """What reached and left each of its replicas."""
    groups: list[Group] = field(default_factory=list)
    events: dict[str, list[AnyEvent]] = field(default_factory=lambda: defaultdict(list))
    """Every event, by trajectory, as the listeners heard it."""
    order: list[tuple[str, AnyEvent]] = field(default_factory=list)
    """The same events in the order in which they happened, as a journal has them."""
    live: dict[str, Trajectory] = field(default_factory=dict)
    """Every trajectory that was ever begun, whether or not it came back."""
    visits: list[HandlerVisit] = field(default_factory=list)
    """All visits of users' handlers."""
    blockages: Sequence[Blockage] = ()
    """Where the event loop was blocked."""
    crash: BaseException | None = None
    """What ended the run, or kept it from ending."""
    complaints: list[str] = field(default_factory=list)
    """What the event loop had to say about callbacks and tasks that failed on their own."""
    seconds: float = 0.0
    """Virtual seconds that it took."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All that came back, sub-agents' among them."""
        return [trajectory for group in self.groups for trajectory in (*group.all, *group.discarded)]

    @property
    def transitions(self) -> int:
        """Transitions that fired."""
        return sum(trajectory.transitions for trajectory in self.live.values())

    def killed(self, after: int) -> list[list[AnyEvent]]:
        """Return the histories that a journal would hold, had the run been killed after so many events."""
        histories: dict[str, list[AnyEvent]] = defaultdict(list)
        for trajectory_id, event in self.order[:after]:
            histories[trajectory_id].append(event)
        return list(histories.values())

    def sampled(self) -> dict[tuple[str, str], list[Sampled]]:
        """Return, by trajectory and context, each request and what the engines' own log says was sampled for it.

        What handlers and interactions asked a model (:meth:`HandlerContext.ask`) is in no context.
        """
        requests: dict[str, Sampled] = {}
        for line in self.log:
            what = line.what
            if isinstance(what, Request):
                requests[what.request_id] = Sampled(what, array("i"), array("f"), [])
                continue
            if isinstance(what, SessionEnded):
                continue
            sampled = requests[what.request_id]
            sampled.ids.extend(what.ids)
            sampled.logprobs.extend(what.logprobs)
            sampled.versions.extend([what.weight_version] * len(what.ids))
        found: dict[tuple[str, str], list[Sampled]] = defaultdict(list)
        for sampled in requests.values():
            request = sampled.request
            if not request.request_id.startswith(f"{request.trajectory_id}/ask:"):
                found[request.trajectory_id, request.context].append(sampled)
        return found


def simulate(
    graph: AgentGraph,
    plan: Plan,
    *,
    tokenizer: Any = None,
    real_tools: bool = False,
    prompts: Sequence[Prompt] = (),
    sampling: Sampling | None = None,
    max_context: int = WINDOW,
    journal: str | Path | None = None,
    resume: Sequence[History] = (),
    blocking_seconds: float | None = None,
    around: Around | None = None,
) -> Simulation:
    """Run an agent as a plan says, in virtual time.

    Args:
        graph: the agent.
        plan: what engines, tools and users do, and what is done to the run.
        tokenizer: of the engine; default: the embedded model's.
        real_tools: call the agent's own tools and interactions instead of meeting the plan's fates.
        prompts: what to begin from, in turn; default: short questions.
        sampling: the run's, laid over the agent's.
        max_context: the engine's window, in tokens.
        journal: a file to keep the events in.
        resume: trajectories to go on with, of an earlier simulation of the same agent and plan.
        blocking_seconds: real seconds that one callback may keep the event loop.
        around: entered before the run begins and left when it is over.
    """
    # 1. The world: the agent with simulated users, and an engine, or several that can be killed.
    tokenizer = tokenizer or embedded_tokenizer()
    build = partial(
        ScriptedEngine, partial(_says, plan), tokenizer=tokenizer, max_context=max_context,
        max_running=plan.schedule.max_running, log=True,
    )  # fmt: skip
    replicas = MortalReplicas(lambda name: build(replica=name))
    result = Simulation(
        graph, plan, tokenizer, EnginePool(replicas, plan.schedule.replicas), replicas, replicas.traffic
    )
    played = graph if real_tools else with_simulated_users(graph, plan.replies)
    # 2. What to begin from.
    requests = [
        prompts[number % len(prompts)].model_copy(update={"prompt_id": f"p{number}"})
        if prompts
        else Prompt(prompt_id=f"p{number}", messages=({"role": "user", "content": f"Question {number}?"},))
        for number in range(plan.prompts)
    ]
    # 3. The run.
    run = _run(
        result, played, requests, real_tools=real_tools, sampling=sampling, journal=journal, resume=resume,
        around=around,
    )  # fmt: skip
    loop = VirtualTimeLoop(horizon=max(HORIZON, 2 * (graph.limits.wall_seconds or 0)))
    result.complaints = loop.complaints()
    try:
        with quietly(), calm_collection(), blocking_detected(lambda: loop.beat, blocking_seconds) as blockages:
            result.blockages = blockages
            run_virtual(run, loop=loop)
    except (Exception, LoopInterrupted, SystemExit) as error:
        result.crash = error
    # 4. What a crash has left half-way is closed; in closing it may ask for the loop.
    finally:
        asyncio.set_event_loop(loop)
        try:
            with suppress(RuntimeError):  # what needs a loop that runs is over with it
                run.close()
        finally:
            asyncio.set_event_loop(None)
            loop.set_exception_handler(lambda *_: None)  # a pool knows its loop for long, which need not know the run
            if not loop.is_closed():
                loop.close()
    return result


def _says(plan: Plan, request: Request) -> Turn:
    """Return what the engine says; to a sub-agent as to its parent, to a new attempt as to the old one."""
    prompt, sample, *_ = request.trajectory_id.split("/")
    number = int(prompt[1:]) * plan.n + int(sample.partition("~")[0])
    turn = plan.turn(number, f"{request.agent}/{request.context}", request.turn)
    slow = plan.schedule.slow
    return turn if slow == 1.0 or not turn.delay else turn.model_copy(update={"delay": turn.delay * slow})


async def _run(
    result: Simulation, played: AgentGraph, prompts: Sequence[Prompt], *, real_tools: bool,
    sampling: Sampling | None, journal: str | Path | None, resume: Sequence[History], around: Around | None,
) -> None:  # fmt: skip
    plan, engine = result.plan, result.engine
    loop = asyncio.get_running_loop()

    def listen(trajectory: Trajectory, event: AnyEvent) -> None:
        result.events[trajectory.trajectory_id].append(event)
        result.order.append((trajectory.trajectory_id, event))
        result.live[trajectory.trajectory_id] = trajectory

    with nullcontext() if journal is None else closing(Journal(journal)) as book:
        # 1. The scheduler, with simulated tools in the place of real ones; users' handlers are watched.
        scheduler = Scheduler(
            {played.agent: played}, OneEngine(engine, chats=_shared_chats(result.tokenizer)), seed=plan.seed,
            concurrency=plan.schedule.concurrency, sampling=sampling, listeners=[listen], journal=book,
        )  # fmt: skip

        def simulated(agents: RunAgents) -> None:
            for agent in agents.all:
                if not real_tools:
                    agent.toolbox.replace(lambda t: t if isinstance(t, AgentTool) else SimulatedTool(t, plan.tools))
                for state, handler in list(agent.handlers.items()):
                    if isinstance(handler, External):
                        agent.handlers[state] = SimulatedAgent(state, agent.graph.states[state])
                    if ":" in agent.graph.handler_of(state):
                        watch_visits(handler, result.visits)

        simulated(scheduler.agents)
        # 2. The run, and what interferes with it.
        try:
            async with nullcontext() if around is None else around(scheduler, simulated):
                faults = [loop.create_task(_interfere(result, scheduler, fault)) for fault in plan.faults]
                try:
                    async for group in scheduler.run(prompts, plan.n, resume=resume):
                        result.groups.append(group)
                finally:
                    result.seconds = loop.time()
                    for task in faults:
                        task.cancel()
                    await asyncio.gather(*faults, return_exceptions=True)
        # 3. The end, however it came.
        finally:
            result.log = result.replicas.log(replica.name for replica in engine.replicas if replica.state == "up")
            await engine.aclose()


async def _interfere(result: Simulation, scheduler: Scheduler, fault: Fault) -> None:
    await asyncio.sleep(fault.at)
    prompt, sample = divmod(fault.target % (result.plan.prompts * result.plan.n), result.plan.n)
    trajectory_id = f"p{prompt}/{sample}"
    policy = scheduler.clients[POLICY]
    match fault.kind:
        case "cancel":
            scheduler.cancel(trajectory_id)
        case "suspend":
            scheduler.suspend(trajectory_id, "drawn")
        case "stop":
            scheduler.stop()
        case "update_weights":
            await scheduler.update_weights({})
        case "pause":
            await policy.pause()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(fault.seconds)
            await policy.resume()
        case "abort":
            requests = [line.what for line in result.log if isinstance(line.what, Request)]
            for engine in result.replicas.living:
                await engine.abort([r.request_id for r in requests if r.trajectory_id == trajectory_id])
        case "kill_replica":
            result.replicas.kill(fault.target)
        case "add_replica":
            await policy.pool.add()
        case "remove_replica":
            staying = [replica.name for replica in policy.pool.replicas if not replica.leaving]
            with suppress(EngineError):  # it is the only one
                await policy.pool.remove(staying[fault.target % len(staying)], fault.seconds)


def without_clocks(graph: AgentGraph) -> AgentGraph:
    """Return the agent without timeouts: what the clock cuts off is the one thing that may depend on a schedule."""

    def slowed(graph: AgentGraph) -> AgentGraph:
        timed = {"timeout": HORIZON / 10}
        changed: dict[str, object] = {
            kind: {
                name: spec if spec.timeout is None else spec.model_copy(update=timed)
                for name, spec in getattr(graph, kind).items()
            }
            for kind in ("states", "tools")
        }
        if graph.limits.wall_seconds is not None:
            changed["limits"] = graph.limits.model_copy(update={"wall_seconds": HORIZON})
        return graph.model_copy(update=changed)

    return with_agents(graph, slowed)


def run_one(
    agent: AgentGraph | str | Path, turns: Script = (), *,
    prompt: str | Mapping[str, object] | Prompt = "What is 2 + 2?", **options: Any,
) -> Trajectory:  # fmt: skip
    """Run one trajectory of an agent in virtual time, to its end, and return it.

    Args:
        agent: a graph, or its YAML's path.
        turns: what the engines say, whatever their names.
        prompt: a text, or a prompt with its own fields (``interaction_kwargs``, ``tools_kwargs``, …).
        options: those of :class:`Scheduler`.
    """
    graph = agent if isinstance(agent, AgentGraph) else load_agent(agent)
    return run_virtual(one_trajectory(graph, turns, prompt, **options))


async def one_trajectory(
    graph: AgentGraph, turns: Script, prompt: str | Mapping[str, object] | Prompt, **options: Any
) -> Trajectory:
    """Run one trajectory, as :func:`run_one` does, on the loop that runs."""
    engine = ScriptedEngine(turns, tokenizer=embedded_tokenizer())
    scheduler = Scheduler({graph.agent: graph}, OneEngine(engine), **options)
    prompts = as_prompts([prompt])
    scheduler.check(prompts)
    (group,) = [group async for group in scheduler.run(prompts)]
    return group.trajectories[0]
