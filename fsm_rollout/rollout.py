"""Rollouts from Python: an agent, an engine, prompts in, a batch out.

Invariant: a rollout owns what it builds (engines named by a spec, its event loop) and leaves alone what it is given.

    import fsm_rollout as fr

    agent = fr.load_agent("configs/agents/tool_user.yaml")
    with fr.Rollout(agent, engine={"kind": "transformers", "model": "embedded"}) as rollout:
        batch = rollout.run(fr.read_prompts("configs/data/arithmetic.jsonl", limit=8), n=4)
    print(batch.tensordict)
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.agent.loader import dump
from fsm_rollout.agent.sound import AgentLike, sound_agents
from fsm_rollout.batch.part import parts_of
from fsm_rollout.concurrency.loop_thread import close_at_exit, plain
from fsm_rollout.engines.build import EngineLike, as_engine_or_spec, described, pool_of
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import TokenSource
from fsm_rollout.environment.rewards import GroupFilter, Reward, RewardLike
from fsm_rollout.errors import ConfigError, EngineError, about, check_names, checked_names
from fsm_rollout.model.folders import load_processor
from fsm_rollout.report.tracing import tracer_of
from fsm_rollout.scheduler.failure_policy import Failures, failures_of
from fsm_rollout.scheduler.group import Group, GroupStream, log_failures
from fsm_rollout.scheduler.leased_group import LeasedGroup
from fsm_rollout.scheduler.leased_scheduler import LeasedScheduler
from fsm_rollout.scheduler.orders import Listens
from fsm_rollout.scheduler.recorder import Listener
from fsm_rollout.scheduler.resume import History
from fsm_rollout.scheduler.run_agents import state_names
from fsm_rollout.scheduler.run_state import PromptQueue, one_by_one
from fsm_rollout.scheduler.scheduler import MAX_FILTERED, MAX_RESTARTS, OVER_SAMPLE, Scheduler
from fsm_rollout.scheduler.shard_placement import WorkerPlacement, starter
from fsm_rollout.scheduler.shard_setup import leased_scheduler
from fsm_rollout.scheduler.sharded_engines import EnginesOfShards
from fsm_rollout.scheduler.shards import Shards
from fsm_rollout.scheduler.taught_runs import split_teachers, teach
from fsm_rollout.scheduler.trainer_orders import TrainerOrders
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.prompt import Prompt, as_prompts
from fsm_rollout.trajectory.settings import Concurrency, Sampling, as_sampling
from fsm_rollout.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    from fsm_rollout.batch.batch import TrajectoryBatch
    from fsm_rollout.report.notebook import Page
    from fsm_rollout.report.tracing import TracingLike

PromptLike = Prompt | Mapping[str, object] | str
Prompts = Iterable[PromptLike] | str | Path  # prompts, or the file that they are read from


class Rollout(TrainerOrders):
    """Runs prompts through one or more agents.

    Args:
        agent: an agent (what ``load_agent`` gives, the path of a YAML, or the mapping that stands in one), or several
            by name (a prompt chooses by its ``agent`` field).
        engine: the policy: an engine, its spec as in a run YAML (``{"kind": "transformers", "model": …}``), or a model
            (``"embedded"``, a folder) for the transformers engine.
        engines: further, untrained engines by name.
        teachers: by name, engines that score the policy's own tokens, as in a run YAML: ``{"big": {"engine": {"kind":
            "sglang", "model": …}, "top_k": 8}}``.
        seed: everything random follows from it.
        sampling: comes before the agents' own, in the policy's contexts.
        validate: use ``validation_sampling`` and mark the trajectories.
        validation_sampling: see ``validate``; greedy unless given.
        reward: ``module:function``, or a function of a trajectory or of a whole group, sync or async; or a list of
            them, each also with its weight, ``(function, 0.5)``, whose weighted sum is the score. What they return:
            :class:`fsm_rollout.environment.rewards.Reward`.
        concurrency: trajectories under way at once; ``auto``: as many as fit into the engine's memory, or 1,024 where
            the engine does not say how large it is.
        queue_timeout: seconds that a silent engine is waited for.
        failures: what becomes of failures, by their class, as in a run YAML: ``{"tool": "end", "engine": {"attempts":
            5}}``. A trajectory that failed through no fault of the policy's is repeated within a budget; else it has
            no score.
        group_filter: ``module:function``, or a function of a group's scored trajectories: whether they shall be in
            the batch and count towards ``target_groups`` (``fsm_rollout.rewards:scores_differ``).
        max_staleness: every trained token was sampled at most so many weight updates ago; older samples, running or
            ended, are restarted.
        max_restarts: how often a sample is restarted; after that its group is ``dropped``.
        tail: how a batch of ``target_groups`` is made: ``carry``, ``sync``, ``paced``, each also with ``+longest``.
        on_event: called with each trajectory and event as it happens; must not block.
        workers: how many shards run the trajectories; 1: this process alone. Each is a whole rollout in a process of
            its own, with its own engines (so these are given by their specs), tools, rewards and journal beside
            ``journal``; functions are given by name, or such as can be pickled, and there is no ``on_event``. When one
            dies, its groups go on in others. A tool's ``concurrency`` is shared among them, each of which has one slot
            at least.
        worker_placement: ``local`` for processes of this machine, ``ray`` for actors of a Ray cluster.
        journal: where to keep all events.
        tracing: where OpenTelemetry's spans go, as in a run YAML: ``{"endpoint": …, "content": "text", "sample":
            0.05}``; by default what its variables say, if anything; ``False``: nowhere.
        base: what paths in engine specs are relative to; by default the working directory.
        progress: whether ``run`` and ``evaluate`` show how far they are, once they take long; by default in IPython and
            its notebooks.

    Raises:
        ConfigError: an agent is not sound, or does not fit its engines; all problems at once.
        EngineError: an engine cannot start.
    """

    @checked_names
    def __init__(
        self,
        agent: AgentLike | Mapping[str, AgentLike],
        engine: EngineLike,
        *,
        engines: Mapping[str, EngineLike] | None = None,
        teachers: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        sampling: Sampling | Mapping[str, object] | None = None,
        validate: bool = False,
        validation_sampling: Sampling | Mapping[str, object] | None = None,
        reward: RewardLike | None = None,
        concurrency: Concurrency = "auto",
        queue_timeout: float = 600.0,
        failures: Failures | Mapping[str, object] | None = None,
        group_filter: str | Callable[..., object] | None = None,
        max_staleness: int | None = None,
        max_restarts: int = MAX_RESTARTS,
        tail: str = "carry",
        on_event: Sequence[Listener] = (),
        workers: int = 1,
        worker_placement: WorkerPlacement = "local",
        journal: Journal | None = None,
        tracing: TracingLike = None,
        base: Path | None = None,
        progress: bool | None = None,
    ) -> None:
        # 1. The agents are sound, and end.
        self.agents = sound_agents(agent)
        # 2. How to sample, and where trajectories run.
        self.validate = validate
        trained, validation = as_sampling(sampling, "sampling"), as_sampling(validation_sampling, "validation_sampling")
        single = Sampling(temperature=0.0) if validation_sampling is None else validation
        # Of one sample, and of several: greedy ones would be all alike.
        self._evaluation_samplings = single.over(trained), validation.over(trained)
        start = starter(workers, worker_placement)
        # 3. What engines and schedulers are made from; nothing has been started yet.
        self._closed, self._progress, self._tracing = False, progress, tracer_of(tracing)
        self._owned: list[EnginePool] = []
        base = base or Path.cwd()
        specs: dict[str, EnginePool | TokenSource | Mapping[str, Any]] = {}
        taught, theirs = split_teachers(teachers or {}, (POLICY, *(engines or {})))
        for name, engine_like in {POLICY: engine, **(engines or {}), **theirs}.items():
            with about(f"engine '{name}'"):
                specs[name] = as_engine_or_spec(engine_like, base)
        policy = failures if isinstance(failures, Failures) else failures_of(failures or {})
        # What the schedulers of runs and of evaluations have in common.
        self._common: dict[str, Any] = {
            "seed": seed, "concurrency": concurrency, "failures": policy,
            "reward": None if reward is None else Reward(reward),
        }  # fmt: skip
        # 4. Engines and the scheduler, or shards that have both; if one fails, what was started is closed again.
        self.state_names = state_names(self.agents.values())
        """The states that are numbered in each batch, alike in every step."""
        self.engines: dict[str, EnginePool] = {}
        self._shards: Shards | None = None
        limits: dict[str, Any] = {"max_staleness": max_staleness, "max_restarts": max_restarts, "tail": tail}
        try:
            if start is not None:
                arguments: dict[str, Any] = {
                    "agent": self.agents, "engine": specs.pop(POLICY), "engines": specs, "seed": seed,
                    "teachers": {name: {"engine": of, **own.model_dump()} for name, (of, own) in taught.items()},
                    "sampling": sampling, "validate": validate, "validation_sampling": validation_sampling,
                    "reward": reward, "concurrency": concurrency, "queue_timeout": queue_timeout, "failures": policy,
                    "group_filter": group_filter, "tracing": tracing, "base": base, "progress": False, **limits,
                }  # fmt: skip
                leased = leased_scheduler(start, workers, arguments, on_event, self._owned)
                self.scheduler: Scheduler = leased
                self._shards, self.clients, self.engines = leased.shards, {}, EnginesOfShards(leased.shards)
                engines_described, pad_id, folder = (self._shards.facts[key] for key in FACTS)
                processor = None if folder is None else load_processor(Path(folder))
            else:
                for name, spec in specs.items():
                    with about(f"engine '{name}'"):
                        self.engines[name] = pool_of(spec, base, policy.tries, queue_timeout)
                    if isinstance(spec, Mapping):
                        self._owned.append(self.engines[name])
                self.clients = {name: EngineClient(pool) for name, pool in self.engines.items()}
                self.scheduler = Scheduler(
                    self.agents,
                    self.clients,
                    sampling=self._evaluation_samplings[0] if validate else trained,
                    validate=validate,
                    listeners=on_event,
                    group_filter=GroupFilter(group_filter) if group_filter is not None else None,
                    **limits,
                    **self._common,
                )
                if taught:
                    teach(self.scheduler, taught)
                engines_described = {name: described(self.engines[name], spec) for name, spec in specs.items()}
                pad_id, processor = self.engines[POLICY].facts.pad_id, self.engines[POLICY].facts.processor
            self._of_batches = {"state_names": self.state_names, "pad_id": pad_id, "processor": processor}
            if start is not None:  # its rows are made where groups run
                self._of_batches["parts"] = parts_of
            self.description: dict[str, Any] = {
                "agents": {name: dump(graph) for name, graph in self.agents.items()},
                "engines": engines_described,
                "base": str(base),
            }
            """What a journal must know so that its trajectories can be drawn, read and replayed later: plain data."""
            self.journal = journal
        except BaseException:
            if self._shards is not None:
                self._shards.end()
            self._end_loop(self._close_engines if self._owned else None)
            raise
        close_at_exit(self)

    @property
    def journal(self) -> Journal | None:
        """Where all events are kept. It may be set between runs."""
        return self.scheduler.recorder.journal

    @journal.setter
    def journal(self, journal: Journal | None) -> None:
        if not isinstance(journal, Journal | None):
            raise ConfigError(f"journal: got {journal!r}; open one: Journal({str(journal)!r})")
        self.scheduler.recorder.journal = journal
        if journal is not None:
            journal.describe(self.description)

    def stream(
        self,
        prompts: Prompts,
        n: int = 1,
        *,
        target_groups: int | None = None,
        over_sample: float = OVER_SAMPLE,
        max_filtered: float | None = MAX_FILTERED,
        resume: Iterable[History] = (),
        step: int | None = None,
    ) -> GroupStream:
        """Yield each prompt's group of ``n`` trajectories as it ends, in the order in which groups end.

        Args:
            prompts: prompts, mappings with their fields, texts; or a file that ``read_prompts`` reads. All of them are
                checked before anything runs. With ``target_groups``, an iterator is taken from only as far as needed;
                each prompt is checked then. A ``PromptQueue`` takes more while the run is under way, each of which
                fails the run if it is wrong.
            n: trajectories per prompt.
            target_groups: so many groups are enough. What still runs then is set aside, and goes on in the next call,
                with the weights of that time.
            over_sample: how many groups may be under way (or kept) at a time, per group of the target.
            max_filtered: how many groups the ``group_filter`` may turn down, per group of the target; ``None``: any
                number. Beyond that the call fails, and what has run is kept for the next one.
            resume: trajectories that were set aside or cut off, to go on with: those of a journal
                (``fsm_rollout.journal.histories(path)``), or suspended :class:`Trajectory` objects of this rollout.
            step: the training step, which the journal keeps and spans say.

        Delivery is at least once: with a journal, a group is marked delivered when you ask for the next one, or run
        again. So after a crash ``histories(path, unfinished=True)`` gives each group that is not marked. There is
        one run at a time: iterate one to its end, or close it, before the next.

        Raises:
            ConfigError: a prompt asks for what its agent does not have (with a list, nothing has run); or another run
                is under way.
            EngineError: the rollout is closed, an engine of it serves another event loop, or there is no Ray for the
                tools that are placed there.
            TargetNotReached: the group filter has turned down more groups than ``max_filtered`` allows.
        """
        options: dict[str, Any] = {"over_sample": over_sample, "max_filtered": max_filtered, "resume": resume}
        return GroupStream(self._groups_of(self.scheduler, prompts, n, target_groups, True, step=step, **options))

    async def _groups_of(
        self, scheduler: Scheduler, prompts: Prompts, n: int, target_groups: int | None = None,
        histories: bool = False, batch: Mapping[str, Any] | None = None, **options: Any,
    ) -> AsyncGenerator[Group, None]:  # fmt: skip
        if self._closed:
            self._check_open()
        if self._due is not None:
            self._check_weights_due()
        if isinstance(scheduler, LeasedScheduler):  # what a target carries over may be asked for later
            scheduler.come_back(histories=histories or target_groups is not None, batch_options=batch or {})
        groups_in_all = target_groups
        if isinstance(prompts, PromptQueue):
            checked: Iterable[Prompt] = prompts
        elif target_groups is None or isinstance(prompts, Sequence | Path):
            checked = (every := as_prompts(prompts, named=False))
            await scheduler.acheck(every)
            groups_in_all = min(len(every), target_groups or len(every))
        else:
            checked = one_by_one(self._position.read(prompts), scheduler.check)
        shown = self._progress or (self._progress is None and "IPython" in sys.modules)
        listens = None if self._tracing is None else self._listens_to(scheduler)
        with ExitStack() as meanwhile:
            if shown and groups_in_all and options.get("deliver_at_end"):
                from fsm_rollout.report.progress import shown_where_wanted  # rich: only where somebody looks

                meanwhile.enter_context(shown_where_wanted(scheduler.recorder, n * groups_in_all, self._progress))
            options |= {"target_groups": target_groups, "listens": listens}
            async with aclosing(scheduler.run(checked, n, **options)) as groups:
                async for group in groups:
                    yield group

    def _listens_to(self, scheduler: Scheduler, **of_driver: Any) -> Listens | None:
        """Return what sends the spans of a scheduler's runs; ``None``: nobody traces them."""
        if self._tracing is None:
            return None
        lasts = scheduler is self.scheduler
        return partial(self._tracing.listens, scheduler, self.description, lasts=lasts, **of_driver)

    async def arun(
        self,
        /,
        prompts: Prompts,
        n: int = 1,
        *,
        target_groups: int | None = None,
        over_sample: float = OVER_SAMPLE,
        max_filtered: float | None = MAX_FILTERED,
        resume: Iterable[History] = (),
        step: int | None = None,
        **batch: Any,
    ) -> TrajectoryBatch:
        """Run all prompts (or as many as ``target_groups`` takes) and return one batch, in the order of the prompts.

        Arguments are those of :meth:`stream`; further ones those of :meth:`TrajectoryBatch.from_trajectories` (widths,
        ``packed``, …). Whatever weights change meanwhile, no trained token of it is older than ``max_staleness``.
        """
        if batch:
            check_names("run", batch, RUN_OPTIONS)
        options: dict[str, Any] = {"over_sample": over_sample, "max_filtered": max_filtered, "resume": resume}
        options |= {"step": step, "deliver_at_end": True}
        if batch.get("overflow", "error") != "error":  # shards cut rows; whether all fit into a width is seen here
            options["batch"] = {key: batch[key] for key in CUT & batch.keys()}
        async with aclosing(self._groups_of(self.scheduler, prompts, n, target_groups, **options)) as stream:
            groups = [group async for group in stream]
        log_failures([group for group in groups if not isinstance(group, LeasedGroup)])  # others: where they ran
        return self.batch(groups, **batch)

    def batch(self, groups: Iterable[Group], **options: Any) -> TrajectoryBatch:
        """Return the batch of some groups, in the order of their prompts' first appearance, without dropped ones.

        What was dropped is listed in the batch's ``dropped``, and counted in its ``figures``.
        """
        from fsm_rollout.batch.batch import TrajectoryBatch  # torch: only when there are tensors to make

        return TrajectoryBatch.from_groups(groups, **self._of_batches | options)

    run = plain(arun)
    """Do what :meth:`arun` does and wait for it, from scripts and notebooks alike."""

    async def aevaluate(
        self, /, prompts: Prompts, n: int = 1, *, sampling: Sampling | Mapping[str, object] | None = None, **batch: Any
    ) -> TrajectoryBatch:
        """Run all prompts ``n`` times beside the training and return their batch: ``batch.score_mean`` is the result.

        It has no group filter and no bound on staleness, leaves alone what earlier runs have carried over, and sends
        nothing to the journal or to ``on_event``. It may run while a run is under way. The same weights give the same
        trajectories each time. Groups are called ``evaluation/<prompt id>``.

        Args:
            prompts: held-back ones, say.
            n: trajectories per prompt.
            sampling: comes before the rollout's ``validation_sampling``; by default one sample is greedy, more are not.
            **batch: as for :meth:`arun`.
        """
        check_names("evaluate", batch, ("n", "sampling", *BATCH_OPTIONS))
        single_or_several = self._evaluation_samplings[n > 1]
        scheduler = self._evaluation_scheduler(as_sampling(sampling, "sampling").over(single_or_several))
        named = [
            prompt.model_copy(update={"prompt_id": f"evaluation/{prompt.prompt_id or index}"})
            for index, prompt in enumerate(as_prompts(prompts, named=False))
        ]
        async with aclosing(self._groups_of(scheduler, named, n, deliver_at_end=True)) as groups:
            return self.batch([group async for group in groups], **batch)

    def _evaluation_scheduler(self, sampling: Sampling) -> Scheduler:
        """Return what runs an evaluation beside the training."""
        if self._shards is not None:
            limits = {"concurrency": self.scheduler.concurrency, "failures": self._common["failures"]}
            return LeasedScheduler(self._shards, evaluation=sampling, **limits)
        clients = {name: EngineClient(pool) for name, pool in self.engines.items()}
        return Scheduler(self.agents, clients, sampling=sampling, validate=True, **self._common)

    evaluate = plain(aevaluate)
    """Do what :meth:`aevaluate` does and wait for it."""

    def page(self, trajectory: Trajectory | str) -> Page:
        """Return the page of a trajectory, or (by its id) of one in the rollout's journal; notebooks show it.

        ConfigError: there is no journal, or no such trajectory in it. JournalError: it cannot be read.
        """
        from fsm_rollout.report.notebook import page  # drawing: only when there is something to look at

        return page(trajectory, engines=self.engines, agents=self.agents, journal=self.journal)

    @property
    def carried(self) -> list[Group]:
        """The groups that wait for the next call: ended beyond a target, or set aside unfinished."""
        return self.scheduler.carried

    async def aclose(self) -> None:
        """Drop what was set aside, and close the engines that this rollout built. Safe to call twice."""
        self._closed = True
        try:
            await self.scheduler.drop_carried()
            if self._shards is not None:
                await self._shards.aclose()
        finally:
            await self._close_engines()
            if self._tracing is not None:
                await self._tracing.aclose()

    async def _close_engines(self) -> None:
        while self._owned:
            await self._owned.pop().aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this rollout is closed, and its engines with it; make another")

    def close(self) -> None:
        """Close the engines that this rollout built, and its event loop. Safe to call twice."""
        self._closed = True
        self._end_loop(self.aclose if self._owned or self._shards or self.scheduler.carried or self._tracing else None)

    def __repr__(self) -> str:
        facts = self.description["engines"]
        words = (" ".join([n, *(facts[n][key] for key in ("kind", "model") if key in facts[n])]) for n in facts)
        return f"<Rollout of {', '.join(self.agents)}; engines: {', '.join(words)}{'; closed' if self._closed else ''}>"

    async def __aenter__(self) -> Rollout:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


FACTS = ("engines", "pad_id", "processor")  # what shards say of theirs; of a processor, where it was loaded from
# What `Rollout.batch` hands on to `TrajectoryBatch.from_trajectories`.
CUT = {"prompt_width", "response_width", "overflow"}
BATCH_OPTIONS = ("pad_id", "prompt_width", "response_width", "overflow", "packed", "state_names")
RUN_OPTIONS = ("n", "target_groups", "over_sample", "max_filtered", "resume", "step", *BATCH_OPTIONS)
