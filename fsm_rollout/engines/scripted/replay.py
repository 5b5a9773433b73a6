"""An engine that gives the answers of an earlier run again, as its journal has them.

Invariant: a request is answered only where its input is, token for token and picture for picture, what the run had
there; else it fails with the first place in which the two differ. So an unchanged agent comes to the same trajectories
without a model, and what a change of an agent, a tool or a chat template does is found where it first shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.engines.protocol import NO_IDS, NO_LOGPROBS, EngineFacts, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.script import AnswerPlan
from fsm_rollout.errors import EngineError, JournalError
from fsm_rollout.model.folders import recorded_engine, recorded_processor, recorded_tokenizer
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import Generated
from fsm_rollout.trajectory.journal import histories, metadata
from fsm_rollout.trajectory.stream import Stream
from fsm_rollout.trajectory.tokens import NO_VERSION, Ids, Logprobs, Note, NoteKind, Usage
from fsm_rollout.trajectory.trajectory import Trajectory

AROUND = 8  # tokens shown on either side of the place in which an input differs

Place = tuple[str, str, int]  # a generation's trajectory, context, and index within that context


@dataclass(slots=True)
class Recorded:
    """One generation of the run (of several parts, if it was interrupted), and where its input ended in the stream."""

    stream: Stream
    start: int
    ids: Ids = field(default_factory=lambda: Ids("i"))
    logprobs: Logprobs = field(default_factory=lambda: Logprobs("f"))
    notes: list[Note] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of each token; -1: it was not sampled
    finish_reason: FinishReason = FinishReason.ABORT
    usage: Usage | None = None

    def noted(self, at: int, to: int, routed: int) -> list[Note]:
        """Return the masks of tokens ``[at, to)``, and the experts from position ``routed`` of the stream to there."""
        starts = {NoteKind.SAMPLING_MASK: self.start + at, NoteKind.ROUTED_EXPERTS: routed}
        return [part for note in self.notes for part in note.cut(starts[note.kind], self.start + to)]


def recorded(path: Path) -> dict[Place, Recorded]:
    """Return every generation in a journal; JournalError if there is none that can be read."""
    found: dict[Place, Recorded] = {}
    for history in histories(path):
        trajectory = Trajectory.fold(history[:1])
        for event in history[1:]:
            if isinstance(event, Generated) and (stream := trajectory.stream(event.context)) is not None:
                index = trajectory.context_turns.get(event.context, 0) - event.resumed
                place = (trajectory.trajectory_id, event.context, index)
                generation = found.setdefault(place, Recorded(stream, len(stream.tokens)))
                generation.ids.extend(event.ids)
                generation.logprobs.extend(event.logprobs)
                generation.notes.extend(event.notes)
                generation.versions += [version for count, version in event.versions for _ in range(count)]
                generation.finish_reason, generation.usage = event.finish_reason, event.usage
            trajectory.apply(event)
    return found


def replay(run: Path, engine: str = POLICY, *, max_context: int | None = None) -> ReplayEngine:
    """Return the replay of one engine of a run: a folder that ``fsm-rollout run`` wrote, or a journal.

    Raises:
        EngineError: nothing can be read there, or the engine's model is not on this machine.
    """
    try:
        facts = recorded_engine(metadata(run), engine)
        window = max_context or facts.max_context
        if window is None:
            raise EngineError(f"{run} does not record the window of engine '{engine}'; give max_context")
        return ReplayEngine(
            run, tokenizer=recorded_tokenizer(facts), max_context=window, eos_ids=facts.eos_ids,
            processor=recorded_processor(facts), text_only=facts.kind == "chat",
        )  # fmt: skip
    except JournalError as error:
        raise EngineError(f"nothing to replay: {error}") from error


class ReplayEngine(ScriptedEngine):
    """See the module.

    Args:
        journal: the run's ``journal.sqlite``.
        tokenizer: the one that the run had.
        max_context: the longest input plus output of the engine that the run had, in tokens.
        eos_ids: its stop tokens.
        processor: its processor, where its model saw pictures.
        text_only: whether that engine gave text alone.

    Answers come at once. Tokens keep their logprobs, and the weight versions under which they were sampled; weights
    are counted, not loaded. A generation that the run cut off (a timeout, a crash) gives its tokens, and fails then.

    Raises:
        JournalError: there is no journal that can be read.
    """

    def __init__(
        self, journal: str | Path, *, tokenizer: Any, max_context: int, eos_ids: Iterable[int], processor: Any = None,
        text_only: bool = False,
    ) -> None:  # fmt: skip
        super().__init__((), tokenizer=tokenizer, processor=processor, max_context=max_context)
        self._journal = Path(journal)
        self._recorded = recorded(self._journal)
        self.eos_ids = frozenset(eos_ids)
        self._text_only = text_only

    @property
    def facts(self) -> EngineFacts:
        """What the engine was whose answers these are."""
        why = "a replay has what was recorded, and log-probs of other engines are not its own"
        return replace(super().facts, text_only=self._text_only, cannot_score=why)

    def _plan(self, request: Request) -> AnswerPlan:
        """Return the recorded tokens that a request asks for, a piece for each run of one version, and their end."""
        recorded = self._recorded.get((request.trajectory_id, request.context, request.turn))
        if recorded is None:
            return AnswerPlan(
                error=f"ReplayDiverged: {self._journal} has no {self._where(request)}: it went another way"
            )
        if (wrong := self._difference(request, recorded)) is not None:
            return AnswerPlan(error=wrong)
        start = request.sampled
        end = len(recorded.ids)
        if recorded.usage is None:  # else an answer came whole, and its engine has counted it
            end = min(end, start + request.sampling.max_tokens)
        changes = [at for at in range(start + 1, end) if recorded.versions[at] != recorded.versions[at - 1]]
        bounds = [start, *changes, end]
        pieces = tuple(
            (
                recorded.ids[at:to],
                recorded.logprobs[at:to],
                recorded.noted(at, to, request.routed if at == start else recorded.start + at),
            )
            for at, to in pairwise(bounds)
        )
        versions = tuple(recorded.versions[at] for at in bounds[:-1]) if end > start else ()
        if NO_VERSION in versions:
            at = versions.index(NO_VERSION)
            closed = f"ReplayDiverged: the thinking of {self._where(request)} was closed in {self._journal}, and is not"
            return AnswerPlan(pieces[:at] or ((NO_IDS, NO_LOGPROBS),), versions=versions[:at], error=f"{closed} here")
        if end < len(recorded.ids):
            return AnswerPlan(pieces, versions=versions, finish_reason=FinishReason.LENGTH)
        if recorded.finish_reason != FinishReason.ABORT:
            return AnswerPlan(pieces, versions=versions, finish_reason=recorded.finish_reason, usage=recorded.usage)
        cut_off = (
            f"ReplayCutOff: {self._where(request)} was cut off in {self._journal}, after {len(recorded.ids)} tokens"
        )
        return AnswerPlan(pieces, versions=versions, error=cut_off)

    def _where(self, request: Request) -> str:
        return f"generation {request.turn} (from 0) of trajectory '{request.trajectory_id}' in '{request.context}'"

    def _difference(self, request: Request, recorded: Recorded) -> str | None:
        """Return where a request is not what the run has asked there, or ``None`` where it is."""
        recorded_input = recorded.stream.tokens.ids[: recorded.start] + recorded.ids[: request.sampled]
        if request.ids == recorded_input:
            shown = [span for span in recorded.stream.media if span.end <= recorded.start]
            other = next((now for now, before in zip(request.media, shown, strict=False) if now != before), None)
            return other and (
                f"ReplayDiverged: {self._where(request)} shows another picture than in {self._journal} at token "
                f"{other.start}"
            )
        pairs = enumerate(zip(recorded_input, request.ids, strict=False))
        at = next((place for place, (before, now) in pairs if before != now), None)
        at = min(len(recorded_input), len(request.ids)) if at is None else at
        return (
            f"ReplayDiverged: {self._where(request)} has another input than in {self._journal}, from token {at} on: "
            f"there {self._text(recorded_input, at)}, here {self._text(request.ids, at)}"
        )

    def _text(self, ids: Ids, at: int) -> str:
        before = self.tokenizer.decode(ids[max(0, at - AROUND) : at])
        return f"{before!r} is followed by {self.tokenizer.decode(ids[at : at + AROUND])!r}"
