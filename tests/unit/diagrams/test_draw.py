"""Pictures of agents: what DOT and Mermaid say is read back by other parsers and held against the graph."""

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
from fsm_rollout.agent.graph import Predicate
from fsm_rollout.cli import app
from fsm_rollout.diagrams.draw import DrawingError, render, source_of, to_dot, to_mermaid, to_png
from fsm_rollout.diagrams.picture import picture
from tests.cases import cases
from tests.graphs import graphs
from tests.kit import ROOT
from tests.unit.diagrams.sixty_states import sixty_states

AGENTS = sorted((ROOT / "configs/agents").glob("*.yaml"))
HOSTILE = 'a "b" <B>&amp;</TABLE>> \\N \\" ]] --> %%{init}%% `x`\n\r\x00\x1b\u202e\ufffe\U0001f600 שלום'


def agent(states: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> AgentGraph:
    return AgentGraph.model_validate({"agent": "drawn", "states": states, "transitions": rows, **more})


def hostile() -> AgentGraph:
    says = {"text_contains": HOSTILE}
    rows = [
        {"trigger": "prompted", "source": "PENDING", "dest": "node"},
        {"trigger": "generated", "source": "node", "dest": "digraph", "conditions": says, "unless": says},
        {"trigger": "generated", "source": "node", "dest": "TERMINATED", "stop_reason": "a:b-c.d"},
        {"trigger": "written", "source": "digraph", "dest": "node"},
    ]
    working = {"node": {"handler": "generate", "timeout": 1}, "digraph": {"handler": "write", "prompt": HOSTILE}}
    return agent({"PENDING": {}, **working}, rows, description=HOSTILE * 9, limits={"assistant_turns": 3})


class Read:
    """DOT as pygraphviz reads it, its labels as an XML parser does."""

    def __init__(self, dot: str) -> None:
        graph = pygraphviz.AGraph(string=dot)
        self.nodes = {str(node): words(node.attr["label"]) for node in graph.nodes() if node != "(start)"}
        self.initial = [edge[1] for edge in graph.edges() if edge[0] == "(start)"]
        self.solid: list[tuple[str, str, list[str]]] = []
        self.dashed: list[tuple[str, str, list[str]]] = []
        for edge in (edge for edge in graph.edges() if edge.attr["label"]):
            (self.dashed if edge.attr["style"] == "dashed" else self.solid).append((*edge, rows(edge.attr["label"])))
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
            inside = " and ".join(negation + escaped(str(p)) for p, negation in asked)
            text += f"[{inside if len(inside) <= 90 else inside[:89] + '…'}]"
        if row.dest in ("TERMINATED", "DONE"):
            own = {t: t for t in ("truncated", "timed_out", "interaction_done")}
            own |= {"failed": "failed:…", "limit_reached": "limit:…"}
            limit = [p.argument for p in row.conditions if p.name == "limit"]
            reason = f"limit:{limit[0]}" if limit else own.get(row.trigger, "answered")
            text += f"■{row.stop_reason or reason}"
        says[source, row.dest, squash(text)] += 1
    return says


def escaped(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


@cases("diagrams")
def test_a_condition_is_spelt_in_words(name: str, argument: Any, spelt: str) -> None:
    assert str(Predicate(name=name, argument=argument)) == spelt


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
    graph = sixty_states()
    read = Read(to_dot(graph, implicit=True))
    assert set(read.nodes) == {*graph.states, "*"}
    assert read.labels()["*", "TERMINATED", "timed_out■too_slow"] == 1
    assert [(source, dest) for source, dest, _ in read.dashed] == [("*", "TERMINATED")]


def test_any_state_and_lists_are_one_arrow_each_where_there_are_few() -> None:
    rows = [
        {"trigger": "prompted", "source": "PENDING", "dest": "GENERATING"},
        {"trigger": "generated", "source": "GENERATING", "dest": "TERMINATED"},
        {"trigger": "failed", "source": ["PENDING", "GENERATING"], "dest": "TERMINATED", "stop_reason": "broken"},
        {"trigger": "timed_out", "source": "*", "dest": "TERMINATED", "stop_reason": "late"},
    ]
    graph = agent({"PENDING": {}, "GENERATING": {"timeout": 1, "on_error": "PENDING"}}, rows)
    says = Read(to_dot(graph)).labels()
    assert says["PENDING", "TERMINATED", "timed_out■late"] == says["GENERATING", "TERMINATED", "timed_out■late"] == 1
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


def test_the_shipped_pictures_are_those_of_the_shipped_agents() -> None:
    shipped = {path.stem: source_of(path.read_text("utf-8")) for path in (ROOT / "diagrams").glob("*.svg")}
    drawn = {path.stem: to_dot(load_agent(path)) for path in AGENTS}
    assert {name: source for name, source in shipped.items() if source} == drawn, "stale: run `make diagrams`"


@pytest.fixture
def without_graphviz(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    render.cache_clear()  # of what other tests have drawn
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pygraphviz", None)


TOOL_USER = ROOT / "configs/agents/tool_user.yaml"


def command(agent: Path, output: Path, *options: str) -> tuple[int, str]:
    """Draw by the command line; return the exit code and the complaint."""
    done = CliRunner().invoke(app, ["draw", str(agent), "-o", str(output), *options])
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("file", "options", "drawn"),
    [
        ("new/c.DOT", (), to_dot),
        ("d.mmd", (), to_mermaid),
        ("a.dot", ("--implicit",), lambda graph: to_dot(graph, implicit=True)),
    ],
)
def test_the_command_draws_what_the_suffix_says(
    tmp_path: Path, file: str, options: tuple[str, ...], drawn: Any
) -> None:
    assert command(TOOL_USER, tmp_path / file, *options) == (0, "")
    assert (tmp_path / file).read_text("utf-8") == drawn(load_agent(TOOL_USER))


@pytest.mark.parametrize(
    ("agent", "file", "complaint"),
    [
        (TOOL_USER, "a.pdf", "'.pdf' is no picture that can be drawn; known: .dot, .mmd, .png, .svg"),
        (TOOL_USER, "svg", "has no suffix"),
        (TOOL_USER, "taken/a.dot", "cannot be written"),
        (TOOL_USER, "a.svg", "fsm-rollout[diagrams]"),
        (Path("taken"), "a.dot", "taken:1: an agent is a mapping"),
    ],
)
@pytest.mark.usefixtures("without_graphviz")
def test_what_cannot_be_drawn_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: Path, file: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("no agent")
    code, said = command(agent, tmp_path / file)
    assert (code, complaint in said) == (2, True), said
    assert not (tmp_path / file).exists()


@pytest.mark.usefixtures("without_graphviz")
def test_without_graphviz_there_is_dot_and_mermaid() -> None:
    graph = load_agent(TOOL_USER)
    with pytest.raises(DrawingError, match=r"fsm-rollout\[diagrams\]"):
        to_png(graph)
    assert to_dot(graph)
    assert to_mermaid(graph)


@pytest.mark.parametrize(("keys", "lines"), [
    ({"command": ["python", "mine.py"], "dialect": "anthropic"}, ("python mine.py", "speaks anthropic")),
    ({"use": "os:getcwd"}, ("os:getcwd", "speaks openai")),
])  # fmt: skip
def test_a_foreign_agent_s_box_says_what_runs_and_what_it_speaks(keys: dict[str, Any], lines: tuple[str, ...]) -> None:
    rows = [{"trigger": "returned", "source": "EXTERNAL", "dest": "TERMINATED"}]
    graph = agent({"EXTERNAL": {"handler": "external", "options": keys}}, rows, initial="EXTERNAL")
    (box, _) = picture(graph).boxes
    assert box.lines[:2] == lines
