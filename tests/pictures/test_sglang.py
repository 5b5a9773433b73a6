"""The real SGLang with pictures: what it says it has read and sampled is what a forward pass of transformers makes.

Each family's server is started once for all tests here, by a fork (see ``warm_sglang``).
"""

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.reference import FollowUp, Opening
from fsm_rollout.engines.protocol import Request, SamplingParams, facts_of
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.trajectory.pictures import StoredPicture, picture_of
from fsm_rollout.trajectory.tokens import Ids, MediaSpan, as_ids
from tests.integration.sglang_oracle import Answers, Got, ask
from tests.vision import save

pytestmark = pytest.mark.sglang

CLOSE = 1e-4
names = (f"look-{number}" for number in itertools.count())


class Served:
    """An SGLang with a small random model of one family, and that model in transformers."""

    def __init__(self, family: str, folder: Path) -> None:
        self.model = save(family, folder)
        self.engine = SGLangEngine(folder, threads=1, send_every=4, max_context=3000)
        self.processor = facts_of(self.engine).processor
        self.chat = ChatTemplate(self.engine.tokenizer, processor=self.processor)

    def expected(self, ids: Sequence[int], media: Sequence[MediaSpan], sampled: int, temperature: float) -> list[float]:
        """Return the logprobs of the last ``sampled`` ids, by one forward pass of all that precedes."""
        tokens = torch.tensor([list(ids[:-1])])
        inputs: dict[str, Any] = {}
        if media:
            made = self.processor.image_processor([span.picture.image() for span in media], return_tensors="pt")
            pads = tokens == self.processor.image_token_id
            assert int(pads.sum()) == sum(span.length for span in media)
            inputs = {**made, "mm_token_type_ids": pads.long()}
        with torch.no_grad():
            logits = self.model(input_ids=tokens, **inputs).logits[0, -sampled:].double()
        table = torch.log_softmax(logits / (temperature or 1.0), -1)
        return [float(row[token]) for row, token in zip(table, ids[-sampled:], strict=True)]

    def check(self, got: Got) -> None:
        """The ratio of each token's probability in transformers to that in SGLang is 1."""
        request = got.request
        assert got.chunks[-1].error is None, got.chunks[-1].error
        want = self.expected([*request.ids, *got.ids], request.media, len(got.ids), request.sampling.temperature)
        assert np.exp(np.subtract(want, got.logprobs)) == pytest.approx(1, abs=CLOSE)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def served(request: pytest.FixtureRequest, warm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(request.param, tmp_path_factory.mktemp("model"))
    yield served
    asyncio.run(served.engine.aclose())


def picture(seed: int) -> StoredPicture:
    rng = np.random.default_rng(seed)
    return picture_of(rng.integers(0, 256, (*rng.integers(30, 200, 2), 3), dtype=np.uint8))


def content(*said: str | int) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": picture(part)}
        for part in said
    ]


def asked(served: Served, ids: Ids, media: Sequence[MediaSpan], max_tokens: int = 12, **sampling: Any) -> Request:
    """A random model samples placeholders, too: they end its turn."""
    sampling.setdefault("stop_ids", served.chat.pads)
    return Request(next(names), ids, SamplingParams(max_tokens, **sampling), media=tuple(media))


def prompt(served: Served, *said: str | int, **sampling: Any) -> Request:
    encoded = served.chat.encode_here(Opening([{"role": "user", "content": content(*said)}], None))
    return asked(served, encoded.ids, encoded.media, **sampling)


def test_several_turns_with_pictures_in_prompts_and_tool_results(served: Served) -> None:
    """Each turn is what a forward pass of the whole conversation makes of it, and finds the last one's cache."""

    async def go() -> None:
        first = {"role": "user", "content": content("look ", 1, " and ", 2)}
        encoded = served.chat.encode_here(Opening([first], None))
        ids, media, history = encoded.ids, list(encoded.media), [first]
        new = 0
        for turn in range(4):
            (got,) = await ask(served.engine, asked(served, ids, media, temperature=0.0))
            served.check(got)
            cached = max(chunk.cached_tokens for chunk in got.chunks)
            assert cached >= len(ids) - new - 1 if turn else cached < len(ids) / 2
            call = {"id": f"c{turn}", "type": "function", "function": {"name": "zoom", "arguments": {}}}
            history.append({"role": "assistant", "content": served.chat.decode(got.ids), "tool_calls": [call]})
            result = {"role": "tool", "tool_call_id": f"c{turn}", "content": content("a crop: ", 10 + turn, 1)}
            glue = served.chat.encode_here(FollowUp(history, [result], None, got.ids, "length"))
            history.append(result)
            before = ids + as_ids(got.ids)
            ids, new = before + glue.ids, len(glue.ids)
            media += [span.moved(len(before)) for span in glue.media]
        assert len(media) == 10

    asyncio.run(go())


