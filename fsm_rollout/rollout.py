"""Rollouts from Python: an agent, an engine, prompts in, a batch out.

Invariant: a rollout owns what it builds (engines named by a spec, its event loop) and leaves alone what it is given.

    import fsm_rollout as fr

    agent = fr.load_agent("configs/agents/tool_user.yaml")
    with fr.Rollout(agent, engine={"kind": "transformers", "model": "embedded"}) as rollout:
        batch = rollout.run(fr.read_prompts("configs/data/arithmetic.jsonl", limit=8), n=4)
    print(batch.tensordict)
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, get_args

from fsm_rollout.agent.graph import POLICY, AgentGraph
from fsm_rollout.agent.loader import dump, load_agent
from fsm_rollout.agent.proof import prove
from fsm_rollout.agent.verify import verify
from fsm_rollout.concurrency.loop_thread import LoopThread, close_at_exit
from fsm_rollout.engines.build import EngineLike, as_engine_or_spec, build_engine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Engine, Weights
from fsm_rollout.engines.specs import ENGINES
from fsm_rollout.environment.rewards import GroupFilter, Reward, RewardLike
from fsm_rollout.errors import ConfigError, EngineError, Problem, check_at_least, did_you_mean
from fsm_rollout.scheduler.failure_policy import Failures, failures_of
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.recorder import Listener
from fsm_rollout.scheduler.resume import History
from fsm_rollout.scheduler.run_state import PromptQueue
from fsm_rollout.scheduler.scheduler import MAX_FILTERED, MAX_RESTARTS, OVER_SAMPLE, Scheduler
from fsm_rollout.scheduler.worker_placement import WorkerPlacement, start_actor, start_process
from fsm_rollout.scheduler.worker_pool import WorkerPool
from fsm_rollout.trajectory.enums import FailureClass
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.prompt import Prompt, as_prompt, as_prompts
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    from fsm_rollout.batch.batch import TrajectoryBatch
    from fsm_rollout.report.notebook import Page

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")
# An agent: a graph, the path of its YAML, or the mapping that stands in one.
AgentLike = AgentGraph | Mapping[str, Any] | str | Path
PromptLike = Prompt | Mapping[str, object] | str
Prompts = Iterable[PromptLike] | str | Path  # prompts, or the file that they are read from


def _plain(
    form: Callable[Concatenate[Rollout, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[Rollout, P], T]:
    """Return the plain form of an async method, which waits for it on the rollout's own event loop."""

    @wraps(form)
    def wait(self: Rollout, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_open()
        return self._loop().call(lambda: form(self, *args, **kwargs))

    wait.__name__ = form.__name__.removeprefix("a")
    wait.__doc__ = f"""Do what :meth:`{form.__name__}` does, from ordinary code and from notebooks alike.

    Ctrl-C cancels what runs and waits until that has ended; a second one does not wait. Other threads may make calls
    meanwhile (``update_weights`` while ``run`` runs).
    """
    return wait


def _checked_names(init: Callable[P, None]) -> Callable[P, None]:
    """Return an ``__init__`` that answers a misspelt argument with a hint."""
    known = list(inspect.signature(init).parameters)[1:]

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        _check_names("Rollout", kwargs, known)
        init(*args, **kwargs)

    return checked


class Rollout:
    """Runs prompts through one or more agents.

    Args:
        agent: an agent (what ``load_agent`` gives, the path of a YAML, or the mapping that stands in one), or several
            by name (a prompt chooses by its ``agent`` field).
        engine: the policy: an engine, its spec as in a run YAML (``{"kind": "transformers", "model": …}``), or a model
            (``"embedded"``, a folder) for the transformers engine.
        engines: further, untrained engines by name.
        seed: everything random follows from it.
        sampling: comes before the agents' own, in the policy's contexts.
        validate: use ``validation_sampling`` and mark the trajectories.
        validation_sampling: see ``validate``; greedy unless given.
        reward: ``module:function``, or a function of a trajectory or of a whole group, sync or async; or a list of
            them, each also with its weight, ``(function, 0.5)``, whose weighted sum is the score. What they return:
            :class:`fsm_rollout.environment.rewards.Reward`.
        concurrency: trajectories under way at once.
        queue_timeout: seconds that a silent engine is waited for.
        failures: what becomes of failures, by their class, as in a run YAML: ``{"tool": "end", "engine": {"attempts":
            5}}``. A trajectory that failed through no fault of the policy's is repeated within a budget; else it has
            no score.
        group_filter: ``module:function``, or a function of a group's scored trajectories: whether they shall be in
            the batch and count towards ``target_groups`` (``fsm_rollout.rewards:scores_differ``).
        max_staleness: every trained token was sampled at most so many weight updates ago; older samples, running or
            ended, are restarted.
        max_restarts: how often a sample is restarted; after that its group is ``dropped``.
        on_event: called with each trajectory and event as it happens; must not block.
        workers: how many processes run the trajectories; 1: this one. The states' handlers and the tools then run in
            the workers, on this rollout's engines; groups, rewards, the journal and ``on_event`` stay here. When a
            worker dies, its trajectories go on in another. A tool's ``concurrency`` is shared among the workers, each
            of which has one slot at least.
        worker_placement: ``local`` for processes of this machine, ``ray`` for actors of a Ray cluster.
        journal: where to keep all events.
        base: what paths in engine specs are relative to; by default the working directory.

    Raises:
        ConfigError: an agent is not sound, or does not fit its engines; all problems at once.
        EngineError: an engine cannot start.
    """

    @_checked_names
    def __init__(
        self,
        agent: AgentLike | Mapping[str, AgentLike],
        engine: EngineLike,
        *,
        engines: Mapping[str, EngineLike] | None = None,
        seed: int = 0,
        sampling: Sampling | Mapping[str, object] | None = None,
        validate: bool = False,
        validation_sampling: Sampling | Mapping[str, object] | None = None,
        reward: RewardLike | None = None,
        concurrency: int = 1024,
        queue_timeout: float = 600.0,
        failures: Failures | Mapping[str, object] | None = None,
        group_filter: str | Callable[..., object] | None = None,
        max_staleness: int | None = None,
        max_restarts: int = MAX_RESTARTS,
        on_event: Sequence[Listener] = (),
        workers: int = 1,
        worker_placement: WorkerPlacement = "local",
        journal: Journal | None = None,
        base: Path | None = None,
    ) -> None:
        # 1. The agents are sound, and end.
        self.agents = _agents(agent)
        problems = [problem for graph in self.agents.values() for problem in verify(graph)]
        if problems:
            raise ConfigError(problems)
        for graph in self.agents.values():
            prove(graph)
        # 2. How to sample, and where trajectories run.
        self.validate = validate
        greedy, training_sampling = Sampling(temperature=0.0), _sampling(sampling, "sampling")
        validation = greedy if validation_sampling is None else _sampling(validation_sampling, "validation_sampling")
        self._evaluation_sampling = validation.over(training_sampling)
        run_sampling = self._evaluation_sampling if validate else training_sampling
        check_at_least(1, "process", "workers", workers)
        if worker_placement not in get_args(WorkerPlacement):
            raise ConfigError(f"worker_placement must be 'local' or 'ray', got {worker_placement!r}")
        # 3. What engines and schedulers are made from; nothing has been started yet.
        self._closed = False
        self._loop_thread: LoopThread | None = None
        self._owned: list[Engine] = []
        base = base or Path.cwd()
        engine_likes = {POLICY: engine, **(engines or {})}
        specs = {name: _engine_or_spec(name, engine_like, base) for name, engine_like in engine_likes.items()}
        policy = failures if isinstance(failures, Failures) else failures_of(failures or {})
        self._client = partial(
            EngineClient,
            attempts=policy.engine_attempts,
            backoff=policy.engine.backoff,
            elsewhere=policy.engine.do == "elsewhere",
            queue_timeout=queue_timeout,
        )
        # What the schedulers of runs and of evaluations have in common.
        self._common: dict[str, Any] = {
            "seed": seed,
            "concurrency": concurrency,
            "failures": policy,
            "reward": Reward(reward) if reward is not None else None,
        }
        # 4. Engines, the scheduler, workers; if one of them fails, what was started is closed again.
        try:
            self.engines = {name: self._engine(name, spec, base) for name, spec in specs.items()}
            self.clients = {name: self._client(engine) for name, engine in self.engines.items()}
            self.scheduler = Scheduler(
                self.agents,
                self.clients,
                sampling=run_sampling,
                validate=validate,
                listeners=on_event,
                group_filter=GroupFilter(group_filter) if group_filter is not None else None,
                max_staleness=max_staleness,
                max_restarts=max_restarts,
                **self._common,
            )
            self._workers: WorkerPool | None = None
            if workers > 1 or worker_placement == "ray":
                start = start_process if worker_placement == "local" else start_actor
                self._workers = WorkerPool(self.scheduler, workers, start, remote=worker_placement == "ray")
            self.description = {
                "agents": {name: dump(graph) for name, graph in self.agents.items()},
                "engines": {name: _describe(self.engines[name], spec) for name, spec in specs.items()},
                "base": str(base),
            }
            """What a journal must know so that its trajectories can be drawn, read and replayed later: plain data."""
            self.journal = journal
        except BaseException:
            self._close(self._close_engines if self._owned else None)
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

    def _engine(self, name: str, spec: Engine | Mapping[str, Any], base: Path) -> Engine:
        if not isinstance(spec, Mapping):
            return spec
        with _named(f"engine '{name}'"):
            engine = build_engine(spec, base)
        self._owned.append(engine)
        return engine

    async def stream(
        self,
        prompts: Prompts,
        n: int = 1,
        *,
        target_groups: int | None = None,
        over_sample: float = OVER_SAMPLE,
        max_filtered: float | None = MAX_FILTERED,
        resume: Iterable[History] = (),
    ) -> AsyncGenerator[Group, None]:
        """Yield each prompt's group of ``n`` trajectories as it ends, in the order in which groups end.

        Args:
            prompts: prompts, mappings with their fields, texts; or a file that ``read_prompts`` reads. All of them are
                checked before anything runs. With ``target_groups``, an iterator is taken from
                only as far as needed; each prompt is checked then. A ``PromptQueue`` takes more while the run is under
                way, each of which fails the run if it is wrong.
            n: trajectories per prompt.
            target_groups: so many groups are enough. What still runs then is set aside, and goes on in the next call,
                with the weights of that time.
            over_sample: how many groups may be under way (or kept) at a time, per group of the target.
            max_filtered: how many groups the ``group_filter`` may turn down, per group of the target; ``None``: any
                number. Beyond that the call fails, and what has run is kept for the next one.
            resume: trajectories that were set aside or cut off, to go on with: those of a journal
                (``fsm_rollout.journal.histories(path)``), or suspended :class:`Trajectory` objects of this rollout.

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
        options: dict[str, Any] = {"target_groups": target_groups, "over_sample": over_sample}
        options |= {"max_filtered": max_filtered, "resume": resume}
        async with aclosing(self._groups_of(self.scheduler, prompts, n, **options)) as groups:
            async for group in groups:
                yield group

    async def _groups_of(
        self, scheduler: Scheduler, prompts: Prompts, n: int, *, target_groups: int | None = None, **options: Any
    ) -> AsyncGenerator[Group, None]:
        self._check_open()
        for name, client in scheduler.clients.items():
            if client.serves_another_loop:
                raise EngineError(
                    f"engine '{name}' serves another event loop, which is still open; use either the plain forms (run, "
                    "update_weights, …) or the async ones (arun, stream, aupdate_weights, …) of a rollout, not both"
                )
        if isinstance(prompts, PromptQueue):
            checked: Iterable[Prompt] = prompts
        elif target_groups is None or isinstance(prompts, Sequence | Path):
            checked = (every := as_prompts(prompts, named=False))
            scheduler.check(every)
        else:
            checked = self._one_by_one(scheduler, prompts)
        await scheduler.agents.prepare_tools()
        try:
            async with aclosing(scheduler.run(checked, n, target_groups=target_groups, **options)) as groups:
                async for group in groups:
                    yield group
        finally:
            await scheduler.agents.close_tools()

    def _one_by_one(self, scheduler: Scheduler, prompts: Iterable[PromptLike]) -> Iterator[Prompt]:
        for index, item in enumerate(prompts):
            prompt = as_prompt(item, index)
            scheduler.check([prompt])
            yield prompt

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
        **batch: Any,
    ) -> TrajectoryBatch:
        """Run all prompts (or as many as ``target_groups`` takes) and return one batch, in the order of the prompts.

        Arguments are those of :meth:`stream`; further ones those of :meth:`TrajectoryBatch.from_trajectories` (widths,
        ``packed``, …). Whatever weights change meanwhile, no trained token of it is older than ``max_staleness``.
        """
        _check_batch_options("run", batch, ("n", "target_groups", "over_sample", "max_filtered", "resume"))
        options: dict[str, Any] = {"target_groups": target_groups, "over_sample": over_sample}
        options |= {"max_filtered": max_filtered, "resume": resume}
        async with aclosing(self._groups_of(self.scheduler, prompts, n, deliver_at_end=True, **options)) as stream:
            groups = [group async for group in stream]
        samples = [trajectory for group in groups for trajectory in group.trajectories]
        if failed := [each for each in samples if each.failure not in (None, FailureClass.POLICY)]:
            text = "%d of %d trajectories failed, and not through the policy; the first: %s: %s: %s"
            first = failed[0]
            logger.warning(text, len(failed), len(samples), first.trajectory_id, first.stop_reason, first.detail)
        if errors := [error for group in groups for error in group.reward_errors]:
            scored = sum(trajectory.score is not None for trajectory in samples)
            logger.warning("scored %d of %d; the first without a score: %s", scored, len(samples), errors[0])
        return self.batch(groups, **batch)

    def batch(self, groups: Iterable[Group], **options: Any) -> TrajectoryBatch:
        """Return the batch of some groups, in the order of their prompts' first appearance, without dropped ones.

        What was dropped is listed in the batch's ``dropped``, and counted in its ``figures``.
        """
        from fsm_rollout.batch.batch import TrajectoryBatch  # torch: only when there are tensors to make
        from fsm_rollout.batch.step_figures import step_figures

        ordered = sorted(groups, key=lambda group: group.index)
        kept = [group for group in ordered if not group.dropped]
        trajectories: list[Trajectory] = [trajectory for group in kept for trajectory in group.all]
        tokenizer = self.engines[POLICY].tokenizer
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        graphs = [agent.graph for agent in self.scheduler.agents.all]
        states = dict.fromkeys(name for graph in graphs for name in graph.states)  # the same numbers in every step
        options = {"state_names": tuple(states), "pad_id": pad_id or 0} | options
        batch = TrajectoryBatch.from_trajectories(trajectories, **options)
        batch.dropped = {group.group_id: group.drop_reason for group in ordered if group.drop_reason is not None}
        batch.figures = step_figures(ordered)
        return batch

    run = _plain(arun)
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
            sampling: comes before the rollout's ``validation_sampling`` (greedy unless given).
            **batch: as for :meth:`arun`.
        """
        _check_batch_options("evaluate", batch, ("n", "sampling"))
        scheduler = Scheduler(
            self.agents,
            {name: client.paused_with(self._client(client.engine)) for name, client in self.clients.items()},
            sampling=_sampling(sampling, "sampling").over(self._evaluation_sampling),
            validate=True,
            **self._common,
        )
        named = [
            prompt.model_copy(update={"prompt_id": f"evaluation/{prompt.prompt_id or index}"})
            for index, prompt in enumerate(as_prompts(prompts, named=False))
        ]
        async with aclosing(self._groups_of(scheduler, named, n, deliver_at_end=True)) as groups:
            return self.batch([group async for group in groups], **batch)

    evaluate = _plain(aevaluate)
    """Do what :meth:`aevaluate` does and wait for it."""

    def engine_stats(self) -> dict[str, dict[str, int]]:
        """Return per engine: requests, dispatches, and the version of its weights."""
        return {
            name: {"requests": c.requests, "dispatches": c.dispatches, "weight_version": c.weight_version}
            for name, c in self.clients.items()
        }

    async def aupdate_weights(self, weights: Weights, version: int | None = None) -> int:
        """Load new policy weights (a model folder, or tensors by name) and return their version (default: one more).

        May be called while trajectories run: generations pause and go on, each token carries the version that sampled
        it, tools and interactions notice nothing.

        Raises:
            EngineError: they cannot be loaded; the engine goes on with the old ones.
        """
        return await self.scheduler.update_weights(weights, version)

    update_weights = _plain(aupdate_weights)
    """Do what :meth:`aupdate_weights` does and wait for it; another thread may call it while ``run`` runs."""

    async def asleep(self) -> None:
        """Let all engines give their memory back (say while the policy is trained on the same GPU)."""
        for client in self.clients.values():
            await client.pause("asleep")
        for engine in self.engines.values():
            await engine.sleep()

    sleep = _plain(asleep)
    """Do what :meth:`asleep` does and wait for it."""

    async def awake(self) -> None:
        """Make the engines ready again, and let what waits for them go on."""
        for engine in self.engines.values():
            await engine.wake()
        for client in self.clients.values():
            await client.resume("asleep")

    wake = _plain(awake)
    """Do what :meth:`awake` does and wait for it."""

    def page(self, trajectory: Trajectory | str) -> Page:
        """Return the page of a trajectory, or (by its id) of one in the rollout's journal; notebooks show it.

        Raises:
            ConfigError: an id, and there is no journal or no such trajectory in it.
            JournalError: the journal cannot be read.
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
            if self._workers is not None:
                await self._workers.aclose()
        finally:
            await self._close_engines()

    async def _close_engines(self) -> None:
        while self._owned:
            await self._owned.pop().aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this rollout is closed, and its engines with it; make another")

    def _loop(self) -> LoopThread:
        if self._loop_thread is None or not self._loop_thread.alive:
            self._loop_thread = LoopThread()
        return self._loop_thread

    def close(self) -> None:
        """Close the engines that this rollout built, and its event loop. Safe to call twice."""
        self._close(self.aclose if self._owned or self._workers or self.scheduler.carried else None)

    def _close(self, clean_up: Callable[[], Coroutine[object, object, None]] | None) -> None:
        self._closed = True
        if clean_up is not None:
            self._loop().call(clean_up)
        if self._loop_thread is not None:
            self._loop_thread.close()
            self._loop_thread = None

    async def __aenter__(self) -> Rollout:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Have every problem begin with what it is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([Problem(f"{what}: {p.message}", p.file, p.line, p.rule) for p in error.problems]) from error


def _agents(agents: AgentLike | Mapping[str, AgentLike]) -> dict[str, AgentGraph]:
    """Return the agents by name: one by its own, several by those that they were given."""
    if isinstance(agents, Mapping) and not {"states", "transitions"} & agents.keys():
        if not agents:
            raise ConfigError("agent: got an empty mapping; give an agent, or several by name")
        return {name: _agent(agent) for name, agent in agents.items()}
    graph = _agent(agents)
    return {graph.agent: graph}


def _agent(agent: AgentLike) -> AgentGraph:
    if isinstance(agent, AgentGraph):
        return agent
    if isinstance(agent, str | Path | Mapping):
        return load_agent(agent)
    raise ConfigError(
        f"agent: got a {type(agent).__name__}; give what load_agent returns, the path of an agent's YAML, or a mapping "
        "from names to them"
    )


def _engine_or_spec(name: str, engine: EngineLike, base: Path) -> Engine | Mapping[str, Any]:
    with _named(f"engine '{name}'"):
        return as_engine_or_spec(engine, base)


# What `Rollout.batch` hands on to `TrajectoryBatch.from_trajectories`.
BATCH_OPTIONS = ("pad_id", "prompt_width", "response_width", "overflow", "packed", "state_names")


def _check_batch_options(method: str, options: Iterable[str], own: tuple[str, ...]) -> None:
    """Refuse an argument that nothing takes before anything is sampled, not when the batch is made."""
    _check_names(method, options, (*own, *BATCH_OPTIONS))


def _check_names(method: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"{method}: unknown argument '{name}'{hint}")


def _sampling(value: Sampling | Mapping[str, object] | None, what: str) -> Sampling:
    if isinstance(value, Sampling):
        return value
    if not isinstance(value, Mapping | None):
        raise ConfigError(f'{what}: got {value!r}; give a mapping: {{"temperature": 0.7}}')
    with _named(what):
        return Sampling(**(value or {}))


def _describe(engine: Engine, spec: Engine | Mapping[str, Any]) -> dict[str, object]:
    if not isinstance(spec, Mapping) or spec["kind"] not in ENGINES.built_in:
        spec = {"tokenizer": getattr(engine.tokenizer, "name_or_path", None)}
    description = {key: str(spec[key]) for key in ("kind", "tokenizer", "model", "run", "engine") if spec.get(key)}
    return description | {"max_context": engine.max_context, "eos_ids": sorted(engine.eos_ids)}
