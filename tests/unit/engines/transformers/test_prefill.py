"""Log-probs of given ids, whatever is in the rows: the oracle is the model's own forward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.engines.transformers import decode_loop
from fsm_rollout.engines.transformers.decode_loop import DecodeLoop
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.engines.transformers.key_value_rows import KeyValueRows
from fsm_rollout.engines.transformers.qwen3 import Qwen3Rows
from fsm_rollout.trajectory.tokens import TokenScores, as_ids
from tests.model_fixtures import make_model
from tests.unit.engines.transformers.test_engine import collect

CLOSE = 1e-5
MODEL = make_model(0)
SHARED = [(7 * place) % 250 for place in range(60)]


def asked(ids: list[int], start: int, top: int = 3, session: str = "", name: str = "r", group: str = "") -> Request:
    return Request(
        name, as_ids(ids), SamplingParams(4), scored_from=start, score_top=top, session=session, group_id=group
    )


def loop_of(model: Any, rows: Callable[..., Any] = Qwen3Rows, max_running: int = 2) -> DecodeLoop:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_loop, "Qwen3Rows", rows)
        return DecodeLoop(model, max_running=max_running, max_context=128, fill_tokens=64, send_every=8)


def answered(loop: DecodeLoop, requests: Sequence[Request]) -> dict[str, TokenScores]:
    """Run requests to their ends; return what was said of those that asked for log-probs of their ids."""
    loop.add(requests)
    chunks = []
    while loop.waiting or loop.running:
        chunks += [*loop.admit(), *loop.step()]
    return {chunk.request_id: chunk.scores for chunk in chunks if chunk.scores is not None}


def check(model: Any, request: Request, scores: TokenScores) -> None:
    with torch.no_grad():
        given_ids = torch.tensor([list(request.ids)])
        logprobs = torch.log_softmax(model(given_ids).logits[0].float(), -1)[request.scored_from - 1 : -1]
    own = logprobs.gather(-1, given_ids[0, request.scored_from :, None])[:, 0]
    assert torch.allclose(torch.tensor(list(scores.logprobs)), own, rtol=0, atol=CLOSE)
    top = logprobs.topk(request.score_top)
    assert torch.allclose(torch.tensor(list(scores.top_logprobs)), top.values.flatten(), rtol=0, atol=CLOSE)
    if scores.top_ids:
        said = logprobs.gather(-1, torch.tensor(list(scores.top_ids)).reshape(top.indices.shape))
        assert torch.allclose(said, top.values, rtol=0, atol=CLOSE)  # of equal ones any


ASKED = st.tuples(
    st.sampled_from(["", "a", "b", "c"]),
    st.sampled_from(["", "g", "h"]),
    st.integers(0, 60),
    st.lists(st.integers(0, 255), min_size=2, max_size=40),
    st.integers(0, 4),
)


@pytest.mark.parametrize("rows", [Qwen3Rows, KeyValueRows])
@given(st.lists(st.lists(ASKED, min_size=1, max_size=4), min_size=1, max_size=4), st.data())
def test_whatever_the_rows_hold_the_log_probs_are_the_model_s_own(
    rows: Callable[..., Any], rounds: list[list[tuple[str, str, int, list[int], int]]], data: st.DataObject
) -> None:
    """Several ask at once, others sample beside them; sessions go on, go back, share a beginning, and end."""
    loop = loop_of(MODEL, rows)
    for number, together in enumerate(rounds):
        requests, sessions = [], set[str]()
        for place, (session, group, shared, own, top) in enumerate(together):
            session = "" if session in sessions else session  # a session has one request at a time
            sessions.add(session)
            ids, name = SHARED[:shared] + own, f"{number}.{place}"
            requests.append(asked(ids, data.draw(st.integers(1, len(ids) - 1)), top, session, name, group))
        sampled = Request(f"{number}.sampled", requests[0].ids, SamplingParams(4), session="s")
        said = answered(loop, [*requests, sampled])
        assert said.keys() == {request.request_id for request in requests}
        for request in requests:
            check(MODEL, request, said[request.request_id])
        loop.end_sessions(data.draw(st.lists(st.sampled_from(["a", "b", "c", "s"]), max_size=2)))


@pytest.mark.parametrize("rows", [Qwen3Rows, KeyValueRows])
def test_only_what_is_new_is_computed_and_many_in_one_pass(
    rows: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[tuple[int, int]] = []

    class Counting(rows):  # type: ignore[misc, valid-type]
        def fill(self, filling: Any) -> None:
            passes.append(tuple(filling.ids.shape))
            super().fill(filling)

        def score(self, filling: Any, asked: torch.Tensor) -> torch.Tensor:
            passes.append(tuple(filling.ids.shape))
            return super().score(filling, asked)

    loop = loop_of(MODEL, Counting, max_running=4)
    for requests, computed in (
        ([asked(SHARED[:50], 40, session="a", group="g")], [(1, 39), (1, 10)]),
        ([asked(SHARED[:60], 50, session="a", group="g")], [(1, 10)]),  # it goes on
        ([asked([*SHARED[:45], 1, 2, 3], 45, session="b", group="g")], [(1, 3)]),  # another of its group
        ([asked([*SHARED[:9], 1, 2, 3], 9, session="c", group="h")], [(1, 8), (1, 3)]),  # of another group
        (
            [asked([*SHARED[:9], 4, 5, *[6] * n], 9, name=str(n), session=f"d{n}", group="i") for n in (1, 2, 3)],
            [(1, 8), (3, 5)],  # what they begin with once, what is asked of them in one pass
        ),
    ):
        passes.clear()
        said = answered(loop, requests)
        for request in requests:
            check(MODEL, request, said[request.request_id])
        assert passes == computed


def test_a_row_that_shares_less_is_no_beginning_for_one_that_shares_more() -> None:
    """What is held once for many is left out of each row, of one that asks from its first tokens on less of it."""
    loop = loop_of(MODEL, max_running=4)
    first = asked(SHARED[:55], 4, name="1", session="a", group="g")
    answered(loop, [first, asked(SHARED[:50], 45, name="2", session="b", group="h")])
    longer = asked([*SHARED[:58], 1, 2], 57, session="c", group="g")
    check(MODEL, longer, answered(loop, [longer])["r"])


def test_logits_that_are_no_numbers_are_an_error() -> None:
    model = make_model(0)
    model.model.norm.weight.data[0] = float("nan")
    loop = loop_of(model)
    loop.add([asked(SHARED, 30)])
    (last,) = [chunk for chunk in [*loop.admit(), *loop.step()] if chunk.finish_reason is not None]
    assert "not numbers" in str(last.error)
    assert not loop.running


async def test_new_weights_are_the_ones_that_score(tokenizer: Any, other_model: Any) -> None:
    engine = TransformersEngine(make_model(0), tokenizer)
    request = asked(SHARED, 30, session="s")
    for model, version in ((MODEL, 0), (other_model, 1)):
        if version:
            await engine.update_weights(dict(other_model.named_parameters()))
        chunks = await collect(engine, request)
        (told,) = [chunk for chunk in chunks if chunk.scores is not None]
        assert told.scores is not None
        check(model, request, told.scores)
        assert (told.weight_version, chunks[-1].finish_reason, len(told.ids)) == (version, "length", 0)
    await engine.aclose()
