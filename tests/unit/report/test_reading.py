"""What makes long runs and long trajectories readable: folding, counting, finding one's way."""

import html
import json
import re
from array import array
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout import Rollout, load_agent
from fsm_rollout.jobs.summary import summarize, summary_table
from fsm_rollout.report.figures import Line
from fsm_rollout.report.folding import Block, folded_repeats
from fsm_rollout.report.pages import page_path
from fsm_rollout.report.recording import Recording, open_run
from fsm_rollout.report.report import write_report
from fsm_rollout.report.show import show
from fsm_rollout.report.texts import GOES_ON, percent
from fsm_rollout.report.trajectory import trajectory_page, why_apart
from fsm_rollout.trajectory.enums import ForkReason
from fsm_rollout.trajectory.events import (
    AnyEvent,
    ContextOpened,
    Ended,
    Generated,
    MessagesAppended,
    Scored,
    Transitioned,
)
from fsm_rollout.trajectory.journal import Journal
from tests.cases import cases
from tests.embedded import tokenizer
from tests.events import generated, opened, prompted
from tests.kit import CONFIGS, on_screen
from tests.unit.report.recorded_runs import history, write_run


def moved(source: str, trigger: str, dest: str, stop_reason: str | None = None) -> Transitioned:
    return Transitioned(at=101.0, trigger=trigger, source=source, dest=dest, spent={}, stop_reason=stop_reason)


def rounds(count: int) -> list[AnyEvent]:
    """A trajectory that goes round between two states."""
    begun = history()[0]
    there = moved("GENERATING", "generated", "PROCESSING_TOOLS")
    back = moved("PROCESSING_TOOLS", "tools_done", "GENERATING")
    around = [step for _ in range(count) for step in (there, back)]
    return [begun, moved("PENDING", "prompted", "GENERATING"), *around,
            moved("GENERATING", "generated", "TERMINATED", "answered")]  # fmt: skip


def text_of(page: str, part: str) -> str:
    """The words of the page's first element that begins so."""
    inside = page.partition(part)[2].partition("</p>")[0]
    return " ".join(html.unescape(re.sub("<[^>]*>", "", inside.partition(">")[2])).split())


# Folding.


@given(st.lists(st.sampled_from("ab"), max_size=30) | st.lists(st.sampled_from("abc"), max_size=5).map(lambda x: x * 7))
def test_unfolding_gives_the_sequence_again(items: list[str]) -> None:
    assert [item for block in folded_repeats(items) for _ in range(block.times) for item in block.items] == items


@cases("report")
def test_what_repeats_is_said_once(items: str, blocks: list[tuple[str, int]]) -> None:
    assert folded_repeats(items) == [Block(tuple(part), times) for part, times in blocks]


def test_forty_rounds_are_one_line(tmp_path: Path) -> None:
    page = trajectory_page(Recording.of(rounds(40)))
    steps = text_of(page, '<p class="steps"')
    assert steps == (
        "PENDING prompted → (GENERATING generated → PROCESSING_TOOLS tools_done → ) ×40 GENERATING generated → "
        "TERMINATED"
    )
    write_run(tmp_path, {"0/0": rounds(40)})
    assert "PENDING → (GENERATING → PROCESSING_TOOLS) ×40 → GENERATING → TERMINATED" in on_screen(
        show(tmp_path, "0/0"), 200
    )


# Shares.


@cases("report", (1e-6, "<0.1 %"))
def test_something_is_never_nothing_and_never_all(share: float, said: str) -> None:
    assert percent(share) == said


# Characters of several tokens.


def test_characters_of_several_tokens_are_not_crossed_out(tmp_path: Path) -> None:
    events = history(text="漢字")
    ids = tokenizer()("漢字 😀", add_special_tokens=False)["input_ids"]
    assert len(ids) > 6
    for at, event in enumerate(events):
        if isinstance(event, Generated):
            events[at] = replace(
                event, ids=array("i", ids), logprobs=array("f", [-0.5] * len(ids)), versions=[(len(ids), 0)]
            )
    write_run(tmp_path, {"0/0": events})
    screen = on_screen(show(tmp_path, "0/0"), 200)
    assert "漢字 😀" in screen
    assert GOES_ON not in screen