def test_ids_that_no_tokenizer_makes_are_read_as_they_are(served: Served) -> None:
    """Between pictures, as a model may have sampled them: text that is decoded and encoded again would be shorter."""
    encoded = prompt(served, "look ", 1, " and ", 2)
    tokenizer, (first, second) = served.chat.tokenizer, encoded.media
    letters = as_ids([id_ for letter in "hello there" for id_ in tokenizer.encode(letter, add_special_tokens=False)])
    assert tokenizer.encode(tokenizer.decode(letters), add_special_tokens=False) != letters.tolist()
    cut = first.end + 1
    ids = encoded.ids[:cut] + letters + encoded.ids[cut:]
    request = asked(served, ids, (first, second.moved(len(letters))), temperature=0.0)
    (got,) = asyncio.run(ask(served.engine, request))
    served.check(got)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.7}, {"temperature": 0.5, "max_tokens": 3}], ids=str
)
def test_sampling_is_not_lost_where_there_are_pictures(served: Served, sampling: dict[str, Any]) -> None:
    (got,) = asyncio.run(ask(served.engine, prompt(served, "look ", 3, **sampling)))
    served.check(got)
    assert len(got.ids) == sampling.get("max_tokens", 12) or got.ids[-1] in served.chat.pads


def test_stop_tokens_and_cuts_hold_where_there_are_pictures(served: Served) -> None:
    async def go() -> None:
        (free,) = await ask(served.engine, prompt(served, "look ", 3, temperature=0.0))
        (stopped,) = await ask(
            served.engine, prompt(served, "look ", 3, temperature=0.0, stop_ids=frozenset([free.ids[4]]))
        )
        assert (stopped.ids, stopped.reason) == (free.ids[: free.ids.index(free.ids[4]) + 1], "stop")
        (likeliest,) = await ask(served.engine, prompt(served, "look ", 3, top_k=1, temperature=2.0))
        assert likeliest.ids == free.ids
        assert likeliest.logprobs == pytest.approx([0.0] * 12, abs=CLOSE)

    asyncio.run(go())


def test_what_is_aborted_goes_on_with_its_pictures(served: Served) -> None:
    async def go() -> None:
        request = prompt(served, 4, " look ", 5, max_tokens=2000, temperature=0.0, ignore_eos=True)
        got = Answers(request)
        pending = asyncio.ensure_future(got.drain(served.engine.generate([request])))
        await got.until(lambda: len(got[request.request_id].ids) >= 8)
        await served.engine.abort([request.request_id])
        await pending
        begun = got[request.request_id]
        served.check(begun)
        rest = begun.request.continued(as_ids(begun.ids), next(names))
        again = Answers(rest)
        pending = asyncio.ensure_future(again.drain(served.engine.generate([rest])))
        await again.until(lambda: len(again[rest.request_id].ids) >= 8)
        # While it is held the server has nothing; the rest is asked for again, with what was said and the pictures.
        await served.engine.pause()
        held = len(again[rest.request_id].ids)
        await served.engine.resume()
        await again.until(lambda: len(again[rest.request_id].ids) >= held + 8)
        await served.engine.abort([rest.request_id])
        await pending
        served.check(again[rest.request_id])

    asyncio.run(go())


def test_pictures_and_texts_are_sampled_beside_one_another(served: Served) -> None:
    requests = [prompt(served, "look ", *([seed] * (seed % 3))) for seed in range(9)]
    for got in asyncio.run(ask(served.engine, *requests)):
        served.check(got)


def test_a_placeholder_without_a_picture_is_no_request(served: Served) -> None:
    """SGLang would take it for text in silence, or, beside pictures, never answer."""

    async def go() -> None:
        good = prompt(served, "look ", 6)
        for bad in (
            asked(served, good.ids, ()),
            asked(served, good.ids + as_ids([good.media[0].placeholder]), good.media),
        ):
            (got,) = await ask(served.engine, bad)
            assert "of the prompt stand for pictures" in (got.chunks[-1].error or "")

    asyncio.run(go())


def test_the_same_server_over_http_reads_what_the_request_carries(served: Served) -> None:
    async def go() -> None:
        server = served.engine._process
        engine = SGLangHTTPEngine(server.url, served.engine._folder, api_key=server.api_key, send_every=4)
        (got,) = await ask(engine, prompt(served, "look ", 7, 8))
        served.check(got)
        await engine.aclose()

    asyncio.run(go())


def test_what_verls_server_passes_on_is_read_as_the_stream_holds_it(tmp_path: Path) -> None:
    """verl's own loops send expanded ids beside the pictures, to which this SGLang never answers."""
    command = [sys.executable, "-m", "tests.pictures.verl_request", str(tmp_path)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    read, held, off = ran.stdout.split()[-3:]
    assert read == held
    assert float(off) < CLOSE
