"""Tasksets of ``verifiers`` (0.4): their tasks as prompts, their toolsets as tools, their rewards as the reward.

Invariants: a prompt carries its task's data, so that tools and the reward, in whatever process, have the task itself; a
model is shown the tools under the names that verifiers gives them; what a taskset asks for beyond prompts, tools and
scores of the conversation (a container, a conversation of its own, stop conditions, state) is refused with its name
before anything runs, since leaving it out would train on something else.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from typing import Any
from weakref import WeakKeyDictionary

from fsm_rollout.agent import graph
from fsm_rollout.errors import ConfigError, ToolError
from fsm_rollout.tools.bound_tools import BoundTool, MakeContext, Session, made_once
from fsm_rollout.tools.bounded_call import invoke
from fsm_rollout.tools.schema import Arguments, parameters_of
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.trajectory import Trajectory

try:
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.utils import loaders
    from verifiers.v1.utils.decorators import discover_decorated
except ImportError as error:
    raise ConfigError(f"tasksets need the package `verifiers` (pip install verifiers==0.4.0): {error}") from error

FIELD = "verifiers"  # the prompts' field that holds their task


def prompts(taskset: str, config: Mapping[str, object] | None = None, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the tasks of a taskset as prompts, at most ``limit`` of them.

    Args:
        taskset: its id, as verifiers knows it: the name of its module, hyphens allowed.
        config: the keys of its own config.
        limit: how many tasks; needed for an endless taskset.

    Raises:
        ConfigError: there is no such taskset, its config is wrong, or it asks for what is not here.
    """
    config = dict(config or {})
    source = _Taskset.of(taskset, config)
    if limit is None and not source.taskset.bounded:
        raise ConfigError(f"taskset '{taskset}' is endless; set `limit`")
    found = []
    for task in source.taskset if limit is None else source.taskset.take(limit):
        source.refuse(task)
        data = task.data.model_dump(mode="json", exclude_none=True)
        task_data = {"taskset": taskset, "config": config, "data": data}
        found.append({"messages": _messages(task.data), FIELD: task_data})
    return found


async def score(trajectory: Trajectory) -> dict[str, Any]:
    """Return the weighted sum of what a task's rewards say, with each of them; ValueError if the prompt is no task."""
    task_data = trajectory.extra.get(FIELD)
    if not isinstance(task_data, Mapping):
        raise ValueError(
            f"the prompt is not a task of a taskset (it has no `{FIELD}`); give `prompts: {{use: verifiers}}`"
        )
    task = _Taskset.of(task_data["taskset"], task_data["config"]).task(task_data["data"])
    trace = _trace(task, trajectory)
    await task.score(trace)
    rewards = {name: reward and reward.score for name, reward in trace.rewards.items()}
    return rewards | dict(trace.metrics) | {"score": trace.reward}


class _Taskset:
    """A taskset with its config, loaded once in a process."""

    def __init__(self, name: str, config: Mapping[str, object]) -> None:
        try:
            self.config = loaders.taskset_config_type(name).model_validate({**config, "id": name})
            self.taskset: vf.Taskset[Any, Any] = loaders.load_taskset(self.config)
        except Exception as error:  # a taskset's own code
            raise ConfigError(f"taskset '{name}': {type(error).__name__}: {error}") from error
        self.name, self.kind = name, type(self.taskset).task_type()

    @classmethod
    def of(cls, name: str, config: Mapping[str, object]) -> _Taskset:
        """Return the one of that name and config."""
        return _loaded(name, json.dumps(config, sort_keys=True))

    def task(self, data: Mapping[str, object]) -> vf.Task[Any, Any, Any]:
        """Return the task with that data."""
        return self.kind(self.kind.data_type().model_validate(data), self.config.task)

    def refuse(self, task: vf.Task[Any, Any, Any]) -> None:
        """Raise ConfigError where a task asks for more than prompts, tools and scores of a conversation."""
        kind = type(task)
        hooks = (*task.hooks("metric"), *task.hooks("reward"))
        if wanted := next(self._wanted(kind, task, hooks), None):
            raise ConfigError(f"taskset '{self.name}': its tasks have {wanted}; run it with verifiers itself")

    def _wanted(
        self, kind: type[vf.Task[Any, Any, Any]], task: vf.Task[Any, Any, Any], hooks: tuple[Callable[..., Any], ...]
    ) -> Iterator[str]:
        if loaders.environment_class(self.name) is not vf.SingleAgentEnv:
            yield "an environment that holds the conversation itself"
        if task.data.prompt is None:
            yield "no prompt"
        if kind.NEEDS_CONTAINER or task.data.image is not None:
            yield "a container"
        if task.data.skills:
            yield "skills"
        base: Any = vf.Task
        for name in ("setup", "finalize", "stage_verifier"):
            if getattr(kind, name) is not getattr(base, name):
                yield f"a `{name}`, which works in a container"
        for name in ("stop", "intercept"):
            if functions := task.hooks(name) if name == "stop" else discover_decorated(task, name):
                yield f"`@vf.{name}` functions ({functions[0].__name__})"
        for function in hooks:
            runtime = inspect.signature(function).parameters.get("runtime")
            if runtime is not None and runtime.default is inspect.Parameter.empty:
                yield f"`{function.__name__}`, which looks into a container"
        for toolset in (*kind.toolsets(self.config.task), *type(self.taskset).toolsets(self.config)):
            if toolset._state_cls is not vf.State:
                yield f"tools with a state that is scored ({type(toolset).__name__})"


