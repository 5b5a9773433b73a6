"""The laws of DESIGN, held on drawn agents, engines that misbehave, and schedules, with the kit that ships.

They hold for runs of this process, of shards, and of a training service whose client asks for them over HTTP.

The oracles are :mod:`fsm_rollout.testing.simulation.laws`; those that need this folder's own tools are here. Each reads
the other side's log (the engine's, the tools'); none calls the code under test.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, note
from hypothesis import strategies as st

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.loader import load_agent
from fsm_rollout.agent.proof import prove
from fsm_rollout.agent.verify import verify
from fsm_rollout.batch.part import joined_parts, parts_of
from fsm_rollout.batch.rows import rows
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.scheduler.leased_group import LeasedGroup
from fsm_rollout.testing.plugin.agent_checks import judge
from fsm_rollout.testing.simulation import laws
from fsm_rollout.testing.simulation.plan import Fault, Plan, Schedule
from fsm_rollout.testing.simulation.simulate import Around, Simulation, embedded_tokenizer, simulate, without_clocks
from fsm_rollout.testing.strategies import engine_scripts, plans
from fsm_rollout.trajectory.events import Generated, MessagesAppended
from tests.graphs import graphs
from tests.kit import ROOT
from tests.laws.agents import agents
from tests.laws.world import turns
from tests.paired_shards import sharing
from tests.remote import served
from tests.runs import agent
from tests.sessions import ends_sessions

FAILURES = {"failed:Overload", "failed:EngineError", "failed:RuntimeError"}
"""What the drawn world may be blamed for; any other failure would be our own."""


SIMPLEST = agent(agent="law", limits={"assistant_turns": 1})


@pytest.fixture(autouse=True, scope="module")
def _tokenizer() -> None:
    """Load it before anything is drawn: loading uses random numbers, which Hypothesis does not like in strategies."""
    assert ChatTemplate(embedded_tokenizer()).source


@st.composite
def drawn(draw: st.DrawFn, graphs_: st.SearchStrategy[AgentGraph], **what: Any) -> tuple[AgentGraph, Plan]:
    """An agent, and a plan for it."""
    graph = draw(graphs_)
    script = engine_scripts(graph, embedded_tokenizer(), failures=what.get("failures", True))
    return graph, draw(plans(graph, script, **what))


@st.composite
def said(draw: st.DrawFn, *, failures: bool, **what: Any) -> tuple[AgentGraph, Plan]:
    """An agent of :func:`agents`, and a plan in which this folder's own tools are called."""
    graph = draw(agents(timeouts=failures))
    several = st.lists(turns(failures=failures), min_size=1, max_size=6).map(tuple)
    script = st.fixed_dictionaries({f"law/{context}": several for context in ("main", "critic")})
    return graph, draw(plans(graph, script, failures=failures, **what))


def everything(run: Simulation) -> Simulation:
    """Hold a run to every law there is."""
    for trajectory in run.trajectories:
        note(f"{trajectory} {trajectory.detail or ''} {trajectory.visits}")
    held = [laws.keeps_running, laws.comes_back, laws.stays_within(prove(run.graph)), laws.keeps_limits]
    held += [laws.keeps_streams, laws.keeps_events, ends_sessions, fails_only_as_drawn, come_with_their_rows]
    return judge(run, held)


def come_with_their_rows(run: Simulation) -> None:
    """Law 7, of groups that ran elsewhere: the rows that came with them are those of the trajectories that did."""
    groups = [group for group in run.groups if isinstance(group, LeasedGroup)]
    if groups:
        part = joined_parts(parts_of(groups), [group.group_id for group in groups], (), None)
        every = [trajectory for group in groups for trajectory in group.all]
        assert part.rows.split() == rows(every, state_names=part.rows.state_names)


def fails_only_as_drawn(run: Simulation) -> None:
    """What failed was drawn to fail; tools that were not called leave a model with nothing new to answer."""
    for trajectory in run.trajectories:
        reason = str(trajectory.stop_reason)
        if reason.startswith("failed:") and not str(trajectory.detail).startswith("[no-new-message]"):
            assert reason in FAILURES, trajectory.detail


