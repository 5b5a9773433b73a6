"""Rollouts inside verl 0.9.1: an agent loop for its workers, and a manager that replaces them.

Invariant: verl keeps what is verl's: servers, weights, rewards (unless an agent's entry names one), TransferQueue. What
comes back are the rows of a trajectory as :mod:`fsm_rollout.adapters.verl` makes them.

The agents are entries of ``rollout.agent.agent_loop_config_path``; the dataset's ``agent_name`` chooses:

    - name: solver
      _target_: fsm_rollout.adapters.verl_plug.FSMAgentLoop
      agent: configs/agents/tool_agent.yaml
      reward: fsm_rollout.rewards:first_answer        # optional: verl's own reward by default

With that alone, verl's workers run each trajectory through :class:`FSMAgentLoop`. With
``agent_loop_manager_class=fsm_rollout.adapters.verl_plug.FSMAgentLoopManager`` one scheduler runs the whole batch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import transfer_queue as tq
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ, apply_greedy_sampling_params
from verl.utils.import_utils import resolve_config_path

from fsm_rollout.adapters.requirements import one_row_each
from fsm_rollout.adapters.verl import agent_loop_outputs
from fsm_rollout.adapters.verl_engine import VerlEngine
from fsm_rollout.adapters.verl_tools import load_agent_with
from fsm_rollout.agent.graph import POLICY
from fsm_rollout.agent.loader import load_agent
from fsm_rollout.batch.rows import TrainingRow, rows
from fsm_rollout.concurrency.loop_thread import LoopThread
from fsm_rollout.concurrency.tasks import Tasks
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.environment.rewards import Reward
from fsm_rollout.errors import BatchError, RolloutError
from fsm_rollout.rollout import Rollout
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.trajectory.pictures import is_picture
from fsm_rollout.trajectory.prompt import Prompt, as_prompt
from fsm_rollout.trajectory.settings import Limits, Sampling

logger = logging.getLogger(__name__)

Verl: TypeAlias = Any  # what is verl's: it has no types


@dataclass(eq=False)
class SharedRollout:
    """One agent on verl's servers. What is asked for in one flush of the event loop goes through one scheduler."""

    rollout: Rollout
    prompt_length: int
    response_length: int
    reward: Reward | None
    _asked: list[tuple[Prompt, int, asyncio.Future[Group]]] = field(default_factory=list)
    _running: Tasks = field(default_factory=Tasks)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    def of_config(
        cls, config: Verl, client: Verl, model: tuple[Verl, Verl], agent: str, reward: str | None
    ) -> SharedRollout:
        """Return the rollout of an entry of verl's agent loops.

        ``config`` is verl's whole configuration, ``model`` its tokenizer and, of one that sees pictures, its processor.
        """
        settings = config.actor_rollout_ref.rollout
        path, tools = resolve_config_path(agent), settings.multi_turn.get("tool_config_path")
        graph = load_agent_with(path, resolve_config_path(tools)) if tools else load_agent(path)
        room = settings.prompt_length + settings.response_length
        engine = VerlEngine(client, model[0], max_context=room, processor=model[1])
        own = Reward(reward) if reward else None
        return cls(Rollout(graph, engine), settings.prompt_length, settings.response_length, own)

    async def group(self, columns: Mapping[str, Verl], sampling: Mapping[str, Verl], n: int) -> Group:
        """Return the group of ``n`` trajectories of one row of verl's dataset."""
        done: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._begin)
        self._asked.append((self._prompt(columns, sampling), n, done))
        return await done

    def _begin(self) -> None:
        asked, self._asked = self._asked, []
        for n in {n for _, n, _ in asked}:
            self._running.begin(self._run([each for each in asked if each[1] == n], n))

    async def _run(self, asked: Sequence[tuple[Prompt, int, asyncio.Future[Group]]], n: int) -> None:
        futures = {str(prompt.prompt_id): done for prompt, _, done in asked}
        try:
            clients = {POLICY: EngineClient(self.rollout.engines[POLICY])}
            scheduler = Scheduler(self.rollout.agents, clients, reward=self.reward)
            prompts = [prompt for prompt, _, _ in asked]
            scheduler.check(prompts)
            async for group in scheduler.run(prompts, n):
                futures.pop(group.group_id).set_result(group)
        except Exception as error:  # whoever asked is told
            for done in futures.values():
                if not done.done():
                    done.set_exception(error)

    def _prompt(self, columns: Mapping[str, Verl], sampling: Mapping[str, Verl]) -> Prompt:
        """Return a row of verl's dataset as a prompt; its ground truth is the ``answer`` that rewards compare with."""
        plain = {name: _plain(value) for name, value in columns.items()}
        extra = dict(plain.get("extra_info") or {})
        for name in ("tools_kwargs", "data_source", "reward_model", "index", "uid"):
            if plain.get(name) is not None:
                extra[name] = plain[name]
        truth = (plain.get("reward_model") or {}).get("ground_truth")
        if truth is not None:
            extra.setdefault("answer", truth)
        for name in Prompt.model_fields:
            extra.pop(name, None)
        number = next(self._numbers)
        prompt = as_prompt({"messages": list(plain["raw_prompt"]), **extra}, number)
        top_k = int(sampling.get("top_k", -1))
        own = Sampling(
            temperature=float(sampling.get("temperature", 1.0)),
            top_p=float(sampling.get("top_p", 1.0)),
            top_k=max(0, top_k),
        )
        limits = Limits(response_tokens=self.response_length)
        name = f"{plain.get('uid', 'prompt')}-{number}"
        return prompt.model_copy(update={"prompt_id": name, "sampling": own, "limits": limits})

    def rows_of(self, group: Group, sample: int) -> list[TrainingRow]:
        """Return the rows of a sample, sub-agents' among them.

        Raises:
            RolloutError: it has none, because it failed before a token was sampled.
            BatchError: a prompt is longer than verl's ``prompt_length``.
        """
        trajectories = [trajectory for trajectory in group.all if trajectory.sample == sample]
        made = rows(trajectories)
        if not made:
            ends = ", ".join(f"{t.trajectory_id}: {t.stop_reason} ({t.detail})" for t in trajectories)
            raise RolloutError(f"no token was sampled: {ends}")
        for row in made:
            if len(row.prompt_ids) > self.prompt_length:
                raise BatchError(
                    f"row {row.row_id} has a prompt of {len(row.prompt_ids)} tokens, and rollout.prompt_length is "
                    f"{self.prompt_length}; set data.max_prompt_length higher (nothing is cut in silence)"
                )
        return made


