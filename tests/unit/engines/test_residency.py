"""Whole trajectories are resident, in the order of their groups, and nobody starves."""

from array import array
from random import Random

import hypothesis.strategies as st
from hypothesis import given

from fsm_rollout.engines.residency import ADMIT, FULL, RESERVED, Residency, Tree
from fsm_rollout.trajectory.tokens import Ids

SIZES = st.integers(1, 120)


@st.composite
def workloads(draw: st.DrawFn) -> list[list[list[int]]]:
    """Draw groups of trajectories, each the contexts of its turns."""
    turns = st.lists(SIZES, min_size=1, max_size=6)
    return draw(st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=6))


SHARED = st.tuples(st.integers(0, 30), st.integers(1, 30), st.sampled_from([0, 0, 40]))


class Engine:
    """Takes turns of those who are resident, in an order drawn from a seed, and keeps its own account of them.

    ``shared`` says how many tokens all prompts begin with, how many more a group's have, and how many of its own each
    trajectory comes with, as one does that is resumed.
    """

    def __init__(
        self, workload: list[list[list[int]]], replicas: int, capacity: int, seed: int, shared: tuple[int, int, int]
    ) -> None:
        self.residency, self.random, self.shared = Residency(), Random(seed), shared
        self.capacity = {f"r{number}": capacity for number in range(replicas)}
        for name in self.capacity:
            self.residency.resize(name, capacity)
        self.turns = {(g, n): list(turns) for g, group in enumerate(workload) for n, turns in enumerate(group)}
        self.context = dict.fromkeys(self.turns, shared[2])
        self.asking: dict[tuple[int, int], Tree] = {}
        self.homes: dict[tuple[int, int], str] = {}
        self.first_admissions: list[int] = []  # groups, in the order in which trajectories were first admitted
        self.admitted: set[tuple[int, int]] = set()

    def ask(self, who: tuple[int, int]) -> None:
        group, number = who
        name = f"{group}/{number}"
        idle = [tree for tree in self.residency.trees.values() if tree.home is not None and not tree.asking]
        before = {tree: self.residency.memories[self.homes[self.who(tree)]].share(tree) for tree in idle}
        homes = [tree.home for tree in self.asking.values()]
        asked = self.residency.ask(name, str(group), f"{name}/main", self.ids(who))
        assert homes == [tree.home for tree in self.asking.values()], "who has lost its place stood at a boundary"
        self.asking[who] = asked
        # ... and nobody smaller stood at one and kept its own; who asks has grown since.
        before.pop(asked, 0)
        for lost in before:
            kept = [tree for tree in before if tree.home == self.homes[self.who(lost)]]
            assert lost.home is not None or all(before[lost] <= before[tree] for tree in kept)

    def ids(self, who: tuple[int, int]) -> Ids:
        """Return the context of a trajectory: what all have, what its group has, and what only it has."""
        (group, number), (all_have, group_has, _) = who, self.shared
        return array("i", [1] * all_have + [-2 - group] * group_has + [1000 * (group + 1) + number] * self.context[who])

    def who(self, tree: Tree) -> tuple[int, int]:
        group, number = tree.key.split("/")
        return int(group), int(number)

    def admit(self) -> None:
        residency = self.residency
        while (tree := admissible(residency)) is not None:
            # Nobody of an earlier group, or who came earlier within the group, waits for a place.
            line = [other for other in residency.trees.values() if other.home is None and other.asking]
            assert (tree.group.place, tree.number) == min((other.group.place, other.number) for other in line)
            takes = residency.takers(tree)
            fits = [memory.takes(tree) for memory in residency.memories.values()]
            assert [takes[memory.place] for memory in residency.memories.values()] == fits, "as each says that is asked"
            name = self.random.choice([name for name, memory in residency.memories.items() if takes[memory.place]])
            residency.admit(tree, name)
            memory = residency.memories[name]
            assert len(memory.residents) == 1 or memory.held <= ADMIT * self.capacity[name]
            self.homes[self.who(tree)] = name
            if self.who(tree) not in self.admitted:
                self.admitted.add(self.who(tree))
                self.first_admissions.append(tree.group.place)

    def check(self) -> None:
        """Compare what it holds with an account of one's own."""
        for name, memory in self.residency.memories.items():
            trees = [tree for tree in self.residency.trees.values() if tree.home == name]
            assert set(trees) == set(memory.residents)
            all_have, group_has, _ = self.shared  # ... count once, as in an engine's cache
            own = sum(self.context[self.who(tree)] for tree in trees)
            assert memory.held == all_have * bool(trees) + group_has * len({tree.group for tree in trees}) + own

    def run(self, mark_every: int, sizes: tuple[int, ...] = ()) -> int:
        """Take all turns, in memories that others leave these sizes in turn; return how many steps that took."""
        for who in self.turns:
            self.ask(who)
        steps = 0
        while self.turns:
            self.admit()
            self.check()
            ready = [who for who, tree in self.asking.items() if tree.home is not None]
            idle = [who for who in self.turns if who not in self.asking]
            if mark_every and steps % mark_every == 0:
                self.residency.mark()
            steps += 1
            for name in self.residency.memories if sizes else ():
                self.capacity[name] = sizes[steps % len(sizes)]
                self.residency.resize(name, self.capacity[name])
            if ready and (not idle or self.random.random() < 0.5):  # one of them is answered
                who = self.random.choice(ready)
                tree = self.asking.pop(who)
                self.context[who] += self.turns[who].pop(0)
                self.residency.answer(tree, f"{tree.key}/main", len(self.ids(who)))
                if not self.turns[who]:
                    del self.turns[who]
                    self.residency.end([f"{tree.key}/main"])
                    del self.context[who]
            else:
                assert idle, "somebody waits, and nobody is resident: nothing can ever happen again"
                self.ask(self.random.choice(idle))
        return steps


