"""A turn's thinking is closed at its budget, however its tokens come in pieces, and wherever it is interrupted."""

import asyncio
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import Chunk, Request, Thinking
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn, scripted_logprob
from fsm_rollout.engines.thinking_budget import ThinkingBudget
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import NO_VERSION, as_ids, as_logprobs
from tests.cases import cases
from tests.embedded import encoded, tokenizer
from tests.unit.engines.kit import EOS, ask, run

OPENING, CLOSING = "<think>", "</think>"
words = st.text("abc <\n5", max_size=9)
texts = st.lists(st.tuples(words, st.sampled_from([OPENING, CLOSING])), max_size=4).map(
    lambda pairs: "".join(word + tag for word, tag in pairs)
)


CLOSE = encoded("\n</think>\n\n")


def asked(tokens: int, *, inside: bool = False, lead: int = 0, **sampling: Any) -> Request:
    thinking = Thinking(tokens, inside, OPENING, CLOSING, as_ids(CLOSE), lead)
    return ask("r", thinking=thinking, **sampling)


def oracle(
    script: list[int], tokens: int, most: int, *, inside: bool, stop: str = ""
) -> tuple[list[int], list[int], str]:
    """Return the turn, token by token, and which of it the environment writes; ``script`` says what stands where."""
    turn: list[int] = []
    written: list[int] = []
    since = 0  # where the text begins that is looked at for a tag
    while True:
        if inside and not tokens:
            if len(turn) + len(CLOSE) >= most:
                return turn, written, "length"
            written += range(len(turn), len(turn) + len(CLOSE))
            turn += CLOSE
            inside, since = False, len(turn)
        elif len(turn) >= most:
            return turn, written, "length"
        else:
            turn.append(script[len(turn) - len(written)])
            tokens -= inside
            if turn[-1] == EOS:
                return turn, written, "stop"
            if (CLOSING if inside else OPENING) in tokenizer().decode(turn[since:]):
                inside, since = not inside, len(turn)
        if stop and stop in tokenizer().decode(turn):
            return turn, written, "stop"


@settings(max_examples=150)
@given(
    said=texts, tokens=st.integers(0, 6), most=st.integers(1, 50), inside=st.booleans(), chunks=st.integers(1, 9),
    lead=st.integers(0, 4), stop=st.sampled_from(["", "", "think>\n", "5"]),
    cuts=st.lists(st.integers(0, 9), max_size=3),
)  # fmt: skip
@example("", 3, 3 + len(CLOSE), True, 1, 0, "", [])
@example("", 3, 4 + len(CLOSE), True, 1, 0, "", [])
@example(OPENING, 3, 90, False, 1, 0, "", [])
@example("a b c d", 4, 40, True, 9, 0, "", [2])
def test_the_turn_is_what_the_script_says_with_its_thinking_closed(
    said: str, tokens: int, most: int, inside: bool, chunks: int, lead: int, stop: str, cuts: list[int]
) -> None:
    """Cut off after any number of pieces and gone on with as another request, as often as one likes."""
    script = [*encoded(said), *encoded("d e " * 40)[:40], EOS]
    engine = ScriptedEngine(lambda _: Turn(ids=script, chunks=chunks, delay=1.0), tokenizer=tokenizer(), log=True)
    request = asked(tokens, inside=inside, lead=lead, max_tokens=most, stop=(stop,) if stop else ())

    async def body(client: EngineClient) -> None:
        turn, versions, logprobs = as_ids([]), list[int](), list[float]()
        for number, cut in enumerate([*cuts, None]):
            rest = request.continued(turn, f"r{number}", versions.count(NO_VERSION))
            pending = client.submit(rest)
            if cut is not None:
                await asyncio.sleep(cut + 0.5)
                await client.abort(pending)
            await pending.done.wait()
            assert pending.error is None
            turn += pending.ids
            logprobs += pending.logprobs
            versions += [version for count, version in pending.versions for _ in range(count)]
            if pending.finish_reason != FinishReason.ABORT:
                break
        expected, written, reason = oracle(script, tokens, most, inside=inside, stop=stop)
        assert tokenizer().decode(turn) == tokenizer().decode(expected)
        assert (turn.tolist(), pending.finish_reason) == (expected, reason)
        assert [at for at, version in enumerate(versions) if version == NO_VERSION] == written
        first = len(request.ids)
        assert logprobs == [
            0.0 if at in written else scripted_logprob(token, first + at) for at, token in enumerate(expected)
        ]

    run(engine, body)


@pytest.mark.parametrize("said", ["a b c d e f g", CLOSING, f"{OPENING}a b c d e f g"])
def test_an_engine_is_asked_for_no_token_that_is_dropped(said: str) -> None:
    """Where a turn begins in its thinking, or opens it at once; the rest of the turn is one further request."""
    inside = not said.startswith(OPENING)
    opening = [] if inside else encoded(OPENING)
    script = [*encoded(said), *encoded("d e " * 30), EOS]
    engine = ScriptedEngine(lambda _: Turn(ids=script), tokenizer=tokenizer(), log=True)
    request = asked(6 if said == CLOSING else 4, inside=inside, lead=len(opening), max_tokens=50)

    async def body(client: EngineClient) -> None:
        pending = client.submit(request)
        await pending.done.wait()
        sampled = [line.what for line in engine.log if isinstance(line.what, Chunk)]
        total = sum(len(chunk.ids) for chunk in sampled)
        assert total == sum(count for count, version in pending.versions if version != NO_VERSION)
        first, rest = [line.what for line in engine.log if isinstance(line.what, Request)]
        assert first.sampling.max_tokens == len(opening) + (6 if said == CLOSING else 4)
        assert rest.sampling.max_tokens == 50 - rest.sampled

    run(engine, body)


@cases("engines")
def test_what_has_ended_is_not_closed(chunks: list[tuple[str, str | None]], aborted: bool, goes_on: bool) -> None:
    request = asked(3, inside=True, max_tokens=40)
    pending = PendingRequest(request, 0.0, thinking=ThinkingBudget(request, tokenizer()), aborted=aborted)
    pending.begin_again("r")
    pending.bound_thinking()
    assert pending.rest.sampling.max_tokens == 3
    for text, reason in chunks:
        ids = [EOS if token == "<eos>" else encoded(token)[0] for token in re.findall("<eos>|.", text)]
        end = None if reason is None else FinishReason(reason)
        pending.take(Chunk("r", as_ids(ids), as_logprobs([-1.0] * len(ids)), finish_reason=end), 0.0)
    assert pending.in_parts == goes_on
    assert (pending.ids.tolist()[3:] == CLOSE) == goes_on
