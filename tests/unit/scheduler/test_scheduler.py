"""The scheduler: cancellation, suspension, sub-agents, pauses, weight updates, rewards, hooks, bad handlers."""

import asyncio
import gc
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsm_rollout.chat.markers import MarkerEncoder
from fsm_rollout.concurrency import garbage_collection
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.environment.rewards import Reward
from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.summary import summarize
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.tools import ToolContext
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.embedded import tokenizer
from tests.laws.world import call
from tests.runs import (
    ASKS,
    ECHOES,
    LIMITS,
    SINGLE,
    SLOW,
    TOOLS,
    Bench,
    agent,
    asking,
    changed,
    ends,
    only,
    prompts,
    results,
    rows,
    run,
)

pytestmark = pytest.mark.virtual_time

HERE = "tests.unit.scheduler.test_scheduler"


def test_cancel_keeps_what_was_sampled_and_leaves_the_others_alone() -> None:
    def cancel_both(bench: Bench) -> None:
        assert bench.scheduler.cancel("p0/0")
        assert not bench.scheduler.cancel("nobody")

    groups, bench = run(agent(), [SLOW], 2, at={25.0: cancel_both})
    assert ends(groups) == {"p0/0": "cancelled", "p1/0": "answered"}
    cancelled, other = sorted((t for g in groups for t in g.trajectories), key=lambda t: t.trajectory_id)
    assert 0 < cancelled.trained_tokens == len(bench.sampled) - other.trained_tokens
    assert bench.engine.load().running == 0


def ran_twice(trajectory: Trajectory) -> bool:
    return trajectory.visits[trajectory.state] == 2


@pytest.mark.parametrize(
    "frame", [{"max_visits": 2}, {"limits": {"assistant_turns": 2, "tool_calls": 6, "wall_seconds": 1000.0}}]
)
def test_a_visit_that_a_limit_kept_from_running_is_counted_as_an_entry_alone(frame: dict[str, Any]) -> None:
    routed = changed(
        TOOLS,
        f"GENERATING limit_reached TELLING if {HERE}:ran_twice",
        "TELLING written TERMINATED as told",
        GENERATING={key: value for key, value in frame.items() if key == "max_visits"},
        TELLING={"handler": "write", "prompt": "It ran {{ visits.GENERATING }} times.", "max_visits": 1},
    )
    limits = {key: value for key, value in frame.items() if key == "limits"}
    trajectory = only(run(agent(routed, tools=ECHOES, **limits), lambda request: call("echo", "x"))[0])
    assert trajectory.stop_reason == "told", trajectory.detail
    assert trajectory.messages[-1]["content"] == "It ran 2 times."
    assert (trajectory.visits["GENERATING"], trajectory.entries["GENERATING"], trajectory.generations) == (2, 3, 2)
    assert summarize([trajectory], wall_seconds=1.0)["states"]["GENERATING"] == 2


def test_what_lives_before_a_run_is_not_looked_through_by_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage_collection, "_calm", 0)  # whatever a test before this one has left open
    gc.unfreeze()
    frozen: list[int] = []
    run(agent(), ["text"], listeners=[lambda trajectory, event: frozen.append(gc.get_freeze_count())])
    assert min(frozen) > 1000
    assert gc.get_freeze_count() < min(frozen)


async def test_closing_the_iterator_cancels_the_rest_and_leaves_nothing_running() -> None:
    seen: list[Trajectory] = []
    engine = ScriptedEngine(
        lambda r: Turn(text="x", delay=1.0 if "p0" in r.trajectory_id else 1e6), tokenizer=tokenizer()
    )
    graph = agent(SINGLE, states={"PENDING": {}, "GENERATING": {"timeout": 1e7}}, limits={"assistant_turns": 1})
    scheduler = Scheduler({"a": graph}, {"policy": EngineClient(engine)}, listeners=[lambda t, e: seen.append(t)])
    iterator = scheduler.run(prompts(3))
    first = await anext(iterator)
    assert first.group_id == "p0"
    await iterator.aclose()
    assert len(asyncio.all_tasks()) == 1
    assert {t.trajectory_id: t.stop_reason for t in seen} == {
        "p0/0": "answered", "p1/0": "cancelled", "p2/0": "cancelled",
    }  # fmt: skip
    assert engine.load().running == 0


