"""The real SGLang: tokens and logprobs as a forward pass has them, whatever happens meanwhile.

It is started once for all tests here, by a fork (see ``warm_sglang``), and a second time by the pool that it belongs
to, when a test kills it: so their order counts. The second one has a tokenizer of its own and repeats its whole answer
in each output, which are SGLang's defaults and the harder case for exact tokens; it is also used as a server of others
would be.
"""

import asyncio
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from msgspec.structs import replace
from openai import BadRequestError

import fsm_rollout as fr
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.openai.engine import OpenAIEngine
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Chunk
from fsm_rollout.engines.sglang import process as sglang_process
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.engines.sglang.process import ServerProcess
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from fsm_rollout.testing import check_engine
from fsm_rollout.trajectory.events import Generated
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.tokens import NoteKind, as_ids
from fsm_rollout.trajectory.trace_ids import TraceIds
from tests.cases import PROGRAMS, table
from tests.collector import Collector
from tests.foreign import CALCULATOR, EngineLog, agent, chat, client
from tests.integration.replica_kills import differences
from tests.integration.sglang_oracle import (
    PATIENCE,
    Answers,
    Got,
    ask,
    closes_thinking,
    expected,
    model,
    request,
    worst,
)
from tests.integration.warm_sglang import WarmSGLang
from tests.kit import ROOT, ratios
from tests.programs import started

pytestmark = pytest.mark.sglang  # one worker starts it

CONFIGS = ROOT / "configs"
WORKING = ("GENERATING", "PROCESSING_TOOLS", "INTERACTING")
CLOSE = 1e-4
PROMPTS = CONFIGS / "data/arithmetic.jsonl"
names = (f"test-{number}" for number in itertools.count())


ARGUMENTS = {
    "grammar_backend": "xgrammar",  # which has SGLang load a tokenizer
    "allow_auto_truncate": True,  # it cuts what is too long, and the engine has to see that
}


class Served:
    """A pool of one SGLang."""

    def __init__(self) -> None:
        pool = build_engine(
            {"kind": "sglang", "threads": 1, "send_every": 4, "max_context": 2040, "args": ARGUMENTS}, Path()
        )
        assert isinstance(pool, EnginePool)
        self.pool = pool

    @property
    def engine(self) -> SGLangEngine:
        """The present life of its only engine."""
        engine = self.pool.replicas[0].live
        assert isinstance(engine, SGLangEngine)
        return engine

    @property
    def processes(self) -> list[psutil.Process]:
        """The server's process, and all below it."""
        process = psutil.Process(self.engine._process.pid)
        return [process, *process.children(recursive=True)]


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """All servers here are forked from one process that has imported SGLang."""
    warm_sglang = WarmSGLang()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_process, "subprocess", warm_sglang)
        yield
    warm_sglang.close()


@pytest.fixture(scope="module")
def served(warm: None) -> Iterator[Served]:
    served = Served()
    yield served
    asyncio.run(served.pool.aclose())


@pytest.fixture
def engine(served: Served) -> SGLangEngine:
    return served.engine


async def greedy_like_transformers(engine: Any, weights: str) -> list[Got]:
    """Ask four greedy requests of both; return the engine's answers."""
    other = TransformersEngine("embedded" if weights == "final" else f"embedded:{weights}")
    requests = [request(engine, next(names), i, 40, temperature=0.0) for i in range(4)]
    ours, theirs = await ask(engine, *requests), await ask(other, *requests)
    await other.aclose()
    for got, want in zip(ours, theirs, strict=True):
        assert (got.ids, got.reason) == (want.ids, want.reason)
        assert max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True)) < CLOSE
    assert max(len(got.ids) for got in ours) > 3
    return ours


def test_greedy_tokens_are_those_of_transformers(engine: SGLangEngine) -> None:
    asyncio.run(greedy_like_transformers(engine, "final"))


