"""Simulations run the real scheduler: nothing is quicker than the bound, and residency beats counting."""

import importlib
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from fsm_rollout.cli import app
from fsm_rollout.engines.placing import Placing
from fsm_rollout.engines.protocol import Load
from fsm_rollout.engines.router import Fleet
from fsm_rollout.engines.scripted.simulated import SimulatedEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.run_config import load_run
from fsm_rollout.jobs.runner import execute
from fsm_rollout.simulation import simulate as simulate_module
from fsm_rollout.simulation.agent import Lives
from fsm_rollout.simulation.bound import bound, bound_in_batches, streams
from fsm_rollout.simulation.job import Asked, simulations
from fsm_rollout.simulation.servers import ServerCosts
from fsm_rollout.simulation.simulate import Policy, Wait, block_of, correlated, simulate
from fsm_rollout.simulation.workload import WORKLOADS, TurnLengths, Workload, cut, drawn, recorded
from fsm_rollout.trajectory.tokens import as_ids
from tests.cases import cases

ASSIGN = Placing.assign
AUTO, TODAY = Policy.of("auto"), Policy.of("today")


def small(name: str = "search", groups: int = 8, n: int = 4, seed: int = 0) -> Workload:
    return drawn(name, groups, n, 16_384, seed)


def test_whole_trajectories_resident_compute_little_twice_and_are_done_in_the_order_of_groups() -> None:
    workload, server = small("games", groups=16), ServerCosts(tokens=60_000)
    auto, today = (simulate(workload, server, policy=policy) for policy in (AUTO, TODAY))
    assert today.twice > 0.3
    assert auto.twice < 0.1
    assert auto.makespan < today.makespan
    assert auto.in_order > today.in_order
    assert auto.in_order > 0.7
    assert auto.paused > 0
    assert sorted(auto.order) == sorted(today.order) == list(range(16))


def test_what_trajectories_hold_never_exceeds_the_memory_by_more_than_they_say() -> None:
    auto = simulate(small(), ServerCosts(tokens=60_000), policy=AUTO)
    most = max(turn.says for group in auto.workload.groups for life in group for turn in life)
    assert max(auto.course.held) <= 1.0 + most / 60_000
    assert max(auto.course.used) <= 1.0


