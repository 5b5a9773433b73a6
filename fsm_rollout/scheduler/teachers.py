"""Teachers: what other models make of the tokens that the policy has sampled.

Invariant: each token of a trained stream's response is shown to each teacher once, in order, as the ids that stand in
the stream; and before a group is delivered each teacher has said its log-probs, or has failed for good: then they are
NaN, and the stream says why. No generation waits for a teacher: a turn is scored while the next one is sampled.

What a teacher has said is an event of the trajectory, so the journal has it; a resumed trajectory asks for the rest.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.concurrency.tasks import Tasks
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.errors import ConfigError, RolloutError, RunStopped, describe
from fsm_rollout.states.active_trajectory import EventSink
from fsm_rollout.states.bound_agent import compiled
from fsm_rollout.trajectory.events import AnyEvent, Generated, Suspended, TeacherScored
from fsm_rollout.trajectory.settings import Count, StrictModel
from fsm_rollout.trajectory.stream import Stream, text_of
from fsm_rollout.trajectory.tokens import NO_VERSION, Ids, Owner, Taught, TokenScores, as_ids, as_logprobs
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

_NOTHING = Taught()


class TeacherSettings(StrictModel):
    """What a teacher is asked for, and in which context."""

    top_k: Count = 0
    """how many of the likeliest tokens in each token's place it says, beside it"""
    hint: str | None = None
    """a template, over `task`, `messages` and `extra` of the prompt, of what only the teacher reads: it stands
    before the conversation as written here, with the chat template's own marks, and is cut off again"""


class TaughtBy(NamedTuple):
    """Which engine is a teacher, and what it is asked for."""

    engine: str
    settings: TeacherSettings


@dataclass(frozen=True, slots=True)
class Teacher:
    """One teacher of a run."""

    name: str
    client: EngineClient
    settings: TeacherSettings

    def check(self, policy: EngineClient) -> None:
        """Raise ConfigError where its engine can say nothing of the policy's tokens."""
        facts = self.client.facts
        if facts.cannot_score:
            raise ConfigError(f"teacher '{self.name}': its engine cannot be one: {facts.cannot_score}")
        if not _vocabulary(policy.facts.tokenizer).items() <= _vocabulary(facts.tokenizer).items():
            raise ConfigError(
                f"teacher '{self.name}': its tokenizer has other ids than the policy's, so it would read other tokens; "
                "a teacher scores the policy's own ids"
            )
        if self.settings.hint is not None:
            self._hint("", (), {})

    def _hint(self, task: str, messages: object, extra: Mapping[str, object]) -> str:
        from jinja2 import TemplateError, UndefinedError

        hint = self.settings.hint or ""
        try:  # a template loses its last line's end, which is a token here
            return compiled(hint).render(task=task, messages=messages, extra=extra) + "\n" * hint.endswith("\n")
        except UndefinedError as error:
            if task:
                raise RolloutError(f"the hint of teacher '{self.name}' cannot be written: {error}") from error
            return ""  # only whether it is a template was to be seen
        except TemplateError as error:
            raise ConfigError(f"teacher '{self.name}': its hint is no template: {error}") from error

    def before(self, trajectory: Trajectory) -> Ids:
        """Return the ids that it reads before a trajectory's own."""
        if self.settings.hint is None:
            return as_ids([])
        messages = trajectory.prompt_messages
        text = self._hint(text_of(messages[-1]), messages, trajectory.extra)
        return as_ids(self.client.facts.tokenizer.encode(text, add_special_tokens=False))


def _vocabulary(tokenizer: object) -> Mapping[str, int]:
    found: Mapping[str, int] = tokenizer.get_vocab()  # type: ignore[attr-defined]
    return found


