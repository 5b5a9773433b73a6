"""Truncation, measured by the tokenizer itself: never too long, whole characters only, and no shorter than need be."""

import re
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fsm_rollout.agent import graph
from fsm_rollout.tools import AgentAnswer, Toolbox, ToolSession, truncate
from fsm_rollout.tools.tool_messages import EXACT_CHARACTERS
from fsm_rollout.trajectory.events import ToolCall
from tests.cases import cases

MARKER = re.compile(r"…\[([\d,]+) tokens cut\]…")
SIDES = st.sampled_from(["left", "right", "middle"])


@cache
def tokenizer(trained: bool = True, trim_offsets: bool = False) -> Any:
    """Byte-level BPE: one token per byte, or with merges (over words, spaces, some Chinese) learnt from a few lines."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not trim_offsets)
    backend.decoder = decoders.ByteLevel()
    if trim_offsets:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=700 if trained else 256, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    lines = [
        "the tool returned 12 lines of text …[123 tokens cut]…\n" * 3,
        "    indented    text" * 5,
        "你好世界你好" * 4,
    ]
    backend.train_from_iterator(lines, trainer)
    if not trim_offsets:  # as many models' own: what a whole prompt begins with is no part of a result
        backend.add_special_tokens(["<bos>"])
        begins = [("<bos>", backend.token_to_id("<bos>"))]
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=begins)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def count(text: str, tok: Any) -> int:
    return len(tok.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_truncation_keeps_its_promises(trained: bool, trim_offsets: bool):
    tok = tokenizer(trained, trim_offsets)
    texts = st.text(st.sampled_from("ab 12\nthetool你好😀é\u0301…[]") | st.characters(codec="utf-8"), max_size=60)

    @given(texts, st.integers(1, 60), SIDES)
    @example("😀" * 9, 3, "middle")
    @example("😀" * 9, 7, "left")
    @example("你好" * 20, 31, "right")
    @example(" " * 50, 5, "middle")
    def holds(text: str, limit: int, side: Any) -> None:
        shorter, dropped = truncate(text, tok, limit, side)
        total = count(text, tok)
        if total <= limit:
            assert shorter is text
            assert dropped == 0
            return
        assert count(shorter, tok) <= limit
        assert 0 < dropped <= total
        assert shorter.count("\ufffd") <= text.count("\ufffd"), "no character is split"
        pieces = list(MARKER.finditer(shorter))
        head, tail = ends(text, shorter, side, dropped)
        assert text.startswith(head)
        assert text.endswith(tail)
        assert len(head) + len(tail) < len(text)
        if limit >= 2 * count(f"…[{total:,} tokens cut]…", tok):
            assert pieces, "there was room for the marker"

    holds()


def ends(text: str, shorter: str, side: str, dropped: int) -> tuple[str, str]:
    """Take the result apart at its marker, or (without one) where its side says."""
    marker = f"…[{dropped:,} tokens cut]…"
    if side == "left":
        return "", shorter.removeprefix(marker)
    if side == "right":
        return shorter.removesuffix(marker), ""
    if marker in shorter:
        candidates = [m.start() for m in re.finditer(re.escape(marker), shorter)]
        splits = [(shorter[:at], shorter[at + len(marker) :]) for at in candidates]
    else:
        splits = [(shorter[:at], shorter[at:]) for at in range(len(shorter) + 1)]
    return next((head, tail) for head, tail in splits if text.startswith(head) and text.endswith(tail))


@given(st.integers(1, 200), st.integers(0, 199), SIDES)
def test_nothing_more_than_needed_is_dropped(limit: int, more: int, side: Any):
    """One token per byte, so what is left can be counted without a tokenizer."""
    tok = tokenizer(False)
    text = "".join(chr(97 + i % 26) for i in range(limit + 1 + more))
    shorter, dropped = truncate(text, tok, limit, side)
    found = MARKER.search(shorter)
    kept = len(shorter) - (len(found.group()) if found else 0)
    assert dropped == len(text) - kept
    size = len(f"…[{len(text):,} tokens cut]…".encode())
    assert (found is not None) == (2 * size <= limit)
    assert len(shorter.encode()) >= limit - 3, "the marker's number may turn out shorter than it was measured with"
    if found:
        assert int(found[1]) == dropped


@cases("tools")
def test_the_side_is_what_goes(side: Any, expected: str):
    tok = tokenizer(False)
    room = len("…[100 tokens cut]…".encode())
    assert truncate("a" * 50 + "z" * 50, tok, 30 + room, side) == (expected, 70)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_very_long_text_is_not_tokenised_whole(side: Any):
    tok = tokenizer()
    sizes: list[int] = []

    def watched(text: str, **options: Any) -> Any:
        sizes.append(len(text))
        return tok(text, **options)

    line = "the tool returned 12 lines of text\n"
    text = line * (5 * EXACT_CHARACTERS // len(line))
    shorter, dropped = truncate(text, watched, 100, side)
    assert max(sizes) <= EXACT_CHARACTERS
    assert 80 <= count(shorter, tok) <= 100
    assert dropped == pytest.approx(count(line, tok) * (len(text) / len(line)), rel=0.01)


def test_long_is_not_yet_too_long():
    tok = tokenizer(False)
    text = "ab " * (EXACT_CHARACTERS // 3 + 10)
    assert truncate(text, tok, len(text)) == (text, 0)
    shorter, dropped = truncate(text, tok, len(text) - 1)
    assert dropped > 0
    assert len(text) - 20 < count(shorter, tok) < len(text), "though the part looked at first would fit"


def long_answer() -> str:
    """Return many lines."""
    return "the tool returned 12 lines of text\n" * 50


def long_error() -> str:
    """Raise a long error."""
    raise ValueError("the tool returned 12 lines of text\n" * 50)


@pytest.mark.parametrize("use", ["long_answer", "long_error"])
@pytest.mark.virtual_time
async def test_a_tools_results_are_cut_to_its_response_tokens(use: str):
    spec = {"use": f"{__name__}:{use}", "response_tokens": 40, "truncate": "right"}
    agent = graph.AgentGraph(agent="a", tools={"t": spec}, states={"PENDING": {}}, transitions=())

    async def no_agent(*_: Any) -> AgentAnswer:
        raise AssertionError

    session = ToolSession(
        toolbox=Toolbox(agent), trajectory_id="t", group_id="g", seed=0, tools_kwargs=None, extra={},
        run_agent=no_agent,
    )  # fmt: skip
    result = await session.call(ToolCall(id="c", name="t", arguments={}), tokenizer=tokenizer())
    assert count(result.result, tokenizer()) <= 40
    assert result.truncated_tokens > 0
    assert result.result.endswith(f"…[{result.truncated_tokens:,} tokens cut]…")
