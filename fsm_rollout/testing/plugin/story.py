"""What happened, told so that one can read it.

Invariant: a story says nothing but what the events say, in their order, one line each; the tokens of a breach are
shown where they stand in their stream, with what the stream itself says of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsm_rollout.testing.simulation.laws import LawBroken
from fsm_rollout.testing.simulation.simulate import Simulation
from fsm_rollout.trajectory.events import (
    AnyEvent,
    Called,
    ContextOpened,
    Ended,
    Generated,
    MalformedCall,
    Prompted,
    Resumed,
    Suspended,
    ToolCall,
    Transitioned,
    UserReplied,
)
from fsm_rollout.trajectory.tokens import Owner
from fsm_rollout.trajectory.trajectory import Trajectory

WIDTH = 72
MOST_LINES = 40
AROUND = 2
"""Tokens shown before and after the place of a breach."""
MOST_TOKENS = 16


def shortened(text: object, width: int = WIDTH) -> str:
    """Return a text in quotes, cut in the middle to ``width``."""
    shown = repr(text)
    half = (width - 3) // 2
    return shown if len(shown) <= width else f"{shown[:half]}...{shown[-half:]}"


def story(run: Simulation, trajectory_id: str | None = None) -> list[str]:
    """Return a trajectory's story, line by line; default: of the first one that something happened to."""
    names = [trajectory_id] if trajectory_id in run.events else sorted(run.events)
    if not names:
        return ["nothing happened: no trajectory began"]
    lines: list[str] = []
    for name in names[:2]:
        trajectory = run.live[str(name)]
        lines.append(f"trajectory {name} of agent '{trajectory.agent}':")
        told = list(_told(run.events[str(name)]))
        if len(told) > MOST_LINES:
            left_out = len(told) - MOST_LINES
            told = [*told[: MOST_LINES // 2], f"  ... {left_out} more lines ...", *told[-MOST_LINES // 2 :]]
        lines += told
        if not trajectory.ended and trajectory.suspended is None:
            lines.append(f"  {'':>8}  {trajectory.state}: still here")
        if trajectory_id is not None:
            break
    lines += [f"  {fault.at:>7g}s  from outside: {_fault(fault)}" for fault in run.plan.faults]
    return lines


def _fault(fault: Any) -> str:
    aims = {"cancel": "trajectory", "suspend": "trajectory", "abort": "trajectory", "kill_replica": "replica"}
    aimed = f" {aims[fault.kind]} number {fault.target}" if fault.kind in aims else ""
    return f"{fault.kind.removesuffix('_replica')}{aimed}{f' for {fault.seconds:g} s' if fault.kind == 'pause' else ''}"


def _told(events: list[AnyEvent]) -> Iterator[str]:
    state = ""
    for event in events:
        if isinstance(event, Prompted):
            state = event.initial
        text = _line(event)
        if text is not None:
            yield f"  {event.at:>7g}s  {state}: {text}"
        if isinstance(event, Transitioned):
            state = event.dest


def _line(event: AnyEvent) -> str | None:
    match event:
        case Generated():
            what = "goes on" if event.continued else "says"
            said = event.message.get("content") or ""
            calls = ", ".join(map(_attempt, event.attempts))
            calling = f" and calls {calls}" if calls else ""
            where = "" if event.context == "main" else f" in '{event.context}'"
            return (
                f"the engine {what}{where} {shortened(said)}{calling} ({len(event.ids)} tokens, {event.finish_reason})"
            )
        case Called():
            came = f"fails: {event.failure}" if event.failure is not None else f"returns {shortened(event.result, 40)}"
            return f"{event.name or 'the broken call'} {came}"
        case UserReplied():
            return "the user answers"
        case ContextOpened():
            return f"the context '{event.context}' opens with {len(event.ids)} tokens"
        case Transitioned():
            cause = f" ({event.limit})" if event.limit else ""
            detail = f" [{event.detail}]" if event.detail else ""
            return f"{event.trigger}{cause} -> {event.dest}{detail}"
        case Suspended():
            return f"set aside: {event.reason}"
        case Resumed():
            return "goes on"
        case Ended():
            return f"ended: {event.stop_reason}"
        case _:
            return None


def _attempt(attempt: ToolCall | MalformedCall) -> str:
    if isinstance(attempt, MalformedCall):
        return f"something broken ({attempt.kind})"
    return f"{attempt.name}({shortened(attempt.arguments, 40)})"


def tokens_of(run: Simulation, trajectory_id: str, place: tuple[str, int, int]) -> list[str]:
    """Return the tokens around a place of a trajectory's stream: position, id, text, mask, who put it there."""
    context, first, last = place
    trajectory: Trajectory = run.live[trajectory_id]
    stream = next(s for s in reversed(trajectory.streams) if s.context == context and len(s.tokens) > first)
    tokens, prompt = stream.tokens, stream.tokens.prompt_length
    mask, ids = tokens.response_mask(), tokens.ids
    logprobs, versions = tokens.response_logprobs(), tokens.response_versions()
    last = min(last, first + MOST_TOKENS)
    lines = [
        f"tokens {first} to {last} of its context '{context}':",
        "  position      id  mask  logprob  version  origin",
    ]
    for at in range(max(0, first - AROUND), min(len(ids), last + AROUND + 1)):
        span = next(s for s in tokens.spans if s.start <= at < s.end)
        facts = (mask[at - prompt], logprobs[at - prompt], versions[at - prompt]) if at >= prompt else (0, 0.0, -1)
        mark = ">" if first <= at <= last else " "
        who = f"{span.owner.value}, {span.state}, turn {span.turn}" if span.owner is not Owner.PROMPT else "prompt"
        text = shortened(run.tokenizer.decode([ids[at]]), 24)
        lines.append(f"{mark} {at:>8}  {ids[at]:>6}  {facts[0]:>4}  {facts[1]:>7.3f}  {facts[2]:>7}  {who}: {text}")
    return lines


def explain(broken: LawBroken, where: str, replay: str) -> str:
    """Return what a user reads of a breach: what broke, the story, the tokens, and the line that replays it."""
    lines = [f"{where}: {broken}", *(f"  {note}" for note in getattr(broken, "__notes__", ()))]
    if broken.run is not None:
        lines += ["", *story(broken.run, broken.trajectory_id)]
        if broken.trajectory_id is not None and broken.tokens is not None:
            lines += ["", *tokens_of(broken.run, broken.trajectory_id, broken.tokens)]
    if replay:
        lines += ["", "to see it again:", f"  {replay}"]
    return "\n".join(lines)
