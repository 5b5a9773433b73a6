"""``thinking_tokens``: whatever a model says, and wherever a run is set aside or killed, turns think within it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsm_rollout.agent.graph import POLICY, AgentGraph
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.testing import strategies
from fsm_rollout.testing.plugin.agent_checks import judge
from fsm_rollout.testing.simulation import laws
from fsm_rollout.testing.simulation.plan import Fault, Plan
from fsm_rollout.testing.simulation.simulate import Simulation, embedded_tokenizer, simulate, without_clocks
from fsm_rollout.testing.strategies import plans
from fsm_rollout.trajectory.enums import Trigger
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.tokens import Owner
from tests.laws.agents import agents
from tests.laws.test_laws import everything
from tests.laws.world import TEXTS, call

OPENING, CLOSE = "<think>\n", "\n</think>\n\n"
SOURCE = str(embedded_tokenizer().chat_template)
PREFILLED = SOURCE.replace(
    "add_generation_prompt -%}\n    {{- '<|im_start|>assistant\\n'",
    "add_generation_prompt -%}\n    {{- '<|im_start|>assistant\\n<think>\\n'",
)
THOUGHTS = st.sampled_from(
    ["", "hm", "Four, I think.", f"I could ask: {call('echo', 'thought')} or", "many words " * 9]
)


@pytest.fixture(autouse=True, scope="module")
def _tokenizer() -> None:
    """Load it before anything is drawn: loading uses random numbers, which Hypothesis does not like in strategies."""
    assert PREFILLED != SOURCE
    assert ChatTemplate(embedded_tokenizer(), chat_template=PREFILLED).thinking.opening == "<think>"


@st.composite
def thinkers(draw: st.DrawFn, **what: Any) -> tuple[AgentGraph, Plan, Sampling]:
    """An agent whose turns begin in their thinking or may open it, what it says, and its budget."""
    prefilled = draw(st.booleans())
    graph = draw(agents(timeouts=False))
    # What is opened in the midst of a turn is closed, too; but what was sampled by then is dropped, and in no stream.
    goes_on = any(row.trigger == Trigger.TRUNCATED for row in graph.transitions)
    opened = st.just("") if prefilled or goes_on else st.sampled_from(["", OPENING])
    end = st.sampled_from(["", CLOSE, "</think>"])
    texts = st.tuples(opened, THOUGHTS, end, st.sampled_from(TEXTS)).map("".join)
    several = st.lists(strategies.turns(texts, failures=False), min_size=1, max_size=4).map(tuple)
    if prefilled:
        main = graph.context("main").model_copy(update={"chat_template": PREFILLED})
        graph = graph.model_copy(update={"contexts": {**graph.contexts, "main": main}})
    script = st.fixed_dictionaries({f"law/{context}": several for context in ("main", "critic")})
    plan = draw(plans(graph, script, failures=False, **what))
    return without_clocks(graph), plan, Sampling(thinking_tokens=draw(st.integers(0, 12)))


def thinks_within(most: int) -> laws.Law:
    """Return the law for a budget: in each turn's text, token by token, by who put it there."""

    def law(run: Simulation) -> None:
        decode = run.tokenizer.decode
        for trajectory in run.trajectories:
            for stream in trajectory.streams:
                ids, owners = stream.tokens.ids.tolist(), [s.owner for s in stream.tokens.spans for _ in range(len(s))]
                for part in stream.parts if stream.engine == POLICY else ():  # the run's sampling is the policy's
                    if part.message < stream.opening or stream.messages[part.message]["role"] != "assistant":
                        continue
                    inside, since, count = decode(ids[: part.start]).endswith(OPENING), part.start, 0
                    written: list[int] = []
                    for at in range(part.start, part.start + part.length):
                        if owners[at] is Owner.MODEL:
                            assert not written or decode(written) == CLOSE, "all of the closing, and nothing else"
                            written, count = [], count + inside
                        else:
                            assert (inside and count == most) or written, "closed where the budget is used up"
                            written.append(ids[at])
                        if ("</think>" if inside else "<think>") in decode(ids[since : at + 1]):
                            inside, since = not inside, at + 1
                    assert count <= most

    return law


@settings(max_examples=100)
@given(thinkers())
def test_no_turn_thinks_beyond_its_budget(case: tuple[AgentGraph, Plan, Sampling]) -> None:
    graph, plan, sampling = case
    assert sampling.thinking_tokens is not None
    run = everything(simulate(graph, plan, sampling=sampling))
    judge(run, [thinks_within(sampling.thinking_tokens)])


@settings(max_examples=100)
@given(thinkers(faults=False, killed=True), st.floats(0, 4))
def test_rows_do_not_depend_on_where_it_was_set_aside_or_killed(
    case: tuple[AgentGraph, Plan, Sampling], at: float
) -> None:
    """Within the thinking, between the requests of a turn, behind its closing."""
    graph, plan, sampling = case
    whole = simulate(graph, plan, sampling=sampling)
    killed = whole.killed(plan.killed_after)
    faults = tuple(Fault(at=at, kind="suspend", target=target) for target in range(plan.prompts * plan.n))
    aside = simulate(graph, plan.model_copy(update={"faults": faults}), sampling=sampling)
    for history, what in [(killed, "a kill"), ([*aside.events.values()], "a suspension")]:
        gone_on = simulate(graph, plan, sampling=sampling, resume=history)
        judge(gone_on, [laws.keeps_running, laws.comes_back, thinks_within(sampling.thinking_tokens or 0)])
        laws.same_results(whole, gone_on, what, resumed=True)