@pytest.mark.parametrize(
    "sampling", table("integration")["logprobs are those of the distribution sampled from"], ids=str
)
def test_logprobs_are_those_of_the_distribution_sampled_from(engine: SGLangEngine, sampling: dict[str, Any]) -> None:
    """A greedy request and an uncut one ride along: their logprobs must not be touched by the cut."""
    kinds = [sampling, {"temperature": 0.0}, {"temperature": 1.0}]
    requests = [request(engine, next(names), i, 32, ignore_eos=True, **kinds[i % 3]) for i in range(6)]
    for got in asyncio.run(ask(engine, *requests)):
        assert len(got.ids) == 32
        assert worst(got, {engine.weight_version: "final"}) < CLOSE
        assert max(got.logprobs) <= 0


NONE = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


@pytest.mark.real  # SGLang compiles what it penalizes with
@pytest.mark.parametrize(
    "penalties", [{"presence_penalty": 0.7, "frequency_penalty": 0.4}, {"repetition_penalty": 1.3}], ids=str
)
def test_penalties_are_known_a_token_late_and_do_not_count_the_prompt(
    engine: SGLangEngine, penalties: dict[str, float]
) -> None:
    (got,) = asyncio.run(ask(engine, request(engine, next(names), 1, 24, ignore_eos=True, **penalties)))
    prompt, params = list(got.request.ids), got.request.sampling
    assert got.logprobs == pytest.approx(expected("final", prompt, got.ids, params, late=1), abs=0.05)
    assert got.logprobs != pytest.approx(expected("final", prompt, got.ids, replace(params, **NONE)), abs=0.05)


def test_a_turn_ends_at_a_stop_string_of_which_sglang_is_not_told(served: Served) -> None:
    """What it samples until it hears of that is dropped; what is kept is what it samples without."""

    async def ended() -> None:
        asked = {"temperature": 0.0, "ignore_eos": True}
        (whole,) = await ask(served.engine, request(served.engine, next(names), 2, 200, **asked))
        decode = served.pool.tokenizer.decode
        stop = (decode(whole.ids[9:14]),)
        pending = EngineClient(served.pool).submit(request(served.engine, next(names), 2, 200, stop=stop, **asked))
        await asyncio.wait_for(pending.done.wait(), PATIENCE)
        end = len(pending.ids)
        assert (pending.finish_reason, pending.error) == ("stop", None)
        assert end <= 14
        assert pending.ids.tolist() == whole.ids[:end]
        assert pending.logprobs.tolist() == pytest.approx(whole.logprobs[:end], abs=CLOSE)
        assert stop[0] in decode(pending.ids)
        assert stop[0] not in decode(pending.ids[:-1])
        await served.pool.drain()

    asyncio.run(ended())


def test_thinking_is_closed_at_its_budget(served: Served) -> None:
    async def closed() -> None:
        asked = request(served.engine, next(names), 2, 60, temperature=0.0, ignore_eos=True)
        await closes_thinking(EngineClient(served.pool), asked)
        await served.pool.drain()

    asyncio.run(closed())


def test_a_top_k_beyond_what_sglang_can_answer_for_is_refused_alone(engine: SGLangEngine) -> None:
    good, bad = asyncio.run(ask(engine, request(engine, next(names)), request(engine, next(names), top_k=5000)))
    assert good.reason in ("stop", "length")
    assert bad.chunks[-1].error is not None
    assert "top_k is 5000, and SGLang gives exact logprobs for at most 4096 kept tokens" in bad.chunks[-1].error


async def updated_in_mid_flight(engine: Any, before: str, *updates: tuple[str, Any]) -> None:
    """Load weights of these names while requests are under way: no token is lost, and no version mistaken."""
    first = engine.weight_version
    requests = [request(engine, next(names), i, 1900, temperature=0.7, ignore_eos=True) for i in range(4)]
    got = Answers(*requests)
    pending = asyncio.ensure_future(got.drain(engine.generate(requests)))
    of_version = dict(enumerate([before, *(name for name, _ in updates)], first))
    for version in of_version:
        await got.until(lambda version=version: all(answer.versions.count(version) >= 8 for answer in got.values()))
        if version < max(of_version):
            assert await engine.update_weights(updates[version - first][1]) == version + 1
    await engine.abort([r.request_id for r in requests])
    await asyncio.wait_for(pending, PATIENCE)
    for answer in got.values():
        assert answer.reason in ("abort", "length")  # on a busy machine it may have come to its end by then
        assert answer.versions == sorted(answer.versions)
        assert set(answer.versions) == set(of_version)
        assert worst(answer, of_version) < CLOSE


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in model(name).state_dict().items()}