# Groups.


def scored(folder: Path, groups: dict[str, tuple[float, ...]]) -> str:
    write_report(write_run(folder, {
        f"{group}/{sample}": history(f"{group}/{sample}", group_id=group, score=score)
        for group, scores in groups.items() for sample, score in enumerate(scores)
    }))  # fmt: skip
    return (folder / "report.html").read_text("utf-8").partition('id="groups"')[2].partition("</section>")[0]


def test_groups_that_are_solved_or_not_are_counted(tmp_path: Path) -> None:
    groups = {f"half{n}": (0.0, 1.0) for n in range(40)} | {"none": (0.0, 0.0), "all": (1.0, 1.0), "also": (1.0, 1.0)}
    section = scored(tmp_path, groups)
    rows = re.findall(r"<span>(\d+) of (\d+) solved</span>.*?width:([\d.]+)%.*?<span>([^<]*)</span>", section)
    assert rows == [("0", "2", "2.50", "1 group"), ("1", "2", "100.00", "40 groups"), ("2", "2", "5.00", "2 groups")]
    assert 'class="group"' not in section, "forty equal rows say no more than one number"


def test_groups_of_other_scores_keep_their_rows(tmp_path: Path) -> None:
    section = scored(tmp_path, {"a": (0.0, 1.0), "b": (0.0, 0.5)})
    assert section.count('class="group"') == 2
    assert "solved" not in section


def test_histograms_say_their_counts(tmp_path: Path) -> None:
    write_report(write_run(tmp_path, {f"{n}/0": history(f"{n}/0", group_id=str(n), score=n % 2) for n in range(10)}))
    page = (tmp_path / "report.html").read_text("utf-8")
    section = page.partition('id="spreads"')[2].partition("</section>")[0]
    score = section.partition("score <small>")[2].partition("</div></div>")[0]
    assert re.findall("<b>(\\d+)</b>", score) == ["5", "5"]


# Finding one's way.


def links_of(page: Path) -> list[str]:
    beside = page.read_text("utf-8").partition('<nav class="beside">')[2].partition("</nav>")[0]
    return re.findall(r'<a href="([^"]*)"', beside)


def test_a_page_leads_to_its_group_and_to_those_beside_it(tmp_path: Path) -> None:
    ids = [f"{group}/{sample}" for group in range(3) for sample in range(2)]
    run = write_run(tmp_path, {id_: history(id_, group_id=id_[0]) for id_ in ids})
    for id_ in ids:
        show(run, id_, page_path(run, id_))
    page = page_path(run, "1/0")
    show(run, "1/0", page)
    assert links_of(page) == [page_path(run, id_).name for id_ in ("0/1", "1/1", "1/1")]
    page_path(run, "0/1").unlink()
    page_path(run, "1/1").unlink()
    show(run, "1/0", page)
    assert links_of(page) == [page_path(run, id_).name for id_ in ("0/0", "2/0")], "the next that has a page"
    assert "--trajectory 1/1 -o" in page.read_text("utf-8"), "the command that makes the other"


def test_turns_have_an_index() -> None:
    events = history()
    turns = [event for event in events if isinstance(event, Generated)]
    more = [replace(turns[-1], continued=True) for _ in range(3)]
    at = events.index(turns[-1]) + 1
    page = trajectory_page(Recording.of([*events[:at], *more, *events[at:]]))
    index = page.partition('<nav class="turns"')[2].partition("</nav>")[0]
    places = re.findall(r'<a href="#(card-\d+)"', index)
    assert len(places) == len(turns) + 3
    assert all(f'id="{place}"' in page for place in places)
    assert '<nav class="turns"' not in trajectory_page(Recording.of(events)), "two turns are found without"


def test_an_abandoned_prompt_is_told_apart(tmp_path: Path) -> None:
    """The first prompt grew before anything was sampled, and the next stream opened with all of it."""
    events = history()
    at = next(place for place, event in enumerate(events) if isinstance(event, ContextOpened))
    events.insert(at, events[at])
    page = trajectory_page(Recording.of(events))
    assert page.count('class="card prompt abandoned') == 1
    assert page.count("abandoned before its first generation") == 1
    write_run(tmp_path, {"0/0": events})
    assert on_screen(show(tmp_path, "0/0"), 200).count("abandoned: more was said") == 1
    assert "abandoned" not in re.sub("(?s)<style>.*?</style>", "", trajectory_page(Recording.of(history())))


