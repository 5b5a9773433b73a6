"""A picture as DOT, the language of Graphviz.

Invariant: the same picture gives the same text, byte for byte, and any text in it is safe: labels are HTML-like, and
what the user wrote is escaped in them. Colours are the light ones; :func:`dark_variants` says what each becomes on
dark, which works because no colour here stands for two things.
"""

from __future__ import annotations

import textwrap
from html import escape

from fsm_rollout.diagrams.palette import INK, PALE, Colour, colour_of
from fsm_rollout.diagrams.picture import ANY, Arrow, Box, Label, Picture, shown
from fsm_rollout.diagrams.renderer import NEEDS, DrawingError

_FONT = "Helvetica,Arial,sans-serif"
_START = "(start)"  # parentheses are in no state's name
_LINE = 30
"""Characters on one line of an arrow's label: width is what a picture from left to right is short of."""
_LONGEST = 90
_CAPTION = 88


def dot_of(picture: Picture) -> str:
    """Return the DOT of ``picture``.

    Raises:
        DrawingError: the package that writes DOT is not installed.
    """
    try:
        import graphviz
    except ImportError as error:
        raise DrawingError(NEEDS) from error
    page, pale = INK.light, PALE.light
    graph = graphviz.Digraph(
        picture.agent,
        graph_attr={
            "rankdir": "LR",
            "bgcolor": page.fill,
            "pad": "0.2",
            "nodesep": "0.3",
            "ranksep": "0.2",
            "outputorder": "edgesfirst",
            "fontname": _FONT,
            "fontsize": "10",
            "fontcolor": pale.ink,
            "labelloc": "b",
            "labeljust": "l",
            "label": _caption(picture),
        },
        node_attr={"fontname": _FONT, "fontsize": "10", "shape": "box", "style": "rounded,filled", "margin": "0"},
        edge_attr={"fontname": _FONT, "fontsize": "9", "arrowsize": "0.7", "penwidth": "1.2"},
    )
    graph.node(_START, label="", shape="circle", width="0.12", fixedsize="true", color=page.ink, fillcolor=page.ink)
    for box in picture.boxes:
        graph.node(box.name, **_node(picture, box))
    graph.edge(_START, picture.initial, color=page.ink)
    for arrow in picture.arrows:
        graph.edge(arrow.source, arrow.dest, **_edge(picture, arrow))
    return str(graph.source)


def dark_variants(picture: Picture) -> dict[str, str]:
    """Return what each colour of ``dot_of(picture)`` is on a dark page."""
    colours = [INK, PALE, *(_colour(picture, box.name) for box in picture.boxes)]
    return {
        getattr(colour.light, role): getattr(colour.dark, role)
        for colour in colours
        for role in ("line", "fill", "ink")
    }


def _colour(picture: Picture, name: str) -> Colour:
    known = name in picture.declared or any(box.name == name and box.kind == "final" for box in picture.boxes)
    return colour_of(name, picture.declared) if known else PALE


def _node(picture: Picture, box: Box) -> dict[str, str]:
    shades = _colour(picture, box.name).light
    if box.kind == "final":
        look = {"fillcolor": shades.ink, "color": shades.ink}
    elif box.kind == "working":
        look = {"fillcolor": shades.fill, "color": shades.line, "penwidth": "2.4" if box.trained else "1.2"}
    else:
        look = {"fillcolor": shades.fill, "color": shades.line, "style": "rounded,filled,dashed"}
    return {"label": f"<{_inside(picture, box)}>", **look}


