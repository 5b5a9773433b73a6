"""A rollout that another machine runs, with the surface of :class:`fsm_rollout.Rollout`.

Invariant: a trainer has each group once, whatever dies meanwhile. What is asked is asked again until it is answered; a
service that was started again is told which groups are there; and a group is acknowledged when the trainer asks for the
next one, or runs again, as a journal marks it in a run of one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fsm_rollout.agent.loader import recorded_agent
from fsm_rollout.batch.part import parts_of
from fsm_rollout.concurrency.loop_thread import plain
from fsm_rollout.engines.adapters import Adapter
from fsm_rollout.engines.present_weights import PresentWeights
from fsm_rollout.engines.protocol import Weights, WeightSource
from fsm_rollout.engines.weight_sources import Loaded, WeightsGone, as_source
from fsm_rollout.errors import ConfigError, EngineError, RefusedError
from fsm_rollout.jobs.shard_run import PackedPicture, packed_pictures
from fsm_rollout.model.folders import load_processor
from fsm_rollout.rollout import Prompts, Rollout
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.leased_group import LeasedGroup
from fsm_rollout.scheduler.recorder import Recorder
from fsm_rollout.scheduler.resume import History
from fsm_rollout.scheduler.run_state import check_numbers
from fsm_rollout.scheduler.scheduler import MAX_FILTERED, OVER_SAMPLE, Scheduler
from fsm_rollout.serve.remote_run import PATIENCE, PromptFeed, RemoteRun, ServiceLine
from fsm_rollout.serve.remote_weights import pushed
from fsm_rollout.serve.training_wire import API, Begin, End, Facts, Open, Waiting, prompts_of
from fsm_rollout.trajectory.event_bytes import encode
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory


@dataclass(slots=True)
class RemoteWeights:
    """The policy's weights, as the trainer knows them."""

    version: int
    body_bytes: int
    """How long a body the service takes."""
    present: PresentWeights = field(default_factory=PresentWeights)
    """What the trainer has pushed."""


