"""Draws an agent: as SVG, PNG, DOT or Mermaid.

Invariant: the DOT (and the Mermaid text) is a function of the graph alone, and every SVG carries the DOT that it was
drawn from, so whether a picture is stale can be told without comparing pixels. Where Graphviz puts a box may differ
between its versions and with the fonts that it finds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.diagrams.dot import dark_variants, dot_of
from fsm_rollout.diagrams.mermaid import mermaid_of
from fsm_rollout.diagrams.picture import picture
from fsm_rollout.diagrams.renderer import DrawingError, render
from fsm_rollout.errors import ConfigError, did_you_mean

__all__ = ["DrawingError", "draw", "form_of", "source_of", "to_dot", "to_mermaid", "to_png", "to_svg"]

_CLASS = "fsm-rollout-agent"
_SOURCE = re.compile(r'<metadata class="dot">(.*?)</metadata>', re.DOTALL)


def to_dot(graph: AgentGraph, *, implicit: bool = False) -> str:
    """Return ``graph`` as DOT; ``implicit`` shows the ends that need no row, dashed.

    Raises:
        DrawingError: the package that writes DOT is not installed.
    """
    return dot_of(picture(graph, implicit=implicit))


def to_mermaid(graph: AgentGraph, *, implicit: bool = False) -> str:
    """Return ``graph`` as a Mermaid flowchart, for places that draw Mermaid; needs no Graphviz."""
    return mermaid_of(picture(graph, implicit=implicit))


def to_svg(graph: AgentGraph, *, implicit: bool = False) -> str:
    """Return ``graph`` as SVG: an ``<svg>`` element, for a file or inside HTML.

    It has the page's colour behind it and follows the reader's ``prefers-color-scheme``. A transparent one would be
    dark on dark wherever a page and the system it is read on disagree.

    Raises:
        DrawingError: there is no Graphviz.
    """
    drawn = picture(graph, implicit=implicit)
    dot = dot_of(drawn)
    svg = render(dot, "svg").decode()
    svg = re.sub(r"<!--.*?-->\n?", "", svg[svg.index("<svg") :], flags=re.DOTALL)  # they name the Graphviz version
    head, mark, body = svg.partition(">")
    title = f"<title>{escape(graph.agent)}</title>"
    style = f"<style>\n{_dark_style(dark_variants(drawn), body)}</style>"
    source = f'<metadata class="dot">{escape(dot, quote=False)}</metadata>'
    return f'{head} class="{_CLASS}" role="img"{mark}\n{title}\n{style}\n{source}{body}'


def to_png(graph: AgentGraph, *, implicit: bool = False) -> bytes:
    """Return ``graph`` as a PNG in the light colours, at 192 dots per inch.

    Raises:
        DrawingError: there is no Graphviz.
    """
    return render(to_dot(graph, implicit=implicit), "png")


def source_of(svg: str) -> str | None:
    """Return the DOT that an SVG of :func:`to_svg` was drawn from; ``None`` if it carries none."""
    found = _SOURCE.search(svg)
    return None if found is None else unescape(found.group(1))


_FORMS: dict[str, Callable[..., str | bytes]] = {
    ".svg": to_svg,
    ".png": to_png,
    ".dot": to_dot,
    ".mmd": to_mermaid,
}


def form_of(path: Path) -> Callable[..., str | bytes]:
    """Return the function that draws what the suffix of ``path`` asks for.

    Raises:
        ConfigError: no such form.
    """
    suffix = path.suffix.lower()
    if suffix not in _FORMS:
        got = f"'{suffix}' is no picture that can be drawn" if suffix else "the name of the picture has no suffix"
        raise ConfigError(f"{path}: {got}{did_you_mean(suffix, _FORMS)}")
    return _FORMS[suffix]


def draw(graph: AgentGraph, path: str | Path, *, implicit: bool = False) -> Path:
    """Draw ``graph`` into the file ``path``, whose suffix (.svg, .png, .dot or .mmd) says how; return the path.

    Raises:
        ConfigError: unknown suffix, or the file cannot be written.
        DrawingError: there is no Graphviz (only Mermaid does without).
    """
    path = Path(path)
    drawn = form_of(path)(graph, implicit=implicit)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn.encode() if isinstance(drawn, str) else drawn)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def _dark_style(variants: dict[str, str], drawing: str) -> str:
    """Return CSS that exchanges each colour of a drawing on dark: its rules win over the drawing's attributes."""
    spelt = {"white" if light == "#ffffff" else light: dark for light, dark in variants.items()} | variants
    rules = "".join(
        f'.{_CLASS} [{role}="{light}"]{{{role}:{dark}}}\n'
        for light, dark in spelt.items()
        for role in ("fill", "stroke")
        if f'{role}="{light}"' in drawing
    )
    return f"@media (prefers-color-scheme:dark){{\n{rules}}}\n"
