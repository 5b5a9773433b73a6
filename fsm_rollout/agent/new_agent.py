"""The agent that ``fsm-rollout new`` writes: small, commented, and one that passes ``check``.

Invariant: nothing that exists is overwritten.
"""

from __future__ import annotations

import re
from pathlib import Path

from fsm_rollout.errors import ConfigError

_TEMPLATE = """\
# An agent is a state graph: states do things, rows say where to go next. `fsm-rollout check {name}.yaml` verifies it.
agent: {name}
description: Answers questions with the help of a calculator.

contexts:
  main:
    system: |
      You are a careful assistant. Use the calculator for every step of arithmetic.

limits:                       # each limit N allows N; the proof that every run ends builds on them
  assistant_turns: 8          # generations
  tool_calls: 16
  response_tokens: 4096
  wall_seconds: 600

tools:                        # a typed Python function with a docstring is a tool; `module:function`
  calculate: {{use: "fsm_rollout.tools.calculator:calculate", timeout: 5}}

states:                       # the built-in names know what to do
  PENDING: {{}}
  GENERATING: {{sampling: {{temperature: 1.0, max_tokens: 512}}, timeout: 120}}
  PROCESSING_TOOLS: {{parallel: 4, timeout: 30}}
  TERMINATED: {{}}

transitions:                  # the first row whose conditions hold wins
  - {{trigger: prompted,   source: PENDING,          dest: GENERATING}}
  - {{trigger: generated,  source: GENERATING,       dest: PROCESSING_TOOLS, conditions: has_tool_calls}}
  - {{trigger: generated,  source: GENERATING,       dest: TERMINATED}}
  - {{trigger: tools_done, source: PROCESSING_TOOLS, dest: GENERATING}}
"""


def new_agent(name: str, folder: Path) -> Path:
    """Write ``folder/name.yaml`` and return its path.

    Raises:
        ConfigError: ``name`` is not a name, the file exists already, or it cannot be written.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(f"'{name}' is not a name for an agent; use letters, digits and _, say my_agent")
    path = folder / f"{name}.yaml"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_TEMPLATE.format(name=name))
    except FileExistsError:
        raise ConfigError(f"{path} exists already; choose another name, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return path
