"""Carrying out a run YAML: from the file to the run's folder.

Invariant: every mistake in the input is found before the first file is written. A run's folder holds ``journal.sqlite``
from the first event on; ``batch/``, ``summary.json`` and ``report.html`` are put in place whole, at the end. A run that
is interrupted (Ctrl-C, SIGTERM, SIGHUP) suspends its open trajectories, and :func:`resume` continues it, also after a
crash.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fsm_rollout.agent.graph import MAIN, POLICY, AgentGraph
from fsm_rollout.agent.loader import dump, load_agent
from fsm_rollout.agent.yaml.source import in_file_order, read_text
from fsm_rollout.concurrency.interruption import Interruptible, interruptible
from fsm_rollout.concurrency.loop_lag import LoopLag
from fsm_rollout.engines.specs import faults
from fsm_rollout.environment.rewards import GroupFilter, Reward
from fsm_rollout.errors import BatchError, ConfigError, Problem, RolloutError, describe
from fsm_rollout.files import written_whole
from fsm_rollout.jobs.control import REPLICAS, orders_left, taking_orders, with_orders
from fsm_rollout.jobs.looks import Looks
from fsm_rollout.jobs.recorded_config import recorded_config
from fsm_rollout.jobs.run_config import SERVED, TRAINED, RunConfig, recorded_run
from fsm_rollout.jobs.run_folder import SUMMARY, check_free, claimed, clear
from fsm_rollout.jobs.run_prompts import PromptFile
from fsm_rollout.jobs.summary import Summary, length_bias, summarize
from fsm_rollout.jobs.tracking import Tracking, build_tracker, check_tracker
from fsm_rollout.names.objects import load_object
from fsm_rollout.report.readers import Tracker
from fsm_rollout.report.report import write_report
from fsm_rollout.report.running import running_of
from fsm_rollout.rollout import Rollout
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.recorder import Listener
from fsm_rollout.scheduler.run_counts import SampleKey
from fsm_rollout.trajectory.journal import JOURNAL, Journal, Recorded, metadata, read, recordings
from fsm_rollout.trajectory.latest_attempts import latest_of
from fsm_rollout.trajectory.prompt import Prompt, as_prompts, read_prompts
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

# Makes the listener that shows a run: from its number of trajectories, and those samples that have ended already.
Progress = Callable[[int, Collection[SampleKey]], AbstractContextManager[Listener]]


def execute(config: RunConfig, progress: Progress, *, replace: bool = False) -> Summary:
    """Run a config to its end, write its folder, and return the summary.

    With ``replace``, an earlier run in that folder, finished or not, is deleted.

    Raises:
        ConfigError: something in the run, its agents, prompts or engines is wrong, or there is an earlier run in that
            folder; nothing has been written.
        EngineError: an engine cannot start; nothing has been written.
        Interrupted: a signal has ended it; what ran is suspended.
    """
    agents, prompts = load_agents(config), prompts_of(config)
    with interruptible() as main, claimed(config.out):
        check_free(config.out, replace=replace)
        check_parts(config, prompts)
        return _carry_out(main, config, agents, prompts, progress)


def resume(
    folder: Path,
    overrides: Sequence[str],
    progress: Progress,
    *,
    file: Path | None = None,
    own: RunConfig | None = None,
    say: Callable[[str], None] = logger.info,
) -> Summary:
    """Continue the run in a folder, interrupted or cut off, to its end, and return the summary.

    Trajectories that have ended stay as they are and come into the batch too; the journal continues where it stopped.
    ``overrides`` change the run, its engine say, but not its agents, which must be what they were, nor a reward that
    has scored something. A run of which nothing is left to do stays as it is. Code is imported as the run's YAML names
    it (``file``; by default the one with which the run began) or the config ``own`` does, see
    :mod:`fsm_rollout.jobs.recorded_config`; ``say`` hears which file that is.

    Raises:
        ConfigError: no run wrote that folder, or something in the run, its agents, prompts or engines is wrong now.
        JournalError: there is no journal in it that can be read.
        EngineError: an engine cannot start.
        Interrupted: a signal has ended it; what ran is suspended.
    """
    # 1. The config, as the journal recorded it.
    recorded = metadata(folder)
    run_file = file or Path(recorded.get("file", "RUN.yaml"))
    if SERVED in recorded:
        raise ConfigError(f"'{folder}' holds conversations, which go on with the server: fsm-rollout serve {run_file}")
    if TRAINED in recorded:
        raise ConfigError(
            f"'{folder}' holds what a trainer elsewhere has asked for, and goes on when that asks again: start the "
            f"service (fsm-rollout serve --training {run_file} serve.out={folder}), then the trainer"
        )
    config = recorded_config(folder, recorded, overrides, file, say, own)
    config = with_orders(config, orders_left(config, recorded, overrides))
    with interruptible() as main, claimed(config.out):
        # 2. Agents and prompts must be what they were.
        agents, prompts, recorded_events = load_agents(config), prompts_of(config), list(recordings(folder))
        earlier = [trajectory for trajectory, _ in recorded_events]
        changed = [
            f"agent '{name}' is not what it was"
            for name in agents
            if dump(agents[name]) != recorded.get("agents", {}).get(name)
        ]
        messages = {prompt.prompt_id: list(prompt.messages) for prompt in prompts}
        changed += [
            f"prompt '{trajectory.group_id}' is not among the prompts any more as it was"
            for trajectory in earlier
            if trajectory.parent_id is None and messages.get(trajectory.group_id) != list(trajectory.prompt_messages)
        ]
        if changed:
            raise ConfigError(f"{changed[0]} when the run in '{folder}' began; put it back, or start a new run")
        # 3. So must the reward, once it has scored anything.
        before = recorded_run(recorded["run"], Path(recorded["base"]))
        scored = sum(trajectory.rewarded for trajectory in earlier if trajectory.parent_id is None)
        if scored and config.reward != before.reward:
            names = ", ".join(reward.use for reward in before.reward) or "nothing"
            raise ConfigError(
                f"reward: {scored:,} trajectories of the run in '{folder}' were scored by {names}, and a run has one "
                f"reward; finish it with that one, then score it anew: fsm-rollout rescore {folder} --reward …"
            )
        # 4. The rest of the run, if there is any.
        check_parts(config, prompts)
        if (summary := _summary_of_ended(config, before, prompts, earlier)) is not None:
            more = "" if config.target_groups is None else "; target_groups=null goes on with what was set aside"
            say(f"nothing is left to do: the run in '{folder}' has come to its end and stays as it is{more}")
            return summary
        return _carry_out(main, config, agents, prompts, progress, recorded_events)


def _summary_of_ended(
    config: RunConfig, before: RunConfig, prompts: Sequence[Prompt], earlier: Sequence[Trajectory]
) -> Summary | None:
    """Return what a run came to of which nothing is left; ``None``: samples, scores or its results are missing."""
    if not all((config.out / name).exists() for name in (SUMMARY, "batch", "report.html")):
        return None
    summary: Summary = json.loads((config.out / SUMMARY).read_bytes())
    if config.reward != before.reward or summary.get("reward_errors"):
        return None
    # A run that has gone on may have been cut off before it wrote anew: the summary must be of all that has ended.
    groups: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in latest_of(earlier):
        if trajectory.parent_id is None and trajectory.ended:
            groups[trajectory.group_id].append(trajectory)
    ended = sum(map(len, groups.values()))
    reasons = summary["stop_reasons"]
    had = summary["trajectories"] - reasons.get("suspended", 0) - reasons.get("unfinished", 0)
    whole = ended == len(prompts) * config.n <= had
    # One that ends early is not whole, but has all that it wanted, unless its journal was damaged since.
    ends = [(each.target_groups, each.until, each.group_filter, each.n, each.limit) for each in (config, before)]
    reached = 0 < Looks(prompts, config.until, config.seed).samples_enough(groups, config.n) <= had
    reached |= 0 < (config.target_groups or 0) <= summary.get("delivered_groups", 0)
    return summary if whole or (reached and ends[0] == ends[1] and ended >= had) else None


def load_agents(config: RunConfig) -> dict[str, AgentGraph]:
    """Load the run's agents by name, with the overrides that the command line gives for them."""
    if isinstance(config.agent, Mapping):
        agents = {name: load_agent(path, config.agent_overrides) for name, path in config.agent.items()}
    else:
        graph = load_agent(config.agent, config.agent_overrides)
        agents = {graph.agent: graph}
    if config.chat_template is None:
        return agents
    template = read_text(config.chat_template)
    if isinstance(template, Problem):
        raise ConfigError(config.problem(("chat_template",), f"'{config.chat_template}' {template.message}"))
    return {name: _on_template(graph, template) for name, graph in agents.items()}