WORKERS = st.integers(1, 3)
# By whom runs are run: this process and shards, or a service that loses answers, whose client has what the laws judge.
Runner = Callable[..., Around | None]
by_all = pytest.mark.parametrize(
    "by", [pytest.param(sharing, id="here"), pytest.param(served, id="at a service", marks=pytest.mark.real)]
)


@by_all
@given(drawn(agents()), WORKERS)
def test_runs_keep_the_laws(by: Runner, case: tuple[AgentGraph, Plan], workers: int) -> None:
    graph, plan = case
    assert verify(graph) == []
    everything(simulate(graph, plan, around=by(workers)))


@by_all
@given(said(failures=True), WORKERS)
def test_runs_with_real_tools_keep_the_laws(by: Runner, case: tuple[AgentGraph, Plan], workers: int) -> None:
    graph, plan = case
    run = everything(simulate(graph, plan, real_tools=True, around=by(workers)))
    answers_every_call(run)


@by_all
@given(drawn(graphs(max_states=6, max_limit=4, plain=True), max_prompts=1), WORKERS)
def test_any_verified_graph_keeps_the_laws(by: Runner, case: tuple[AgentGraph, Plan], workers: int) -> None:
    """Graphs of any shape: every handler, routed limits, failing engines."""
    everything(simulate(*case, around=by(workers)))


@by_all
@given(said(failures=False, faults=False, compared=True), WORKERS)
def test_results_do_not_depend_on_the_schedule(by: Runner, case: tuple[AgentGraph, Plan], workers: int) -> None:
    """Law 6: other delays, batches, admission and workers: the same trajectories, asked for with the same seeds."""
    graph, plan = without_clocks(case[0]), case[1]
    one = simulate(graph, plan, real_tools=True)
    other = simulate(graph, plan.rescheduled(), real_tools=True, around=by(workers))
    laws.same_results(one, other, "another schedule")
    assert seeds(one) == seeds(other)
    assert len(set(seeds(one).values())) == len(seeds(one)), "two generations share their randomness"
    elsewhere = simulate(graph, plan.model_copy(update={"seed": plan.seed + 1}), real_tools=True)
    assert not set(seeds(one).values()) & set(seeds(elsewhere).values())


KILLS = st.builds(
    Fault, at=st.sampled_from([0.05, 0.55, 1.05, 2.55]), kind=st.just("kill_replica"), target=st.integers(0, 2)
)
CHANGES = st.builds(
    Fault,
    at=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    kind=st.sampled_from(["update_weights", "pause", "add_replica", "remove_replica"]),
    target=st.integers(0, 3),
    seconds=st.sampled_from([1.0, 0.0, 0.3]),
)


@by_all
@given(
    drawn(agents(), failures=False, faults=False),
    st.tuples(st.lists(KILLS, max_size=3), st.lists(CHANGES, max_size=4)).map(lambda two: (*two[0], *two[1])),
    st.integers(1, 3),
)
@example(
    (SIMPLEST, Plan(says=({"law/main": (Turn(text="4", delay=9.0),)},))),
    tuple(Fault(at=at, kind="update_weights") for at in range(1, 5)), 1,
)  # fmt: skip
def test_results_do_not_depend_on_which_replicas_come_leave_and_are_lost(
    by: Runner, case: tuple[AgentGraph, Plan], faults: tuple[Fault, ...], replicas: int
) -> None:
    """Laws 4, 6 and 8: what a lost replica had goes on elsewhere, each token with the weights that sampled it."""
    graph, plan = without_clocks(case[0]), case[1]
    schedule = plan.schedule.model_copy(update={"replicas": replicas})
    whole = simulate(graph, plan)
    plan = plan.model_copy(update={"schedule": schedule, "faults": faults})
    lossy = everything(simulate(graph, plan, around=by(1)))
    assert versionless(whole) == versionless(lossy)
    updates = [fault.at for fault in faults if fault.kind == "update_weights"]
    assert sum(at < lossy.seconds for at in updates) <= lossy.engine.weight_version <= len(updates)
    chunks_sent = [line.what for line in lossy.log if isinstance(line.what, Chunk)]
    for earlier, later in pairwise(chunks_sent):
        assert earlier.weight_version <= later.weight_version, "a replica came back with weights that are over"


