"""A request ends with the token that completes a stop string, however its answer comes in pieces."""

import asyncio
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.engines.stop_strings import StopStrings
from fsm_rollout.trajectory.tokens import Note, NoteKind, as_ids, as_logprobs
from tests.embedded import encoded, tokenizer
from tests.unit.engines.kit import ask, run

texts = st.text(st.sampled_from("ab</ \n\u00e9\u20ac\U0001f600"), min_size=1, max_size=30)
strings = st.lists(
    st.text(st.sampled_from("ab</\n\u00e9\u20ac\U0001f600"), min_size=1, max_size=4), min_size=1, max_size=3
)


def holds(ids: list[int], stop: list[str]) -> bool:
    return any(string in tokenizer().decode(ids) for string in stop)


def asked(before: list[int], stop: list[str]) -> Request:
    request = ask("r", stop=tuple(stop))
    return replace(request, ids=request.ids + as_ids(before), of_turn=len(before))


@given(st.data(), texts, texts, strings, st.booleans())
def test_fewest_tokens_whose_text_holds_a_string(
    data: Any, said: str, earlier: str, stop: list[str], goes_on: bool
) -> None:
    before, ids = encoded(earlier) if goes_on else [], encoded(said)
    assume(not holds(before, stop))
    request = asked(before, stop)
    pending = PendingRequest(request, 0.0, stops=StopStrings.of(request, tokenizer()))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        mask = Note(
            NoteKind.SAMPLING_MASK, len(request.ids) + start, as_ids([1] * (end - start)), as_ids(ids[start:end])
        )
        logprobs = as_logprobs([-float(at) for at in range(start, end)])
        if not pending.stopped:
            notes = (mask,) if end > start else ()
            pending.take(Chunk("r", as_ids(ids[start:end]), logprobs, notes=notes), 0.0)
    fewest = next((count for count in range(1, len(ids) + 1) if holds(before + ids[:count], stop)), None)
    count = len(ids) if fewest is None else fewest
    assert pending.ids.tolist() == ids[:count]
    assert pending.logprobs.tolist() == [-float(at) for at in range(count)]
    assert sum(tokens for tokens, _ in pending.versions) == count
    assert [token for note in pending.notes for token in note.values] == ids[:count]
    assert pending.stopped == (fewest is not None)


def test_a_string_that_was_there_before_does_not_end_what_goes_on() -> None:
    stops = StopStrings.of(asked(encoded("a STOP b ST"), ["STOP"]), tokenizer())
    assert stops.end(encoded("OP STOP")) == len(encoded("OP")), "one that begins there does"


def test_what_the_prompt_says_is_no_part_of_the_turn() -> None:
    request = asked(encoded("ST"), ["STOP"])
    assert StopStrings.of(replace(request, of_turn=0), tokenizer()).end(encoded("OP")) is None
    assert StopStrings.of(request, tokenizer()).end(encoded("OP")) == len(encoded("OP"))


def test_an_engine_that_goes_on_is_told_to_end() -> None:
    engine = ScriptedEngine([Turn(text="one STOP two three", chunks=18, delay=50.0)], tokenizer=tokenizer(), log=True)

    async def body(client: EngineClient) -> None:
        pending = client.submit(ask("r", stop=("STOP",)))
        await pending.done.wait()
        assert tokenizer().decode(pending.ids) == "one STOP"
        assert (pending.finish_reason, pending.error) == ("stop", None)
        await asyncio.sleep(1)  # in virtual time, before its next piece
        assert [line.what.finish_reason for line in engine.log if isinstance(line.what, Chunk)][-1] == "abort"

    run(engine, body)
