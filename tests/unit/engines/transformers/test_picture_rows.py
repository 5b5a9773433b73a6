"""Pictures in the decode loop, against plain forward passes over the whole conversation."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsm_rollout.chat.pictures import looker_of
from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.engines.transformers.decode_loop import DecodeLoop
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.engines.transformers.picture_rows import PictureRows
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.pictures import StoredPicture, picture_of
from fsm_rollout.trajectory.tokens import Ids, MediaSpan, as_ids
from tests.vision import FAMILIES, MODELS, random_model

MARKS = {"llava_next": "<image>", "qwen2_5_vl": "<|image_pad|>", "qwen3_vl": "<|image_pad|>"}


@cache
def pads() -> frozenset[int]:
    """Return the ids that stand for pictures, of all families."""
    return frozenset(seer(family)[1].config.image_token_id for family in MODELS)


@cache
def seer(family: str) -> tuple[Any, Any]:
    processor = FAMILIES[family]()
    return processor, random_model(family, processor)


@cache
def picture(seed: int) -> StoredPicture:
    rng = np.random.default_rng(seed)
    return picture_of(rng.integers(0, 256, (*rng.integers(20, 120, 2), 3), dtype=np.uint8))


def stream(family: str, parts: Sequence[str | int], before: Sequence[int] = (), media: Sequence[MediaSpan] = ()) -> Any:
    """Return ids and spans of texts and pictures (by seed), after others."""
    processor, _ = seer(family)
    mark = MARKS[family]
    ids, spans = as_ids(list(before)), list(media)
    for part in parts:
        if isinstance(part, int):
            seen = looker_of(processor).seen(picture(part), mark)
            spans.append(
                MediaSpan(len(ids), len(seen.ids), picture(part), processor.tokenizer.convert_tokens_to_ids(mark))
            )
            ids += seen.ids
            part = "."  # no two pictures stand side by side
        ids += as_ids(processor.tokenizer(part, add_special_tokens=False)["input_ids"])
    return ids, tuple(spans)


def loop_of(family: str, **options: int) -> DecodeLoop:
    processor, model = seer(family)
    sizes = {"max_running": 4, "max_context": 2048, "fill_tokens": 256, "send_every": 4, **options}
    return DecodeLoop(model, processor=processor, tokenizer=processor.tokenizer, **sizes)


def answers(decode: DecodeLoop, requests: Sequence[Request]) -> dict[str, tuple[Ids, list[float], str | None]]:
    decode.add(requests)
    found: dict[str, tuple[Ids, list[float], str | None]] = defaultdict(lambda: (as_ids([]), [], None))
    while decode.running or decode.waiting:
        for chunk in [*decode.admit(), *decode.step()]:
            ids, logprobs, _ = found[chunk.request_id]
            found[chunk.request_id] = (ids + chunk.ids, [*logprobs, *chunk.logprobs], chunk.error)
    return {name: whole(*answer) for name, answer in found.items()}


def whole(ids: Ids, logprobs: list[float], error: str | None) -> tuple[Ids, list[float], str | None]:
    """Return an answer without the id that stands for a picture, which random models sample, and which ends it."""
    sampled_pad = bool(ids) and ids[-1] in pads()
    return ids[: len(ids) - sampled_pad], logprobs[: len(ids) - sampled_pad], error


def asked(name: str, ids: Ids, media: tuple[MediaSpan, ...], tokens: int = 3, session: str = "") -> Request:
    sampling = SamplingParams(tokens, seed=sum(name.encode()), stop_ids=pads())
    return Request(name, ids, sampling, session=session, media=media)


def plain_logprobs(family: str, ids: Ids, media: Sequence[MediaSpan]) -> torch.Tensor:
    """Return the log probability of each id but the first."""
    logits = plain_logits(family, ids, media)
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids.tolist())[1:, None])[:, 0]


@torch.no_grad()
def plain_logits(family: str, ids: Ids, media: Sequence[MediaSpan]) -> torch.Tensor:
    """Return the logits of each id but the first: one pass, no cache; all pictures processed at once."""
    processor, model = seer(family)
    inputs: dict[str, Any] = {}
    if media:
        text = "x".join([MARKS[family]] * len(media))
        inputs = dict(processor(text=[text], images=[span.picture.image() for span in media], return_tensors="pt"))
        del inputs["input_ids"], inputs["attention_mask"]
    if "mm_token_type_ids" in inputs:
        kinds = torch.zeros(1, len(ids), dtype=torch.int32)
        for span in media:
            kinds[0, span.start : span.end] = 1
        inputs["mm_token_type_ids"] = kinds
    model.base_model.rope_deltas = None
    found: torch.Tensor = model(input_ids=torch.tensor([ids.tolist()]), use_cache=False, **inputs).logits[0, :-1]
    return found.float()


def off(family: str, request: Request, answer: tuple[Ids, list[float], str | None]) -> float:
    """Return how far the farthest ratio of a plain pass's probability to the engine's is from 1."""
    ids, logprobs, error = answer
    assert error is None
    if not ids:
        return 0.0
    plain = plain_logprobs(family, request.ids + ids, request.media)[-len(ids) :]
    return float((plain - torch.tensor(logprobs)).exp().sub(1).abs().max())


said = st.lists(st.sampled_from(["What is this?", "2 + 2", "x"]) | st.integers(0, 4), min_size=1, max_size=4)


@pytest.mark.parametrize("family", MODELS)
@given(st.lists(st.lists(said, min_size=1, max_size=3), min_size=1, max_size=3))
@settings(max_examples=15)
def test_several_turns_of_several_streams_are_sampled_from_what_a_plain_pass_gives(
    family: str, conversations: list[list[list[str | int]]]
) -> None:
    decode = loop_of(family)
    held: dict[int, tuple[Ids, tuple[MediaSpan, ...]]] = {}
    for turn in range(max(map(len, conversations))):
        requests = []
        for index, conversation in enumerate(conversations):
            if turn < len(conversation):
                ids, media = stream(family, ["look ", *conversation[turn], " now"], *held.get(index, ((), ())))
                requests.append(asked(f"{index}/{turn}", ids, media, session=str(index)))
        for request, (name, answer) in zip(requests, sorted(answers(decode, requests).items()), strict=True):
            assert name == request.request_id
            assert off(family, request, answer) < 1e-4
            held[int(request.session)] = (request.ids + answer[0], request.media)


@pytest.mark.parametrize("family", MODELS)
def test_a_turn_feeds_the_new_ids_and_pictures_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = list[tuple[int, int]]()
    forward = PictureRows._forward

    def watched(self: PictureRows, ids: torch.Tensor, *arguments: Any, **inputs: Any) -> torch.Tensor:
        fed.append((ids.shape[1], len(inputs.get("image_sizes", inputs.get("image_grid_thw", ())))))
        return forward(self, ids, *arguments, **inputs)

    monkeypatch.setattr(PictureRows, "_forward", watched)
    decode = loop_of(family)
    ids, media = stream(family, ["look", 0, 1, "now"])
    sampled = answers(decode, [asked("first", ids, media, session="s")])["first"][0]
    before = len(ids + sampled)
    ids, media = stream(family, ["and", 2, "then"], ids + sampled, media)
    fed.clear()
    answers(decode, [asked("second", ids, media, tokens=1, session="s")])
    assert fed == [(len(ids) - before, 1), (1, 0)]  # the last sampled token had not been fed, the last of these is not


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("together", [True, False], ids=["samples of a group", "turns of a session"])
def test_equal_ids_of_other_pictures_are_another_prefix(family: str, together: bool) -> None:
    shades = [np.full((56, 56, 3), shade, np.uint8) for shade in (0, 90, 200)]
    ids, (span,) = stream(family, ["look", 0, "now"])
    seen = looker_of(seer(family)[0]).seen(picture_of(shades[0]), MARKS[family])
    ids = ids[: span.start] + seen.ids + ids[span.end :]
    requests = [
        asked("same", ids, (span._replace(length=len(seen.ids), picture=picture_of(shade)),), session="s" * index)
        for index, shade in enumerate(shades, start=not together)
    ]
    requests = [
        Request(f"{i}", r.ids, r.sampling, session="" if together else "s", media=r.media)
        for i, r in enumerate(requests)
    ]
    decode = loop_of(family)
    steps = [requests] if together else [[request] for request in requests]
    for step in steps:
        found = answers(decode, step)
        for request in step:
            assert off(family, request, found[request.request_id]) < 1e-4


@pytest.mark.parametrize("family", MODELS)
def test_sampling_is_not_lost_where_there_are_pictures(family: str) -> None:
    ids, media = stream(family, ["look", 0, "now"])

    def sampled(name: str, **sampling: Any) -> tuple[Ids, list[float], str | None]:
        words = SamplingParams(**{"max_tokens": 6, "stop_ids": pads(), **sampling})
        return answers(loop_of(family), [Request(name, ids, words, media=media)])[name]

    greedy = sampled("greedy", temperature=0.0)
    assert len(greedy[0]) == 6
    assert sampled("top", temperature=2.0, top_k=1, seed=3)[0] == greedy[0]
    assert len(sampled("short", max_tokens=2)[0]) == 2
    end = greedy[0][3]
    stopped = sampled("stop", temperature=0.0, stop_ids=frozenset([end]))
    assert stopped[0] == greedy[0][: greedy[0].index(end) + 1]
    assert sampled("seed", seed=5) == sampled("same", seed=5) != sampled("other", seed=6)
    hot = sampled("hot", temperature=1.7, seed=1)
    logits = plain_logits(family, ids + hot[0], media)[-len(hot[0]) :] / 1.7
    own = torch.log_softmax(logits, -1).gather(-1, torch.tensor(hot[0].tolist())[:, None])[:, 0]
    assert own.tolist() == pytest.approx(hot[1], abs=1e-4)


@pytest.mark.parametrize("family", MODELS)
def test_what_else_is_in_the_batch_changes_nothing(family: str) -> None:
    requests = [asked(f"{i}", *stream(family, ["look", *range(i % 3), "x" * i, "now"]), tokens=8) for i in range(5)]
    batched = answers(loop_of(family), requests)
    for request in requests:
        alone = answers(loop_of(family), [request])[request.request_id]
        assert alone[0] == batched[request.request_id][0]
        assert alone[1] == pytest.approx(batched[request.request_id][1], abs=1e-4)


def test_ids_and_pictures_that_do_not_belong_together_are_refused_and_the_others_go_on() -> None:
    family = MODELS[0]
    ids, media = stream(family, ["look", 0, "now"])
    other = MediaSpan(media[0].start, media[0].length, picture(3), media[0].placeholder)
    wrong = {
        "stand for pictures that were not given": (ids, ()),
        "are not what the model sees for": (ids, (other,)),
        "the ids end with a picture": (ids[: media[0].end], media),
    }
    requests = [asked(why, *each) for why, each in wrong.items()] + [asked("good", ids, media)]
    found = answers(loop_of(family), requests)
    for why in wrong:
        assert why in str(found[why][2])
    assert off(family, requests[-1], found["good"]) < 1e-4


def test_a_model_that_sees_in_both_directions_is_refused() -> None:
    processor, model = seer(MODELS[0])
    with pytest.raises(EngineError, match="in both directions"):
        TransformersEngine(model, processor.tokenizer, processor=FAMILIES["gemma3"]())
