"""The derivation again, from ``apply_chat_template`` alone and as plainly as possible; shares no code with ours.

Two full renders with different sentinels in the last assistant turn; what they end with in common, from the
first stop token on, is the answer. ``None``: the derivation has no single answer.
"""

import bisect
import json
from typing import Any

from transformers import PreTrainedTokenizerFast

S1, S2, N = "q7Zx1A", "q7Zx1B", "n5Kw"


def render(tokenizer: PreTrainedTokenizerFast, messages: list[Any], tools: Any, generation: bool = True) -> str:
    if _wants_parts(tokenizer):
        messages = [
            {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else m
            for m in messages
        ]
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=generation, tokenize=False)


def _wants_parts(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Say whether the template writes text only where it comes as a list of parts, as some vision models do."""
    shown = []
    for content in ("n5Kw", [{"type": "text", "text": "n5Kw"}]):
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        except Exception:
            text = ""
        shown.append("n5Kw" in text)
    return shown == [False, True]


def _arguments_as_text(messages: list[Any]) -> list[Any]:
    copy = json.loads(json.dumps(messages))
    for message in copy:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return copy


def _with_sentinel(turn: Any, sentinel: str, always: bool = False) -> Any:
    turn = json.loads(json.dumps(turn))
    if always or turn["content"] or not turn.get("tool_calls"):
        turn["content"] += sentinel
    for call in turn.get("tool_calls", ()):
        call["function"]["arguments"] = dict.fromkeys(call["function"]["arguments"], sentinel)
    return turn


def glue(
    tokenizer: PreTrainedTokenizerFast, history: list[Any], new: list[Any], tools: Any, stops: list[set[int]]
) -> tuple[str, str] | None:
    """Return (close token, text after it); ``stops`` are sets of token ids, the first that occurs counts."""
    for always in (False, True):  # a template may ignore the calls of a turn, or its text
        for form in (lambda messages: messages, _arguments_as_text):
            ends = [_with_sentinel(history[-1], s, always) for s in (S1, S2)]
            try:
                marked = [render(tokenizer, form([*history[:-1], end, *new]), tools) for end in ends]
                named = [{**message, "content": f"{N}{i}N"} for i, message in enumerate(new)]
                shown = render(tokenizer, form([*history[:-1], ends[0], *named]), tools)
                plain = render(tokenizer, form([*history, *new]), tools)
            except Exception:  # whatever a template raises
                continue
            if S1 in marked[0] and S2 in marked[1]:
                break
        else:
            continue
        break
    else:
        return None
    one, two = (text[text.rindex(s) + len(s) :] for text, s in zip(marked, (S1, S2), strict=True))
    lengths = range(min(len(one), len(two)) + 1)
    length = bisect.bisect_left(lengths, 1, key=lambda size: one[len(one) - size :] != two[len(two) - size :]) - 1
    common = one[len(one) - length :]
    rest = shown[shown.rindex(S1) :]
    if any(f"{N}{i}N" not in rest for i in range(len(new))):
        return None
    before = rest[len(S1) : rest.index(N)]
    for wanted in stops:
        places = [
            (before.index(token), token)
            for token in map(tokenizer.convert_ids_to_tokens, wanted)
            if token in before and common.startswith(before[: before.index(token) + len(token)])
        ]
        if places:
            at, close = min(places)
            text = common[at + len(close) :]
            return (close, text) if plain.endswith(close + text) else None
    return None


def learned_close(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the first control token a template writes after a text turn that is the last one."""
    try:
        text = render(tokenizer, [{"role": "user", "content": "u"}, {"role": "assistant", "content": S1}], None, False)
    except Exception:
        return None
    tail = tokenizer(text.rpartition(S1)[2], add_special_tokens=False).input_ids
    return next(
        (id_ for id_ in tail if id_ in tokenizer.all_special_ids or id_ in tokenizer.added_tokens_decoder), None
    )
