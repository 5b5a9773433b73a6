"""A picture as a Mermaid flowchart.

Invariant: states are called ``s0``, ``s1``, … here and what they are called stands in quoted labels, where every
character that could mean something to Mermaid or HTML is written as an entity code (``#34;``), so no name and no text
can break the diagram or put markup into the page that shows it.
"""

from __future__ import annotations

import re

from fsm_rollout.diagrams.palette import INK, PALE, colour_of
from fsm_rollout.diagrams.picture import Box, Label, Picture, shown

_SPECIAL = re.compile(r"[^\w .,:()≤■…-]", re.ASCII)
_LONGEST = 90


def mermaid_of(picture: Picture) -> str:
    """Return ``picture`` as Mermaid text, one statement a line."""
    ids = {box.name: f"s{index}" for index, box in enumerate(picture.boxes)}
    lines = ["flowchart LR", f"  %% {picture.agent}: {picture.bound}", "  start((( )))"]
    lines += [f"  {ids[box.name]}{_shape(box)}" for box in picture.boxes]
    if picture.initial in ids:
        lines.append(f"  start --> {ids[picture.initial]}")
    lines += [
        f'  {ids[arrow.source]} {"-.->" if arrow.implicit else "-->"}|"{_labels(arrow.labels)}"| {ids[arrow.dest]}'
        for arrow in picture.arrows
    ]
    lines += [f"  style {ids[box.name]} {_style(picture, box)}" for box in picture.boxes]
    return "\n".join(lines) + "\n"


def _style(picture: Picture, box: Box) -> str:
    known = box.name in picture.declared or box.kind == "final"
    shades = colour_of(box.name, picture.declared).light if known else PALE.light
    fill, ink = (shades.ink, INK.light.fill) if box.kind == "final" else (shades.fill, shades.ink)
    return f"fill:{fill},stroke:{shades.line},color:{ink},stroke-width:{3 if box.trained else 1}px"


def _shape(box: Box) -> str:
    if box.kind == "final":
        return f'(["{_text(box.name)}"])'
    if box.kind == "any":
        return '("any state")'
    if box.kind == "undefined":
        return f'("{_text(box.name)}: not defined")'
    trained = {None: "", True: ", trained", False: ", not trained"}[box.trained]
    return '("{}")'.format("<br/>".join(map(_text, [box.name, box.handler + trained, *box.lines])))


def _labels(labels: tuple[Label, ...]) -> str:
    return "<br/>".join(line for label in labels for line in _label(label))


def _label(label: Label) -> list[str]:
    order = "" if label.order is None else f"{label.order} "
    asked = f" [{shown(' and '.join(label.conditions), _LONGEST)}]" if label.conditions else ""
    ends = [] if label.stop_reason is None else [_text(f"■ {label.stop_reason}")]
    return [_text(f"{order}{label.trigger}{asked}"), *ends]


def _text(text: str) -> str:
    printable = shown(text, 2 * _LONGEST)
    return _SPECIAL.sub(lambda found: f"#{ord(found.group())};", printable)
