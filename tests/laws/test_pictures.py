"""Pictures from a handler to rows: what the engine is asked, what the journal holds and what is resumed agree."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.parquet import read_table

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.chat.pictures import Looker
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.engines.scripted.replay import ReplayEngine
from fsm_rollout.engines.sglang.pictures import SentPictures
from fsm_rollout.engines.wire import Contexts, pack_requests
from fsm_rollout.jobs.export import export
from fsm_rollout.testing import run_virtual
from fsm_rollout.trajectory.enums import LimitName
from fsm_rollout.trajectory.event_bytes import comparable
from fsm_rollout.trajectory.journal import read
from fsm_rollout.trajectory.pictures import StoredPicture, picture_of
from fsm_rollout.trajectory.prompt import Prompt, as_prompts
from fsm_rollout.trajectory.settings import Limits
from fsm_rollout.trajectory.stream import Stream
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.laws import shown_pictures
from tests.laws.shown_pictures import (
    ASKING,
    COMPACTED,
    CROP,
    GRAPH,
    IN_TURNS,
    SHOW,
    Plan,
    Run,
    all_whole,
    content,
    held,
    in_turns,
    picture,
    processor,
    prompt_of,
)
from tests.runs import ASKS
from tests.vision import FAMILIES, PLACEHOLDERS, WITH_TOOLS

words = st.sampled_from(["What?", " and ", "2 + 2", "Ünï "])
shown = st.lists(words | st.integers(0, 5), min_size=1, max_size=4).map(lambda found: ["look", *found, "now"])


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=min(20, settings().max_examples))
@given(said=st.lists(shown, min_size=1, max_size=5))
def test_streams_show_what_was_shown(
    family: str, said: list[list[str | int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    run = Run(family, ["It is so."] * 9, folder / "journal.sqlite")
    trajectories = run_virtual(run.go(prompt_of(said)))
    assert [trajectory.stop_reason for trajectory in trajectories] == ["answered"] * 2
    names = [picture(part) for message in said for part in message if isinstance(part, int)]
    for trajectory in trajectories:
        assert held(run, trajectory) == names
        asked = [request for request in run.asked if request.trajectory_id == trajectory.trajectory_id]
        assert len(asked) == len(said) + 1
    # What is read is what was run.
    assert list(read(folder)) == trajectories


def checked(run: Run, trajectory: Trajectory, plan: Plan) -> None:
    """Hold a trajectory to its plan: each picture in its place, as the processor makes it, once, and never trained."""
    assert (trajectory.stop_reason, trajectory.detail) == ("answered", None)
    (_,) = trajectory.streams
    assert held(run, trajectory) == [
        picture(5), *(picture(part) for _, said in plan for part in said if isinstance(part, int)),
    ]  # fmt: skip


@pytest.mark.parametrize("family", WITH_TOOLS)
@settings(deadline=None, max_examples=min(20, settings().max_examples))
@given(plan=st.lists(st.tuples(st.sampled_from(["tool", "user"]), shown), min_size=1, max_size=5))
def test_prompts_tools_and_users_show_pictures_alike(
    family: str, plan: Plan, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    run, prompt = in_turns(plan, folder, family)
    trajectories = run_virtual(run.go(prompt))
    for trajectory in trajectories:
        checked(run, trajectory, plan)
    assert list(read(folder)) == trajectories


def helped(request: Request) -> str:
    """Say what the agent that asks says, or the other."""
    said = [CROP % 0, CROP % 1, CROP % 2, "Seen."] if request.agent == "helper" else [ASKS, "It is so."]
    return said[request.turn]


ALONE = [["look", 1], [2, "and", 1], ["or", 3, 3], [4]]
PLAN: Plan = [("tool", ["see", 1]), ("user", [2, "and", 1]), ("tool", [3])]


@pytest.mark.parametrize(
    ("graph", "script", "then", "shown"),
    [
        (GRAPH, ["It is so."] * 5, ALONE, {"p/0": [[5, 1, 2, 1, 3, 3, 4]]}),
        (IN_TURNS, [SHOW % 0, "It is so.", SHOW % 2, "It is so."], PLAN, {"p/0": [[5, 1, 2, 1, 3]]}),
        (COMPACTED, [CROP % 0, CROP % 1, "It is so."], (), {"p/0": [[5], [5, 10], [5, 11]]}),
        (ASKING, helped, (), {"p/0": [[5, 11, 12]], "p/0/ask.1": [[10, 11, 12]]}),
    ],
    ids=["a handler", "tools and users", "compaction", "a sub-agent"],
)
@pytest.mark.parametrize("family", WITH_TOOLS)
def test_what_is_shown_is_the_same_when_a_run_goes_on_and_when_it_is_replayed(
    family: str, graph: AgentGraph, script: Any, then: Any, shown: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    first: Any = {"role": "user", "content": content(["Look", 5, "."])}
    prompt = Prompt(prompt_id="p", messages=(first,), then=[list(each) for each in then])

    def all_of(trajectories: list[Trajectory], run: Run) -> dict[str, Any]:
        run.journal.close()
        return {
            trajectory.trajectory_id: [(stream.tokens, stream.media) for stream in trajectory.streams]
            for trajectory in read(run.journal.path)
        }

    # 1. As it is.
    run, told = Run(family, script, tmp_path / "whole.sqlite", graph), list[tuple[str, Any]]()
    recorder = run.scheduler.recorder
    recorder.listeners = (*recorder.listeners, lambda t, event: told.append((t.trajectory_id, event)))
    whole = all_of(run_virtual(run.go(prompt, n=1)), run)
    pictures = {name: [[span.picture for span in media] for _, media in streams] for name, streams in whole.items()}
    assert pictures == {
        name: [[picture(seed) for seed in seeds] for seeds in streams] for name, streams in shown.items()
    }
    for trajectory in read(run.journal.path):
        assert (trajectory.stop_reason, trajectory.detail) == ("answered", None)
        held(run, trajectory)
    # 2. Cut off after any event, and gone on with.
    for kept in range(3, len(told)):
        again = Run(family, script, tmp_path / f"{kept}.sqlite", graph)
        histories: dict[str, list[Any]] = {}
        for trajectory_id, event in told[:kept]:
            again.journal.append(trajectory_id, event)
            histories.setdefault(trajectory_id, []).append(event)
        resumed = [Trajectory.fold(history) for history in histories.values()]
        assert all_of(run_virtual(again.go(prompt, n=1, resume=resumed)), again) == whole, kept
    # 3. Replayed; and not where another picture of as many tokens is shown.
    for shows, same in ((5, True), (6, False)):
        eye = run.processor
        engine = ReplayEngine(
            run.journal.path, tokenizer=eye.tokenizer, processor=eye, max_context=10**6, eos_ids=run.engine.eos_ids
        )
        again = Run(family, (), tmp_path / f"replayed {shows}.sqlite", graph, engine)
        other = prompt.model_copy(update={"messages": ({"role": "user", "content": content(["Look", shows, "."])},)})
        trajectories = run_virtual(again.go(other, n=1))
        assert (all_of(trajectories, again) == whole) is same
        if not same:  # with as many tokens or with others
            assert "ReplayDiverged: " in str(trajectories[0].detail)
            assert family != "gemma3_with_tools" or "another picture than in" in str(trajectories[0].detail)


def test_a_run_is_exported_with_its_pictures_in_openais_form(tmp_path: Path) -> None:
    run = Run("gemma3", ["It is so."] * 9, tmp_path / "journal.sqlite")
    trajectories = run_virtual(run.go(prompt_of([["look", 1], [2, "and", 1]])))
    export(tmp_path, "jsonl", report=lambda _: None)
    export(tmp_path, "parquet", report=lambda _: None)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()]
    table = read_table(tmp_path / "rows.parquet").to_pylist()
    for trajectory, row, line in zip(trajectories, lines, table, strict=True):
        (stream,) = trajectory.streams
        assert row["messages"] == json.loads(line["messages"])
        assert row["messages"][2]["content"][1]["type"] == "image_url"
        (again,) = as_prompts([{"messages": row["messages"][:-1]}])
        assert comparable(again.messages) == comparable(stream.messages[:-1])
        places = [[span.start, span.length, span.placeholder, span.picture.sha256] for span in stream.media]
        assert row["media"] == json.loads(line["media"]) == places


@pytest.mark.parametrize("limit", [LimitName.RESPONSE_TOKENS, LimitName.CONTEXT_TOKENS])
def test_no_limit_cuts_a_picture_apart(limit: LimitName, tmp_path: Path) -> None:
    """Whatever there is room for, what a stream holds of a picture is all of it; and a cut turn is text."""
    prompt = prompt_of([["look", 1, 2], [3, "and", 1]])

    def tokens(most: int | None) -> tuple[Trajectory, Stream]:
        run = Run("gemma3", ["It is so."] * 9, tmp_path / f"{most}.sqlite")
        limited = prompt.model_copy(update={"limits": Limits(**({} if most is None else {limit: most}))})
        trajectory = run_virtual(run.go(limited))[0]
        return trajectory, trajectory.streams[0]

    _, whole = tokens(None)
    least = whole.tokens.prompt_length + 1 if limit is LimitName.CONTEXT_TOKENS else 1
    shown = set[int]()
    for most in range(least, whole.tokens.length + 1):
        trajectory, stream = tokens(most)
        assert trajectory.stop_reason in ("answered", f"limit:{limit}", "truncated"), trajectory.detail
        all_whole(stream, processor("gemma3"), PLACEHOLDERS["gemma3"])
        shown.add(len(stream.media))
    assert shown == {0, 2, 4}, "each message's pictures come together or not at all"


def test_a_picture_that_is_shown_in_every_turn_is_decoded_processed_and_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(9)
    large = picture_of(rng.integers(0, 256, (300, 300, 3), dtype=np.uint8))
    monkeypatch.setattr(shown_pictures, "picture", lambda seed: large)
    made: list[StoredPicture] = []
    real = Looker.made
    monkeypatch.setattr(Looker, "made", lambda self, shown, text: (made.append(shown), real(self, shown, text))[1])
    graph = GRAPH.model_copy(update={"limits": GRAPH.limits.model_copy(update={"assistant_turns": 11})})
    run = Run("gemma3", ["It is so."] * 11, tmp_path / "journal.sqlite", graph)
    trajectories = run_virtual(run.go(prompt_of([["look", 1]] * 10), n=32))
    assert [len(trajectory.streams[0].media) for trajectory in trajectories] == [10] * 32
    assert made.count(large) == 1
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as connection:
        assert connection.execute("SELECT COUNT(*), SUM(LENGTH(data)) FROM blobs").fetchone() == (1, len(large.data))
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert (tmp_path / "journal.sqlite").stat().st_size < 5 * len(large.data), "of 320"
    sent, contexts = SentPictures(run.processor, in_files=False), Contexts()
    written = [sent.prompt(request.ids, request.media).get("image_data", []) for request in run.asked]
    assert len({id(address) for addresses in written for address in addresses}) == 1, "encoded once"
    assert sum(len(pack_requests([request], contexts)) for request in run.asked) < 5 * len(large.data), "of 1,760"


@pytest.mark.parametrize("before", ["", "I see "])
def test_a_sampled_pad_ends_the_trajectory_and_stands_nowhere(before: str, tmp_path: Path) -> None:
    tokenizer = processor("gemma3").tokenizer
    pad = tokenizer.convert_tokens_to_ids("<image_soft_token>")
    ids = [*tokenizer.encode(before, add_special_tokens=False), pad]
    run = Run("gemma3", ["Yes.", Turn(ids=ids)], tmp_path / "journal.sqlite")
    for trajectory in run_virtual(run.go(prompt_of([["look", 1]]))):
        assert (trajectory.stop_reason, trajectory.failure) == ("failed:PictureSampled", "policy")
        assert "'<image_soft_token>', which stands for a picture" in (trajectory.detail or "")
        (stream,) = trajectory.streams
        assert stream.tokens.tail(stream.tokens.length - len(ids) + 1).tolist() == ids[:-1]
        assert pad not in [id_ for span in stream.tokens.sampled() for id_ in stream.tokens.ids[span.start : span.end]]
