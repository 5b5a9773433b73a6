"""verl's client as an engine: what it is asked, and what its answers become."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fsm_rollout.adapters.verl_engine import VerlEngine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Chunk, Request, SamplingParams
from fsm_rollout.engines.replica import Placement
from fsm_rollout.engines.retries import Tries
from fsm_rollout.engines.updating import updating
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.pictures import picture_of
from fsm_rollout.trajectory.tokens import MediaSpan, as_ids

STOP = 7


class Client:
    """Answers like verl's ``LLMServerClient``: ``TokenOutput`` has these fields (verl 0.9.1)."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked, self.waits = answer, list[tuple[str, dict[str, Any]]](), asyncio.Event()

    async def generate(self, request_id: str, **words: Any) -> Any:
        self.asked.append((request_id, words))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            self.waits.set()
            await asyncio.Event().wait()
        return self.answer


def output(
    ids: list[int], *, log_probs: Any = ..., reason: str = "completed", experts: Any = None, **fields: int
) -> Any:
    return SimpleNamespace(
        token_ids=ids, log_probs=[-0.5 * i for i in range(len(ids))] if log_probs is ... else log_probs,
        stop_reason=reason, routed_experts=experts, extra_fields=fields,
    )  # fmt: skip


def request(**names: Any) -> Request:
    words = {"max_tokens": 4, "stop_ids": frozenset({STOP, 3})} | names.pop("sampling", {})
    return Request("r", as_ids([10, 11]), SamplingParams(**words), session="s", **names)


def engine(answer: Any) -> VerlEngine:
    return VerlEngine(Client(answer), SimpleNamespace(eos_token_id=STOP), max_context=64)


def chunks(answer: Any, asked: Request | None = None) -> list[Chunk]:
    """Return what comes of an answer; the first only says that the request is taken."""

    async def collected() -> list[Chunk]:
        return [chunk async for chunk in engine(answer).generate([asked or request()])]

    first, *rest = asyncio.run(collected())
    assert (list(first.ids), first.finish_reason) == ([], None)
    return rest


async def test_verl_is_asked_with_its_own_words() -> None:
    policy = engine(output([STOP]))
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0.1, "presence_penalty": 0.5, "extra": {"x": 1}}
    async for _ in policy.generate([request(sampling=sampling)]):
        pass
    ((name, words),) = policy.client.asked
    assert name == "s", "turns of one stream go to one server"
    assert words["prompt_ids"] == [10, 11]
    assert words["sampling_params"] == {
        "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "presence_penalty": 0.5, "repetition_penalty": 1.0,
        "x": 1, "logprobs": True, "max_tokens": 4, "stop_token_ids": [3, STOP],
    }  # fmt: skip


async def test_a_request_that_is_aborted_before_it_has_begun_ends() -> None:
    policy = engine(output([STOP]))
    answered = policy.generate([request()])
    await policy.abort(["r"])
    async with asyncio.timeout(600):
        assert [chunk.finish_reason async for chunk in answered] == [FinishReason.ABORT]


def test_a_picture_goes_decoded_beside_its_one_placeholder() -> None:
    policy, shown = engine(output([STOP])), picture_of(np.full((4, 5, 3), 90, np.uint8))
    media = (MediaSpan(1, 3, shown, 90), MediaSpan(5, 2, shown, 90))

    async def main() -> None:
        words = SamplingParams(4)
        for request_ in (
            Request("r", as_ids([10, 91, 91, 91, 11, 91, 91, 12]), words, media=media),
            Request("t", as_ids([10]), words),
        ):
            async for _ in policy.generate([request_]):
                pass

    asyncio.run(main())
    (_, seen), (_, text) = policy.client.asked
    assert seen["prompt_ids"] == [10, 90, 11, 90, 12]
    assert [image.tobytes() for image in seen["image_data"]] == [shown.image().tobytes()] * 2
    assert "image_data" not in text


@pytest.mark.parametrize(
    ("ids", "reason", "ends"),
    [
        ([1, 2, STOP], "completed", FinishReason.STOP),
        ([1, 2, STOP], "aborted", FinishReason.STOP),
        ([1, 2], "aborted", FinishReason.ABORT),
        ([1, 2, 5, 6, STOP], "completed", FinishReason.LENGTH),
    ],
    ids=["stops", "stops as it is aborted", "aborted", "more than asked"],
)
def test_an_answer_ends_as_its_last_token_and_verl_say(ids: list[int], reason: str, ends: FinishReason) -> None:
    (chunk,) = chunks(output(ids, reason=reason))
    assert list(chunk.ids) == ids[:4]
    assert list(chunk.logprobs) == [-0.5 * i for i in range(len(ids[:4]))]
    assert (chunk.finish_reason, chunk.weight_version, chunk.error) == (ends, 0, None)


