"""The laws every run keeps, whatever the agent, the engine and the schedule.

Invariant: each oracle recomputes what must be from the other side's record (the engine's log, the events), with the
package's data types and none of its logic; a breach raises :class:`LawBroken`, which says where.

| law | what holds |
|---|---|
| 2 | a checked agent ends within its bound, under any outcomes |
| 3 | a stream's ids, mask, logprobs, versions and spans have one length, and spans cover it |
| 4 | mask 1, and the role `sampled`, exactly on the trained tokens that the engine sampled; logprob 0.0 elsewhere |
| 5 | each generation's input extends the one before it, token for token; a stream's requests are one session |
| 6 | a calm run's results do not depend on the schedule, nor on where it was set aside; events fold to the trajectory |
| 7 | every sampled token of a trained context is in exactly one row |
| 8 | every prompt comes back exactly once, ended or suspended, and nothing is left running |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.proof import Bound
from fsm_rollout.batch.rows import TrainingRow, rows
from fsm_rollout.errors import RolloutError
from fsm_rollout.testing.simulation.simulate import Sampled, Simulation
from fsm_rollout.trajectory.enums import ROLES, LimitName, Role, Trigger
from fsm_rollout.trajectory.event_bytes import decode, encode
from fsm_rollout.trajectory.events import AnyEvent, Called, Ended, Generated, Transitioned
from fsm_rollout.trajectory.stream import Stream
from fsm_rollout.trajectory.tokens import Owner
from fsm_rollout.trajectory.trajectory import Trajectory

Law = Callable[[Simulation], None]
Place = tuple[str, int, int]  # context, first and last position in its stream

STOPPING_SECONDS = 120.0  # what the wall clock cuts off has a bounded time to stop: aborts, cancelled tools, closing


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
        tokens: Place | None = None,
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
    for lost in run.live.keys() - {trajectory.trajectory_id for trajectory in run.trajectories}:
        raise LawBroken(8, "it began and never came back", lost)
    for trajectory in run.trajectories:
        ends = sum(isinstance(event, Ended) for event in run.events[trajectory.trajectory_id])
        aside = trajectory.suspended is not None
        if ends != (not aside) or trajectory.ended == aside:
            ending = f"it has ended {ends} times and is {'' if aside else 'not '}set aside"
            raise LawBroken(8, f"{ending}; one of the two, once", trajectory.trajectory_id)


def stays_within(bound: Bound) -> Law:
    """Return law 2 for an agent's bound; seconds for which the plan paused the engine come on top."""

    def law(run: Simulation) -> None:
        beside = STOPPING_SECONDS + sum(fault.seconds for fault in run.plan.faults if fault.kind == "pause")
        for trajectory in run.trajectories:
            if trajectory.parent_id is not None:
                continue
            name = trajectory.trajectory_id
            family = [t for t in run.trajectories if f"{t.trajectory_id}/".startswith(f"{name}/")]
            ended_at = trajectory.started_at if trajectory.ended_at is None else trajectory.ended_at
            wall = None if bound.wall_seconds is None else bound.wall_seconds + beside
            counted: dict[str, tuple[float, float | None]] = {
                "transitions": (sum(t.transitions for t in family), bound.transitions),
                "generations": (sum(_generations(run, t) for t in family), bound.generations),
                "response tokens": (sum(t.response_tokens for t in family), bound.response_tokens),
                "seconds": (ended_at - trajectory.started_at - trajectory.suspended_seconds, wall),
            }
            for what, (spent, most) in counted.items():
                if most is not None and spent > most:
                    raise LawBroken(2, f"it took {spent:g} {what}; the bound is {most:g}", name)

    return law


def _generations(run: Simulation, trajectory: Trajectory) -> int:
    """Count generations; one that goes on after an interruption is the same one."""
    return sum(isinstance(e, Generated) and not e.resumed for e in run.events[trajectory.trajectory_id])


def keeps_limits(run: Simulation) -> None:
    """Law 2: what was spent, counted from the events, never exceeds a limit that no transition routes."""
    graphs = _agents(run)
    for trajectory in run.trajectories:
        graph = graphs[trajectory.agent]
        if any(row.trigger == Trigger.LIMIT_REACHED for row in graph.transitions):
            continue
        counts: dict[str, float] = {
            LimitName.TOOL_CALLS: sum(isinstance(e, Called) for e in run.events[trajectory.trajectory_id]),
            LimitName.ASSISTANT_TURNS: _generations(run, trajectory),
            LimitName.RESPONSE_TOKENS: sum(s.tokens.response_length for s in trajectory.streams),
            LimitName.CONTEXT_TOKENS: max((len(s.tokens) for s in trajectory.streams), default=0),
        }
        for limit, spent in counts.items():
            allowed = getattr(graph.limits, limit)
            if allowed is not None and spent > allowed:
                raise LawBroken(2, f"{limit} is {allowed}, and {spent:g} were spent", trajectory.trajectory_id)


