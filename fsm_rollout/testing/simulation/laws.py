"""The laws every run keeps, whatever the agent, the engine and the schedule.

Invariant: each oracle recomputes what must be from the other side's record (the engine's log, the events), with the
package's data types and none of its logic; a breach raises :class:`LawBroken`, which says where.

| law | what holds |
|---|---|
| 2 | a checked agent ends within its bound, under any outcomes |
| 3 | a stream's ids, mask, logprobs, versions and spans have one length, and spans cover it |
| 4 | mask 1 exactly on the trained tokens that the engine sampled; logprob 0.0 elsewhere |
| 5 | each generation's input extends the one before it, token for token |
| 6 | a calm run's results do not depend on the schedule, nor on where it was set aside and went on |
| 7 | every sampled token of a trained context is in exactly one row |
| 8 | every prompt comes back exactly once, ended or suspended, and nothing is left running |
| 10 | folding the events gives the trajectory |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.proof import Bound
from fsm_rollout.batch.rows import rows
from fsm_rollout.errors import RolloutError
from fsm_rollout.testing.simulation.simulate import Sampled, Simulation
from fsm_rollout.trajectory.events import Called, Ended, Generated, Transitioned, decode, encode
from fsm_rollout.trajectory.reasons import LimitName, Trigger
from fsm_rollout.trajectory.tokens import Owner
from fsm_rollout.trajectory.trajectory import Stream, Trajectory

Law = Callable[[Simulation], None]


class LawBroken(RolloutError):
    """A run broke a law.

    ``law`` is 0 where the fault is a handler's or a predicate's own. ``trajectory_id`` and ``tokens`` (context, first
    and last position in the stream) say where, as far as it is one place; ``run`` is the run itself, for whoever tells
    its story.
    """

    def __init__(
        self,
        law: int,
        message: str,
        trajectory_id: str | None = None,
        *,
        tokens: tuple[str, int, int] | None = None,
        run: Simulation | None = None,
    ) -> None:
        self.law, self.message = law, message
        self.trajectory_id, self.tokens, self.run = trajectory_id, tokens, run
        super().__init__(f"law {law}: {message}" if law else message)


def keeps_running(run: Simulation) -> None:
    """Law 8: the run came to its end by itself, and nothing failed beside it."""
    for blockage in run.blockages:
        call = blockage.call
        what = "does not return and does not await" if call is None else f"waits in '{call}' instead of awaiting"
        raise LawBroken(8, f"the event loop is blocked: {blockage.where} {what}")
    if run.crash is not None:
        raise LawBroken(8, f"the run did not end: {type(run.crash).__name__}: {run.crash}")
    if run.complaints:
        raise LawBroken(8, f"something failed beside the run: {run.complaints[0]}")


def comes_back(run: Simulation) -> None:
    """Law 8: every prompt exactly once, with all its samples, each ended by one reason or suspended."""
    groups = sorted(group.group_id for group in run.groups)
    expected = sorted(f"p{number}" for number in range(run.plan.prompts))
    if groups != expected:
        raise LawBroken(8, f"the prompts {expected} came back as {groups}")
    for group in run.groups:
        names = [t.trajectory_id.partition("~")[0] for t in group.trajectories]
        if names != [f"{group.group_id}/{k}" for k in range(run.plan.n)]:
            raise LawBroken(8, f"group {group.group_id} came back with {names}; {run.plan.n} samples were asked for")
        for member in group.all:
            if member.group_id != group.group_id:
                of = f"it is of group {member.group_id} and came with {group.group_id}"
                raise LawBroken(8, of, member.trajectory_id)
    back = {trajectory.trajectory_id for trajectory in run.trajectories}
    for lost in run.live.keys() - back:
        raise LawBroken(8, "it began and never came back", lost)
    for trajectory in run.trajectories:
        _ends_once(run, trajectory)


def _ends_once(run: Simulation, trajectory: Trajectory) -> None:
    name = trajectory.trajectory_id
    ends = [event for event in run.events[name] if isinstance(event, Ended)]
    aside = trajectory.suspended is not None
    if len(ends) != (not aside) or trajectory.ended == aside:
        both = f"it has ended {len(ends)} times and is {'' if aside else 'not '}set aside"
        raise LawBroken(8, f"{both}; one of the two, once", name)


def stays_within(bound: Bound) -> Law:
    """Return law 2 for an agent's bound."""

    def law(run: Simulation) -> None:
        for trajectory in run.trajectories:
            if trajectory.parent_id is not None:
                continue
            family = [t for t in run.trajectories if _serves(t.trajectory_id, trajectory.trajectory_id)]
            counted: dict[str, tuple[float, float | None]] = {
                "transitions": (sum(t.transitions for t in family), bound.transitions),
                "generations": (sum(_first_generations(run, t) for t in family), bound.generations),
                "response tokens": (sum(t.response_tokens for t in family), bound.response_tokens),
                "seconds": (_seconds(trajectory), _grace(bound.wall_seconds)),
            }
            for what, (took, most) in counted.items():
                if most is not None and took > most:
                    raise LawBroken(2, f"it took {took:g} {what}; the bound is {most:g}", trajectory.trajectory_id)

    return law


