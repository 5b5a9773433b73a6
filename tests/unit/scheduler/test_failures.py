"""Failures: whose they are, and that nothing but the policy's own is learned from."""

import asyncio
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.environment.rewards import Reward
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.errors import ConfigError, RunStopped
from fsm_rollout.scheduler.failure_policy import ENDS, EngineFailures, ToolFailures, failures_of
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.tools.bounded_call import ToolDied
from fsm_rollout.trajectory import journal
from fsm_rollout.trajectory.enums import FailureClass
from fsm_rollout.trajectory.events import Called
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.laws.world import call
from tests.runs import (
    ASKS,
    LIMITS,
    SINGLE,
    SLOW,
    TOOLS,
    Bench,
    agent,
    asking,
    changed,
    histories,
    only,
    prompts,
    results,
    rows,
    run,
)

ENDING = ENDS.model_copy(update={"tool": ToolFailures(do="end")})
HERE = "tests.unit.scheduler.test_failures"


def breaks(text: str) -> str:
    """Fail in one of several ways.

    Args:
        text: Which.
    """
    match text:
        case "down":
            raise ConnectionError("no route")
        case "dead":
            raise ToolDied("killed")
        case _:
            raise ValueError("a wrong argument")


class Raises(State):
    """Raises what its options say."""

    triggers: ClassVar = ("said",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        match trajectory.extra["how"]:
            case "memory":
                raise MemoryError
            case "hangs":
                await asyncio.Event().wait()
            case "is wrong":
                return Outcome("unheard of")
        raise KeyError("how")


class Crashing:
    """A user that raises."""

    async def reply(self, conversation: Conversation) -> Reply:
        raise RuntimeError("the simulator is down")


OWN = {
    "states": {"PENDING": {}, "OWN": {"handler": f"{HERE}:Raises", "timeout": 5.0, "max_visits": 1}},
    "transitions": rows("PENDING prompted OWN", "OWN said TERMINATED"),
}
TALKS = {
    "states": {"PENDING": {}, "INTERACTING": {"timeout": 5.0}},
    "interaction": {"use": f"{HERE}:Crashing"},
    "transitions": rows(
        "PENDING prompted INTERACTING", "INTERACTING replied TERMINATED", "INTERACTING interaction_done TERMINATED"
    ),
    "limits": {"user_turns": 2},
}
TOLD = {"breaks": {"use": f"{HERE}:breaks"}} | {name: {"use": f"tests.law_tools:{name}"} for name in ("hang", "refuse")}
HURRIED = changed(TOOLS, PROCESSING_TOOLS={"timeout": 5.0})
Frame = dict[str, Any]


@pytest.mark.parametrize(
    ("frame", "turn", "how", "reason", "failure"),
    [
        (SINGLE, "four", "", "answered", None),
        (SINGLE, SLOW, "", "limit:response_tokens", FailureClass.POLICY),
        (SINGLE, Turn(text="", hang=True), "", "timed_out", FailureClass.POLICY),
        (SINGLE, Turn(text="", error="Boom: no"), "", "failed:Boom", FailureClass.ENGINE),
        (SINGLE, Turn(text="", error="ReplicaLost: gone"), "", "failed:EngineError", FailureClass.INFRASTRUCTURE),
        (TOOLS, call("breaks", "down"), "", "failed:ToolError", FailureClass.TOOL),
        (TOOLS, call("breaks", "dead"), "", "failed:ToolError", FailureClass.INFRASTRUCTURE),
        (TOOLS, call("breaks", "wrong"), "", "failed:ToolError", FailureClass.TOOL),
        (TOOLS, call("refuse", "x"), "", "answered", None),  # what the model got wrong ends nothing
        (TOOLS, "<tool_call>\n{broken\n</tool_call>", "", "answered", None),
        (HURRIED, call("hang", "x"), "", "timed_out", FailureClass.TOOL),
        (OWN, "", "anyhow", "failed:KeyError", FailureClass.ENVIRONMENT),
        (OWN, "", "is wrong", "failed:UndeclaredOutcome", FailureClass.ENVIRONMENT),
        (OWN, "", "hangs", "timed_out", FailureClass.ENVIRONMENT),
        (OWN, "", "memory", "failed:MemoryError", FailureClass.INFRASTRUCTURE),
        (TALKS, "", "", "failed:RuntimeError", FailureClass.ENVIRONMENT),
    ],
)
def test_every_failure_has_its_class(
    frame: Frame, turn: Any, how: str, reason: str, failure: FailureClass | None
) -> None:
    limits = {**LIMITS, **frame.get("limits", {}), "response_tokens": 4 if turn is SLOW else 500}
    graph = agent({**frame, "limits": limits}, tools=TOLD)
    prompt = Prompt(messages=({"role": "user", "content": "?"},), how=how)
    groups, _ = run(graph, [turn, "done"], [prompt], failures=ENDING)
    trajectory = only(groups)
    assert (trajectory.stop_reason, trajectory.failure) == (reason, failure)


def test_a_prompt_that_does_not_fit_is_the_data_s() -> None:
    groups, _ = run(agent(limits={**LIMITS, "context_tokens": 5}), ["four"])
    assert (only(groups).stop_reason, only(groups).failure) == ("prompt_too_long", FailureClass.DATA)


@pytest.mark.parametrize(
    ("lines", "reason", "failure"),
    [
        (["OWN failed GENERATING", "GENERATING generated TERMINATED"], "answered", None),
        (["OWN failed TERMINATED as gave_up"], "gave_up", FailureClass.INFRASTRUCTURE),
    ],
)
def test_a_failure_that_a_row_takes_to_another_state_is_none_in_the_end(
    lines: list[str], reason: str, failure: FailureClass | None
) -> None:
    """One that a row takes to an end is still one."""
    more = {"GENERATING": {"timeout": 5.0}} if failure is None else {}
    groups, _ = run(agent(changed(OWN, *lines, **more)), ["four"], prompts(how="memory"))
    assert (only(groups).stop_reason, only(groups).failure) == (reason, failure)


# -- what becomes of them ------------------------------------------------------------------------------------------


def sometimes(fails: set[str]) -> Any:
    """A script whose engine fails these trajectories' generations."""
    return lambda request: Turn(text="no", error="Boom: no") if request.trajectory_id in fails else Turn(text="yes")


def asked(log: list[str]) -> Reward:
    def reward(trajectory: Trajectory) -> float:
        log.append(trajectory.trajectory_id)
        return 1.0

    return Reward(reward)


def test_what_failed_by_no_fault_of_the_policy_s_has_no_score_and_counts_in_no_mean() -> None:
    log: list[str] = []
    (group,), _ = run(agent(), sometimes({"p0/1"}), n=3, reward=asked(log))
    assert [(t.stop_reason, t.score) for t in group.trajectories] == [
        ("answered", 1.0), ("failed:Boom", None), ("answered", 1.0),
    ]  # fmt: skip
    assert sorted(log) == ["p0/0", "p0/2"], "the reward is not asked"
    assert "no fault of the policy's (engine)" in str(group.trajectories[1].unscored)
    batch = TrajectoryBatch.from_trajectories(group.all, pad_id=0)
    assert batch.score_mean == 1.0
    assert list(batch.tensordict["failure"]) == [None, "engine", None]
    figures = TrajectoryBatch.from_groups([group], pad_id=0).figures
    assert (figures["failed_engine"], figures["unscored"]) == (1, 1)


def test_what_the_policy_failed_itself_is_scored() -> None:
    log: list[str] = []
    limits = {**LIMITS, "response_tokens": 2}
    (group,), _ = run(agent(limits=limits), ["one two three four"], reward=asked(log))
    assert (only([group]).stop_reason, only([group]).score) == ("limit:response_tokens", 1.0)


def test_a_group_s_reward_gets_those_that_can_be_judged() -> None:
    def reward(group: list[Trajectory]) -> list[float]:
        return [float(trajectory.sample) for trajectory in group]

    (group,), _ = run(agent(), sometimes({"p0/0", "p0/2"}), n=4, reward=Reward(reward))
    assert [t.score for t in group.trajectories] == [None, 1.0, None, 3.0]
    (group,), _ = run(agent(), sometimes({"p0/0", "p0/1"}), n=2, reward=Reward(reward))
    assert [t.score for t in group.trajectories] == [None, None]


@pytest.mark.parametrize(
    ("repeats", "fails", "stands", "repeated"),
    [
        (0, {"p0/0"}, ["p0/0", "p0/1"], []),
        (1, {"p0/0"}, ["p0/0~1", "p0/1"], ["p0/0"]),
        (1, {"p0/0", "p0/0~1"}, ["p0/0~1", "p0/1"], ["p0/0"]),
        (2, {"p0/0", "p0/0~1"}, ["p0/0~2", "p0/1"], ["p0/0", "p0/0~1"]),
    ],
)
def test_such_a_sample_is_repeated_within_a_budget(
    repeats: int, fails: set[str], stands: list[str], repeated: list[str]
) -> None:
    failures = ENDS.model_copy(update={"engine": EngineFailures(attempts=1, repeats=repeats, backoff=10.0)})
    log: list[str] = []
    (group,), bench = run(agent(), sometimes(fails), n=2, failures=failures, reward=asked(log))
    assert [t.trajectory_id for t in group.trajectories] == stands
    assert [t.trajectory_id for t in group.discarded] == repeated
    assert [t.score for t in group.trajectories] == [None if stands[0] in fails else 1.0, 1.0]
    assert TrajectoryBatch.from_groups([group], pad_id=0).figures["repeated_samples"] == len(repeated)
    begun = [line.at for line in bench.engine.log if isinstance(line.what, Request)]
    assert max(begun) >= sum(10.0 * 2**number for number in range(len(repeated)))


@pytest.mark.virtual_time
async def test_a_run_that_is_stopped_does_not_wait_for_the_pause_before_a_repeat() -> None:
    failures = ENDS.model_copy(update={"engine": EngineFailures(attempts=1, repeats=1, backoff=3_600.0)})
    bench = Bench(agent(), sometimes({"p0/0"}), failures=failures)
    await bench.run(1, 1, at={10.0: bench.stop})
    assert asyncio.get_running_loop().time() < 60


def test_what_a_sub_agent_failed_is_not_charged_to_its_sample() -> None:
    """Each attempt fails together with the sub-agent that it had called; there are still two repeats."""

    def script(request: Request) -> Turn:
        first = request.agent == "a" and not request.turn
        return Turn(text=ASKS) if first else Turn(text="no", error="Boom: no")

    failures = ENDS.model_copy(update={"engine": EngineFailures(attempts=1, repeats=2)})
    (group,), _ = run(asking(agent(agent="helper")), script, failures=failures)
    assert [t.trajectory_id for t in group.trajectories] == ["p0/0~2"]


def test_a_repeated_sample_is_another_one() -> None:
    """It does not meet the same bad luck by the same seed."""
    failures = ENDS.model_copy(update={"engine": EngineFailures(attempts=1)})
    (group,), _ = run(agent(), sometimes({"p0/0"}), failures=failures)
    assert group.trajectories[0].seed != group.discarded[0].seed


@pytest.mark.parametrize("cut", [*range(4, 12), None])
def test_a_budget_holds_over_interruptions(cut: int | None) -> None:
    """Wherever it is cut off, and in whatever order its histories come, the run comes to the same attempts."""
    failures = ENDS.model_copy(update={"engine": EngineFailures(attempts=1, repeats=2)})
    script = sometimes({"p0/0", "p0/0~1", "p0/0~2"})

    def again(resume: list[Any]) -> tuple[list[Any], Bench]:
        bench = Bench(agent(), script, failures=failures)
        (group,) = bench.go(2, 1, resume=resume)
        names = [t.trajectory_id for t in group.trajectories], [t.trajectory_id for t in group.discarded]
        return [*names, [t.stop_reason for t in group.trajectories]], bench

    expected, bench = again([])
    assert expected[0] == ["p0/0~2", "p0/1"]
    left = histories(bench.log[:cut])
    assert again(left)[0] == again(left[::-1])[0] == expected


@pytest.mark.parametrize(
    ("frame", "turn", "settings"),
    [
        (SINGLE, Turn(text="", error="Boom: no"), {"engine": "stop"}),
        (SINGLE, Turn(text="", error="ReplicaLost: gone"), {"infrastructure": "stop"}),
        (TOOLS, call("breaks", "down"), {"tool": "stop"}),
        (OWN, "", {"environment": "stop"}),
        ({**SINGLE, "limits": {"context_tokens": 5}}, "", {"data": "stop"}),
        ({**SINGLE, "limits": {"response_tokens": 2}}, "one two three four", {"policy": "stop"}),
    ],
)
def test_a_class_may_stop_the_run_which_says_why(frame: Frame, turn: Any, settings: dict[str, str]) -> None:
    graph = agent({**frame, "limits": {**LIMITS, **frame.get("limits", {})}}, tools=TOLD)
    prompt = Prompt(messages=({"role": "user", "content": "?"},), how="anyhow")
    (failure,) = settings
    with pytest.raises(RunStopped, match=rf"as `failures.{failure}` says: trajectory 0/0 ended as "):
        run(graph, [turn, "done"], [prompt], failures=failures_of({"breaker": None, **settings}))


def test_a_run_in_which_nearly_everything_fails_stops_and_says_why() -> None:
    def script(request: Request) -> Turn:
        return Turn(text="", error="OSError: no space left", delay=1.0)

    failures = failures_of({"engine": "end", "breaker": {"window": 8, "share": 0.75}})
    with pytest.raises(
        RunStopped, match=r"8 of the latest 8 trajectories failed.*8 failed:OSError \(engine: .*no space"
    ):
        run(agent(), script, 40, failures=failures, concurrency=4)


def test_the_breaker_is_asked_also_when_a_success_fills_its_window() -> None:
    def script(request: Request) -> Turn:
        bad = int(request.group_id[1:]) < 3
        return Turn(text="", error="Boom: no") if bad else Turn(text="yes")

    failures = failures_of({"engine": "end", "breaker": {"window": 4, "share": 0.75}})
    with pytest.raises(RunStopped, match="3 of the latest 4 trajectories failed"):
        run(agent(), script, 8, failures=failures, concurrency=1)


def test_a_run_in_which_less_fails_goes_on() -> None:
    def script(request: Request) -> Turn:
        bad = int(request.group_id[1:]) % 2
        return Turn(text="", error="Boom: no") if bad else Turn(text="yes")

    failures = failures_of({"engine": "end", "breaker": {"window": 8, "share": 0.75}})
    groups, _ = run(agent(), script, 40, failures=failures, concurrency=4)
    assert len(groups) == 40
    limits = {**LIMITS, "response_tokens": 2}
    groups, _ = run(agent(limits=limits), lambda _: "one two three", 40, failures=failures)
    assert {t.stop_reason for group in groups for t in group.trajectories} == {"limit:response_tokens"}


def test_a_reward_that_fails_again_and_again_stops_the_run() -> None:
    def reward(trajectory: Trajectory) -> float:
        return trajectory.extra["answer"]

    failures = failures_of({"breaker": {"window": 8, "share": 0.75}})
    with pytest.raises(RunStopped, match=r"the reward failed for 8 of the latest 8 trajectories; the first of them: p"):
        run(agent(), lambda _: "yes", 40, failures=failures, concurrency=4, reward=Reward(reward))
    now_and_then = Reward(lambda t: 1.0 if int(t.group_id[1:]) % 2 else t.extra["answer"])
    groups, _ = run(agent(), lambda _: "yes", 40, failures=failures, reward=now_and_then)
    assert len(groups) == 40


def test_what_stops_itself_can_be_resumed(tmp_path: Path) -> None:
    graph, ill = agent(), [True]

    def script(request: Request) -> Turn:
        bad = ill[0] and request.group_id != "p0"
        return Turn(text="", error="Boom: no", delay=5.0) if bad else Turn(text="yes", delay=1.0)

    with journal.Journal(tmp_path / "journal.sqlite") as kept, pytest.raises(RunStopped):
        run(graph, script, 6, journal=kept, concurrency=2, failures=failures_of({"engine": "stop"}))
    ill[0] = False
    left = list(journal.histories(tmp_path / "journal.sqlite"))
    groups = Bench(graph, script, failures=failures_of({"engine": {"do": "retry"}})).go(1, 6, resume=left)
    assert [t.stop_reason for group in groups for t in group.trajectories] == ["answered"] * 6


@pytest.mark.parametrize(("attempts", "repeatable", "tries"), [(1, True, 1), (3, True, 3), (3, False, 1)])
def test_a_call_may_be_made_again_before_the_model_is_told(attempts: int, repeatable: bool, tries: int) -> None:
    settings = failures_of({"tool": {"do": "retry", "attempts": attempts, "backoff": 4.0}})
    tools = {"breaks": {**TOLD["breaks"], "repeatable": repeatable}}
    groups, bench = run(agent(TOOLS, tools=tools), [call("breaks", "down"), "done"], failures=settings)
    trajectory = only(groups)
    assert [event.tries for _, event in bench.log if isinstance(event, Called)] == [tries]
    assert trajectory.stop_reason == "answered"
    assert trajectory.tool_seconds >= (0.0 if tries == 1 else 0.5 * (4.0 + 8.0)), "the pauses, less their jitter"
    assert "no route" in results(trajectory)[0]


def test_a_bad_call_may_end_its_trajectory() -> None:
    settings = failures_of({"policy": "end"})
    groups, _ = run(agent(TOOLS, tools=TOLD), [call("nothing", "x"), "done"], failures=settings)
    assert (only(groups).stop_reason, only(groups).failure) == ("failed:ToolError", FailureClass.POLICY)


@cases("scheduler")
def test_what_cannot_be_done_about_a_class_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        failures_of(settings)


# -- what is waited for --------------------------------------------------------------------------------------------


class Silent:
    """A user that never replies."""

    async def reply(self, conversation: Conversation) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


def never(trajectory: Trajectory) -> Any:
    return asyncio.Event().wait()


LONG = {"timeout": 3000.0}
SLOWLY = changed(SINGLE, GENERATING=LONG)
BUSY = changed(TOOLS, PROCESSING_TOOLS=LONG)
ALONE = {**TALKS, **changed(TALKS, INTERACTING=LONG), "interaction": {"use": f"{HERE}:Silent"}}
HANGING = changed(OWN, OWN=LONG)


@pytest.mark.parametrize(
    ("frame", "turn", "says"),
    [
        (
            SLOWLY,
            Turn(text="one two", hang=True),
            r"p/0 in GENERATING for \d+ s: request p/0/main/0/\d+ of engine 'policy'",
        ),
        (BUSY, call("hang", "x"), r"p/0 in PROCESSING_TOOLS for \d+ s: call c00000000 of tool 'hang'"),
        (ALONE, "", r"p/0 in INTERACTING for \d+ s: the user's reply"),
        (HANGING, "", r"p/0 in OWN for \d+ s: its handler"),
        (SINGLE, "four", r"the reward or the filter of group p"),
    ],
)
def test_a_run_that_stands_still_says_what_it_waits_for(
    frame: Frame, turn: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {**LIMITS, **frame.get("limits", {}), "wall_seconds": 2000.0}
    prompt = Prompt(prompt_id="p", messages=({"role": "user", "content": "?"},), how="hangs")
    run(
        agent({**frame, "limits": limits}, tools=TOLD), [turn, "done"], [prompt],
        failures=ENDS.model_copy(update={"stall_seconds": 100.0}), reward=Reward(never, timeout=1000.0),
    )  # fmt: skip
    told = [record.getMessage() for record in caplog.records if "nothing has happened" in record.getMessage()]
    assert re.search(says, told[0])
    assert len(told) == (1 if frame is SINGLE else 2), "once for each silence: the reward hangs too"


def test_a_run_that_works_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    slow = Turn(text="one two three", delay=90.0)
    run(agent(), [slow], prompts(5), concurrency=1, failures=ENDS.model_copy(update={"stall_seconds": 100.0}))
    assert not [record for record in caplog.records if "nothing has happened" in record.getMessage()]