def test_batches_that_take_what_is_quick_are_short_at_first_and_paced_ones_are_about_in_turn() -> None:
    workload, server = small("search", groups=24), ServerCosts(tokens=60_000)
    sync, carry, paced = (
        simulate(workload, server, policy=Policy.of(f"auto+{tail}"), target=3, staleness=2)
        for tail in ("sync", "carry", "paced")
    )
    assert [sorted(batch) for batch in sync.batches] == [[*range(at, at + 3)] for at in range(0, 24, 3)]
    assert sorted(paced.order) == [*range(24)]
    assert all(abs(number - group // 3) <= 2 for number, batch in enumerate(paced.batches) for group in batch)
    assert sorted(carry.order) == [*range(24)]
    assert carry.biases[0] < sync.biases[0]
    assert max(paced.makespan, carry.makespan) < sync.makespan
    assert sum(map(len, carry.batches)) + carry.dropped == 24


@pytest.mark.parametrize(
    ("seconds", "least", "most"),
    [
        (lambda group, size: float(group), -1e-6, 1e-6),  # in line, whatever the sizes are
        (lambda group, size: group + size / 50, 0.6, 1.0),  # one with a long prompt is passed
        (lambda group, size: group - size / 50, -1.0, -0.6),  # and here one with a short one
    ],
)
def test_waits_are_fair_where_they_depend_on_the_place_in_the_line_alone(
    seconds: Callable[[int, int], float], least: float, most: float
) -> None:
    found = simulate(small("tools", 1, 1), ServerCosts())
    sizes = [100 * (group * 7 % 40) + 50 * group for group in range(40)]  # who stands behind others has more to say
    found.first_waits = [Wait(size, seconds(group, size), group) for group, size in enumerate(sizes)]
    assert correlated(sizes, range(40)) > 0.3
    assert least <= found.first_correlation <= most


class Shared(SimulatedEngine):
    """A server that somebody else uses from the 10th to the 60th second, for a prompt of two fifths of its memory."""

    says = True
    """Whether it says so."""

    def load(self) -> Load:
        server, prompt = self._server, self._server.memory.tokens * 2 // 5
        if 10.0 < server.now < 60.0 and not {"other"} & (server._waiting | server._running | server._filling).keys():
            server.ask("other", as_ids([-7]) * prompt, [as_ids([-8]) * 10**6], 1, "")
        elif server.now >= 60.0:
            server.drop(["other"])
        return replace(super().load(), others=prompt if self.says and "other" in server._running else 0)


def test_who_is_there_gives_way_to_other_users_of_a_server_and_comes_back_when_they_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulate_module, "SimulatedEngine", Shared)
    found = {}
    for Shared.says in (False, True):
        found[Shared.says] = simulate(small("games", groups=16), ServerCosts(tokens=60_000), policy=AUTO)
    course = found[True].course
    assert max(share for at, share in zip(course.times, course.held, strict=True) if 15 < at < 60) <= 0.6
    assert max(share for at, share in zip(course.times, course.held, strict=True) if 65 < at < 200) > 0.85
    assert found[True].twice < found[False].twice / 2
    assert found[True].makespan < found[False].makespan


@settings(max_examples=8)
@given(
    name=st.sampled_from(["search", "tools_many", "coding_short", "users"]),
    seed=st.integers(0, 1000),
    replicas=st.integers(2, 5),
    policy=st.sampled_from([AUTO, TODAY, Policy.of("count:12")]),
    tokens=st.sampled_from([20_000, 60_000]),
)
def test_what_goes_where_is_as_if_all_replicas_were_looked_at_again_each_time(
    name: str, seed: int, replicas: int, policy: Policy, tokens: int
) -> None:
    """Equal to a plain scan of what they are known to do: nothing that is kept at hand is ever behind."""

    def assign(placing: Placing) -> Any:
        fleet, residency = Fleet(placing._up), placing.residency
        behind.extend(
            name for name, place in fleet.places.items() if placing._fleet._loads[place] != fleet._loads[place]
        )
        placing._fleet = fleet
        if residency is not None:
            rooms = {name: residency.rooms()[memory.place] for name, memory in residency.memories.items()}
            behind.extend(name for name, memory in residency.memories.items() if rooms[name] != memory.room)
        placing.queue.release([*placing.queue.held])  # and all that waits is looked at
        for pending in [pending for lane in placing.queue.lanes for pending in lane if pending.tree is not None]:
            placing.hold_in_line(pending)
        return ASSIGN(placing)

    behind: list[str] = []
    workload, server = small(name, 4, 3, seed), ServerCosts(tokens=tokens, max_running=2)
    found = simulate(workload, server, replicas, policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Placing, "assign", assign)
        scanned = simulate(workload, server, replicas, policy)
    assert not behind
    assert (found.makespan, found.order, found.filled, found.later_waits) == (
        scanned.makespan, scanned.order, scanned.filled, scanned.later_waits,
    )  # fmt: skip


def test_it_is_a_function_of_its_arguments() -> None:
    first, second = (simulate(small("coding_short"), ServerCosts(tokens=80_000), 2, AUTO, seed=3) for _ in range(2))
    assert (first.makespan, first.order, first.filled, first.later_waits) == (
        second.makespan, second.order, second.filled, second.later_waits,
    )  # fmt: skip


@settings(max_examples=20)
@given(
    name=st.sampled_from(sorted(WORKLOADS)),
    seed=st.integers(0, 1000),
    tokens=st.integers(8_192, 200_000),
    replicas=st.integers(1, 3),
    policy=st.sampled_from([*map(Policy.of, ("auto", "today", "count:3", "auto+sync", "auto+paced", "count:3+carry"))]),
    staleness=st.integers(0, 2),
)
@example("search", 0, 200_000, 3, Policy.of("auto+paced"), 2)  # with room for all, each bound is nearly reached
@example("search", 0, 200_000, 3, Policy.of("auto+paced"), 0)
def test_nothing_is_quicker_than_the_bound(
    name: str, seed: int, tokens: int, replicas: int, policy: Policy, staleness: int
) -> None:
    workload, server = drawn(name, 3, 2, 4096, seed), ServerCosts(tokens=tokens)
    found = simulate(workload, server, replicas, policy, target=1, staleness=staleness)
    lives = [stream for group in workload.groups for life in group for stream in streams(life)]
    if policy.tail is None:
        assert len(found.first_waits) + len(found.later_waits) == sum(map(len, lives))
    block = block_of(workload)
    # Each turn's lengths are rounded to blocks: by one at most, in time and in size.
    rounding = 1 - block * 2 * sum(map(len, lives)) / sum(turn.adds + turn.says for life in lives for turn in life)
    least = min(0.9, max(0.0, rounding))
    assert found.ratio >= least
    if policy.tail in ("sync", "paced"):
        assert found.makespan >= least * bound_in_batches(
            workload, server, 1, staleness if policy.tail == "paced" else 0
        )


def test_sub_agents_that_nobody_disturbs_compute_nothing_twice_and_are_as_quick_as_the_bound() -> None:
    helper = (TurnLengths(3001, 64),)
    life = (TurnLengths(3001, 64, 0.0, helper), *(TurnLengths(10, 64, 0.0, helper),) * 2, TurnLengths(10, 64))
    found = simulate(Workload("asks", ((life,),), 3000, (3001,)), ServerCosts(fill=1e-3))
    assert found.bound.name == "longest"
    assert (found.twice, found.ratio) == (pytest.approx(0, abs=0.001), pytest.approx(1.0, abs=0.01))


def test_no_trajectory_says_what_another_one_says() -> None:
    life = (TurnLengths(10, 5, 0.0, (TurnLengths(10, 5),)),) * 300
    lives = Lives(Workload("many", ((life,) * 20,) * 2), 1)
    names = [f"g{group}/{sample}" for group in range(2) for sample in range(20)]
    names += [f"{name}/delegate.h{turn}" for name in names for turn in range(300)]
    assert len({lives.of(name)[0] for name in names}) == len(names)


def test_a_workload_depends_on_its_name_and_seed_alone() -> None:
    assert drawn("coding", 4, 2, 65_536, 1) == drawn("coding", 4, 2, 65_536, 1)
    assert drawn("coding", 4, 2, 65_536, 1) != drawn("coding", 4, 2, 65_536, 2)
    assert drawn("coding", 2, 2, 65_536, 1).groups == drawn("coding", 4, 2, 65_536, 1).groups[:2]


def test_coding_agents_are_drawn_as_they_are_described() -> None:
    lives = [life for group in drawn("coding", 400, 1, 10**9).groups for life in group]
    turns = [turn for life in lives for turn in life]
    assert 35 <= sorted(map(len, lives))[len(lives) // 2] <= 52
    assert 400 <= sorted(turn.says for turn in turns)[len(turns) // 2] <= 490
    assert 0.84 <= sum(turn.gap <= 1 for turn in turns) / len(turns) <= 0.89
    assert 0.3 <= sum(any(turn.helper for turn in life) for life in lives) / len(lives) <= 0.5


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1), st.integers(2, 200))
def test_a_trajectory_is_cut_to_the_window(lengths: list[tuple[int, int]], window: int) -> None:
    life = tuple(TurnLengths(adds, says) for adds, says in lengths)
    kept = cut(life, window)
    assert 1 <= len(kept) <= len(life)
    assert sum(turn.adds + turn.says for turn in kept) <= window
    assert all(turn == before for turn, before in zip(kept[:-1], life, strict=False))


def test_lengths_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"group": "a", "turns": [[100, 20, 0.5], [30, 10, 0]]}, {"group": "a", "turns": [[100, 5, 0]]}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    workload = recorded(file, 4096)
    assert workload.groups == (((TurnLengths(100, 20, 0.5), TurnLengths(30, 10)), (TurnLengths(100, 5),)),)
    assert workload.prompts == (100,)
    assert simulate(workload, ServerCosts()).makespan >= 0.5


