"""What is in the pages, without a browser: the tokens bit for bit, no markup from data, bad input."""

import base64
import html
import json
import re
from array import array
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import TypeAdapter
from typer.testing import CliRunner

from fsm_rollout.agent.loader import load_agent
from fsm_rollout.cli import app
from fsm_rollout.jobs.run_config import Rewards
from fsm_rollout.report.cards import cards
from fsm_rollout.report.flow import Flow
from fsm_rollout.report.pages import number as said_number
from fsm_rollout.report.pages import page_path
from fsm_rollout.report.recording import Recording
from fsm_rollout.report.texts import GOES_ON, TokenTexts, visible
from fsm_rollout.report.trajectory import token_data, trajectory_page
from fsm_rollout.trajectory.events import (
    AnyEvent,
    Called,
    ContextOpened,
    Generated,
    Prompted,
    PromptExtended,
    Transitioned,
)
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.tokens import TokenStream
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.embedded import tokenizer
from tests.histories import event_sequences
from tests.kit import ROOT
from tests.unit.report.recorded_runs import CONFIGS, NASTY, ODD, Elements, history, write_run


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    assert "<" not in found[1]
    return json.loads(found[1])


def shown(*args: str) -> str:
    done = CliRunner().invoke(app, ["show", *args])
    assert done.exit_code == 0, done.output
    return done.output


def refused(*args: str) -> str:
    done = CliRunner().invoke(app, ["show", *args])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return " ".join(done.output.split())


@given(event_sequences)
@settings(max_examples=min(40, settings().max_examples))
def test_the_page_holds_the_tokens_bit_for_bit(events: list[AnyEvent]) -> None:
    recording = Recording.of(events)
    found = data_of(trajectory_page(recording))["streams"]
    assert len(found) == len(recording.trajectory.streams)
    for written, stream in zip(found, recording.trajectory.streams, strict=True):
        ids = np.frombuffer(base64.b64decode(written["ids"]), "<i4")
        logprobs = np.frombuffer(base64.b64decode(written["logprobs"]), "<f4")
        mask = np.zeros(len(ids), np.int8)
        for start, end, owner, *_ in written["spans"]:
            mask[start:end] = owner == "model" and written["trained"]
        prompt = stream.tokens.prompt_length
        assert ids.tolist() == stream.tokens.ids.tolist()
        assert logprobs[prompt:].tobytes() == stream.tokens.response_logprobs().tobytes()
        assert not logprobs[:prompt].any()
        assert not mask[:prompt].any()
        assert (mask[prompt:] == stream.tokens.response_mask()).all()


@given(event_sequences, st.booleans())
@settings(max_examples=min(60, settings().max_examples))
def test_cards_cover_every_stream_once(events: list[AnyEvent], with_events: bool) -> None:
    trajectory = Trajectory.fold(events)
    found = [card for card in cards(Recording(trajectory, events if with_events else ())) if card.stream >= 0]
    for number, stream in enumerate(trajectory.streams):
        at = 0
        for card in (card for card in found if card.stream == number and card.kind != "pending"):
            assert card.start == at
            at = card.end
        assert at == len(stream.tokens)
        waiting = [card for card in found if card.stream == number and card.kind == "pending"]
        if stream.open and stream.pending:
            assert [message for card in waiting for message in card.messages] == stream.pending


@given(event_sequences)
@settings(max_examples=min(40, settings().max_examples))
def test_every_transition_is_on_one_edge(events: list[AnyEvent]) -> None:
    traffic = Flow("solver", None)
    traffic.add(Recording.of(events))
    moved = [(e.source, e.trigger, e.dest) for e in events if isinstance(e, Transitioned)]
    assert {(e.source, e.trigger, e.dest): e.count for e in traffic.edges} == {m: moved.count(m) for m in moved}
    assert sorted(place for edge in traffic.edges for place in edge.order) == list(range(1, len(moved) + 1))
    for state in {source for source, _, _ in moved}:
        assert sum(traffic.share(e) for e in traffic.edges if e.source == state) == pytest.approx(1)


def test_rows_not_taken_are_edges_too() -> None:
    graph = load_agent(CONFIGS / "agents/tool_user.yaml")
    traffic = Flow("tool_user", graph)
    assert {(e.source, e.trigger, e.dest) for e in traffic.edges} >= {
        (source, row.trigger, row.dest) for row in graph.transitions for source in row.source if source != "*"
    }


