"""Wrong glue from the cache: whoever has it fails, its groups are in no batch, and others come in their place."""

from array import array
from dataclasses import replace
from typing import Any

import pytest

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.glue_cache import Shape
from fsm_rollout.chat.markers import CacheEntry, Encoded
from fsm_rollout.chat.reference import FollowUp, Opening
from fsm_rollout.engines.protocol import Request
from fsm_rollout.errors import GlueMismatchError
from fsm_rollout.scheduler.group import GroupState
from fsm_rollout.scheduler.scheduler import Scheduler
from tests.laws.world import call
from tests.runs import ECHOES, TOOLS, Bench, agent, changed

pytestmark = pytest.mark.virtual_time


def give_wrong_glue(monkeypatch: pytest.MonkeyPatch, audited: int) -> None:
    """Have one cache entry give wrong ids, and its n-th use audited."""
    entries: list[object] = []
    honest = ChatTemplate._encoded

    def wrong(chat: ChatTemplate, asked: Opening | FollowUp, shape: Shape | None) -> Encoded:
        encoded = honest(chat, asked, shape)
        if isinstance(asked, Opening):
            return encoded
        if encoded.entry is None or encoded.entry not in (*entries, encoded.entry)[:1]:
            return encoded
        entries.append(encoded.entry)
        return replace(encoded, ids=array("i", [*encoded.ids, 7]))

    monkeypatch.setattr(ChatTemplate, "_encoded", wrong)
    monkeypatch.setattr(CacheEntry, "audit_due", lambda entry, length: len(entries) == audited)


def one_tool_call(request: Request) -> str:
    return "done" if request.turn else call("echo", "again")


@pytest.mark.parametrize("deliver_at_end", [False, True])
@pytest.mark.parametrize("routed", [False, True])
def test_wrong_glue_from_the_cache_fails_all_that_it_touched_and_drops_their_groups(
    deliver_at_end: bool, routed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One cache entry gives wrong ids, and its fifth use is audited: five trajectories fail, and later ones do not."""
    give_wrong_glue(monkeypatch, audited=5)
    lines = ["GENERATING failed TERMINATED as mine"] if routed else []
    bench = Bench(agent(changed(TOOLS, *lines), tools=ECHOES), one_tool_call, chats={}, concurrency=1)
    groups = bench.go(2, 5, deliver_at_end=deliver_at_end)
    reasons = [trajectory.stop_reason for group in groups for trajectory in group.trajectories]
    first, later = "answered", ["answered"] * 4  # from the first one's glue the cache has learned
    assert reasons == [first, *["failed:GlueMismatchError"] * 5, *later]
    assert [group.dropped for group in groups] == [True, True, True, False, False]
    log_lines = [
        record.getMessage() for record in caplog.records if "5 trajectories hold wrong tokens" in record.getMessage()
    ]
    assert len(log_lines) == 1
    assert ("of 3 were delivered before" in log_lines[0]) == (not deliver_at_end)


@pytest.mark.parametrize("deliver_at_end", [False, True])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_target_is_reached_though_wrong_glue_is_found_late(
    at_the_end: bool, deliver_at_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a group that was delivered already, or while what runs beyond the target is set aside: others take its place.

    The first trajectory has the cache learn, the next ones are wrong; the audit of the third finds it, or nothing does
    until the run is being ended.
    """
    give_wrong_glue(monkeypatch, audited=1000 if at_the_end else 2)
    end = Scheduler._end

    async def audited_end(self: Scheduler, run: Any, *, keep: bool) -> None:
        await end(self, run, keep=keep)
        wrong = [
            entry
            for group in self.groups.by_state[GroupState.DONE].values()
            for entries in group.glue_entries.values()
            for entry in entries
        ]
        if at_the_end and keep and wrong:
            self.glue_mismatch(GlueMismatchError("it differs", wrong[0]))
            monkeypatch.setattr(Scheduler, "_end", end)

    monkeypatch.setattr(Scheduler, "_end", audited_end)

    bench = Bench(agent(TOOLS, tools=ECHOES), one_tool_call, chats={}, concurrency=1)
    groups = bench.go(1, 9, target_groups=3, over_sample=1.0, deliver_at_end=deliver_at_end)
    assert sum(not group.dropped for group in groups) == 3
    assert any(group.dropped for group in groups)