async def test_a_second_run_at_once_is_refused_but_one_that_is_left_behind_is_closed_first() -> None:
    """Nobody can close a generator that nobody holds any more, so the next run waits until it is closed."""
    engine = ScriptedEngine(lambda r: Turn(text="x", delay=1.0), tokenizer=tokenizer())
    scheduler = Scheduler({"a": agent()}, {"policy": EngineClient(engine)})
    first = scheduler.run(prompts(2), 2)
    await anext(first)
    with pytest.raises(ConfigError, match=r"a run is under way already, and there is one at a time; iterate it"):
        await anext(scheduler.run(prompts(1)))
    rest = [group.group_id async for group in first]
    async for _ in scheduler.run(prompts(3), 1):
        break
    assert (rest, [group.group_id async for group in scheduler.run(prompts(1), 1)]) == (["p1"], ["p0"])


@pytest.mark.parametrize("named", ["", " as accepted"])
def test_a_sub_agent_is_a_trajectory_of_the_same_group(named: str) -> None:
    def script(request: Request) -> str:
        return "It is blue." if request.agent == "child" else [ASKS, "Blue."][request.turn]

    # Its own name for its end makes it no failure.
    lines = rows("PENDING prompted GENERATING", f"GENERATING generated TERMINATED{named}")
    child = agent(agent="child", description="Knows.", transitions=lines)
    (group,), _ = run(asking(child), script, reward=Reward(lambda trajectory: 0.5))
    (parent,), (helper,) = group.trajectories, group.children
    assert (helper.parent_id, helper.group_id, helper.agent) == ("p0/0", "p0", "child")
    assert helper.trajectory_id != parent.trajectory_id
    assert [m["content"] for m in helper.prompt_messages] == ["Think."]
    assert results(parent) == ["It is blue."]
    assert parent.score == helper.score == 0.5


def test_cancelling_the_parent_ends_the_child_too() -> None:
    groups, bench = run(
        asking(agent(agent="child"), timeout=1000.0),
        lambda r: Turn(text="late", delay=50.0) if r.agent == "child" else Turn(text=ASKS), at={5.0: Bench.cancel},
    )  # fmt: skip
    assert [t.stop_reason for t in groups[0].all] == ["cancelled", "cancelled"]
    assert bench.engine.load().running == 0


def test_timeouts_stand_still_while_the_engine_is_paused_and_tokens_carry_their_weights() -> None:
    async def pause(bench: Bench) -> None:
        dispatcher = bench.scheduler.clients["policy"]
        await dispatcher.pause()
        await asyncio.sleep(1e5)
        await bench.engine.update_weights("new", 7)
        await dispatcher.resume()

    trajectory = only(run(agent(limits={"assistant_turns": 1}), [SLOW], at={15.0: pause})[0])
    assert trajectory.stop_reason == "answered"
    versions = trajectory.streams[0].tokens.response_versions().tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 7}


@pytest.mark.parametrize(
    ("limits", "turn", "reason"),
    [
        ({"wall_seconds": 5.0}, SLOW, "limit:wall_seconds"),
        ({"wall_seconds": 100.0}, Turn(text="", hang=True), "limit:wall_seconds"),  # both are due: the wall comes first
        ({"context_tokens": 20}, SLOW, "limit:context_tokens"),
        ({"context_tokens": 5}, SLOW, "prompt_too_long"),
    ],
)
def test_every_end_has_its_reason(limits: dict[str, float], turn: Turn, reason: str) -> None:
    assert only(run(agent(limits={"assistant_turns": 1, **limits}), [turn])[0]).stop_reason == reason


