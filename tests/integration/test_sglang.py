"""The real SGLang, started once: tokens and logprobs as a forward pass has them, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import fsm_rollout as fr
from fsm_rollout.engines.protocol import Load
from fsm_rollout.engines.sglang import engine as sglang
from fsm_rollout.engines.sglang import weights as sglang_weights
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from fsm_rollout.testing import check_engine
from fsm_rollout.trajectory.tokens import as_ids
from tests.integration.sglang_oracle import Answers, ask, model, request, worst
from tests.kit import ROOT

pytestmark = pytest.mark.sglang  # one worker starts it

CONFIGS = ROOT / "configs"
CLOSE = 1e-4
names = (f"test-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def engine() -> Iterator[SGLangEngine]:
    engine = SGLangEngine("embedded", threads=1, send_every=4, replica="r0")
    yield engine
    asyncio.run(engine.aclose())


def test_greedy_tokens_are_those_of_transformers(engine: SGLangEngine) -> None:
    async def main() -> None:
        other = TransformersEngine("embedded")
        requests = [request(engine, next(names), i, 40, temperature=0.0) for i in range(4)]
        ours, theirs = await ask(engine, *requests), await ask(other, *requests)
        await other.aclose()
        for got, want in zip(ours, theirs, strict=True):
            assert (got.ids, got.reason) == (want.ids, want.reason)
            assert len(got.ids) > 3
            assert max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True)) < CLOSE
        assert {chunk.replica for got in ours for chunk in got.chunks} == {"r0"}

    asyncio.run(main())


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.7},
        {"temperature": 1.0, "top_k": 1},
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_sampled_from(engine: SGLangEngine, sampling: dict[str, Any]) -> None:
    """A greedy request and an uncut one ride along: their logprobs must not be touched by the cut."""
    kinds = [sampling, {"temperature": 0.0}, {"temperature": 1.0}]
    requests = [request(engine, next(names), i, 32, ignore_eos=True, **kinds[i % 3]) for i in range(6)]
    for got in asyncio.run(ask(engine, *requests)):
        assert len(got.ids) == 32
        assert worst(got, {engine.weight_version: "final"}) < CLOSE
        assert max(got.logprobs) <= 0


def test_a_top_k_beyond_what_sglang_can_answer_for_is_refused_alone(engine: SGLangEngine) -> None:
    good, bad = asyncio.run(ask(engine, request(engine, next(names)), request(engine, next(names), top_k=5000)))
    assert good.reason in ("stop", "length")
    assert bad.chunks[-1].error is not None
    assert "top_k is 5000, and SGLang says exact logprobs of at most 4096 kept tokens" in bad.chunks[-1].error


def test_a_token_beyond_the_vocabulary_is_refused_alone(engine: SGLangEngine) -> None:
    """SGLang would die of it."""
    wrong = replace(request(engine, next(names)), ids=as_ids([5, 704]))
    good, bad = asyncio.run(ask(engine, request(engine, next(names)), wrong))
    assert good.reason in ("stop", "length")
    assert bad.chunks[-1].error == "EngineError: token 704 is none of the model's 704; is the tokenizer that of it?"


def test_updates_in_mid_flight_lose_no_token_and_mistake_no_version(engine: SGLangEngine) -> None:
    """From final to early by folder, back to final by tensors, and to early again: on requests under way."""
    tensors = {name: tensor.clone() for name, tensor in model("final").state_dict().items()}

    async def main() -> None:
        first = engine.weight_version
        requests = [request(engine, next(names), i, 1900, temperature=0.7, ignore_eos=True) for i in range(4)]
        got = Answers(*requests)
        pending = asyncio.ensure_future(got.drain(engine.generate(requests)))
        for weights in (embedded_model("early"), tensors, embedded_model("early")):
            now = engine.weight_version
            await got.until(lambda now=now: all(answer.versions.count(now) >= 8 for answer in got.values()))
            await engine.update_weights(weights)
        assert engine.weight_version == first + 3
        await got.until(lambda: all(answer.versions.count(first + 3) >= 8 for answer in got.values()))
        await engine.abort([r.request_id for r in requests])
        await asyncio.wait_for(pending, 60)
        of_version = dict(enumerate(["final", "early", "final", "early"], first))
        for answer in got.values():
            assert answer.reason == "abort"
            assert answer.versions == sorted(answer.versions)
            assert set(answer.versions) == set(of_version)
            assert worst(answer, of_version) < CLOSE

    try:
        asyncio.run(main())
    finally:
        asyncio.run(engine.update_weights(embedded_model("final")))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"model.norm.wight": torch.zeros(128)}, "did you mean 'model.norm.weight'?"),
        ({"model.norm.weight": torch.zeros(64)}, r"has shape \[64\], the model's has \[128\]"),
        ({"model.norm.weight": torch.tensor([float("nan")] * 128)}, "is not finite: 128 NaN and 0 infinite of 128"),
        ("/no/such/folder", "there is no folder '/no/such/folder'"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(engine: SGLangEngine, weights: Any, message: str) -> None:
    async def main() -> None:
        before = engine.weight_version
        with pytest.raises(EngineError, match=message):
            await engine.update_weights(weights)
        (got,) = await ask(engine, request(engine, next(names), 1, 16, temperature=0.0))
        assert engine.weight_version == before == got.chunks[-1].weight_version
        assert worst(got, {before: "final"}) < CLOSE

    asyncio.run(main())


def test_weights_that_sglang_refuses_are_an_error(engine: SGLangEngine, tmp_path: Path) -> None:
    """A folder that passes for a model and holds none: SGLang says False, without raising."""
    (tmp_path / "config.json").write_text((embedded_model() / "config.json").read_text("utf-8"), "utf-8")

    async def main() -> None:
        before = engine.weight_version
        with pytest.raises(EngineError, match="SGLang refused the weights: "):
            await engine.update_weights(tmp_path)
        (got,) = await ask(engine, request(engine, next(names), 2, 16, temperature=0.0))
        assert worst(got, {before: "final"}) < CLOSE

    asyncio.run(main())


def test_aborted_requests_keep_what_they_have_and_others_go_on(engine: SGLangEngine) -> None:
    """SGLang aborts whatever *begins* with an id: 'a' must not end 'ab'."""

    async def main() -> None:
        requests = [
            request(engine, name, i, most, ignore_eos=True)
            for name, i, most in (("a", 0, 1900), ("ab", 1, 200), ("abc", 2, 200))
        ]
        got = Answers(*requests)
        pending = asyncio.ensure_future(got.drain(engine.generate(requests)))
        await got.until(lambda: bool(got["a"].ids))
        await engine.abort(["a", "no such request"])
        await asyncio.wait_for(pending, 60)
        assert got["a"].reason == "abort"
        assert 0 < len(got["a"].ids) < 1900
        assert [(got[name].reason, len(got[name].ids)) for name in ("ab", "abc")] == [("length", 200)] * 2
        assert worst(got["a"], {engine.weight_version: "final"}) < CLOSE

    asyncio.run(main())


def test_a_paused_engine_has_handed_all_over_and_takes_aborts(engine: SGLangEngine) -> None:
    async def main() -> None:
        requests = [request(engine, name, i, 600, ignore_eos=True) for i, name in enumerate(["stays", "goes"])]
        late = request(engine, "late", 0, 4)
        got = Answers(*requests, late)
        tasks = [asyncio.ensure_future(got.drain(engine.generate(requests)))]
        await got.until(lambda: all(got[r.request_id].ids for r in requests))
        await engine.pause()
        await asyncio.sleep(0)  # what has been handed over is taken
        counts = {name: len(answer.ids) for name, answer in got.items()}
        tasks.append(asyncio.ensure_future(got.drain(engine.generate([late]))))
        with pytest.raises(EngineError, match=r"request id 'stays' is under way already"):
            engine.generate([requests[0]])
        await engine.sleep()  # allowed while paused
        await engine.abort(["goes"])
        await got.until(lambda: got["goes"].reason is not None)
        assert {name: len(answer.ids) for name, answer in got.items()} == counts
        await engine.wake()
        await engine.resume()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert (got["stays"].reason, len(got["stays"].ids)) == ("length", 600)
        assert (got["goes"].reason, len(got["goes"].ids)) == ("abort", counts["goes"])
        assert got["late"].ids
        assert worst(got["stays"], {engine.weight_version: "final"}) < CLOSE

    asyncio.run(main())


def test_a_second_turn_finds_the_first_in_the_cache(engine: SGLangEngine) -> None:
    async def main() -> None:
        (one,) = await ask(engine, request(engine, next(names), 2, 40, ignore_eos=True))
        again = one.request.continued(one.chunks[1].ids, next(names))
        (two,) = await ask(engine, again)
        assert two.chunks[0].cached_tokens >= len(one.request.ids)
        assert two.chunks[0].queue_seconds > 0

    asyncio.run(main())


def test_load_counts_what_is_under_way(engine: SGLangEngine) -> None:
    async def main() -> None:
        requests = [request(engine, next(names), i, 600, ignore_eos=True) for i in range(3)]
        got = Answers(*requests)
        pending = asyncio.ensure_future(got.drain(engine.generate(requests)))
        load = engine.load()  # the engine's process may be quicker than this one
        assert load.running + load.waiting == 3
        await got.until(lambda: all(answer.ids for answer in got.values()))
        load = engine.load()
        assert 0 < load.running + load.waiting <= 3
        assert load.used_tokens > load.running
        await asyncio.wait_for(pending, 60)
        assert engine.load() == Load()

    asyncio.run(main())


def test_a_rollout_of_an_agent_with_tools(engine: SGLangEngine) -> None:
    agent = fr.load_agent(CONFIGS / "agents/tool_user.yaml")
    prompts = fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=4)
    with fr.Rollout(agent, engine, reward="fsm_rollout.rewards:exact_answer") as rollout:
        batch = rollout.run(prompts, n=2)
    data = batch.tensordict
    assert len(data["trajectory_id"]) == 8
    assert float(data["trajectory_scores"].mean()) > 0.5  # the embedded model solves nearly all of these
    assert int(data["response_mask"].sum()) > 200


def test_a_process_that_does_not_answer_is_not_waited_for_without_end(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "ORDER_WITHIN", 0.3)
    host = psutil.Process(engine._process.process.pid)

    async def main() -> None:
        host.suspend()
        try:
            with pytest.raises(EngineError, match=r"did not answer within 0\.3 s \(order 'pause'\); is it stuck"):
                await engine.pause()
        finally:
            host.resume()
        monkeypatch.setattr(sglang, "ORDER_WITHIN", 60.0)
        await engine.resume()
        (got,) = await ask(engine, request(engine, next(names), 1, 8))
        assert got.ids

    asyncio.run(main())


def test_arguments_are_checked_before_anything_starts() -> None:
    with pytest.raises(EngineError, match="there is no folder 'no-such-model'"):
        SGLangEngine("no-such-model")
    with pytest.raises(EngineError, match="args: model_path: the engine sets this itself"):
        SGLangEngine(args={"model_path": "x"})


def test_a_start_that_takes_too_long_is_given_up_and_leaves_nothing_behind() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineError, match=r"SGLang did not start .* within 0\.2 s; raise start_timeout"):
        SGLangEngine("embedded", start_timeout=0.2)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_host_that_is_killed_while_it_starts_leaves_nothing_behind() -> None:
    """SGLang's processes see to that themselves, but only once they have imported everything."""
    me = psutil.Process()
    before = set(me.children(recursive=True))
    family: list[psutil.Process] = []

    def kill() -> None:
        while len(family) < 4:  # the host, multiprocessing's tracker, and the first processes of SGLang
            family[:] = set(me.children(recursive=True)) - before
        next(process for process in family if process.ppid() == me.pid).kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(EngineError, match=r"process of SGLang has ended \(exit code -9\)"):
        SGLangEngine("embedded", threads=1)
    killer.join()
    _, left = psutil.wait_procs(family, timeout=30)
    for process in left:
        process.kill()
    assert not left


