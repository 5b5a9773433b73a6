"""The decode loop against plain forward passes: requests of all lengths that join, leave and are cut."""

from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from fsm_rollout.engines.protocol import Chunk, Request, SamplingParams
from fsm_rollout.engines.transformers import decode_loop
from fsm_rollout.engines.transformers.checkpoints import copy_weights
from fsm_rollout.engines.transformers.decode_loop import DecodeLoop
from fsm_rollout.engines.transformers.key_value_rows import Filling
from fsm_rollout.engines.transformers.qwen3 import Qwen3Rows
from fsm_rollout.trajectory.tokens import as_ids

CLOSE = 1e-5


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def beginning_alike(shared: int, seed: int, length: int) -> list[int]:
    return prompt(99, shared) + prompt(seed, length)


@pytest.fixture(scope="module")
def llama() -> Any:
    """An architecture without a forward pass of its own here."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=257, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, eos_token_id=256, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module", params=["model", "llama"])
def any_model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def loop_of(model: Any, **options: int) -> DecodeLoop:
    settings = {"max_running": 8, "max_context": 256, "fill_tokens": 64, "send_every": 3, **options}
    return DecodeLoop(model, **settings)


def run(decode: DecodeLoop, arrivals: dict[int, list[Request]]) -> dict[str, list[Chunk]]:
    """Add requests at the steps given; return every request's chunks."""
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    step = 0
    while arrivals.keys() - set(range(step)) or decode.running or decode.waiting:
        decode.add(arrivals.get(step, []))
        for chunk in [*decode.admit(), *decode.step()]:
            chunks[chunk.request_id].append(chunk)
        step += 1
    return chunks


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


def logprobs_of(chunks: list[Chunk]) -> list[float]:
    return [logprob for chunk in chunks for logprob in chunk.logprobs]


