"""A replayed run comes to the same rows without its model; what has changed since is named where it first shows."""

import asyncio
import json
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import fsm_rollout as fr
from fsm_rollout.agent.loader import dump, loads
from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.engines.scripted.replay import ReplayEngine, recorded, replay
from fsm_rollout.errors import EngineError
from fsm_rollout.jobs.run_config import load_run
from fsm_rollout.jobs.runner import execute
from fsm_rollout.report.progress import RunProgress
from fsm_rollout.scheduler.failure_policy import ENDS
from fsm_rollout.testing import run_virtual
from fsm_rollout.tools.calculator import calculate
from fsm_rollout.trajectory.journal import Journal, read
from fsm_rollout.trajectory.tokens import Owner, as_ids
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.embedded import tokenizer
from tests.kit import ROOT

CONFIGS = ROOT / "configs"
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": 1, "operator": "+", "right": 2}}\n</tool_call>'


def run(name: str, out: Path, *overrides: str) -> dict[str, Any]:
    from rich.console import Console

    config = load_run(CONFIGS / "runs" / name, ["limit=2", f"out={out}", *overrides])
    return execute(config, lambda total, done: RunProgress(total, done, Console(quiet=True)))


def streams(trajectory: Trajectory) -> list[tuple[str, Any]]:
    """Everything that is trained on, token by token, and the pictures among them."""
    return [(stream.context, (stream.tokens, stream.media)) for stream in trajectory.streams]


def same(one: Path, other: Path) -> bool:
    before = {t.trajectory_id: t for t in read(one / "journal.sqlite")}
    after = {t.trajectory_id: t for t in read(other / "journal.sqlite")}
    assert list(before) == list(after)
    for name, trajectory in before.items():
        assert streams(after[name]) == streams(trajectory)
        assert after[name].stop_reason == trajectory.stop_reason
        assert after[name].score == trajectory.score
    return bool(before)


@cases("laws")
def test_every_run_replays(name: str, engines: dict[str, str], tmp_path: Path) -> None:
    run(name, tmp_path / "first")
    of = {"engine": "policy"} | {f"engines.{engine}": engine for engine in engines}
    twice = name == "delegate.yaml"  # the quickest
    for source, out in (("first", "again"), ("again", "once_more"))[: 1 + twice]:
        specs = [f"{key}={{kind: replay, run: {tmp_path / source}, engine: {engine}}}" for key, engine in of.items()]
        run(name, tmp_path / out, *specs)
        assert same(tmp_path / "first", tmp_path / out)
    page = (tmp_path / out / "report.html").read_text("utf-8")
    assert "without their text" not in page, "the tokenizer is found, through both replays"


AGENT = fr.load_agent(CONFIGS / "agents/tool_agent.yaml")


