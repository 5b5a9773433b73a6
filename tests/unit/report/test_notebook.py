"""In a notebook a trajectory is shown with all that its rollout knows: texts, graph, and what the journal has."""

import asyncio
import html
import re
import sys
import threading
import warnings
from pathlib import Path
from urllib.parse import unquote

import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.lib.pretty import pretty

from fsm_rollout.agent.loader import load_agent
from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.diagrams.draw import render, to_svg
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.report import progress
from fsm_rollout.report.notebook import SHOWN_ROWS, Page, register
from fsm_rollout.report.pages import page_path
from fsm_rollout.rollout import Rollout
from fsm_rollout.trajectory.journal import Journal, read
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.embedded import tokenizer
from tests.unit.report.recorded_runs import CONFIGS, NASTY, Elements, history

PROMPT = {"messages": [{"role": "user", "content": "What is 3 + 4?"}]}
CALL = '<tool_call>\n{"name": "solve", "arguments": {"task": "3 + 4"}}\n</tool_call>'
SCRIPT = {"delegate": [CALL, "Solved: seven."], "tool_agent": ["It is seven."]}


def rollout(journal: Journal | None = None) -> Rollout:
    agent = load_agent(CONFIGS / "agents/delegate.yaml")
    return Rollout(agent, ScriptedEngine(SCRIPT, tokenizer=tokenizer()), journal=journal)


class Shell:
    """As much of IPython's shell as shows things."""

    def __init__(self) -> None:
        self.display_formatter = DisplayFormatter()

    def shown(self, thing: object) -> dict[str, str]:
        data, _ = self.display_formatter.format(thing)
        return data


@pytest.fixture
def shell() -> Shell:
    shell = Shell()
    register(shell)
    return shell


def test_a_notebook_without_widgets_is_not_warned_of_them(shell: Shell) -> None:
    with warnings.catch_warnings(record=True) as told:
        register(shell)
        warnings.warn("IProgress not found. Please update jupyter and ipywidgets.", stacklevel=1)
    assert told == []


def test_a_page_says_what_it_is_where_only_text_is_shown(shell: Shell) -> None:
    page = Page("<p>" + "x" * 50_000)
    for text in (repr(page), shell.shown(page)["text/plain"]):
        assert text == "<Page of 50,003 characters: .save('page.html') writes it, a notebook shows it>"


def test_a_notebook_shows_an_agent_s_picture(shell: Shell) -> None:
    graph = load_agent(CONFIGS / "agents/delegate.yaml")
    assert shell.shown(graph)["image/svg+xml"] == to_svg(graph)
    broken = graph.model_copy(update={"states": {}})
    assert shell.shown(broken)["image/svg+xml"] == to_svg(broken), "a wrong graph is drawn as it is"


def test_without_graphviz_a_notebook_shows_an_agent_s_text(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    render.cache_clear()  # of what other tests have drawn
    graph = load_agent(CONFIGS / "agents/delegate.yaml")
    assert shell.shown(graph) == {"text/plain": pretty(graph)}


def test_a_notebook_shows_a_trajectory_in_a_frame_of_its_own(shell: Shell) -> None:
    frame = shell.shown(Trajectory.fold(history(text=NASTY)))["text/html"]
    assert [tag for tag, _ in Elements(frame).tags] == ["iframe"]
    (_, attributes) = Elements(frame).tags[0]
    assert "the journal only" in (attributes["srcdoc"] or "")


def test_where_no_shell_runs_nothing_is_told() -> None:
    register(None)
    register(object())


def test_with_a_journal_the_page_is_whole_of_sub_agents_too(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as journal, rollout(journal) as running:
        running.run([PROMPT])
        journal.flush()
        found = {trajectory.agent: trajectory for trajectory in read(journal.path)}
        for agent, said in (("delegate", "Solved: seven."), ("tool_agent", "It is seven.")):
            whole = running.page(found[agent])
            assert whole == running.page(found[agent].trajectory_id)
            assert said in whole.html
            assert 'id="lanes"' in whole.html
            assert "PROCESSING_TOOLS" in whole.html, "its graph, also where it was not walked"
        assert whole.save(tmp_path / "t.html").read_text("utf-8") == whole.html
        assert html.unescape(whole._repr_html_()).count("<iframe") == 1
        with pytest.raises(ConfigError, match="did you mean '0/0'"):
            running.page("0/O")
        journal.close()
        assert running.page("0/0").html == running.page(found["delegate"]).html


def test_without_a_journal_texts_and_graph_are_there() -> None:
    async def sampled(running: Rollout) -> Trajectory:
        groups = [group async for group in running.stream([PROMPT])]
        return groups[0].trajectories[0]

    with rollout() as running:
        shown = running.page(asyncio.run(sampled(running))).html
        assert "made from the trajectory alone" in shown
        assert "Which arrows it took is not known here" in shown
        assert '"vocabularies":{"policy":{' in shown
        with pytest.raises(ConfigError, match="keeps no journal"):
            running.page("0/0")


def test_a_batch_is_shown_as_a_table_with_links_to_the_pages_of_its_run(shell: Shell, tmp_path: Path) -> None:
    with rollout() as made:
        batch = made.run([PROMPT], n=12)
    assert "<a " not in shell.shown(batch)["text/html"], "there are no pages yet"
    (tmp_path / "trajectories").mkdir()
    page_path(tmp_path, "0/0").write_text("<p>")
    batch.save(tmp_path / "batch")
    for known in (batch, TrajectoryBatch.load(tmp_path / "batch")):
        elements = Elements(shell.shown(known)["text/html"])
        tags = [tag for tag, _ in elements.tags]
        assert tags.count("tr") == 1 + SHOWN_ROWS
        (link,) = (attributes["href"] for tag, attributes in elements.tags if tag == "a")
        assert link is not None
        assert Path(unquote(link)).resolve() == page_path(tmp_path, "0/0")
        assert "and 4 more rows" in shell.shown(known)["text/html"]
    assert shell.shown(batch)["text/plain"] == repr(batch)


def test_a_notebook_shows_how_far_a_run_is_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    enough = threading.Event()

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            lines.append(data["text/plain"])
            enough.set()

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        lines.append(data["text/plain"])
        return Handle()

    async def wait_for_it(trajectory: Trajectory) -> float:
        await asyncio.to_thread(enough.wait, 60)
        return 1.0

    kernel = type("Shell", (), {"kernel": None})()
    monkeypatch.setattr("IPython.get_ipython", lambda: kernel)
    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(progress, "SLOW_AFTER", 0.01)
    monkeypatch.setattr(progress, "CELL_EVERY", 0.01)
    agent = load_agent(CONFIGS / "agents/single_turn.yaml")
    engine = ScriptedEngine(["Yes."], tokenizer=tokenizer())
    with Rollout(agent, engine, reward=wait_for_it) as shown:
        shown.run([PROMPT], n=3)
        assert re.match("[0-3]/3 trajectories", lines[0])
        assert lines[-1].startswith("3/3 trajectories, ")
        assert shown.scheduler.recorder.listeners == (), "nothing is left behind"
    lines.clear()
    with Rollout(agent, engine, progress=False) as silent:
        silent.run([PROMPT])
    assert lines == []
