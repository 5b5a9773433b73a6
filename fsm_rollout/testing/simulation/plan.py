"""A plan: everything that one simulated run depends on, as plain data.

Invariant: a run is a function of its agent and its plan. A plan survives :meth:`Plan.line` and :meth:`Plan.of_line`
unchanged, so one line of text replays a run exactly.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import json
import zlib
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.settings import StrictModel

Moment = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Fate(StrictModel):
    """What a call or a reply comes to after ``seconds``: a result, an error of its own, or nothing ever."""

    seconds: Moment = 0.0
    error: str | None = None
    """it raises this class of error: a built-in one, or RuntimeError"""
    hang: bool = False

    async def meet(self) -> None:
        """Let it happen."""
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.hang:
            await asyncio.Event().wait()
        if self.error is not None:
            kind = getattr(builtins, self.error, None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            raise kind("drawn by the plan")


class ToolFate(Fate):
    """What one call of a tool comes to."""

    text: str = "4"
    reward: float | None = None


class ReplyFate(Fate):
    """What one reply of an interaction comes to. After the last one of a plan it is ``done``."""

    text: str | None = "Go on."
    """none: the conversation is over"""
    score: float | None = None
    done: bool = False


FaultKind = Literal[
    "cancel", "update_weights", "suspend", "pause", "abort", "kill_replica", "add_replica", "remove_replica", "stop"
]


class Fault(StrictModel):
    """Something done to the run from outside, at a moment of the virtual clock."""

    at: Moment
    kind: FaultKind
    target: int = Field(0, ge=0)
    """the number of the trajectory or of the replica"""
    seconds: Moment = 1.0
    """how long a `pause` lasts (timeouts of visits do not count it), or what a replica that is removed has to end
    what it has"""


class Schedule(StrictModel):
    """What must not matter to the results of a calm run: who is admitted when, by how many engines, and how fast."""

    concurrency: int = Field(64, ge=1)
    max_running: int | None = Field(None, ge=1)
    """requests that an engine answers at once"""
    replicas: int = Field(1, ge=1)
    """engines that serve the run, a pool of them"""
    slow: float = Field(1.0, ge=0, allow_inf_nan=False)
    """stretches the engine's delays"""


class Plan(StrictModel):
    """See the module. Trajectory number k follows ``says[k % len(says)]``, by ``agent/context``, turn by turn.

    The last turn of a context repeats; so does the last fate where there is but one (of several, each call's own
    randomness chooses).
    """

    seed: int = 0
    prompts: int = Field(1, ge=1)
    n: int = Field(1, ge=1)
    says: tuple[Mapping[str, tuple[Turn, ...]], ...] = ({},)
    tools: tuple[ToolFate, ...] = (ToolFate(),)
    replies: tuple[ReplyFate, ...] = ()
    faults: tuple[Fault, ...] = ()
    schedule: Schedule = Schedule()
    other_schedule: Schedule = Schedule()
    """the one that the run is compared under"""
    killed_after: int = Field(0, ge=0)
    """events after which the run is killed, to be gone on with"""

    def turn(self, trajectory: int, key: str, index: int) -> Turn:
        """Return what is said as turn ``index`` of ``agent/context`` (the key), ``Done.`` where a plan says nothing."""
        turns = self.says[trajectory % len(self.says)].get(key, ()) if self.says else ()
        return turns[min(index, len(turns) - 1)] if turns else Turn(text="Done.")

    def line(self) -> str:
        """Return the plan as one word that a shell takes as it is."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def of_line(cls, line: str) -> Plan:
        """Return the plan that :meth:`line` wrote; ConfigError for any other text."""
        try:
            packed = base64.urlsafe_b64decode(line + "=" * (-len(line) % 4))
            return cls.model_validate_json(zlib.decompress(packed))
        except (ValueError, zlib.error, ValidationError) as error:
            raise ConfigError(f"{line[:40]!r} is no plan of a simulated run ({error}); paste the whole line") from error

    def rescheduled(self) -> Plan:
        """Return the same run under the other schedule."""
        return self.model_copy(update={"schedule": self.other_schedule})

    def at_once(self) -> Plan:
        """Return the same run in a world where nothing fails and nothing takes time."""

        def spoken(turn: Turn) -> Turn:
            calm = {"error": None, "crash": None, "fails": None, "hang": False, "delay": 0.0}
            return turn.model_copy(update={**calm, "text": turn.text or ""})

        calm = {"seconds": 0.0, "error": None, "hang": False}
        changed = {
            "says": tuple({key: tuple(map(spoken, turns)) for key, turns in script.items()} for script in self.says),
            "tools": tuple(fate.model_copy(update=calm) for fate in self.tools),
            "replies": tuple(fate.model_copy(update=calm) for fate in self.replies),
            "faults": (),
            "schedule": Schedule(),
        }
        return self.model_copy(update=changed)

    def __repr__(self) -> str:
        data = self.model_dump(mode="json", exclude_defaults=True)
        return f"Plan({', '.join(f'{key}={value!r}' for key, value in data.items())})"