def test_a_turn_cut_by_its_own_bound_is_truncated_and_may_go_on() -> None:
    short = {"GENERATING": {"sampling": {"max_tokens": 3}}}
    groups, _ = run(agent(changed(SINGLE, **short)), ["one two three four five six seven"])
    assert only(groups).stop_reason == "truncated"
    going_on = agent(changed(SINGLE, "GENERATING truncated GENERATING", **short))
    groups, bench = run(going_on, lambda r: Turn(text=f"part {r.turn} " * 3))
    trajectory = only(groups)
    assert trajectory.stop_reason == "limit:assistant_turns"
    (stream,) = trajectory.streams
    assert [m["role"] for m in stream.messages] == ["user", "assistant"], "one turn, however often it was cut"
    inputs = [request.ids.tolist() for request in bench.asked]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(inputs))
    assert len(inputs) == 6


def test_results_are_told_in_the_order_of_the_calls() -> None:
    """Two calls at once, the second of which ends first; beside them a broken one and one that raises."""
    tools = {name: {"use": f"tests.law_tools:{name}", "timeout": 50.0} for name in ("echo", "fail")}
    turn = "\n".join(
        [call("echo", "abcd"), call("echo", "ab"), "<tool_call>\n{broken\n</tool_call>", call("fail", "no")]
    )
    trajectory = only(run(agent(TOOLS, tools=tools), [turn, "done"])[0])
    tool_texts = results(trajectory)
    assert tool_texts[:2] == ["abcd", "ab"]
    assert [text.startswith("error:") for text in tool_texts[2:]] == [True, True]
    assert "ValueError: no" in tool_texts[3]
    assert trajectory.spent == {"assistant_turns": 2, "tool_calls": 4, "bad_calls": 1}, "not the failing one"
    assert trajectory.tool_rewards == [0.2, 0.4], "in the order in which they came"


def test_a_finished_turn_never_goes_on() -> None:
    """Nothing was said after it, so there is nothing that a template could put between the two."""
    turning = rows("PENDING prompted GENERATING", "GENERATING generated GENERATING")
    groups, bench = run(agent(SINGLE, transitions=turning), ["one", "two"])
    assert only(groups).stop_reason == "failed:ChatTemplateError"
    assert len(bench.asked) == 1


def test_glue_that_does_not_fit_is_not_written() -> None:
    graph = agent(TOOLS, tools=ECHOES, limits={**LIMITS, "response_tokens": 60})
    trajectory = only(run(graph, [call("echo", "word " * 60), "never"])[0])
    assert trajectory.stop_reason == "limit:response_tokens"
    assert trajectory.response_tokens == trajectory.trained_tokens


def test_limits_and_sampling_may_be_lowered_by_a_prompt_only() -> None:
    listed = prompts(1, limits={"response_tokens": 4}, sampling={"max_tokens": 100})
    short = changed(SINGLE, GENERATING={"sampling": {"max_tokens": 6}})
    groups, bench = run(agent(short, limits={"assistant_turns": 1, "response_tokens": 50}), [SLOW], listed)
    assert only(groups).stop_reason == "limit:response_tokens"
    assert [request.sampling.max_tokens for request in bench.asked] == [4]


def test_a_reward_that_fails_for_a_sample_leaves_that_one_without_a_score_and_says_why() -> None:
    groups, _ = run(agent(), ["x"], n=2, reward=Reward(lambda trajectory: 1.0 / trajectory.sample))
    missing, scored = groups[0].trajectories
    assert (missing.score, scored.score, scored.unscored) == (None, 1.0, None)
    assert str(missing.unscored).startswith("ZeroDivisionError")
    assert "ZeroDivisionError: float division by zero (at test_scheduler.py:" in groups[0].reward_errors[0]


def test_what_a_reward_measures_stays_with_the_trajectory_and_those_that_served_it() -> None:
    def rich(trajectory: Trajectory) -> dict[str, object]:
        return {"score": 0.5, "length": 3, "why": "fine"}

    groups, _ = run(agent(), ["x"], n=2, reward=Reward(rich))
    for trajectory in groups[0].all:
        assert (trajectory.score, trajectory.reward_parts) == (0.5, {"length": 3.0, "why": "fine"})