def test_updates_in_mid_flight_lose_no_token_and_mistake_no_version(engine: SGLangEngine) -> None:
    """From final to early by folder, and back to final by tensors: on requests under way."""
    early = "early", embedded_model("early")
    try:
        asyncio.run(updated_in_mid_flight(engine, "final", early, ("final", tensors_of("final"))))
    finally:
        asyncio.run(engine.update_weights(embedded_model("final")))


async def test_weights_that_sglang_refuses_are_an_error(engine: SGLangEngine, tmp_path: Path) -> None:
    """A folder that passes for a model and holds none: SGLang says False, without raising."""
    (tmp_path / "config.json").write_text((embedded_model() / "config.json").read_text("utf-8"), "utf-8")
    before = engine.weight_version
    with pytest.raises(EngineError, match=r"the SGLang server .* refused the weights: "):
        await engine.update_weights(tmp_path)
    (got,) = await ask(engine, request(engine, next(names), 2, 16, temperature=0.0))
    assert worst(got, {before: "final"}) < CLOSE


async def test_aborted_requests_keep_what_they_have_and_others_go_on(engine: SGLangEngine) -> None:
    """SGLang aborts whatever *begins* with an id: 'a' must not end 'ab'."""
    requests = [
        request(engine, name, i, most, ignore_eos=True)
        for name, i, most in (("a", 0, 1900), ("ab", 1, 200), ("abc", 2, 200))
    ]
    got = Answers(*requests)
    pending = asyncio.ensure_future(got.drain(engine.generate(requests)))
    await got.until(lambda: bool(got["a"].ids))
    await engine.abort(["a", "no such request"])
    await asyncio.wait_for(pending, PATIENCE)
    assert got["a"].reason == "abort"
    assert 0 < len(got["a"].ids) < 1900
    assert [(got[name].reason, len(got[name].ids)) for name in ("ab", "abc")] == [("length", 200)] * 2
    assert worst(got["a"], {engine.weight_version: "final"}) < CLOSE


async def test_a_paused_engine_has_handed_all_over_and_takes_aborts(engine: SGLangEngine) -> None:
    # Long ones, which on a busy machine are not at their end before the pause.
    requests = [request(engine, name, i, 1000, ignore_eos=True) for i, name in enumerate(["stays", "goes"])]
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
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    assert (got["stays"].reason, len(got["stays"].ids)) == ("length", 1000)
    assert (got["goes"].reason, len(got["goes"].ids)) == ("abort", counts["goes"])
    assert got["late"].ids
    assert worst(got["stays"], {engine.weight_version: "final"}) < CLOSE


async def test_a_second_turn_finds_the_first_in_the_cache(engine: SGLangEngine) -> None:
    (answer,) = await ask(engine, request(engine, next(names), 2, 40, ignore_eos=True))
    again = answer.request.continued(answer.chunks[1].ids, next(names))
    (two,) = await ask(engine, again)
    assert two.chunks[0].cached_tokens >= len(answer.request.ids)


