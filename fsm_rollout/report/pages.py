"""One self-contained HTML file out of a template and data, and the links from one page of a run to the others.

Invariants: a page asks the network for nothing; nothing that a model, a tool or a prompt wrote is ever markup or code.
Jinja escapes every value, data for the script is JSON that cannot close its element, and the page's own
Content-Security-Policy lets only this package's script run (by its hash), so that holds even if the first two fail.
Pictures are shown from the page's data.

A link leads only to a page that exists when the linking page is written, or that is written along with it; where there
is none, :meth:`Links.command` makes one. Links are relative, so a run's folder can be moved and served.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote, urlencode

from jinja2 import Environment
from markupsafe import Markup

from fsm_rollout.diagrams.draw import template_environment
from fsm_rollout.diagrams.palette import css_variables
from fsm_rollout.diagrams.picture import shown
from fsm_rollout.files import written_whole
from fsm_rollout.report.pictures import pieces, words_in
from fsm_rollout.report.recording import kind_of_end
from fsm_rollout.report.texts import as_json, duration, folded, number, percent, replica_name, visible

TEMPLATES = Path(__file__).parent / "page"
PAGES = "trajectories"  # the folder, in a run's folder, of trajectory pages that a report links to
REPORT = "report.html"
LONGEST_NAME = 150  # characters of a page's name; file systems take 255 in all
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def render_page(
    template: str, *, title: str, states: Sequence[str], data: Mapping[str, object], version: str = "", **values: object
) -> str:
    """Return the page that ``template`` (a file in ``page/``) makes of ``values``, with ``data`` for its script.

    ``version``: a server makes it, says so of what it shows, and is asked for what has changed since.
    """
    style, scripts = state_styles(states) + _source("page.css"), [_source("page.js")]
    if version:
        scripts.insert(0, _source("live.js"))
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src blob:; base-uri 'none'"
    page = {
        "title": title,
        "policy": f"{policy}; connect-src 'self'; form-action 'self'" if version else policy,
        "style": Markup(style),
        "scripts": [Markup(script) for script in scripts],
        "data": _embedded({**data, "version": version} if version else data),
    }
    return render_template(template, page | values)


def render_template(template: str, values: Mapping[str, object]) -> str:
    """Return what a file in ``page/`` makes of ``values``; all of them are escaped."""
    return _environment().get_template(template).render(values)


def state_class(state: str) -> str:
    """Return the CSS class under which a state's colours are ``--line``, ``--fill`` and ``--ink``."""
    return f"n-{state}" if _IDENTIFIER.fullmatch(state) else "n-other"


def state_styles(states: Sequence[str]) -> str:
    """Return the CSS of :func:`state_class` for these states; names that no graph allows have no colour of theirs."""
    drawn_states = [state for state in states if _IDENTIFIER.fullmatch(state)]
    rules = (
        f".n-{state}{{--line:var(--state-{state}-line);--fill:var(--state-{state}-fill);--ink:var(--state-{state}-ink);}}\n"
        for state in drawn_states
    )
    return css_variables(drawn_states) + "".join(rules)


def write_page(path: Path, text: str) -> None:
    """Put a page in place whole (lone surrogates as escapes); ConfigError if it cannot be written."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class Links:
    """What the page at ``page`` can link to in the run's folder ``folder``."""

    folder: Path
    page: Path
    planned: Container[Path] = ()  # pages that are being written along with this one
    version: str = ""  # of what a server shows (see `render_page`)

    def to(self, trajectory_id: str) -> str | None:
        """Return the relative URL of a trajectory's page; ``None`` where it has none."""
        return self._relative(page_path(self.folder, trajectory_id))

    def report(self) -> str | None:
        """Return the relative URL of the run's report, or of a server's list; ``None`` where there is none."""
        return self._relative(self.folder / ("" if self.version else REPORT))

    def beside(self, trajectory_id: str, other: str) -> str | None:
        """Return the relative URL of a page that shows two trajectories side by side; only a server has it."""
        query = urlencode([("id", trajectory_id), ("id", other)])
        return f"../beside.html?{query}" if self.version else None

    def command(self, trajectory_id: str) -> str:
        """Return the shell command that makes a trajectory's page."""
        return f"fsm-rollout show {shlex.quote(str(self.folder))} --trajectory {shlex.quote(trajectory_id)} -o F.html"

    def _relative(self, path: Path) -> str | None:
        if path not in self.planned and not path.is_file():
            return None
        relative = os.path.relpath(path.absolute(), self.page.absolute().parent).replace(os.sep, "/")
        return quote(relative) + ("/" if path == self.folder else "")


def page_path(folder: Path, trajectory_id: str) -> Path:
    """Return where the page of a trajectory belongs; no two ids share a name, whatever characters they have."""
    name = quote(trajectory_id, safe="", errors="backslashreplace").replace("~", "%7E").replace("%", "~")
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}~~{hashlib.sha256(trajectory_id.encode(errors='backslashreplace')).hexdigest()}"
    return folder / PAGES / f"{name}.html"


@cache
def _environment() -> Environment:
    return template_environment(
        TEMPLATES,
        {
            "visible": visible,
            "folded": folded,
            "kind_of_end": kind_of_end,
            "duration": lambda seconds: duration(seconds).replace(" ", "\u00a0"),  # never broken over two lines
            "number": number,
            "percent": lambda share: percent(share).replace(" ", "\u00a0"),
            "as_json": as_json,
            "pieces": pieces,
            "words_in": words_in,
            "state_class": state_class,
            "shown": shown,
            "dot_string": _dot_string,
            "replica": replica_name,
        },
        autoescape=True,
    )


@cache
def _source(name: str) -> str:
    return (TEMPLATES / name).read_text("utf-8")


def _dot_string(text: str) -> Markup:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return Markup(f'"{escaped}"')


def _embedded(data: object) -> Markup:
    text = json.dumps(data, separators=(",", ":"), default=str)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
