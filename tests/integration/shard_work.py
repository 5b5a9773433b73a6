"""What shards run in these tests: an agent with a tool that tells which process it ran in, and a scripted engine."""

import asyncio
import gc
import itertools
import json
import os
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsm_rollout import AgentGraph, Prompt, ScriptedEngine, load_agent
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.errors import EngineError
from fsm_rollout.tools import ToolContext
from fsm_rollout.trajectory.trajectory import Trajectory
from tests import embedded
from tests.kit import ROOT
from tests.routing import RoutingEngine

_calls = itertools.count(1)
CALL = '<tool_call>\n{"name": "where", "arguments": {"number": %d}}\n</tool_call>'


def where(number: int) -> str:
    """Say where the call is made.

    Args:
        number: of the turn.
    """
    if folder := os.environ.get("SHARD_PIDS"):
        alive = sum(type(each) is Trajectory for each in gc.get_objects())
        said = gc.get_freeze_count(), int("torch" in sys.modules), alive
        (Path(folder) / str(os.getpid())).write_text(" ".join(map(str, said)), "ascii")
    if (at := os.environ.get("SHARD_DIES_AT")) and next(_calls) == int(at) and _first(Path(os.environ["SHARD_DIED"])):
        os._exit(9)
    dies("tool")
    return f"answer {number}"


def dies(place: str) -> None:
    """End the process where the file that SHARD_POINT names says so: at such a place, when it is come to so often."""
    point = Path(os.environ.get("SHARD_POINT", "/nowhere"))
    with suppress(FileNotFoundError):  # nobody is to die, or another has by now
        where, at = (said := point.read_text("ascii")).split()[:2]
        if where == place:
            _come[said] += 1
            if _come[said] == int(at):
                point.rename(point.with_suffix(".done"))
                os._exit(9)


def held(group: str) -> bool:
    """Whether a group goes no further than its first turn: while the file that SHARD_HELD names says so."""
    with suppress(FileNotFoundError):
        return group in Path(os.environ.get("SHARD_HELD", "/nowhere")).read_text("ascii").split()
    return False


async def crowded(number: int) -> str:
    """Say how many calls are at work in this process.

    Args:
        number: of the turn.
    """
    _at_work.add(call := object())
    for _ in range(20):  # others come in meanwhile
        await asyncio.sleep(0)
    most = len(_at_work)
    _at_work.discard(call)
    return str(most)


_at_work: set[object] = set()
_come: Counter[str] = Counter()


def traced(number: int, context: ToolContext) -> str:
    """Say which span runs, as OpenTelemetry's library knows it.

    Args:
        number: of the turn.
    """
    from tests.open_spans import begun

    assert context.traceparent == begun()
    return context.traceparent


def agent(tool: str = f"{__name__}:where", **keys: Any) -> AgentGraph:
    """Return the agent of the benchmarks, which a tool answers that is called ``where``."""
    tools = {"where": {"use": tool, "timeout": 600, **keys}}
    return load_agent(ROOT / "benchmarks/agent.yaml", [f"tools={json.dumps(tools)}"])


def engine(tokenizer: Any, turns: int, delay: float) -> ScriptedEngine:
    def script(request: Request) -> Turn:
        dies("generation")
        text = CALL % request.turn if request.turn < turns else f"Done {request.sampling.seed}."
        return Turn(text=text, delay=HELD if request.turn and held(request.group_id) else delay)

    return Refusing(script, tokenizer=tokenizer)


class Refusing(ScriptedEngine):
    """In the first process that is told to, where SHARD_REFUSES names a file, it loads no weights."""

    async def update_weights(self, weights: Any, version: int | None = None) -> int:
        if (once := os.environ.get("SHARD_REFUSES")) and _first(Path(once)):
            raise EngineError("a shape does not fit")
        return await super().update_weights(weights, version)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{i}", messages=({"role": "user", "content": f"Question {i}?"},)) for i in range(count)]


def rows(trajectories: list[Trajectory]) -> dict[str, tuple[Any, ...]]:
    return {
        t.trajectory_id: (
            t.stop_reason,
            t.generations,
            t.calls_seen,
            [(s.tokens.ids.tobytes(), s.tokens.response_mask().tobytes(), s.messages) for s in t.streams],
        )
        for t in trajectories
    }


HELD = 3600.0  # seconds of a generation that does not end by itself
SLOW = 0.05  # seconds of a generation, where something is to happen meanwhile


def engine_of(turns: int = 3, delay: float = 0.0) -> ScriptedEngine:
    """Return the engine with the embedded model's tokenizer; as the variables say, the process ends instead."""
    dies("start")
    once = os.environ.get("SHARD_DIES_ONCE")
    if os.environ.get("SHARD_DIES") or (once and _first(Path(once))):
        os._exit(9)
    return engine(embedded.tokenizer(), turns, delay)


def _first(path: Path) -> bool:
    """Whether nobody has asked before."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def routing() -> RoutingEngine:
    """Return an engine that says its routed experts."""
    return RoutingEngine(engine(embedded.tokenizer(), 3, 0.0)._script, tokenizer=embedded.tokenizer())


def spec(delay: float = 0.0) -> dict[str, Any]:
    """Return how shards make that engine."""
    return {"kind": f"{__name__}:engine_of", "delay": delay}


def seeded(trajectory: Trajectory) -> float:
    """Return a score that its seed decides."""
    dies("reward")
    return trajectory.seed % 3 / 2


def turned_down(trajectories: list[Trajectory]) -> bool:
    """Keep nothing."""
    return False


def fails(number: int) -> str:
    """Fail.

    Args:
        number: of the turn.
    """
    raise OSError("the tool is broken")