@pytest.mark.parametrize("budget", [None, 2, 6])
def test_versions_and_interrupted_generations_replay(tmp_path: Path, budget: int | None) -> None:
    """Weights change while a turn is sampled, and a generation is set aside and resumed in the next step.

    Its thinking is closed by the environment where there is a budget for it.
    """
    sampling = {} if budget is None else {"thinking_tokens": budget}

    def turn(request: Request) -> Turn:
        delay = 0.01 if request.group_id == "0" else 0.03
        said = "The answer is 3." if request.turn else CALL
        return Turn(
            text=f"<think>\nI think and think.\n</think>\n\n{said}" if sampling else said, chunks=8, delay=delay
        )

    engine = fr.ScriptedEngine(turn, tokenizer=tokenizer())
    with fr.Rollout(AGENT, engine, journal=Journal(tmp_path / "j.sqlite"), sampling=sampling) as rollout:

        async def go() -> None:
            stream = rollout.arun([f"1 + {i}?" for i in range(4)], target_groups=1, over_sample=4)
            step = asyncio.create_task(stream)
            await asyncio.sleep(0.035)
            await rollout.aupdate_weights({})
            await step
            assert [t.suspended for group in rollout.carried for t in group.all] == ["carried"] * 3
            await rollout.aupdate_weights({})
            await rollout.arun([], target_groups=3)

        run_virtual(go())
        assert rollout.journal is not None
        rollout.journal.close()
    before = {t.trajectory_id: t for t in read(tmp_path / "j.sqlite")}
    assert {span.version for t in before.values() for s in t.streams for span in s.tokens.sampled()} == {0, 1, 2}
    closed = [
        (one.turn, other.owner)
        for trajectory in before.values()
        for stream in trajectory.streams
        for one, other in pairwise(stream.tokens.spans)
        if one.owner is Owner.MODEL and one.turn == other.turn and one.version != other.version
    ]
    assert any(owner is Owner.ENVIRONMENT for _, owner in closed) == bool(sampling)
    with fr.Rollout(AGENT, {"kind": "replay", "run": tmp_path / "j.sqlite"}, sampling=sampling) as rollout:
        groups = rollout.run([f"1 + {i}?" for i in range(4)])
    assert len(groups) == 4
    with fr.Rollout(AGENT, replay(tmp_path / "j.sqlite"), sampling=sampling) as rollout:

        async def again() -> list[Trajectory]:
            return [t async for g in rollout.stream([f"1 + {i}?" for i in range(4)]) for t in g.all]

        after = asyncio.run(again())
    for trajectory in after:
        assert streams(trajectory) == streams(before[trajectory.trajectory_id])
    if sampling:
        unbounded = replayed(tmp_path / "j.sqlite", prompt="1 + 0?")
        assert unbounded.stop_reason == "failed:ReplayDiverged"
        assert "the thinking of generation 0 (from 0) of trajectory '0/0' in 'main' was closed" in str(unbounded.detail)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "j.sqlite"
    engine = {"kind": "scripted", "turns": [CALL, "The answer is 3."]}
    with fr.Rollout(AGENT, engine, journal=Journal(path)) as rollout:
        rollout.run(["What is 1 + 2?"])
        assert rollout.journal is not None
        rollout.journal.close()
    return path


@wraps(calculate)
def miscalculate(left: int, operator: str, right: int) -> int:
    return 4


def replayed(journal: Path, agent: fr.AgentGraph = AGENT, prompt: str = "What is 1 + 2?") -> Trajectory:
    with fr.Rollout(agent, replay(journal), failures=ENDS) as rollout:

        async def go() -> Trajectory:
            (group,) = [group async for group in rollout.stream([prompt])]
            return group.trajectories[0]

        return asyncio.run(go())