@given(
    workload=workloads(), replicas=st.integers(1, 3), capacity=st.integers(20, 400), seed=st.integers(0, 99),
    shared=SHARED,
)  # fmt: skip
def test_everybody_comes_to_an_end_in_the_order_of_groups(workload, replicas, capacity, seed, shared):  # type: ignore[no-untyped-def]
    engine = Engine(workload, replicas, capacity, seed, shared)
    engine.run(mark_every=0)
    assert engine.first_admissions == sorted(engine.first_admissions)
    assert not engine.residency.trees
    assert engine.residency.resident == 0
    assert all(memory.held == 0 for memory in engine.residency.memories.values())


@given(
    workload=workloads(), sizes=st.lists(st.integers(1, 400), min_size=1, max_size=4), replicas=st.integers(1, 2),
    seed=st.integers(0, 99), every=st.integers(1, 5), shared=SHARED,
)  # fmt: skip
def test_who_gives_way_comes_back_though_others_come_and_go(workload, sizes, replicas, seed, every, shared):  # type: ignore[no-untyped-def]
    engine = Engine(workload, replicas, sizes[0], seed, shared)
    engine.run(every, tuple(sizes[1:]))
    assert not engine.residency.trees


def admissible(residency: Residency) -> Tree | None:
    """Return the first in the line, if any replica may admit it."""
    tree = residency.first
    return tree if tree is not None and residency.takers(tree).any() else None


def context(key: str, tokens: int) -> Ids:
    """Return a context that shares nothing with another's."""
    return array("i", [sum(key.encode()) * 100 + len(key)] * tokens)


def placed(residency: Residency, key: str, tokens: int) -> Tree:
    tree = residency.ask(key, key, f"{key}/main", context(key, tokens))
    while (first := admissible(residency)) is not None:
        residency.admit(first, next(name for name, memory in residency.memories.items() if memory.takes(first)))
    return tree


def test_the_smallest_at_a_boundary_is_paused_and_no_more_than_it_takes() -> None:
    residency = Residency()
    residency.resize("r", 1000)
    size = {"a": 100, "b": 200, "c": 300, "d": 240}
    trees = {key: placed(residency, key, tokens) for key, tokens in size.items()}
    for key in "abc":  # d goes on to say something
        residency.answer(trees[key], f"{key}/main", size[key])
    residency.ask("c", "c", "c/main", context("c", 450))  # 990 of 1,000
    assert FULL * 1000 >= 990 - 100
    assert [key for key, tree in trees.items() if tree.home is None] == ["a"]
    assert (residency.paused, residency.given_up) == (1, ["a/main"])


def test_a_parent_holds_its_place_for_its_children() -> None:
    residency = Residency()
    residency.resize("r", 100)
    parent = placed(residency, "a", 60)
    other = placed(residency, "b", 60)
    assert (parent.home, other.home) == ("r", None)
    assert residency.ask("a", "a", "a/0/child/main", context("child", 30)) is parent
    assert (residency.memories["r"].held, parent.home) == (90, "r")
    residency.end(["a/0/child/main"])
    assert residency.memories["r"].held == 60


def test_who_is_away_for_long_gives_way_and_keeps_the_place_of_its_group() -> None:
    residency = Residency()
    residency.resize("r", 100)
    away, waits = placed(residency, "a", 60), placed(residency, "b", 60)
    residency.answer(away, "a/main", 60)
    residency.mark()
    assert admissible(residency) is None
    residency.mark()
    assert admissible(residency) is waits
    residency.admit(waits, "r")
    late = residency.ask("c", "c", "c/main", context("c", 10))
    residency.ask("a", "a", "a/main", context("a", 60))
    assert away.group.place < late.group.place
    residency.answer(waits, "b/main", 60)
    residency.end(["b/main"])
    assert admissible(residency) is away


