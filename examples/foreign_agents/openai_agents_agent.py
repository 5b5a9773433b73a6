"""An agent of the OpenAI Agents SDK that solves arithmetic with a calculator. It knows nothing of fsm_rollout.

Its model is where OPENAI_BASE_URL says; the task comes as TASK.
"""

import json
import os

from agents import Agent, FunctionTool, OpenAIChatCompletionsModel, RunContextWrapper, Runner, set_tracing_disabled
from openai import AsyncOpenAI

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


async def calculate(context: RunContextWrapper, arguments: str) -> str:
    """Carry out a call."""
    call = json.loads(arguments)
    left, right = call["left"], call["right"]
    return str({"+": left + right, "-": left - right, "*": left * right}[call["operator"]])


set_tracing_disabled(True)
solver = Agent(
    name="solver",
    instructions="You solve arithmetic with the calculator, one operation at a time.",
    tools=[
        FunctionTool(
            name="calculate",
            description="Apply one arithmetic operation to two whole numbers.",
            params_json_schema=PARAMETERS,
            on_invoke_tool=calculate,
        )
    ],
    model=OpenAIChatCompletionsModel(os.environ["OPENAI_MODEL"], AsyncOpenAI(timeout=600)),
)
Runner.run_sync(solver, os.environ["TASK"], max_turns=8)
