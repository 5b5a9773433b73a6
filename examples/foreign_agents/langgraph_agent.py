"""A LangGraph agent that solves arithmetic with a calculator. It knows nothing of fsm_rollout.

Its model is where OPENAI_BASE_URL says; the task comes as TASK.
"""

import os

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

# The embedded model is tiny: it knows this tool by these very words, so the schema is written out.
PARAMETERS = {
    "type": "object",
    "properties": {
        "left": {"type": "integer", "description": "The first number."},
        "operator": {"type": "string", "enum": ["+", "-", "*"], "description": "What to do with them."},
        "right": {"type": "integer", "description": "The second number."},
    },
    "required": ["left", "operator", "right"],
}


@tool
def calculate(left: int, operator: str, right: int) -> int:
    """Apply one arithmetic operation to two whole numbers."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


shown = {"name": "calculate", "description": calculate.description, "parameters": PARAMETERS}
model = ChatOpenAI(model=os.environ["OPENAI_MODEL"], timeout=600).bind_tools([{"type": "function", "function": shown}])


def think(state: MessagesState) -> MessagesState:
    """Ask the model."""
    return {"messages": [model.invoke(state["messages"])]}


builder = StateGraph(MessagesState)
builder.add_node("think", think)
builder.add_node("tools", ToolNode([calculate]))
builder.add_edge(START, "think")
builder.add_conditional_edges("think", tools_condition)
builder.add_edge("tools", "think")

SYSTEM = "You solve arithmetic with the calculator, one operation at a time."
builder.compile().invoke({"messages": [SystemMessage(SYSTEM), HumanMessage(os.environ["TASK"])]})