@by_all
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_an_answer_goes_on_where_its_lost_replica_stood_with_the_weights_of_now(by: Runner, replicas: int) -> None:
    """Replicas die in the middle of answers that new weights have met already."""
    says = ({"law/main": (Turn(text="It is four, I am quite sure.", delay=0.5, chunks=6),)},)
    plan = Plan(prompts=3, n=2, says=says)
    kills = [Fault(at=0.7 + 0.6 * each, kind="kill_replica", target=each) for each in range(replicas)]
    faults = (Fault(at=0.2, kind="update_weights"), *kills)
    schedule = Schedule(replicas=replicas)
    lossy = simulate(SIMPLEST, plan.model_copy(update={"faults": faults, "schedule": schedule}), around=by(1))
    judge(lossy, [laws.keeps_running, laws.comes_back, laws.keeps_streams, laws.keeps_events])
    assert versionless(lossy) == versionless(simulate(SIMPLEST, plan))
    assert {line.what.weight_version for line in lossy.log if isinstance(line.what, Chunk) and line.what.ids} == {1}


@by_all
def test_what_a_replica_says_after_it_was_given_up_is_in_no_stream_and_in_no_log(by: Runner) -> None:
    """It failed for others' dispatches, and at that moment more of its tokens were on their way."""
    solve = '<tool_call>\n{"name": "solve", "arguments": {"task": ""}}\n</tool_call>'
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"left": 0, "operator": "+", "right": 0}}}}\n</tool_call>'
        for name in ("calculate", "calculate", "no_calculate")
    ]
    dies = Turn(text="Done.", crash="the engine is gone", fails=1)
    says = {
        "delegate/main": (Turn(text="\n".join([solve] * 3)), Turn(text="Done.")),
        "tool_agent/main": (Turn(text="\n".join(calls[:2])), Turn(text=calls[2]), dies),
    }
    plan = Plan(says=(says,), schedule=Schedule(max_running=1, replicas=3))
    run = simulate(load_agent(ROOT / "configs/agents/delegate.yaml"), plan, around=by(1))
    judge(run, [laws.keeps_running, laws.keeps_streams])
    assert {t.stop_reason for t in run.trajectories} == {"answered"}, "nobody is lost for what befell others"
    assert any("#" in line.what.request_id for line in run.log if isinstance(line.what, Request))


@by_all
def test_a_pause_that_meets_only_the_dead_is_not_kept(by: Runner) -> None:
    faults = tuple(Fault(at=0.0, kind=kind) for kind in ("kill_replica", "update_weights"))
    (trajectory,) = simulate(SIMPLEST, Plan(faults=faults), around=by(1)).trajectories
    assert trajectory.stop_reason == "answered"


def versionless(run: Simulation) -> dict[str, Any]:
    """What each trajectory came to, but for the versions of its tokens."""
    return {
        t.trajectory_id: (
            t.stop_reason,
            dict(t.visits),
            [(s.tokens.ids.tolist(), s.tokens.response_mask().tolist(), s.tokens.response_logprobs().tolist())
             for s in t.streams],
        )
        for t in run.trajectories
    }  # fmt: skip


@by_all
@given(drawn(agents(), failures=False, faults=False, killed=True))
def test_results_do_not_depend_on_where_a_run_was_killed(by: Runner, case: tuple[AgentGraph, Plan]) -> None:
    """Law 6: whatever is journalled by then is enough to come to the same."""
    graph, plan = without_clocks(case[0]), case[1]
    whole = simulate(graph, plan)
    gone_on = simulate(graph, plan, resume=whole.killed(plan.killed_after), around=by(1))
    judge(gone_on, [laws.keeps_running, laws.comes_back])
    laws.same_results(whole, gone_on, "a kill", resumed=True)


