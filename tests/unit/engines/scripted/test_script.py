"""Scripts: which turn answers, and what its tokens are."""

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.engines.scripted.script import AnswerPlan, ScriptError, Turn, plan, scripted_logprob, turn_for
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.tokens import as_ids
from tests.cases import cases

EOS = 9


def planned(turn: Turn, request: Request, max_context: int = 1000) -> AnswerPlan:
    return plan(turn, request, encode=lambda text: [int(c) for c in text], eos=EOS, max_context=max_context)


def request(max_tokens: int = 99, prompt: int = 3, sampled: int = 0, **sampling: object) -> Request:
    sampling.setdefault("stop_ids", frozenset({EOS}))
    params = SamplingParams(max_tokens, **sampling)  # type: ignore[arg-type]
    return Request("r", as_ids([1] * (prompt + sampled)), params, agent="solver", context="main", sampled=sampled)


def tokens(turn: Turn, request: Request, max_context: int = 1000) -> tuple[list[int], str]:
    result = planned(turn, request, max_context)
    return [token for ids, _ in result.pieces for token in ids], result.finish_reason


digits = st.lists(st.integers(0, 9), max_size=12)


@given(digits, st.integers(1, 15), st.integers(1, 6), st.frozensets(st.integers(0, 9), min_size=1))
def test_a_turn_is_cut_by_whichever_comes_first(ids: list[int], max_tokens: int, chunks: int, stops: frozenset[int]):
    """Oracle: walk over the turn and what ends it, one token at a time."""
    got, reason = tokens(Turn(ids=tuple(ids), chunks=chunks), request(max_tokens, stop_ids=stops))
    sampled_ids: list[int] = []
    expected = None
    for token in [*ids, EOS if EOS in stops else min(stops)]:
        sampled_ids.append(token)
        if token in stops:
            expected = "stop"
        elif len(sampled_ids) == max_tokens:
            expected = "length"
        if expected:
            break
    assert (got, reason) == (sampled_ids, expected)


@given(digits, st.data(), st.integers(1, 20))
def test_a_continued_request_gets_the_rest_with_the_same_logprobs(ids: list[int], data: st.DataObject, max_tokens: int):
    turn, whole = Turn(ids=tuple(ids)), request(max_tokens)
    pieces = planned(turn, whole)
    (all_ids, all_logprobs), reason = pieces.pieces[0], pieces.finish_reason
    cut = data.draw(st.integers(0, len(all_ids) - 1))
    rest = planned(turn, whole.continued(all_ids[:cut], "r2"))
    assert rest.pieces == ((all_ids[cut:], all_logprobs[cut:]),)
    assert rest.finish_reason == reason


@given(digits, st.integers(1, 8))
def test_pieces_join_to_the_turn_and_are_nearly_equal(ids: list[int], chunks: int):
    result = planned(Turn(ids=tuple(ids), chunks=chunks), request())
    lengths = [len(piece) for piece, _ in result.pieces]
    assert len(lengths) == chunks
    assert max(lengths) - min(lengths) <= 1


def test_logprobs_are_of_token_and_position_unless_given():
    result = planned(Turn(text="45"), request(prompt=3))
    expected = [scripted_logprob(4, 3), scripted_logprob(5, 4), scripted_logprob(EOS, 5)]
    assert result.pieces[0][1] == array("f", expected)
    assert all(-1 <= p < 0 for p in expected)
    given_one = planned(Turn(text="45", logprob=-0.5), request())
    assert given_one.pieces[0][1] == array("f", [-0.5] * 3)


def test_the_window_cuts_like_max_tokens():
    assert tokens(Turn(text="12345"), request(prompt=7), max_context=10) == ([1, 2, 3], "length")


def test_ignore_eos_repeats_the_turn_up_to_max_tokens():
    assert tokens(Turn(text="19"), request(7, ignore_eos=True)) == ([1, 9, 9, 1, 9, 9, 1], "length")
    assert tokens(Turn(text="19"), request(4, sampled=2, ignore_eos=True)) == ([9, 1, 9, 9], "length")


def test_a_turn_may_say_that_it_was_cut():
    assert tokens(Turn(text="12", finish_reason="length"), request()) == ([1, 2], "length")


@pytest.mark.parametrize("ending", [{"error": "Lost: gone"}, {"crash": "down"}, {"hang": True}])
def test_stop_tokens_and_max_tokens_come_before_what_breaks_a_turn(ending: dict[str, object]):
    for turn, limit in ((Turn(text="129", **ending), 99), (Turn(text="12", **ending), 2)):
        result = planned(turn, request(limit))
        assert (result.error, result.crash, result.hang) == (None, None, False)
    broken = planned(Turn(text="12", **ending), request())
    assert {"error": broken.error, "crash": broken.crash, "hang": broken.hang}.items() >= ending.items()


def asked(turn: int = 0, agent: str = "solver", context: str = "main") -> Request:
    return Request("r", as_ids([1]), SamplingParams(5), agent=agent, context=context, turn=turn)


def test_the_most_specific_key_counts():
    script = {"solver/critic": ["both"], "critic": ["context"], "solver": ["agent", "agent again"]}
    assert turn_for(script, asked(context="critic")).text == "both"
    assert turn_for(script, asked(agent="other", context="critic")).text == "context"
    assert turn_for(script, asked(turn=1)).text == "agent again"


def test_a_function_may_be_the_script():
    script: Callable[[Request], str] = lambda request: f"turn {request.turn}"  # noqa: E731
    assert turn_for(script, asked(turn=3)).text == "turn 3"


@cases("engines")
def test_a_script_that_runs_out_says_what_to_add(script: object, message: str):
    with pytest.raises(ScriptError, match=message):
        turn_for(script, asked(turn=1))  # type: ignore[arg-type]


@cases("engines", {"text": "1", "ids": (1,)})
def test_turns_that_mean_nothing_are_refused(turn: dict[str, object]):
    with pytest.raises(ConfigError):
        Turn(**turn)
