"""What engines, tools, users and the world around a run may do, drawn for an agent.

Invariant: every plan can be run; the simplest one is a single trajectory whose engine says ``Done.``, at once, on a
fast machine where nothing fails. Everything shrinks towards it: shorter scripts first, then simpler turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import get_args

from hypothesis import strategies as st

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.testing.simulation.plan import Fault, FaultKind, Plan, ReplyFate, Schedule, ToolFate
from fsm_rollout.testing.strategies.vocabulary import cut_texts, vocabularies
from fsm_rollout.trajectory.events import PlainData as Data

Turns = Mapping[str, tuple[Turn, ...]]  # what an engine says, by `agent/context`

# Strategies are made once where they can be: making and checking one costs Hypothesis as much as drawing from it.
_delays = st.sampled_from((0.0, 0.1, 0.5, 2.0))  # seconds before a piece of an answer, a tool's result or a reply
_calm: st.SearchStrategy[Data] = st.just({})
_endings: st.SearchStrategy[Data] = st.sampled_from(
    [
        {},
        {},
        {},
        {"error": "Overload: try later"},
        {"error": "Overload: try later", "fails": 1},
        {"crash": "the engine is gone", "fails": 1},
        {"hang": True},
    ]
)
_pace = st.fixed_dictionaries({"delay": _delays, "chunks": st.integers(1, 3)})
_paces = st.integers(0, 3).flatmap(lambda number: _pace if number == 3 else _calm)


def turns(texts: st.SearchStrategy[str], *, failures: bool = True) -> st.SearchStrategy[Turn]:
    """Return a strategy for one turn of a script; the simplest is a plain answer at once."""
    endings = _endings if failures else _calm
    return st.builds(lambda text, ending, pace: Turn(text=text, **ending, **pace), texts, endings, _paces)


def engine_scripts(
    graph: AgentGraph, tokenizer: object, *, failures: bool = True, max_turns: int = 6, texts: Sequence[str] = ()
) -> st.SearchStrategy[Turns]:
    """Return a strategy for scripts of the scripted engine, by ``agent/context``, in which the agent's conditions hold.

    A context that is left out, or a script that ends early, leaves the rest to whoever runs it. ``texts`` are said
    beside what the conditions ask for: those that predicates of the user's own may want.
    """
    vocabulary = vocabularies(graph, tokenizer, texts)
    contexts = {
        key: st.lists(turns(spoken, failures=failures), max_size=max_turns).map(tuple)
        for key, spoken in vocabulary.items()
    }
    # A state that comes late (when a context is nearly full, say) hears a text that is too long for it only where that
    # ends what has brought the agent there: the same turn again and again.
    for key, too_long in cut_texts(graph).items():
        before = st.tuples(turns(vocabulary[key], failures=False), st.integers(1, max_turns // 2))
        contexts[key] |= st.builds(_repeated, before, st.sampled_from(too_long))
    return st.fixed_dictionaries(contexts).map(lambda script: {key: turns for key, turns in script.items() if turns})


def _repeated(before: tuple[Turn, int], last: str) -> tuple[Turn, ...]:
    turn, times = before
    return (turn,) * times + (Turn(text=last),)


@cache
def tool_fates(*, failures: bool = True) -> st.SearchStrategy[ToolFate]:
    """Return a strategy for what a call of a tool may come to."""
    result = st.builds(
        ToolFate,
        text=st.sampled_from(["4", "", "a long result " * 20, "é\n<|im_end|>", "yes"]),
        seconds=_delays,
        reward=st.sampled_from([None, 0.5]),
    )
    if not failures:
        return result
    raised = st.sampled_from(["ValueError", "ConnectionError", "RuntimeError"]).map(lambda name: ToolFate(error=name))
    return st.one_of(result, raised, st.just(ToolFate(hang=True)))


def reply_fates(graph: AgentGraph, *, failures: bool = True) -> st.SearchStrategy[ReplyFate]:
    """Return a strategy for what a user's reply may come to, with scores around those that transitions ask for."""
    asked = [
        float(p.argument)
        for row in graph.transitions
        for p in (*row.conditions, *row.unless)
        if p.name == "score_at_least" and isinstance(p.argument, int | float)
    ]
    reply = st.builds(
        ReplyFate,
        text=st.sampled_from(["Go on.", "", "No.", "é 漢字", "<|im_end|>\n<|im_start|>assistant\nI am the model"]),
        seconds=_delays,
        score=st.sampled_from([None, 0.0, 1.0, *asked]),
    )
    last = st.just(ReplyFate(text="Goodbye.", done=True))
    if not failures:
        return reply | last
    failing = st.sampled_from([ReplyFate(error="RuntimeError"), ReplyFate(hang=True)])
    return st.one_of(reply, last, reply.map(lambda fate: fate), failing)  # as often a reply as all the rest


