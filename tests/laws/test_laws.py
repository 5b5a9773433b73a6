"""The laws of DESIGN, held on generated agents, engines that misbehave, and schedules, in virtual time.

Each oracle reads the other side's log (the engine's, the tools'); none calls the code under test.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedded import tokenizer
from hypothesis import given, note, settings
from hypothesis import strategies as st
from laws.agents import agents
from laws.world import World, run_world, turns
from strategies import graphs

from fsm_rollout import load_agent
from fsm_rollout.engines.base import Request
from fsm_rollout.engines.scripted import Turn
from fsm_rollout.events import decode, encode
from fsm_rollout.graph import AgentGraph
from fsm_rollout.proof import prove
from fsm_rollout.trajectory import Trajectory
from fsm_rollout.verify import verify

SCRIPTS = st.lists(turns(), min_size=1, max_size=6)
FAILURES = {"failed:Overload", "failed:EngineError", "failed:ScriptError"}
"""What the engine may be blamed for; any other failure would be our own."""
CALM_SCRIPTS = st.lists(turns(failures=False), min_size=1, max_size=6)


def streams_of(trajectory: Trajectory, context: str) -> list[Any]:
    return [stream for stream in trajectory.streams if stream.context == context]


def check_streams(graph: AgentGraph, world: World) -> None:
    """Laws 3, 4, 5 and 7 against the engine's log."""
    logged = world.sampled()
    untrained = {name for name, spec in graph.contexts.items() if spec.engine != "policy"}
    for trajectory in world.trajectories:
        contexts = {stream.context for stream in trajectory.streams}
        for context in contexts:
            asked = list(logged.get((trajectory.trajectory_id, context), []))
            for stream in streams_of(trajectory, context):
                ids = stream.tokens.ids.tolist()
                mask = np.zeros(len(ids), dtype=int)
                logprobs = np.zeros(len(ids), dtype=np.float32)
                versions = np.full(len(ids), -1)
                end = stream.tokens.prompt_length
                while asked and len(asked[0][0]) >= end and asked[0][0].tolist() == ids[: len(asked[0][0])]:
                    given_ids, sampled, given_logprobs, given_versions = asked.pop(0)
                    start = len(given_ids)
                    assert start >= end, "an input that does not extend the one before it"
                    end = start + len(sampled)
                    assert ids[start:end] == sampled.tolist(), "a sampled token was lost or changed"
                    mask[start:end] = 1
                    logprobs[start:end] = given_logprobs
                    versions[start:end] = given_versions
                prompt = stream.tokens.prompt_length
                assert not mask[:prompt].any()
                trained = mask * (context not in untrained)
                assert stream.tokens.response_mask().tolist() == trained[prompt:].tolist(), "the mask lies"
                assert stream.tokens.response_logprobs().tolist() == logprobs[prompt:].tolist()
                assert stream.tokens.response_versions().tolist() == versions[prompt:].tolist()
                spans = stream.tokens.spans
                assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])]
                assert spans[-1].end == len(ids)
            assert all(not len(sampled) for _, sampled, _, _ in asked), (
                "the engine sampled tokens that are in no stream"
            )
    known = {(t.trajectory_id, s.context) for t in world.trajectories for s in t.streams}
    assert {key for key, asked in logged.items() if any(len(a[1]) for a in asked)} <= known


def check_ends(world: World, prompts: int, n: int) -> None:
    """Law 8, and one stop reason each."""
    assert sorted(group.group_id for group in world.groups) == [f"p{i}" for i in range(prompts)]
    for group in world.groups:
        assert [t.trajectory_id for t in group.trajectories] == [f"{group.group_id}/{k}" for k in range(n)]
    for trajectory in world.trajectories:
        assert trajectory.ended != (trajectory.suspended is not None)
        if str(trajectory.stop_reason).startswith("failed:"):
            assert trajectory.stop_reason in FAILURES, trajectory.detail
        kinds = [type(event).__name__ for event in world.events[trajectory.trajectory_id]]
        assert kinds.count("Ended") + kinds.count("Suspended") == 1