def test_a_failing_listener_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def bad(trajectory: Trajectory, event: object) -> None:
        raise RuntimeError("listener")

    groups, _ = run(agent(), ["x"], listeners=[bad])
    assert only(groups).stop_reason == "answered"
    assert "listener failed" in caplog.text


def test_prompts_choose_their_agent() -> None:
    engine = ScriptedEngine(lambda r: r.agent, tokenizer=tokenizer())

    async def main(names: list[str | None]) -> list[str]:
        agents = {name: agent(SINGLE, agent=name) for name in ("one", "two")}
        scheduler = Scheduler(agents, {"policy": EngineClient(engine)})
        listed = [prompts(1, agent=name)[0].model_copy(update={"prompt_id": str(i)}) for i, name in enumerate(names)]
        return [t.text async for g in scheduler.run(listed) for t in g.trajectories]

    assert sorted(run_virtual(main(["one", "two"]))) == ["one", "two"]
    with pytest.raises(ConfigError, match="did you mean 'two'"):
        run_virtual(main(["twoo"]))


def test_prompt_ids_name_groups_so_they_differ() -> None:
    with pytest.raises(ConfigError, match="'p0' is used twice"):
        run(agent(), ["x"], [*prompts(), *prompts()])
    with pytest.raises(ConfigError, match="at least 1"):
        run(agent(), ["x"], n=0)


def test_a_model_that_sees_no_pictures_is_found_out_before_anything_runs() -> None:
    picture = {"type": "image", "image": np.zeros((2, 2, 3), np.uint8)}
    shown = Prompt(prompt_id="shown", messages=[{"role": "user", "content": [picture]}])
    scheduler = Bench(agent(), ["x"]).scheduler
    with pytest.raises(ConfigError, match="prompt 'shown' shows a picture, which the model of engine 'policy' does"):
        scheduler.check([*prompts(), shown])


def test_a_stopped_scheduler_can_run_again() -> None:
    groups, bench = run(agent(), [SLOW], at={5.0: lambda bench: bench.scheduler.stop()})
    assert [only(groups).stop_reason, only(bench.go(1, 1)).stop_reason] == ["cancelled", "answered"]


def test_rewards_that_hang_or_cancel_themselves_lose_a_score_not_a_group() -> None:
    async def hang(trajectory: Trajectory) -> float:
        await asyncio.Event().wait()
        return 1.0

    async def cancelled(trajectory: Trajectory) -> float:
        raise asyncio.CancelledError

    for function in (hang, cancelled):
        groups, _ = run(agent(), ["x"], reward=Reward(function))
        assert only(groups).score is None
        assert len(groups[0].reward_errors) == 1


def test_only_ended_trajectories_are_scored() -> None:
    groups, _ = run(agent(), [SLOW], at={15.0: Bench.stop}, reward=Reward(lambda trajectory: 1.0))
    assert only(groups).score is None


@pytest.mark.parametrize("value", ['"\\ud83d"', "99999999999999999999999"])
def test_arguments_that_cannot_be_written_down_are_a_broken_call(value: str) -> None:
    text = '<tool_call>\n{"name": "echo", "arguments": {"text": VALUE}}\n</tool_call>'.replace("VALUE", value)
    trajectory = only(run(agent(TOOLS, tools=ECHOES), [text, "done"])[0])
    assert trajectory.stop_reason == "answered"
    assert trajectory.spent["bad_calls"] == 1


def test_a_tool_format_that_fails_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("parse")

    monkeypatch.setattr("fsm_rollout.states.generation._read_turn", broken)
    groups, bench = run(agent(), ["one two three"])
    assert only(groups).stop_reason == "failed:ZeroDivisionError"
    assert 0 < only(groups).trained_tokens == len(bench.sampled)