@pytest.mark.parametrize(
    ("fields", "versions"),
    [
        ({"global_steps": 5}, [([1, 2, STOP], 5)]),
        ({"global_steps": 5, "min_global_steps": 5, "max_global_steps": 5}, [([1, 2, STOP], 5)]),
        ({"min_global_steps": 4, "max_global_steps": 6}, [([1, 2], 4), ([STOP], 6)]),
        ({"min_global_steps": 0, "max_global_steps": 1}, [([1, 2], 0), ([STOP], 1)]),
    ],
)
def test_where_weights_changed_only_the_last_token_carries_the_newest(fields: dict[str, int], versions: Any) -> None:
    found = chunks(output([1, 2, STOP], **fields))
    assert [(list(chunk.ids), chunk.weight_version) for chunk in found] == versions
    assert [chunk.finish_reason for chunk in found] == [None] * (len(found) - 1) + [FinishReason.STOP]


async def test_the_engine_is_as_new_as_the_newest_answer() -> None:
    policy = engine(output([STOP], global_steps=3))
    seen = []
    for policy.client.answer in (output([STOP], global_steps=3), output([STOP], global_steps=2)):
        async for _ in policy.generate([request()]):
            pass
        seen.append(policy.weight_version)
    assert seen == [3, 3]


def test_experts_begin_where_those_that_are_known_end() -> None:
    experts = np.arange(4 * 2 * 1).reshape(4, 2, 1)  # of [10, 11, 1, 2]; the last token was fed to nobody
    (chunk,) = chunks(output([1, 2, STOP], experts=experts), request(routed=1))
    (note,) = chunk.notes
    assert (note.start, list(note.values), note.layers) == (1, [2, 3, 4, 5, 6, 7], 2)
    first, last = chunks(output([1, 2, STOP], experts=experts, min_global_steps=1, max_global_steps=2))
    assert (len(first.notes), len(last.notes)) == (0, 1)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (output([]), "EngineError: verl's server answered request r with no token"),
        (output([1], log_probs=None), "with no log probabilities; set rollout.calculate_log_probs=true"),
        (ValueError("gone"), "EngineError: ValueError: gone"),
    ],
)
def test_what_verl_does_not_answer_fails_that_request(answer: Any, says: str) -> None:
    (chunk,) = chunks(answer)
    assert says in (chunk.error or "")
    assert (list(chunk.ids), chunk.finish_reason) == ([], FinishReason.ABORT)


@pytest.mark.parametrize("by", ["abort", "aclose"])
def test_nobody_waits_for_what_is_aborted(by: str) -> None:
    async def main() -> tuple[list[Chunk], int, int]:
        policy = engine(None)
        stream = policy.generate([request()])
        first = [await anext(stream)]
        await policy.client.waits.wait()
        running = policy.load().running
        await (policy.abort(["r", "nobody's"]) if by == "abort" else policy.aclose())
        rest = [chunk async for chunk in stream]
        await asyncio.sleep(0)  # what is called when a task is done is called in the loop's next turn
        return first + rest, running, policy.load().running

    (_, last), running, left = asyncio.run(main())
    assert (last.finish_reason, last.error, list(last.ids)) == (FinishReason.ABORT, None, [])
    assert (running, left) == (1, 0)


async def test_what_verl_cuts_for_new_weights_goes_on_afterwards_and_costs_no_try() -> None:
    policy = engine(output([1, 2], reason="aborted", global_steps=4))
    client = EngineClient(EnginePool(Placement(policy), tries=Tries(attempts=1)))
    async with updating(lambda source: client.update_weights(source, 5)):
        pending = client.submit(request())
        await asyncio.sleep(0)
        assert policy.client.asked == [], "nothing is asked while verl loads weights"
    await pending.done.wait()
    assert (pending.error is not None, list(pending.ids)) == (True, [1, 2]), "verl cut it by itself"
    answers = [
        output([1, 2], reason="aborted", global_steps=5), output([], reason="aborted", global_steps=5),
        output([3], global_steps=6),
    ]  # fmt: skip
    cut = asyncio.Event()

    async def generate(request_id: str, **words: Any) -> Any:
        policy.client.asked.append((request_id, words))
        await cut.wait()
        return answers.pop(0)

    policy.client.generate, policy.client.asked = generate, []
    pending = client.submit(request(sampling={"max_tokens": 9}))
    while not policy.client.asked:  # noqa: ASYNC110  # tasks of the pool's
        await asyncio.sleep(0)
    async with updating(lambda source: client.update_weights(source, 6)):
        cut.set()
        while len(pending.ids) < 2:  # noqa: ASYNC110  # tasks of the pool's
            await asyncio.sleep(0)
        cut.clear()
    while len(policy.client.asked) < 2:  # noqa: ASYNC110  # tasks of the pool's
        await asyncio.sleep(0)
    async with updating(lambda source: client.update_weights(source, 7)):
        pass
    cut.set()  # what verl has cut is heard of after that
    await pending.done.wait()
    assert (pending.error, list(pending.ids), pending.finish_reason) == (None, [1, 2, 3], FinishReason.STOP)
    assert pending.versions == [(2, 5), (1, 6)]
    asked = [(words["prompt_ids"], words["sampling_params"]["max_tokens"]) for _, words in policy.client.asked]
    assert asked == [([10, 11], 9), ([10, 11, 1, 2], 7), ([10, 11, 1, 2], 7)]
    with pytest.raises(EngineError, match="verl loads the weights of its servers itself"):
        await client.update_weights({})
