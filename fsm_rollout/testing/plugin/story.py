"""What happened in a run that broke a law, so that one can read it.

Invariant: a story says nothing but what the events say, in their order, one line each; the tokens of a breach are
shown where they stand in their stream, with what the stream itself says of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsm_rollout.testing.simulation.laws import LawBroken, Place
from fsm_rollout.testing.simulation.simulate import Simulation
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.events import AnyEvent, MalformedCall, ToolCall
from fsm_rollout.trajectory.stream import text_of
from fsm_rollout.trajectory.tokens import Owner

WIDTH = 72
MOST_LINES = 40
AROUND = 2  # tokens shown before and after the place of a breach
MOST_TOKENS = 16


def explain(broken: LawBroken, replay: str) -> str:
    """Return what a user reads of a breach: what broke, the story, the tokens, and the line that replays it."""
    lines = [str(broken), *getattr(broken, "__notes__", ())]
    if broken.run is not None:
        lines += ["", *_story(broken.run, broken.trajectory_id)]
        if broken.trajectory_id is not None and broken.tokens is not None:
            lines += ["", *_tokens_of(broken.run, broken.trajectory_id, broken.tokens)]
    if replay:
        lines += ["", "to see it again:", f"  {replay}"]
    return "\n".join(lines)


def _story(run: Simulation, trajectory_id: str | None) -> Iterator[str]:
    """Yield a trajectory's story, line by line; if it is not known whose, that of the first two."""
    names = [trajectory_id] if trajectory_id in run.events else sorted(run.events)[:2]
    if not names:
        yield "nothing happened: no trajectory began"
        return
    for name in map(str, names):
        trajectory = run.live[name]
        yield f"trajectory {name} of agent '{trajectory.agent}':"
        lines = list(_lines(run.events[name]))
        if len(lines) > MOST_LINES:
            half = MOST_LINES // 2
            lines = [*lines[:half], f"  ... {len(lines) - MOST_LINES} more lines ...", *lines[-half:]]
        yield from lines
        if not trajectory.ended and trajectory.suspended is None:
            yield f"  {'':>8}  {trajectory.state}: still here"
    for fault in run.plan.faults:
        what = f"for {fault.seconds:g} s" if fault.kind == "pause" else f"number {fault.target}"
        yield f"  {fault.at:>7g}s  from outside: {fault.kind} {what}"


def _lines(history: list[AnyEvent]) -> Iterator[str]:
    state = ""
    for event in history:
        if isinstance(event, events.Prompted):
            state = event.initial
        if (text := _line(event)) is not None:
            yield f"  {event.at:>7g}s  {state}: {text}"
        if isinstance(event, events.Transitioned):
            state = event.dest


def _line(event: AnyEvent) -> str | None:
    match event:
        case events.Generated():
            verb = "goes on" if event.continued else "says"
            where = "" if event.context == "main" else f" in '{event.context}'"
            calls = ", ".join(map(_attempt, event.attempts))
            content = _shortened(text_of(event.message)) + (f" and calls {calls}" if calls else "")
            return f"the engine {verb}{where} {content} ({len(event.ids)} tokens, {event.finish_reason})"
        case events.Called():
            result = f"returns {_shortened(event.result, 40)}" if event.failure is None else f"fails: {event.failure}"
            return f"{event.name or 'the broken call'} {result}"
        case events.UserReplied():
            return "the user answers"
        case events.ContextOpened():
            return f"the context '{event.context}' opens with {len(event.ids)} tokens"
        case events.Transitioned():
            cause = f" ({event.limit})" if event.limit else ""
            detail = f" [{event.detail}]" if event.detail else ""
            return f"{event.trigger}{cause} -> {event.dest}{detail}"
        case events.Suspended():
            return f"set aside: {event.reason}"
        case events.Resumed():
            return "goes on"
        case events.Ended():
            return f"ended: {event.stop_reason}"
    return None


def _attempt(attempt: ToolCall | MalformedCall) -> str:
    if isinstance(attempt, MalformedCall):
        return f"something broken ({attempt.kind})"
    return f"{attempt.name}({_shortened(attempt.arguments, 40)})"


def _shortened(text: object, width: int = WIDTH) -> str:
    """Return a text in quotes, cut in the middle to ``width``."""
    shown, half = repr(text), (width - 3) // 2
    return shown if len(shown) <= width else f"{shown[:half]}...{shown[-half:]}"


def _tokens_of(run: Simulation, trajectory_id: str, place: Place) -> Iterator[str]:
    """Yield the tokens around a place of a trajectory's stream: position, id, text, mask, who put it there."""
    context, first, last = place
    streams = [s.tokens for s in reversed(run.live[trajectory_id].streams) if s.context == context]
    tokens = next((tokens for tokens in streams if len(tokens) > first), streams[0])  # it may end before the place
    prompt, ids, mask = tokens.prompt_length, tokens.ids, tokens.response_mask()
    logprobs, versions = tokens.response_logprobs(), tokens.response_versions()
    last = min(last, first + MOST_TOKENS)
    yield f"tokens {first} to {last} of its context '{context}':"
    yield "  position      id  mask  logprob  version  origin"
    for at in range(max(0, first - AROUND), min(len(ids), last + AROUND + 1)):
        span = next(s for s in tokens.spans if s.start <= at < s.end)
        facts = (mask[at - prompt], logprobs[at - prompt], versions[at - prompt]) if at >= prompt else (0, 0.0, -1)
        mark = ">" if first <= at <= last else " "
        owner = (
            f"{span.owner.value}, {span.state}, generation {span.turn}" if span.owner is not Owner.PROMPT else "prompt"
        )
        text = _shortened(run.tokenizer.decode([ids[at]]), 24)
        yield f"{mark} {at:>8}  {ids[at]:>6}  {facts[0]:>4}  {facts[1]:>7.3f}  {facts[2]:>7}  {owner}: {text}"