def _inside(picture: Picture, box: Box) -> str:
    """Return what stands in a box: name and badge, then the handler, then what a visit may spend."""
    shades, pale = _colour(picture, box.name).light, PALE.light
    if box.kind == "final":
        return _table([[_font(_bold(box.name), INK.light.fill)]], padding=7)
    if box.kind != "working":
        says = "any state" if box.kind == "any" else f"{box.name}: not defined"
        return _table([[_font(_bold(says), shades.ink)]], padding=5)
    name = _font(f"{_bold(box.name)}&#160;", shades.ink)  # bold text comes out wider in some fonts than it was measured
    handler = _font(_text(box.handler), shades.ink, 9)
    sections = [_lines([name, handler])]
    if box.lines:
        sections.append(_lines([_font(_text(line), pale.ink, 9) for line in box.lines]))
    badge = ""
    if box.trained is not None:
        fill, ink = (shades.line, INK.light.fill) if box.trained else (INK.light.fill, pale.ink)
        badge = _badge("trained" if box.trained else "not trained", fill, ink)
    rows = [[sections[0], badge] if badge else [sections[0]], *([section] for section in sections[1:])]
    return _table(rows, padding=6, rule=shades.line)


def _edge(picture: Picture, arrow: Arrow) -> dict[str, str]:
    shades = (PALE if arrow.implicit or arrow.source == ANY else _colour(picture, arrow.source)).light
    size = 8 if arrow.implicit else 9
    rows = [[_font(_label(label), shades.ink, size)] for label in arrow.labels]
    look = {"color": shades.line, "label": f"<{_table([[_table(rows, padding=1)]], padding=3)}>"}
    return look | ({"style": "dashed", "weight": "0"} if arrow.implicit else {})


def _label(label: Label) -> str:
    order = "" if label.order is None else f"{_bold(str(label.order))} "
    lines = [f"{order}{_text(label.trigger)}"]
    if label.conditions:
        asked = shown(" and ".join(label.conditions), _LONGEST)
        lines += [_text(line) for line in textwrap.wrap(f"[{asked}]", _LINE)]
    if label.stop_reason is not None:
        lines.append(f"■ {_bold(label.stop_reason)}")
    return _lines(lines)


def _caption(picture: Picture) -> str:
    says = textwrap.wrap(shown(picture.description, 4 * _CAPTION), _CAPTION)
    lines = [
        _font(_bold(picture.agent), INK.light.ink, 11),
        *map(_text, says),
        *(_font(_text(line), INK.light.ink) for line in textwrap.wrap(picture.bound, _CAPTION)),
    ]
    return f"<{_table([[_lines(lines)]], padding=6)}>"


def _table(rows: list[list[str]], *, padding: int, rule: str | None = None) -> str:
    """Return a borderless table of rows of cells, with lines between its rows where ``rule`` is a colour."""
    columns = max(map(len, rows))
    cells = ["".join(_cell(content, columns - len(row) + 1) for content in row) for row in rows]
    colour = "" if rule is None else f' COLOR="{rule}"'
    body = ("" if rule is None else "<HR/>").join(f"<TR>{row}</TR>" for row in cells)
    return f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="{padding}"{colour}>{body}</TABLE>'


def _cell(content: str, columns: int) -> str:
    span = "" if columns == 1 else f' COLSPAN="{columns}"'
    return f'<TD ALIGN="LEFT" BALIGN="LEFT"{span}>{content}</TD>'


def _badge(text: str, fill: str, ink: str) -> str:
    return (
        f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="2" STYLE="ROUNDED" BGCOLOR="{fill}">'
        f"<TR><TD>{_font(_text(text), ink, 8)}</TD></TR></TABLE>"
    )


def _lines(lines: list[str]) -> str:
    return '<BR ALIGN="LEFT"/>'.join([*lines, ""]) if len(lines) > 1 else lines[0]


def _font(content: str, colour: str, size: int | None = None) -> str:
    points = "" if size is None else f' POINT-SIZE="{size}"'
    return f'<FONT COLOR="{colour}"{points}>{content}</FONT>'


def _bold(text: str) -> str:
    return f"<B>{_text(text)}</B>"


def _text(text: str) -> str:
    return escape(shown(text, _LONGEST), quote=True)
