"""The handler check passes all handlers there are, and names the fault of broken ones."""

import asyncio
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel

from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.agent.words import HANDLERS
from fsm_rollout.errors import ConfigError
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing import ConformanceError, check_state
from fsm_rollout.testing.conformance import runner
from fsm_rollout.trajectory.events import Ended
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory


# Programs of others keep no promise of a handler's; what `external` itself promises is in test_foreign_agents.
@pytest.mark.parametrize("handler", sorted(HANDLERS.built_in.keys() - {"external"}))
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
    """What the handlers below have in common: one trigger."""

    triggers = ("done",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        return Outcome("done")


class NoTriggers(Base):
    triggers = ()


class Unwritten(State):
    triggers = ("done",)


class Presumptuous(Base):
    triggers = ("timed_out",)


class Depth(BaseModel):
    depth: int


class WantsOptions(Base):
    Options = Depth


class Yields(Base):
    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Any:
        yield Outcome("done")


class TidiesUpLater(Base):
    async def timed_out(self, trajectory: Trajectory, ctx: HandlerContext) -> None:  # type: ignore[override]
        says(ctx, "Too late.")


BROKEN: list[tuple[Any, int, str]] = [
    (NoTriggers, 1, "must declare `triggers`"),
    (Presumptuous, 1, "the scheduler alone raises timed_out"),
    (WantsOptions, 1, "depth"),
    (dict, 1, "no subclass of"),
    (State, 1, "must declare `triggers`"),
    (Unwritten, 1, "the class lacks run"),
    ("no_such_module:Handler", 1, "cannot be loaded"),
    (TidiesUpLater, 1, "timed_out is 'async def', and nobody awaits it"),
    (Yields, 2, "is an async generator, which cannot be awaited"),
]


def handler(promise: int | None = None, message: str = "", **attributes: Any) -> Callable[[Any], type[State]]:
    """Make a handler of what it does in a visit, which is done unless the function says something else.

    With a promise, it is a case of a handler that breaks it.
    """

    def make(visit: Any) -> type[State]:
        async def run(self: State, trajectory: Trajectory, ctx: HandlerContext) -> Any:
            return await visit(self, trajectory, ctx) or Outcome("done")

        facts = {"run": run, "__module__": __name__, **attributes}
        made = type(visit.__name__, (Base,), facts)
        if promise is not None:
            BROKEN.append((made, promise, message))
        return made

    return make


def says(ctx: HandlerContext, content: Any, role: str = "user") -> None:
    ctx.write([{"role": role, "content": content}], context="main")


# -- good ones ----------------------------------------------------------------------------------------------------


@handler(spends="assistant_turns")
async def several(self, trajectory, ctx):
    """Generate twice, call, ask, write and score: all that a visit offers, in one good handler."""
    generated = await ctx.generate("main")
    for attempt in generated.attempts:  # those of the trajectory may be later ones, in a visit that is resumed
        await ctx.call_tool(attempt)
    says(ctx, f"Think {ctx.rng.randint(0, 9)}.")
    await ctx.generate("main", Sampling(max_tokens=8))
    ctx.score_turn(0.5)
    says(ctx, await ctx.ask("policy", [{"role": "user", "content": "Is it good?"}]) or "Nothing.")


@handler()
async def asks(self, trajectory, ctx):
    """Ask a model that no context of the agent has."""
    verdict = await ctx.ask("judge", [{"role": "user", "content": "Right?"}])
    says(ctx, f"They said {len(verdict)} letters.")


@handler()
async def runs_a_command(self, trajectory, ctx):
    """Run a process beside the loop."""
    process = await asyncio.create_subprocess_exec("expr", "2", "+", "2", stdout=subprocess.PIPE)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    says(ctx, output.decode())


def test_a_good_handler_that_does_everything_conforms() -> None:
    check_state(several, examples=8)


@pytest.mark.parametrize("good", [asks, runs_a_command])
def test_what_a_handler_may_do_conforms(good: type[State]) -> None:
    check_state(good, examples=6)


# -- broken ones --------------------------------------------------------------------------------------------------

SHARED: list[str] = []
FLIPS: list[int] = []
REMEMBERED: set[str] = set()
left_behind: list[Any] = []


@handler(2, r"returned Outcome\(trigger='finished'.* it declares: done; the engine says .*ACCEPT")
async def undeclared(self, trajectory, ctx):
    return Outcome("finished") if trajectory.text == "ACCEPT" else None


@handler(2, "returned 'done'")
async def returns_text(self, trajectory, ctx):
    return "done"


@handler(2, "raised IndexError")
async def raises(self, trajectory, ctx):
    says(ctx, f"You began with {trajectory.text[0]}.")  # an empty turn has none


@handler(2, "there is no turn 1 to score; the first is 0, the latest 0")
async def scores_the_next_turn(self, trajectory, ctx):
    ctx.score_turn(1.0, trajectory.generations)


@handler(2, "message 0: content must be a string, got int")
async def writes_numbers(self, trajectory, ctx):
    says(ctx, 42)


@handler(2, "message 0 holds a picture")
async def writes_parts(self, trajectory, ctx):
    says(ctx, [{"type": "image", "url": "a.png"}])


@handler(2, "message 0: has the unknown role 'usr'; did you mean 'user'")
async def writes_for_nobody(self, trajectory, ctx):
    says(ctx, "Hm.", "usr")


@handler(2, "message 0: has no content")
async def writes_nothing(self, trajectory, ctx):
    ctx.write([{"role": "user", "contents": "Hm."}], context="main")


@handler(3, "changed self.count")
async def counts(self, trajectory, ctx):
    self.count = getattr(self, "count", 0) + 1


@handler(3, "changed counts_on_its_class.seen", seen=Counter())
async def counts_on_its_class(self, trajectory, ctx):
    self.seen[trajectory.trajectory_id] += 1


@handler(3, "beside others")
async def shares_a_list(self, trajectory, ctx):
    SHARED.append(trajectory.trajectory_id)
    try:
        await asyncio.sleep(1.0)
        says(ctx, f"{len(SHARED)} are here.")
        await asyncio.sleep(1.0)
    finally:
        SHARED.remove(trajectory.trajectory_id)


@handler(4, "took 600 s")
async def never_returns(self, trajectory, ctx):
    await asyncio.Event().wait()


@handler(5, "was cancelled, and went on: it returned Outcome")
async def swallows(self, trajectory, ctx):
    await asyncio.sleep(0)
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(1.0)


@handler(5, "was cancelled, and went on: it returned Outcome")
async def is_deaf(self, trajectory, ctx):
    for _ in range(20):
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1.0)


