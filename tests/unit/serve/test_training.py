"""What a training service says to who asks wrongly; what it does right is asked of `Rollout`'s tests."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import msgspec
import numpy as np
import pytest

import fsm_rollout as fr
from fsm_rollout.engines.weight_sources import Loaded
from fsm_rollout.errors import EngineError, RefusedError
from fsm_rollout.model.folders import model_folder
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.serve.remote_weights import pushed
from fsm_rollout.serve.standing import Standing, names
from fsm_rollout.serve.training_wire import API, PATH, Begin
from fsm_rollout.trajectory.pictures import openai_part, picture_of
from fsm_rollout.trajectory.prompt import as_prompts
from tests.integration.remote_trainer import rows_of
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


def test_an_address_is_understood_or_told_what_is_wrong_with_it(tmp_path: Path) -> None:
    with serving(rollout(), tmp_path) as url:
        for told in (f"{url}/", f"{url}/v1", f"{url}{PATH}/"):
            assert fr.RemoteRollout(told).line.url == url
        with pytest.raises(
            fr.ConfigError, match=r"'127\.0\.0\.1:\d+' is no address of a service; begin it with http://"
        ):
            fr.RemoteRollout(url.removeprefix("http://"))


def test_a_folder_is_named_as_another_process_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("weights", "embedded"):
        (tmp_path / name).mkdir()
    with serving(rollout(), tmp_path) as url, fr.RemoteRollout(url) as remote:
        remote.update_weights("weights")
        for word in ("embedded", "embedded:early"):
            remote.update_weights(word)
            assert [each.folder for each in Standing.read(tmp_path).weights] == [word]
        remote.update_weights(Path("weights"))
        assert [each.folder for each in Standing.read(tmp_path).weights] == [str(tmp_path / "weights")]


@pytest.mark.parametrize(("means", "kind"), [("adapter", fr.Adapter), ("folder", Loaded)])
async def test_a_folder_that_the_service_alone_has_is_named_to_it(tmp_path: Path, means: str, kind: Any) -> None:
    told, folder = list[object](), str(tmp_path / "there")

    async def order(name: str, **arguments: object) -> int:
        told.append((name, arguments))
        return 3

    assert await pushed(cast(Any, SimpleNamespace(order=order)), kind(folder), 3, 0) == 3
    assert told == [("load", {"means": means, "folder": folder, "version": 3})]


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


def waits(remote: fr.Rollout) -> list[str]:
    return [group.group_id for group in remote.scheduler.carried]


def test_one_trainer_is_served_and_what_it_cannot_have_is_refused(tmp_path: Path) -> None:
    with serving(rollout(), tmp_path) as url:
        first, second = fr.RemoteRollout(url), fr.RemoteRollout(url)
        with pytest.raises(RefusedError, match="another has since") as refused:
            first.run(["one"])
        assert pickle.loads(pickle.dumps(refused.value)).code == "taken_over"
        assert len(second.run(["one"], n=2)) == 2
        state = second.state_dict()
        again = set[str]()
        for _ in range(2):
            second.load_state_dict(state)
            again.add(rows_of(second.run(["one"])))
        assert len(again) == 1, "the run after it, which comes again"
        # What waits for a run that comes again is what had waited for it, not what it has left.
        second.run(["two", "three", "four", "five"], target_groups=1, over_sample=3.0)
        before, state = waits(second), second.state_dict()
        second.run([], target_groups=len(before))
        assert len(before) > len(waits(second)) == 0
        second.load_state_dict(state)
        assert waits(second) == before
        second.run(["two"])
        with pytest.raises(fr.ConfigError, match="start the service with another folder"):
            second.load_state_dict(state)
        second.sleep()
        second.wake()
        second.close()
        first._closed = True


def test_what_had_waited_for_a_run_has_its_pictures_when_that_is_over() -> None:
    async def main() -> None:
        async with rollout() as training:
            scheduler, shown, standing = training.scheduler, picture_of(np.zeros((8, 8, 3), np.uint8)), Standing()
            (prompt,) = as_prompts([{"messages": [{"role": "user", "content": [openai_part(shown)]}]}])
            group = Group("0", 0, prompt, scheduler.agents.of_prompt(prompt), 1)
            scheduler.groups.put(group, GroupState.WAITING)
            standing = standing.of_run(Begin(client="a", run=0, n=1), scheduler, set())
            await scheduler.drop_carried()
            standing.over(scheduler)
            assert (names(standing.carried), standing.remaining) == (["0"], [])
            assert [data for data, *_ in standing.pictures] == [shown.data]

    asyncio.run(main())


# -- weights ----------------------------------------------------------------------------------------------------------

EARLY, _ = fr.load_model("embedded:early")
PROMPTS = ["What is 2 + 3?", "What is 4 + 4?"]


def policy() -> fr.Rollout:
    return fr.Rollout(CONFIGS / "agents/single_turn.yaml", {"kind": "transformers", "model": "embedded", "threads": 1})


def same(rollout: fr.Rollout, weights: object) -> list[str]:
    """Run once before and once after an update, whose version is 3."""
    before = rows_of(rollout.run(PROMPTS))
    assert rollout.update_weights(weights, version=3) == rollout.weight_version == 3  # type: ignore[arg-type]
    return [before, rows_of(rollout.run(PROMPTS))]


def pairs() -> list[tuple[str, Any]]:
    return [(name, tensor.detach()) for name, tensor in EARLY.state_dict().items()]


MEANS: dict[str, Callable[[Path], Any]] = {
    "a folder": lambda folder: shutil.copytree(model_folder("embedded:early"), folder),
    "a mapping": lambda _: dict(pairs()),
    "a function, in small buckets": lambda _: fr.Tensors(pairs, bucket_bytes=100_000),
    "pairs that are read once": lambda _: fr.Tensors(iter(pairs())),
}


@pytest.mark.parametrize("means", MEANS)
def test_weights_that_were_pushed_are_there_after_the_service_was_started_again_or_it_is_said(
    means: str, tmp_path: Path
) -> None:
    with policy() as rollout:
        expected = same(rollout, fr.Tensors(pairs))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    body = 150_000  # of a question: larger tensors than that go in several
    with serving(policy(), tmp_path, port=port, body_bytes=body) as url:
        client = fr.RemoteRollout(url)
        weights = MEANS[means](tmp_path / "early")
        assert same(client, weights) == expected
        assert client.status()["weight_version"] == 3
    # A service that was started again loads a folder again, and is given tensors again by a trainer that has them.
    with serving(policy(), tmp_path, port=port, body_bytes=body):
        if "once" not in means:
            again = rows_of(client.run(PROMPTS))
        else:
            with pytest.raises(EngineError, match=r"version 3 were lost .* rollout.update_weights\(…, version=3\)"):
                client.run(PROMPTS)
            client.update_weights(fr.Tensors(pairs), version=3)
            again = rows_of(client.run(PROMPTS))
    assert again != expected[1], "another run has other seeds"
    # A folder that has changed since is not taken for what it was; a trainer that was started again pushes its weights.
    if means == "a folder":
        (weights / "config.json").touch()
    with serving(policy(), tmp_path, port=port, body_bytes=body):
        other = fr.RemoteRollout(url)
        with pytest.raises(EngineError, match="changed since" if means == "a folder" else "came as tensors"):
            other.run(PROMPTS)
        other.update_weights(fr.Tensors(pairs), version=3)
        assert set(other.run(PROMPTS).tensordict["weight_versions"].unique().tolist()) <= {-1, 3}
        other.close()


def test_an_update_that_its_trainer_does_not_end_is_ended_for_it(tmp_path: Path) -> None:
    """It has sent a part when it dies: nothing is sampled with that part, and another trainer's weights are taken."""

    with serving(policy(), tmp_path) as url:
        first = fr.RemoteRollout(url)
        first.pause()
        assert first.status()["paused"] == ["asked"]
        asyncio.run(first.line.order("begin_tensors", version=1))
        second = fr.RemoteRollout(url)
        assert second.status()["paused"] == []
        assert second.weight_version == 0
        with pytest.raises(EngineError, match="NaN"):
            second.update_weights(fr.Tensors(lambda: [(name, tensor * float("nan")) for name, tensor in pairs()]))
        assert second.update_weights(fr.Tensors(pairs)) == 1
        assert set(second.run(PROMPTS).tensordict["weight_versions"].unique().tolist()) <= {-1, 1}
        second.close()
