"""Agents for the law tests: one frame that every feature can be switched into."""

from typing import Any

from hypothesis import strategies as st

from fsm_rollout.agent.graph import AgentGraph


@st.composite
def agents(draw: st.DrawFn, *, timeouts: bool = True) -> AgentGraph:
    """An agent that can be proven to end; tools, a user, a critic, compaction and routed limits come and go."""
    tools = draw(st.booleans())
    user = draw(st.booleans())
    critic = draw(st.booleans())
    compacts = tools and draw(st.booleans())
    routed = draw(st.booleans())
    limits: dict[str, Any] = {
        "assistant_turns": draw(st.integers(1, 6)),
        "tool_calls": draw(st.integers(0, 4)),
        "user_turns": draw(st.integers(0, 3)),
        "wall_seconds": draw(st.sampled_from([2.0, 10_000.0] if timeouts else [10_000.0])),
    }
    for name, values in {"bad_calls": [0, 1], "response_tokens": [8, 40, 90, 300], "context_tokens": [40, 150]}.items():
        value = draw(st.sampled_from([None, *values]))
        if value is not None:
            limits[name] = value
    timeout = draw(st.sampled_from([0.3, 5.0])) if timeouts else 5_000.0
    generate = {"sampling": {"max_tokens": draw(st.sampled_from([200, 4, 16, 64]))}, "timeout": timeout}
    states: dict[str, Any] = {"PENDING": {}, "GENERATING": generate}
    rows: list[dict[str, Any]] = [{"trigger": "prompted", "source": "PENDING", "dest": "GENERATING"}]

    def row(trigger: str, source: str, dest: str, **more: Any) -> None:
        rows.append({"trigger": trigger, "source": source, "dest": dest, **more})

    goal = "TERMINATED"
    if critic:
        states["REVIEWING"] = {
            "handler": "generate", "context": "critic", "prompt": "Check: {{ texts.main[-1] }}",
            "reset": draw(st.booleans()), "max_visits": draw(st.integers(1, 3)), "timeout": timeout,
            "sampling": {"max_tokens": 16},
        }  # fmt: skip
        states["REVISING"] = {"handler": "write", "prompt": "Again: {{ texts.critic[-1] }}"}
        row("generated", "REVIEWING", "TERMINATED", conditions=[{"name": "text_contains", "argument": "ACCEPT"}])
        row("generated", "REVIEWING", "REVISING")
        row("written", "REVISING", "GENERATING")
        goal = "REVIEWING"
    if user:
        states["INTERACTING"] = {"timeout": 5_000.0}
        row("replied", "INTERACTING", "GENERATING")
        row("interaction_done", "INTERACTING", goal)
        goal = "INTERACTING"
    if tools:
        states["PROCESSING_TOOLS"] = {"timeout": timeout, "parallel": draw(st.sampled_from([None, 1, 2]))}
        row("generated", "GENERATING", "PROCESSING_TOOLS", conditions=[{"name": "has_tool_calls"}])
        if compacts:
            states["RESUMING"] = {"handler": "write", "reset": True, "prompt": "{{ task }} So far: {{ text }}"}
            most = min(90, limits.get("context_tokens", 90) - 1)
            over = {"name": "context_over", "argument": draw(st.integers(30, most))}
            row("tools_done", "PROCESSING_TOOLS", "RESUMING", conditions=[over])
            row("written", "RESUMING", "GENERATING")
        row("tools_done", "PROCESSING_TOOLS", "GENERATING")
        if draw(st.booleans()):
            row("timed_out", "PROCESSING_TOOLS", "GENERATING")
    row("generated", "GENERATING", goal)
    if draw(st.booleans()):
        row("truncated", "GENERATING", "GENERATING")
    if routed:
        states["SUMMARISING"] = {
            "handler": "generate", "prompt": "Sum up.", "max_visits": 1, "timeout": timeout,
            "sampling": {"max_tokens": 8},
        }  # fmt: skip
        row("generated", "SUMMARISING", "TERMINATED", stop_reason="summed_up")
        row("limit_reached", "GENERATING", "SUMMARISING")
    tool_specs = {
        name: {"use": f"tests.law_tools:{name}", "timeout": 2.0 if timeouts else 5_000.0, "response_tokens": 24}
        for name in (("echo", "fail", "hang") if timeouts else ("echo", "fail"))
    }
    contexts: dict[str, Any] = {"main": {"history": draw(st.sampled_from(["keep", "split"]))}}
    if critic:
        contexts["critic"] = {"engine": draw(st.sampled_from(["judge", "policy"]))}
    return AgentGraph(
        agent="law",
        contexts=contexts,
        limits=limits,
        tools=tool_specs if tools else {},
        interaction={"use": "tests.law_tools:Chatty", "kwargs": {"replies": 2}} if user else None,
        states=states,
        transitions=rows,
    )
