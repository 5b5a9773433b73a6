"""Pictures of agents: what DOT and Mermaid say is read back by other parsers and held against the graph."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pygraphviz
import pytest
from hypothesis import example, given
from typer.testing import CliRunner

from fsm_rollout import AgentGraph, load_agent, prove
from fsm_rollout.cli import app
from fsm_rollout.diagrams.draw import DrawingError, draw, render, source_of, to_dot, to_mermaid, to_png
from fsm_rollout.diagrams.picture import picture
from fsm_rollout.testing.strategies.graphs import graphs
from tests.kit import ROOT

AGENTS = sorted((ROOT / "configs/agents").glob("*.yaml"))
HOSTILE = 'a "b" <B>&amp;</TABLE>> \\N \\" ]] --> %%{init}%% `x`\n\r\x00\x1b\u202e\ufffe\U0001f600 שלום'


def agent(states: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> AgentGraph:
    return AgentGraph.model_validate({"agent": "drawn", "states": states, "transitions": rows, **more})


def hostile() -> AgentGraph:
    says = [{"name": "text_contains", "argument": HOSTILE}]
    rows = [
        {"trigger": "prompted", "source": "PENDING", "dest": "node"},
        {"trigger": "generated", "source": "node", "dest": "digraph", "conditions": says, "unless": says},
        {"trigger": "generated", "source": "node", "dest": "TERMINATED", "stop_reason": "a:b-c.d"},
        {"trigger": "written", "source": "digraph", "dest": "node"},
    ]
    states: dict[str, Any] = {
        "PENDING": {},
        "node": {"handler": "generate", "timeout": 1},
        "digraph": {"handler": "write", "prompt": HOSTILE},
    }
    return agent(states, rows, description=HOSTILE * 9, limits={"assistant_turns": 3})


def many(states: int) -> AgentGraph:
    """A chain that goes back now and then, and a rescue from any state."""
    names = [f"STEP_{i}" for i in range(states - 2)]
    rows = [{"trigger": "prompted", "source": "PENDING", "dest": names[0]}]
    for i, (name, onward) in enumerate(itertools.pairwise([*names, "TERMINATED"])):
        again = [{"name": "text_contains", "argument": "again"}]
        rows.append({"trigger": "generated", "source": name, "dest": names[i - i % 4], "conditions": again})
        rows.append({"trigger": "generated", "source": name, "dest": onward})
    rows.append({"trigger": "failed", "source": "*", "dest": "RESCUE"})
    rows.append({"trigger": "written", "source": "RESCUE", "dest": names[0]})
    step = {"handler": "generate", "timeout": 9, "max_visits": 2}
    rescue = {"handler": "write", "prompt": "x", "max_visits": 1}
    return agent({"PENDING": {}, **dict.fromkeys(names, step), "RESCUE": rescue}, rows, limits={"assistant_turns": 99})


class Read:
    """DOT as pygraphviz reads it, its labels as an XML parser does."""

    def __init__(self, dot: str) -> None:
        graph = pygraphviz.AGraph(string=dot)
        self.nodes = {str(node): words(node.attr["label"]) for node in graph.nodes() if node != "(start)"}
        edges = [(*edge, rows(edge.attr["label"]), edge.attr["style"]) for edge in graph.edges() if edge.attr["label"]]
        self.initial = [edge[1] for edge in graph.edges() if edge[0] == "(start)"]
        self.solid = [(source, dest, says) for source, dest, says, style in edges if style != "dashed"]
        self.dashed = [(source, dest, says) for source, dest, says, style in edges if style == "dashed"]
        self.caption = words(graph.graph_attr["label"])

    def labels(self) -> Counter[tuple[str, str, str]]:
        return Counter((source, dest, row) for source, dest, says in self.solid for row in says)


def words(label: str) -> str:
    return squash("".join(ElementTree.fromstring(label).itertext()))  # the angle brackets around it are gone


def rows(label: str) -> list[str]:
    leaves = [row for row in ElementTree.fromstring(label).iter("TR") if row.find(".//TR") is None]
    return [squash("".join(row.itertext())) for row in leaves]


def squash(text: str) -> str:
    return "".join(text.split())


def written(graph: AgentGraph) -> Counter[tuple[str, str, str]]:
    """What must stand on the arrows, from the rows of a graph each of which leaves one state."""
    says: Counter[tuple[str, str, str]] = Counter()
    for at, row in enumerate(graph.transitions):
        (source,) = row.source
        rivals = [i for i, r in enumerate(graph.transitions) if (r.source, r.trigger) == (row.source, row.trigger)]
        text = f"{rivals.index(at) + 1}{row.trigger}" if len(rivals) > 1 else row.trigger
        asked = [*((p, "") for p in row.conditions), *((p, "not ") for p in row.unless)]
        if asked:
            inside = " and ".join(negation + condition(p.name, p.argument) for p, negation in asked)
            text += f"[{inside if len(inside) <= 90 else inside[:89] + '…'}]"
        if row.dest in ("TERMINATED", "DONE"):
            own = {t: t for t in ("truncated", "timed_out", "interaction_done")}
            own |= {"failed": "failed:…", "limit_reached": "limit:…"}
            limit = [p.argument for p in row.conditions if p.name == "limit"]
            reason = f"limit:{limit[0]}" if limit else own.get(row.trigger, "answered")
            text += f"■{row.stop_reason or reason}"
        says[source, row.dest, squash(text)] += 1
    return says


def condition(name: str, argument: Any) -> str:
    if argument is None:
        return name
    if isinstance(argument, dict):
        ((state, count),) = argument.items()
        return f"{name} {state}: {count}"
    if isinstance(argument, str):
        argument = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in argument)
        return f"{name} {argument}" if name in ("limit", "tool_called") else f'{name} "{argument}"'
    return f"{name} {argument}"


@given(graphs())
@example(hostile())
def test_the_dot_says_exactly_what_the_graph_does(graph: AgentGraph) -> None:
    read = Read(to_dot(graph))
    assert read.initial == [graph.initial]
    assert set(read.nodes) == {*graph.states, *(row.dest for row in graph.transitions)}
    assert all(says.startswith(name) for name, says in read.nodes.items())
    assert read.labels() == written(graph)
    assert not read.dashed
    assert squash(str(prove(graph))) in read.caption


@given(graphs())
def test_boxes_say_what_a_visit_spends_and_what_is_trained(graph: AgentGraph) -> None:
    spends = {"generate": "assistant_turns", "call_tools": "tool_calls", "interact": "user_turns"}
    for name, text in Read(to_dot(graph)).nodes.items():
        if name in ("TERMINATED", "DONE"):
            assert text == name
            continue
        state = graph.states[name]
        handler = graph.handler_of(name)
        assert re.match(name + handler, text)
        limit = spends.get(handler)
        if limit is not None:
            bound = getattr(graph.limits, limit)
            assert (f"{limit},nolimit" if bound is None else f"{limit}≤{bound}") in text
        assert (f"max_visits≤{state.max_visits}" in text) == (state.max_visits is not None)
        assert re.findall(r"timeout([\d.]+)s", text) == [f"{t:g}" for t in [state.timeout] if t is not None]
        context = graph.contexts.get(state.context)
        trained = context is None or (context.engine == "policy" and context.trainable is not False)
        badge = re.search("(not)?trained", text)
        assert (badge and badge.group()) == (
            ("trained" if trained else "nottrained") if handler == "generate" else None
        )


@given(graphs())
def test_implicit_ends_come_on_top_and_dashed(graph: AgentGraph) -> None:
    read = Read(to_dot(graph, implicit=True))
    assert read.labels() == Read(to_dot(graph)).labels()
    assert {source for source, _, _ in read.dashed} == set(graph.working_states)
    for source, dest, says in read.dashed:
        assert dest == "TERMINATED"
        always = {
            row.trigger for row in graph.transitions if row.source == (source,) and not (row.conditions or row.unless)
        }
        raised = {"failed", "timed_out"} | ({"truncated"} if graph.handler_of(source) == "generate" else set())
        assert set(says) == (raised - always) | {"limit_reached", "cancelled"}


STATEMENT = re.compile(
    r'(?P<node>s\d+)(?P<shape>\("[^"]*"\)|\(\["[^"]*"\]\))'
    r'|(?P<source>s\d+) -->\|"(?P<label>[^"]*)"\| (?P<dest>s\d+)'
    r"|start\(\(\( \)\)\)|start --> s\d+|style s\d+ [\w#:,-]+|%% [^\n]*"
)


@given(graphs())
@example(hostile())
def test_mermaid_says_the_same_in_statements_that_nothing_breaks_out_of(graph: AgentGraph) -> None:
    first, *lines = to_mermaid(graph).splitlines()
    assert first == "flowchart LR"
    names: dict[str, str] = {}
    says: Counter[tuple[str, str, str]] = Counter()
    for line in lines:
        found = STATEMENT.fullmatch(line.strip())
        assert found, line
        if found["node"]:
            names[found["node"]] = re.split(r"<br/>|\"", found["shape"])[1]
        elif found["label"]:
            assert not re.search(r"[<>&%`\\]", found["label"].replace("<br/>", ""))
            text = re.sub(r"<br/>■", "■", found["label"])
            for row in text.split("<br/>"):
                label = squash(re.sub(r"#(\d+);", lambda code: chr(int(code.group(1))), row))
                says[names[found["source"]], names[found["dest"]], label] += 1
    assert says == written(graph)


def test_any_state_is_one_box_where_there_are_many() -> None:
    read = Read(to_dot(many(60), implicit=True))
    assert len(read.nodes) == 60 + len({"TERMINATED", "*"})
    assert read.labels()["*", "RESCUE", "failed"] == 1
    assert [(source, dest) for source, dest, _ in read.dashed] == [("*", "TERMINATED")]


def test_any_state_and_lists_are_one_arrow_each_where_there_are_few() -> None:
    says = Read(to_dot(many(4))).labels()
    assert says["STEP_0", "RESCUE", "failed"] == says["RESCUE", "RESCUE", "failed"] == 1
    rows = [
        {"trigger": "prompted", "source": "PENDING", "dest": "GENERATING"},
        {"trigger": "generated", "source": "GENERATING", "dest": "TERMINATED"},
        {"trigger": "failed", "source": ["PENDING", "GENERATING"], "dest": "TERMINATED", "stop_reason": "broken"},
    ]
    graph = agent({"PENDING": {}, "GENERATING": {"timeout": 1, "on_error": "PENDING"}}, rows)
    says = Read(to_dot(graph)).labels()
    assert says["PENDING", "TERMINATED", "failed■broken"] == says["GENERATING", "TERMINATED", "1failed■broken"] == 1
    assert says["GENERATING", "PENDING", "2failed"] == 1  # the short form of a last row


def test_a_wrong_graph_is_drawn_as_it_is() -> None:
    rows = [
        {"trigger": "prompted", "source": "PENDING", "dest": "ELSEWHERE"},
        {"trigger": "generated", "source": "ODD", "dest": "PENDING"},
    ]
    graph = agent({"PENDING": {}, "ODD": {}}, rows)
    read = Read(to_dot(graph))
    assert read.nodes["ELSEWHERE"] == "ELSEWHERE:notdefined"
    assert "notproventoend" in read.caption


@pytest.mark.parametrize("path", AGENTS, ids=lambda path: path.stem)
def test_the_shipped_pictures_are_those_of_the_shipped_agents(path: Path) -> None:
    shipped = (ROOT / "diagrams" / f"{path.stem}.svg").read_text("utf-8")
    assert source_of(shipped) == to_dot(load_agent(path)), "stale: run `make diagrams`"


def test_there_is_no_picture_of_an_agent_that_is_gone() -> None:
    drawn = {path for path in (ROOT / "diagrams").glob("*.svg") if source_of(path.read_text("utf-8"))}
    assert {path.stem for path in drawn} == {path.stem for path in AGENTS}


@pytest.fixture
def without_graphviz(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    render.cache_clear()  # of what other tests have drawn
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pygraphviz", None)


@pytest.mark.usefixtures("without_graphviz")
def test_without_graphviz_the_message_names_the_extra() -> None:
    graph = load_agent(AGENTS[0])
    with pytest.raises(DrawingError, match=r"fsm-rollout\[diagrams\]"):
        to_png(graph)
    assert to_dot(graph)
    assert to_mermaid(graph)


class TestCommand:
    AGENT = str(ROOT / "configs/agents/tool_user.yaml")

    def command(self, *arguments: str) -> Any:
        return CliRunner().invoke(app, ["draw", *arguments])

    def test_draws_what_the_suffix_says(self, tmp_path: Path) -> None:
        graph = load_agent(self.AGENT)
        for name in ("new/c.DOT", "d.mmd"):
            result = self.command(self.AGENT, "-o", str(tmp_path / name))
            assert result.exit_code == 0, result.output
        assert (tmp_path / "new/c.DOT").read_text("utf-8") == to_dot(graph)
        assert (tmp_path / "d.mmd").read_text("utf-8") == to_mermaid(graph)

    def test_implicit_is_asked_for(self, tmp_path: Path) -> None:
        self.command(self.AGENT, "-o", str(tmp_path / "a.dot"), "--implicit")
        assert (tmp_path / "a.dot").read_text("utf-8") == to_dot(load_agent(self.AGENT), implicit=True)

    def test_a_bad_agent_is_refused_with_its_problems(self, tmp_path: Path) -> None:
        wrong = tmp_path / "wrong.yaml"
        wrong.write_text(Path(self.AGENT).read_text("utf-8").replace("dest: INTERACTING", "dest: INTERACTNG"))
        (tmp_path / "solver.md").write_text("x")
        result = self.command(str(wrong), "-o", str(tmp_path / "a.svg"))
        assert result.exit_code == 2
        assert "wrong.yaml:18:" in result.stderr
        assert "did you mean 'INTERACTING'" in result.stderr
        assert not (tmp_path / "a.svg").exists()

    @pytest.mark.parametrize(("name", "says"), [("a.pdf", "'.pdf' is no picture"), ("svg", "has no suffix")])
    def test_an_unknown_suffix_is_refused(self, tmp_path: Path, name: str, says: str) -> None:
        result = self.command(self.AGENT, "-o", str(tmp_path / name))
        assert result.exit_code == 2
        assert says in result.stderr
        assert ".svg" in result.stderr
        assert not (tmp_path / name).exists()

    def test_a_file_that_cannot_be_written_is_a_problem(self, tmp_path: Path) -> None:
        (tmp_path / "taken").write_text("")
        result = self.command(self.AGENT, "-o", str(tmp_path / "taken/a.dot"))
        assert result.exit_code == 2
        assert "cannot be written" in result.stderr

    @pytest.mark.usefixtures("without_graphviz")
    def test_no_graphviz_is_a_problem(self, tmp_path: Path) -> None:
        result = self.command(self.AGENT, "-o", str(tmp_path / "a.svg"))
        assert result.exit_code == 2
        assert "fsm-rollout[diagrams]" in result.stderr


def test_draw_returns_the_path(tmp_path: Path) -> None:
    assert draw(load_agent(AGENTS[0]), tmp_path / "a.mmd") == tmp_path / "a.mmd"


@pytest.mark.parametrize(("keys", "lines"), [
    ({"command": ["python", "mine.py"], "dialect": "anthropic"}, ("python mine.py", "speaks anthropic")),
    ({"use": "os:getcwd"}, ("os:getcwd", "speaks openai")),
])  # fmt: skip
def test_a_foreign_agent_s_box_says_what_runs_and_what_it_speaks(keys: dict[str, Any], lines: tuple[str, ...]) -> None:
    rows = [{"trigger": "returned", "source": "EXTERNAL", "dest": "TERMINATED"}]
    graph = agent({"EXTERNAL": {"handler": "external", "options": keys}}, rows, initial="EXTERNAL")
    (box, _) = picture(graph).boxes
    assert box.lines[:2] == lines
