"""A rollout whose trainer is elsewhere: what it asks over HTTP is done here, and its groups wait until it has them.

Invariants: a group is marked as delivered, in the journal, when its trainer says that it has done with it, and is
handed over again until then, whoever of the two has died. A run that died with this process goes on from the journal
when its trainer asks for it again: its groups keep their names, and its trajectories their seeds. One trainer is served
at a time, the one that came last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from aiohttp import web

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.concurrency.loop_lag import LoopLag
from fsm_rollout.errors import RolloutError, did_you_mean
from fsm_rollout.jobs.run_config import ServeConfig
from fsm_rollout.jobs.shard_run import KeptEvents, told
from fsm_rollout.report.metrics import RunMetrics
from fsm_rollout.report.running import running_of
from fsm_rollout.rollout import Rollout
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.scheduler.leased_scheduler import LeasedScheduler
from fsm_rollout.serve.guarded import Guarded
from fsm_rollout.serve.metrics import CONTENT_TYPE, page_of
from fsm_rollout.serve.served_run import ServedRun
from fsm_rollout.serve.standing import DROPPED, Earlier, Standing
from fsm_rollout.serve.training_wire import (
    API,
    PATH,
    TAKEN_OVER,
    UNKNOWN_RUN,
    Begin,
    Do,
    End,
    Facts,
    Groups,
    Next,
    Open,
    Q,
    Question,
    param_of,
    prompts_of,
    read,
    write,
)
from fsm_rollout.states.external.chat_request import ProtocolError, refuse
from fsm_rollout.trajectory.event_bytes import decode
from fsm_rollout.trajectory.settings import Sampling

MOST_ORDERS = 64  # so many answers are kept, for those who have lost them
ANSWER_SECONDS = 20.0  # so long a question for groups waits for some


class TrainingService(Guarded):
    """Answers the questions of a trainer with a rollout, which has a journal in ``folder`` and is nobody else's.

    Args:
        rollout: its agents and engines.
        folder: where the journal is, and how the trainer's run stands.
        serving: how it is served.
        keys: the trainers' keys.
    """

    def __init__(
        self, rollout: Rollout, folder: Path, serving: ServeConfig, keys: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(serving, keys)
        self.rollout, self.folder = rollout, folder
        self.training: ServedRun | None = None
        self.evaluations: dict[tuple[str, int], ServedRun] = {}
        self._seen = set[str]()  # the groups that the trainer has done with
        self._events: dict[str, list[bytes]] = {}
        self._orders: dict[int, asyncio.Future[Any]] = {}
        self._kept = KeptEvents(self._events)
        rollout.scheduler.marks = False  # the trainer says what it has
        rollout.scheduler.lag, recorder = LoopLag(), rollout.scheduler.recorder
        self.heard = RunMetrics(rollout.description, partial(running_of, rollout.scheduler))
        recorder.listeners = (*recorder.listeners, self.heard)
        self.standing = Standing.read(folder)

    # -- over HTTP ----------------------------------------------------------------------------------------------------

    def app(self) -> web.Application:
        """See there."""
        app = super().app()
        app.router.add_get(PATH, self._status)
        app.router.add_get("/metrics", self._metrics)
        questions: dict[type[Question], Callable[[Any], Awaitable[Any]]] = {
            Open: self._open, Begin: self._begin, Next: self._next, End: self._end, Do: self._order,
        }  # fmt: skip
        for kind, answer in questions.items():
            app.router.add_post(f"{PATH}/{kind.__name__.lower()}", self._answering(kind, answer))
        return app

    def _answering(
        self, kind: type[Q], answer: Callable[[Q], Awaitable[Any]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def respond(request: web.Request) -> web.Response:
            try:
                question = read(await request.read(), kind)
            except web.HTTPRequestEntityTooLarge as error:
                hint = "; raise serve.body_bytes, or send prompts by an iterator"
                raise ProtocolError(413, "body_too_large", f"the body is too long: {error.text}{hint}") from None
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise refuse(f"the body is no `{kind.__name__}`: {error}", param=param_of(error)) from None
            if not isinstance(question, Open) and question.client != self.standing.client:
                raise ProtocolError(409, TAKEN_OVER, "this trainer has not opened the service, or another has since")
            try:
                body = write((None, await answer(question)))
            except RolloutError as error:
                body = write((told(error), None))
            return web.Response(body=body, content_type="application/msgpack")

        return respond

    async def _status(self, request: web.Request) -> web.Response:
        run = self.training
        facts: dict[str, Any] = {"api": API, "weight_version": self.rollout.weight_version, "run": None}
        facts["trainer"] = bool(self.standing.client)
        if run is not None:
            table = self.rollout.scheduler.groups.by_state
            facts["run"] = {
                "number": run.asked.run, "step": run.asked.step, "ended": run.ended, "unacknowledged": len(run.unacked),
                "prompts": run.prompts.received,
                "groups": {str(state): len(table[state]) for state in GroupState if table[state]},
            }  # fmt: skip
        return web.json_response(facts | {"engines": self.rollout.engine_stats()})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=page_of(self.heard), headers={"Content-Type": CONTENT_TYPE})

    # -- the trainer --------------------------------------------------------------------------------------------------

    async def _open(self, asked: Open) -> Facts:
        if asked.api != API:
            what = f"this service speaks version {API} of the protocol, the trainer {asked.api}"
            raise refuse(f"{what}; install the same fsm_rollout on both sides", "wrong_version", "api")
        if asked.client != self.standing.client:
            self.standing.client = asked.client
            self._orders.clear()
            for run in self.evaluations.values():
                await run.end()
            self.evaluations.clear()
            self.standing.keep(self.folder)
        rollout = self.rollout
        options, samplings = rollout._of_batches, rollout._evaluation_samplings
        processor = options["processor"]
        return Facts(
            agents=cast(dict[str, str], rollout.description["agents"]),
            description=rollout.description,
            state_names=list(rollout.state_names),
            pad_id=options["pad_id"],
            processor=None if processor is None else str(processor.tokenizer.name_or_path),
            evaluation_samplings=[sampling.model_dump(exclude_none=True) for sampling in samplings],
            weight_version=rollout.weight_version,
            stats=rollout.engine_stats(),
        )

    # -- runs ---------------------------------------------------------------------------------------------------------

    async def _begin(self, asked: Begin) -> None:
        key, rollout, run = (asked.client, asked.run), self.rollout, self.training
        options: dict[str, Any] = {"histories": asked.histories, "batch": asked.batch, "deliver_at_end": asked.at_end}
        if asked.evaluation is not None:
            if key not in self.evaluations:
                scheduler = rollout._evaluation_scheduler(Sampling.model_validate(asked.evaluation))
                other = self.evaluations[key] = ServedRun(asked, scheduler, lambda: None)
                other.take_prompts(asked.prompts, asked.pictures, 0, asked.closed)
                other.begin(rollout._groups_of(scheduler, other.prompts, asked.n, **options))
            self.evaluations[key].attach(asked.had)
            return
        # 1. It is there already: its trainer asks again, or was started again.
        self._acked(asked.acked)
        if run is not None and (run.key == key or (run.key[0] != key[0] and run.asked.digest == asked.digest)):
            run.key = self.standing.key = key
            run.attach(asked.had)
            self.standing.keep(self.folder)
            return
        # 2. It is another. What is wrong with its prompts is said before anything is given up for it.
        scheduler, prompts = rollout.scheduler, prompts_of(asked.prompts, asked.pictures)
        if asked.closed:
            await scheduler.acheck(prompts)
        if run is not None:
            await run.end()
        others = [each for each in scheduler.recorder.listeners if each is not self._kept]
        scheduler.recorder.listeners = (*others, *([self._kept] if asked.histories else []))
        earlier, target, again = Earlier(), asked.target_groups, False
        if self.training is None and self.standing.key[1] >= 0:  # a process before this one had it
            again = self.standing.is_of(asked)
            earlier = self.standing.restore(asked, rollout, self.folder, self._events)
        if not again:
            assert rollout.journal is not None
            self.standing = Standing.of_run(asked, scheduler, rollout.journal.groups | self._seen)
        self.standing.key = key
        self.standing.keep(self.folder)
        if target is not None:
            target -= earlier.counted
        run = self.training = ServedRun(asked, scheduler, self._over)
        run.has_group, run.places = earlier.has_group, earlier.places
        run.take_prompts(asked.prompts, asked.pictures, 0, asked.closed)
        options |= {"over_sample": asked.over_sample, "max_filtered": asked.max_filtered, "step": asked.step}
        resume = [*earlier.resume, *(list(map(decode, history)) for history in asked.resume)]
        if target == 0:  # all of them were had before this process began
            run.begin(_nothing())
        else:
            run.begin(rollout._groups_of(scheduler, run.prompts, asked.n, target, resume=resume, **options))

    def _over(self) -> None:
        """Keep that the training's run has ended, and what it has left."""
        self.standing.over(self.rollout.scheduler)
        self.standing.keep(self.folder)

    def _acked(self, ids: Sequence[str]) -> None:
        """Mark groups that the trainer has done with."""
        journal, run = self.rollout.journal, self.training
        assert journal is not None
        for group_id in ids:
            group = run.unacked.pop(group_id, None) if run is not None else None
            if group is not None and group.dropped:
                journal.describe({f"{DROPPED}{group_id}": str(group.drop_reason)})
            for trajectory in () if group is None else (*group.all, *group.discarded):
                self._events.pop(trajectory.trajectory_id, None)
            journal.delivered(group_id)
            self._seen.add(group_id)
        if ids:
            journal.persist()
            if run is not None:
                run.changed.set()

    async def _next(self, asked: Next) -> Groups:
        run = self._run_of(asked)
        if run is self.training:
            self._acked(asked.acked)
        run.take_prompts(asked.prompts, asked.pictures, asked.position, asked.closed)
        if asked.wait:
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    while not (run.ended or len(run.order) > asked.at or (run.prompts.wanted and not asked.starved)):
                        run.changed.clear()
                        await run.changed.wait()
        return run.answer(asked.at, self.rollout, self._events)

    def _run_of(self, asked: Next | End) -> ServedRun:
        key, run = (asked.client, asked.run), self.training
        if run is None or run.key != key:
            run = self.evaluations.get(key)
        if run is None:
            raise ProtocolError(404, UNKNOWN_RUN, "there is no such run here; begin it again")
        return run

    async def _end(self, asked: End) -> None:
        run = self._run_of(asked)
        await run.end()
        if run is self.training:
            self._over()
        else:
            del self.evaluations[asked.client, asked.run]

    # -- orders -------------------------------------------------------------------------------------------------------

    async def _order(self, asked: Do) -> Any:
        if asked.name not in ORDERS:
            hint = did_you_mean(asked.name, ORDERS)
            raise refuse(f"there is no order '{asked.name}'{hint}", "unknown_order", "name")
        if (task := self._orders.get(asked.number)) is None:
            task = self._orders[asked.number] = asyncio.ensure_future(ORDERS[asked.name](self, **asked.arguments))
            if len(self._orders) > MOST_ORDERS:
                del self._orders[next(iter(self._orders))]
        return await asyncio.shield(task)

    async def _update_weights(self, folder: str, version: int | None) -> int:
        return await self.rollout.aupdate_weights(folder, version)

    async def _hold(self, reason: str) -> None:
        scheduler = self.rollout.scheduler
        if isinstance(scheduler, LeasedScheduler):
            await scheduler.shards.order("hold", reason)
        else:
            await scheduler.clients[POLICY].pause(reason)

    async def _release(self, reason: str) -> None:
        scheduler = self.rollout.scheduler
        if isinstance(scheduler, LeasedScheduler):
            await scheduler.shards.undo("hold", reason)
        else:
            await scheduler.clients[POLICY].resume(reason)

    async def _sleep(self) -> None:
        await self.rollout.send_to_sleep()

    async def _wake(self) -> None:
        await self.rollout.wake_up()

    async def _cancel(self, trajectory_id: str) -> bool:
        return self.rollout.scheduler.cancel(trajectory_id)

    async def _drop_carried(self) -> None:
        await self.rollout.scheduler.drop_carried()
        self._over()

    async def _done(self, acked: Sequence[str]) -> None:
        """Let the trainer go: it has done with all that it had."""
        self._acked(acked)
        if self.training is not None:
            await self.training.end()
        self.training = None
        await self.rollout.scheduler.drop_carried()
        self._over()
        self.standing.digest = ""
        self.standing.keep(self.folder)

    async def aclose(self) -> None:
        """End what runs; the training's run goes on when its trainer asks for it again, in a process to come."""
        for run in (*self.evaluations.values(), *([self.training] if self.training is not None else [])):
            if run.task is not None:
                run.task.cancel()
                await asyncio.wait({run.task})


ORDERS: dict[str, Callable[..., Awaitable[Any]]] = {
    "update_weights": TrainingService._update_weights, "hold": TrainingService._hold,
    "release": TrainingService._release, "sleep": TrainingService._sleep, "wake": TrainingService._wake,
    "cancel": TrainingService._cancel, "drop_carried": TrainingService._drop_carried, "done": TrainingService._done,
}  # fmt: skip


async def _nothing() -> AsyncGenerator[Group, None]:
    """Yield no group."""
    for group in list[Group]():
        yield group