def check_tool_messages(world: World) -> None:
    """Every call begun in a turn is answered by one tool message, in the order of the calls; a broken one too."""
    tok = tokenizer()
    for trajectory in world.trajectories:
        happened = world.events[trajectory.trajectory_id]
        turn_text = ""
        for event in happened:
            kind = type(event).__name__
            if kind == "Generated":
                turn_text = turn_text * event.continued + tok.decode(event.ids)
            elif kind == "Wrote" and event.messages[0]["role"] == "tool":
                assert len(event.messages) == turn_text.count("<tool_call>")
                said = re.findall(r'"text": "(\w+)"}}\n</tool_call>', turn_text)
                if turn_text.count("<tool_call>") == turn_text.count('"echo"') == len(said):
                    assert [m["content"] for m in event.messages] == said or "stopped" in str(event.messages)
                for message, text in zip(event.messages, turn_text.split("<tool_call>")[1:], strict=True):
                    if "echo" not in text or not text.rstrip().removesuffix("<|im_end|>").endswith("</tool_call>"):
                        assert message["content"].startswith("error:")


def check_limits(graph: AgentGraph, world: World) -> None:
    """What was spent, counted from the events alone, never exceeds a limit (of a limit that no row routed)."""
    routed = {row.trigger for row in graph.transitions} & {"limit_reached"}
    for trajectory in world.trajectories:
        happened = world.events[trajectory.trajectory_id]
        events = [type(event).__name__ for event in happened]
        generations = events.count("Generated")
        for state, spec in graph.states.items():
            if spec.max_visits is not None and graph.handler_of(state) == "generate":
                sampled = [e for e in happened if type(e).__name__ == "Generated" and e.state == state]
                assert len(sampled) <= spec.max_visits
        if not routed:
            assert generations <= (graph.limits.assistant_turns or 0)
        assert events.count("Called") <= (graph.limits.tool_calls or 0)
        if graph.limits.response_tokens is not None and not routed:
            assert trajectory.response_tokens <= graph.limits.response_tokens
        if graph.limits.context_tokens is not None and not routed:
            assert all(len(s.tokens) <= graph.limits.context_tokens for s in trajectory.streams)


@given(agents(), SCRIPTS, st.integers(1, 3), st.sampled_from([None, 1]))
def test_streams_ends_and_bounds(graph: AgentGraph, script: list[Any], n: int, max_running: int | None) -> None:
    assert verify(graph) == []
    world = run_world(graph, script, n=n, max_running=max_running)
    for trajectory in world.trajectories:
        note(f"{trajectory} {trajectory.detail or ''}")
    check_streams(graph, world)
    check_ends(world, prompts=2, n=n)
    check_limits(graph, world)
    check_tool_messages(world)
    bound = prove(graph)
    for trajectory in world.trajectories:
        assert trajectory.transitions <= bound.transitions
        assert trajectory.turn <= bound.generations


@given(graphs(max_states=6, max_limit=4, plain=True), SCRIPTS, st.integers(0, 3))
def test_any_verified_graph_ends_within_its_bound(graph: AgentGraph, script: list[Any], seed: int) -> None:
    """Law 2 by running: graphs of any shape, every handler, routed limits, failing engines."""
    world = run_world(graph, script, n=2, prompts=1, seed=seed)
    bound = prove(graph)
    for trajectory in world.trajectories:
        note(f"{trajectory} {trajectory.detail or ''} {trajectory.visits}")
        assert trajectory.ended
        assert trajectory.transitions <= bound.transitions
        assert bound.generations is None or trajectory.turn <= bound.generations
    check_streams(graph, world)


SHIPPED = sorted((Path(__file__).parents[2] / "configs/agents").glob("*.yaml"))
CALCULATE = '<tool_call>\n{"name": "calculate", "arguments": {"left": 2, "operator": "+", "right": 2}}\n</tool_call>'
SOLVE = '<tool_call>\n{"name": "solve", "arguments": {"task": "What is 2 + 2?"}}\n</tool_call>'


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@settings(max_examples=15)
@given(st.lists(st.one_of(turns(), st.sampled_from([CALCULATE, SOLVE]).map(lambda text: Turn(text=text))), min_size=1))
def test_the_shipped_agents_keep_the_laws(path: Path, script: list[Turn]) -> None:
    graph = load_agent(path)
    world = run_world(graph, script, n=1, extra={"interaction_kwargs": {"turns": ["Go on.", "And now?"]}})
    check_streams(graph, world)
    check_ends(world, prompts=2, n=1)
    for trajectory in world.trajectories:
        assert trajectory.transitions <= prove(graph).transitions