def test_a_batch_at_top_p_has_what_was_kept_and_so_ratios_of_one(engine: SGLangEngine) -> None:
    prompts = fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=2)
    agent = fr.load_agent(CONFIGS / "agents/tool_user.yaml")
    with fr.Rollout(agent, engine, sampling={"top_p": 0.9}) as rollout:
        batch = rollout.run(prompts, n=2)
    counts, trained = batch.tensordict["sampling_mask_counts"], batch.tensordict["response_mask"].bool()
    assert (counts > 0).equal(trained)
    assert (ratios(model("final"), batch) - 1).abs().max() < 1e-3


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixture-of-Experts model with the embedded tokenizer: two layers of four experts, two for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder, source = tmp_path_factory.mktemp("experts"), embedded_model("final")
    sizes = {"vocab_size": model("final").config.vocab_size, "hidden_size": 64, "head_dim": 32, "num_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, norm_topk_prob=True)).save_pretrained(folder)
    for file in source.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return folder


@pytest.mark.real
def test_the_experts_that_sglang_routed_tokens_to_are_those_of_transformers(warm: None, experts_folder: Path) -> None:
    """Over several turns at top_p 0.9, tokens of the prompt and of the environment too, each said once."""
    from transformers import Qwen3MoeForCausalLM

    agent = experts_folder / "agent.yaml"
    cut = "  - {trigger: truncated, source: GENERATING, dest: INTERACTING}\n"
    agent.write_text((CONFIGS / "agents/tool_user.yaml").read_text("utf-8") + cut, "utf-8")
    shutil.copy(CONFIGS / "agents/solver.md", experts_folder)
    graph = fr.load_agent(agent, ["states.GENERATING.sampling={max_tokens: 12, top_p: 0.9}"])
    prompts = fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=3)  # the user has more to say after each answer
    engine = SGLangEngine(experts_folder, threads=1, args={"enable_return_routed_experts": True})
    said: list[int] = []

    def listen(trajectory: Any, event: Any) -> None:
        if isinstance(event, Generated):
            said.extend(len(note.counts) for note in event.notes if note.kind is NoteKind.ROUTED_EXPERTS)

    try:
        with fr.Rollout(graph, engine, on_event=[listen]) as rollout:
            batch = rollout.run(prompts, n=2)
    finally:
        asyncio.run(engine.aclose())
    oracle = Qwen3MoeForCausalLM.from_pretrained(experts_folder, dtype=torch.float32).eval()
    rows = batch.rows()
    assert sum(said) == sum(len(row.routed_experts) - 1 for row in rows)
    for row in rows:
        assert len(row.sampling) > 1
        ids = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
        with torch.no_grad():
            layers = oracle(ids, output_router_logits=True).router_logits
        routed = torch.stack([logits.topk(2).indices for logits in layers], 1).sort(-1).values
        assert routed[:-1].tolist() == np.sort(row.routed_experts[:-1]).tolist()
    assert (ratios(oracle, batch) - 1).abs().max() < 1e-3


@pytest.mark.real
def test_two_processes_that_hold_half_a_model_each_give_its_tokens(warm: None) -> None:
    """On a CPU, too, with one core for each; after new weights as before."""
    engine = SGLangEngine("embedded", tp=2, threads=1, max_context=2040)

    async def main() -> None:
        try:
            await greedy_like_transformers(engine, "final")
            await engine.update_weights(tensors_of("early"))
            await greedy_like_transformers(engine, "early")
        finally:
            await engine.aclose()

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


def test_an_argument_that_sglang_does_not_have_is_named() -> None:
    """By the server's process, whose last words an error shows first."""
    message = r": EngineError: SGLang has no argument 'mem_fraction_statik'; did you mean 'mem_fraction_static'\? \(the"
    with pytest.raises(EngineError, match=message):
        SGLangEngine("embedded", args={"mem_fraction_statik": 0.5}, threads=1)


@pytest.mark.real
def test_a_server_that_is_killed_while_it_starts_leaves_nothing_behind() -> None:
    """SGLang's processes see to that themselves, but only once they have imported everything."""
    me = psutil.Process()
    before = set(me.children(recursive=True))
    family: list[psutil.Process] = []

    def kill() -> None:
        between = threading.Event()
        while len(family) < 3:  # the server, and the first processes of SGLang
            between.wait(0.05)
            family[:] = set(me.children(recursive=True)) - before
        min(family, key=psutil.Process.create_time).kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(EngineError, match=r"process of SGLang has ended \(exit code -9\)"):
        SGLangEngine("embedded", threads=1)
    killer.join()
    assert_gone(family)


def test_a_process_that_starts_anew_dies_with_the_server_before_it_has_imported_anything() -> None:
    """As SGLang's do where it has CUDA; elsewhere they are forked."""
    text = PROGRAMS["starts a process anew, as SGLang's server does"]
    server = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server.stdout as output:
        child = psutil.Process(int(output.readline()))
    server.kill()
    server.wait()
    assert_gone([child])