def _agents(run: Simulation) -> dict[str, AgentGraph]:
    return {graph.agent: graph for graph in run.graph.with_sub_agents()}


def keeps_streams(run: Simulation) -> None:
    """Laws 3, 4 and 5 for every stream, against the engine's log; and law 7 for the rows."""
    logged = run.sampled()
    graphs = _agents(run)
    sessions: set[str] = set()  # a prefix cache lets go of a session's tokens when its stream is over
    for trajectory in run.trajectories:
        by_context: dict[str, list[Stream]] = defaultdict(list)
        for stream in trajectory.streams:
            by_context[stream.context].append(stream)
        for context, streams in by_context.items():
            requests = list(logged.pop((trajectory.trajectory_id, context), []))
            for stream in streams:
                trained = graphs[trajectory.agent].context(context).trained
                own = _check_stream(trajectory, stream, requests, trained)
                if len(own) > 1 or own & sessions or "" in own:
                    what = f"a stream's requests are of the sessions {sorted(own)}; each stream has one, its own"
                    raise LawBroken(5, what, trajectory.trajectory_id)
                sessions |= own
            for lost in requests:
                if len(lost.ids):
                    what = f"{len(lost.ids)} tokens sampled for {lost.request.request_id}"
                    raise LawBroken(7, f"{what} are in no stream", trajectory.trajectory_id)
        _check_rows(trajectory)
    for (trajectory_id, _), requests in logged.items():
        if any(len(request.ids) for request in requests):
            raise LawBroken(7, "the engine sampled tokens that are in no stream", trajectory_id)


def _check_stream(trajectory: Trajectory, stream: Stream, requests: list[Sampled], trained: bool) -> set[str]:
    """Take from ``requests`` what was sampled in this stream, and compare every token; return their sessions."""
    tokens = stream.tokens
    ids = tokens.ids.tolist()
    size, prompt = len(ids), tokens.prompt_length
    sampled, logprobs = np.zeros(size, dtype=np.int8), np.zeros(size, dtype=np.float32)
    versions = np.full(size, -1)
    sessions: set[str] = set()

    def broken(law: int, message: str, first: int, last: int) -> LawBroken:
        return LawBroken(law, message, trajectory.trajectory_id, tokens=(stream.context, first, last))

    # 1. Each request extends what the stream held before it, and what was sampled for it follows there.
    end = prompt
    while requests and end <= (start := len(requests[0].request.ids)):
        if requests[0].request.ids.tolist() != ids[:start]:
            break
        answer = requests.pop(0)
        sessions.add(answer.request.session)
        end = start + len(answer.ids)
        if ids[start:end] != answer.ids.tolist():
            at = next(i for i, token in enumerate(answer.ids) if start + i >= size or ids[start + i] != token)
            got = ids[start + at] if start + at < size else "nothing"
            raise broken(5, f"the engine sampled {answer.ids[at]}; the stream has {got}", start + at, start + at)
        sampled[start:end], logprobs[start:end], versions[start:end] = 1, answer.logprobs, answer.versions
    # 2. Mask, logprobs and versions are those of the engine's log.
    for what, found, right in (
        ("mask", tokens.response_mask(), sampled[prompt:] * trained),
        ("logprob", tokens.response_logprobs(), logprobs[prompt:]),
        ("weight version", tokens.response_versions(), versions[prompt:]),
    ):
        if len(found) != len(right):
            raise broken(3, f"{len(found)} {what}s for {len(right)} tokens", prompt, size - 1)
        wrong = np.flatnonzero(found != right)
        if len(wrong):
            first, last = int(wrong[0]), int(wrong[-1])
            message = f"the {what} is {found[first]} and must be {right[first]}"
            raise broken(4, message, prompt + first, prompt + last)
    # 3. Spans cover the stream, the prompt first.
    spans = tokens.spans
    if [s.start for s in spans] != [0, *(s.end for s in spans[:-1])] or spans[-1].end != size:
        raise broken(3, "the spans do not cover the stream", 0, size - 1)
    if spans[0].owner is not Owner.PROMPT or any(s.owner is Owner.PROMPT for s in spans[1:]):
        raise broken(3, "a stream has one opening prompt, at its start", 0, size - 1)
    return sessions


def _misattributed(row: TrainingRow) -> int | None:
    """Return the first token whose role and mask contradict each other."""
    mask = np.concatenate([np.zeros(len(row.prompt_ids), np.int8), row.mask])
    wrong = np.flatnonzero((row.roles == ROLES.index(Role.SAMPLED)) != (mask == 1))
    return int(wrong[0]) if len(wrong) else None