class Teachers:
    """The teachers of a run. :meth:`heard` is one of its listeners.

    Args:
        teachers: they, by name.
        clients: the run's engines, by name.
        recorder: what an event goes to.
        stops: whether one that has failed for good stops the run.
    """

    def __init__(
        self, teachers: Mapping[str, TaughtBy], clients: Mapping[str, EngineClient], recorder: EventSink, *, stops: bool
    ) -> None:
        self._recorder, self._stops = recorder, stops
        self._teachers = tuple(Teacher(name, clients[by.engine], by.settings) for name, by in teachers.items())
        for teacher in self._teachers:
            teacher.check(clients[POLICY])
        # What is being asked, by trajectory, then by number of the stream and teacher; and all tasks that go on.
        self._asking: defaultdict[str, dict[tuple[int, str], asyncio.Task[None]]] = defaultdict(dict)
        self._tasks = Tasks()
        self._sessions: defaultdict[str, dict[str, EngineClient]] = defaultdict(dict)  # by trajectory, those begun
        self._warned = False

    def heard(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Show the teachers what a generation has brought; ask nothing of what is set aside."""
        kind = type(event)
        if kind is Generated:
            self._ask(trajectory)
        elif kind is Suspended:
            self.leave([trajectory])

    def leave(self, trajectories: Iterable[Trajectory]) -> None:
        """Ask nothing more of trajectories that are set aside, or in no batch, and have nothing kept for them."""
        for trajectory in trajectories:
            asking = list(self._asking.pop(trajectory.trajectory_id, {}).values())
            sessions = self._sessions.pop(trajectory.trajectory_id, {})
            if asking or sessions:
                self._tasks.begin(self._set_aside(asking, sessions))

    async def _set_aside(self, asking: Sequence[asyncio.Task[None]], sessions: Mapping[str, EngineClient]) -> None:
        for task in asking:
            task.cancel()
        try:
            await asyncio.gather(*asking, return_exceptions=True)
        finally:
            _end(sessions)

    def _ask(self, trajectory: Trajectory) -> list[asyncio.Task[None]]:
        """Ask all teachers for what they have not said of a trajectory; return what is under way."""
        asking: list[asyncio.Task[None]] = []
        asked = self._asking[trajectory.trajectory_id]
        for number, stream in enumerate(trajectory.streams):
            for teacher in self._teachers if stream.tokens.trained_length else ():
                task = asked.get(key := (number, teacher.name))
                if (task is None or task.done()) and _unsaid(teacher, trajectory, stream):
                    task = asked[key] = self._tasks.begin(self._score(teacher, trajectory, number))
                if task is not None and not task.done():
                    asking.append(task)
        return asking

    async def _score(self, teacher: Teacher, trajectory: Trajectory, number: int) -> None:
        """Have a teacher say its log-probs of a stream's response, as far as it goes by then."""
        stream, clock = trajectory.streams[number], asyncio.get_running_loop().time
        tokens, name = stream.tokens, f"teacher:{teacher.name}/{number}"
        session = f"{teacher.client.label}{trajectory.trajectory_id}/{name}~{trajectory.resumptions}"
        while places := _unsaid(teacher, trajectory, stream):
            begun = clock()
            facts: dict[str, Any] = {"teacher": teacher.name, "stream": number, "start": places.start}
            # 1. Ask for what is new.
            try:
                before = teacher.before(trajectory)
            except RolloutError as error:
                self._failed(trajectory, facts, len(places), error)
                continue
            request = Request(
                request_id=f"{trajectory.trajectory_id}/{name}",
                ids=before + tokens.ids[: places.stop],
                sampling=SamplingParams(max_tokens=1),
                trajectory_id=trajectory.trajectory_id,
                group_id=trajectory.group_id,
                agent=trajectory.agent,
                context=stream.context,
                session=session,
                turn=trajectory.generations,
                media=tuple(span.moved(len(before)) for span in stream.media if span.end <= places.stop),
                scored_from=len(before) + places.start,
                score_top=teacher.settings.top_k,
            )
            self._sessions[trajectory.trajectory_id][session] = teacher.client
            pending = teacher.client.submit(request)
            try:
                await pending.done.wait()
            except asyncio.CancelledError:
                await teacher.client.abort(pending)
                raise
            # 2. What it says of it.
            if pending.scores is not None:
                scores, now = pending.scores, clock()
                said = TeacherScored(at=now, scores=scores, version=pending.scored_by, seconds=now - begun, **facts)
                trajectory.apply(said)
                self._recorder.record(trajectory, said)
            elif pending.error is not None:
                self._failed(trajectory, facts, len(places), pending.error)
            else:
                return  # the run is over

    def _failed(self, trajectory: Trajectory, facts: Mapping[str, Any], count: int, error: RolloutError) -> None:
        """Record that a teacher has nothing to say of so many tokens."""
        level, self._warned = logging.INFO if self._warned else logging.WARNING, True  # only the first is a warning
        text = "teacher '%s' has no log-probs of %d tokens of %s, which are NaN: %s"
        logger.log(level, text, facts["teacher"], count, trajectory.trajectory_id, error)
        none, now = TokenScores(as_logprobs([math.nan] * count)), asyncio.get_running_loop().time()
        event = TeacherScored(at=now, scores=none, version=NO_VERSION, failure=describe(error), **facts)
        trajectory.apply(event)
        self._recorder.record(trajectory, event)

    async def settle(self, trajectories: Iterable[Trajectory]) -> RunStopped | None:
        """Wait until all is said of trajectories that have ended that can be; return why to stop the run."""
        ended = [trajectory for trajectory in trajectories if trajectory.ended]
        if asking := [task for trajectory in ended for task in self._ask(trajectory)]:
            await asyncio.wait(asking)
            for task in asking:
                task.result()
        for trajectory in ended:
            self._asking.pop(trajectory.trajectory_id, None)
            _end(self._sessions.pop(trajectory.trajectory_id, {}))
            for stream in trajectory.streams:
                for name, taught in stream.taught.items():
                    if taught.failure is not None and self._stops:
                        return RunStopped(
                            f"the run stops, as `failures.engine` says: teacher '{name}' has no log-probs of tokens of "
                            f"{trajectory.trajectory_id} ({taught.failure})"
                        )
        return None

    async def drain(self) -> None:
        """End all that is asked for; it is asked for again when a trajectory goes on."""
        self._asking.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sessions in self._sessions.values():
            _end(sessions)
        self._sessions.clear()


def _unsaid(teacher: Teacher, trajectory: Trajectory, stream: Stream) -> range:
    """Return the places of the tokens that a teacher is to be shown next: what follows a turn comes with the next."""
    tokens = stream.tokens
    end = tokens.length
    if not trajectory.ended:
        end = next((span.end for span in reversed(tokens.spans) if span.owner is Owner.MODEL), 0)
    return range(tokens.prompt_length + stream.taught.get(teacher.name, _NOTHING).length, end)


def _end(sessions: Mapping[str, EngineClient]) -> None:
    for session, client in sessions.items():
        client.end_sessions([session])
