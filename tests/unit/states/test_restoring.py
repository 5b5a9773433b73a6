"""What a resumed trajectory's tools and users knew: it goes on with that, or begins anew, and says which."""

import itertools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fsm_rollout.agent.graph import AgentGraph, InteractionSpec
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.errors import ToolError
from fsm_rollout.scheduler.group import Group
from fsm_rollout.states import State, restoring
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.tools import Toolbox
from fsm_rollout.trajectory.events import (
    AnyEvent,
    Called,
    Generated,
    MessagesAppended,
    Restored,
    Resumed,
    Snapshotted,
    UserReplied,
)
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.journal.reader import blobs
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import INTERACTION, Trajectory
from tests.cases import cases
from tests.events import prompted
from tests.laws.world import call
from tests.runs import ASKS, TOOLS, Bench, agent, asking, histories, only, results, rows, with_tool
from tests.vision import gemma3_with_tools

HERE = "tests.unit.states.test_restoring"
CALLS: list[str] = []
"""What tools were called with, in this process."""

SEEN = itertools.count()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    CALLS.clear()
    restoring._logged.clear()


def find(text: str) -> str:
    """Find.

    Args:
        text: What to find.
    """
    return text


class Notebook:
    """Remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def execute(self, text: str) -> str:
        """Write a line down and read them all.

        Args:
            text: What to write.
        """
        CALLS.append(text)
        self.lines.append(text)
        return " ".join(self.lines)


class Keeping(Notebook):
    """Remembers, and can be asked for all of it."""

    def snapshot(self) -> bytes:
        return "\n".join(self.lines).encode()

    def restore(self, data: bytes) -> None:
        self.lines = data.decode().split("\n")


class Drawing(Notebook):
    """Remembers, and shows a picture of all of it."""

    def execute(self, text: str) -> Any:
        """Draw.

        Args:
            text: What to draw.
        """
        return np.full((8, 8, 3), len(super().execute(text)), np.uint8)


class DrawingAnew(Notebook):
    """Shows another picture each time."""

    def execute(self, text: str) -> Any:
        """Draw.

        Args:
            text: What to draw.
        """
        return np.full((8, 8, 3), next(SEEN), np.uint8)


class KeepsWrong(Keeping):
    """Keeps what is no bytes."""

    def snapshot(self) -> Any:
        return self.lines


class DoesNotTakeIt(Keeping):
    """Cannot be restored."""

    async def restore(self, data: bytes) -> None:
        raise ConnectionError("the machine is gone")


class Unrepeatable(Notebook):
    """Answers by what this process has seen."""

    def execute(self, text: str) -> str:
        """Count.

        Args:
            text: What to count.
        """
        CALLS.append(text)
        return f"{next(SEEN)}"


class KeepsOnly(Notebook):
    """Has half of it."""

    def snapshot(self) -> bytes:
        return b""


def written(use: str = "Notebook", **spec: Any) -> Callable[..., Bench]:
    """Return what makes a bench whose model writes two lines down in one turn and a third in the next."""
    says = [f"{call('tool', 'one')}\n{call('tool', 'two')}", call("tool", "three"), "done"]
    graph = with_tool(f"{HERE}:{use}", **spec)
    return lambda **options: Bench(graph, lambda r: Turn(text=says[r.turn], delay=1.0), **options)


READ = ["one", "one two", "one two three"]


def recorded(bench: Bench, folder: Path) -> tuple[list[Group], list[tuple[str, AnyEvent]], list[bytes]]:
    """Run with a journal, and return what came, all events and what the journal keeps beside them."""
    with Journal(folder / "whole.sqlite") as journal:
        bench.scheduler.recorder.journal = journal
        groups = bench.go(1, 1)
    return groups, bench.log, [data for _, data in blobs(folder / "whole.sqlite")]


def resumed(
    make: Callable[..., Bench], events: Iterable[tuple[str, AnyEvent]], path: Path, kept: Iterable[bytes] = ()
) -> tuple[Group, Bench]:
    """Let a trajectory go on from these events, as another process would whose journal has ``kept``."""
    with Journal(path) as journal:
        for data in kept:
            journal.keep(data)
        bench = make(journal=journal)
        (group,) = bench.go(1, 1, resume=histories(events))
    return group, bench


def ways(bench: Bench) -> list[dict[str, str]]:
    return [event.ways for _, event in bench.log if isinstance(event, Restored)]


def cuts(log: list[tuple[str, AnyEvent]]) -> list[int]:
    """Return where to cut a run off: right after what a tool, a user or the model has said."""
    kinds = Called, Snapshotted, Generated, UserReplied, MessagesAppended
    return [place for place, (_, event) in enumerate(log, 1) if isinstance(event, kinds)]


@cases("states")
def test_a_tools_notes_are_there_whenever_its_trajectory_was_cut_off(
    use: str, spec: dict[str, Any], way: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At any event; a new instance that knows nothing of the earlier calls would answer them otherwise."""
    make = written(use, **spec)
    groups, log, kept = recorded(make(), tmp_path)
    expected = results(only(groups))
    begun_anew = 0
    for cut in cuts(log):
        CALLS.clear()
        before = Trajectory.fold([event for _, event in log[:cut]])
        group, bench = resumed(make, log[:cut], tmp_path / f"{cut}.sqlite", kept)
        trajectory = only([group])
        assert trajectory.stop_reason == "answered"
        if use != "Unrepeatable":
            assert results(trajectory) == expected == READ, cut
        called = before.calls_seen > 0 and before.exit is None
        if use in ("Keeping", "DoesNotTakeIt") and isinstance(log[cut - 1][1], Called):
            continue  # the next test's
        if way is None:
            assert [(t.stop_reason, (t.detail or "")[:12]) for t in group.discarded] == [
                ("cancelled", "begun anew: ")
            ] * called
            begun_anew += called
            continue
        assert not group.discarded
        assert [way in told["tool"] for told in ways(bench)] == [True] * called
        made_again = before.calls_seen if way == "made again" and called else 0
        assert len(CALLS) == 3 - before.calls_seen + made_again, "no call is made twice but where the YAML allows it"
    if way is None:
        assert begun_anew
        warned = [line for line in caplog.records if "begins anew instead of going on: tool 'tool'" in line.message]
        assert {line.levelno for line in warned} >= {logging.WARNING}