def test_calls_say_whose_fault_their_failures_were(tmp_path: Path) -> None:
    def called(**facts: Any) -> str:
        events = [replace(e, **facts) if type(e).__name__ == "Called" else e for e in history(failure="KeyError")]
        return trajectory_page(Recording.of(events))

    assert "1 failed, 1 through the model’s fault" in called(bad=True)
    assert "1 failed</small>" in called(bad=False)


def test_a_turn_is_a_message_and_a_generation_is_one_everywhere(tmp_path: Path) -> None:
    """The run's table, `show`, the report, the pages and the tensors mean the same by a word."""
    agent = load_agent(CONFIGS / "agents/tool_agent.yaml")
    call = '<tool_call>\n{"name": "calculate", "arguments": {"left": 3, "operator": "+", "right": 4}}\n</tool_call>'
    engine = {"kind": "scripted", "turns": [call, "The answer is 7."]}
    with Journal(tmp_path / "journal.sqlite") as journal, Rollout(agent, engine, journal=journal) as rollout:
        batch = rollout.run(["What is 3 + 4?"])
    (trajectory,) = (recording.trajectory for recording in open_run(tmp_path).recordings())
    messages = ["user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in trajectory.messages if message["role"] != "system"] == messages
    assert (len(trajectory.assistant_turns), trajectory.generations) == (2, 2)
    assert batch.tensordict["num_turns"] == [4]
    summary = summarize([trajectory], wall_seconds=1.0)
    assert (summary["turns_mean"], summary["generations_mean"]) == (4.0, 2.0)
    assert "4.0 messages, 2.0 generations on average" in on_screen(summary_table(summary), 200)
    head, row = on_screen(show(tmp_path), 200).splitlines()[-2:]
    assert row.split()[head.split().index("generations") - 1] == "2"  # "stop reason" is two words
    assert "generation 1" in on_screen(show(tmp_path, "0/0"), 200)
    write_report(tmp_path)
    columns = json.loads(re.search(r'"columns": ?(\[.*?\])', (tmp_path / "report.html").read_text("utf-8"))[1])  # type: ignore[index]
    assert {"messages", "generations"} <= {column["name"] for column in columns}


def test_messages_of_a_split_history_count_once() -> None:
    events: list[AnyEvent] = [prompted()]
    messages = [{"role": "user", "content": "Go."}]
    for number in range(4):
        begins = [{"role": "system", "content": "Be brief."}, *messages]
        events.append(opened(messages=begins, instead_of_glue=number > 0))
        said = [{"role": "assistant", "content": f"{number}"}, {"role": "user", "content": f"{number}?"}]
        events += [generated(message=said[0]), MessagesAppended(at=101.0, context="main", state="S", messages=said[1:])]
        messages = [*messages, *said]
    recording = Recording.of(events)
    assert Line(recording).messages == summarize([recording.trajectory], wall_seconds=1.0)["turns_mean"] == 9


def test_a_foreign_agent_s_histories_are_told_apart() -> None:
    events: list[AnyEvent] = [
        *(event for event in history() if not isinstance(event, Ended | Scored)),
        *(
            ContextOpened(
                at=111.0, context=f"main~{number}", state="EXTERNAL", messages=[{"role": "user", "content": "x"}],
                ids=array("i", [1, 2]), trained=True, engine="policy", why=why,
            )
            for number, why in enumerate(ForkReason)
        ),
    ]  # fmt: skip
    page = html.unescape(trajectory_page(Recording.of(events)))
    assert [page.count(f"; {why_apart(why)}</figcaption>") for why in ForkReason] == [1] * len(ForkReason)
    (trajectory,) = [Recording.of(events).trajectory]
    counted = summarize([trajectory], wall_seconds=1.0)
    assert counted["forks"] == dict.fromkeys(ForkReason, 1)
    assert "side_call 1" in on_screen(summary_table(counted), 400)
