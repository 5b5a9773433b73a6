"""One self-contained HTML file out of a template and data.

Invariants: a page asks the network for nothing; nothing that a model, a tool or a prompt wrote is ever markup or code.
Jinja escapes every value, data for the script is JSON that cannot close its element, and the page's own
Content-Security-Policy lets only this package's script run (by its hash), so that holds even if the first two fail.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fsm_rollout.diagrams.palette import css_variables
from fsm_rollout.report.endings import kind_of_end
from fsm_rollout.report.token_texts import folded, visible

PAGE = Path(__file__).parent / "page"
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ONE_LINE = 100
SMALLEST = 1e-6
"""Numbers closer to 0 are written with an exponent."""
_PARTS = ("line", "fill", "ink")


def render_page(template: str, *, title: str, states: Sequence[str], data: Any, **values: Any) -> str:
    """Return the page that ``template`` (a file in ``page/``) makes of ``values``, with ``data`` for its script."""
    script, style = _source("page.js"), state_styles(states) + _source("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'"
    return (
        _environment()
        .get_template(template)
        .render(
            title=title,
            policy=policy,
            style=Markup(style),
            script=Markup(script),
            data=_embedded(data),
            **values,
        )
    )


def state_class(state: str) -> str:
    """Return the CSS class under which a state's colours are ``--line``, ``--fill`` and ``--ink``."""
    return f"n-{state}" if _IDENTIFIER.fullmatch(state) else "n-other"


def state_styles(states: Sequence[str]) -> str:
    """Return the CSS of :func:`state_class` for these states; names that no graph allows have no colour of theirs."""
    known = [state for state in states if _IDENTIFIER.fullmatch(state)]
    rules = "".join(
        f".{state_class(state)}{{" + "".join(f"--{part}:var(--state-{state}-{part});" for part in _PARTS) + "}\n"
        for state in known
    )
    return css_variables(known) + rules


def write_page(path: Path, text: str) -> None:
    """Put a page in place whole; what UTF-8 cannot say (lone surrogates) is written as an escape.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    partial.replace(path)


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that suits them: ``340 µs``, ``12 ms``, ``3.4 s``, ``2 min 5 s``."""
    if seconds is None:
        return "–"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs" if seconds > 0 else "0 s"
    if seconds < 0.1:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    return f"{seconds // 60:,.0f} min {seconds % 60:.0f} s"


def replica_name(name: str) -> str:
    """Return how a replica is called in a sentence: pools name theirs ``replica-0``, engines of others as they like."""
    return name if "replica" in name.lower() else f"replica {name}"


def _unbroken_duration(seconds: float | None) -> str:
    return duration(seconds).replace(" ", "\u00a0")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number without noise: ``1``, ``0.333``, ``2.5``, ``548.8``, ``12,345``, ``0.00042``, ``–`` for none."""
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if not math.isfinite(value) or abs(value) < SMALLEST:
        return f"{value:.1e}"
    if abs(value) < 10 ** (-digits):
        return f"{value:.{1 - math.floor(math.log10(abs(value)))}f}".rstrip("0")  # the first two of its digits
    before = len(str(int(abs(value))))  # the more digits before the point, the fewer are worth reading behind it
    text = f"{value:,.{max(0, min(digits, 4 - before))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "visible": visible,
        "folded": folded,
        "kind_of_end": kind_of_end,
        "duration": _unbroken_duration,
        "number": number,
        "as_json": _as_json,
        "state_class": state_class,
        "replica": replica_name,
    }
    return environment


@cache
def _source(name: str) -> str:
    return (PAGE / name).read_text("utf-8")


def _as_json(value: Any) -> str:
    """Return text as it is, and data as JSON: on one line where it fits."""
    if isinstance(value, str):
        return visible(value)
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > _ONE_LINE:
        text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
    return "\n".join(map(visible, text.split("\n")))


def _embedded(data: Any) -> Markup:
    text = json.dumps(data, separators=(",", ":"), default=str)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