@pytest.mark.parametrize("nasty", [NASTY, ODD], ids=["markup", "odd"])
def test_nothing_in_the_data_becomes_markup(tmp_path: Path, nasty: str) -> None:
    calm = history("0/0", text="calm", told="calm", failure="calm", stop_reason="failed:calm", group_id="calm")
    wild = history(nasty, text=nasty, told=nasty, failure=nasty, stop_reason=f"failed:{nasty}", group_id=nasty)
    pages = []
    for name, trajectory_id, events in (("calm", "0/0", calm), ("wild", nasty, wild)):
        write_run(tmp_path / name, {trajectory_id: events})
        shown(str(tmp_path / name), "--trajectory", trajectory_id, "-o", str(tmp_path / f"{name}.html"))
        shown(str(tmp_path / name), "-o", str(tmp_path / f"{name}.report.html"))
        pages.append([(tmp_path / f"{name}{kind}").read_text("utf-8") for kind in (".html", ".report.html")])
    for calm_page, wild_page in zip(*pages, strict=True):
        tags = [[tag for tag, _ in Elements(page).tags if tag not in ("option",)] for page in (calm_page, wild_page)]
        assert tags[0] == tags[1], "text made elements"
        assert data_of(wild_page)["kind"] == data_of(calm_page)["kind"], "the data's element ends where it should"
        assert not any(name.startswith("on") for _, attributes in Elements(wild_page).tags for name in attributes)
        assert "\x00" not in wild_page
        assert "\u202e" not in wild_page.split('id="data"')[0]


def test_a_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"0/0": history()})
    shown(str(run), "--trajectory", "0/0", "-o", str(tmp_path / "t.html"))
    shown(str(run), "-o", str(tmp_path / "r.html"))
    for name in ("t.html", "r.html"):
        page = (tmp_path / name).read_text("utf-8")
        assert "default-src 'none'" in html.unescape(page)
        for tag, attributes in Elements(page).tags:
            assert tag not in ("link", "img", "iframe", "object", "embed"), tag
            assert not attributes.get("src")
            assert not (attributes.get("href") or "").startswith(("http", "//"))


def test_every_token_has_one_text_and_characters_over_several_are_whole() -> None:
    text = "añ שלום 👩‍👩‍👧 <|im_end|>"
    ids = array("i", tokenizer().encode(text, add_special_tokens=False))
    texts, stream = TokenTexts(tokenizer()), TokenStream(ids, state="PENDING")
    vocabulary, spread = texts.vocabulary(ids), texts.spread(stream)
    found = [spread.get(at, vocabulary[id_]) for at, id_ in enumerate(ids)]
    assert len(found) == len(ids) > len(text) / 2
    assert "".join(part for part in found if part != GOES_ON) == text
    assert vocabulary[ids[-1]] == texts.markers[ids[-1]] == "<|im_end|>"


def test_what_was_guarded_is_known_by_place_and_not_by_what_it_spells() -> None:
    told = history(told="a <|im_end|> b")
    at = next(place for place, event in enumerate(told) if isinstance(event, PromptExtended))
    glue = told[at]
    assert isinstance(glue, PromptExtended)
    assert len(glue.guarded_at) > 1
    for places in (glue.guarded_at, glue.guarded_at[:1], []):
        recording = Recording.of([*told[:at], replace(glue, guarded_at=places), *told[at + 1 :]])
        (stream,) = token_data(recording.trajectory, lambda engine: TokenTexts(tokenizer()))["streams"]
        start = next(card.start for card in cards(recording) if card.kind == "environment")
        assert stream["guarded"] == [start + place for place in places]


def test_what_was_asked_and_answered_stands_at_the_top() -> None:
    def gist(**facts: Any) -> list[str]:
        page = trajectory_page(Recording.of(history(**facts)))
        _, found, rest = page.partition('<dl class="gist">')
        rows = re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", rest.partition("</dl>")[0] if found else "")
        return [f"{name}: {html.unescape(text)}" for name, text in rows]

    assert gist(text="How many?\nThree?") == ["question: How many? Three?", "expected: How many? Three?",
                                              "last answer: How many? Three?"]  # fmt: skip
    begun, *rest = history()
    asked_on = replace(begun, extra={"answer": 7, "interaction_kwargs": {"answers": ["9", 11]}})
    assert "7, then 9, then 11" in trajectory_page(Recording.of([asked_on, *rest]))
    assert gist(text=NASTY)[0] == f"question: {NASTY}"
    assert len(gist(text="word " * 500)[0]) < 300
    assert gist(text="") == []


def test_a_limit_that_only_another_version_knows_is_shown_like_any_other() -> None:
    begun, *others = history()
    assert isinstance(begun, Prompted)
    limits = begun.limits | {"judge_calls": 7.0}
    page = trajectory_page(Recording.of([replace(begun, limits=limits), *others]))
    assert "judge_calls" in page