@cases("simulation")
def test_a_file_of_something_else_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ConfigError) as error:
        recorded(tmp_path / "trace.jsonl", 4096)
    assert message in str(error.value)


def test_a_policy_or_workload_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no workload 'codign'; did you mean 'coding'"):
        drawn("codign", 1, 1, 100)
    for policy, said in {"count:many": "write auto, today or count:64", "paced": "did you mean 'auto\\+paced'"}.items():
        with pytest.raises(ConfigError, match=said):
            Policy.of(policy)


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    words = ["simulate", "--workload", "tools", "--groups", "4", "--n", "2", "--memory", "9000", "-o", str(picture)]
    said = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert said.exit_code == 0, said.output
    assert "workload tools: 4 groups, 8 trajectories" in said.output
    assert "no schedule can be quicker than" in said.output
    assert all(f" {policy} " in said.output for policy in ("auto", "today"))
    assert picture.read_text().count("<polyline") == 4
    for line in re.findall('<polyline .*points="(.*)"', picture.read_text()):
        assert len(line.split()) > 100, "also of a run that takes seconds"
    assert CliRunner().invoke(app, [*words, "--memory", "2"]).exit_code == 0, "no prompt has room there"
    refused = CliRunner().invoke(app, [*words, "-o", "picture.png"])
    assert (refused.exit_code, "-o picture.png: the picture is an SVG" in refused.output) == (2, True)


