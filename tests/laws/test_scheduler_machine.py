"""The real scheduler and dispatcher under any order of what can be done to them, against a model of what comes back.

The loop is stepped rule by rule: between two rules everything that can run without time passing has run. The model
knows what was submitted and what was done to it; tokens and versions are compared with the engines' own log. Two
machines hold one engine, and a pool of replicas that die one by one, to the same.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.replica import Placement, PoolTimes
from fsm_rollout.engines.retries import Tries
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.errors import ConfigError
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.testing.simulation.virtual_time import VirtualTimeLoop
from fsm_rollout.trajectory.events import AnyEvent, Ended
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.tokens import Owner
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.laws.mortals import Losses, Mortal, MortalPool
from tests.runs import TOOLS, agent, changed
from tests.sessions import kept_sessions

ATTEMPTS = 2
"""Tries of a generation, after which the dispatcher gives it up."""
AGENT = agent(
    changed(TOOLS, GENERATING={"sampling": {"max_tokens": 48}, "timeout": 20.0}, PROCESSING_TOOLS={"timeout": 8.0}),
    agent="machine",
    limits={"assistant_turns": 3, "tool_calls": 4, "wall_seconds": 10_000},
    tools={name: {"use": f"tests.law_tools:{name}", "timeout": 3.0} for name in ("echo", "hang")},
)


def call(tool: str) -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {{"text": "abc"}}}}\n</tool_call>'


CALM = [
    Turn(text="Four."),
    Turn(text="It is four, I think.", delay=1.0, chunks=4),
    Turn(text=call("echo"), delay=0.5, chunks=2),
    Turn(text=call("hang"), delay=0.5),
    Turn(text="words " * 60, delay=0.25, chunks=3),
]
"""What a model may say while nothing fails; the third and fourth call tools, the last is cut short."""
BROKEN = {
    "failed:Overload": Turn(text="half a", error="Overload: try later", delay=0.5, chunks=2),
    "mends": Turn(text="half a", error="Overload: try later", fails=1, delay=0.5, chunks=2),
    "timed_out": Turn(text="half a", hang=True, delay=0.5),
    "crash": Turn(text="half a", crash="gone", delay=0.5, chunks=2),
}
"""What a turn may come to, by the stop reason of a trajectory that it ends."""


@dataclass
class Submitted:
    """What the model knows of one prompt: what was asked, and what was done to it since."""

    n: int
    says: list[Turn]
    """Of the trajectories' turns; the last one repeats."""
    fate: dict[str, str] = field(default_factory=dict)
    """What each trajectory that was stopped must come to: the first stop counts."""
    due: bool = True
    """Whether it has still to come back."""


