"""A LangGraph agent with a shell, in the folder where it is started. It knows nothing of fsm_rollout.

Its model is where OPENAI_BASE_URL says; the task comes as TASK.
"""

import os
import subprocess

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def shell(command: str) -> str:
    """Run a command in the repository; its output comes back."""
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return f"exit code {done.returncode}\n{done.stdout[-4000:]}"


model = ChatOpenAI(model=os.environ["OPENAI_MODEL"], timeout=600, max_retries=0).bind_tools([shell])


def think(state: MessagesState) -> MessagesState:
    """Ask the model."""
    return {"messages": [model.invoke(state["messages"])]}


builder = StateGraph(MessagesState)
builder.add_node("think", think)
builder.add_node("tools", ToolNode([shell]))
builder.add_edge(START, "think")
builder.add_conditional_edges("think", tools_condition)
builder.add_edge("tools", "think")

SYSTEM = "You mend the repository in the present folder, by its shell. Say what you have done at the end."
builder.compile().invoke({"messages": [SystemMessage(SYSTEM), HumanMessage(os.environ["TASK"])]})