@cache
def _loaded(name: str, config: str) -> _Taskset:
    return _Taskset(name, json.loads(config))


def _messages(data: vf.TaskData) -> list[Message]:
    head = [{"role": "system", "content": data.system_prompt}] if data.system_prompt is not None else []
    if isinstance(data.prompt, str):
        return [*head, {"role": "user", "content": data.prompt}]
    return [*head, *(message.model_dump(mode="json", exclude_none=True) for message in data.prompt or ())]


def _trace(task: vf.Task[Any, Any, Any], trajectory: Trajectory) -> Trace[Any, Any, Any]:
    """Return a conversation as the trace that verifiers scores."""
    trace: Trace[Any, Any, Any] = Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=AgentInfo(config=WireAgentConfig()),
        is_completed=True,
        ok=trajectory.failure is None,
        stop_condition=trajectory.stop_reason,
    )
    prompted = len(trajectory.prompt_messages)
    for place, message in enumerate(trajectory.messages):
        calls = [
            {
                "id": call["id"],
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            }
            for call in message.get("tool_calls") or ()
        ]
        fields = {**message, "tool_calls": calls} if calls else {k: v for k, v in message.items() if k != "tool_calls"}
        node = {"parent": place - 1 if place else None, "message": fields}
        trace.nodes.append(MessageNode(**node, sampled=message["role"] == "assistant" and place >= prompted))
    return trace


# -- tools --------------------------------------------------------------------------------------------------------


class TasksetTools:
    """``tools: {NAME: {verifiers: {taskset: …}}}``: the tools of a taskset, under their own names.

    Those of a task are made anew for each trajectory and see its task; those of the taskset are shared by all.
    """

    def __init__(self, name: str, spec: graph.ToolSpec) -> None:
        self.name, self.spec = name, spec
        self.where = f"tool '{name}' (verifiers)"
        self._shared: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[list[Any]]] = WeakKeyDictionary()

    @cached_property
    def source(self) -> _Taskset:
        """The taskset."""
        assert self.spec.verifiers is not None
        return _Taskset.of(self.spec.verifiers.taskset, self.spec.verifiers.config)

    def _make(self, *, shared: bool) -> list[Any]:
        source = self.source
        toolsets = type(source.taskset).toolsets(source.config) if shared else source.kind.toolsets(source.config.task)
        return list(toolsets)

    def tools(self) -> dict[str, BoundTool]:
        """Return the tools, by the names that a model is shown.

        Raises:
            ToolError: there is no such taskset, or it has no tools; or one runs elsewhere, or cannot be shown.
        """
        tools: dict[str, BoundTool] = {}
        try:
            for shared in (False, True):
                for place, toolset in enumerate(self._make(shared=shared)):
                    if getattr(toolset.config, "url", None):
                        raise ToolError(f"{self.where}: {toolset.server_name} is a server that runs already; use `mcp`")
                    for number, function in enumerate(discover_decorated(toolset, "tool")):
                        tool = ToolsetTool(self, toolset, function, (shared, place, number))
                        tools[tool.name] = tool
        except ConfigError as error:
            raise ToolError(f"{self.where}: {error}") from error
        if not tools:
            raise ToolError(f"{self.where}: taskset '{self.source.name}' has no tools")
        return tools

    async def toolsets(self, session: Session, *, shared: bool) -> list[Any]:
        """Return the toolsets of a trajectory, or those that all share; they are made once for all calls."""
        instances, key = (self._shared, asyncio.get_running_loop()) if shared else (session.instances, self)
        made: list[Any] = await made_once(
            instances, key, lambda: self._set_up(None if shared else session.extra.get(FIELD))
        )
        return made

    async def _set_up(self, own: object) -> list[Any]:
        toolsets = self._make(shared=own is None)
        for toolset in toolsets:
            await toolset.setup()
            if isinstance(own, Mapping):
                await toolset.setup_task(self.source.task(own["data"]).data)
        return toolsets

    async def release(self, making: asyncio.Task[list[Any]]) -> str | None:
        """Close a trajectory's toolsets, and return what went wrong."""
        making.cancel()  # no effect when they are made
        try:
            for toolset in await making:
                await toolset._exit_stack.aclose()  # where a toolset puts what it has to close
        except asyncio.CancelledError:
            return None
        except Exception as error:  # the toolset's own code
            return f"{self.where}: {type(error).__name__}: {error}"
        return None

    async def close(self) -> None:
        """Close those that this event loop's trajectories share."""
        if (making := self._shared.pop(asyncio.get_running_loop(), None)) is not None:
            await self.release(making)


class ToolsetTool(BoundTool):
    """One tool of a taskset."""

    kind = "a taskset's tool"

    def __init__(
        self, server: TasksetTools, toolset: Any, function: Callable[..., Any], place: tuple[bool, int, int]
    ) -> None:
        tool_name = getattr(function, "tool_name", None) or function.__name__
        super().__init__(f"{toolset.server_name}_{tool_name}" if toolset.server_name else tool_name, server.spec)
        self.server, self._place = server, place
        self.holder = None if place[0] else server
        self.where = f"{server.where}: '{self.name}'"
        self.parameters = parameters_of(function, where=self.where)
        self.schema = self.parameters.tool(self.name)
        self._runs(function)

    async def call(self, session: Session, arguments: Arguments, context: MakeContext) -> object:
        """Call the trajectory's own toolset, or the one that all share."""
        shared, place, number = self._place
        toolsets = await self.server.toolsets(session, shared=shared)
        return await invoke(discover_decorated(toolsets[place], "tool")[number], arguments)
