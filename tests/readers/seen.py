"""What a reader has of a run, beside what the run's journal says."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsm_rollout.trajectory.enums import StopReason
from fsm_rollout.trajectory.events import Called, Ended, Generated, Prompted, Transitioned
from fsm_rollout.trajectory.journal import histories


@dataclass(frozen=True)
class Seen:
    """A span, in the reader's own words for it."""

    span_id: str
    parent_id: str | None
    name: str
    kind: str
    """What the reader takes it for: agent, model or tool; anything else is a word of its own."""
    start: float
    end: float
    red: bool
    tokens: tuple[int, int] | None
    """What went in and came out, as far as the reader has recognized it."""
    trajectory: str | None

    @property
    def seconds(self) -> float:
        return self.end - self.start


def check(seen: Mapping[str, Seen], run: Path, tick: float) -> tuple[int, int]:
    """Check what a reader has of a run, whose clock ticks so; return how many tokens went in and came out."""
    children = defaultdict[str, list[Seen]](list)
    for span in seen.values():
        assert span.parent_id is None or span.parent_id in seen, span
        children[span.parent_id or ""].append(span)
    roots = {span.trajectory: span for span in children[""] if span.kind == "agent"}
    (run_span,) = (span for span in children[""] if span.kind != "agent")
    assert run_span.name.startswith("invoke_workflow")
    totals, spans = Counter[str](), 1
    for history in histories(run, report=print):
        first, ended = history[0], [event for event in history if isinstance(event, Ended)][-1]
        assert isinstance(first, Prompted)
        moved = [event for event in history if isinstance(event, Transitioned)]
        generated = [event for event in history if isinstance(event, Generated)]
        called = [event for event in history if isinstance(event, Called)]
        root = roots.pop(first.trajectory_id)
        inner = [span for span in children[root.span_id] if span.name != "reward"]
        visits = sorted(inner, key=lambda visit: (visit.start, visit.end))
        below = {kind: [] for kind in ("model", "tool")}
        for visit in visits:
            for span in children[visit.span_id]:
                assert visit.start - tick <= span.start <= span.end <= visit.end + tick, (visit, span)
                below.setdefault(span.kind, []).append(span)
        # 1. Parents: each under the visit of the state that it belongs to.
        assert [visit.name for visit in visits] == [event.source for event in moved]
        assert Counter(span.name for span in below["tool"]) == Counter(f"execute_tool {call.name}" for call in called)
        assert len(below["model"]) == len(generated)
        # 2. Durations add up to what the journal says that the trajectory has taken.
        slack = tick * (len(visits) + 1)
        assert abs(sum(visit.seconds for visit in visits) - root.seconds) <= slack
        assert abs(root.seconds - (moved[-1].at - first.at)) <= slack
        assert visits[0].start == root.start
        # 3. What has failed is red, and nothing else.
        assert root.red == StopReason.is_failure(ended.stop_reason)
        assert Counter(span.red for span in below["tool"]) == Counter(call.failure is not None for call in called)
        assert [visit.red for visit in visits] == [event.trigger in ("failed", "timed_out") for event in moved]
        # 4. Tokens are known as tokens.
        came_out = [len(event.ids) for event in generated]
        models = sorted(below["model"], key=lambda span: span.start)
        assert [span.tokens and span.tokens[1] for span in models] == came_out
        if models:
            went_in = sum(span.tokens[0] for span in models if span.tokens)
            assert root.tokens == (went_in, sum(came_out))
            totals.update(went_in=went_in, came_out=sum(came_out))
        spans += 1 + len(children[root.span_id]) + sum(len(children[visit.span_id]) for visit in visits)
    assert not roots
    assert spans == len(seen)
    return totals["went_in"], totals["came_out"]