class RemoteScheduler:
    """What a rollout asks of its scheduler, asked of a service's.

    Args:
        line: to the service.
        weights: the policy's, as the trainer knows them.
        evaluation: the sampling of an evaluation beside the training; ``None``: this is the training.
    """

    def __init__(self, line: ServiceLine, weights: RemoteWeights, evaluation: Sampling | None = None) -> None:
        self.line, self.weights, self.evaluation = line, weights, evaluation
        self.recorder = Recorder(None, ())
        self.staleness = SimpleNamespace(version=lambda: weights.version)
        self.carried: list[Group] = []
        self.under_way = False
        self.stats: dict[str, dict[str, int]] = {}
        self._options: dict[str, Any] = {}
        self.keeps_runs = False
        """Whether runs that are closed go on at the service."""
        self._delivered: list[str] = []  # the groups that the caller has and has not come back from

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Leave it to the service."""

    async def acheck(self, prompts: Sequence[Prompt]) -> None:
        """Leave it to the service, which checks a list before anything of it runs."""

    def come_back(self, *, histories: bool, batch_options: Mapping[str, object]) -> None:
        """Say how the next run's groups come back: whether with their events, and with which rows."""
        self._options = {"histories": histories, "batch": dict(batch_options)}

    def engine_stats(self) -> dict[str, dict[str, int]]:
        """Return what the engines have done, as of the last answer."""
        return self.stats

    def loop_lag(self) -> dict[str, dict[str, float]]:
        """Return nothing: it is the service's."""
        return {}

    async def send_to_sleep(self) -> None:
        """Have engines give their memory back."""
        await self.line.order("sleep")

    async def wake_up(self) -> None:
        """Have them be ready again."""
        await self.line.order("wake")

    async def hold(self, reason: str) -> None:
        """Have the policy sample nothing."""
        await self.line.order("hold", reason=reason)

    async def release(self, reason: str) -> None:
        """Take that back."""
        await self.line.order("release", reason=reason)

    async def acancel(self, trajectory_id: str) -> bool:
        """End one trajectory soon."""
        return bool(await self.line.order("cancel", trajectory_id=trajectory_id))

    async def update_weights(self, weights: Weights | WeightSource, version: int | None = None) -> int:
        """Have new policy weights loaded and return their version."""
        source, state = as_source(weights), self.weights
        state.version = await pushed(self.line, source, version, state.body_bytes)
        state.present = state.present.with_update(source, state.version)
        return state.version

    async def _fill(self, missing: RefusedError) -> None:
        """Push the present weights again; where they cannot be had again, the service's own refusal is raised."""
        updates = self.weights.present.updates
        if not updates or isinstance(updates[-1][0], Loaded | Adapter):  # which the service itself has tried
            raise missing
        try:
            for source, version in updates:
                await pushed(self.line, source, version, self.weights.body_bytes)
        except WeightsGone as error:
            raise EngineError(f"{missing}; {error}") from None

    async def drop_carried(self) -> list[Group]:
        """Give up what waits for the next run, and return it."""
        carried, self.carried = self.carried, []
        if carried:
            await self.line.order("drop_carried")
        return carried

    def _carry(self, waits: Sequence[Waiting], pictures: Sequence[PackedPicture]) -> None:
        """Know what waits for the next run."""
        prompts = prompts_of([each[3] for each in waits], pictures)
        self.carried = [LeasedGroup.of(*each[:2], prompt, each[2]) for each, prompt in zip(waits, prompts, strict=True)]

    async def state(self) -> dict[str, Any]:
        """Return what the next run depends on; who saves that has done with all groups that came before."""
        if self.under_way:
            raise ConfigError("a run is under way; save the state between two runs")
        state: dict[str, Any] = await self.line.order("state", acked=self._delivered)
        self._delivered = []
        return state

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """Have the service go on where a state was saved, here or in another folder."""
        self._carry(*await self.line.order("load_state", state=dict(state)))
        self._delivered = []

    # -- a run --------------------------------------------------------------------------------------------------------

    async def run(
        self, prompts: Iterable[Prompt], n: int = 1, *, target_groups: int | None = None,
        over_sample: float = OVER_SAMPLE, max_filtered: float | None = MAX_FILTERED, resume: Iterable[History] = (),
        deliver_at_end: bool = False, step: int | None = None, listens: object = None,
    ) -> AsyncGenerator[Group, None]:  # fmt: skip
        """See :meth:`fsm_rollout.scheduler.scheduler.Scheduler.run`."""
        if self.under_way:
            raise ConfigError(
                "a run is under way already, and there is one at a time; iterate it to its end, or close it "
                "(`aclose()`), or use another Rollout"
            )
        check_numbers(n, target_groups, over_sample, max_filtered)
        histories = list(resume)
        if any(isinstance(history, Trajectory) for history in histories):
            raise ConfigError("resume: give the events of trajectories: fsm_rollout.journal.histories(path)")
        source = PromptFeed(prompts)
        begin = Begin(
            client=self.line.client, run=next(self.line.numbers), n=n, target_groups=target_groups,
            over_sample=over_sample, max_filtered=max_filtered, step=step, at_end=deliver_at_end,
            evaluation=None if self.evaluation is None else self.evaluation.model_dump(exclude_none=True),
            prompts=source.packed, pictures=packed_pictures(source.packed), closed=source.closed,
            resume=[list(map(encode, cast(Any, history))) for history in histories], acked=self._delivered,
            **self._options,
        )  # fmt: skip
        keep, self.under_way, mine = False, True, RemoteRun(self.line, begin, source, self._fill)
        async with self.line.connected():
            try:
                await mine.begin_here()
                self._delivered = []
                async for group in mine.groups():
                    if not deliver_at_end:
                        self._delivered.append(group.group_id)
                        yield group
                        mine.done_with(group.group_id)
                        self._delivered.remove(group.group_id)
                self.weights.version, self.stats = mine.last.weight_version, mine.last.stats
                if self.evaluation is None:
                    self._carry(mine.last.carried, mine.last.pictures)
                if deliver_at_end:
                    for group in mine.held.values():
                        self._delivered.append(group.group_id)
                        yield group
            except asyncio.CancelledError:  # Ctrl-C, say: who starts the trainer again gets the rest
                keep = True
                raise
            finally:
                try:
                    if not mine.last.ended and mine.begun and not (keep or self.keeps_runs):
                        with suppress(RefusedError):
                            await self.line.ask(End(client=self.line.client, run=begin.run))
                finally:
                    self.under_way = False