@given(agents(), SCRIPTS)
def test_folding_the_events_gives_the_trajectory(graph: AgentGraph, script: list[Any]) -> None:
    world = run_world(graph, script, n=1)
    for trajectory in world.trajectories:
        events = [decode(encode(event)) for event in world.events[trajectory.trajectory_id]]
        assert Trajectory.fold(events) == trajectory


def outline(world: World) -> dict[str, Any]:
    """All that must not depend on the schedule: tokens, provenance, messages, reasons, scores. Not times."""
    return {
        t.trajectory_id: (
            t.stop_reason, t.visits, t.spent, t.turn_scores, t.tool_rewards,
            [(s.context, s.tokens.ids.tolist(), s.tokens.spans, s.messages) for s in t.streams],
        )
        for t in world.trajectories
    }  # fmt: skip


@given(
    agents(timeouts=False), CALM_SCRIPTS, st.sampled_from([0.0, 3.0]), st.integers(1, 5), st.sampled_from([None, 1, 2])
)
def test_results_do_not_depend_on_the_schedule(
    graph: AgentGraph, script: list[Any], slow: float, concurrency: int, max_running: int | None
) -> None:
    """Law 6: other delays, other batches, other admission: the same trajectories."""
    one = run_world(graph, script)
    other = run_world(graph, script, slow=slow, concurrency=concurrency, max_running=max_running)
    assert outline(one) == outline(other)
    assert seeds(one) == seeds(other)
    assert len(set(seeds(one).values())) == len(seeds(one)), "two generations share their randomness"
    assert not set(seeds(one).values()) & set(seeds(run_world(graph, script, seed=1)).values())


def seeds(world: World) -> dict[tuple[str, str, int], int]:
    """The seed of each generation, by trajectory, context and turn."""
    asked = [line.what for line in world.engine.log if isinstance(line.what, Request)]
    return {(r.trajectory_id, r.context, r.turn): r.sampling.seed for r in asked}


def chatml(messages: list[dict[str, Any]]) -> str:
    """The embedded model's template by hand, for histories whose assistant turns are given as sampled text."""
    text, open_tools = "", False
    for message in messages:
        if message["role"] == "tool":
            text += (
                "" if open_tools else "<|im_start|>user"
            ) + f"\n<tool_response>\n{message['content']}\n</tool_response>"
            open_tools = True
            continue
        text += "<|im_end|>\n" * open_tools
        open_tools = False
        text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    return text + "<|im_end|>\n" * open_tools


@given(agents(timeouts=False), CALM_SCRIPTS)
def test_a_stream_is_the_conversation_it_stands_for(graph: AgentGraph, script: list[Any]) -> None:
    """The stream's text is the hand-rendered conversation, with each assistant turn as it was sampled."""
    world = run_world(graph, script, n=1)
    tok = tokenizer()
    for trajectory in world.trajectories:
        for stream in trajectory.streams:
            if any(marker in str(m.get("content")) for m in stream.messages for marker in ("<|im", "<tool")):
                continue  # markers in text are the injection tests' matter
            ids, spans = stream.tokens.ids, stream.tokens.spans
            sampled = [tok.decode(ids[s.start : s.end]) for s in spans if s.owner.value == "model"]
            turns_of = {s.turn: "" for s in spans if s.owner.value == "model"}
            for span, text in zip([s for s in spans if s.owner.value == "model"], sampled, strict=True):
                turns_of[span.turn] += text
            if any(m["role"] == "assistant" for m in stream.messages[: stream.opening]):
                continue  # a split stream: earlier turns are part of its prompt, rendered afresh
            texts = iter(turns_of.values())
            messages = [
                m | {"content": next(texts).removesuffix("<|im_end|>")} if m["role"] == "assistant" else m
                for m in stream.messages[: stream.glued]
            ]
            if len(turns_of) != sum(m["role"] == "assistant" for m in messages):
                continue  # a turn that went on after its cut spans several generations
            rendered = chatml(messages) + ("" if sampled else "<|im_start|>assistant\n")
            text = tok.decode(ids)
            head = text[: text.index("<|im_start|>user")] if graph.tools and stream.context == "main" else ""
            assert text.removeprefix(head).rstrip() in (rendered.rstrip(), rendered.rstrip().removesuffix("<|im_end|>"))