class SchedulerMachine(RuleBasedStateMachine):
    def make_engine(self) -> Mortal | MortalPool:
        """Build what serves the run."""
        return Mortal(self.script, self.losses, max_running=self.max_running)

    @initialize(max_running=st.sampled_from([None, 2]), concurrency=st.sampled_from([2, 64]))
    def start(self, max_running: int | None, concurrency: int) -> None:
        self.max_running = max_running
        self.prompts: dict[str, Submitted] = {}
        self.back: list[Group] = []
        self.loop = VirtualTimeLoop()
        asyncio.set_event_loop(None)
        self.tasks: list[asyncio.Task[None]] = []
        self.version = 0
        self.paused_at: int | None = None
        self.losses = Losses()
        self.over: set[str] = set()
        self.engine = self.make_engine()
        tries, times = Tries(attempts=ATTEMPTS), PoolTimes(silence=50_000.0)
        alone = isinstance(self.engine, Mortal)
        pool = EnginePool(Placement(self.engine), tries=tries, times=times) if alone else self.engine
        self.dispatcher = EngineClient(pool)
        self.scheduler = self.instantly(self.make_scheduler(concurrency))

    async def make_scheduler(self, concurrency: int) -> Scheduler:
        return Scheduler({"machine": AGENT}, {"policy": self.dispatcher}, concurrency=concurrency,
                         listeners=[self.listen])  # fmt: skip

    def listen(self, trajectory: Trajectory, event: AnyEvent) -> None:
        if isinstance(event, Ended):
            self.over.add(trajectory.trajectory_id)

    def script(self, request: Request) -> Turn:
        says = self.prompts[request.group_id].says
        return says[min(request.turn, len(says) - 1)]

    def instantly(self, work: Any) -> Any:
        """Run a coroutine that takes no time, and all that follows from it."""
        now = self.loop.time()
        result = self.loop.run_until_complete(work)
        self.loop.run_until_idle()
        assert self.loop.time() == now, "what takes no time has taken some"
        return result

    def settle(self) -> None:
        """Run all that can run without time passing."""
        self.loop.run_until_idle()
        for task in self.tasks:
            if task.done():
                task.result()

    async def collect(self, prompts: list[Prompt], n: int, resume: list[Trajectory]) -> None:
        async for group in self.scheduler.run(prompts, n, resume=resume):
            self.back.append(group)
            self.came_back(group)

    def came_back(self, group: Group) -> None:
        submitted = self.prompts[group.group_id]
        assert submitted.due, f"prompt {group.group_id} came back twice"
        submitted.due = False
        names = [trajectory.trajectory_id for trajectory in group.trajectories]
        assert names == [f"{group.group_id}/{sample}" for sample in range(submitted.n)]
        for trajectory in group.trajectories:
            self.check_end(submitted, trajectory)
            self.check_tokens(trajectory)

    def check_end(self, submitted: Submitted, trajectory: Trajectory) -> None:
        assert trajectory.ended != (trajectory.suspended is not None)
        fate = submitted.fate.get(trajectory.trajectory_id)
        if fate is not None:
            came = "suspended" if trajectory.suspended is not None else trajectory.stop_reason
            assert came == fate, f"{trajectory.trajectory_id} was {fate} and came back as {came}"
            return
        assert trajectory.suspended is None
        says = [submitted.says[min(turn, len(submitted.says) - 1)] for turn in range(3)]
        lost = self.losses.most(trajectory.trajectory_id)
        allowed = {"failed:EngineError"} if lost >= ATTEMPTS else set()
        if lost:
            allowed.add("timed_out")  # it was admitted once, so its time runs while the next try queues
        for turn in says:
            reason = next((reason for reason, broken in BROKEN.items() if broken is turn), None)
            if reason == "crash":
                break  # its whole dispatch fails with it, each time; the engine has counted whose
            if reason == "mends" and lost >= ATTEMPTS:
                allowed.add("failed:Overload")  # its one good try met something else
            elif reason is not None and reason != "mends":
                allowed.add(reason)
                break
            if turn.text is not None and turn.text.startswith("words"):
                allowed.add("truncated")
                break
            if turn.text is None or not turn.text.startswith("<tool_call>"):
                allowed.add("answered")
                break
        else:
            allowed.add("limit:assistant_turns")
        assert trajectory.stop_reason in allowed, f"{trajectory} ({trajectory.detail}), {says}"

    def check_tokens(self, trajectory: Trajectory) -> None:
        """All that the engine emitted for it is in it, in order, with its logprobs and versions; and nothing else."""
        asked: dict[str, str] = {}
        emitted: list[tuple[int, float, int]] = []
        for line in self.engine.log:
            if isinstance(line.what, Request):
                asked[line.what.request_id] = line.what.trajectory_id
            elif isinstance(line.what, Chunk) and asked[line.what.request_id] == trajectory.trajectory_id:
                chunk: Chunk = line.what
                emitted += [(i, p, chunk.weight_version) for i, p in zip(chunk.ids, chunk.logprobs, strict=True)]
        held: list[tuple[int, float, int]] = []
        for stream in trajectory.streams:
            tokens = stream.tokens
            rows = zip(
                tokens.response_ids().tolist(), tokens.response_logprobs().tolist(),
                tokens.response_versions().tolist(), strict=True,
            )  # fmt: skip
            owners = [span.owner for span in tokens.spans for _ in range(span.start, span.end)][tokens.prompt_length :]
            held += [row for row, owner in zip(rows, owners, strict=True) if owner is Owner.MODEL]
            assert tokens.response_mask().tolist() == [int(owner is Owner.MODEL) for owner in owners]
        assert held == emitted

    # -- rules ----------------------------------------------------------------------------------------------------

    @property
    def free(self) -> bool:
        """Whether no run is under way: there is one at a time."""
        return all(task.done() for task in self.tasks)

    @precondition(lambda self: self.free)
    @rule(
        n=st.integers(1, 3),
        scripts=st.lists(
            st.lists(st.sampled_from(CALM) | st.sampled_from(list(BROKEN.values())), min_size=1, max_size=3),
            min_size=1,
            max_size=4,
        ),
    )
    def submit(self, n: int, scripts: list[list[Turn]]) -> None:
        prompts = []
        for says in scripts:
            name = f"p{len(self.prompts)}"
            self.prompts[name] = Submitted(n, says)
            prompts.append(Prompt(prompt_id=name, messages=({"role": "user", "content": "What is 2 + 2?"},)))
        self.tasks.append(self.loop.create_task(self.collect(prompts, n, [])))
        self.settle()

    @precondition(lambda self: not self.free)
    @rule()
    def run_beside_another(self) -> None:
        with pytest.raises(ConfigError, match="a run is under way already, and there is one at a time"):
            self.instantly(self.collect([], 1, []))

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 7.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.settle()

    @property
    def under_way(self) -> list[str]:
        return [f"{name}/{k}" for name, prompt in self.prompts.items() if prompt.due for k in range(prompt.n)]

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), suspend=st.booleans())
    def stop_one(self, data: st.DataObject, suspend: bool) -> None:
        name = data.draw(st.sampled_from(self.under_way))
        stopped = self.scheduler.suspend(name) if suspend else self.scheduler.cancel(name)
        if stopped:
            self.prompts[name.partition("/")[0]].fate.setdefault(name, "suspended" if suspend else "cancelled")
        self.settle()

    @rule(suspend=st.booleans())
    def stop_all(self, suspend: bool) -> None:
        for name, submitted in self.prompts.items():
            if submitted.due:
                for sample in {*range(submitted.n)} - {k for k in range(submitted.n) if f"{name}/{k}" in self.over}:
                    submitted.fate.setdefault(f"{name}/{sample}", "suspended" if suspend else "cancelled")
        self.scheduler.stop("enough" if suspend else None)
        self.settle()
        assert not self.under_way, "what is stopped comes back at once"

    @precondition(lambda self: self.paused_at is None)
    @rule()
    def pause(self) -> None:
        self.instantly(self.dispatcher.pause())
        self.paused_at = len(self.engine.log)

    @precondition(lambda self: self.paused_at is not None)
    @rule()
    def go_on(self) -> None:
        since = [line.what for line in self.engine.log[self.paused_at :]]
        assert not any(isinstance(what, Chunk) and len(what.ids) for what in since), "a paused engine sampled"
        self.paused_at = None
        self.instantly(self.dispatcher.resume())

    @rule()
    def update_weights(self) -> None:
        """Where all replicas are dead, the first that is back takes the weights; else that takes no time."""
        self.version += 1
        run = self.instantly if self.engine.living else self.loop.run_until_complete
        assert run(self.scheduler.update_weights({})) == self.version
        self.settle()

    @precondition(lambda self: self.engine.busy)
    @rule(number=st.integers(0, 2))
    def kill(self, number: int) -> None:
        """An engine's process dies, and is there again."""
        self.engine.kill(number)
        self.settle()

    @precondition(lambda self: self.engine.busy)
    @rule(data=st.data())
    def engine_aborts(self, data: st.DataObject) -> None:
        """The engine ends a request that nobody asked it to end: it is tried again."""
        self.instantly(self.engine.fail(data.draw(st.sampled_from(self.engine.busy))))

    @property
    def set_aside(self) -> list[Group]:
        latest = {group.group_id: group for group in self.back}
        return [
            group
            for name, group in latest.items()
            if not self.prompts[name].due and any(t.suspended is not None for t in group.trajectories)
        ]

    @precondition(lambda self: self.free and self.set_aside)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """Let a group go on that came back with something set aside; it comes back once more."""
        group = data.draw(st.sampled_from(self.set_aside))
        submitted = self.prompts[group.group_id]
        submitted.due = True
        submitted.fate = {name: fate for name, fate in submitted.fate.items() if fate != "suspended"}
        self.tasks.append(self.loop.create_task(self.collect([], submitted.n, list(group.trajectories))))
        self.settle()

    # -- what always holds, and the end -----------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "prompts"):
            return
        running = sum(not task.done() for task in self.tasks)
        assert bool(self.under_way) == bool(running), "a prompt is due and nobody works on it, or the other way round"

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self.come_to_the_end()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_idle()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    def come_to_the_end(self) -> None:
        if self.paused_at is not None:
            self.instantly(self.dispatcher.resume())
        if self.tasks:
            self.loop.run_until_complete(asyncio.gather(*self.tasks))
        self.loop.run_until_idle()
        busy = self.engine.busy
        self.loop.run_until_complete(self.engine.aclose())
        self.loop.run_until_idle()
        assert not self.under_way
        assert {group.group_id for group in self.back} == set(self.prompts)
        left = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
        assert not left, f"still running: {left}"
        assert not isinstance(self.engine, Mortal) or not kept_sessions(self.engine.log)
        assert not busy


class PoolMachine(SchedulerMachine):
    """The same on a pool: one replica more or less is nothing that a trajectory notices."""

    def make_engine(self) -> MortalPool:
        return MortalPool(self.script, self.losses, 3 if self.max_running else 2, max_running=self.max_running)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=max(20, settings.default.max_examples // 3), stateful_step_count=15)
TestSchedulerOnAPool = PoolMachine.TestCase
TestSchedulerOnAPool.settings = settings(
    max_examples=max(20, settings.default.max_examples // 5), stateful_step_count=15
)