@pytest.mark.parametrize(("use", "restored"), [("Drawing", ["1 call made again"]), ("DrawingAnew", [])])
def test_calls_that_show_pictures_are_made_again_too(use: str, restored: list[str], tmp_path: Path) -> None:
    graph, eye, says = with_tool(f"{HERE}:{use}", repeatable=True), gemma3_with_tools(), [call("tool", "one"), "done"]
    make: Callable[..., Bench] = lambda **options: Bench(  # noqa: E731
        graph, lambda r: Turn(text=says[r.turn], delay=1.0), eye=eye, chats={}, **options
    )
    groups, log, kept = recorded(make(), tmp_path)
    cut = next(place for place, (_, event) in enumerate(log, 1) if isinstance(event, Called))
    group, bench = resumed(make, log[:cut], tmp_path / "cut.sqlite", kept)
    assert ([way["tool"] for way in ways(bench)], len(group.discarded)) == (restored, not restored)
    assert (only([group]).messages == only(groups).messages) == bool(restored)


def test_a_snapshot_is_not_used_that_a_later_call_has_outdated(tmp_path: Path) -> None:
    """The process died between a call's record and that of the state it left."""
    make = written("Keeping")
    _, log, kept = recorded(make(), tmp_path)
    places = [place for place, (_, event) in enumerate(log) if isinstance(event, Snapshotted)]
    assert len(places) == 3
    group, bench = resumed(make, log[: places[1]], tmp_path / "cut.sqlite", kept)
    assert results(only([group])) == READ
    assert [t.detail for t in group.discarded] == [
        "begun anew: tool 'tool' keeps state, has no snapshot of its latest call, and is not `repeatable: true`"
    ]
    assert not ways(bench)


def test_a_snapshot_that_the_journal_has_lost_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = written("Keeping")
    _, log, _ = recorded(make(), tmp_path)
    (place, *_) = [place for place, (_, event) in enumerate(log) if isinstance(event, Snapshotted)]
    group, _ = resumed(make, log[: place + 1], tmp_path / "cut.sqlite")
    assert results(only([group])) == READ
    assert len(group.discarded) == 1
    assert "that can be read" in caplog.text


def test_nothing_is_kept_where_there_is_no_journal() -> None:
    bench = written("Keeping")()
    assert results(only(bench.go(1, 1))) == READ
    assert not [event for _, event in bench.log if isinstance(event, Snapshotted)]


def test_an_interruption_before_the_new_attempt_changes_nothing(tmp_path: Path) -> None:
    make = written()
    _, log, _ = recorded(make(), tmp_path)
    place = next(place for place, (_, event) in enumerate(log) if event.__struct_config__.tag == "called")
    _, again = resumed(make, log[: place + 1], tmp_path / "a.sqlite")
    ended = next(place for place, (_, event) in enumerate(again.log) if event.__struct_config__.tag == "ended")
    group, _ = resumed(make, again.log[: ended + 1], tmp_path / "b.sqlite")
    assert [t.trajectory_id for t in group.trajectories] == ["p0/0~1"]
    assert results(only([group])) == READ


def test_a_class_writes_both_methods_and_keeps_nothing_while_its_calls_run_at_once() -> None:
    (tool,) = Toolbox(with_tool(f"{HERE}:Keeping", order="any")).tools_of("main").values()
    assert not tool.snapshots
    with pytest.raises(ToolError, match=r"KeepsOnly\): the class has `snapshot` alone; .* write both"):
        Toolbox(with_tool(f"{HERE}:KeepsOnly"))


