"""Agents of a user who makes mistakes, as files: what the plugin's tests write into a folder of their own."""

from __future__ import annotations

GOOD = """\
agent: good
limits: {assistant_turns: 3, wall_seconds: 60}
states:
  PENDING: {}
  GENERATING: {prompt: "Say ANSWER and the number.", timeout: 10}
transitions:
  - {trigger: prompted,  source: PENDING,    dest: GENERATING}
  - {trigger: generated, source: GENERATING, dest: TERMINATED, conditions: {text_contains: ANSWER}}
  - {trigger: generated, source: GENERATING, dest: GENERATING}
"""

UNLOADABLE = GOOD.replace("dest: GENERATING}\n  - {trigger: generated", "dest: GENERATIN}\n  - {trigger: generated", 1)

DEAD_ROW = """\
agent: dead_row
limits: {assistant_turns: 9}
states:
  PENDING: {}
  GENERATING: {prompt: "Go on.", timeout: 10, max_visits: 3}
transitions:
  - {trigger: prompted,  source: PENDING,    dest: GENERATING}
  - {trigger: generated, source: GENERATING, dest: TERMINATED, conditions: {visits_over: {PENDING: 1}}}
  - {trigger: generated, source: GENERATING, dest: GENERATING, conditions: {text_contains: again}}
  - {trigger: generated, source: GENERATING, dest: TERMINATED}
"""

# A grader of one's own, between the model's turns: the README shows it with what the plugin says.
GRADED = """\
agent: graded
limits: {assistant_turns: 4, wall_seconds: 60}
states:
  PENDING: {}
  GENERATING: {prompt: "Say the number.", timeout: 10}
  GRADING: {handler: "grader:Grade", timeout: 5, max_visits: 4}
transitions:
  - {trigger: prompted,  source: PENDING,    dest: GENERATING}
  - {trigger: generated, source: GENERATING, dest: GRADING}
  - {trigger: right,     source: GRADING,    dest: TERMINATED}
  - {trigger: wrong,     source: GRADING,    dest: GENERATING}
"""

_HANDLER = """\
import asyncio
import threading
import time

from fsm_rollout import Outcome, State


class Grade(State):
    triggers = ("right", "wrong")

    async def run(self, trajectory, ctx):
{body}
"""


def grader(*lines: str) -> str:
    """The grader's module, its ``run`` made of ``lines``."""
    return _HANDLER.format(body="\n".join(f"        {line}" for line in lines))


RAISES = ('said = trajectory.text.split("answer is ")[1]', 'return Outcome("right" if "4" in said else "wrong")')
TOOLS = """\
def lookup(word: str) -> str:
    \"\"\"Look a word up.

    Args:
        word: Which.
    \"\"\"
    raise SystemExit("a tool of the user's was called for real")
"""
LOOKS_UP = """\
agent: looks_up
limits: {assistant_turns: 4, tool_calls: 4, wall_seconds: 60}
tools:
  lookup: {use: "words:lookup", timeout: 5}
states:
  PENDING: {}
  GENERATING: {timeout: 10}
  PROCESSING_TOOLS: {timeout: 10}
transitions:
  - {trigger: prompted,   source: PENDING,          dest: GENERATING}
  - {trigger: generated,  source: GENERATING,       dest: PROCESSING_TOOLS, conditions: {tool_called: lookup}}
  - {trigger: generated,  source: GENERATING,       dest: TERMINATED, conditions: {text_matches: "^[0-9]{3}$"}}
  - {trigger: generated,  source: GENERATING,       dest: TERMINATED}
  - {trigger: tools_done, source: PROCESSING_TOOLS, dest: TERMINATED, conditions: last_tool_failed, stop_reason: lost}
  - {trigger: tools_done, source: PROCESSING_TOOLS, dest: GENERATING}
"""
