"""What Graphviz draws, in a program of its own: SVG in both colour schemes, PNG, and the same DOT each time."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from typer.testing import CliRunner

from fsm_rollout import AgentGraph, load_agent
from fsm_rollout.cli import app
from fsm_rollout.diagrams.draw import DrawingError, render, source_of, to_dot, to_svg
from tests.graphs import graphs
from tests.kit import ROOT
from tests.unit.diagrams.sixty_states import sixty_states
from tests.unit.diagrams.test_draw import AGENTS, agent, hostile, squash

pytestmark = pytest.mark.process


@settings(max_examples=5)
@given(graphs())
@example(hostile())
def test_what_is_drawn_is_one_well_formed_svg_that_knows_its_source(graph: AgentGraph) -> None:
    svg = to_svg(graph, implicit=True)
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert not [element.tag for element in root.iter() if re.search("script|foreignObject|image$", element.tag)]
    texts = squash("".join(root.itertext()))
    assert all(name in texts for name in graph.states)
    assert source_of(svg) == to_dot(graph, implicit=True)


def test_every_colour_has_a_dark_one() -> None:
    for path in AGENTS:
        svg = to_svg(load_agent(path), implicit=True)
        used = set(re.findall(r'(fill|stroke)="(#\w+|white|black)"', svg))
        changed = set(re.findall(r'\[(fill|stroke)="([^"]+)"\]', svg))
        assert used == changed, path


def test_the_dot_is_the_same_in_every_process() -> None:
    code = "import sys, fsm_rollout as fr; from fsm_rollout.diagrams.draw import to_dot\n"
    code += "sys.stdout.buffer.write(to_dot(fr.load_agent(sys.argv[1]), implicit=True).encode())"
    path = str(ROOT / "configs/agents/reflect.yaml")
    drawn = {
        subprocess.run(
            [sys.executable, "-c", code, path],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        for seed in ("1", "2")
    }
    assert drawn == {to_dot(load_agent(path), implicit=True).encode()}


def test_a_dot_on_the_path_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "dot"
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('dot says no' if sys.stdin.read() else 0)\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    render.cache_clear()
    with pytest.raises(DrawingError, match="code 1: dot says no"):
        to_svg(load_agent(AGENTS[0]))


def test_many_states_and_wrong_graphs_are_drawn() -> None:
    wrong = agent({"PENDING": {}, "ODD": {}}, [{"trigger": "prompted", "source": "PENDING", "dest": "ELSEWHERE"}])
    for graph in (sixty_states(), wrong):
        assert ElementTree.fromstring(to_svg(graph)).tag.endswith("svg")


@pytest.mark.parametrize("path", AGENTS, ids=lambda path: path.stem)
def test_the_shipped_pictures_have_the_present_colours(path: Path) -> None:
    shipped = (ROOT / "diagrams" / f"{path.stem}.svg").read_text("utf-8")
    style = re.compile("<style>.*?</style>", re.DOTALL)
    assert style.findall(shipped) == style.findall(to_svg(load_agent(path))), "stale: run `make diagrams`"


def test_the_command_draws_what_the_suffix_says(tmp_path: Path) -> None:
    shipped = str(ROOT / "configs/agents/tool_user.yaml")
    for name in ("a.svg", "new/b.PNG"):
        result = CliRunner().invoke(app, ["draw", shipped, "-o", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    assert (tmp_path / "a.svg").read_text("utf-8") == to_svg(load_agent(shipped))
    assert (tmp_path / "new/b.PNG").read_bytes().startswith(b"\x89PNG")