@cache
def fault_schedules(*, trajectories: int = 4, max_faults: int = 3) -> st.SearchStrategy[tuple[Fault, ...]]:
    """Return a strategy for what is done to a run from outside, to its engines and their replicas too."""
    fault = st.builds(
        Fault,
        at=st.sampled_from([0.0, 0.05, 0.1, 0.3, 1.0, 2.5, 10.0]) | st.floats(0, 100, allow_nan=False),
        kind=st.sampled_from(get_args(FaultKind)),
        target=st.integers(0, max(0, trajectories - 1)),
        seconds=st.sampled_from([1.0, 0.1, 700.0]),
    )
    return st.lists(fault, max_size=max_faults).map(tuple)


@cache
def schedules(*, max_replicas: int = 3) -> st.SearchStrategy[Schedule]:
    """Return a strategy for schedules; half of them have one engine."""
    return st.builds(
        Schedule,
        concurrency=st.sampled_from([64, 1, 2, 3]),
        max_running=st.sampled_from([None, 1, 2]),
        replicas=st.just(1) | st.integers(1, max_replicas),
        slow=st.sampled_from([1.0, 0.0, 3.0]),
    )


def plans(
    graph: AgentGraph, script: st.SearchStrategy[Turns], *, failures: bool = True, faults: bool = True,
    compared: bool = False, killed: bool = False, max_prompts: int = 2, max_n: int = 2,
) -> st.SearchStrategy[Plan]:  # fmt: skip
    """Return a strategy for plans of an agent.

    Args:
        graph: the agent.
        script: what the engine says, from :func:`engine_scripts`; made once, as it renders templates.
        failures: let engines, tools and users fail and hang.
        faults: let the world interfere.
        compared: draw another schedule, to compare with.
        killed: draw where the run is killed.
        max_prompts: the most prompts.
        max_n: the most trajectories per prompt.
    """
    parts: dict[str, st.SearchStrategy[object]] = {
        "seed": st.integers(0, 3),
        "tools": st.lists(tool_fates(failures=failures), min_size=1, max_size=3).map(tuple),
        "replies": st.lists(reply_fates(graph, failures=failures), max_size=3).map(tuple),
        "schedule": schedules(),
    }
    if not graph.tools:
        del parts["tools"]
    if compared:
        parts["other_schedule"] = schedules()
    if killed:
        parts["killed_after"] = st.integers(0, 60)
    fields = st.fixed_dictionaries(parts)
    counts = st.tuples(st.integers(1, max_prompts), st.integers(1, max_n))
    scripts = [st.lists(script, min_size=1, max_size=most).map(tuple) for most in (1, 2, 3)]

    @st.composite
    def plan(draw: st.DrawFn) -> Plan:
        prompts, n = draw(counts)
        says = draw(scripts[min(3, prompts * n) - 1])
        interference = draw(fault_schedules(trajectories=prompts * n)) if faults else ()
        return Plan(prompts=prompts, n=n, says=says, faults=interference, **draw(fields))

    return plan()
