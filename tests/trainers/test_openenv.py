"""Environments on OpenEnv's own server: reset, step, reward and done; seeds, places, mistakes, deaths, going on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fsm_rollout as fr
from fsm_rollout.agent.loader import loads
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.trajectory.event_bytes import decode, encode
from fsm_rollout.trajectory.events import AnyEvent, UserReplied
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import FILES
from tests.embedded import tokenizer
from tests.kit import ROOT

PATIENCE = 600
AGENT = FILES["plays"]


class Server:
    """A game's server, in a process of its own."""

    def __init__(self, log: Path, sessions: int, *words: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "tests.trainers.openenv_world", str(log), str(sessions), *words]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("openenv") / "log", 8)
    yield server
    server.end()


def agent(url: str, options: str = "", timeout: float = PATIENCE) -> fr.AgentGraph:
    text = AGENT.replace("URL", url).replace(", OPTIONS", f", {options}" * bool(options))
    return loads(text.replace("TIMEOUT", str(timeout)))


def play(graph: fr.AgentGraph, *turns: str, n: int = 1, prompt_id: str = "p", **options: Any) -> list[Trajectory]:
    engine = {"kind": "scripted", "turns": list(turns)}
    prompt = {"messages": [{"role": "user", "content": "Play."}], "prompt_id": prompt_id} | options

    async def run() -> list[Trajectory]:
        async with fr.Rollout(graph, engine, reward="fsm_rollout.rewards:sum_of_turns") as rollout:
            return [t async for group in rollout.stream([prompt], n) for t in group.trajectories]

    return asyncio.run(run())


def said(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "user"]


def wait_for(found: Any) -> None:
    until = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_game_is_played_scored_and_closed(server: Server) -> None:
    before = len(server.lines())
    graph = agent(server.url, "seed: 4")
    guesses = [f"I guess {number}." for number in (1, 101, 50, 25, 31)]
    for trajectory in play(graph, *guesses, n=2):
        assert said(trajectory)[:4] == ["Play.", "I think of a number from 1 to 100.", "1: higher", "2: lower"]
        assert trajectory.stop_reason == "interaction_done"
        assert said(trajectory)[-1] == "5: found"
        assert trajectory.turn_scores == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0)]
        assert trajectory.score == 1.0
    wait_for(lambda: sum(line.endswith("close") for line in server.lines()[before:]) == 2)


def test_the_samples_of_a_group_have_one_seed_and_prompts_have_their_own(server: Server) -> None:
    before = len(server.lines())
    for prompt_id in ("a", "b", "a"):
        play(agent(server.url), "fail", n=2, prompt_id=prompt_id)
    seeds = [line.split()[-1] for line in server.lines()[before:] if " reset " in line]
    assert len(set(seeds[0:2])) == 1
    assert seeds[0:2] == seeds[4:6]
    assert seeds[0:2] != seeds[2:4]
    (trajectory,) = play(agent(server.url), "fail", interaction_kwargs={"seed": 4, "reset": {"most": 7}})
    assert said(trajectory)[1] == "I think of a number from 1 to 7."


def test_where_the_model_speaks_first_the_reset_is_not_shown(server: Server) -> None:
    graph = agent(server.url, "seed: 4")
    rows = [
        row.model_copy(update={"dest": "GENERATING"}) if row.trigger == "prompted" else row for row in graph.transitions
    ]
    (trajectory,) = play(graph.model_copy(update={"transitions": tuple(rows)}), "1", "31")
    assert said(trajectory) == ["Play.", "1: higher", "2: found"]


def test_more_trajectories_than_places_wait_for_one_and_actions_are_told_what_is_wrong(tmp_path: Path) -> None:
    """And a server that dies loses what it held."""
    server = Server(tmp_path / "log", 1, "fields")
    try:
        graph = agent(server.url)
        for trajectory in play(graph, "1, 2", '{"x": 1}', '{"x": 1, "y": 2}', '{"x": 3, "y": 4}', n=3):
            assert trajectory.stop_reason == "interaction_done", trajectory.detail
            not_json, incomplete, *moves = said(trajectory)[2:]
            assert not_json.startswith("Your action was not understood: it is not JSON")
            assert incomplete.startswith("Your action was not understood: y: Field required")
            assert moves == ["1: 3", "2: 7"]
            assert trajectory.turn_scores == [(2, 0.5), (3, 0.5)]  # what was not taken has no score
    finally:
        server.end()
    (trajectory,) = play(graph, "1")
    assert (trajectory.stop_reason, trajectory.failure) == ("failed:EnvironmentLost", "environment")
    assert server.url in str(trajectory.detail)
    assert "Connect" in str(trajectory.detail)


