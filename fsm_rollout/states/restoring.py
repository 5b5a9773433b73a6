"""What a resumed trajectory's tools and users knew: got back before its next visit, or given up with the trajectory.

Invariant: no trajectory goes on with state that is not what it was. What is still open in this process is; else the
state comes from a snapshot in the journal that no call or reply has followed, or from the earlier calls, made again
where the tool's YAML says ``repeatable: true``, if they are answered as before. Otherwise the sample begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from fsm_rollout.errors import describe
from fsm_rollout.states.active_trajectory import ActiveTrajectory
from fsm_rollout.tools.bound_tools import Holder
from fsm_rollout.trajectory.enums import Trigger
from fsm_rollout.trajectory.events import Called, Restored, ToolCall
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

ANEW = "begun anew: "  # how the `detail` of a trajectory begins whose state is lost
_logged: set[str] = set()  # why trajectories began anew, of those that were logged as a warning; others are information

Calls = list[tuple[str, ToolCall, Called]]  # calls that were made: in which context, and what they came to


class Lost(Exception):
    """State that cannot be got back; says whose, and why."""


def begins_anew(trajectory: Trajectory) -> bool:
    """Whether a trajectory was given up because its state is lost, so that another attempt takes its place."""
    return trajectory.exit is not None and (trajectory.exit.detail or "").startswith(ANEW)


async def restore(live: ActiveTrajectory) -> None:
    """Get back what a resumed trajectory's tools and users knew; if that cannot be, have its sample begin anew."""
    if live.replayed is not None:
        return  # they answer from the record
    ways: dict[str, str] = {}
    try:
        for holder, calls in _earlier_calls(live).items():
            if holder not in live.tools.instances:
                ways[calls[0][1].name] = await _restore_tool(live, calls)
        for state in live.interacting() if live.live_user is None else ():
            name, spec = live.user_of(state)
            if spec and name not in live.interactions and (way := await _restore_user(live, state)):
                ways[name.rstrip(":")] = way
    except Lost as lost:
        _begin_anew(live, str(lost))
        return
    if ways:
        live.emit(Restored(at=asyncio.get_running_loop().time(), ways=ways))
        told = ", ".join(f"{name} by {way}" for name, way in ways.items())
        logger.info("trajectory %s goes on; restored: %s", live.trajectory.trajectory_id, told)


def _begin_anew(live: ActiveTrajectory, why: str) -> None:
    """Give a trajectory up, or the one of the sample that it serves."""
    logger.log(
        logging.INFO if why in _logged else logging.WARNING,
        "trajectory %s begins anew instead of going on: %s", live.trajectory.trajectory_id, why,
    )  # fmt: skip
    _logged.add(why)
    root = live
    while root.caller is not None:
        root = root.caller
    root.stop, root.restart = Outcome(Trigger.CANCELLED, detail=f"{ANEW}{why}"), True
    if root is not live and root.task is not None:
        root.task.cancel()


# -- tools --------------------------------------------------------------------------------------------------------


def _earlier_calls(live: ActiveTrajectory) -> Mapping[Holder, Calls]:
    """Return the calls that were made on what tools keep, by what keeps it, in the order of the turns."""
    found: dict[Holder, Calls] = {}
    for turn in live.trajectory.assistant_turns:
        results = {called.id: called for called in turn.results}
        for attempt in turn.calls:
            called = results.get(attempt.id)
            if isinstance(attempt, ToolCall) and called is not None and called.tries:
                tool = live.agent.toolbox.tool(attempt.name)
                if tool is not None and tool.holder is not None:
                    found.setdefault(tool.holder, []).append((turn.context, attempt, called))
    return found


async def _restore_tool(live: ActiveTrajectory, calls: Calls) -> str:
    """Restore what a tool keeps, and return by what."""
    _, first, _ = calls[0]
    tool = live.agent.toolbox.tool(first.name)
    assert tool is not None
    if tool.snapshots and (data := live.snapshot(tool.name)) is not None:
        try:
            await live.tools.restore(tool, first.id, data)
        except Exception as error:  # the tool's own code
            raise Lost(f"tool '{tool.name}' does not take its snapshot: {describe(error)}") from error
        return "its snapshot"
    if not tool.spec.repeatable:
        has = "no snapshot of its latest call" if tool.snapshots else "no `snapshot` and `restore`"
        raise Lost(f"tool '{tool.name}' keeps state, has {has}, and is not `repeatable: true`")
    for context, attempt, before in calls:
        chat = live.agent.contexts[context].chat
        again = await live.tools.call(attempt, context=context, tokenizer=chat.tokenizer, eye=chat)
        cut = before.truncated_tokens or again.truncated_tokens
        if again.failure != before.failure or (again.content != before.content and not cut):
            told = f"call {attempt.id} gave {again.content!r:.100} instead of {before.content!r:.100}"
            raise Lost(f"tool '{attempt.name}' is not repeatable, though its YAML says so: made again, {told}")
    live.tools.snapshots.clear()  # those of the calls that were just made again belong to no record
    return f"{len(calls)} call{'s' * (len(calls) > 1)} made again"


# -- users --------------------------------------------------------------------------------------------------------


async def _restore_user(live: ActiveTrajectory, state: str) -> str | None:
    """Restore what an interaction knows, and return by what; ``None``: the conversation tells it all."""
    name, spec = live.user_of(state)
    assert spec is not None
    try:
        interaction = live.interaction(state)
        if interaction.resumable:
            return None
        data = live.snapshot(name) if interaction.snapshots else None
        if data is not None:
            await interaction.restore(data)
            return "its snapshot"
    except Exception as error:  # the user's own code
        raise Lost(f"interaction '{spec.use}' cannot be restored: {describe(error)}") from error
    has = "no snapshot of its latest reply" if interaction.snapshots else "no `snapshot` and `restore`"
    raise Lost(f"interaction '{spec.use}' has {has}, and does not say `resumable = True`")