def test_an_argument_that_sglang_does_not_have_is_named() -> None:
    with pytest.raises(EngineError, match="SGLang has no argument 'mem_fraction_statik'; did you mean"):
        SGLangEngine("embedded", args={"mem_fraction_statik": 0.5})


def test_a_killed_scheduler_ends_what_is_under_way_and_no_other_engine(engine: SGLangEngine) -> None:
    """Two engines in one process; the second one loses its scheduler."""
    second = SGLangEngine("embedded:early", threads=1, send_every=2)

    async def main() -> None:
        one = request(engine, next(names), 1, 20, temperature=0.0)
        (ours,), (theirs,) = await asyncio.gather(ask(engine, one), ask(second, one))
        assert worst(ours, {engine.weight_version: "final"}) < CLOSE
        assert worst(theirs, {0: "early"}) < CLOSE

        doomed = [request(second, next(names), i, 1500, ignore_eos=True) for i in range(2)]
        got = Answers(*doomed)
        pending = asyncio.ensure_future(got.drain(second.generate(doomed)))
        await got.until(lambda: all(answer.ids for answer in got.values()))  # partial results are there
        kill_scheduler_of(second)
        with pytest.raises(EngineError, match="process of SGLang") as died:
            await asyncio.wait_for(pending, 30)
        assert "scheduler_0" in str(died.value).splitlines()[0]
        assert "exit code -9" in str(died.value).splitlines()[0]
        assert all(answer.reason is None for answer in got.values())
        with pytest.raises(EngineError, match="process of SGLang"):
            second.generate([request(second, next(names))])
        with pytest.raises(EngineError, match="process of SGLang"):
            await second.pause()
        await second.aclose()
        (still,) = await ask(engine, request(engine, next(names), 0, 8))
        assert still.ids

    asyncio.run(main())


