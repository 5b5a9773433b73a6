"""Log-probs of given ids, whatever is in the caches: the oracle is the model's own forward pass."""

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.engines.transformers import prefill
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.engines.transformers.prefill import Prefill
from fsm_rollout.trajectory.tokens import TokenScores, as_ids
from tests.model_fixtures import make_model
from tests.unit.engines.transformers.test_engine import collect

CLOSE = 1e-5
MODEL = make_model(0)
SHARED = [(7 * place) % 250 for place in range(60)]


def asked(ids: list[int], start: int, top: int = 3, session: str = "", name: str = "r") -> Request:
    return Request(name, as_ids(ids), SamplingParams(1), scored_from=start, score_top=top, session=session)


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


SESSIONS = st.tuples(
    st.sampled_from(["", "a", "b", "c"]), st.integers(0, 60), st.lists(st.integers(0, 255), min_size=2, max_size=40)
)


@given(st.lists(SESSIONS, min_size=1, max_size=6), st.data())
def test_whatever_sessions_have_left_the_log_probs_are_the_model_s_own(
    said: list[tuple[str, int, list[int]]], data: st.DataObject
) -> None:
    """Sessions go on, go back, share what they begin with, end and are forgotten."""
    scorer = Prefill(MODEL, sessions=2)
    for session, shared, own in said:
        ids = SHARED[:shared] + own
        request = asked(ids, data.draw(st.integers(1, len(ids) - 1)), session=session)
        check(MODEL, request, scorer.scores(request))
        if data.draw(st.booleans()):
            scorer.end_sessions([session])


def test_only_what_is_new_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "PIECE", 16)
    scorer, fed = Prefill(MODEL, sessions=8), list[int]()
    monkeypatch.setattr(
        scorer, "_logits", lambda ids, *rest: fed.append(len(ids)) or Prefill._logits(scorer, ids, *rest)
    )
    for ids, start, session, computed in (
        (SHARED[:50], 40, "a", 49),
        (SHARED[:60], 50, "a", 10),  # it goes on
        ([*SHARED[:45], 1, 2, 3], 45, "b", 3),  # another begins as the first
        ([*SHARED[:10], 1, 2, 3], 10, "c", 12),  # too little to be worth a copy
    ):
        fed.clear()
        check(MODEL, asked(ids, start), scorer.scores(asked(ids, start, session=session)))
        assert sum(fed) == computed


def test_new_weights_are_the_ones_that_score(tokenizer: Any, other_model: Any) -> None:
    async def main() -> None:
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

    asyncio.run(main())
