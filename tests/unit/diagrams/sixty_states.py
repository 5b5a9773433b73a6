"""An agent of sixty states: 29 steps that may each call tools, every fifth of which may go back."""

import json

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.loader import loads

STEPS = 29


def sixty_states() -> AgentGraph:
    states: dict[str, object] = {"PENDING": {}}
    rows: list[dict[str, object]] = [{"trigger": "prompted", "source": "PENDING", "dest": "STEP_0"}]
    for step in range(STEPS):
        own, tools = f"STEP_{step}", f"TOOLS_{step}"
        states[own] = {"handler": "generate", "prompt": "Go on.", "timeout": 60}
        states[tools] = {"handler": "call_tools", "timeout": 30}
        rows.append({"trigger": "generated", "source": own, "dest": tools, "conditions": "has_tool_calls"})
        if step % 5 == 4:
            again = {"text_contains": "AGAIN"}
            rows.append({"trigger": "generated", "source": own, "dest": f"STEP_{step - 3}", "conditions": again})
        following = f"STEP_{step + 1}" if step + 1 < STEPS else "TERMINATED"
        rows += [
            {"trigger": "generated", "source": own, "dest": following},
            {"trigger": "tools_done", "source": tools, "dest": own},
        ]
    rows.append({"trigger": "timed_out", "source": "*", "dest": "TERMINATED", "stop_reason": "too_slow"})
    agent = {
        "agent": "sixty",
        "limits": {"assistant_turns": 90, "tool_calls": 90, "response_tokens": 8192, "wall_seconds": 900},
        "tools": {"calculate": {"use": "fsm_rollout.tools.calculator:calculate", "timeout": 5}},
        "states": {**states, "TERMINATED": {}},
        "transitions": rows,
    }
    return loads(json.dumps(agent), name="sixty.yaml")  # JSON is YAML
