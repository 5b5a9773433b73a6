"""In a notebook a trajectory is shown with all that its rollout knows: texts, graph, and what the journal has."""

from __future__ import annotations

import asyncio
import html
import sys
from pathlib import Path

import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.lib.pretty import pretty

from fsm_rollout.agent.loader import load_agent
from fsm_rollout.diagrams.draw import render, to_svg
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.report.notebook import Page, register
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