def seeds(run: Simulation) -> dict[tuple[str, str, int], int]:
    """The seed of each generation, by trajectory, context and turn."""
    asked = [line.what for line in run.log if isinstance(line.what, Request)]
    return {(r.trajectory_id, r.context, r.turn): r.sampling.seed for r in asked}


def answers_every_call(run: Simulation) -> None:
    """Every call begun in a turn is answered by one tool message, in the order of the calls; a broken one too."""
    tok = embedded_tokenizer()
    for trajectory in run.trajectories:
        turn_text = ""
        for event in run.events[trajectory.trajectory_id]:
            if isinstance(event, Generated):
                turn_text = turn_text * event.continued + tok.decode(event.ids)
            elif isinstance(event, MessagesAppended) and event.messages[0]["role"] == "tool":
                assert len(event.messages) == turn_text.count("<tool_call>")
                texts = re.findall(r'"text": "(\w+)"}}\n</tool_call>', turn_text)
                if turn_text.count("<tool_call>") == turn_text.count('"echo"') == len(texts):
                    assert [m["content"] for m in event.messages] == texts or "stopped" in str(event.messages)
                for message, text in zip(event.messages, turn_text.split("<tool_call>")[1:], strict=True):
                    if "echo" not in text or not text.rstrip().removesuffix("<|im_end|>").endswith("</tool_call>"):
                        assert message["content"].startswith("error:")


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


@by_all
@given(said(failures=False, faults=False, max_n=1))
def test_a_stream_is_the_conversation_it_stands_for(by: Runner, case: tuple[AgentGraph, Plan]) -> None:
    """The stream's text is the hand-rendered conversation, with each assistant turn as it was sampled."""
    graph, plan = case
    run = simulate(graph, plan, real_tools=True, around=by(1))
    tok = embedded_tokenizer()
    for trajectory in run.trajectories:
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


@by_all
@given(drawn(agents()))
def test_a_plan_replays_a_run_exactly(by: Runner, case: tuple[AgentGraph, Plan]) -> None:
    """One line of text is the whole run: the same events, at the same moments."""
    graph, plan = case
    once, again = (simulate(graph, each, around=by(1)) for each in (plan, Plan.of_line(plan.line())))
    dates = {"date", "epoch"}

    def told(run: Simulation) -> list[tuple[str, Any]]:
        return [(name, {k: getattr(e, k) for k in e.__struct_fields__ if k not in dates}) for name, e in run.order]

    assert told(once) == told(again)
    assert [(line.at, line.what) for line in once.log] == [(line.at, line.what) for line in again.log]


@by_all
def test_the_simplest_plan_is_the_simplest_run(by: Runner) -> None:
    (trajectory,) = simulate(SIMPLEST, Plan(says=({"law/main": (Turn(text="4"),)},)), around=by(1)).trajectories
    assert list(trajectory.assistant_texts()) == ["4"]


@by_all
@given(said(failures=False, faults=False), WORKERS, st.lists(st.floats(0, 1.5), min_size=10, max_size=10))
@example(
    (SIMPLEST, Plan(prompts=24, says=({"law/main": (Turn(text="4", delay=1.0),)},), schedule=Schedule(concurrency=1))),
    1, [0.5 + 2.6 * kill for kill in range(10)],
)  # fmt: skip
def test_who_is_killed_at_ten_points_loses_nothing(
    by: Runner, case: tuple[AgentGraph, Plan], workers: int, moments: list[float]
) -> None:
    """Each trajectory goes on elsewhere from its last event, and comes to the end that it comes to undisturbed."""
    graph, plan = without_clocks(case[0]), case[1]
    calm = simulate(graph, plan.model_copy(update={"schedule": Schedule()}), real_tools=True)
    shaken = simulate(graph, plan, real_tools=True, around=by(workers, [calm.seconds * part for part in moments]))
    laws.keeps_running(shaken)
    laws.comes_back(shaken)
    laws.same_results(calm, shaken, "kills")
