"""``handler: external``: a foreign program or coroutine, run as the visit of a state.

Invariant: every token that it has sampled goes through the visit, so it is charged, recorded and trained like any
other; when the visit ends, whatever the reason, nothing of the program runs on and its key opens nothing any more.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fsm_rollout.agent.graph import StateSpec
from fsm_rollout.errors import ConfigError
from fsm_rollout.names.objects import load_object
from fsm_rollout.states.base import State
from fsm_rollout.tools.bounded_call import invoke
from fsm_rollout.tools.commands import MARK, end_family, from_environment, scrubbed, words_of
from fsm_rollout.trajectory.enums import LimitName, Trigger
from fsm_rollout.trajectory.events import Message, Scored
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.pictures import in_form
from fsm_rollout.trajectory.settings import ImportPath
from fsm_rollout.trajectory.stream import text_of
from fsm_rollout.trajectory.trace_ids import traceparent
from fsm_rollout.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    from fsm_rollout.states.context import HandlerContext

SHOWN_OUTPUT = 2000  # characters of a failed program's output that stand in the trajectory's detail
LONGEST_TASK = 100_000  # bytes of a task that a program finds in its environment too; Linux allows 128 KiB, and no NUL
STARTED = "the program could not be started"


class ProgramFailed(Exception):
    """A foreign agent's program ended with an error, or could not be started."""


@dataclass(frozen=True, slots=True)
class ForeignVisit:
    """What a foreign agent in Python (``use: module:function``) is given."""

    base_url: str
    """Where the model is, as its protocol's clients want it: with ``/v1`` for OpenAI's, without for Anthropic's."""
    api_key: str
    """Opens this one visit, while it lasts."""
    model: str
    """The model's name; any name will do."""
    task: str
    """The text of the prompt's last message."""
    messages: list[Message]
    """The prompt's messages; pictures in them as the dialect's clients send them."""
    extra: Mapping[str, object]
    """The prompt's other fields."""


