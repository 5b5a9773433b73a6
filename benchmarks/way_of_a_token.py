"""How far a token travels: ``python benchmarks/way_of_a_token.py [--steps]``.

One warm run of one trajectory (one prompt, ``n=1``, the embedded model, the batch included) is profiled on its event
loop. Counted are this package's own functions (each ``def``, lambda and comprehension that ran at least once), the
files that they stand in, and how often a call goes to another file than the call before it. ``--steps`` prints the way
itself. Then the size of the code: lines without docstrings, comments and blanks. Nothing here is asserted.
"""

from __future__ import annotations

import ast
import asyncio
import io
import sys
import tokenize
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import fsm_rollout as fr

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fsm_rollout"
AGENTS = {
    "single_turn": "configs/data/sums.jsonl",
    "tool_agent": "configs/data/arithmetic.jsonl",  # its first prompt takes two tool rounds
}
ENGINE = {"kind": "transformers", "model": "embedded", "threads": 1}
WARM = 3  # runs before the one that counts, so that caches are full


def way(agent: str, data: str) -> list[CodeType]:
    """Return the package's functions that one warm run calls on the event loop, in order."""
    calls: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            calls.append(frame.f_code)

    async def run() -> None:
        prompts = fr.read_prompts(ROOT / data, limit=1)
        async with fr.Rollout(ROOT / f"configs/agents/{agent}.yaml", ENGINE) as rollout:
            for _ in range(WARM):
                await rollout.arun(prompts)
            sys.setprofile(note)
            try:
                await rollout.arun(prompts)
            finally:
                sys.setprofile(None)

    asyncio.run(run())
    return calls


def lines_of_code(path: Path) -> int:
    """Return how many lines hold code: no docstrings (of attributes neither), comments and blanks."""
    text = path.read_text("utf-8")
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def main(arguments: Sequence[str]) -> None:
    """Print the table, and with ``--steps`` each step."""
    ways = {agent: way(agent, data) for agent, data in AGENTS.items()}
    print(f"{'agent':<12} {'functions':>9} {'files':>6} {'changes of file':>16} {'calls':>6}")
    for agent, calls in ways.items():
        changes = sum(a.co_filename != b.co_filename for a, b in pairwise(calls))
        files = {code.co_filename for code in calls}
        print(f"{agent:<12} {len(set(calls)):>9} {len(files):>6} {changes:>16} {len(calls):>6}")
    for agent, calls in ways.items() if "--steps" in arguments else ():
        print(f"\n{agent}")
        before = ""
        for code in calls:
            place = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            print(f"  {place if place != before else '':<36} {code.co_qualname}")
            before = place
    for folder in ("fsm_rollout", "tests"):
        modules = list((ROOT / folder).rglob("*.py"))
        longest = max(modules, key=lambda path: path.read_bytes().count(b"\n"))
        print(
            f"{folder}: {sum(map(lines_of_code, modules)):,} lines of code in {len(modules)} modules, the longest "
            f"{longest.relative_to(ROOT)} ({longest.read_bytes().count(10):,} lines in all)"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