# verl makes an agent loop anew for each trajectory; what is dear is made once, by client, agent and reward.
_SHARED: dict[tuple[int, str, str | None], SharedRollout] = {}


class FSMAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl is not typed
    """An agent of this project as an agent loop of verl's."""

    def __init__(self, *args: Verl, agent: str, reward: str | None = None, name: str = "", **kwargs: Verl) -> None:
        self.config = kwargs["trainer_config"].config
        key = id(kwargs["server_manager"]), str(agent), reward
        if key not in _SHARED:
            model = kwargs["tokenizer"], kwargs.get("processor")
            _SHARED[key] = SharedRollout.of_config(self.config, kwargs["server_manager"], model, agent, reward)
        self.shared = _SHARED[key]

    async def run(self, sampling_params: dict[str, Verl], **kwargs: Verl) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run one trajectory; the V1 trainer (which gives a ``session_id``) may get several rows of it."""
        group = await self.shared.group(kwargs, sampling_params, 1)
        made = self.shared.rows_of(group, 0)
        if "session_id" not in kwargs:
            one_row_each(made, "verl's AgentLoopWorker (trainer.use_v1=false)")
        outputs = agent_loop_outputs(made)
        return outputs if "session_id" in kwargs else outputs[0]


class _VerlWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's worker in the manager's own process: all sessions of a batch go through one scheduler."""

    def __init__(self, *args: Verl) -> None:
        super().__init__(*args)
        path = self.rollout_config.agent.agent_loop_config_path
        entries: Verl = OmegaConf.load(resolve_config_path(path)) if path else []
        self.shared = {
            entry.name: SharedRollout.of_config(
                self.config, self.llm_client, (self.tokenizer, self.processor), entry.agent, entry.get("reward")
            )
            for entry in entries
            if "agent" in entry
        }

    async def _run_prompt(
        self, prompt: dict[str, Verl], sampling_params: dict[str, Verl], trajectory: Verl, trace: Verl
    ) -> None:
        """Run the group of a prompt and put each session's rows into TransferQueue, as verl's worker does."""
        validate = trajectory["validate"]
        uid, partition = prompt["uid"], "val" if validate else "train"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
        try:
            config = self.config.actor_rollout_ref.rollout
            n = int(prompt.pop("__rollout_n__", config.val_kwargs.n if validate else config.n))
            params = dict(sampling_params)
            if not validate and not prompt.pop("__do_sample__", True):
                apply_greedy_sampling_params(params)
            name = prompt.pop("agent_name")
            if name not in self.shared:
                raise RolloutError(f"agent_name '{name}' is no entry of agent_loop_config_path ({sorted(self.shared)})")
            shared = self.shared[name]
            group = await shared.group(prompt, params, n)
            outputs = [agent_loop_outputs(shared.rows_of(group, sample)) for sample in range(n)]
            for session, made in enumerate(outputs):
                for output in made[:-1]:  # verl asks its teacher for the last row alone
                    ids = (output.prompt_ids, output.response_ids)
                    await self._compute_teacher_logprobs(output, *ids, validate=validate, sample_kwargs=prompt)
                await self._agent_loop_postprocess(made, validate, session_id=session, **prompt)
            status = "finished"
        except Exception as error:  # verl's trainer clears the group
            logger.exception("the rollout of prompt %s failed: %s", uid, error)
            status = "failure"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})


