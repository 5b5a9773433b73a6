"""The handler check passes all handlers there are, and names the fault of broken ones."""

from __future__ import annotations

import asyncio
import random
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from fsm_rollout.agent.handlers import BUILT_IN_HANDLERS
from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.errors import ConfigError
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing import ConformanceError, check_state
from fsm_rollout.testing.conformance import runner
from fsm_rollout.testing.simulation import blocked_loop
from fsm_rollout.trajectory.events import Ended
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory


# Programs of others keep no promise of a handler's; what `external` itself promises is in test_foreign_agents.
@pytest.mark.parametrize("handler", sorted(set(BUILT_IN_HANDLERS) - {"external"}))
def test_the_built_in_handlers_conform(handler: str) -> None:
    state = {"prompt": "Once more."} if handler == "write" else {}
    checked = check_state(handler, state=state, examples=8)
    assert "resumed" in checked.promises
    assert checked.examples > 20


@pytest.mark.parametrize(
    ("handler", "state"), [("tests.custom_code:Search", {"options": {"depth": 2}}), ("tests.custom_code:Free", {})]
)
def test_handlers_of_a_users_module_conform(handler: str, state: dict[str, Any]) -> None:
    check_state(handler, state=state, examples=8)


def test_a_critic_of_its_own_context_conforms() -> None:
    check_state(
        "generate",
        state={"context": "critic", "prompt": "Judge: {{ text }}", "reset": True, "sampling": {"max_tokens": 8}},
        agent={"contexts": {"critic": {"engine": "judge"}}},
        examples=6,
    )