@pytest.mark.parametrize(("use", "discarded"), [("Keeping", 0), ("Notebook", 1)])
def test_a_sub_agents_tool_counts_as_its_callers(use: str, discarded: int, tmp_path: Path) -> None:
    helper = with_tool(f"{HERE}:{use}").model_copy(update={"agent": "helper"})
    says = {"a": [ASKS, "done"], "helper": [call("tool", "one"), call("tool", "two"), "It is two."]}
    make: Callable[..., Bench] = lambda **options: Bench(  # noqa: E731
        asking(helper), lambda r: Turn(text=says[r.agent or "a"][r.turn], delay=1.0), **options
    )
    _, log, kept = recorded(make(), tmp_path)
    place = next(place for place, (_, event) in enumerate(log) if event.__struct_config__.tag == "called")
    group, bench = resumed(make, log[: place + 2], tmp_path / "cut.sqlite", kept)
    (child,) = group.children
    assert results(child) == ["one", "one two"]
    assert len([t for t in group.discarded if t.parent_id is None]) == discarded
    assert len(ways(bench)) == 1 - discarded
    assert only([group]).stop_reason == "answered"


# -- users ------------------------------------------------------------------------------------------------------------


class Counting:
    """Says how often it was asked, three times."""

    def __init__(self) -> None:
        self.count = 0

    async def reply(self, conversation: Conversation) -> Reply:
        self.count += 1
        return Reply(None if self.count == 4 else f"reply {self.count}", done=self.count == 4)


class CountingKept(Counting):
    def snapshot(self) -> bytes:
        return bytes([self.count])

    async def restore(self, data: bytes) -> None:
        (self.count,) = data


class CountingByTheConversation(Counting):
    resumable = True

    async def reply(self, conversation: Conversation) -> Reply:
        self.count = conversation.replies
        return await super().reply(conversation)


class CountingOnce(CountingKept):
    async def snapshot(self) -> bytes:  # type: ignore[override]
        raise ConnectionError("gone")


class AsksNobody(State):
    triggers: ClassVar = ("ready",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        return Outcome("ready")


def spoken_to(use: str) -> AgentGraph:
    frame = {
        "states": {
            "PENDING": {},
            "READING": {"handler": f"{HERE}:AsksNobody", "timeout": 50.0},
            "GENERATING": {"timeout": 100.0},
            "INTERACTING": {"timeout": 50.0},
        },
        "transitions": rows(
            "PENDING prompted READING",
            "READING ready GENERATING",
            "GENERATING generated INTERACTING",
            "INTERACTING replied GENERATING",
            "INTERACTING interaction_done TERMINATED",
        ),
        "interaction": InteractionSpec(use=f"{HERE}:{use}"),
        "limits": {"assistant_turns": 6, "user_turns": 6, "wall_seconds": 1000.0},
    }
    return agent(frame)


@cases("states")
def test_a_user_goes_on_where_it_was_whenever_the_trajectory_was_cut_off(
    use: str, restored: bool, anew: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make: Callable[..., Bench] = lambda **options: Bench(  # noqa: E731
        spoken_to(use), lambda r: Turn(text=f"turn {r.turn}", delay=1.0), **options
    )
    groups, log, kept = recorded(make(), tmp_path)
    said = [m["content"] for m in only(groups).messages]
    assert said.count("reply 3") == 1
    for cut in cuts(log):
        before = Trajectory.fold([event for _, event in log[:cut]])
        replied = any(m["content"] == "reply 1" for m in before.messages) and before.exit is None
        group, bench = resumed(make, log[:cut], tmp_path / f"{cut}.sqlite", kept)
        assert [m["content"] for m in only([group]).messages] == said, cut
        if replied and log[cut - 1][1].__struct_config__.tag != "interacted":  # else its snapshot is not there yet
            assert bool(ways(bench)) is restored
            assert len(group.discarded) == anew
        if not any(isinstance(event, UserReplied) for _, event in log[:cut]):
            assert not group.discarded, "there is nothing that a new one would not know"
    if use == "Counting":
        told = "has no `snapshot` and `restore`, and does not say `resumable = True`"
        assert told in caplog.text


def test_what_a_state_s_own_user_says_outdates_nothing_of_the_one_that_states_share() -> None:
    told = Trajectory.fold([prompted()])
    for user in (INTERACTION, f"{INTERACTION}OWN"):
        told.apply(Snapshotted(at=0.0, tool=user, blob="kept"))
    for state, own in (("OWN", True), ("A", False)):
        told.apply(UserReplied(at=1.0, context="main", state=state, seconds=0.0, own=own))
        assert list(told.snapshots) == ([INTERACTION] if own else [])


@pytest.mark.virtual_time
async def test_what_stays_open_is_not_restored(tmp_path: Path) -> None:
    """Carried from one call to the next in one process, a trajectory keeps what it has."""

    says = [call("tool", "one"), call("tool", "two"), "done"]
    bench = Bench(
        with_tool(f"{HERE}:Notebook"),
        lambda r: Turn(text="done", delay=3.0) if r.group_id == "p1" else Turn(text=says[r.turn], delay=2.0),
    )
    await bench.run(1, target_groups=1)
    group = await bench.run(1, [])
    assert results(only(group)) == ["one", "one two"]
    assert [event for _, event in bench.log if isinstance(event, Resumed)]
    assert not ways(bench)
    assert not group[0].discarded
    assert TOOLS