def test_residents_of_a_replica_that_is_lost_stand_in_the_line_again() -> None:
    residency = Residency()
    residency.resize("r", 100)
    residency.resize("s", 100)
    asks, idle = placed(residency, "a", 60), placed(residency, "b", 60)
    residency.answer(idle, "b/main", 60)
    residency.arrange(["s"])
    assert [tree.home for tree in (asks, idle)].count(None) >= 1
    lost = asks if asks.home is None else idle
    assert residency.resident == 1
    assert residency.memories["s"].held == 60
    residency.arrange([])
    assert residency.resident == 0
    residency.resize("t", 500)
    assert admissible(residency) is asks
    assert lost in (asks, idle)


def test_who_is_away_gives_way_to_all_that_fit_and_to_one_that_is_larger_than_may_be_admitted() -> None:
    residency = Residency()
    residency.resize("r", 1000)
    away = [placed(residency, f"a{number}", 100) for number in range(8)]
    for tree in away:
        residency.answer(tree, f"{tree.key}/main", 100)
    waiting = [placed(residency, f"b{number}", 100) for number in range(7)]
    large = placed(residency, "c", 950)
    for _ in range(2):  # the first sees who asks for nothing, the second who has not since
        residency.mark()
    placed(residency, "d", 1)
    assert sum(tree.home is not None for tree in away) == 1  # there is room for one of them still
    assert all(tree.home for tree in waiting)
    assert large.home is None
    for tree in waiting:
        residency.answer(tree, f"{tree.key}/main", 100)
    for _ in range(2):
        residency.mark()
    placed(residency, "e", 1)
    assert large.home == "r"


def test_what_siblings_share_counts_once_on_each_replica_and_what_all_share_once_for_all() -> None:
    residency = Residency()
    residency.resize("r", 1000)
    system, trees = [1] * 200, {}
    for name in ("a0", "a1", "b0"):
        prompt = array("i", [*system, *[ord(name[0])] * 100])
        trees[name] = residency.ask(name, name[0], f"{name}/main", prompt)
    helper = residency.ask("a1", "a", "a1/0/helper/main", array("i", [*system, *[7] * 50]))
    assert helper is trees["a1"]
    held = []
    while (tree := admissible(residency)) is not None:
        residency.admit(tree, "r")
        held.append(residency.memories["r"].held)
    assert held == [300, 300 + 50, 300 + 50 + 100]
    residency.leave(trees["a0"])
    assert residency.memories["r"].held == 450
    residency.leave(trees["a1"])
    assert residency.memories["r"].held == 300
    residency.end(["a0/main", "a1/main", "a1/0/helper/main", "b0/main"])
    assert (residency.memories["r"].held, residency.trees) == (0, {})
    other = residency.ask("c", "c", "c/main", array("i", [9] * 40))
    residency.admit(other, "r")
    assert residency.memories["r"].held == 40


def test_who_was_paused_comes_back_where_it_can_grow_as_others_did() -> None:
    residency = Residency()
    residency.resize("r", 1000)
    first, small, large = (placed(residency, key, tokens) for key, tokens in {"a": 100, "b": 200, "c": 300}.items())
    residency.answer(small, "b/main", 200)
    residency.answer(first, "a/main", 100)
    residency.ask("a", "a", "a/main", context("a", 500))  # 1,000 of 1,000
    assert [tree.home for tree in (first, small, large)] == ["r", None, "r"]
    residency.ask("b", "b", "b/main", context("b", 200))
    residency.ask("a", "a", "a/0/child/main", context("child", 0))
    # It had 500: of 1,000 tokens 300 are held, and 200 fit, but not 1.3 times 500 more.
    residency.end(["a/main", "a/0/child/main"])
    assert admissible(residency) is None
    residency.answer(large, "c/main", 300)  # and who has that place is away for long
    residency.mark()
    assert admissible(residency) is None
    residency.mark()
    assert admissible(residency) is small


def test_who_is_away_gives_way_with_what_only_they_share() -> None:
    residency = Residency()
    residency.resize("r", 1000)
    stays = placed(residency, "s", 100)
    prompt = context("g", 400)
    away = [residency.ask(f"g{number}", "g", f"g{number}/main", prompt) for number in range(2)]
    for tree in away:
        residency.admit(tree, "r")
        residency.answer(tree, f"{tree.key}/main", 420)
    waits = placed(residency, "w", 500)
    residency.mark()
    residency.mark()
    assert [tree.home for tree in (stays, *away)] == ["r", None, None]
    assert admissible(residency) is waits


def test_room_is_reserved_for_a_part_of_what_a_request_says_but_never_for_more_than_it_may_say() -> None:
    residency = Residency()
    residency.resize("r", 1000)
    tree = placed(residency, "a", 100)
    residency.answer(tree, "a/main", 140, sampled=40)
    residency.ask("a", "a", "a/main", context("a", 150), most=1000)
    assert residency.memories["r"].held == 150 + RESERVED * 40
    residency.answer(tree, "a/main", 190, sampled=40)
    residency.ask("a", "a", "a/main", context("a", 200), most=5)
    assert residency.memories["r"].held == 200 + 5