def _on_template(graph: AgentGraph, template: str) -> AgentGraph:
    """Return the agent with a chat template in the policy's contexts that have none, its sub-agents' too."""
    names = dict.fromkeys([MAIN, *graph.contexts, *(graph.states[name].context for name in graph.working_states)])
    contexts = {name: graph.context(name) for name in names}
    for name, context in contexts.items():
        if context.engine == POLICY and context.chat_template is None:
            contexts[name] = context.model_copy(update={"chat_template": template})
    tools = {
        name: tool if tool.agent is None else tool.model_copy(update={"agent": _on_template(tool.agent, template)})
        for name, tool in graph.tools.items()
    }
    return graph.model_copy(update={"contexts": contexts, "tools": tools})


def start_lines(graphs: Iterable[AgentGraph]) -> Iterator[str]:
    """Yield what tools have to say when a run begins (``at_start`` of a tool's class): what protects it, say."""
    for graph in chain.from_iterable(graph.with_sub_agents() for graph in graphs):
        for name, tool in graph.tools.items():
            at_start = getattr(load_object(tool.use), "at_start", None) if tool.use is not None else None
            if at_start is not None:
                yield f"{name} {at_start()}"


def prompts_of(config: RunConfig) -> list[Prompt]:
    """Read the run's prompts, from their file or from what gives them; ConfigError: there are none, or wrong ones."""
    source = config.prompts
    if isinstance(source, Path):
        return read_prompts(source, limit=config.limit)
    if isinstance(source, PromptFile):
        return read_prompts(source.file, limit=config.limit, columns=source.columns)
    try:
        give: Any = load_object(source.use)
        limit = {"limit": config.limit} if "limit" in inspect.signature(give).parameters else {}
        items = give(**{**source.kwargs, **limit})
        prompts = as_prompts(islice(items, config.limit))
    except RolloutError as error:
        raise ConfigError(config.problem(("prompts",), f"prompts '{source.use}': {error}")) from error
    except Exception as error:  # the user's own code
        raise ConfigError(config.problem(("prompts",), f"prompts '{source.use}': {describe(error)}")) from error
    if not prompts:
        raise ConfigError(config.problem(("prompts",), f"prompts '{source.use}': it gave none"))
    return prompts