def test_what_changed_is_named_where_it_first_shows(journal: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = replayed(journal, prompt="What is 1 + 3?")
    assert other.stop_reason == "failed:ReplayDiverged"
    assert "generation 0 (from 0) of trajectory '0/0' in 'main' has another input" in (other.detail or "")
    assert "is followed by '2?" in (other.detail or "")
    assert "is followed by '3?" in (other.detail or "")
    assert "trying again" not in caplog.text, "it would come to the same"
    text = dump(AGENT).replace("fsm_rollout.tools.calculator:calculate", "tests.laws.test_replay:miscalculate")
    later = replayed(journal, loads(text))
    assert later.stop_reason == "failed:ReplayDiverged"
    assert "generation 1 (from 0)" in (later.detail or "")
    assert "is followed by '3\\n" in (later.detail or "")
    assert "is followed by '4\\n" in (later.detail or "")


def test_what_the_run_never_asked_is_named(journal: Path) -> None:
    with fr.Rollout(AGENT, replay(journal), failures=ENDS) as rollout:

        async def go() -> list[Trajectory]:
            return [group.trajectories[0] async for group in rollout.stream(["What is 1 + 2?", "And 1 + 2?"])]

        first_trajectory, two = sorted(asyncio.run(go()), key=lambda t: t.trajectory_id)
    assert (first_trajectory.stop_reason, two.stop_reason) == ("answered", "failed:ReplayDiverged")
    assert "has no generation 0 (from 0) of trajectory '1/0' in 'main'" in (two.detail or "")


def requests(journal: Path, **sampling: Any) -> list[Request]:
    found = recorded(journal)
    return [
        Request(
            request_id=f"r{turn}",
            ids=generation.stream.tokens.ids[: generation.start],
            sampling=SamplingParams(**({"max_tokens": 500} | sampling)),
            trajectory_id=trajectory_id,
            context=context,
            turn=turn,
        )
        for (trajectory_id, context, turn), generation in found.items()
    ]


async def answers(engine: ReplayEngine, asked: list[Request]) -> dict[str, tuple[list[int], str | None, str | None]]:
    found: dict[str, tuple[list[int], str | None, str | None]] = {}
    async for chunk in engine.generate(asked):
        ids, _, _ = found.get(chunk.request_id, ([], None, None))
        assert len(chunk.ids) == len(chunk.logprobs)
        found[chunk.request_id] = (ids + list(chunk.ids), chunk.finish_reason, chunk.error)
    return found


async def test_shorter_and_continued_requests(journal: Path) -> None:
    engine = replay(journal)
    whole = await answers(engine, requests(journal))
    assert [reason for _, reason, _ in whole.values()] == ["stop", "stop"]
    short = await answers(engine, requests(journal, max_tokens=3))
    assert short == {name: (ids[:3], "length", None) for name, (ids, _, _) in whole.items()}
    rest = [r.continued(as_ids(whole[r.request_id][0][:3]), r.request_id) for r in requests(journal)]
    assert await answers(engine, rest) == {name: (ids[3:], "stop", None) for name, (ids, _, _) in whole.items()}
    wrong = [r.continued(as_ids([5, 5, 5]), r.request_id) for r in requests(journal)]
    assert all("ReplayDiverged" in str(error) for _, _, error in (await answers(engine, wrong)).values())


async def test_a_held_replay_answers_later_or_never(journal: Path) -> None:
    engine = replay(journal)
    first, second = requests(journal)
    await engine.pause()
    await engine.sleep()
    one, two = asyncio.ensure_future(answers(engine, [first])), asyncio.ensure_future(answers(engine, [second]))
    await asyncio.sleep(0)
    assert engine.load().waiting == 2
    await engine.abort(["r1", "unknown"])
    assert await two == {"r1": ([], "abort", None)}
    await engine.wake()
    assert engine.load().waiting == 1
    await engine.resume()
    assert (await one)["r0"][1] == "stop"
    await engine.pause()
    last = asyncio.ensure_future(answers(engine, [first]))
    await asyncio.sleep(0)
    await engine.aclose()
    assert await last == {"r0": ([], "abort", None)}
    with pytest.raises(EngineError, match="closed"):
        engine.generate([first])
    assert await engine.update_weights({}) == engine.weight_version == 1


def test_a_generation_that_the_run_cut_off_fails_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    agent = AGENT.model_copy(update={"limits": AGENT.limits.model_copy(update={"wall_seconds": 0.05})})
    engine = {"kind": "scripted", "turns": [{"text": "The answer is 3.", "chunks": 4, "delay": 0.02}]}
    with fr.Rollout(agent, engine, journal=Journal(path)) as rollout:
        run_virtual(rollout.arun(["What is 1 + 2?"]))
        assert rollout.journal is not None
        rollout.journal.close()
    (before,) = read(path)
    assert before.stop_reason == "limit:wall_seconds"
    after = replayed(path)
    assert after.stop_reason == "failed:ReplayCutOff"
    assert after.streams[0].tokens.ids == before.streams[0].tokens.ids


def test_what_cannot_be_replayed_says_why(journal: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nothing to replay: there is no journal at .*nowhere"):
        replay(tmp_path / "nowhere")
    with pytest.raises(EngineError, match="says nothing of an engine 'polcy'; did you mean 'policy'"):
        replay(journal, "polcy")
    with Journal(tmp_path / "bare.sqlite"):
        pass
    with pytest.raises(EngineError, match="says nothing of an engine 'policy'"):
        replay(tmp_path / "bare.sqlite")
    assert json.loads(json.dumps(replay(journal).max_context)) == 32_768
