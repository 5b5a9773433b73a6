"""A hosted model, real: our own gateway speaks both APIs, with tools, to the official clients of `kind: chat`.

The law: an agent on such an engine has the very conversation that it has on the model behind it.
"""

from typing import Any

import pytest

import fsm_rollout as fr
from fsm_rollout.states.external.handler import ForeignVisit
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.foreign import agent
from tests.kit import CONFIGS

AGENT = CONFIGS / "agents" / "tool_agent.yaml"
QUESTION = "What is (20 + 22) * 2?"
ended: list[Trajectory] = []


async def one(engine: Any) -> Trajectory:
    async with fr.Rollout(AGENT, engine, sampling={"temperature": 0.0}) as rollout:
        (group,) = [group async for group in rollout.stream([QUESTION])]
    return group.trajectories[0]


async def on_the_gateway(visit: ForeignVisit, api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISIT_KEY", visit.api_key)
    engine = {"kind": "chat", "api": api, "model": visit.model, "base_url": visit.base_url, "api_key_env": "VISIT_KEY"}
    ended.append(await one(engine))


@pytest.mark.parametrize("api", ["openai", "anthropic"])
async def test_an_agent_on_a_chat_api_has_the_conversation_of_the_model_behind_it(
    api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def visitor(visit: ForeignVisit) -> None:
        await on_the_gateway(visit, api, monkeypatch)

    monkeypatch.setitem(globals(), "visitor", visitor)
    outer = agent(f"use: '{__name__}:visitor', dialect: {api}")
    async with fr.Rollout(outer, "embedded", sampling={"temperature": 0.0}) as rollout:
        (group,) = [group async for group in rollout.stream([QUESTION])]
    behind, hosted, direct = group.trajectories[0], ended.pop(), await one("embedded")
    assert hosted.messages == direct.messages
    assert hosted.stop_reason == direct.stop_reason == "answered"
    assert hosted.calls_seen == 2
    # What the provider has counted is what was sampled there.
    sampled = sum(stream.tokens.sampled_length for stream in behind.streams)
    assert sum(turn.tokens for turn in hosted.assistant_turns) == sampled
    assert hosted.trained_tokens == 0 < behind.trained_tokens
