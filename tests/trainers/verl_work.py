"""Work for verl: prompts, what a scripted model says to them as token ids, a tool of verl's, and what must come out.

The oracle renders each conversation with the tokenizer's own template and knows nothing of the code under test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hydra import compose, initialize_config_dir
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.workers.rollout.replica import TokenOutput

from fsm_rollout.model import embedded_model
from tests.embedded import tokenizer
from tests.kit import CONFIGS
from tests.routing import experts_at

SCHEMA = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a number up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "integer", "description": "The row."}, "count": {"type": "integer"}},
            "required": ["key"],
        },
    },
}
CALLS = 2
LOGPROB = -0.5
released: list[str] = []


class Lookup(BaseTool):
    """verl's kind of tool; each instance knows the secret of its prompt."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema, self.name = config, tool_schema, "lookup"
        self.secrets: dict[str, str] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance = f"{len(self.secrets)}"
        self.secrets[instance] = kwargs["create_kwargs"]["secret"]
        return instance, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(text=answer(parameters["key"], self.secrets[instance_id])), 0.25, {}

    async def release(self, instance_id: str, **_: Any) -> None:
        released.append(instance_id)


def answer(key: int, secret: str) -> str:
    return f"row {key} is {secret}"


def messages(i: int) -> list[dict[str, str]]:
    return [{"role": "system", "content": "You look things up."}, {"role": "user", "content": f"What is {i}?"}]


def spoken(i: int) -> list[str]:
    """Return what the model says, turn by turn: two calls and an answer."""
    calls = [{"name": "lookup", "arguments": {"key": 10 * i + turn, "count": 1}} for turn in range(CALLS)]
    return [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls] + [f"The answer is {i}."]


def script(i: int) -> list[list[int]]:
    end = tokenizer().eos_token_id
    return [[*tokenizer().encode(text, add_special_tokens=False), end] for text in spoken(i)]


def expected(i: int) -> tuple[list[int], list[int], list[int]]:
    """Return the prompt, the response and its mask that are right for prompt ``i``."""
    tok = tokenizer()

    def render(history: Sequence[dict[str, Any]]) -> str:
        return str(tok.apply_chat_template(history, tools=[SCHEMA], add_generation_prompt=True, tokenize=False))

    history: list[dict[str, Any]] = list(messages(i))
    text = render(history)
    prompt = tok.encode(text, add_special_tokens=False)
    ids: list[int] = []
    mask: list[int] = []
    for turn, (said, sampled) in enumerate(zip(spoken(i), script(i), strict=True)):
        ids += sampled
        mask += [1] * len(sampled)
        if turn < CALLS:
            call = json.loads(said.split("\n")[1])
            history.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
            history.append({"role": "tool", "content": answer(call["arguments"]["key"], f"s{i}")})
            before, text = text + said + tok.eos_token, render(history)
            assert text.startswith(before), "the script is what the template writes"
            glue = tok.encode(text[len(before) :], add_special_tokens=False)
            ids += glue
            mask += [0] * len(glue)
    return prompt, ids, mask


class FakeClient:
    """Stands in for ``LLMServerClient``: says the script, under one weight version after the other."""

    def __init__(self, *, fails: frozenset[int] = frozenset(), delay: float = 0.0) -> None:
        self.fails, self.delay, self.sessions = fails, delay, set[str]()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        assert sampling_params["logprobs"]
        assert sampling_params["max_tokens"] > 0
        self.sessions.add(request_id)
        text = tokenizer().decode(prompt_ids)
        i = int(text.split("What is ")[-1].split("?")[0])
        turn = text.count("<tool_response>")
        await asyncio.sleep(self.delay)
        if i in self.fails:
            raise RuntimeError("the server is gone")
        ids = script(i)[turn]
        steps = {"min_global_steps": 3 + turn, "max_global_steps": 3 + turn, "global_steps": 3 + turn}
        experts = experts_at(np.arange(len(prompt_ids) + len(ids) - 1))
        logprobs = [LOGPROB] * len(ids)
        return TokenOutput(
            token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields=steps, routed_experts=experts
        )


class FakeTeacher:
    """Stands in for the client of verl's teacher: every token is as probable to it as its id says."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        assert sampling_params["prompt_logprobs"] == 0
        said = {"prompt_ids": [[i] for i in prompt_ids], "prompt_logprobs": [[-i / 1024] for i in prompt_ids]}
        return TokenOutput(token_ids=[], extra_fields=said)


def config(
    folder: Path, agent: Path | None = None, model: Path | None = None, *, further: Sequence[str] = (), **entry: str
) -> Any:
    """Return verl's whole configuration, with our agent loop and verl's own tool YAML."""
    import verl

    agent = agent or folder / "agent.yaml"
    if not agent.exists():
        lines = (CONFIGS / "agents/tool_agent.yaml").read_text("utf-8").splitlines()
        dropped = ("tools:", "  calculate:", "contexts:", "  main:")
        agent.write_text("\n".join(line for line in lines if not line.startswith(dropped)), "utf-8")
    tool = {"class_name": "tests.trainers.verl_work.Lookup", "config": {"type": "native"}, "tool_schema": SCHEMA}
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [tool]}, sort_keys=False), "utf-8")
    loop = {"name": "fsm", "_target_": "fsm_rollout.adapters.verl_plug.FSMAgentLoop", "agent": str(agent), **entry}
    (folder / "loops.yaml").write_text(yaml.safe_dump([loop]), "utf-8")
    path = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(config_dir=str(path), version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                "actor_rollout_ref.rollout.name=sglang",
                f"actor_rollout_ref.model.path={model or embedded_model()}",
                "data.max_prompt_length=256",
                "data.max_response_length=256",
                "actor_rollout_ref.rollout.n=2",
                "actor_rollout_ref.rollout.multi_turn.enable=true",
                f"actor_rollout_ref.rollout.multi_turn.tool_config_path={folder / 'tools.yaml'}",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'loops.yaml'}",
                *further,
                "actor_rollout_ref.rollout.calculate_log_probs=true",
            ],
        )


def columns(n: int) -> dict[str, Any]:
    """Return the columns of verl's dataset for ``n`` prompts."""

    def objects(values: Any) -> Any:
        return np.fromiter(values, dtype=object, count=n)

    return {
        "raw_prompt": objects(messages(i) for i in range(n)),
        "agent_name": objects("fsm" for _ in range(n)),
        "index": np.arange(n),
        "uid": objects(f"u{i}" for i in range(n)),
        "data_source": objects("test" for _ in range(n)),
        "reward_model": objects({"style": "rule", "ground_truth": str(i)} for i in range(n)),
        "extra_info": objects({"index": i, "split": "train"} for i in range(n)),
        "tools_kwargs": objects({"lookup": {"create_kwargs": {"secret": f"s{i}"}}} for i in range(n)),
    }