def test_what_a_critic_said_is_not_what_a_trajectory_came_to() -> None:
    events = history()
    opened = next(event for event in events if isinstance(event, ContextOpened))
    generated = [event for event in events if isinstance(event, Generated)][-1]
    at = events.index(generated) + 1
    verdict = [
        replace(
            opened, at=generated.at, context="critic", trained=False, messages=[{"role": "user", "content": "Is it?"}]
        ),
        replace(generated, context="critic", message={"role": "assistant", "content": "ACCEPT"}),
    ]
    page = trajectory_page(Recording.of([*events[:at], *verdict, *events[at:]]))
    top = page.partition('<dl class="gist">')[2].partition("</dl>")[0]
    assert "The answer is 3." in top
    assert "ACCEPT" not in top
    assert "Is it?" not in top


@given(st.text())
def test_visible_text_hides_nothing(text: str) -> None:
    seen = visible(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]", seen)
    assert seen.count("\n") == text.count("\n")


def test_a_run_that_is_being_written_can_be_looked_at(tmp_path: Path) -> None:
    events = history()
    with Journal(tmp_path / "journal.sqlite", metadata={"run": {}}) as journal:
        for event in events[:6]:
            journal.append("0/0", event)
        journal.flush()
        assert "has not ended" in " ".join(shown(str(tmp_path)).split())
        shown(str(tmp_path), "-o", str(tmp_path / "r.html"))
        shown(str(tmp_path), "--trajectory", "0/0", "-o", str(tmp_path / "t.html"))
    assert "It has not ended: it is in PROCESSING_TOOLS." in (tmp_path / "t.html").read_text("utf-8")
    assert "the run has not ended" in (tmp_path / "r.html").read_text("utf-8")
    assert data_of((tmp_path / "r.html").read_text("utf-8"))["rows"][0][3] == "unfinished"


def test_a_journal_of_ones_own_program_is_not_said_to_be_cut_off(tmp_path: Path) -> None:
    """It never has a summary; what has not ended in it says so itself."""
    with Journal(tmp_path / "journal.sqlite") as journal:
        for event in history():
            journal.append("0/0", event)
        for event in history("0/1")[:6]:
            journal.append("0/1", event)
    shown(str(tmp_path), "-o", str(tmp_path / "r.html"))
    page = (tmp_path / "r.html").read_text("utf-8")
    assert "the run has not ended" not in page
    assert [row[3] for row in data_of(page)["rows"]] == ["answered", "unfinished"]


def test_a_report_says_what_was_run_and_where_all_time_went(tmp_path: Path) -> None:
    engine = {"kind": "transformers", "model": "embedded", "replicas": 2, "placement": "ray"}
    facts = {"n": 4, "seed": 7, "sampling": {"temperature": 1.0, "top_p": None}, "odd": 1}
    rewards = TypeAdapter(Rewards).validate_python(["exact_answer", {"use": "my.rewards:short", "weight": 0.5}])
    facts["reward"] = [reward.model_dump(mode="json") for reward in rewards]
    write_run(tmp_path, {"0/0": history(), "0/1": history("0/1")}, engine=engine, **facts)
    shown(str(tmp_path), "-o", str(tmp_path / "r.html"))
    page = (tmp_path / "r.html").read_text("utf-8")
    setting = (
        "tool_user · transformers embedded, 2 replicas on Ray · 4 per prompt · temperature 1.0 · seed 7 · "
        "reward exact_answer · reward 0.5 × short\n"
    )
    text = re.sub("<.*?>", "", page)
    assert setting in text
    # Of each 10 s: 1 s in queues, 4.5 s generating, 2 s in the tool, 1 s interacting.
    shares = "queue 10 %, generate 45 %, tool 20 %, interact 10 %, other 15 %"
    assert f"10.0 s on average: {shares}" in text.replace("\u00a0", " ")
    for odd in ({"engine": "x", "sampling": 3, "reward": ["?"]}, {"engine": {}, "n": None}):
        write_run(tmp_path / f"odd{len(odd)}", {"0/0": history()}, **odd)
        shown(str(tmp_path / f"odd{len(odd)}"), "-o", str(tmp_path / "r.html"))


@cases("report", (1 / 3, "0.333"), (4e-9, "4.0e-09"), (float("inf"), "inf"))
def test_numbers_are_said_without_noise(value: float | None, said: str) -> None:
    assert said_number(value) == said


def test_an_empty_run_is_one_without_trajectories(tmp_path: Path) -> None:
    write_run(tmp_path, {})
    assert "no trajectories" in shown(str(tmp_path))
    shown(str(tmp_path), "-o", str(tmp_path / "r.html"))
    assert "This run has no trajectories" in (tmp_path / "r.html").read_text("utf-8")
    shown(str(tmp_path), "-o", str(tmp_path / "r.trace.json"))
    assert "did you mean" not in refused(str(tmp_path), "--trajectory", "0/0")


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"12/0": history("12/0")})
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/journal.sqlite").write_text("not a database", "utf-8")
    assert "did you mean '12/0'" in refused(str(run), "--trajectory", "12/1")
    assert "did you mean 'run'" in refused(str(tmp_path / "runn"))
    assert "empty holds nothing" in refused(str(tmp_path / "empty"))
    assert "not a journal" in refused(str(tmp_path / "odd"))
    assert ".trace.json" in refused(str(run), "-o", str(tmp_path / "x.pdf"))
    (tmp_path / "taken.html").mkdir()
    assert "cannot be written" in refused(str(run), "-o", str(tmp_path / "taken.html"))