def _carry_out(
    main: Interruptible,
    config: RunConfig,
    agents: Mapping[str, AgentGraph],
    prompts: list[Prompt],
    progress: Progress,
    earlier: Sequence[Recorded] | None = None,
) -> Summary:
    """Run ``prompts``, or what is left of them after the trajectories ``earlier``."""
    for line in start_lines(agents.values()):
        print(line, file=sys.stderr)
    began = latest_of([trajectory for trajectory, _ in earlier or ()])
    ended = {(each.group_id, each.sample) for each in began if each.ended and each.parent_id is None}
    with progress(len(prompts) * config.n, ended) as listener:
        # Engines are built outside the event loop, in which a Ctrl-C would wait until a model has been loaded.
        rollout = training_rollout_of(config, agents, on_event=[listener])
        return main.run(_run(rollout, config, prompts, earlier))


def training_rollout_of(config: RunConfig, agents: Mapping[str, AgentGraph], **arguments: Any) -> Rollout:
    """Make a run's rollout with all that rows are made by: its reward, filter, teachers and shards too."""
    teachers = {
        name: {"engine": teacher.engine, "top_k": teacher.top_k, "hint": teacher.hint}
        for name, teacher in config.teachers.items()
    }
    same: dict[str, Any] = {name: getattr(config, name) for name in ("workers", "worker_placement", "group_filter")}
    return rollout_of(config, agents, reward=config.rewards, teachers=teachers, **same | arguments)


def rollout_of(config: RunConfig, agents: Mapping[str, AgentGraph], **arguments: Any) -> Rollout:
    """Make a run's rollout, with its engines; ``arguments`` are further ones, or others than the config's."""
    common: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("engines", "base", "seed", "sampling", "validation_sampling", "concurrency", "queue_timeout")
    }
    common |= {"validate": config.validate_run, "tail": config.tail}
    common |= {"failures": config.failures, "tracing": config.tracing}
    return Rollout(agents, config.engine, **common | arguments)


