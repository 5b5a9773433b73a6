"""The Python API: plain, async, streaming, in a running loop; what it owns it closes."""

import asyncio
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsm_rollout as fr
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.replica import Placement
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.engines.scripted.replay import ReplayEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.report.recording import open_run
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.trajectory.events import Generated
from fsm_rollout.trajectory.journal import Journal, metadata
from tests.cases import FILES
from tests.embedded import tokenizer
from tests.kit import CONFIGS
from tests.rollouts import SCRIPTED, Made, agent
from tests.routing import RoutingEngine, experts_at
from tests.runs import agent as graph
from tests.runs import asking, rows


def test_plain_run_gives_a_batch_in_the_order_of_the_prompts(made: Made) -> None:
    with made(agent(), SCRIPTED) as rollout:
        batch = rollout.run(["one", "two", "three"], n=2)
    assert batch.tensordict["group_id"] == ["0", "0", "1", "1", "2", "2"]
    assert batch.tensordict["trajectory_id"] == ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1"]
    assert batch.tensordict["stop_reason"] == ["answered"] * 6


def test_the_log_says_how_many_samples_have_a_score_and_why_the_first_has_none(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    def reward(trajectory: fr.Trajectory) -> float:
        return {"one": 0.5, "two": 1.0}[trajectory.group_id]

    prompts = [fr.Prompt(messages=[{"role": "user", "content": "hm"}], prompt_id=name) for name in ("one", "two", "x")]
    with made(agent(), SCRIPTED, reward=reward) as rollout:
        rollout.run(prompts, n=1)
    assert "scored 2 of 3; the first without a score: x/0: KeyError: 'x'" in caplog.text


async def test_a_paused_policy_samples_nothing_until_it_is_resumed(made: Made) -> None:
    begun = threading.Event()
    async with made(agent(), SCRIPTED, on_event=[lambda *_: begun.set()]) as rollout:
        await rollout.pause_sampling()
        run = asyncio.create_task(rollout.arun(["one", "two"], n=2))
        await asyncio.to_thread(begun.wait)
        assert await rollout.aupdate_weights("newer") == 1
        await rollout.resume_sampling()
        batch = await run
    assert set(batch.tensordict["weight_versions"][batch.tensordict["response_mask"].bool()].tolist()) == {1}


async def test_a_trajectory_is_cancelled_by_its_id(made: Made) -> None:
    begun = threading.Event()
    slow = {"kind": "scripted", "turns": [{"text": "Four.", "delay": 36_000}]}
    async with made(agent(), slow, on_event=[lambda *_: begun.set()]) as rollout:
        groups = rollout.stream(["one"], n=2)
        first = asyncio.ensure_future(anext(groups))
        await asyncio.to_thread(begun.wait)
        assert [await rollout.acancel(name) for name in ("0/0", "0/1", "0/2")] == [True, True, False]
        assert [trajectory.stop_reason for trajectory in (await first).trajectories] == ["cancelled"] * 2


def test_a_rollout_and_its_groups_say_what_they_are_in_one_line(made: Made) -> None:
    with made(agent(), SCRIPTED, reward=lambda trajectory: 0.5) as rollout:
        assert repr(rollout) == "<Rollout of single_turn; engines: policy scripted>"

        async def first() -> list[fr.Group]:
            return [group async for group in rollout.stream(["one"], n=2)]

        (group,) = asyncio.run(first())
        assert repr(group) == "<Group 0: 2 of 2 samples ended, scores 0.5, 0.5; delivered>"
    assert repr(rollout).endswith("; closed>")


def test_a_plain_loop_over_the_stream_is_told_to_be_async(made: Made) -> None:
    with made(agent(), SCRIPTED) as rollout, pytest.raises(TypeError, match="`async for group in rollout"):
        for _ in rollout.stream(["one"]):  # type: ignore[attr-defined]
            pass


def arithmetic(prompts: int, n: int, **engine: int) -> fr.TrajectoryBatch:
    options = {"kind": "transformers", "model": "embedded", "threads": 1, **engine}
    tool_user = fr.load_agent(CONFIGS / "agents/tool_user.yaml")
    with fr.Rollout(tool_user, options, reward="fsm_rollout.rewards:exact_answer") as rollout:
        return rollout.run(fr.read_prompts(CONFIGS / "data/arithmetic_train.jsonl", limit=prompts), n=n)


def test_samples_beyond_what_the_engine_may_run_queue_and_have_the_same_rows() -> None:
    crowded, roomy = arithmetic(2, 3, max_running=2), arithmetic(2, 3)
    assert len(crowded) == 6
    for name in ("input_ids", "response_mask", "trajectory_id", "group_index", "trajectory_scores"):
        assert np.array_equal(crowded.tensordict[name], roomy.tensordict[name]), name
    logprobs = [batch.tensordict["rollout_log_probs"].numpy() for batch in (crowded, roomy)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


def test_routed_experts_are_a_column_and_each_turn_says_those_of_its_own_tokens(tmp_path: Path) -> None:
    """Over several turns, one of them cut and continued; a replay of the journal has them too."""
    call = '<tool_call>\n{"name": "calculate", "arguments": {"left": 1, "operator": "+", "right": 2}}\n</tool_call>'
    turns = [Turn(text=call, chunks=3), "It is three, and that is a long answer.", "You are welcome."]
    graph = fr.load_agent(CONFIGS / "agents/tool_user.yaml", ["states.GENERATING.sampling.max_tokens=60"])
    engine = RoutingEngine(turns, tokenizer=tokenizer())
    prompt = {"messages": [{"role": "user", "content": "1 + 2?"}], "interaction_kwargs": {"turns": ["Thanks."]}}
    new: list[int] = []

    def listen(trajectory: Any, event: Any) -> None:
        if isinstance(event, Generated):
            new.extend(len(note.counts) for note in event.notes)

    options: dict[str, Any] = {"on_event": [listen]}
    with Journal(tmp_path / "journal.sqlite") as journal, fr.Rollout(graph, engine, journal=journal, **options) as run:
        batch = run.run([prompt])
    (row,) = batch.rows()
    assert row.num_turns > 5
    assert row.routed_experts[:-1].tolist() == experts_at(np.arange(len(row.routed_experts) - 1)).tolist()
    assert (row.routed_experts[-1] == -1).all(), "the last token was never fed to the model"
    assert sum(new) == len(row.routed_experts) - 1, "no turn says again what an earlier one did"
    assert len(new) == batch.tensordict["sampling"][0][-1][0] + 1
    again = ReplayEngine(
        tmp_path / "journal.sqlite", tokenizer=tokenizer(), max_context=engine.max_context, eos_ids=engine.eos_ids
    )
    with fr.Rollout(graph, again) as rollout:
        assert rollout.run([prompt]).tensordict["routed_experts"].equal(batch.tensordict["routed_experts"])


def test_prompts_that_no_engine_can_take_are_counted_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    batch = arithmetic(2, 2, max_context=50)
    assert (len(batch), batch.figures["failed_data"]) == (0, 4)
    assert "4 of 4 trajectories failed, and not through the policy; the first: 0/0: " in caplog.text
    why = r"a prompt of \d\d tokens leaves no room to answer; the engine's window is 50 \(its max_context\)"
    assert re.search(why, caplog.text)


def test_plain_run_works_where_a_loop_is_running(made: Made) -> None:
    """As in a notebook."""

    async def notebook() -> int:
        with made(agent(), SCRIPTED) as rollout:
            return len(rollout.run(["one"], n=3))

    assert asyncio.run(notebook()) == 3


async def test_async_run_and_stream(made: Made) -> None:
    rollout = made(agent(), SCRIPTED)
    batch = await rollout.arun(["one", "two"], packed=True)
    seen = [group.group_id async for group in rollout.stream([{"messages": [{"role": "user", "content": "x"}]}])]
    await rollout.aclose()
    assert (len(batch), seen) == (2, ["2"])  # the third prompt of this rollout


def test_it_closes_what_it_built_and_only_that() -> None:
    mine = fr.ScriptedEngine(["yes"], tokenizer=tokenizer())
    before = set(threading.enumerate())
    with fr.Rollout(agent(), mine, engines={"judge": SCRIPTED}) as rollout:
        rollout.run(["one"])
        built = rollout.engines["judge"]
    rollout.close()
    for thread in set(threading.enumerate()) - before:  # it is about to end
        thread.join(60)
        assert not thread.is_alive()
    assert len(fr.Rollout(agent(), mine).run(["again"])) == 1
    assert built.replicas[0].engine is None


def test_several_agents_and_validation_sampling(made: Made) -> None:
    engine = fr.ScriptedEngine(lambda request: request.agent, tokenizer=tokenizer(), log=True)
    other = agent().model_copy(update={"agent": "other"})
    rollout = made(
        {"a": agent(), "b": other}, engine, validate=True, sampling={"temperature": 0.7, "top_k": 5},
        validation_sampling={"temperature": 0.0},
    )  # fmt: skip
    message = [{"role": "user", "content": "?"}]
    batch = rollout.run([{"messages": message, "agent": "b"}, {"messages": message, "agent": "a"}])
    rollout.close()
    assert batch.tensordict["agent"] == ["other", "single_turn"]
    asked = [line.what.sampling for line in engine.log if hasattr(line.what, "sampling")]
    assert {(s.temperature, s.top_k) for s in asked} == {(0.0, 5)}


USER_AGENT = FILES["chats with a model"]


async def test_a_model_may_be_the_user(tmp_path: Path) -> None:
    """Its text enters the policy's stream as environment; what it was asked enters no stream."""
    (tmp_path / "chat.yaml").write_text(USER_AGENT, "utf-8")
    user = fr.ScriptedEngine(["And then?", "Why?"], tokenizer=tokenizer(), log=True)
    groups: list[Any] = []
    rollout = fr.Rollout(fr.load_agent(tmp_path / "chat.yaml"), SCRIPTED | {"turns": ["A.", "B.", "C."]},
                         engines={"user": user})  # fmt: skip
    groups.extend([group async for group in rollout.stream(["Tell me."])])
    await rollout.aclose()
    (trajectory,) = groups[0].trajectories
    assert trajectory.stop_reason == "interaction_done"
    (stream,) = trajectory.streams
    contents = [(m["role"], m["content"]) for m in stream.messages]
    assert contents == [
        ("user", "Tell me."), ("assistant", "A."), ("user", "And then?"), ("assistant", "B."), ("user", "Why?"),
        ("assistant", "C."),
    ]  # fmt: skip
    trained = tokenizer().decode(stream.tokens.response_ids()[stream.tokens.response_mask() == 1])
    assert trained == "A.<|im_end|>B.<|im_end|>C.<|im_end|>"
    asked = [tokenizer().decode(line.what.ids) for line in user.log if hasattr(line.what, "sampling")]
    assert "<|im_start|>user\nA.<|im_end|>\n<|im_start|>assistant\n" in asked[0]


def test_validation_is_greedy_unless_said_otherwise() -> None:
    engine = fr.ScriptedEngine(["x"], tokenizer=tokenizer(), log=True)
    rollout = fr.Rollout(agent(), engine, validate=True, sampling={"temperature": 0.7})
    rollout.run(["?"])
    rollout.close()
    assert [line.what.sampling.temperature for line in engine.log if hasattr(line.what, "sampling")] == [0.0]


@pytest.mark.parametrize("built", [True, False], ids=["built by the rollout", "an engine of one's own"])
def test_a_journal_knows_enough_to_be_looked_at_later(tmp_path: Path, built: bool) -> None:
    spec: Any = {"kind": "scripted", "turns": ["Four."]}
    engine = spec if built else ScriptedEngine(["Four."], tokenizer=tokenizer())
    with (
        Journal(tmp_path / "mine.sqlite", {"agents": {}, "mine": 1}) as journal,
        fr.Rollout(agent(), engine, journal=journal) as rollout,
    ):
        rollout.run(["What is 2 + 2?"])
    run = open_run(tmp_path / "mine.sqlite")
    assert metadata(tmp_path / "mine.sqlite")["mine"] == 1
    assert run.agents == {}, "what the journal was told before stays"
    texts = run.texts("policy")
    assert texts is not None, run.notes
    (recording,) = run.recordings()
    (stream,) = recording.trajectory.streams
    assert "Four." in "".join(texts.vocabulary(stream.tokens.ids)[id_] for id_ in stream.tokens.ids)


def test_a_journal_without_metadata_gets_the_agents(tmp_path: Path) -> None:
    engine = {"kind": "scripted", "turns": ["Four."]}
    with Journal(tmp_path / "mine.sqlite") as journal, fr.Rollout(agent(), engine, journal=journal) as rollout:
        rollout.run(["What is 2 + 2?"])
    assert open_run(tmp_path / "mine.sqlite").agents == {agent().agent: agent()}


def test_states_have_the_same_numbers_in_every_step(made: Made) -> None:
    """Whichever states a step has come through, and those of sub-agents too."""
    helping = {"PENDING": {}, "HELPING": {"handler": "generate", "timeout": 9.0}}
    lines = rows("PENDING prompted HELPING", "HELPING generated TERMINATED")
    helper = graph({"states": helping, "transitions": lines}, agent="helper")
    with made(asking(helper), SCRIPTED) as rollout:
        names = rollout.run(["a"]).state_names
    assert names == ("PENDING", "HELPING", "GENERATING", "PROCESSING_TOOLS")


def test_an_async_rollout_closes_what_it_built(made: Made) -> None:
    async def main() -> fr.Rollout:
        async with made(agent(), SCRIPTED) as rollout:
            assert len(await rollout.arun(["a"])) == 1
        return rollout

    with pytest.raises(EngineError, match="is closed"):
        asyncio.run(main()).run(["b"])


def evens(trajectory: fr.Trajectory) -> float | None:
    """Sample 0 is right, sample 1 wrong, sample 2 has no score; the prompt "same" is always right."""
    if trajectory.prompt_messages[0]["content"] == "same":
        return 1.0
    return [1.0, 0.0, None][trajectory.sample % 3]


def test_an_evaluation_is_not_filtered_and_leaves_the_training_alone(made: Made) -> None:
    engine = fr.ScriptedEngine(lambda request: request.group_id, tokenizer=tokenizer(), log=True)
    with made(agent(), engine, reward=evens, group_filter="fsm_rollout.rewards:scores_differ") as rollout:
        training = rollout.run(fr.endless_prompts(["differ"]), n=2, target_groups=1, over_sample=3)
        carried = [group.group_id for group in rollout.carried]
        evaluated = rollout.evaluate(["same", "same", "differ"], n=1)
        again = rollout.evaluate(["same"], n=3, sampling={"temperature": 1.0, "top_k": 7})
        assert [group.group_id for group in rollout.carried] == carried != []
        goes_on = rollout.run([], n=2, target_groups=1)
    assert set(evaluated.tensordict["group_id"]) == {"evaluation/0", "evaluation/1", "evaluation/2"}
    assert (len(evaluated), evaluated.score_mean, evaluated.dropped) == (3, 1.0, {})
    assert (len(again), again.score_mean) == (3, 1.0)
    assert [row.sampling[0][1:] for row in (*evaluated.rows(), *again.rows())] == [[0.0, 1.0, 0]] * 3 + [[1, 1, 7]] * 3
    assert len(training) == len(goes_on) == 2
    assert goes_on.tensordict["group_id"][0] in carried


def test_several_samples_of_an_evaluation_are_drawn_unless_it_says_otherwise(made: Made) -> None:
    engine = fr.ScriptedEngine(["a"], tokenizer=tokenizer())
    greedy, drawn = 0.0, 0.7

    def temperatures(rollout: fr.Rollout, **options: Any) -> set[float]:
        return {row.sampling[0][1] for row in rollout.evaluate(["same"], **options).rows()}

    with made(agent(), engine, sampling={"temperature": drawn}) as rollout:
        assert temperatures(rollout) == {greedy}
        assert temperatures(rollout, n=2) == {drawn}
        assert temperatures(rollout, n=2, sampling={"temperature": 0.2}) == {0.2}
    with made(agent(), engine, validation_sampling={"temperature": greedy}) as rollout:
        assert temperatures(rollout, n=2) == {greedy}


@pytest.mark.virtual_time
async def test_a_pause_of_the_engine_stops_the_clocks_of_an_evaluation_too() -> None:
    engine = fr.ScriptedEngine([Turn(text="one two three four", delay=2.0, chunks=4)], tokenizer=tokenizer())
    rollout = fr.Rollout(agent(), engine)
    client = rollout.clients["policy"]
    batches = []
    for seconds in (5, 0):  # 0: it begins while the engine is paused
        evaluation = asyncio.create_task(rollout.aevaluate(["same"]))
        await asyncio.sleep(seconds)
        await client.pause()
        await asyncio.sleep(90)  # a visit has 60 seconds
        await client.resume()
        batches.append(await evaluation)
    assert [batch.tensordict["stop_reason"][0] for batch in batches] == ["answered", "answered"]


def test_what_the_filter_turned_down_is_listed_and_counted(made: Made) -> None:
    engine = fr.ScriptedEngine(["four tokens or so"], tokenizer=tokenizer())
    with made(agent(), engine, reward=evens, group_filter="fsm_rollout.rewards:scores_differ") as rollout:
        batch = rollout.run(["same", "differ", "same"], n=3)
    assert batch.dropped == {"0": "filtered", "2": "filtered"}
    tokens = batch.tensordict["response_mask"].sum().item()
    figures = batch.figures
    assert (figures["groups"], figures["samples"], figures["unscored"], figures["score_mean"]) == (1, 3, 1, 0.5)
    assert (figures["dropped_groups"], figures["dropped_filtered"], figures["dropped_score_mean"]) == (2, 2, 1.0)
    assert (figures["sampled_tokens"], figures["dropped_sampled_tokens"]) == (tokens, 2 * tokens)
    assert "groups dropped: 2 (2 filtered)" in repr(batch)


def test_the_trainers_copy_is_its_own() -> None:
    model, own_tokenizer = fr.load_model("embedded:early")
    other, _ = fr.load_model("embedded:early")
    assert model.lm_head.weight.data_ptr() != other.lm_head.weight.data_ptr()
    assert own_tokenizer.get_vocab() == tokenizer().get_vocab()
    with pytest.raises(EngineError, match="did you mean 'early'"):
        fr.load_model("embedded:erly")


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_may_sleep_between_batches(replicas: int) -> None:
    """It is awake before the first, in each one and beside it, and from new weights on until the next one's end."""
    asleep: list[bool] = []

    def listen(trajectory: fr.Trajectory, event: object) -> None:
        if isinstance(event, Generated):
            asleep.append(is_asleep())

    spec = {**SCRIPTED, "sleep": "between_batches", "replicas": replicas}
    with fr.Rollout(agent(), spec, on_event=[listen]) as rollout:

        def is_asleep() -> bool:
            (state,) = {replica.engine._asleep for replica in rollout.engines["policy"].replicas}
            return bool(state)

        assert not is_asleep()
        for _ in range(2):
            assert len(rollout.run(["one", "two"])) == 2
            assert is_asleep()
            rollout.evaluate(["three"])
            assert is_asleep()
        rollout.update_weights({})
        assert not is_asleep()
        rollout.sleep()
        rollout.run(["four"])
        assert is_asleep()
    assert asleep == [False] * 5


def test_an_engine_sleeps_also_after_a_run_that_was_cancelled_twice() -> None:
    class SlowToAbort(ScriptedEngine):
        async def abort(self, request_ids: Iterable[str]) -> None:
            await asyncio.sleep(1.0)
            await super().abort(request_ids)

    async def body() -> tuple[set[object], bool]:
        engine = SlowToAbort([Turn(text="yes", delay=50.0)], tokenizer=tokenizer())
        pool = EnginePool(Placement(engine), sleeps=True)
        async with fr.Rollout(agent(), pool) as rollout:
            run = asyncio.create_task(rollout.arun(["one"]))
            await asyncio.sleep(5.0)
            run.cancel()
            await asyncio.sleep(0.5)
            run.cancel()
            await asyncio.wait([run])
            return pool.runs, engine._asleep

    assert run_virtual(body()) == (set(), True)