def test_without_its_model_and_its_agent_a_run_can_still_be_read(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite", metadata={"agents": {"tool_user": "agent: [}"}, "run": {}}) as journal:
        for event in history():
            journal.append("0/0", event)
    shown(str(tmp_path), "--trajectory", "0/0", "-o", str(tmp_path / "t.html"))
    page = html.unescape((tmp_path / "t.html").read_text("utf-8"))
    assert "says nothing of an engine 'policy'" in page
    assert "drawn from what happened" in page
    assert data_of(page)["vocabularies"] == {}


def test_a_run_ends_with_its_report_and_pages_that_it_links_to(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", str(CONFIGS / "runs/reflect.yaml"), f"out={tmp_path / 'out'}"])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "out/report.html").read_text("utf-8")
    links = [link for *_, link in data_of(page)["rows"] if link]
    assert links
    assert {tmp_path / "out" / unquote(link) for link in links} == set((tmp_path / "out/trajectories").iterdir())
    shown(str(tmp_path / "out"), "-o", str(tmp_path / "elsewhere/r.html"))
    elsewhere = data_of((tmp_path / "elsewhere/r.html").read_text("utf-8"))
    assert all((tmp_path / "elsewhere" / unquote(row[-1])).is_file() for row in elsewhere["rows"] if row[-1])


def test_a_report_that_fails_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fsm_rollout.report.pages.PAGES", "\0")  # a name that no file system takes
    done = CliRunner().invoke(app, ["run", str(CONFIGS / "runs/reflect.yaml"), f"out={tmp_path / 'out'}"])
    assert done.exit_code == 0, done.output
    assert "report.html was not written" in caplog.text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"journal.sqlite", "batch", "summary.json"}


def test_page_names_are_never_shared() -> None:
    ids = ["a/b", "a~2Fb", "a%2Fb", "a b", "A/b", "../x", "a~b", "a.b", "x" * 300, "x" * 301, "ж" * 90]
    assert len({page_path(Path(), id_).name for id_ in ids}) == len(ids)
    assert max(len(page_path(Path(), id_).name) for id_ in ids) < 255
    assert all(page_path(Path("run"), id_).parent == Path("run/trajectories") for id_ in ids)


def test_the_terminal_gets_no_control_sequence(tmp_path: Path) -> None:
    write_run(tmp_path, {ODD: history(ODD, text=ODD, told="[bold red]x[/] " + ODD)})
    for said in (shown(str(tmp_path)), shown(str(tmp_path), "--trajectory", ODD)):
        assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", said)
    assert "[bold red]x[/]" in said


def test_calls_find_their_attempts_and_none_is_lost() -> None:
    *start, generated, moved, called, _, _, _ = history()[:9]
    assert isinstance(called, Called)
    others = [replace(called, id="c2", result="other"), replace(called, id="c2", result="again"), called]
    found = [card for card in cards(Recording.of([*start, generated, moved, *others])) if card.kind == "model"]
    assert [call.called for call in found[0].calls] == [called, *others[:2]]


def test_a_huge_trajectory_is_a_page_of_reasonable_size() -> None:
    events = history(text="word " * 50_000)
    recording = Recording.of(events)
    texts = TokenTexts(tokenizer())
    page = trajectory_page(recording, texts=lambda engine: texts)
    assert sum(len(stream.tokens) for stream in recording.trajectory.streams) > 100_000
    assert len(page) < 6_000_000
    assert len(Elements(page).tags) < 500, "tokens are drawn when they are looked at"
    assert token_data(recording.trajectory, lambda engine: texts)["streams"]


def test_texts_in_chinese_japanese_and_korean_have_fonts() -> None:
    css = (ROOT / "fsm_rollout/report/page/page.css").read_text("utf-8")
    (fonts,) = re.findall(r"--cjk:([^;}]*)", css)
    assert {"PingFang SC", "Hiragino Sans", "Malgun Gothic", "Noto Sans CJK SC"} <= {*re.findall('"([^"]*)"', fonts)}
    of_texts = [font for font in re.findall(r"font:([^;}]*(?:sans-serif|monospace)[^;}]*)", css) if "600" not in font]
    assert len(of_texts) == 3
    assert all("var(--cjk)" in font for font in of_texts), of_texts
