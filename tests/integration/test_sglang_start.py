"""How the real SGLang starts and ends, and models with a server of their own."""

import asyncio
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import fsm_rollout as fr
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from fsm_rollout.trajectory.events import Generated
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.tokens import NoteKind
from fsm_rollout.trajectory.trace_ids import TraceIds
from tests.cases import PROGRAMS
from tests.collector import Collector
from tests.integration.sglang_oracle import PATIENCE, model
from tests.integration.sglang_served import assert_gone, greedy_like_transformers, tensors_of
from tests.kit import CONFIGS, ratios
from tests.programs import started

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("warm")]


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
def test_the_experts_that_sglang_routed_tokens_to_are_those_of_transformers(experts_folder: Path) -> None:
    """Over several turns at top_p 0.9, tokens of the prompt and of the environment too, each said once."""
    from transformers import Qwen3MoeForCausalLM

    agent = experts_folder / "agent.yaml"
    cut = "  - {trigger: truncated, source: GENERATING, dest: INTERACTING}\n"
    agent.write_text((CONFIGS / "agents/tool_user.yaml").read_text("utf-8") + cut, "utf-8")
    shutil.copy(CONFIGS / "agents/solver.md", experts_folder)
    graph = fr.load_agent(agent, ["states.GENERATING.sampling={max_tokens: 12, top_p: 0.9}"])
    prompts = fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=3)  # the user has more to say after each answer
    args = {"enable_return_routed_experts": True, "admin_api_key": "of somebody else"}  # who samples needs none
    engine = SGLangEngine(experts_folder, threads=1, args=args)
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
def test_two_processes_that_hold_half_a_model_each_give_its_tokens() -> None:
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
