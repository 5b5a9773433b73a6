"""Batches as trees. The oracle knows each token by where it was first said, and what stands before it by its rows."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsm_rollout as fr
from fsm_rollout.batch import branches
from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.batch.tree import TokenTree
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.events import generated, opened, prompted
from tests.kit import CONFIGS

Whole = tuple[int, ...]
Forks = list[tuple[int, int, int]]
forks = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2)), max_size=6)
"""Of each further stream: which earlier one it begins as, with how many tokens, and how much else is its prompt."""


def trajectories_of(drawn: Sequence[Forks]) -> tuple[list[Trajectory], list[Whole]]:
    """Return trajectories, two to a prompt, and the tokens of their streams; no id stands for two tokens."""
    fresh = count(100)
    made: list[Trajectory] = []
    every: list[Whole] = []
    prompt: list[int] = []
    for number, further in enumerate(drawn):
        prompt = prompt if number % 2 else [next(fresh) for _ in range(3)]
        events = [prompted(f"g{number // 2}/{number % 2}")]
        wholes: list[list[int]] = []
        for at, (source, kept, new) in enumerate([(0, 0, 0), *further]):
            opening, shares = list(prompt), None
            if at:
                source %= at
                opening = wholes[source][: 1 + kept % len(wholes[source])]
                shares = (source, len(opening))
                opening += [next(fresh) for _ in range(new)]
            said = [next(fresh) for _ in range(1 + new)]
            name = f"main~{at}"
            events += [
                opened(name, ids=array("i", opening), shares=shares),
                generated(name, len(said), ids=array("i", said)),
            ]
            wholes.append([*opening, *said])
            every.append(tuple(wholes[-1]))
        made.append(Trajectory.fold(events))
    return made, every


def check_tree(batch: TrajectoryBatch) -> TokenTree:
    """Hold a batch's tree to its laws, which know nothing of how it was grown."""
    tree = batch.tree()
    mask = tree.attention_mask()[0, 0]
    flex = tree.mask_mod()
    size = torch.arange(len(tree.input_ids))
    assert torch.equal(mask, flex(None, None, size[:, None], size[None]))
    for number, row in enumerate(batch.rows()):
        places = [place for place in tree.places[number].tolist() if place >= 0]
        assert tree.input_ids[places].tolist() == [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
        assert tree.position_ids[places].tolist() == list(range(len(places)))
        assert tree.previous[places].tolist() == [-1, *places[:-1]]
        for at, place in enumerate(places):
            assert mask[place].nonzero()[:, 0].tolist() == sorted(places[: at + 1])
    back = tree.by_row(tree.input_ids)
    if batch.packed:
        assert torch.equal(back.values(), batch["input_ids"].values())
    else:
        assert torch.equal(back, batch["input_ids"] * batch["attention_mask"])
    check_nodes(tree)
    return tree


def check_nodes(tree: TokenTree) -> None:
    entries, exits, parents = (t.tolist() for t in (tree.node_entries, tree.node_exits, tree.node_parents))
    for node, (entry, exit_, parent) in enumerate(zip(entries, exits, parents, strict=True)):
        below = [other for other in range(len(parents)) if entry <= entries[other] < exit_]
        assert node in below
        assert parent < node
        assert parent < 0 or (entries[parent] < entry < exit_ <= exits[parent])
        assert all(other == node or parents[other] in below for other in below)


@given(st.lists(forks, max_size=4), st.booleans(), st.data())
def test_paths_give_back_the_rows_and_what_is_shared_stands_once(
    drawn: list[Forks], packed: bool, data: st.DataObject
) -> None:
    made, wholes = trajectories_of(drawn)
    batch = TrajectoryBatch.from_trajectories(made, pad_id=0, packed=packed)
    tree = check_tree(batch)
    once = {token for whole in wholes for token in whole}
    assert len(tree.input_ids) == len(once)
    total = sum(map(len, wholes))
    assert branches.tree_token_ratio(made) == (len(once) / total if total else None)
    assert tree.ratio == (len(once) / total if total else 0.0)
    if len(batch):
        chosen = data.draw(st.lists(st.sampled_from(range(len(batch))), unique=True, min_size=1))
        check_tree(batch.select(chosen))


@given(st.lists(forks, min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 3))
def test_rows_that_were_cut_share_what_their_tokens_bear_out(drawn: list[Forks], left: int, right: int) -> None:
    made, _ = trajectories_of(drawn)
    widths = {"prompt_width": left, "response_width": right}
    batch = TrajectoryBatch.from_trajectories(made, pad_id=0, overflow="truncate", **widths)
    check_tree(batch)
    check_tree(TrajectoryBatch.from_rows(batch.rows(), pad_id=0))


def forked(turns: int, said: int, order: str) -> Trajectory:
    """Return a trajectory of so many turns of so many tokens, with a fork of each, or of each fork the next."""
    ids = array("i", range(turns * said))
    turn = [generated("main~0", said, ids=ids[at * said : (at + 1) * said]) for at in range(turns)]
    events = [prompted(), opened("main~0", ids=array("i", [-1])), *turn]
    for number, kept in enumerate(reversed(range(1, turns)) if order == "last first" else range(1, turns)):
        shares = (number if order == "fork of fork" else 0, 1 + kept * said)
        name, opening = f"main~{number + 1}", array("i", [-1, *ids[: kept * said]])
        more = array("i", ids[kept * said :] if order == "fork of fork" else [-2])
        events += [opened(name, ids=opening, shares=shares), generated(name, len(more), ids=more)]
    return Trajectory.fold(events)


def steps(trajectory: Trajectory) -> int:
    """Return how many lines of the module that grows trees run for one of a trajectory."""
    counted = 0

    def note(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal counted
        counted += event == "line"
        return note if frame.f_code.co_filename == branches.__file__ else None

    before = sys.gettrace()
    sys.settrace(note)
    try:
        assert branches.tree_token_ratio([trajectory])
    finally:
        sys.settrace(before)
    return counted


@pytest.mark.parametrize("order", ["first first", "last first", "fork of fork"])
def test_a_tree_takes_as_many_steps_as_there_are_events_and_none_more_for_tokens(order: str) -> None:
    few = steps(forked(20, 1, order))
    assert steps(forked(20, 50, order)) == few
    assert steps(forked(80, 1, order)) < 4.2 * few


def test_a_batch_with_pictures_has_no_tree() -> None:
    from fsm_rollout.errors import BatchError
    from tests.unit.batch.test_media import batch

    with pytest.raises(BatchError, match="rows show pictures, whose places a tree does not have"):
        batch("gemma3").tree()


def embedded() -> Any:
    from fsm_rollout.engines.transformers.checkpoints import load_model

    return load_model("embedded")[0].eval().double()


def by_tree(model: Any, tree: TokenTree) -> torch.Tensor:
    with torch.no_grad():
        ids, positions = tree.input_ids[None], tree.position_ids[None]
        out = model(input_ids=ids, position_ids=positions, attention_mask=tree.attention_mask())
    return tree.by_row(tree.log_probs(out.logits[0]))


def by_rows(model: Any, batch: TrajectoryBatch) -> torch.Tensor:
    names = ("input_ids", "attention_mask", "position_ids")
    with torch.no_grad():
        logits = model(**{name: batch[name] for name in names}).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]


def forked_batch() -> TrajectoryBatch:
    """Two prompts of two samples each, which fork, of ids that the embedded model knows."""
    drawn = [[(0, 3, 2), (1, 5, 0), (1, 3, 1)], [(0, 2, 2)], [(0, 0, 2), (0, 4, 1), (2, 3, 2)], []]
    return TrajectoryBatch.from_trajectories(trajectories_of(drawn)[0], pad_id=0)


@pytest.mark.parametrize("agent", [None, "tool_user"])
def test_log_probs_over_the_tree_are_those_of_the_rows(agent: str | None) -> None:
    model = embedded()
    if agent is None:
        batch = forked_batch()
    else:
        prompts = fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=2)
        engine = {"kind": "transformers", "model": "embedded", "threads": 1}
        with fr.Rollout(CONFIGS / f"agents/{agent}.yaml", engine) as rollout:
            batch = rollout.run(prompts, n=4)
    tree = check_tree(batch)
    assert tree.ratio < 0.8
    attended = batch["attention_mask"].bool()
    known = (attended[:, 1:] & attended[:, :-1]).nonzero(as_tuple=True)
    rows, found = by_rows(model, batch), by_tree(model, tree)[:, 1:]
    assert (rows[known] - found[known]).abs().max() < 1e-5
    if agent is not None:  # and so those of the engine
        left = batch["prompts"].shape[1]
        trained = batch["response_mask"].bool()
        assert (batch["rollout_log_probs"] - found[:, left - 1 :])[trained].abs().max() < 1e-4
    # Without its parent, a branch's are others: of the first node's children, only the first sees it.
    exits = tree.exits.clone()
    exits[: int(tree.node_entries[1])] = tree.node_exits[1]
    wrong = by_tree(model, replace(tree, exits=exits))[:, 1:]
    assert (rows[known] - wrong[known]).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_takes_the_mask() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tree = forked_batch().tree()
    size = len(tree.input_ids)
    query, key, value = torch.randn(3, 1, 2, size, 16, generator=torch.Generator().manual_seed(0))
    block_mask = create_block_mask(tree.mask_mod(), None, None, size, size, device="cpu")
    flex = flex_attention(query, key, value, block_mask=block_mask)
    mask = tree.attention_mask()
    torch.testing.assert_close(
        flex, torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    )
