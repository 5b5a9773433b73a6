"""The handler check passes all handlers there are, and names the fault of broken ones."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsm_rollout.agent.words import HANDLERS
from fsm_rollout.errors import ConfigError
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.testing import ConformanceError, check_state
from fsm_rollout.testing.conformance import runner
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import mistakes, table, written


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


def handler(**attributes: Any) -> Callable[[Any], type[State]]:
    """Make a handler of what it does in a visit, which is done unless the function says something else."""

    def make(visit: Any) -> type[State]:
        async def run(self: State, trajectory: Trajectory, ctx: HandlerContext) -> Any:
            return await visit(self, trajectory, ctx) or Outcome("done")

        return type(visit.__name__, (Base,), {"run": run, "__module__": __name__, **attributes})

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


class Connected:
    """Holds a connection by a task of its own, for as long as its trajectory goes on."""

    async def create(self) -> None:
        self.closed = asyncio.Event()
        self.connection = asyncio.create_task(self.closed.wait())

    async def execute(self, left: int, operator: str, right: int) -> int:
        """Take numbers."""
        return left + right

    async def release(self) -> None:
        self.closed.set()
        await self.connection


@handler()
async def calls(self, trajectory, ctx):
    """Call what the turn asks for."""
    for attempt in trajectory.attempts:
        await ctx.call_tool(attempt)


def test_what_a_tool_keeps_running_is_no_task_of_the_visit() -> None:
    check_state(calls, agent={"tools": {"calculate": {"use": f"{__name__}:Connected", "timeout": 5.0}}}, examples=6)


@pytest.mark.parametrize("good", [asks, runs_a_command])
def test_what_a_handler_may_do_conforms(good: type[State]) -> None:
    check_state(good, examples=6)


# -- broken ones --------------------------------------------------------------------------------------------------


def broken_one(name: str, folder: Path) -> type[State]:
    """Return the handler of that name in the table: a class, or what it does in a visit."""
    case = table("broken_handlers")[name]
    if case["code"].startswith("class"):
        return written("broken_handlers", name, folder)
    attributes = {
        key: tuple(value) if key == "triggers" else value for key, value in case.get("attributes", {}).items()
    }
    return handler(**attributes)(written("broken_handlers", name, folder, f"async def {name}(self, trajectory, ctx)"))


@pytest.mark.parametrize(
    ("broken", "promise", "message"),
    [
        *mistakes("broken_handlers"),
        (dict, 1, "no subclass of"),
        (State, 1, "must declare `triggers`"),
        ("no_such_module:Handler", 1, "cannot be loaded"),
    ],
)
def test_a_broken_handler_is_found(broken: Any, promise: int, message: str, tmp_path: Path) -> None:
    found(promise, message, broken_one(broken, tmp_path) if broken in table("broken_handlers") else broken, examples=12)


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


def test_a_handler_that_cannot_be_resumed_may_say_so(tmp_path: Path) -> None:
    assert "resumed" not in check_state(broken_one("reads_the_clock", tmp_path), resumable=False, examples=6).promises


def test_what_is_no_yaml_is_the_callers_mistake() -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        check_state(Base, state={"max_visit": 3})