def test_split_history_opens_a_stream_at_each_user_turn() -> None:
    """Rendered afresh, each with the whole conversation as its prompt; every sampled token is trained exactly once."""
    lines = rows(
        "PENDING prompted GENERATING", "GENERATING generated INTERACTING", "INTERACTING replied GENERATING",
        "INTERACTING interaction_done TERMINATED",
    )  # fmt: skip
    states = {"PENDING": {}, "GENERATING": {"timeout": 100.0}, "INTERACTING": {"timeout": 100.0}}
    graph = agent(
        {"states": states, "transitions": lines},
        contexts={"main": {"history": "split"}},
        limits={"assistant_turns": 4, "user_turns": 4},
        interaction={"use": "tests.law_tools:Chatty", "kwargs": {"replies": 2}},
    )
    trajectory = only(run(graph, ["one", "two", "three"])[0])
    decode = tokenizer().decode
    assert [decode(stream.tokens.response_ids()) for stream in trajectory.streams] == [
        "one<|im_end|>", "two<|im_end|>", "three<|im_end|>",
    ]  # fmt: skip
    assert "one<|im_end|>" in decode(trajectory.streams[1].tokens.prompt_ids())
    assert trajectory.trained_tokens == trajectory.response_tokens


def test_a_split_history_goes_on_where_no_user_speaks() -> None:
    graph = agent(TOOLS, tools=ECHOES, contexts={"main": {"history": "split"}})
    trajectory = only(run(graph, [call("echo", "x"), "done"])[0])
    assert (trajectory.stop_reason, len(trajectory.streams)) == ("answered", 1)


def test_a_context_on_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="engine 'nobody' is not one of the run's"):
        Bench(agent(contexts={"main": {"engine": "nobody"}}), [])


async def whoami(context: ToolContext) -> str:
    """Say who calls."""
    return f"{context.group_id} {context.trajectory_id}"


def test_tools_are_told_whose_call_it_is() -> None:
    ask = '<tool_call>\n{"name": "who", "arguments": {}}\n</tool_call>'
    graph = agent(TOOLS, tools={"who": {"use": f"{HERE}:whoami", "timeout": 5.0}})
    assert results(only(run(graph, [ask, "done"])[0])) == ["p0 p0/0"]


def test_a_journal_holds_an_id_once(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as journal:
        bench = Bench(agent(), ["x"], journal=journal)
        ids = [group.group_id for _ in range(3) for group in bench.go(1, 1)]
    assert ids == ["p0", "p0#2", "p0#3"], "the next epoch's are told apart"


@pytest.mark.parametrize("response_tokens", [None, 40])
async def test_long_texts_are_encoded_beside_the_event_loop(
    response_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and tool results alike: whoever else runs does not wait for them."""
    encode, on_the_loop, aside = MarkerEncoder.encode, list[int](), list[int]()
    loop_thread = threading.get_ident()

    def noted(self: MarkerEncoder, text: str) -> list[int]:
        (on_the_loop if threading.get_ident() == loop_thread else aside).append(len(text))
        return encode(self, text)

    monkeypatch.setattr(MarkerEncoder, "encode", noted)
    long_prompt = Prompt(prompt_id="p", messages=({"role": "user", "content": "word " * 6_000},))
    tools = {"lots": {"use": "tests.law_tools:lots", "timeout": 50.0, "response_tokens": response_tokens}}
    counted = '<tool_call>\n{"name": "lots", "arguments": {"count": 6000}}\n</tool_call>'
    engine = ScriptedEngine([counted, "done"], tokenizer=tokenizer(), log=True, max_context=200_000)
    graph = agent(TOOLS, tools=tools)
    scheduler = Scheduler({graph.agent: graph}, {"policy": EngineClient(engine)})
    trajectory = only([group async for group in scheduler.run([long_prompt], 1)])
    assert trajectory.stop_reason == "answered"
    assert max(on_the_loop, default=0) < 20_000
    assert len([length for length in aside if length > 30_000]) >= (2 if response_tokens is None else 1)