def test_an_engine_that_fails_half_way_through_an_update_samples_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is in, and the next one never comes."""

    def one_part(weights: Any) -> Iterator[bytes]:
        yield sglang_weights.packed({"model.norm.weight": torch.zeros(128)})
        raise OSError("the disk is gone")

    monkeypatch.setattr(sglang_weights, "parts_of", one_part)
    half = SGLangEngine("embedded", threads=1)

    async def main() -> None:
        got = Answers(request(half, "a", 0, 1900, ignore_eos=True))
        pending = asyncio.ensure_future(got.drain(half.generate([got["a"].request])))
        await got.until(lambda: bool(got["a"].ids))
        with pytest.raises(OSError, match="the disk is gone"):
            await half.update_weights({"model.norm.weight": torch.zeros(128)})
        said = "an update broke off, so nobody knows the weights any more: the disk is gone"
        with pytest.raises(EngineError, match=said):
            await half.pause()
        with pytest.raises(EngineError, match=said):
            await asyncio.wait_for(pending, 60)
        assert worst(got["a"], {0: "final"}) < CLOSE
        with pytest.raises(EngineError, match=said):
            half.generate([request(half, next(names))])
        assert str(half.failure) == said
        assert half.weight_version == 0
        await half.aclose()

    asyncio.run(main())


def kill_scheduler_of(engine: SGLangEngine) -> None:
    children = psutil.Process(engine._process.process.pid).children(recursive=True)
    (scheduler,) = [child for child in children if "scheduler" in " ".join(child.cmdline())]
    scheduler.kill()


def test_it_conforms_and_leaves_no_process_behind(engine: SGLangEngine) -> None:
    """Last, as it closes the engine. On a CPU SGLang has no per-request seeds, hence not deterministic."""
    processes = psutil.Process(engine._process.process.pid).children(recursive=True)
    assert len(processes) >= 2
    report = asyncio.run(check_engine(engine, weights=embedded_model("early"), deterministic=False, patience=300))
    assert report.tokens > 50
    assert not any(process.is_running() for process in processes)
    assert not psutil.pid_exists(engine._process.process.pid) or engine._process.process.returncode is not None