async def _run(
    rollout: Rollout, config: RunConfig, prompts: list[Prompt], earlier: Sequence[Recorded] | None
) -> Summary:
    tracking = Tracking(None, 0)
    looks, orders = Looks(prompts, config.until, config.seed), AsyncExitStack()
    rollout.scheduler.lag = LoopLag()
    try:
        # 1. Nothing is written before the prompts are known to fit their agents.
        await rollout.scheduler.acheck(prompts)
        if earlier is None:
            clear(config.out)
        tracking = Tracking(_tracker(config), len(prompts))
        # 2. The run itself.
        facts: dict[str, object] = rollout.description | {"run": config.to_json(), REPLICAS: {}}
        if config.file is not None:
            facts["file"] = str(config.file)
        with Journal(config.out / JOURNAL, metadata=facts, append=earlier is not None) as journal:
            rollout.journal = journal
            await orders.enter_async_context(taking_orders(config.out, rollout))
            started = time.monotonic()
            groups: list[Group] = []
            for part in looks.parts():
                names = {prompt.prompt_id for prompt in part}
                stream = rollout.stream(
                    part,
                    config.n,
                    target_groups=config.target_groups,
                    over_sample=config.over_sample,
                    max_filtered=config.max_filtered,
                    resume=[events for trajectory, events in earlier or () if trajectory.group_id in names],
                )
                async for group in stream:
                    groups.append(group)
                    await tracking.add(group, rollout.weight_version)
                if looks.enough([group.trajectories for group in groups]):
                    break
            seconds = time.monotonic() - started
        # 3. Its results.
        outcome = looks.facts()
        if config.target_groups is not None:
            outcome |= {
                "target_groups": config.target_groups,
                "delivered_groups": sum(group.counts for group in groups),
            }
        summary = _write(config.out, rollout, groups, seconds, outcome, filtered=config.group_filter is not None)
        await tracking.finish(summary, rollout.weight_version)
        return summary
    finally:
        await orders.aclose()
        await tracking.close()
        await rollout.aclose()


def _tracker(config: RunConfig) -> Tracker | None:
    if config.track is None:
        return None
    return build_tracker(config.track, config.out.name, config.out, json.loads(config.to_json()))


def check_parts(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError, with lines, for all that is wrong with a run and can be said before an engine is started."""
    problems: list[Problem] = []

    @contextmanager
    def of(key: str) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            problems.extend(config.problem((key,), problem.message) for problem in error.problems)

    if config.rewards is not None:
        with of("reward"):
            problems += Reward(config.rewards).check(prompts)
    if config.group_filter is not None:
        with of("group_filter"):
            GroupFilter(config.group_filter)
    if config.track is not None:
        with of("track"):
            check_tracker(config.track)
    if config.tracing is not None:
        with of("tracing"):
            config.tracing.destination()
    problems += engine_problems(config)
    if problems:
        raise ConfigError(in_file_order(problems))


def engine_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what is wrong with the engines' mappings, while the lines are known."""
    for at, spec in config.specs.items():
        whose = f"{'teacher' if at[2:] else 'engine'} '{at[1] if at[1:] else POLICY}'"
        for path, message in faults(spec, config.base):
            yield config.engine_problem(at, path, f"{whose}: {message}")


def _write(
    folder: Path, rollout: Rollout, groups: list[Group], seconds: float, looked: Summary, *, filtered: bool
) -> Summary:
    carried = {group.group_id for group in rollout.carried}
    trajectories = [trajectory for group in groups for trajectory in group.all]
    bias: Summary = {}
    if carried:  # what was set aside may be in a shard
        trained = [trajectory for group in groups if not group.dropped for trajectory in group.trajectories]
        trajectories += [each for each in latest_of(list(read(folder))) if each.group_id in carried]
        bias = {"length_bias": length_bias(trained, trajectories)}
    summary = {**summarize(trajectories, wall_seconds=seconds, engine=rollout.engine_stats()), **looked, **bias}
    summary |= running_of(rollout.scheduler)
    if errors := [error for group in groups for error in group.reward_errors]:
        summary["reward_errors"] = errors
    discarded = [trajectory for group in groups for trajectory in group.discarded if trajectory.parent_id is None]
    if repeated := sum(trajectory.failure is not None for trajectory in discarded):
        summary["repeated_samples"] = repeated
    dropped = Counter(group.drop_reason for group in groups if group.drop_reason is not None)
    if dropped or filtered:
        summary |= {"groups_dropped": dropped.total(), "drop_reasons": dict(dropped.most_common())}
    try:
        rollout.batch(groups).save(folder / "batch")
    except BatchError as error:
        raise BatchError(f"{error}; nothing is lost: fix that, then fsm-rollout resume {folder}") from error
    with written_whole(folder / SUMMARY) as partial:
        partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    try:
        write_report(folder, pages=True)
    except Exception as error:  # pages call users' code; the results are in place, so a failure here is only logged
        logger.warning("report.html was not written: %s: %s", type(error).__name__, error)
    return summary
