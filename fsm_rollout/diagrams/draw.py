"""Draws an agent as SVG, PNG, DOT or Mermaid.

Invariant: the DOT (and the Mermaid text) is a function of the graph alone, and every SVG carries the DOT that it was
drawn from, so whether a picture is stale can be told without comparing pixels. Where Graphviz puts a box may differ
between its versions and with the fonts that it finds. Any text is safe: what the user wrote is escaped.

Graphviz is the `dot` on the PATH; without one, the Graphviz that pygraphviz's wheel brings along, in a process of its
own, so that what a C library makes of odd input or prints about fonts stays out of this one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from html import escape, unescape
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.diagrams.palette import INK, PALE
from fsm_rollout.diagrams.picture import Picture, Values, picture, shown
from fsm_rollout.errors import ConfigError, RolloutError, did_you_mean
from fsm_rollout.files import written_whole

_CLASS = "fsm-rollout-agent"
_SOURCE = re.compile(r'<metadata class="dot">(.*?)</metadata>', re.DOTALL)
# Characters of one text in a picture; 180 in Mermaid, whose labels have one line where DOT's have several.
_LONGEST = 90
_KEYWORDS = {"node", "edge", "graph", "digraph", "subgraph", "strict"}
# All other characters might mean something to Mermaid or HTML.
_WITHOUT_MEANING = re.compile(r"[^\w .,:()≤■…-]", re.ASCII)
_PYGRAPHVIZ = """
import sys, pygraphviz
graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode("utf-8"))
graph.graph_attr["dpi"] = sys.argv[2]
sys.stdout.buffer.write(graph.draw(format=sys.argv[1], prog="dot"))
"""
_DPI = {"svg": "72", "png": "192"}  # dots per inch; an SVG's coordinates are points


class DrawingError(RolloutError):
    """A picture cannot be drawn: Graphviz is not installed, or it failed."""


def to_dot(graph: AgentGraph, *, implicit: bool = False, values: Values | None = None) -> str:
    """Return ``graph`` as DOT, which needs no Graphviz; ``implicit`` shows the ends that need no transition, dashed.

    ``values`` are a run's, :class:`~fsm_rollout.report.values.RunValues`.
    """
    return _written("agent.dot.jinja", picture(graph, implicit=implicit, values=values))


def to_mermaid(graph: AgentGraph, *, implicit: bool = False, values: Values | None = None) -> str:
    """Return ``graph`` as a Mermaid flowchart, for places that draw Mermaid; needs no Graphviz."""
    return _written("agent.mmd.jinja", picture(graph, implicit=implicit, values=values))


def to_svg(graph: AgentGraph, *, implicit: bool = False, values: Values | None = None) -> str:
    """Return ``graph`` as SVG: an ``<svg>`` element, for a file or inside HTML.

    It has the page's colour behind it and follows the reader's ``prefers-color-scheme``. A transparent one would be
    dark on dark wherever a page and the system it is read on disagree.

    Raises:
        DrawingError: there is no Graphviz.
    """
    drawn = picture(graph, implicit=implicit, values=values)
    dot = _written("agent.dot.jinja", drawn)
    svg = render(dot, "svg").decode()
    svg = re.sub(r"<!--.*?-->\n?", "", svg[svg.index("<svg") :], flags=re.DOTALL)  # they name the Graphviz version
    head, mark, body = svg.partition(">")
    title = f"<title>{escape(graph.agent)}</title>"
    style = f"<style>\n{_dark_style(drawn, body)}</style>"
    source = f'<metadata class="dot">{escape(dot, quote=False)}</metadata>'
    return f'{head} class="{_CLASS}" role="img"{mark}\n{title}\n{style}\n{source}{body}'


def to_png(graph: AgentGraph, *, implicit: bool = False, values: Values | None = None) -> bytes:
    """Return ``graph`` as a PNG in the light colours, at 192 dots per inch; DrawingError without Graphviz."""
    return render(to_dot(graph, implicit=implicit, values=values), "png")


def source_of(svg: str) -> str | None:
    """Return the DOT that an SVG of :func:`to_svg` was drawn from; ``None`` if it carries none."""
    found = _SOURCE.search(svg)
    return None if found is None else unescape(found.group(1))


_FORMS: Mapping[str, Callable[..., str | bytes]] = {
    ".svg": to_svg, ".png": to_png, ".dot": to_dot, ".mmd": to_mermaid
}  # fmt: skip


def form_of(path: Path) -> Callable[..., str | bytes]:
    """Return the function that draws what the suffix of ``path`` asks for; ConfigError if there is no such form."""
    suffix = path.suffix.lower()
    if suffix not in _FORMS:
        got = f"'{suffix}' is no picture that can be drawn" if suffix else "the name of the picture has no suffix"
        raise ConfigError(f"{path}: {got}{did_you_mean(suffix, _FORMS)}")
    return _FORMS[suffix]


def draw(graph: AgentGraph, path: str | Path, *, implicit: bool = False, values: Values | None = None) -> Path:
    """Draw ``graph`` into the file ``path``, whose suffix (.svg, .png, .dot or .mmd) says how; return the path.

    Raises:
        ConfigError: unknown suffix, or the file cannot be written.
        DrawingError: there is no Graphviz, which .svg and .png need.
    """
    path = Path(path)
    drawn = form_of(path)(graph, implicit=implicit, values=values)
    with written_whole(path) as partial:
        partial.write_bytes(drawn.encode() if isinstance(drawn, str) else drawn)
    return path


@lru_cache(64)  # a process of Graphviz takes a third of a second, and the pages of a run show the same agents
def render(dot: str, form: Literal["svg", "png"]) -> bytes:
    """Return ``dot`` drawn as ``form``; DrawingError without Graphviz, or where it refuses the text."""
    if find_spec("graphviz") is not None:
        import graphviz

        head, brace, body = dot.partition("{")
        source = graphviz.Source(f"{head}{brace}\n\tdpi={_DPI[form]}{body}")
        try:
            return bytes(source.pipe(format=form, quiet=True))
        except graphviz.CalledProcessError as error:
            raise _failed("dot", error.returncode, error.stderr) from error
        except graphviz.ExecutableNotFound:
            if find_spec("pygraphviz") is not None:
                command = [sys.executable, "-P", "-c", _PYGRAPHVIZ, form, _DPI[form]]
                process = subprocess.run(command, input=dot.encode(), capture_output=True, check=False)
                if process.returncode != 0 or not process.stdout:
                    raise _failed("pygraphviz", process.returncode, process.stderr) from None
                return process.stdout
    raise DrawingError(
        "drawing needs Graphviz: pip install 'fsm-rollout[diagrams]' brings one along; "
        "only DOT (.dot) and Mermaid (.mmd) do without"
    )


def _failed(program: str, code: int, output: bytes | None) -> DrawingError:
    last_line = (output or b"").decode(errors="replace").strip().rpartition("\n")[2]
    return DrawingError(f"Graphviz ({program}) failed with code {code}: {last_line}")


def template_environment(
    folder: Path, filters: Mapping[str, Callable[..., object]], *, autoescape: bool
) -> Environment:
    """Return the environment of the Jinja templates in ``folder``: an unknown name is an error."""
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not autoescape,
    )
    environment.filters |= filters
    return environment


@cache
def _templates() -> Environment:
    return template_environment(
        Path(__file__).parent,
        {
            "shown": shown,
            "wrap": textwrap.wrap,
            "name": lambda name: name if name.isidentifier() and name not in _KEYWORDS else f'"{name}"',
            "text": lambda text: escape(shown(text, _LONGEST), quote=True),
            "entities": lambda text: _WITHOUT_MEANING.sub(lambda m: f"#{ord(m.group())};", shown(text, 2 * _LONGEST)),
        },
        autoescape=False,
    )


def _written(template: str, drawn: Picture) -> str:
    return _templates().get_template(template).render(picture=drawn, page=INK.light, pale=PALE.light)


def _dark_style(drawn: Picture, svg: str) -> str:
    """Return CSS that exchanges each colour of a drawing on a dark page: its rules win over the drawing's attributes.

    This works because no light colour stands for two things.
    """
    variants = {
        getattr(colour.light, role): getattr(colour.dark, role)
        for colour in (INK, PALE, *(box.colour for box in drawn.boxes))
        for role in ("line", "fill", "ink")
    }
    spelt = {"white" if light == "#ffffff" else light: dark for light, dark in variants.items()} | variants
    rules = "".join(
        f'.{_CLASS} [{role}="{light}"]{{{role}:{dark}}}\n'
        for light, dark in spelt.items()
        for role in ("fill", "stroke")
        if f'{role}="{light}"' in svg
    )
    return f"@media (prefers-color-scheme:dark){{\n{rules}}}\n"
