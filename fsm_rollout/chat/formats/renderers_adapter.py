"""Formats parsed by the ``renderers`` package: it reads token ids, so it knows markers from text that looks alike.

Source: https://github.com/PrimeIntellect-ai/renderers (Apache-2.0); nothing of it is copied here. Install it
with ``pip install fsm-rollout[renderers]``. These formats need the tokenizer that made the ids.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from typing import Any

from fsm_rollout.chat.formats.base import Call, CallProblem, Parsed, ProblemKind, Span, outside
from fsm_rollout.chat.render import Tools
from fsm_rollout.errors import ChatTemplateError

# Our name of a format → the name of its renderer.
RENDERERS: dict[str, str] = {
    "gpt_oss": "gpt-oss",
    "deepseek": "deepseek-v3",
    "kimi": "kimi-k2",
    "minimax": "minimax-m2",
    "gemma": "gemma4",
    "nemotron": "nemotron-3",
}

PROBLEMS: dict[str, ProblemKind] = {
    "invalid_json": "invalid_json",
    "unclosed_block": "unclosed",
    "missing_name": "no_name",
    "ok": "not_an_object",
    "malformed_structure": "malformed",
}


class RendererFormat:
    """A format read by a renderer of the ``renderers`` package; needs the ids, not only the text."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        try:
            package = importlib.import_module("renderers")
        except ImportError:
            raise ChatTemplateError(
                "missing-extra", f"tool format {name!r} needs: pip install fsm-rollout[renderers]"
            ) from None
        if tokenizer is None:
            raise ChatTemplateError("format-needs-tokenizer", f"tool format {name!r} reads ids: give the tokenizer")
        try:
            self._renderer = package.create_renderer(tokenizer, package.config_from_name(RENDERERS[name]))
        except Exception as error:
            raise ChatTemplateError(
                "tokenizer-mismatch", f"this tokenizer lacks what format {name!r} needs: {error}"
            ) from None
        self._tokenizer = tokenizer
        # The prompt ends in this header, and without it Harmony's parser takes a call for plain text, in silence.
        header = "<|start|>assistant" if name == "gpt_oss" else ""
        self._header: list[int] = tokenizer(header, add_special_tokens=False).input_ids if header else []
        tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()} - {"<think>", "</think>"}
        marks = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)"
        # The control tokens that a call stands between are no text of the turn.
        self._before_call = re.compile(rf"(?:\s*(?:{marks}))+\s*\Z")
        self._after_call = re.compile(rf"\A(?:\s*(?:{marks}))+")

    def parse(self, text: str, ids: Sequence[int] = (), tools: Tools | None = None) -> Parsed:
        """Parse one assistant turn from its ids; see :class:`~fsm_rollout.chat.formats.base.ToolFormat`."""
        tokens = list(ids)
        if text and not tokens:
            raise ChatTemplateError("format-needs-tokenizer", f"tool format {self.name!r} reads ids, and got none")
        lead = self._header if tokens[:1] != self._header[:1] else []
        try:
            response = self._renderer.parse_response([*lead, *tokens], tools=list(tools) if tools else None)
        except Exception as error:
            # A parser that fails on a model's text must not end in silence: the whole turn is one broken call.
            problem = CallProblem("malformed", f"{type(error).__name__}: {error}", (0, len(text)))
            return Parsed(text, (), (problem,))
        calls: list[Call] = []
        problems: list[CallProblem] = []
        cut = 0
        for attempt in response.tool_calls:
            span = self._span(attempt, text, tokens, cut, len(lead))
            cut = span[1]
            status = str(attempt.status.value)
            kind, message = PROBLEMS.get(status, "malformed"), f"the call is broken: {status}"
            if status in ("ok", "unknown_tool"):
                if not _finite(attempt.arguments):
                    kind, message = "invalid_json", "NaN and Infinity are not JSON"
                elif attempt.name and isinstance(attempt.arguments, dict):
                    calls.append(Call(attempt.name, attempt.arguments, span, attempt.id))
                    continue
            problems.append(CallProblem(kind, message, span, attempt.name))
        if self._header and not problems:  # between its channels there is no text but headers
            return Parsed((response.content or "").strip(), tuple(calls))
        pieces = outside(text, [call.span for call in calls])
        if not problems:  # beside a broken call the control tokens around it show the model where it went wrong
            pieces[:-1] = [self._before_call.sub("", piece) for piece in pieces[:-1]]
            pieces[1:] = [self._after_call.sub("", piece) for piece in pieces[1:]]
        return Parsed("".join(pieces).strip(), tuple(calls), tuple(problems))

    def _span(self, attempt: Any, text: str, ids: list[int], cut: int, lead: int) -> Span:
        """Return an attempt's place in the text; several attempts may share one block of ids."""
        start, end = cut, len(text)
        if attempt.token_span is not None:
            first, last = (max(0, position - lead) for position in attempt.token_span)
            start = max(cut, len(self._tokenizer.decode(ids[:first])))
            end = len(self._tokenizer.decode(ids[:last]))
        at = text.find(attempt.raw, start, end) if attempt.raw else -1
        if at >= 0:
            return at, at + len(attempt.raw)
        start = min(start, len(text))  # calls of one block may both be given the whole of it
        return start, max(start, min(end, len(text)))


def _finite(value: object) -> bool:
    """Say whether all numbers of plain data are numbers to JSON; what else there is, others judge."""
    try:
        return bool(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        return isinstance(error, TypeError)
