"""A workload for :mod:`overhead` that a clone can run: prompts, scripted turns as token ids, a tool, and the answers.

The same shape and the same names as the neutral workload that other frameworks run (``--workload DIR``): a system and a
user message, four turns of 32 to 64 tokens with one tool call each, and a last one without. ``expected(i)`` is what a
correct system returns, put together here by hand and by the tokenizer alone.
"""

from __future__ import annotations

import json
import random
from typing import Any

from fsm_rollout.model.folders import load_tokenizer, model_folder

TOOL_NAME = "lookup"
SENTENCE = "what is the sum of seven and twelve so we add both numbers then subtract three and give the answer"
WORDS = SENTENCE.split()


def build_assets(path: str) -> None:
    """Nothing needs to be built: the tokenizer is that of the embedded model."""


def tool_answer(arguments: dict[str, Any]) -> str:
    """Return what the tool answers."""
    return f"value of {arguments.get('key')} is " + " ".join(WORDS[:12])


class Workload:
    """Prompts and turns by number; the turns repeat after ``variants`` of them."""

    def __init__(self, path: str = "", turns: int = 4, seed: int = 0, variants: int = 64) -> None:
        self.tok = load_tokenizer(model_folder("embedded"))
        self.turns, self.variants = turns, variants
        self.end = self.tok.convert_tokens_to_ids("<|im_end|>")
        draw = random.Random(seed)
        self._scripts = [[self._turn(draw, calls=turn < turns) for turn in range(turns + 1)] for _ in range(variants)]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tok.encode(text, add_special_tokens=False)
        return ids

    def _turn(self, draw: random.Random, *, calls: bool) -> list[int]:
        size = draw.randint(32, 64)
        call = {"name": TOOL_NAME, "arguments": {"key": f"k{draw.randrange(1000)}", "count": draw.randrange(9)}}
        tail = f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" if calls else ""
        ids = [*self._ids(tail), self.end]
        return self._ids(" ".join(draw.choices(WORDS, k=size)))[: max(1, size - len(ids))] + ids

    def prompt(self, i: int) -> list[dict[str, Any]]:
        """Return the messages of prompt ``i``."""
        words = " ".join(WORDS[(i + k) % len(WORDS)] for k in range(24))
        return [
            {"role": "system", "content": "You are a helpful agent."},
            {"role": "user", "content": f"task {i}: {words}"},
        ]

    def script(self, i: int) -> list[list[int]]:
        """Return the turns of trajectory ``i``, as token ids."""
        return self._scripts[i % self.variants]

    def expected(self, i: int) -> tuple[None, list[int], list[int]]:
        """Return the response ids and their mask (the prompt's ids depend on how the tools are written)."""
        ids: list[int] = []
        mask: list[int] = []
        for turn, sampled in enumerate(self.script(i)):
            ids += sampled
            mask += [1] * len(sampled)
            if turn < self.turns:
                call = self.tok.decode(sampled).split("<tool_call>")[1].split("</tool_call>")[0]
                answer = tool_answer(json.loads(call)["arguments"])
                glue = self._ids(
                    f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n"
                    "<|im_start|>assistant\n"
                )
                ids += glue
                mask += [0] * len(glue)
        return None, ids, mask
