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

from fsm_rollout.concurrency.loop_lag import LoopLag
from fsm_rollout.errors import ConfigError, RolloutError, did_you_mean
from fsm_rollout.jobs.run_config import ServeConfig
from fsm_rollout.jobs.shard_run import KeptEvents, PackedPicture, packed_error
from fsm_rollout.report.metrics import RunMetrics
from fsm_rollout.report.running import running_of
from fsm_rollout.rollout import Rollout
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.serve.guarded import Guarded
from fsm_rollout.serve.metrics import CONTENT_TYPE, page_of
from fsm_rollout.serve.pushed_weights import WeightUpdates
from fsm_rollout.serve.served_run import ServedRun
from fsm_rollout.serve.standing import DROPPED, Earlier, Standing
from fsm_rollout.serve.training_wire import (
    API,
    PATH,
    TAKEN_OVER,
    UNKNOWN_RUN,
    WEIGHTS_MISSING,
    Begin,
    Do,
    End,
    Facts,
    Groups,
    Next,
    Open,
    Q,
    Question,
    Waiting,
    param_of,
    prompts_of,
    read,
    write,
)
from fsm_rollout.states.external.chat_request import ProtocolError, refuse
from fsm_rollout.trajectory.event_bytes import decode
from fsm_rollout.trajectory.events import Prompted
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
        self._acknowledged = set[str]()  # the groups that the trainer has done with
        self._events: dict[str, list[bytes]] = {}
        self._orders: dict[int, asyncio.Future[Any]] = {}
        self._kept = KeptEvents(self._events)
        self._begun = self._ending = False  # a run of the training in this process; the process itself
        rollout.scheduler.marks = False  # the trainer says what it has
        rollout.scheduler.lag, recorder = LoopLag(), rollout.scheduler.recorder
        rewarded = rollout.scheduler.rewarded
        self.heard = RunMetrics(rollout.description, partial(running_of, rollout.scheduler), rewarded=rewarded)
        recorder.listeners = (*recorder.listeners, self.heard)
        self.standing = Standing.read(folder)
        self.updates = WeightUpdates(rollout, self.standing.weights, lambda: self.standing.keep(folder))

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
        app.on_startup.append(self._restore)
        app.on_shutdown.append(self._end_waits)
        return app

    async def _restore(self, _: web.Application) -> None:
        """Have the policy as it was in the process before this one."""
        await self.updates.restore()
        for reason in self.standing.holds:
            await self.rollout.pause_sampling(reason)

    async def _end_waits(self, _: web.Application) -> None:
        """Answer those who wait for groups: there will be none here."""
        self._ending = True
        for run in self._runs():
            run.changed.set()

    def _runs(self) -> list[ServedRun]:
        return [*self.evaluations.values(), *([self.training] if self.training is not None else [])]

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
                body = write((packed_error(error), None))
            return web.Response(body=body, content_type="application/msgpack")

        return respond

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(await self._standing_facts())

    async def _standing_facts(self) -> dict[str, Any]:
        run, standing = self.training, self.standing
        facts: dict[str, Any] = {
            "api": API, "trainer": bool(standing.client), "run": None, "weight_version": self.rollout.weight_version,
            "weights_missing": self.updates.missing, "paused": standing.holds, "engines": self.rollout.engine_stats(),
        }  # fmt: skip
        if run is not None:
            table = self.rollout.scheduler.groups.by_state
            facts["run"] = {
                "number": run.question.run, "step": run.question.step, "ended": run.ended,
                "unacknowledged": len(run.unacked), "prompts": run.prompts.received,
                "groups": {str(state): len(table[state]) for state in GroupState if table[state]},
            }  # fmt: skip
        return facts

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=page_of(self.heard), headers={"Content-Type": CONTENT_TYPE})

    # -- the trainer --------------------------------------------------------------------------------------------------

    async def _open(self, question: Open) -> Facts:
        if question.api != API:
            what = f"this service speaks version {API} of the protocol, the trainer {question.api}"
            raise refuse(f"{what}; install the same fsm_rollout on both sides", "wrong_version", "api")
        if question.client != self.standing.client:
            self.standing.client = question.client
            self._orders.clear()
            for run in self.evaluations.values():
                await run.end()
            self.evaluations.clear()
            await self._let_go()
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
            body_bytes=self.serving.body_bytes,
        )

    async def _let_go(self) -> None:
        """Take back what the trainer before had ordered, and forget who it was."""
        await self.updates.abandon()
        for reason in self.standing.holds:
            await self.rollout.resume_sampling(reason)
        self._holds(set())

    # -- runs ---------------------------------------------------------------------------------------------------------

    async def _begin(self, question: Begin) -> None:
        if self.updates.missing:
            raise ProtocolError(409, WEIGHTS_MISSING, self.updates.missing)
        key, rollout, run = (question.client, question.run), self.rollout, self.training
        options: dict[str, Any] = {
            "histories": question.histories,
            "batch": question.batch,
            "deliver_at_end": question.at_end,
        }
        if question.evaluation is not None:
            if key not in self.evaluations:
                scheduler = rollout._evaluation_scheduler(Sampling.model_validate(question.evaluation))
                other = self.evaluations[key] = ServedRun(question, scheduler, lambda: None)
                other.take_prompts(question.prompts, question.pictures, 0, question.closed)
                other.begin(rollout._groups_of(scheduler, other.prompts, question.n, **options))
            self.evaluations[key].attach(question.held)
            return
        # 1. It is there already: its trainer asks again, or was started again.
        self._acked(question.acked)
        if run is not None and (run.key == key or (run.key[0] != key[0] and run.question.digest == question.digest)):
            run.key = self.standing.key = key
            run.attach(question.held)
            self.standing.keep(self.folder)
            return
        # 2. It is another. What is wrong with its prompts is said before anything is given up for it.
        scheduler, prompts = rollout.scheduler, prompts_of(question.prompts, question.pictures)
        if question.closed:
            await scheduler.acheck(prompts)
        if run is not None:
            await run.end()
        others = [each for each in scheduler.recorder.listeners if each is not self._kept]
        scheduler.recorder.listeners = (*others, *([self._kept] if question.histories else []))
        earlier, target, again = Earlier(), question.target_groups, False
        if not self._begun and self.standing.key[1] >= 0:  # a process before this one had it
            again = self.standing.is_of(question)
            earlier = self.standing.restore(question, rollout, self.folder, self._events)
        if not again:
            assert rollout.journal is not None
            before = rollout.journal.groups | self._acknowledged | scheduler.groups.earlier
            self.standing = self.standing.of_run(question, scheduler, before)
        self._begun, self.standing.key = True, key
        self.standing.keep(self.folder)
        if target is not None:
            target -= earlier.counted
        run = self.training = ServedRun(question, scheduler, self._over)
        run.has_group, run.places = earlier.has_group, earlier.places
        run.take_prompts(question.prompts, question.pictures, 0, question.closed)
        options |= {"over_sample": question.over_sample, "max_filtered": question.max_filtered, "step": question.step}
        resume = [*earlier.resume, *(list(map(decode, history)) for history in question.resume)]
        if target == 0:  # all of them were had before this process began
            run.begin(_nothing())
        else:
            run.begin(rollout._groups_of(scheduler, run.prompts, question.n, target, resume=resume, **options))

    def _over(self) -> None:
        """Keep that the training's run has ended, and what waits for the next one."""
        if self._begun:
            self.standing.over(self.rollout.scheduler)
        else:  # what a process before this one had is given up
            self.standing.remaining = []
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
            self._acknowledged.add(group_id)
        if ids:
            journal.persist()
            if run is not None:
                run.changed.set()

    async def _next(self, question: Next) -> Groups:
        run = self._run_of(question)
        if run is self.training:
            self._acked(question.acked)
        run.take_prompts(question.prompts, question.pictures, question.position, question.closed)
        if question.wait:
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    while not (
                        self._ending
                        or run.ended
                        or len(run.order) > question.at
                        or (run.prompts.wanted and not question.starved)
                    ):
                        run.changed.clear()
                        await run.changed.wait()
        return run.answer(question.at, self.rollout, self._events)

    def _run_of(self, question: Next | End) -> ServedRun:
        key, run = (question.client, question.run), self.training
        if run is None or run.key != key:
            run = self.evaluations.get(key)
        if run is None:
            raise ProtocolError(404, UNKNOWN_RUN, "there is no such run here; begin it again")
        return run

    async def _end(self, question: End) -> None:
        run = self._run_of(question)
        await run.end()
        if run is self.training:
            self.training, self.standing.digest = None, ""  # who asks for the same has it done anew
            self._over()
        else:
            del self.evaluations[question.client, question.run]

    # -- orders -------------------------------------------------------------------------------------------------------

    async def _order(self, question: Do) -> Any:
        if question.name not in ORDERS:
            hint = did_you_mean(question.name, ORDERS)
            raise refuse(f"there is no order '{question.name}'{hint}", "unknown_order", "name")
        if (task := self._orders.get(question.number)) is None:
            task = self._orders[question.number] = asyncio.ensure_future(
                ORDERS[question.name](self)(**question.arguments)
            )
            if len(self._orders) > MOST_ORDERS:
                del self._orders[next(iter(self._orders))]
        return await asyncio.shield(task)

    async def _hold(self, reason: str) -> None:
        await self.rollout.pause_sampling(reason)
        self._holds({*self.standing.holds, reason})

    async def _release(self, reason: str) -> None:
        await self.rollout.resume_sampling(reason)
        self._holds({*self.standing.holds} - {reason})

    def _holds(self, reasons: set[str]) -> None:
        self.standing.holds = sorted(reasons)
        self.standing.keep(self.folder)

    async def _drop_carried(self) -> None:
        await self.rollout.scheduler.drop_carried()
        self._over()

    async def _state(self, acked: Sequence[str]) -> dict[str, Any]:
        """Return what the next run depends on; the trainer has done with all that it had."""
        self._acked(acked)
        return self.rollout.state_dict()

    async def _load_state(self, state: dict[str, Any]) -> tuple[list[Waiting], list[PackedPicture]]:
        """Go on where a state was saved, and return what waits for the next run."""
        standing, scheduler, at = self.standing, self.rollout.scheduler, None
        if standing.key[1] < 0:  # nothing has run in this folder
            self.rollout.load_state_dict(state)
            self._begun, standing.key, standing.before = True, (standing.client, 0), list(state["group_ids"])
            standing.run_number = scheduler.starter.run_number
            for history in (each for group in state["groups"] for each in group["histories"]):
                self._events[cast(Prompted, decode(history[0])).trajectory_id] = list(history)
            self._over()
        elif (at := standing.is_at(state, self.folder)) is None:
            raise ConfigError(
                f"the service's folder, '{self.folder}', holds other runs than the state knows, so groups would be had "
                "twice, or never; start the service with another folder: serve.out=…"
            )
        elif at == "after":  # what is asked for next is another run, even if it is alike
            self.training, standing.digest = None, ""
            standing.keep(self.folder)
        else:  # it is that run again
            standing.key = "", standing.key[1]
            if self.training is not None:
                self.training.key = standing.key
        return (standing.carried if at == "before" else standing.remaining or []), standing.pictures

    async def _done(self, acked: Sequence[str]) -> None:
        """Let the trainer go: it has done with all that it had."""
        self._acked(acked)
        if self.training is not None:
            await self.training.end()
        await self._let_go()
        self.training, self.standing.digest = None, ""
        await self._drop_carried()

    async def aclose(self) -> None:
        """End what runs; the training's run goes on when its trainer asks for it again, in a process to come."""
        await self.updates.abandon()
        for run in self._runs():
            if run.task is not None:
                run.task.cancel()
                await asyncio.wait({run.task})


ORDERS: dict[str, Callable[[TrainingService], Callable[..., Awaitable[Any]]]] = {
    "status": lambda its: its._standing_facts,
    "load": lambda its: its.updates.load,
    "begin_tensors": lambda its: its.updates.begin_tensors,
    "take_tensors": lambda its: its.updates.take_tensors,
    "end_tensors": lambda its: its.updates.end_tensors,
    "hold_servers": lambda its: its.updates.hold_servers,
    "tell_server": lambda its: its.updates.tell_server,
    "release_servers": lambda its: its.updates.release_servers,
    "hold": lambda its: its._hold,
    "release": lambda its: its._release,
    "sleep": lambda its: its.rollout.send_to_sleep,
    "wake": lambda its: its.rollout.wake_up,
    "cancel": lambda its: its.rollout.acancel,
    "drop_carried": lambda its: its._drop_carried,
    "state": lambda its: its._state,
    "load_state": lambda its: its._load_state,
    "done": lambda its: its._done,
}  # fmt: skip


async def _nothing() -> AsyncGenerator[Group, None]:
    """Yield no group."""
    for group in list[Group]():
        yield group