class RemoteRollout(Rollout):
    """A rollout that ``fsm-rollout serve --training RUN.yaml`` runs, on this machine or another.

    Args:
        url: the service's address, ``http://host:8000``.
        api_key: one of its keys, if it has any.
        patience: seconds that it may be away, started again say, before what waits for it fails.
        progress: as for :class:`fsm_rollout.Rollout`.

    All that :class:`fsm_rollout.Rollout` has is here too. Agents, engines, rewards and the journal are the service's.

    Closing it, as the end of a ``with`` block does, lets the service go, and what was set aside with it. A process that
    ends otherwise, or whose block ends by an error or Ctrl-C, is one that has died: its run goes on, and another that
    asks for the same run gets the groups that it has not done with.

    Raises:
        ConfigError: there is no such service, or the key is wrong.
        EngineError: nobody answers.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, patience: float = PATIENCE, progress: bool | None = None
    ) -> None:
        self.line = ServiceLine(url, api_key, patience)
        try:
            facts: Facts = self._wait_for(lambda: self.line.ask(Open(client=self.line.client, api=API), Facts))
        finally:
            self._end_loop(None)
        self.agents = {name: recorded_agent(text) for name, text in facts.agents.items()}
        samplings = [Sampling.model_validate(sampling) for sampling in facts.evaluation_samplings]
        self._evaluation_samplings = samplings[0], samplings[1]
        self._closed, self._progress, self._tracing = False, progress, None
        self._owned, self._shards, self.clients, self.engines = [], None, {}, {}
        self._weights = RemoteWeights(facts.weight_version, facts.body_bytes)
        scheduler = RemoteScheduler(self.line, self._weights)
        scheduler.stats = facts.stats
        self.scheduler = cast(Scheduler, scheduler)
        self.state_names, self.description = tuple(facts.state_names), facts.description
        folder = None if facts.processor is None else Path(facts.processor)
        processor = load_processor(folder) if folder is not None and folder.is_dir() else None
        self._of_batches = {
            "state_names": self.state_names, "pad_id": facts.pad_id, "processor": processor, "parts": parts_of,
        }  # fmt: skip

    def _evaluation_scheduler(self, sampling: Sampling) -> Scheduler:
        return cast(Scheduler, RemoteScheduler(self.line, self._weights, sampling))

    def _groups_of(
        self, scheduler: Scheduler, prompts: Prompts, n: int, target_groups: int | None = None,
        histories: bool = False, batch: Mapping[str, Any] | None = None, **options: Any,
    ) -> AsyncGenerator[Group, None]:  # fmt: skip
        wanted = histories or target_groups is not None
        cast(RemoteScheduler, scheduler).come_back(histories=wanted, batch_options=batch or {})
        return super()._groups_of(scheduler, prompts, n, target_groups, **options)

    async def astatus(self) -> dict[str, Any]:
        """Return how the service stands: its run, engines and weights, and whether it is paused."""
        return cast(dict[str, Any], await self.line.order("status"))

    status = plain(astatus)
    """Do what :meth:`astatus` does and wait for it; another thread may call it while ``run`` runs."""

    async def astate_dict(self) -> dict[str, Any]:
        """Return what the next run depends on, as :meth:`Rollout.state_dict` does; the groups so far are done with."""
        state = await cast(RemoteScheduler, self.scheduler).state()
        return state | {"position": self._position.taken}

    async def aload_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was saved: at the same service, or at another whose folder is new.

        Raises:
            ConfigError: the service has gone on since, or the state does not fit its rollout.
        """
        await cast(RemoteScheduler, self.scheduler).load_state(state)
        self._position.taken, self._due = state["position"], state["weight_version"]

    state_dict, load_state_dict = plain(astate_dict), plain(aload_state_dict)

    async def aclose(self) -> None:
        """Let the service go, which drops what was set aside for this trainer. Safe to call twice."""
        if not self._closed:
            self._closed = True
            await self.line.order("done", acked=cast(RemoteScheduler, self.scheduler)._delivered)

    def close(self) -> None:
        """Let the service go, and end the event loop. Safe to call twice."""
        self._end_loop(None if self._closed else self.aclose)

    async def __aexit__(self, *error: object) -> None:
        self._end_block(*error)
        await self.aclose()

    def __exit__(self, *error: object) -> None:
        self._end_block(*error)
        self.close()

    def _end_block(self, kind: object, *_: object) -> None:
        """Where an error has ended the block, leave the service as a process does that was killed."""
        if kind is not None:
            self._closed = cast(RemoteScheduler, self.scheduler).keeps_runs = True
