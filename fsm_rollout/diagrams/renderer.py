"""Graphviz, wherever it is: DOT in, a picture's bytes out.

Invariant: where a ``dot`` is on the PATH it draws; else the Graphviz that pygraphviz's wheel brings along does, in a
process of its own, so that what a C library makes of odd input or prints about fonts stays out of this one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from typing import Literal

from fsm_rollout.errors import RolloutError

_CHILD = """
import sys, pygraphviz
graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode("utf-8"))
graph.graph_attr["dpi"] = sys.argv[2]
sys.stdout.buffer.write(graph.draw(format=sys.argv[1], prog="dot"))
"""
_DPI = {"svg": "72", "png": "192"}
"""Dots per inch: of an SVG the coordinates' unit, hence points."""
NEEDS = "drawing needs Graphviz: pip install 'fsm-rollout[diagrams]' brings one along; only Mermaid (.mmd) does without"


class DrawingError(RolloutError):
    """A picture cannot be drawn: nothing is installed that draws, or it failed."""


def render(dot: str, form: Literal["svg", "png"]) -> bytes:
    """Return ``dot`` drawn as ``form``.

    Raises:
        DrawingError: there is no Graphviz, or it refuses the text.
    """
    program = shutil.which("dot")
    if program is not None:
        command = [program, f"-T{form}", f"-Gdpi={_DPI[form]}"]
    elif find_spec("pygraphviz") is not None:
        command = [sys.executable, "-c", _CHILD, form, _DPI[form]]
    else:
        raise DrawingError(NEEDS)
    done = subprocess.run(command, input=dot.encode(), capture_output=True, check=False)
    if done.returncode != 0 or not done.stdout:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise DrawingError(f"Graphviz ({command[0]}) failed with code {done.returncode}: {said}")
    return done.stdout
