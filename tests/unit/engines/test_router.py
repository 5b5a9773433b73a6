"""The routers alone, under generated loads: the bound holds, prefixes stay where they are cached, nothing is random."""

from collections import Counter, deque
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.engines.protocol import Load, Request, SamplingParams
from fsm_rollout.engines.router import (
    FIRST,
    Fleet,
    LeastLoadedRouter,
    ReplicaView,
    Router,
    StickyRouter,
    allowance,
    choose,
)
from fsm_rollout.trajectory.tokens import as_ids

IDS = as_ids([1])
PARAMS = SamplingParams(1)


def request(trajectory: str, group: str = "", context: str = "main") -> Request:
    return Request(
        "r",
        IDS,
        PARAMS,
        trajectory_id=trajectory,
        group_id=group,
        context=context,
        session=trajectory and f"{trajectory}/{context}",
    )


class Served:
    """Replicas that work at different speeds, fed from one queue the way a pool does it, in steps of a clock."""

    def __init__(self, router: Router, slots: list[int], speeds: list[int]) -> None:
        self.router = router
        self.views = [ReplicaView(f"r{i}", allowed=slot) for i, slot in enumerate(slots)]
        self.speeds = speeds
        self.queue: deque[Request] = deque()
        self.went: list[tuple[str, str]] = []

    def assign(self) -> None:
        for view in self.views:
            view.waiting = 0
        kept: deque[Request] = deque()
        while self.queue and any(view.has_room for view in self.views):
            asked = self.queue.popleft()
            chosen = self.router.choose(asked, Fleet(self.views))
            if chosen.has_room:
                chosen.in_flight += 1
                self.went.append((asked.session, chosen.name))
            else:
                chosen.waiting += 1
                kept.append(asked)
        self.queue = kept + self.queue

    def work(self) -> None:
        for view, speed in zip(self.views, self.speeds, strict=True):
            view.in_flight = max(0, view.in_flight - speed)


loads = st.integers(1, 5).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(1, 60), min_size=count, max_size=count),
        st.lists(st.integers(0, 12), min_size=count, max_size=count),
        st.lists(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=60), min_size=1, max_size=12),
    )
)


def driven(fleet: Served, steps: list[list[tuple[int, int]]]) -> Iterator[None]:
    """Have a fleet do what comes step by step; stop where each step's requests have gone to replicas."""
    for arrivals in steps:
        fleet.queue.extend(request(f"t{trajectory}", f"g{group}") for trajectory, group in arrivals)
        fleet.assign()
        yield
        fleet.work()


class Judge:
    """Holds each single choice to the stated bound, from the numbers before it."""

    def __init__(self, spread: int) -> None:
        self.router, self.spread = StickyRouter(spread), spread

    def choose(self, asked: Request, views: Fleet[ReplicaView]) -> ReplicaView:
        least = min(view.in_flight + view.waiting for view in views if view.in_flight < view.allowed)
        chosen = self.router.choose(asked, views)
        assert any(chosen is view for view in views)
        assert chosen.in_flight + chosen.waiting <= least + least // 4 + self.spread
        return chosen


@given(loads, st.integers(0, 20))
def test_no_choice_breaks_the_stated_bound_and_no_replica_idles_while_another_queues_beyond_it(
    load: tuple[list[int], list[int], list[list[tuple[int, int]]]], spread: int
):
    slots, speeds, steps = load
    fleet = Served(Judge(spread), slots, speeds)
    for _ in driven(fleet, steps):
        with_room = [view.in_flight + view.waiting for view in fleet.views if view.has_room]
        least = min(with_room, default=None)
        assert least is None or all(view.waiting <= spread + 1 + least + least // 4 for view in fleet.views)


@given(loads)
def test_equal_loads_are_routed_equally(load: tuple[list[int], list[int], list[list[tuple[int, int]]]]):
    slots, speeds, steps = load
    fleets = [Served(StickyRouter(), slots, speeds) for _ in range(2)]
    for fleet in fleets:
        list(driven(fleet, steps))
    assert fleets[0].went == fleets[1].went


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5), st.integers(0, 3), st.integers(0, 5)), max_size=12),
    st.lists(st.booleans(), min_size=8, max_size=8).filter(any),
)
def test_a_fleet_knows_what_a_look_at_all_its_replicas_would_tell(
    begin: list[tuple[int, int, int]], changes: list[tuple[int, int, int, int]], which: list[bool]
) -> None:
    views = [ReplicaView(f"r{i}", *numbers) for i, numbers in enumerate(begin)]
    fleet = Fleet(views)
    for at, *numbers in changes:
        view = views[at % len(views)]
        view.in_flight, view.waiting, view.allowed = numbers
        fleet.changed(view)
    some = np.array(which[: len(views)])
    for part, those in (
        (fleet, views),
        (fleet.among(some), [v for v, is_one in zip(views, some, strict=False) if is_one]),
    ):
        assert [*part] == those
        assert part.has_room == any(view.has_room for view in those)
        if part.has_room:
            assert part.least is min([view for view in those if view.has_room], key=lambda view: view.load)
        assert [part.named(view.name) for view in views] == [view if view in those else None for view in views]