def _check_rows(trajectory: Trajectory) -> None:
    """Law 7: the rows hold the trained tokens of the streams, each once."""
    found = {row.stream: row for row in rows([trajectory])}
    for number, stream in enumerate(trajectory.streams):
        tokens = stream.tokens
        trained = tokens.response_ids()[tokens.response_mask() == 1].tolist()
        row = found.pop(number, None)
        got = [] if row is None else row.response_ids[row.mask == 1].tolist()
        if got != trained:
            what = f"its row has {len(got)} trained tokens, the stream {len(trained)}"
            place = (stream.context, tokens.prompt_length, len(tokens) - 1)
            raise LawBroken(7, what, trajectory.trajectory_id, tokens=place)
        if row is not None and (bad := _misattributed(row)) is not None:
            what = "a token's role is `sampled` exactly if its mask is 1"
            raise LawBroken(4, what, trajectory.trajectory_id, tokens=(stream.context, bad, bad))
    if found:
        raise LawBroken(7, "there are rows of no stream", trajectory.trajectory_id)


def keeps_events(run: Simulation) -> None:
    """Law 6, of what a run is resumed from: the events, packed and unpacked, fold to the very same trajectory."""
    for trajectory in run.trajectories:
        events = [decode(encode(event)) for event in run.events[trajectory.trajectory_id]]
        if Trajectory.fold(events) != trajectory:
            raise LawBroken(6, "its events fold to something else", trajectory.trajectory_id)


Outline = dict[str, Sequence[object]]


def outline(trajectory: Trajectory, history: Sequence[AnyEvent]) -> Outline:
    """Return all of a trajectory that no schedule may change (everything but times), by what one of it is called."""
    moves = [event for event in history if isinstance(event, Transitioned)]
    streams = trajectory.streams
    return {
        "transition": [f"{move.source} {move.trigger} {move.dest}" for move in moves],
        "message": [(stream.context, message) for stream in streams for message in stream.messages],
        "stop reason": [trajectory.stop_reason],
        "count of visits": [dict(trajectory.visits)],
        "count of charges": [dict(trajectory.spent)],
        "score": list(trajectory.turn_scores),
        "reward": sorted(trajectory.tool_rewards),
        "stream": [(s.context, s.tokens.ids.tolist(), s.tokens.response_logprobs().tolist(), s.tokens.spans)
                   for s in streams],
    }  # fmt: skip


def difference(outline: Outline, other: Outline) -> tuple[str, int, object, object] | None:
    """Return the first thing in which two outlines differ: what it is called, its number from 1, and what it is."""
    for what in outline:
        pairs = zip_longest(outline[what], other[what], fillvalue="nothing")
        for number, (value, another) in enumerate(pairs, 1):
            if value != another:
                return what, number, value, another
    return None


def same_results(run: Simulation, other: Simulation, what: str, *, resumed: bool = False) -> None:
    """Law 6: two runs of one plan came to the same; ``what`` says how they differ.

    Of a ``resumed`` run only samples are compared: a call of a sub-agent that was cut off is made again.
    """
    outlines, others = (
        {
            t.trajectory_id: outline(t, each.events[t.trajectory_id])
            for t in each.trajectories
            if not (resumed and t.parent_id is not None)
        }
        for each in (run, other)
    )
    if lonely := sorted(outlines.keys() ^ others.keys()):
        raise LawBroken(6, f"{what}: the trajectories {lonely} are in one run only", run=other)
    for name, facts in outlines.items():
        if (parted := difference(facts, others[name])) is None:
            continue
        fact, number, value, another = parted
        place, shown = _parting(run.live[name], other.live[name]), (str(value)[:300], str(another)[:300])
        at = ""
        if place is not None:
            at, shown = f" at token {place[1]} of '{place[0]}'", (_words(run, name, place), _words(other, name, place))
        message = "{} changes its {} {}{}:\n  {}\nbecomes\n  {}".format(what, fact, number, at, *shown)
        raise LawBroken(6, message, name, tokens=place, run=run)


def _parting(trajectory: Trajectory, other: Trajectory) -> Place | None:
    """Return where the tokens of two trajectories' streams part; ``None``: in something else than tokens."""
    for stream, twin in zip(trajectory.streams, other.streams, strict=False):
        ids, others = stream.tokens.ids, twin.tokens.ids
        if ids != others:
            unequal = (i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
            at = next(unequal, min(len(ids), len(others)))
            return stream.context, at, at
    return None


def _words(run: Simulation, name: str, place: Place) -> str:
    context, at, _ = place
    for stream in run.live[name].streams:
        if stream.context == context and len(stream.tokens) > at:
            return repr(run.tokenizer.decode(stream.tokens.ids[at : at + 12]))
    return "(nothing: it ends there)"