@torch.no_grad()
def plain_logprobs(model: Any, before: list[int], sampled: list[int], temperature: float) -> list[float]:
    """One plain forward pass over the final sequence, no cache, no batch."""
    logits = model(torch.tensor([before + sampled])).logits[0, len(before) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    return logprobs.gather(-1, torch.tensor(sampled)[:, None])[:, 0].tolist()


lengths = st.integers(1, 60)
jobs = st.lists(
    st.tuples(
        st.integers(0, 12), st.sampled_from([0, 18, 30]), lengths, st.integers(1, 14), st.sampled_from([0.0, 0.7, 1.0])
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=min(15, settings().max_examples))
@given(jobs=jobs, max_running=st.integers(1, 5), fill_tokens=st.sampled_from([1, 64, 4096]))
def test_logprobs_are_those_of_a_plain_forward_pass(
    any_model: Any, jobs: list[tuple[int, int, int, int, float]], max_running: int, fill_tokens: int
):
    arrivals: dict[int, list[Request]] = defaultdict(list)
    for index, (step, shared, length, max_tokens, temperature) in enumerate(jobs):
        sampling = SamplingParams(max_tokens, temperature=temperature, seed=index)
        arrivals[step].append(Request(str(index), as_ids(beginning_alike(shared, index, length)), sampling))
    answers = run(loop_of(any_model, max_running=max_running, fill_tokens=fill_tokens), arrivals)
    for index, (_, shared, length, max_tokens, temperature) in enumerate(jobs):
        sampled = ids_of(answers[str(index)])
        assert len(sampled) == max_tokens
        assert answers[str(index)][-1].finish_reason == "length"
        expected = plain_logprobs(any_model, beginning_alike(shared, index, length), sampled, temperature)
        assert logprobs_of(answers[str(index)]) == pytest.approx(expected, rel=CLOSE, abs=CLOSE)  # seen: 1.03e-5 of 3.3


@settings(max_examples=min(10, settings().max_examples))
@given(jobs=jobs, max_running=st.integers(1, 5))
def test_tokens_do_not_depend_on_the_rest_of_the_batch(
    model: Any, jobs: list[tuple[int, int, int, int, float]], max_running: int
):
    arrivals: dict[int, list[Request]] = defaultdict(list)
    for index, (step, shared, length, max_tokens, temperature) in enumerate(jobs):
        sampling = SamplingParams(max_tokens, temperature=temperature, top_k=40, top_p=0.9, seed=index)
        arrivals[step].append(Request(str(index), as_ids(beginning_alike(shared, index, length)), sampling))
    together = run(loop_of(model, max_running=max_running), arrivals)
    for request in (arrived for some in arrivals.values() for arrived in some):
        alone = run(loop_of(model), {0: [request]})
        assert ids_of(alone[request.request_id]) == ids_of(together[request.request_id])


class Adapted(torch.nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states) + states.mean(-1, keepdim=True)


def test_a_model_with_adapters_is_decoded_with_them(model: Any):
    adapted = deepcopy(model)
    for layer in adapted.model.layers:
        layer.mlp.up_proj.__class__ = Adapted
    (chunks,) = run(loop_of(adapted), {0: [Request("r", as_ids(prompt(1, 9)), SamplingParams(12))]}).values()
    expected = plain_logprobs(adapted, prompt(1, 9), ids_of(chunks), 1.0)
    assert logprobs_of(chunks) == pytest.approx(expected, rel=CLOSE, abs=CLOSE)  # seen: 1.03e-5 of 3.3


def test_the_window_ends_a_request(model: Any):
    request = Request("r", as_ids(prompt(0, 20)), SamplingParams(100))
    (chunks,) = run(loop_of(model, max_context=32), {0: [request]}).values()
    assert (len(ids_of(chunks)), chunks[-1].finish_reason) == (12, "length")


def test_requests_leave_and_join_while_others_run(model: Any):
    """The long one is admitted first and ends last; nobody waits for it."""
    long = Request("long", as_ids(prompt(0, 5)), SamplingParams(40))
    short = [Request(f"short {i}", as_ids(prompt(i, 5)), SamplingParams(3)) for i in range(10)]
    decode = loop_of(model, max_running=2)
    decode.add([long, *short])
    ended = []
    while decode.running or decode.waiting:
        chunks = [*decode.admit(), *decode.step()]
        ended += [chunk.request_id for chunk in chunks if chunk.finish_reason]
    assert ended == [*(request.request_id for request in short), "long"]


def test_an_aborted_request_keeps_what_it_sampled(model: Any):
    requests = [Request(str(i), as_ids(prompt(i, 9)), SamplingParams(20, seed=i)) for i in range(4)]
    whole = run(loop_of(model, send_every=100), {0: requests})
    decode = loop_of(model, send_every=100, max_running=3)
    decode.add(requests)
    decode.admit()
    for _ in range(5):
        decode.step()
    aborted = {chunk.request_id: chunk for chunk in decode.abort(["0", "3", "unknown"])}
    assert {name: chunk.finish_reason for name, chunk in aborted.items()} == {"0": "abort", "3": "abort"}
    assert list(aborted["0"].ids) == ids_of(whole["0"])[:5]
    assert not len(aborted["3"].ids)
    rest = run(decode, {})
    assert {name: ids_of(chunks) for name, chunks in rest.items()} == {n: ids_of(whole[n]) for n in ("1", "2")}


def test_after_new_weights_logprobs_are_theirs_over_the_whole_prefix(model: Any, other_model: Any):
    decode = loop_of(deepcopy(model), send_every=1)
    decode.add([Request(str(i), as_ids(prompt(i, 5 + 9 * i)), SamplingParams(12, seed=i)) for i in range(3)])
    decode.admit()
    first = [chunk for _ in range(4) for chunk in decode.step()]
    copy_weights(decode.model, other_model.state_dict())
    decode.forget()
    decode.weight_version = 1
    second = [chunk for chunks in run(decode, {}).values() for chunk in chunks]
    for index in range(3):
        before = [chunk for chunk in first if chunk.request_id == str(index)]
        after = [chunk for chunk in second if chunk.request_id == str(index)]
        assert ({c.weight_version for c in before}, {c.weight_version for c in after}) == ({0}, {1})
        context = prompt(index, 5 + 9 * index)
        assert logprobs_of(before) == pytest.approx(plain_logprobs(model, context, ids_of(before), 1.0), abs=CLOSE)
        context = context + ids_of(before)
        assert logprobs_of(after) == pytest.approx(plain_logprobs(other_model, context, ids_of(after), 1.0), abs=CLOSE)


def test_every_position_has_its_own_random_number(model: Any):
    """A model without weights finds all 257 tokens equally likely: 200 draws are about 139 different ones."""
    flat = type(model)(model.config).eval()
    with torch.no_grad():
        flat.model.embed_tokens.weight.zero_()
    (chunks,) = run(loop_of(flat), {0: [Request("r", as_ids([1]), SamplingParams(200))]}).values()
    assert 110 < len(set(ids_of(chunks))) < 170


def test_nan_logits_fail_the_request(model: Any):
    broken = type(model)(model.config).eval()
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    (chunks,) = run(loop_of(broken), {0: [Request("r", as_ids([1, 2]), SamplingParams(5))]}).values()
    assert chunks[-1].finish_reason == "abort"
    assert str(chunks[-1].error).startswith("EngineError: the model's logits are not numbers")


def counted(decode: DecodeLoop) -> list[int]:
    """Return a list that gets the number of tokens (padding included) of each forward pass."""
    passes: list[int] = []
    fill, step = decode._cache.fill, decode._cache.step

    def count(first: Filling | torch.Tensor, *rest: Any) -> Any:
        filling = isinstance(first, Filling)
        passes.append((first.ids if filling else first).numel())
        return (fill if filling else step)(first, *rest)

    decode._cache.fill = decode._cache.step = count  # type: ignore[method-assign]
    return passes


turns = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=4)


@settings(max_examples=min(15, settings().max_examples))
@given(sessions=st.lists(st.tuples(st.integers(0, 5), turns), min_size=1, max_size=9), max_running=st.integers(1, 4))
def test_turns_that_go_on_from_what_their_row_holds_have_the_logprobs_of_a_plain_pass(
    any_model: Any, sessions: list[tuple[int, list[tuple[int, int]]]], max_running: int
):
    """Each turn's ids are those before it, what was sampled, and something new; one session changes its past."""
    decode = loop_of(any_model, max_running=max_running)
    histories = {str(index): prompt(index % 3, 20) for index in range(len(sessions))}
    for number in range(max(start + len(lengths) for start, lengths in sessions)):
        requests = []
        for index, (start, lengths) in enumerate(sessions):
            if 0 <= number - start < len(lengths):
                new, max_tokens = lengths[number - start]
                name = str(index)
                histories[name] = histories[name] + prompt(100 * index + number, new)
                if index == len(sessions) - 1:
                    histories[name][len(histories[name]) // 2] = number
                sampling = SamplingParams(max_tokens, seed=index)
                requests.append(Request(name, as_ids(histories[name]), sampling, session=name))
        for name, chunks in run(decode, {0: requests}).items():
            expected = plain_logprobs(any_model, histories[name], ids_of(chunks), 1.0)
            assert logprobs_of(chunks) == pytest.approx(expected, rel=CLOSE, abs=CLOSE)  # seen: 1.03e-5 of 3.3
            histories[name] += ids_of(chunks)


def test_the_next_turn_fills_only_what_is_new_until_the_weights_change(model: Any):
    decode = loop_of(model)
    first = prompt(1, 50)
    sampled = ids_of(run(decode, {0: [Request("a", as_ids(first), SamplingParams(3), session="t")]})["a"])
    second = [*first, *sampled, *prompt(2, 5)]
    passes = counted(decode)
    run(decode, {0: [Request("b", as_ids(second), SamplingParams(1), session="t")]})
    assert passes == [5, 1]  # the last token that was sampled and four of the five new ones; then the fifth
    decode.forget()
    passes.clear()
    run(decode, {0: [Request("c", as_ids(second), SamplingParams(1), session="t")]})
    assert passes == [len(second) - 1, 1]


def test_samples_of_one_prompt_are_filled_once(model: Any):
    decode = loop_of(model)
    passes = counted(decode)
    same = as_ids(prompt(1, 7))
    run(decode, {0: [Request(str(i), same, SamplingParams(1, seed=i), session=str(i)) for i in range(8)]})
    assert passes == [6, 8]


def test_what_prompts_begin_with_is_filled_once_until_the_weights_change(model: Any):
    decode = loop_of(model)
    passes = counted(decode)
    requests = [
        Request(str(i), as_ids(beginning_alike(20, i, 6)), SamplingParams(1, seed=i), session=str(i)) for i in range(8)
    ]
    for _ in range(2):
        run(decode, {0: requests})
        assert passes == [20, 8 * 5, 8]  # what all begin with; the rest of each, but for its last token; that
        decode.forget()
        passes.clear()
    run(decode, {0: requests, 1: [Request("other", as_ids(prompt(50, 9)), SamplingParams(1), session="other")]})
    assert passes == [20, 8 * 5, 8, 8, 1]  # what begins differently shares nothing


def test_a_long_prompt_is_filled_in_pieces(model: Any, monkeypatch: pytest.MonkeyPatch):
    """The scores of all its pairs of tokens would be some gigabytes."""
    widths: list[int] = []
    forward = Qwen3Rows._forward

    def measured(rows: Qwen3Rows, ids: torch.Tensor, *rest: Any, **keys: Any) -> torch.Tensor:
        widths.append(ids.shape[1])
        return forward(rows, ids, *rest, **keys)

    monkeypatch.setattr(Qwen3Rows, "_forward", measured)
    long = prompt(1, 600)
    (chunks,) = run(loop_of(model, max_context=700), {0: [Request("r", as_ids(long), SamplingParams(3))]}).values()
    assert widths == [256, 256, 87, 1, 1, 1]
    assert logprobs_of(chunks) == pytest.approx(plain_logprobs(model, long, ids_of(chunks), 1.0), abs=CLOSE)


def test_a_row_outlives_the_choice_of_what_others_share(model: Any):
    """The prompts of the others begin with more than there was room for."""
    decode = loop_of(model, max_context=600, fill_tokens=600)
    first = prompt(1, 12)
    sampled = ids_of(run(decode, {0: [Request("a", as_ids(first), SamplingParams(3), session="t")]})["a"])
    run(decode, {0: [Request(str(i), as_ids(beginning_alike(240, i, 6)), SamplingParams(1)) for i in range(4)]})
    second = [*first, *sampled, *prompt(2, 5)]
    passes = counted(decode)
    (chunks,) = run(decode, {0: [Request("b", as_ids(second), SamplingParams(3), session="t")]}).values()
    assert passes == [5, 1, 1, 1]
    assert logprobs_of(chunks) == pytest.approx(plain_logprobs(model, second, ids_of(chunks), 1.0), abs=CLOSE)


def test_rows_that_have_ended_take_no_part_in_a_step_once_they_are_many(model: Any):
    decode = loop_of(model)
    passes = counted(decode)
    requests = [
        Request(str(i), as_ids(prompt(i, 9)), SamplingParams(20 if i % 4 == 3 else 2, seed=i), session=str(i))
        for i in range(8)
    ]
    answers = run(decode, {0: requests})
    assert passes[-18:] == [2] * 18  # two of eight go on, wherever their rows were
    for index in (3, 7):
        expected = plain_logprobs(model, prompt(index, 9), ids_of(answers[str(index)]), 1.0)
        assert logprobs_of(answers[str(index)]) == pytest.approx(expected, rel=CLOSE, abs=CLOSE)  # seen: 1.03e-5 of 3.3
    second = [*prompt(0, 9), *ids_of(answers["0"]), *prompt(9, 3)]
    passes.clear()
    (chunks,) = run(decode, {0: [Request("next", as_ids(second), SamplingParams(3), session="0")]}).values()
    assert passes == [3, 1, 1, 1]  # its row was kept while others took its place
    assert logprobs_of(chunks) == pytest.approx(plain_logprobs(model, second, ids_of(chunks), 1.0), abs=CLOSE)


def test_a_row_waits_for_the_next_turn_while_as_many_others_run(model: Any):
    """Twice as many sessions as may run at once take turns, and each finds its row again."""
    decode = loop_of(model, max_running=4)
    texts = {str(i): prompt(i, 9) for i in range(8)}
    for turn in range(3):
        passes = counted(decode)
        requests = [
            Request(f"{name}-{turn}", as_ids(ids), SamplingParams(2, seed=turn), session=name)
            for name, ids in texts.items()
        ]
        for request, chunks in run(decode, {0: requests}).items():
            texts[request.partition("-")[0]] += [*ids_of(chunks), 5, 6]
        if turn:
            assert sum(passes) < 8 * (3 + 2) + 8  # what is new, and two steps each


def test_the_rows_of_ended_sessions_are_given_away_first_and_those_of_live_ones_stay(model: Any) -> None:
    """Of four conversations the one that was quiet for longest goes on; those that have ended made room for others."""
    decode, texts = loop_of(model, max_running=2), {str(i): prompt(i, 9) for i in range(4)}
    for name, ids in texts.items():
        run(decode, {0: [Request(name, as_ids(ids), SamplingParams(1), session=name)]})
    decode.end_sessions(["1", "3", "never begun"])
    for name in ("4", "5"):
        run(decode, {0: [Request(name, as_ids(prompt(int(name), 9)), SamplingParams(1), session=name)]})
    passes = counted(decode)
    for name in ("0", "2"):
        run(decode, {0: [Request(f"{name}!", as_ids([*texts[name], 7]), SamplingParams(1), session=name)]})
    assert passes == [1, 1], "nothing but the token that is new"
    assert len(decode._rows) == 4


def test_of_more_sessions_than_rows_the_longest_find_theirs_until_they_are_away(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven take turns, and there are four rows: with the longest idle one given away first, none would find its."""
    decode = loop_of(model, max_running=2)
    texts = {str(number): prompt(number, 10 + 5 * number) for number in (6, 0, 4, 1, 5, 2, 3)}

    def filled(names: Iterable[str]) -> list[str]:
        """Let sessions take a turn each; return those of which more was filled than was new."""
        whole = []
        for name in names:
            passes, ids = counted(decode), [*texts[name], 7]
            run(decode, {0: [Request(name, as_ids(ids), SamplingParams(1), session=name)]})
            whole += [name] if sum(passes) > 10 else []
        return whole

    assert filled(texts) == list(texts)
    assert filled(texts) == ["0", "1", "2", "3"]
    decode.end_sessions(["4"])
    assert filled("012356") == ["0", "1", "2"]
    monkeypatch.setattr(decode_loop, "AWAY", 6)
    assert filled("232326") == []
    assert filled("15") == ["1", "5"], "who was away for seven steps has given way, and is longer than the others"
    texts |= {name: prompt(ord(name), 60) for name in "abcdef"}
    assert filled("abcdef") == [*"abcdef"]
    assert len(filled("abcdef")) == 2, "of those that are alike the others find theirs"


def test_a_row_that_is_asked_for_is_not_given_to_another(model: Any) -> None:
    decode, texts = loop_of(model, max_running=2), {name: prompt(ord(name), ord(name) - 80) for name in "abcdef"}
    requests = {name: Request(name, as_ids(ids), SamplingParams(1), session=name) for name, ids in texts.items()}
    for name in "abcd":
        run(decode, {0: [requests[name]]})
    passes = counted(decode)
    run(decode, {0: [requests[name] for name in "efa"]})
    assert passes == [2 * 21, 2, 1]


def test_a_row_that_holds_nothing_yet_changes_places_with_an_idle_one(model: Any) -> None:
    """A prompt of one token is given a row and filled with nothing, beside the row that an ended session keeps."""
    params = SamplingParams(4, temperature=0.0, ignore_eos=True)
    first, second = (
        Request(name, as_ids(prompt(seed, length)), params, session=name)
        for seed, (name, length) in enumerate([("long", 9), ("short", 1)])
    )
    found = run(loop_of(model), {0: [first], 8: [second]})
    assert ids_of(found["short"]) == ids_of(run(loop_of(model), {0: [second]})["short"])