class Base(State):
    """What the broken ones below have in common: one trigger."""

    triggers = ("done",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        return Outcome("done")


class Several(Base):
    """Generates twice, calls, asks, writes and scores: all that a visit offers, in one good handler."""

    spends = "assistant_turns"

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        generated = await ctx.generate("main")
        for attempt in generated.attempts:  # those of the trajectory may be later ones, in a visit that is resumed
            await ctx.call_tool(attempt)
        ctx.write([{"role": "user", "content": f"Think {ctx.rng.randint(0, 9)}."}], context="main")
        await ctx.generate("main", Sampling(max_tokens=8))
        ctx.score_turn(0.5)
        verdict = await ctx.ask("policy", [{"role": "user", "content": "Is it good?"}])
        ctx.write([{"role": "user", "content": verdict or "Nothing."}], context="main")
        return Outcome("done")


def test_a_good_handler_that_does_everything_conforms() -> None:
    check_state(Several, examples=8)


class Asks(Base):
    """Asks a model that no context of the agent has."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        verdict = await ctx.ask("judge", [{"role": "user", "content": "Right?"}])
        ctx.write([{"role": "user", "content": f"They said {len(verdict)} letters."}], context="main")
        return Outcome("done")


def test_a_handler_may_ask_any_engine() -> None:
    check_state(Asks, examples=8)


class RunsACommand(Base):
    """Good: the process runs beside the loop."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        process = await asyncio.create_subprocess_exec("expr", "2", "+", "2", stdout=subprocess.PIPE)
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        ctx.write([{"role": "user", "content": output.decode()}], context="main")
        return Outcome("done")


def test_a_handler_that_runs_a_command_conforms() -> None:
    check_state(RunsACommand, examples=5)


class NoTriggers(Base):
    triggers = ()


class Unwritten(State):
    triggers = ("done",)


class Presumptuous(Base):
    triggers = ("timed_out",)


class Options(BaseModel):
    depth: int


class WantsOptions(Base):
    Options = Options


class Undeclared(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        return Outcome("finished" if trajectory.text == "ACCEPT" else "done")


class ReturnsText(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        return "done"  # type: ignore[return-value]


class Raises(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        first = trajectory.text[0]  # an empty turn has none
        ctx.write([{"role": "user", "content": f"You began with {first}."}], context="main")
        return Outcome("done")


class Counts(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        self.count = getattr(self, "count", 0) + 1
        return Outcome("done")


class CountsOnItsClass(Base):
    seen: ClassVar[Counter[str]] = Counter()

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        self.seen[trajectory.trajectory_id] += 1
        return Outcome("done")


SHARED: list[str] = []


class SharesAList(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        SHARED.append(trajectory.trajectory_id)
        try:
            await asyncio.sleep(1.0)
            ctx.write([{"role": "user", "content": f"{len(SHARED)} are here."}], context="main")
            await asyncio.sleep(1.0)
        finally:
            SHARED.remove(trajectory.trajectory_id)
        return Outcome("done")


class NeverReturns(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        await asyncio.Event().wait()
        return Outcome("done")


class Swallows(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        await asyncio.sleep(0)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1.0)
        return Outcome("done")


class Deaf(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        for _ in range(20):
            try:
                await asyncio.sleep(1.0)
            except asyncio.CancelledError:
                continue
        return Outcome("done")


class Turns(Base):
    """Cancellation becomes an error of its own."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        try:
            await asyncio.sleep(1.0)
        except BaseException as error:
            raise RuntimeError("the sandbox is gone") from error
        return Outcome("done")


class FailsToTidyUp(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        await ctx.opened("main")
        await ctx.ask("policy", [{"role": "user", "content": "Well?"}])
        return Outcome("done")

    def timed_out(self, trajectory: Trajectory, ctx: HandlerContext) -> None:
        raise KeyError("nothing was open")


class Sleeps(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        time.sleep(30)  # noqa: ASYNC251
        return Outcome("done")


class Computes(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        began = time.thread_time()
        while time.thread_time() - began < 0.4:
            pass
        return Outcome("done")


def test_a_handler_that_computes_for_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "BUSY_SECONDS", 0.3)
    with pytest.raises(ConformanceError, match=r"Computes.run kept the event loop busy for 0\.\d s") as found:
        check_state(Computes, examples=5)
    assert found.value.invariant == 6


left_behind: list[Any] = []


class LeavesATask(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        left_behind.append(asyncio.create_task(asyncio.sleep(5.0), name="prefetch"))
        return Outcome("done")


class WritesItDirectly(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        trajectory.spent["searches"] = 1
        return Outcome("done")


class WritesIntoThePrompt(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        trajectory.extra["note"] = "x"  # type: ignore[index]
        return Outcome("done")


class RewritesAMessage(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        trajectory.stream("main").messages[-1]["content"] = "something else"
        return Outcome("done")


class GoesWhereItLikes(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        trajectory.state = "GENERATING"
        return Outcome("done")


class EndsIt(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        ctx.emit(Ended(at=ctx.clock(), stop_reason="enough"))
        return Outcome("done")


class IgnoresLimits(Base):
    spends = "assistant_turns"

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        try:
            await ctx.generate("main")
        except LimitReached:
            ctx.write([{"role": "user", "content": "Never mind."}], context="main")
        return Outcome("done")


class Dices(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        ctx.write([{"role": "user", "content": f"Take {random.random()}."}], context="main")
        return Outcome("done")


class DicesItsWay(Base):
    triggers = ("left", "right")

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        return Outcome(random.choice(self.triggers))


class SameTwiceInAnyOrder(Base):
    """All visits together come to the same, in another order each time."""

    triggers = ("left", "right")
    flips = 0

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        number = trajectory.visits["CHECKED"]
        if number == 1:
            FLIPS.append(len(FLIPS) % 2)
        return Outcome(self.triggers[(FLIPS[-1] + number) % 2])


FLIPS: list[int] = []
REMEMBERED: set[str] = set()


class Memoises(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        known = trajectory.text in REMEMBERED
        REMEMBERED.add(trajectory.text)
        ctx.write([{"role": "user", "content": "Known." if known else "New."}], context="main")
        return Outcome("done")


class WaitsForItself(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
        return Outcome("done")


class ComputesForEver(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        while True:
            pass


@pytest.mark.parametrize(
    ("handler", "message"),
    [(WaitsForItself, r"in 'lock\.acquire\(\)', at"), (ComputesForEver, r"for more than 0\.5 s, at")],
    ids=["waits", "computes"],
)
def test_a_handler_that_hangs_the_loop_is_ended_and_its_line_named(
    handler: type[State], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked_loop, "BLOCKING_SECONDS", 0.5)
    with pytest.raises(ConformanceError, match=rf"{message} .*test_check_state\.py:\d+, in (\w+\.)?run") as found:
        check_state(handler, examples=5)
    assert found.value.invariant == 6


class Yields(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Any:
        yield Outcome("done")


class TidiesUpLater(Base):
    async def timed_out(self, trajectory: Trajectory, ctx: HandlerContext) -> None:  # type: ignore[override]
        ctx.write([{"role": "user", "content": "Too late."}], context="main")


class FailsUnheard(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        async def fail() -> None:
            raise ConnectionError("no route")

        left_behind.append(asyncio.create_task(fail()).get_name())
        await asyncio.sleep(1.0)
        return Outcome("done")


class ScoresTheNextTurn(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        ctx.score_turn(1.0, trajectory.generations)
        return Outcome("done")


class WritesNumbers(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        ctx.write([{"role": "user", "content": 42}], context="main")
        return Outcome("done")


class WritesParts(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        ctx.write([{"role": "user", "content": [{"type": "image", "url": "a.png"}]}], context="main")
        return Outcome("done")


class WritesForNobody(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        ctx.write([{"role": "usr", "content": "Hm."}], context="main")
        return Outcome("done")


class WritesNothing(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        ctx.write([{"role": "user", "contents": "Hm."}], context="main")
        return Outcome("done")


class SpeaksForTheModel(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        ctx.write([{"role": "assistant", "content": "I am done."}], context="main")
        return Outcome("done")


class ReadsTheClock(Base):
    spends = "assistant_turns"

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        await ctx.generate("main")
        ctx.write([{"role": "user", "content": f"It is {ctx.clock():g} o'clock."}], context="main")
        return Outcome("done")


@pytest.mark.parametrize(
    ("handler", "invariant", "message"),
    [
        (NoTriggers, 1, "must declare `triggers`"),
        (Presumptuous, 1, "the scheduler alone raises timed_out"),
        (WantsOptions, 1, "depth"),
        (dict, 1, "no subclass of"),
        (State, 1, "must declare `triggers`"),
        (Unwritten, 1, "the class lacks run"),
        ("no_such_module:Handler", 1, "cannot be loaded"),
        (Undeclared, 2, r"returned Outcome\(trigger='finished'.* it declares: done; the engine says .*ACCEPT"),
        (ReturnsText, 2, "returned 'done'"),
        (Raises, 2, "raised IndexError"),
        (TidiesUpLater, 1, "timed_out is 'async def', and nobody awaits it"),
        (Yields, 2, "is an async generator, which cannot be awaited"),
        (ScoresTheNextTurn, 2, "there is no turn 1 to score; the first is 0, the latest 0"),
        (FailsUnheard, 7, "started failed, and nobody heard: .*ConnectionError: no route"),
        (WritesNumbers, 2, "message 0: content must be a string, got int"),
        (WritesParts, 2, "message 0 holds a part of type 'image'"),
        (WritesForNobody, 2, "message 0: has the unknown role 'usr'; did you mean 'user'"),
        (WritesNothing, 2, "message 0: has no content"),
        (SpeaksForTheModel, 8, "cannot go on: failed:ChatTemplateError: .assistant-in-new"),
        (Counts, 3, "changed self.count"),
        (CountsOnItsClass, 3, "changed CountsOnItsClass.seen"),
        (SharesAList, 3, "beside others"),
        (NeverReturns, 4, "took 600 s"),
        (Swallows, 5, "cancelled at its await number 2, and went on"),
        (Deaf, 5, "cancelled at its await number 1, and went on"),
        (Turns, 5, "cancelled at its await number 1, and went on"),
        (FailsToTidyUp, 5, "FailsToTidyUp.timed_out raised KeyError"),
        (Sleeps, 6, r"blocks the event loop with time.sleep\(30\)"),
        (LeavesATask, 7, "while this task was running: prefetch: sleep .started at .*test_check_state"),
        (WritesItDirectly, 8, "changed the trajectory's spent without an event"),
        (WritesIntoThePrompt, 8, "changed the trajectory's extra without an event"),
        (RewritesAMessage, 8, "changed the trajectory's .*streams.* without an event"),
        (GoesWhereItLikes, 8, "left a trajectory that cannot go on: KeyError"),
        (EndsIt, 8, "emitted Ended"),
        (IgnoresLimits, 9, r"swallowed LimitReached \('response_tokens'\)"),
        (Dices, 10, "take randomness from ctx.rng"),
        (DicesItsWay, 10, r"came out with trigger \d as '(left|right)', and the second time as '(left|right)'"),
        (SameTwiceInAnyOrder, 10, r"came out with trigger 3 as '(left|right)', and the second time as '(left|right)'"),
        (Memoises, 10, r"with message 3 as .*New.*, and the second time as .*Known"),
        (ReadsTheClock, 11, "set aside at its await number 1 and resumed"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_handler_is_found(handler: Any, invariant: int, message: str) -> None:
    SHARED.clear()
    REMEMBERED.clear()
    FLIPS.clear()
    with pytest.raises(ConformanceError, match=message) as found:
        check_state(handler, examples=12)
    assert found.value.invariant == invariant
    assert str(found.value).startswith(f"promise {invariant}: ")


def test_a_handler_that_cannot_be_resumed_may_say_so() -> None:
    assert "resumed" not in check_state(ReadsTheClock, resumable=False, examples=6).promises


def test_what_is_no_yaml_is_the_callers_mistake() -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        check_state(Base, state={"max_visit": 3})