class FSMAgentLoopManager:
    """What ``actor_rollout_ref.rollout.agent.agent_loop_manager_class`` names (V1 trainer)."""

    def __init__(self, worker: _VerlWorker, loop: LoopThread) -> None:
        self.worker = worker
        self.loop = loop

    @classmethod
    def create(
        cls, config: Verl, llm_client: Verl, teacher_client: Verl = None, reward_loop_worker_handles: Verl = None
    ) -> FSMAgentLoopManager:
        """Return a manager with an event loop of its own."""
        loop = LoopThread()

        async def build() -> _VerlWorker:
            return _VerlWorker(config, llm_client, teacher_client, reward_loop_worker_handles)

        return cls(loop.call(build), loop)

    def generate_sequences(self, prompts: Verl) -> None:
        """Begin the rollouts of a batch (a TensorDict) and return; their rows come into TransferQueue as they end."""
        self.loop.call(lambda: self.worker.generate_sequences(prompts))

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Hold all rollouts while verl loads weights of this version: ``checkpoint_manager.update_weights(version)``.

        What verl cuts for that goes on afterwards, and no try of it is spent.
        """
        held = AsyncExitStack()

        async def hold() -> None:
            for shared in self.worker.shared.values():
                await held.enter_async_context(shared.rollout.updating(version))

        try:
            self.loop.call(hold)
            yield
        except BaseException as error:
            self.loop.call(partial(held.__aexit__, type(error), error, error.__traceback__))
            raise
        self.loop.call(held.aclose)


def _plain(value: Verl) -> Verl:
    """Return plain data for what numpy, torch or TensorDict hold; a picture's file may lie anywhere, as for verl."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        found = {str(key): _plain(item) for key, item in value.items()}
        file: Verl = found.get("image") if is_picture(found) else None
        named = isinstance(file, str) and not file.startswith(("data:", "http"))
        return found | {"image": Path(file.removeprefix("file://"))} if named else found
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