def test_a_failing_a_hanging_and_a_dying_environment_fail_their_trajectory_alone(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", 8)
    try:
        (trajectory,) = play(agent(server.url), "fail")
        assert (trajectory.stop_reason, trajectory.failure) == ("failed:EnvironmentFailed", "environment")
        assert "the game is broken (EXECUTION_ERROR)" in str(trajectory.detail)
        assert trajectory.score is None
        (trajectory,) = play(agent(server.url, "observation: word"), "1")
        assert "no field 'word'; it has: text" in str(trajectory.detail)
        (trajectory,) = play(agent(server.url, "seed: 4", timeout=3), "hang")
        assert (trajectory.stop_reason, trajectory.failure) == ("timed_out", "environment")
        (trajectory,) = play(agent(server.url, "seed: 4"), "31")
        assert trajectory.score == 1.0
        (trajectory,) = play(agent(server.url), "die")
        assert (trajectory.stop_reason, trajectory.failure) == ("failed:EnvironmentLost", "environment")
        assert "closed the session during `step`" in str(trajectory.detail)
    finally:
        server.end()


TURNS = ("1", "101", "50", "31")


def interrupted(graph: fr.AgentGraph, turns: tuple[str, ...], after: int) -> tuple[Trajectory, Trajectory]:
    """Return a trajectory, and the same one where it goes on in another process after so many replies."""
    prompt = Prompt(prompt_id="p", messages=({"role": "user", "content": "Play."},))

    async def run(resume: Any = ()) -> tuple[Trajectory, list[tuple[str, AnyEvent]]]:
        log: list[tuple[str, AnyEvent]] = []
        engine = ScriptedEngine(lambda request: Turn(text=turns[request.turn]), tokenizer=tokenizer())
        scheduler = Scheduler(
            {graph.agent: graph},
            {"policy": EngineClient(engine)},
            listeners=[lambda trajectory, event: log.append((trajectory.trajectory_id, event))],
        )
        (group,) = [group async for group in scheduler.run([prompt], 1, resume=resume)]
        return group.trajectories[0], log

    whole, log = asyncio.run(run())
    cut = [place for place, (_, event) in enumerate(log) if isinstance(event, UserReplied)][after - 1] + 2
    histories: dict[str, list[AnyEvent]] = defaultdict(list)
    for trajectory_id, event in log[:cut]:
        histories[trajectory_id].append(decode(encode(event)))
    return whole, asyncio.run(run(list(histories.values())))[0]


@pytest.mark.parametrize("after", [1, 3])
def test_in_another_process_a_repeatable_environment_goes_on_where_it_was(server: Server, after: int) -> None:
    whole, again = interrupted(agent(server.url, "repeatable: true"), (*TURNS[:3], "fail"), after)
    assert again.stop_reason == whole.stop_reason == "failed:EnvironmentFailed"
    assert [s.tokens.ids.tolist() for s in again.streams] == [s.tokens.ids.tolist() for s in whole.streams]
    assert again.turn_scores == whole.turn_scores


def test_in_another_process_its_trajectory_begins_anew_with_any_other_environment(server: Server) -> None:
    whole, again = interrupted(agent(server.url), TURNS, 2)
    assert (whole.trajectory_id, again.trajectory_id) == ("p/0", "p/0~1")
    assert again.turn_scores == whole.turn_scores


def test_one_that_is_not_repeatable_but_says_so_is_found_out(server: Server) -> None:
    _, again = interrupted(agent(server.url, "repeatable: true"), ("clock", "1", "1", "1"), 3)
    assert again.stop_reason == "failed:EnvironmentLost"
    assert "replayed, reply 2 is 'it is" in str(again.detail)
