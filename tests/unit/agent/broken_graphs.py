"""Agents with one mistake.

Invariant: the agent is a valid one but for the mistake, which breaks the rule whose number comes with it.
"""

from __future__ import annotations

from hypothesis import strategies as st

from fsm_rollout.agent.graph import TERMINATED, AgentGraph
from fsm_rollout.agent.handlers import handler_spec
from fsm_rollout.testing.strategies.graphs import FINALS, graphs
from fsm_rollout.trajectory.events import PlainData


@st.composite
def broken_graphs(draw: st.DrawFn) -> tuple[AgentGraph, int]:
    """Draw an agent with one mistake, and the number of the rule of :mod:`fsm_rollout.agent.verify` that it breaks.

    What follows from the mistake may break other rules too.
    """
    # 1. A sound agent, a state of it, and the transitions that take what its handler declares first.
    graph = draw(graphs(max_states=4))
    data: PlainData = graph.model_dump()
    data["transitions"] = rows = [dict(row) for row in data["transitions"]]
    working = list(graph.working_states)
    state = draw(st.sampled_from(working))
    explicit = handler_spec(graph.handler_of(state)).triggers[0]
    explicit_rows = [i for i, row in enumerate(rows) if row["trigger"] == explicit and row["source"] == (state,)]
    # 2. The mistake, by the rule that it breaks.
    rule = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 18]))
    match rule:
        case 1:
            rows[draw(st.sampled_from(explicit_rows))]["dest"] = "NOWHERE"
        case 2:
            data["states"]["LOST"] = {"handler": "prompt"}
            rows.append({"trigger": "prompted", "source": ["LOST"], "dest": TERMINATED})
        case 3:
            for row in rows:
                if row["dest"] in FINALS and row["source"] == (state,):
                    row.update(dest="TRAP", stop_reason=None)
            rows[explicit_rows[-1]].update(dest="TRAP", stop_reason=None)
            data["states"]["TRAP"] = {"handler": "prompt", "max_visits": 1}
            rows.append({"trigger": "prompted", "source": ["TRAP"], "dest": "TRAP"})
        case 4:
            data["transitions"] = [row for i, row in enumerate(rows) if i not in explicit_rows]
        case 5:
            wrong = "written" if graph.handler_of(state) != "write" else "tools_done"
            spare = {"handler": "write" if wrong == "written" else "call_tools", "prompt": "x", "timeout": 1}
            data["states"]["SPARE"] = spare
            rows += [
                {"trigger": wrong, "source": [state], "dest": "SPARE"},
                {"trigger": wrong, "source": ["SPARE"], "dest": TERMINATED},
            ]
        case 6:
            rows[explicit_rows[-1]]["unless"] = [{"name": "text_contains", "argument": "never drawn before"}]
        case 7:
            rows.append({**rows[explicit_rows[-1]], "conditions": [{"name": "has_tool_calls"}]})
        case 8:
            rows.append({"trigger": "cancelled", "source": [state], "dest": TERMINATED})
        case 9:
            data["states"] |= {n: {"handler": "write", "prompt": n} for n in ("ROUND", "TRIP")}
            rows[explicit_rows[-1]].update(dest="ROUND", stop_reason=None)
            rows += [
                {"trigger": "written", "source": ["ROUND"], "dest": "TRIP"},
                {"trigger": "written", "source": ["TRIP"], "dest": "ROUND"},
            ]
        case 12:
            rows[explicit_rows[-1]]["conditions"] = [{"name": "text_contains", "argument": 5}]
        case 13:
            rows[explicit_rows[-1]].update(dest=state, stop_reason="lost")
        case 16:
            key: PlainData = {"sampling": {"top_k": 3}} if graph.handler_of(state) != "generate" else {"parallel": 3}
            data["states"][state] = {**data["states"][state], **key}
        case 17:
            rows.append({"trigger": "failed", "source": [TERMINATED], "dest": state})
        case 18:
            data["initial"] = TERMINATED
    return AgentGraph.model_validate(data), rule