def _serves(trajectory_id: str, parent_id: str) -> bool:
    return trajectory_id == parent_id or trajectory_id.startswith(f"{parent_id}/")


def _first_generations(run: Simulation, trajectory: Trajectory) -> int:
    """Count generations; one that goes on after an interruption is the same one."""
    return sum(isinstance(e, Generated) and not e.resumed for e in run.events[trajectory.trajectory_id])


def _seconds(trajectory: Trajectory) -> float:
    ended_at = trajectory.started_at if trajectory.ended_at is None else trajectory.ended_at
    return ended_at - trajectory.started_at - trajectory.away


def _grace(seconds: float | None) -> float | None:
    # What is cut off by the clock has a bounded time to stop: aborts, cancelled tools, closing.
    return None if seconds is None else seconds + 120.0


def keeps_limits(run: Simulation) -> None:
    """Law 2: what was spent, counted from the events, never exceeds a limit that no row routes."""
    graphs = dict(_graphs(run.graph))
    for trajectory in run.trajectories:
        graph = graphs[trajectory.agent]
        routed = any(row.trigger == Trigger.LIMIT_REACHED for row in graph.transitions)
        events = run.events[trajectory.trajectory_id]
        counts: dict[str, float] = {"tool_calls": sum(isinstance(e, Called) for e in events)}
        if not routed:
            counts[LimitName.ASSISTANT_TURNS] = _first_generations(run, trajectory)
            counts[LimitName.RESPONSE_TOKENS] = sum(s.tokens.response_length for s in trajectory.streams)
            counts[LimitName.CONTEXT_TOKENS] = max((len(s.tokens) for s in trajectory.streams), default=0)
        for limit, spent in counts.items():
            allowed = getattr(graph.limits, limit)
            if allowed is not None and spent > allowed and not (limit == LimitName.TOOL_CALLS and routed):
                raise LawBroken(2, f"{limit} is {allowed}, and {spent:g} were spent", trajectory.trajectory_id)


def _graphs(graph: AgentGraph) -> Iterator[tuple[str, AgentGraph]]:
    yield graph.agent, graph
    for tool in graph.tools.values():
        if tool.agent is not None:
            yield from _graphs(tool.agent)


