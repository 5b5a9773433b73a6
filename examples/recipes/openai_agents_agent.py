"""An agent of the OpenAI Agents SDK with a shell, in the folder where it is started. It knows nothing of fsm_rollout.

Its model is where OPENAI_BASE_URL says, in OpenAI's responses, the SDK's default; the task comes as TASK.
"""

import os
import subprocess

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def shell(command: str) -> str:
    """Run a command in the repository; its output comes back."""
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return f"exit code {done.returncode}\n{done.stdout[-4000:]}"


set_tracing_disabled(True)
mender = Agent(
    name="mender",
    instructions="You mend the repository in the present folder, by its shell. Say what you have done at the end.",
    tools=[shell],
    model=os.environ["OPENAI_MODEL"],
)
Runner.run_sync(mender, os.environ["TASK"], max_turns=12)