@handler(5, "cancelled at its await number 1, and went on")
async def turns_it_into_an_error(self, trajectory, ctx):
    try:
        await asyncio.sleep(1.0)
    except BaseException as error:
        raise RuntimeError("the sandbox is gone") from error


def nothing_was_open(self, trajectory, ctx):
    raise KeyError("nothing was open")


@handler(5, "fails_to_tidy_up.timed_out raised KeyError", timed_out=nothing_was_open)
async def fails_to_tidy_up(self, trajectory, ctx):
    await ctx.opened("main")
    await ctx.ask("policy", [{"role": "user", "content": "Well?"}])


@handler(6, r"blocks the event loop with time.sleep\(30\)")
async def sleeps(self, trajectory, ctx):
    time.sleep(30)  # noqa: ASYNC251


@handler(7, "while this task was running: prefetch: sleep .started at .*test_check_state")
async def leaves_a_task(self, trajectory, ctx):
    left_behind.append(asyncio.create_task(asyncio.sleep(5.0), name="prefetch"))


@handler(7, "started failed, and nobody heard: .*ConnectionError: no route")
async def fails_unheard(self, trajectory, ctx):
    async def fail() -> None:
        raise ConnectionError("no route")

    left_behind.append(asyncio.create_task(fail()).get_name())
    await asyncio.sleep(1.0)