def keeps_streams(run: Simulation) -> None:
    """Laws 3, 4 and 5 for every stream, against the engine's log; and law 7 for the rows."""
    logged = run.sampled()
    graphs = dict(_graphs(run.graph))
    for trajectory in run.trajectories:
        by_context: dict[str, list[Stream]] = {}
        for stream in trajectory.streams:
            by_context.setdefault(stream.context, []).append(stream)
        for context, streams in by_context.items():
            trained = graphs[trajectory.agent].context(context).trained
            requests = list(logged.pop((trajectory.trajectory_id, context), []))
            for stream in streams:
                _stream(trajectory.trajectory_id, stream, requests, trained)
            for lost in requests:
                if len(lost.ids):
                    what = f"{len(lost.ids)} tokens sampled for {lost.request.request_id}"
                    raise LawBroken(7, f"{what} are in no stream", trajectory.trajectory_id)
        _in_rows(trajectory)
    for (trajectory_id, _), requests in logged.items():
        if any(len(request.ids) for request in requests):
            raise LawBroken(7, "the engine sampled tokens that are in no stream", trajectory_id)


def _stream(trajectory_id: str, stream: Stream, requests: list[Sampled], trained: bool) -> None:
    """Take from ``requests`` what was sampled in this stream, and compare every token."""
    tokens = stream.tokens
    ids = tokens.ids.tolist()
    size, prompt = len(ids), tokens.prompt_length
    sampled, logprobs = np.zeros(size, dtype=np.int8), np.zeros(size, dtype=np.float32)
    versions = np.full(size, -1)

    def broken(law: int, message: str, first: int, last: int) -> LawBroken:
        return LawBroken(law, message, trajectory_id=trajectory_id, tokens=(stream.context, first, last))

    # 1. Each request extends what the stream held before it, and what was sampled for it follows there.
    end = prompt
    while (
        requests and end <= (start := len(requests[0].request.ids)) and requests[0].request.ids.tolist() == ids[:start]
    ):
        answer = requests.pop(0)
        end = start + len(answer.ids)
        if ids[start:end] != answer.ids.tolist():
            at = next(i for i, token in enumerate(answer.ids) if start + i >= size or ids[start + i] != token)
            got = ids[start + at] if start + at < size else "nothing"
            raise broken(5, f"the engine sampled {answer.ids[at]}; the stream has {got}", start + at, start + at)
        sampled[start:end], logprobs[start:end], versions[start:end] = 1, answer.logprobs, answer.versions
    # 2. Mask, logprobs and versions are those of the engine's log.
    expected: tuple[tuple[int, str, npt.NDArray[Any], npt.NDArray[Any]], ...] = (
        (4, "mask", tokens.response_mask(), sampled[prompt:] * trained),
        (4, "logprob", tokens.response_logprobs(), logprobs[prompt:]),
        (4, "weight version", tokens.response_versions(), versions[prompt:]),
    )
    for law, what, found, right in expected:
        if len(found) != len(right):
            raise broken(3, f"{len(found)} {what}s for {len(right)} tokens", prompt, size - 1)
        wrong = np.flatnonzero(found != right)
        if len(wrong):
            at = int(wrong[0])
            last = prompt + int(wrong[-1])
            raise broken(law, f"the {what} is {found[at]} and must be {right[at]}", prompt + at, last)
    # 3. Spans cover the stream, the prompt first.
    spans = tokens.spans
    if [s.start for s in spans] != [0, *(s.end for s in spans[:-1])] or spans[-1].end != size:
        raise broken(3, "the spans do not cover the stream", 0, size - 1)
    if spans[0].owner is not Owner.PROMPT or any(s.owner is Owner.PROMPT for s in spans[1:]):
        raise broken(3, "a stream has one opening prompt, at its start", 0, size - 1)


def _in_rows(trajectory: Trajectory) -> None:
    """Law 7: the rows hold the trained tokens of the streams, each once."""
    found = {row.stream: row for row in rows([trajectory])}
    for number, stream in enumerate(trajectory.streams):
        tokens = stream.tokens
        trained = tokens.response_ids()[tokens.response_mask() == 1].tolist()
        row = found.pop(number, None)
        got = [] if row is None else row.response_ids[row.mask == 1].tolist()
        if got != trained:
            place = (stream.context, tokens.prompt_length, len(tokens) - 1)
            what = f"its row has {len(got)} trained tokens, the stream {len(trained)}"
            raise LawBroken(7, what, trajectory.trajectory_id, tokens=place)
    if found:
        raise LawBroken(7, "there are rows of no stream", trajectory.trajectory_id)


