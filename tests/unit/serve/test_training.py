"""What a training service says to who asks wrongly; what it does right is asked of `Rollout`'s tests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

import fsm_rollout as fr
from fsm_rollout.errors import EngineError
from fsm_rollout.serve.training_wire import API, PATH
from tests.kit import CONFIGS
from tests.remote import serving

SCRIPTED = {"kind": "scripted", "turns": ["Four."]}


def rollout() -> fr.Rollout:
    return fr.Rollout(CONFIGS / "agents/single_turn.yaml", SCRIPTED)


def test_a_wrong_question_is_told_what_is_wrong(tmp_path: Path) -> None:
    async def ask(url: str, what: str, body: object, key: str = "mine") -> tuple[int, Any, Any]:
        async with (
            aiohttp.ClientSession(headers={"x-api-key": key}) as http,
            http.post(f"{url}{PATH}/{what}", data=msgspec.msgpack.encode(body)) as answer,
        ):
            error = (await answer.json())["error"]
            return answer.status, error["code"], error["param"]

    async def main(url: str) -> None:
        opening = {"client": "a", "api": API}
        assert await ask(url, "open", opening, key="another") == (401, "invalid_api_key", None)
        assert await ask(url, "open", opening | {"api": API + 1}) == (400, "wrong_version", "api")
        assert await ask(url, "open", opening | {"colour": 1}) == (400, "invalid_request", "colour")
        assert await ask(url, "open", opening | {"api": "one"}) == (400, "invalid_request", "api")
        assert await ask(url, "end", {"client": "b", "run": 0}) == (409, "taken_over", None)
        assert await ask(url, "open", opening | {"client": "x" * 5_000}) == (413, "body_too_large", None)

    with serving(rollout(), tmp_path, keys=frozenset({"mine"}), body_bytes=4_000) as url:
        asyncio.run(main(url))
        with pytest.raises(fr.ConfigError, match="send one of the server's API keys"):
            fr.RemoteRollout(url, api_key="another")


def test_its_metrics_say_what_runs_and_updates_cost(tmp_path: Path) -> None:
    async def page(url: str) -> str:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
            return await answer.text()

    with serving(rollout(), tmp_path) as url, fr.RemoteRollout(url) as remote:
        remote.run(["one"], n=2)
        remote.update_weights(str(CONFIGS))
        shown = asyncio.run(page(url))
    assert 'fsm_rollout_trajectories_ended_total{agent="single_turn",stop_reason="answered"} 2.0' in shown
    assert 'fsm_rollout_ours_duration_seconds_count{engine="policy"} 2.0' in shown
    for phase in ("check", "hold", "load", "release", "paused"):
        assert f'fsm_rollout_weight_update_duration_seconds{{phase="{phase}",quantile="p50"}}' in shown


def test_one_trainer_is_served_and_what_it_cannot_have_is_refused(tmp_path: Path) -> None:
    with serving(rollout(), tmp_path) as url:
        first, second = fr.RemoteRollout(url), fr.RemoteRollout(url)
        with pytest.raises(EngineError, match="another has since"):
            first.run(["one"])
        assert len(second.run(["one"], n=2)) == 2
        with pytest.raises(EngineError, match="loads a model's folder"):
            second.update_weights({})
        with pytest.raises(fr.ConfigError, match="kept by the service"):
            second.state_dict()
        second.sleep()
        second.wake()
        second.close()
        first._closed = True
