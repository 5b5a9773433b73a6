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


RIGHT = grader('return Outcome("right" if "4" in trajectory.text else "wrong")')
RAISES = grader('said = trajectory.text.split("answer is ")[1]', 'return Outcome("right" if "4" in said else "wrong")')
UNDECLARED = grader('return Outcome("right" if "4" in trajectory.text else "unsure")')
BLOCKS = grader("while True:", "    pass")
NAPS = grader("try:", "    time.sleep(0.001)", "except Exception:", "    pass", 'return Outcome("right")')
WAITS = grader("lock = threading.Lock()", "with lock:", "    lock.acquire(timeout=1)", 'return Outcome("right")')
WRITES_NUMBERS = grader('ctx.write([{"role": "user", "content": 42}], context="main")', 'return Outcome("wrong")')
NEVER = grader("await asyncio.Event().wait()")
SWALLOWS = grader(
    "while True:", "    try:", "        await asyncio.sleep(1)", "    except asyncio.CancelledError:", "        pass"
)
SPINS = grader("while True:", "    await asyncio.sleep(0)")
HIDDEN_STATE = _HANDLER.format(
    body='        self.seen = getattr(self, "seen", 0) + 1\n'
    '        return Outcome("right" if self.seen % 2 else "wrong")'
)
SWALLOWS_ONCE = grader(
    "try:", "    await asyncio.sleep(20)", "except asyncio.CancelledError:", "    pass", 'return Outcome("right")'
)
TIMES_OUT = grader('raise TimeoutError("the search server")')
EXITS = grader("raise SystemExit(3)")
CANCELS_ITSELF = grader("raise asyncio.CancelledError")
SPEAKS_AGAIN = grader('await ctx.generate("main")', 'return Outcome("right")')
REMEMBERS = "SEEN = set()\n" + grader(
    "told = trajectory.seed in SEEN", "SEEN.add(trajectory.seed)", 'return Outcome("right" if told else "wrong")'
)
ASKS = grader(
    'said = await ctx.ask("judge", [{"role": "user", "content": "Right?"}])',
    'return Outcome("right" if "yes" in said else "wrong")',
)
BOTH = grader(
    "left, right = await asyncio.gather(ctx.generate('left'), ctx.generate('right'))",
    'return Outcome("right" if "4" in trajectory.text else "wrong")',
)
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