@pytest.mark.real
def test_no_process_stays_behind_when_whoever_started_it_is_killed() -> None:
    """They cannot clean up any more."""
    text = "from fsm_rollout.engines.sglang.engine import SGLangEngine; SGLangEngine('embedded', threads=1)"
    with started(text) as (user, *_):
        family: list[psutil.Process] = []
        while not family:
            family = psutil.Process(user.pid).children(recursive=True)
            threading.Event().wait(0.05)
    assert_gone(family)


def assert_gone(processes: list[psutil.Process]) -> None:
    """All of them end; one that nobody reaps, as in a container without an init, has ended too."""
    between, waited = threading.Event(), 0.0
    while alive := [process for process in processes if runs(process)]:
        if waited > PATIENCE:
            for process in alive:
                process.kill()
            raise AssertionError(alive)
        waited += 0.05
        between.wait(0.05)


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- from here on the order counts


@pytest.mark.real
async def test_a_process_of_sglang_that_is_killed_in_a_run_changes_no_row(served: Served) -> None:
    """At one point; `make nightly` tries more. The samples are greedy: no other are the same twice here."""
    times = ("limits.wall_seconds", "tools.calculate.timeout", *(f"states.{state}.timeout" for state in WORKING))
    agent = fr.load_agent(CONFIGS / "agents/tool_user.yaml", [f"{key}=36000" for key in times])  # SGLang starts anew
    prompts = list(fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=4))

    async def processes() -> list[int]:
        return [process.pid for process in served.processes]

    points, greedy = int(os.environ.get("KILL_POINTS", "1")), {"temperature": 0.0}
    before = served.pool.replicas[0].restarts
    assert await differences(served.pool, agent, prompts, processes, points=points, sampling=greedy) == []
    assert served.pool.replicas[0].restarts >= before + points