def test_a_run_says_its_batches_and_how_old_they_may_be() -> None:
    given = ["target_groups=2", "tail=sync+longest", "serve.max_staleness=0", "concurrency=3"]
    config = load_run(Path(__file__).parents[3] / "configs/runs/scripted.yaml", given)
    asked = {"workload": "tools", "groups": 6, "n": 2}
    of_run = simulations(config, Asked(**asked), lambda each: None)
    assert [each.policy.name for each in of_run] == ["auto+sync+longest", "count:3+sync+longest"]
    assert [len(batch) for batch in of_run[0].batches] == [2, 2, 2]
    paced = {"policies": ["auto+paced"], **asked}
    (late,) = simulations(config, Asked(**paced, target=3, staleness=2), lambda each: None)
    (in_turn,) = simulations(config, Asked(**paced, target=3), lambda each: None)
    assert [len(batch) for batch in late.batches] == [3, 3]
    assert late.makespan < in_turn.makespan, "the next batch begins before this one has ended"


def test_shards_share_the_trajectories_and_the_servers() -> None:
    run = [str(Path(__file__).parents[3] / "configs/runs/scripted.yaml"), "workers=3"]
    words = ["--workload", "tools", "--groups", "6", "--n", "2", "--policy"]
    said = CliRunner().invoke(app, ["simulate", *run, *words, "auto+paced"])
    refused = CliRunner().invoke(app, ["simulate", "--workers", "3", *words, "auto+longest"])
    assert said.exit_code == 0, said.output
    assert "shared by 3 shards" in said.output
    assert (refused.exit_code, "with workers, each shard begins what it has by itself" in refused.output) == (2, True)


@pytest.mark.parametrize("tail", ["", "+carry"])
def test_shards_do_what_one_scheduler_does(tail: str) -> None:
    """Each turn is taken once, groups begin in order, and servers with room for all take no longer than a little."""
    workload, server = drawn("search", 12, 2, 32_768, 1), ServerCosts()
    one, some = (
        simulate(workload, server, replicas, Policy.of(f"auto{tail}"), workers=workers)
        for replicas, workers in ((2, 1), (2, 3))
    )
    assert sorted(some.order) == sorted(one.order) == list(range(12))
    turns = [len(run.first_waits) + len(run.later_waits) for run in (one, some)]
    assert turns[0] == turns[1] or tail, "a batch cuts other turns in two"
    assert [len(batch) for batch in some.batches] == [len(batch) for batch in one.batches]
    assert some.filled == pytest.approx(one.filled, rel=0.05)
    assert some.makespan < 1.1 * one.makespan


@pytest.mark.parametrize("groups", [6, 10])
def test_servers_that_count_in_blocks_take_as_long_as_those_that_count_in_tokens(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where answers are so long that what a server keeps free for them decides who is admitted."""
    workload, server, took = drawn("math", groups, 4, 32_768, 0), ServerCosts(tokens=60_000), {}
    for block in (1, 64):
        monkeypatch.setattr(simulate_module, "block_of", lambda workload, block=block: block)
        took[block] = simulate(workload, server, policy=TODAY)
    assert took[64].makespan == pytest.approx(took[1].makespan, rel=0.02)
    assert took[64].retracted == took[1].retracted


def test_the_lengths_of_a_run_can_be_simulated(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    config = load_run(root / "configs/runs/scripted.yaml", [f"out={tmp_path / 'run'}", "limit=3", "n=2"])
    execute(config, lambda total, done: nullcontext(lambda trajectory, event: None))
    workload = recorded(tmp_path / "run", 32_768)
    assert all(turn.adds > 0 and turn.says > 0 for group in workload.groups for life in group for turn in life)
    assert [len(group) for group in workload.groups] == [config.n] * len(workload.groups)
    found = simulate(workload, ServerCosts(), policy=AUTO)
    assert all(early <= late for early, late in pairwise(found.course.times))
    assert found.ratio >= 0.9


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The search for the quickest schedule of a small instance."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("exact_schedule")


def test_no_schedule_that_can_be_found_is_quicker_than_the_bound_and_some_are_as_quick(exact: Any) -> None:
    times = []
    for workload, server in map(exact.instance, (0, 1, 2, 3, 4, 8, 12, 14, 15, 21)):
        lives = tuple(life for (life,) in workload.groups)
        times.append(exact.Search(lives, server).seconds() / bound(workload, server, 1).seconds)
    assert 1.0 <= min(times) < 1.01


@cases("simulation")
def test_the_search_finds_what_a_few_lines_of_arithmetic_find(
    tokens: int, gap: float, seconds: float, exact: Any
) -> None:
    life = (TurnLengths(2, 1, gap), TurnLengths(1, 1))
    server = ServerCosts(tokens=tokens, fill=1.0, step=1.0, step_request=0.0, step_token=0.0)
    assert exact.Search((life, life), server).seconds() == seconds