@handler(8, "cannot go on: failed:ChatTemplateError: .assistant-in-new")
async def speaks_for_the_model(self, trajectory, ctx):
    says(ctx, "I am done.", "assistant")


@handler(8, "changed the trajectory's spent without an event")
async def writes_it_directly(self, trajectory, ctx):
    trajectory.spent["searches"] = 1


@handler(8, "changed the trajectory's extra without an event")
async def writes_into_the_prompt(self, trajectory, ctx):
    trajectory.extra["note"] = "x"


@handler(8, "changed the trajectory's .*streams.* without an event")
async def rewrites_a_message(self, trajectory, ctx):
    trajectory.stream("main").messages[-1]["content"] = "something else"


@handler(8, "left a trajectory that cannot go on: ValueError: State 'GENERATING' is not a registered")
async def goes_where_it_likes(self, trajectory, ctx):
    trajectory.state = "GENERATING"


@handler(8, "emitted Ended")
async def ends_it(self, trajectory, ctx):
    ctx.emit(Ended(at=ctx.clock(), stop_reason="enough"))


@handler(9, r"swallowed LimitReached \('response_tokens'\)", spends="assistant_turns")
async def ignores_limits(self, trajectory, ctx):
    try:
        await ctx.generate("main")
    except LimitReached:
        says(ctx, "Never mind.")


@handler(10, "take randomness from ctx.rng")
async def dices(self, trajectory, ctx):
    says(ctx, f"Take {random.random()}.")


OTHER_WAY = r"came out with transition {} as '.* (left|right) .*', and the second time as '.* (left|right) "


@handler(10, OTHER_WAY.format(r"\d"), triggers=("left", "right"))
async def dices_its_way(self, trajectory, ctx):
    return Outcome(random.choice(self.triggers))


@handler(10, OTHER_WAY.format(3), triggers=("left", "right"))
async def same_twice_in_any_order(self, trajectory, ctx):
    """Come to the same in all visits together, in another order each time."""
    number = trajectory.visits["CHECKED"]
    if number == 1:
        FLIPS.append(len(FLIPS) % 2)
    return Outcome(self.triggers[(FLIPS[-1] + number) % 2])


@handler(10, r"with message 3 as .*New.*, and the second time as .*Known")
async def memoises(self, trajectory, ctx):
    known = trajectory.text in REMEMBERED
    REMEMBERED.add(trajectory.text)
    says(ctx, "Known." if known else "New.")


@handler(11, "set aside at its await number 1 and resumed", spends="assistant_turns")
async def reads_the_clock(self, trajectory, ctx):
    await ctx.generate("main")
    says(ctx, f"It is {ctx.clock():g} o'clock.")


@pytest.mark.parametrize(("broken", "promise", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_handler_is_found(broken: Any, promise: int, message: str) -> None:
    for kept in (SHARED, REMEMBERED, FLIPS):
        kept.clear()
    found(promise, message, broken, examples=12)


def found(promise: int, message: str, broken: Any, examples: int = 5) -> None:
    with pytest.raises(ConformanceError, match=message) as caught:
        check_state(broken, examples=examples)
    assert caught.value.invariant == promise
    assert str(caught.value).startswith(f"promise {promise}: ")


@handler()
async def computes(self, trajectory, ctx):
    began = time.thread_time()
    while time.thread_time() - began < 0.4:
        pass


def test_a_handler_that_computes_for_long_keeps_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stops the loop for good is found by one detector in every check: see test_check_tool."""
    monkeypatch.setattr(runner, "BUSY_SECONDS", 0.3)
    found(6, r"computes.run kept the event loop busy for 0\.\d s", computes)


def test_a_handler_that_cannot_be_resumed_may_say_so() -> None:
    assert "resumed" not in check_state(reads_the_clock, resumable=False, examples=6).promises


def test_what_is_no_yaml_is_the_callers_mistake() -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        check_state(Base, state={"max_visit": 3})