@pytest.mark.real
def test_a_killed_scheduler_costs_no_token_as_another_sglang_goes_on_with_the_same_weights(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = {"skip_tokenizer_init": False, "incremental_streaming_output": False}
    monkeypatch.setattr(
        sglang_process, "ServerProcess", lambda own, threads: ServerProcess({**own, **defaults}, threads)
    )

    async def main() -> tuple[SGLangEngine, list[psutil.Process]]:
        pool = served.pool
        assert await EngineClient(pool).update_weights(tensors_of("early"), 70) == 70  # it is there, whoever was killed
        first, processes, before = served.engine, served.processes, pool.replicas[0].restarts
        client = EngineClient(pool)
        asked = [client.submit(request(first, next(names), i, 400, temperature=0.7, ignore_eos=True)) for i in range(3)]
        async with asyncio.timeout(PATIENCE):
            while any(len(pending.ids) < 20 for pending in asked):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        _, scheduler, *_ = sorted(processes, key=psutil.Process.create_time)  # its first process
        scheduler.kill()
        async with asyncio.timeout(PATIENCE):
            for pending in asked:
                await pending.done.wait()
        await client.drain()
        (stats,) = pool.replicas
        assert (stats.restarts, pool.weight_version) == (before + 1, 70)
        line = stats.cause.splitlines()[0]
        assert "scheduler_0" in line
        assert "exit code -9" in line
        for pending in asked:
            assert (pending.finish_reason, len(pending.ids), pending.versions) == ("length", 400, [(400, 70)])
            got = Got(pending.request, [Chunk("", pending.ids, pending.logprobs, weight_version=70)])
            assert worst(got, {70: "early"}) < CLOSE
        assert "process of SGLang has ended (exit code -9)" in str(first.failure)
        return first, processes

    first, processes = asyncio.run(main())
    assert served.engine is not first
    assert_gone(processes)


@pytest.fixture
def elsewhere(served: Served) -> dict[str, Any]:
    """What an engine for a server that others have started needs to reach this one."""
    return {"url": served.engine._process.url, "api_key": served.engine._process.api_key}


@pytest.mark.real
async def test_a_server_of_others_with_a_tokenizer_of_its_own_gives_the_same_tokens(elsewhere: dict[str, Any]) -> None:
    earlier = SGLangHTTPEngine(**elsewhere)
    version = await earlier.update_weights(embedded_model("early"))
    await earlier.aclose()
    engine = SGLangHTTPEngine(**elsewhere)
    assert engine.weight_version == version  # whoever comes later learns the version from the server
    requests = [request(engine, next(names), i, 40, top_p=0.8, temperature=1.3) for i in range(2)]
    ours = [*await greedy_like_transformers(engine, "early"), *await ask(engine, *requests)]
    assert all(worst(got, {version: "early"}) < CLOSE for got in ours)
    assert {chunk.replica for got in ours for chunk in got.chunks} == {elsewhere["url"]}
    await engine.aclose()


@pytest.mark.real
@pytest.mark.process
def test_shards_share_servers_of_others_and_their_weights(
    elsewhere: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights are loaded once, by one of them, and no token of the others is mistaken for an older one's."""
    monkeypatch.setenv("SHARED_KEY", elsewhere["api_key"])

    async def main() -> None:
        spec, few = {"kind": "sglang_http", "urls": [elsewhere["url"]], "api_key": "$SHARED_KEY"}, 4
        agent, found = fr.load_agent(CONFIGS / "agents/tool_user.yaml"), fr.read_prompts(PROMPTS, limit=few)
        async with fr.Rollout(agent, spec, seed=7, workers=2) as rollout:
            first = await rollout.arun(found, n=2)
            (before,) = {version for row in first.rows() for version in row.versions[row.mask == 1].tolist()}
            running = asyncio.create_task(rollout.arun(found, n=2))
            await asyncio.sleep(0)
            version = await rollout.aupdate_weights(embedded_model("early"))
            assert version == before + 1 == rollout.weight_version
            crossed = await running
            assert {v for row in crossed.rows() for v in row.versions[row.mask == 1].tolist()} <= {before, version}
            last = await rollout.arun(found, n=2)
            assert {v for row in last.rows() for v in row.versions[row.mask == 1].tolist()} == {version}
            assert all(stats["weight_version"] == version for stats in rollout.engine_stats().values())
        again = SGLangHTTPEngine(**elsewhere)
        assert again.weight_version == version
        await greedy_like_transformers(again, "early")
        await again.aclose()

    asyncio.run(main())


@pytest.mark.real
async def test_an_update_of_such_a_server_in_mid_flight_mistakes_no_version(elsewhere: dict[str, Any]) -> None:
    engine = SGLangHTTPEngine(**elsewhere, send_every=4)
    await engine.update_weights(embedded_model("early"))
    await updated_in_mid_flight(engine, "early", ("final", tensors_of("final")))
    again = SGLangHTTPEngine(**elsewhere)
    assert again.weight_version == engine.weight_version
    await asyncio.gather(engine.aclose(), again.aclose())


@pytest.fixture
def openai(elsewhere: dict[str, Any]) -> OpenAIEngine:
    """The same server by OpenAI's protocol; its weights are the embedded ones."""

    def load(url: str, weights: Any, version: int) -> None:
        engine = SGLangHTTPEngine(**elsewhere)
        asyncio.run(engine.update_weights(weights, version + 1000))

    return OpenAIEngine(**elsewhere, update_weights=load)


@pytest.mark.real
async def test_by_openai_s_protocol_it_gives_the_same_tokens_and_exact_logprobs(openai: OpenAIEngine) -> None:
    assert await openai.update_weights(embedded_model("final")) == 1
    assert openai.max_context > 1000
    requests = [request(openai, next(names), i, 40, temperature=t) for i, t in enumerate((1.0, 0.6, 1.7))]
    requests += [request(openai, next(names), 1, 40, top_p=0.8)]
    greedy, (*drawn, refused) = await greedy_like_transformers(openai, "final"), await ask(openai, *requests)
    for got in greedy + drawn:
        assert got.versions == [1] * len(got.ids)
        assert worst(got, {1: "final"}) < CLOSE
    assert "do not know of top_p, top_k and min_p" in str(refused.chunks[-1].error)
    await openai.aclose()


@pytest.mark.real
async def test_it_scores_given_ids_as_a_forward_pass_does(elsewhere: dict[str, Any], openai: OpenAIEngine) -> None:
    """Also what it has in its cache, of which SGLang would say nothing; by OpenAI's protocol without the likeliest."""
    engine = SGLangHTTPEngine(**elsewhere)
    await engine.update_weights(embedded_model("final"))
    ids = request(engine, next(names), 2).ids + as_ids(range(100, 180))
    for asks, top in ((engine, 2), (openai, 0)):
        for start, end in ((20, 40), (40, 41), (41, len(ids))):
            whole = replace(request(engine, next(names), 2), ids=ids[:end], scored_from=start, score_top=top)
            (got,) = await ask(asks, whole)
            (scores,) = [chunk.scores for chunk in got.chunks if chunk.scores is not None]
            own = expected("final", ids[:start].tolist(), ids[start:end].tolist(), whole.sampling)
            assert np.allclose(scores.logprobs, own, rtol=0, atol=CLOSE)
            assert len(scores.top_ids) == top * (end - start)
            assert not got.ids
    await asyncio.gather(engine.aclose(), openai.aclose())


@pytest.mark.real
async def test_a_prompt_that_it_cuts_fails_with_the_reason(openai: OpenAIEngine) -> None:
    """As told to by ``allow_auto_truncate``: it says that its window is longer than the prompts that it takes."""
    whole = request(openai, next(names), 1)
    long = replace(whole, ids=as_ids((whole.ids.tolist() * 500)[: openai.max_context - 2]))
    (got,) = await ask(openai, long)
    assert (got.ids, got.reason) == ([], "abort")
    cut = rf"has read 2,0\d\d tokens of a prompt of {len(long.ids):,}: it cuts prompts"
    assert re.search(cut, str(got.chunks[-1].error)), got.chunks
    await openai.aclose()


@pytest.mark.real
def test_by_openai_s_protocol_it_conforms(openai: OpenAIEngine) -> None:
    report = asyncio.run(
        check_engine(openai, weights=embedded_model("final"), deterministic=False, cuts=False, patience=PATIENCE)
    )
    assert report.tokens > 50


@pytest.mark.real
async def test_a_foreign_agent_has_exact_rows_on_it(elsewhere: dict[str, Any]) -> None:
    """The recipes, which take seconds to import, have them in tests of their own."""
    engine = SGLangHTTPEngine(**elsewhere)
    log = EngineLog(engine)
    greedy = {"temperature": 0.0}  # or now and then it says a call that is none
    async with fr.Rollout(agent("use: 'tests.foreign:tool_user'"), engine, sampling=greedy) as rollout:
        async for group in rollout.stream(["Please work out (40 + 67) - 76."]):
            (trajectory,) = group.trajectories
            assert trajectory.stop_reason == "answered", trajectory.detail
            log.check_one_row(trajectory)
    await engine.aclose()


SCHEMA = {"type": "object", "properties": {"sum": {"enum": [1, 2]}}, "required": ["sum"], "additionalProperties": False}
CALLS = {"type": "function", "function": {"name": "calculate"}}
TEXT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}


async def demands(visit: fr.ForeignVisit) -> None:
    """Force a call of a small model that would say something else, go on freely, and ask for JSON."""
    messages: Any = [{"role": "user", "content": "Say hello."}]
    async with client(visit) as api:
        (call,) = (await chat(api, messages, tools=[CALCULATOR], tool_choice=CALLS)).tool_calls
        assert call.function.name == "calculate"
        assert json.loads(call.function.arguments).keys() >= {"left", "right"}
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        await chat(api, messages, tools=[CALCULATOR])
        ask: Any = [{"role": "user", "content": "Say hello."}]
        with pytest.raises(BadRequestError, match="Unsupported type"):
            await chat(
                api, ask, response_format={"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
            )
        assert json.loads((await chat(api, ask, response_format=TEXT)).content)["sum"] in (1, 2)


@pytest.mark.real
async def test_forms_are_enforced_and_what_is_sampled_freely_is_exact(
    served: Served, elsewhere: dict[str, Any]
) -> None:
    engine = SGLangHTTPEngine(**elsewhere)
    log = EngineLog(engine)
    async with fr.Rollout(agent(f"use: '{__name__}:demands'"), engine) as rollout:
        async for group in rollout.stream(["Say hello."]):
            (trajectory,) = group.trajectories
    assert trajectory.stop_reason == "answered", trajectory.detail
    await engine.aclose()
    told = [(stream.context, stream.why, stream.tokens.trained) for stream in trajectory.streams]
    assert told == [("main", "grammar", False), ("main~2", "grammar", True), ("main~3", "grammar", False)]
    asked = [(name, before) for name, before in log.asked.items() if log.sampled[name]]  # all but the wrong one
    for stream, (name, before) in zip(trajectory.streams, asked, strict=True):
        assert list(stream.tokens.ids) == [*before, *log.sampled[name]]
        assert len(before) == stream.tokens.prompt_length


def test_no_sglang_and_no_key_are_said_to_be_so(elsewhere: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"/v1/server_info answered 404"):
        SGLangHTTPEngine(f"{elsewhere['url']}/v1", api_key=elsewhere["api_key"])
    with pytest.raises(EngineError, match=r"/server_info answered 401.*Unauthorized"):
        SGLangHTTPEngine(elsewhere["url"])


async def test_it_conforms_and_leaves_no_process_behind(served: Served, elsewhere: dict[str, Any]) -> None:
    """Last, as it closes the engine; whoever else uses the server is told so, as we are when they update it."""
    processes, other = served.processes, SGLangHTTPEngine(**elsewhere, send_every=2)
    assert len(processes) >= 3
    version = await other.update_weights(embedded_model("final"))
    with pytest.raises(EngineError, match=f"samples with weights of version '{version}', not '.*' as loaded here"):
        await ask(served.engine, request(other, next(names)))
    await served.engine.update_weights(embedded_model("final"))
    report = await check_engine(served.engine, weights=embedded_model("early"), deterministic=False, patience=PATIENCE)
    assert report.tokens > 50
    assert_gone(processes)
    with pytest.raises(EngineError, match=f"the SGLang server {elsewhere['url']} cannot be reached"):
        await ask(other, request(other, next(names)))
    assert (other.load().running, other.load().waiting) == (0, 0)
    await other.aclose()


@pytest.mark.real
def test_what_a_server_does_is_below_the_generation_that_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SGLang's own spans, of a server that traces: those of the trajectories that are sampled, and no others."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="SGLang traces with all exporters of OTLP")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    prompts, sampling = [f"What is {number} + 1?" for number in range(32)], {"max_tokens": 4}

    async def main() -> None:
        with Collector() as collector, Journal(tmp_path / "journal.sqlite") as journal:
            ids, endpoint = TraceIds(journal.run_id, 0.5), f"{collector.url}/v1/traces"
            traces = {ids.trace(f"{number}/0").to_bytes(16, "big") for number in range(32)}
            traces = {trace for trace in traces if ids.sampled(int.from_bytes(trace, "big"))}
            args = {"enable_trace": True, "otlp_traces_endpoint": endpoint}
            engine = {"kind": "sglang", "threads": 1, "max_context": 2040, "args": args}
            options: dict[str, Any] = {"journal": journal, "sampling": sampling}
            options["tracing"] = {"endpoint": endpoint, "sample": ids.share}
            async with fr.Rollout(CONFIGS / "agents/single_turn.yaml", engine, **options) as rollout:
                await rollout.arun(prompts)
                async with asyncio.timeout(PATIENCE):
                    while {span.trace_id for span in collector.spans if " Req " in span.name} != traces:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
        asked = {span.trace_id: span.span_id for span in collector.spans if span.name.startswith("chat ")}
        served = {span.trace_id: span.parent_span_id for span in collector.spans if " Req " in span.name}
        assert asked == served
        assert 0 < len(asked) < len(prompts)

    asyncio.run(main())