class External(State):
    """Runs a foreign agent; each of its chat calls becomes a generation of a token stream.

    It raises ``returned`` when the agent has come to its end, and ``limit_reached`` instead if a call of it was refused
    for a limit. A program that ends with another exit code than 0, or a function that raises, fails the visit. A number
    that a function returns becomes the trajectory's score.
    """

    triggers = (Trigger.RETURNED,)
    spends = LimitName.ASSISTANT_TURNS
    keys = ("sampling", "options")

    class Options(BaseModel):
        """The keys of its own."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        command: tuple[str, ...] | None = Field(None, min_length=1, description="a program with its arguments")
        use: ImportPath | None = Field(None, description="`module:function`, sync or async, of a ForeignVisit")
        dialect: Literal["openai", "responses", "anthropic"] = Field(
            "openai", description="the protocol that it speaks; the first two are OpenAI's, and have the same address"
        )
        train_side_calls: bool = Field(
            False, description="train what it asks for beside its work (a title of the conversation, say), too"
        )
        train_grammars: bool = Field(
            False, description="train what is sampled under a grammar (a `response_format`, a forced call), too; its "
            "log-probs are of what the grammar left"
        )  # fmt: skip
        pins: tuple[str, ...] = Field(
            (), description="regular expressions: text of system messages that changes from call to call, beside what "
            "is known to (dates, ids, billing headers); each match is taken as it first was",
        )  # fmt: skip
        env: dict[str, str] = Field(default_factory=dict, description="for the program; `$NAME` is read here")

        @model_validator(mode="after")
        def _one_agent(self) -> External.Options:
            if (self.command is None) == (self.use is None):
                raise ValueError("give either `command` (a program) or `use` (module:function)")
            for pattern in self.pins:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"pins: {pattern!r} is no regular expression: {error}") from None
            return self

    options: Options

    def __init__(self, name: str, spec: StateSpec) -> None:
        super().__init__(name, spec)
        self._function: Any = load_object(self.options.use) if self.options.use is not None else None
        if self.options.use is not None and not callable(self._function):
            raise ConfigError(f"'{self.options.use}' is no function")
        self._schemas: dict[
            tuple[str, ...], tuple[dict[str, Any], ...]
        ] = {}  # the tools that foreign agents have shown: a cache

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Serve the agent, run it, and see how it ended."""
        anthropic = self.options.dialect == "anthropic"
        from fsm_rollout.states.external.agent_histories import AgentHistories
        from fsm_rollout.states.external.gateway import AgentSession, gateway  # a server: only for those who need one
        from fsm_rollout.states.external.sameness import Pins

        histories = AgentHistories(
            ctx, self.spec.context, self._schemas, Pins(self.options.pins),
            train_side_calls=self.options.train_side_calls, train_grammars=self.options.train_grammars,
        )  # fmt: skip
        session = AgentSession(histories, trajectory.agent)
        async with gateway().session(session) as (url, key):
            dialect = import_module(f"fsm_rollout.states.external.{self.options.dialect}_dialect")
            messages = [in_form(message, dialect.picture_part) for message in trajectory.prompt_messages]
            visit = ForeignVisit(
                base_url=url if anthropic else f"{url}/v1", api_key=key, model=trajectory.agent,
                task=text_of(messages[-1]), messages=messages, extra=trajectory.extra,
            )  # fmt: skip
            if self.options.command is not None:
                await self._run_program(visit)
                result = None
            else:
                result = await invoke(partial(self._function, visit), {})
        outcome = histories.outcome()
        if isinstance(result, int | float) and not isinstance(result, bool):
            ctx.emit(Scored(at=ctx.clock(), value=float(result), source=self.name))
        return outcome

    async def _run_program(self, visit: ForeignVisit) -> None:
        """Run the program to its end, or end it; ProgramFailed if it cannot start, or its exit code is not 0."""
        assert self.options.command is not None
        names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")
        if self.options.dialect == "anthropic":
            names = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_MODEL")
        gateway = dict(zip(names, (visit.base_url, visit.api_key, visit.model), strict=True))
        from_yaml = from_environment(self.options.env)
        mark, folder = uuid.uuid4().hex, mkdtemp(prefix="fsm-rollout-")
        env = scrubbed() | {"HOME": folder} | gateway | from_yaml | {MARK: mark}
        if trace := traceparent.get():
            env.setdefault("TRACEPARENT", trace)
        if len(visit.task.encode()) <= LONGEST_TASK and "\0" not in visit.task:
            env.setdefault("TASK", visit.task)
        data = json.dumps({"task": visit.task, "messages": visit.messages, "extra": visit.extra}, default=str).encode()
        with TemporaryFile() as output:
            try:
                try:
                    process = await asyncio.create_subprocess_exec(
                        *words_of(self.options.command), env=env, cwd=folder, start_new_session=True,
                        stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output,
                    )  # fmt: skip
                except OSError as error:
                    raise ProgramFailed(f"{STARTED}: {error}") from error
                try:
                    with suppress(BrokenPipeError, ConnectionResetError):  # one that does not read
                        await process.communicate(data)
                finally:
                    with suppress(ProcessLookupError):  # at once, so that it asks for nothing more
                        process.kill()
                    await asyncio.to_thread(end_family, process.pid, mark)
                    await process.wait()
            finally:
                await asyncio.to_thread(partial(shutil.rmtree, folder, ignore_errors=True))
            if process.returncode:
                output.seek(max(0, output.seek(0, os.SEEK_END) - 4 * SHOWN_OUTPUT))
                written = output.read().decode(errors="replace").strip()[-SHOWN_OUTPUT:] or "nothing"
                name = Path(self.options.command[0]).name
                message = f"{name} ended with exit code {process.returncode}; it wrote: {written}"
                raise ProgramFailed(message)