def keeps_events(run: Simulation) -> None:
    """Law 10: the events, packed and unpacked, fold to the very same trajectory."""
    for trajectory in run.trajectories:
        events = [decode(encode(event)) for event in run.events[trajectory.trajectory_id]]
        if Trajectory.fold(events) != trajectory:
            raise LawBroken(10, "its events fold to something else", trajectory.trajectory_id)


def outline(run: Simulation, samples_only: bool = False) -> dict[str, Mapping[str, object]]:
    """Return all of each trajectory that a schedule must not change: everything but times."""
    return {
        t.trajectory_id: {
            "stop reason": t.stop_reason,
            "states visited": dict(t.visits),
            "rows taken": [
                (e.source, e.trigger, e.dest) for e in run.events[t.trajectory_id] if isinstance(e, Transitioned)
            ],
            "spendings": dict(t.spent),
            "scores": list(t.turn_scores),
            "tool rewards": sorted(t.tool_rewards),
            "streams": [
                (s.context, s.tokens.ids.tolist(), s.tokens.response_logprobs().tolist(), s.tokens.spans)
                for s in t.streams
            ],
            "messages": [s.messages for s in t.streams],
        }
        for t in run.trajectories
        if not (samples_only and t.parent_id is not None)
    }


def same_results(run: Simulation, other: Simulation, what: str, *, resumed: bool = False) -> None:
    """Law 6: two runs of one plan came to the same; ``what`` says how they differ.

    Of a ``resumed`` run only samples are compared: a call of a sub-agent that was cut off is made again.
    """
    outlines, others = outline(run, resumed), outline(other, resumed)
    if outlines.keys() != others.keys():
        raise LawBroken(
            6, f"{what}: the trajectories {sorted(outlines.keys() ^ others.keys())} are in one run only", run=other
        )
    for name, facts in outlines.items():
        for fact, value in facts.items():
            if value != others[name][fact]:
                message = f"{what} changes its {fact}"
                place = _parting(name, run, other) if fact == "streams" else None
                if place is None:
                    message += f":\n  {_at_difference(value, others[name][fact])}"
                else:
                    message += f" at token {place[1]} of '{place[0]}':\n  {_words(run, name, place)}\nbecomes\n  "
                    message += _words(other, name, place)
                raise LawBroken(6, message, name, tokens=place, run=run)


def _parting(name: str, run: Simulation, other: Simulation) -> tuple[str, int, int] | None:
    """Return where the tokens of a trajectory's streams part; ``None``: in something else than tokens."""
    for stream, twin in zip(run.live[name].streams, other.live[name].streams, strict=False):
        ids, others = stream.tokens.ids, twin.tokens.ids
        if ids != others:
            at = next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), None)
            at = min(len(ids), len(others)) if at is None else at
            return stream.context, at, at
    return None


def _words(run: Simulation, name: str, place: tuple[str, int, int]) -> str:
    context, at, _ = place
    for stream in run.live[name].streams:
        if stream.context == context and len(stream.tokens) > at:
            return repr(run.tokenizer.decode(stream.tokens.ids[at : at + 12]))
    return "(nothing: it ends there)"


def _at_difference(value: object, other: object) -> str:
    """Say in one line where two values differ, going down into lists of equal length."""
    while isinstance(value, list | tuple) and isinstance(other, type(value)) and len(value) == len(other):
        value, other = next((a, b) for a, b in zip(value, other, strict=True) if a != b)
    return f"{str(value)[:300]} becomes {str(other)[:300]}"