def views(*loads: int, allowed: int = 100) -> Fleet[ReplicaView]:
    return Fleet([ReplicaView(f"r{i}", in_flight=load, allowed=allowed) for i, load in enumerate(loads)])


def test_a_session_stays_and_its_siblings_start_with_it():
    router = StickyRouter()
    assert router.choose(request("1/0", "1"), views(3, 2, 2)).name == "r1"
    assert router.choose(request("1/1", "1"), views(0, 9, 2)).name == "r1"
    assert router.choose(request("1/0", "1"), views(0, 9, 2)).name == "r1"
    assert router.choose(request("2/0", "2"), views(0, 9, 2)).name == "r0"


def test_a_session_moves_for_good_when_its_replica_is_overloaded():
    router = StickyRouter(spread=4)
    assert router.choose(request("a"), views(0, 0)).name == "r0"
    assert router.choose(request("a"), views(4, 0)).name == "r0"
    assert router.choose(request("a"), views(5, 0)).name == "r1"
    assert router.choose(request("a"), views(0, 2)).name == "r1"


def test_a_session_leaves_a_slow_replica_as_soon_as_another_has_less_to_do():
    router = StickyRouter()
    assert router.choose(request("a"), views(0, 0)).name == "r0"
    slow = views(2, 1)
    slow[0].pace, slow[1].pace = 40.0, 90.0
    assert router.choose(request("a"), slow).name == "r1"
    router = StickyRouter()
    router.choose(request("a"), views(0, 0))
    slow[0].pace = 50.0
    assert router.choose(request("a"), slow).name == "r0"


def test_a_session_waits_for_its_full_replica_only_within_the_bound():
    router = StickyRouter(spread=4)
    router.choose(request("a"), views(0, 9))
    full = Fleet([ReplicaView("r0", in_flight=8, allowed=8), ReplicaView("r1", in_flight=6, allowed=8)])
    assert router.choose(request("a"), full).name == "r0"
    full[0].waiting = 4
    assert router.choose(request("a"), full).name == "r1"


def test_a_replica_that_is_gone_is_no_choice():
    router = StickyRouter()
    router.choose(request("a"), views(0, 1))
    assert router.choose(request("a"), Fleet(views(0, 1)[1:])).name == "r1"


def test_requests_without_a_trajectory_share_no_session():
    router = StickyRouter(spread=1000)
    fleet = Served(router, [100, 100], [0, 0])
    fleet.queue.extend(request("") for _ in range(20))
    fleet.assign()
    assert Counter(name for _, name in fleet.went) == {"r0": 10, "r1": 10}


def test_old_sessions_are_forgotten():
    router = StickyRouter(memory=2)
    for name in "abac":
        router.choose(request(name), views(0, 9))
    assert [router.choose(request(name), views(9, 0)).name for name in "acb"] == ["r0", "r0", "r1"]


def test_least_loaded_looks_at_nothing_else():
    router = LeastLoadedRouter()
    assert router.choose(request("a"), views(3, 1)).name == "r1"
    assert router.choose(request("a"), views(0, 1)).name == "r0"


@pytest.mark.parametrize(
    ("load", "allowed"),
    [
        (Load(), FIRST),
        (Load(running=20), 40),
        (Load(running=100), 200),
        (Load(running=100, waiting=1), 125),
        (Load(running=0, waiting=9), 4),
    ],
)
def test_a_replica_is_given_more_while_it_runs_all_and_little_when_it_queues(load: Load, allowed: int):
    assert allowance(load) == allowed


@pytest.mark.parametrize("router", [StickyRouter, LeastLoadedRouter])
def test_what_a_replica_has_failed_goes_to_another_one_that_has_room(router: type[Router]) -> None:
    views = Fleet([ReplicaView("r0", allowed=4), ReplicaView("r1", allowed=4, in_flight=2)])
    asked = request("t")
    assert choose(router(), asked, views).name == "r0"
    assert choose(router(), asked, views, avoids="r0").name == "r1"
    views[1].in_flight = 4
    views.changed(views[1])
    assert choose(router(), asked, views, avoids="r0").name == "r0", "better than none"
    assert choose(router(), asked, Fleet(views[:1]), avoids="r0").name == "r0"
