"""Tools of MCP servers (Model Context Protocol), by the official ``mcp`` package.

Invariants: the schemas that a model is shown are those that the server declares, and a call is checked against them
before it is sent. A session belongs to one trajectory unless it is ``shared``, and a task of its own keeps it open. A
session whose server has died is never used again: the next call starts another. A call that was under way then is
answered as failed, since it may have had its effect. Resources and prompts of servers are not used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, TextIO, cast
from weakref import WeakKeyDictionary

from fsm_rollout.agent import graph
from fsm_rollout.concurrency.cancellation import being_cancelled, wait_for
from fsm_rollout.concurrency.threads import DaemonThreads
from fsm_rollout.errors import BadArguments, ToolError, did_you_mean, single
from fsm_rollout.tools import tool_messages
from fsm_rollout.tools.base import fresh
from fsm_rollout.tools.bound_tools import BoundTool, MakeContext, NotReady, ReportedFailure, Session
from fsm_rollout.tools.bounded_call import ToolDied
from fsm_rollout.tools.commands import from_environment, search_path, words_of
from fsm_rollout.tools.schema import Arguments, Schema, tidy

try:
    import httpx2
    import jsonschema
    from mcp import Client, MCPError, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp_types import INVALID_PARAMS, CallToolResult, ContentBlock, Implementation
    from mcp_types import Tool as DeclaredTool
except ImportError as error:
    raise ToolError("tools of MCP servers need the `mcp` package: pip install 'fsm-rollout[mcp]'") from error

if TYPE_CHECKING:
    from mcp.client._transport import Transport, TransportStreams

logger = logging.getLogger(__name__)

# How long a server may take to start and to list its tools; some are downloaded when they first start.
START_SECONDS = 120.0
CLOSE_SECONDS = 30.0  # how long a session may take to close
SHOWN_OUTPUT = 400  # characters of a server's standard error that an error message quotes
_threads = DaemonThreads("fsm-rollout-mcp")
# What servers have said, by the identity of their specs (held here, so that no other object can have it): building a
# toolbox again, as simulations do for each example, asks nobody.
_discovered: dict[int, tuple[graph.MCP, list[DeclaredTool]]] = {}


class MCPServer:
    """One server of an agent: its tools and its sessions."""

    def __init__(self, name: str, spec: graph.ToolSpec) -> None:
        assert spec.mcp is not None
        self.name = name
        self.spec = spec
        self.mcp = spec.mcp
        self.where = f"tool '{name}' ({' '.join(self.mcp.command) if self.mcp.command else self.mcp.url})"
        self._shared: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection] = WeakKeyDictionary()

    def tools(self) -> dict[str, BoundTool]:
        """Ask the server (once in this process), and return the tools that are allowed; ToolError if that fails."""
        if id(self.mcp) not in _discovered:
            work = _threads.submit(lambda: asyncio.run(self._declared()))
            _discovered[id(self.mcp)] = (self.mcp, wait_for(work))
        declared = {tool.name: tool for tool in _discovered[id(self.mcp)][1]}
        allowed = self.spec.allow if self.spec.allow is not None else tuple(declared)
        if unknown := [name for name in allowed if name not in declared]:
            hint = did_you_mean(unknown[0], declared)
            raise ToolError(f"{self.where}: allow: the server has no tool '{unknown[0]}'{hint}")
        if not declared:
            raise ToolError(f"{self.where}: the server has no tools")
        return {name: MCPTool(self, declared[name]) for name in allowed}

    async def _declared(self) -> list[DeclaredTool]:
        connection = _Connection(self)
        try:
            async with asyncio.timeout(START_SECONDS):
                client = await asyncio.shield(connection.client)
                tools, cursor = [], None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return tools
        except TimeoutError:
            raise ToolError(f"{self.where}: the server did not list its tools within {START_SECONDS:g} s") from None
        except NotReady as error:
            raise ToolError(f"{self.where}: the server cannot be started or reached: {error.__cause__}") from error
        except MCPError as error:
            raise ToolError(f"{self.where}: the server does not list its tools: {error}") from error
        finally:
            await connection.close()

    def connection(self, session: Session) -> _Connection:
        """Return a trajectory's connection, or the shared one; a new one where there is none that works."""
        loop = asyncio.get_running_loop()
        shared = self.mcp.session == "shared"
        connection = self._shared.get(loop) if shared else session.instances.get(self)
        if connection is not None and connection.is_good(loop):
            return connection
        if connection is not None and connection.was_open:
            logger.warning("%s: the server has ended; it is started or connected to again", self.where)
        connection = _Connection(self)
        if shared:
            self._shared[loop] = connection
        else:
            session.instances[self] = connection
        return connection

    async def release(self, connection: _Connection) -> str | None:
        """Close a trajectory's connection, and return what went wrong."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await connection.close()
        except TimeoutError:
            return f"{self.where}: the session did not close within {CLOSE_SECONDS:g} s"
        return None

    async def close(self) -> None:
        """Close the connection that this event loop's trajectories share, if there is one."""
        connection = self._shared.pop(asyncio.get_running_loop(), None)
        if connection is not None and (failure := await self.release(connection)) is not None:
            logger.warning(failure)

    @asynccontextmanager
    async def transport(self, errors: IO[str]) -> AsyncIterator[Transport]:
        """Yield the way to the server; what a program writes to its standard error goes to ``errors``."""
        if self.mcp.command:
            command, *arguments = words_of(self.mcp.command)
            env = {"PATH": search_path()} | from_environment(self.mcp.env)
            yield stdio_client(
                StdioServerParameters(command=command, args=arguments, env=env), errlog=cast(TextIO, errors)
            )
            return
        async with httpx2.AsyncClient(
            headers=from_environment(self.mcp.headers), timeout=httpx2.Timeout(30.0, read=None)
        ) as http:
            yield streamable_http_client(str(self.mcp.url), http_client=http)


class _Connection:
    """One session with a server. A task of its own opens and closes it, since its cancel scopes belong to a task."""

    def __init__(self, server: MCPServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.client: asyncio.Future[Client] = self._loop.create_future()
        self.lost = asyncio.Event()  # set when nothing can be asked of it any more: it failed, ended or was closed
        self._task = self._loop.create_task(self._keep(), name=f"session of {server.where}")

    def is_good(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether it can be asked, or will be when it is open."""
        return self._loop is loop and not self.lost.is_set() and not self._task.done()

    @property
    def was_open(self) -> bool:
        return self.client.done() and not self.client.cancelled() and self.client.exception() is None

    async def close(self) -> None:
        """Close it; a program is ended with its children."""
        self.lost.set()
        if not self.client.done():
            self._task.cancel()
        await asyncio.wait({self._task})

    async def _keep(self) -> None:
        """Hold the session open until it is lost or closed."""
        with TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            try:
                async with (
                    self._server.transport(errors) as transport,
                    Client(
                        _watched(transport, self.lost), client_info=Implementation(name="fsm-rollout", version="1")
                    ) as client,
                ):
                    self.client.set_result(client)
                    await self.lost.wait()
            except (Exception, asyncio.CancelledError) as failure:  # also the library's own cancellations
                if not self.client.done():
                    error = NotReady()
                    error.__cause__ = Unreachable(_explained(failure, errors))
                    self.client.set_exception(error)
                    self.client.exception()  # it need not be asked for
                if isinstance(failure, asyncio.CancelledError) and being_cancelled():
                    raise
            finally:
                self.lost.set()

    async def call(self, name: str, arguments: Mapping[str, object]) -> CallToolResult:
        """Make one call; NotReady if there is no server, ToolDied if it ended meanwhile, MCPError if it refuses."""
        client = await asyncio.shield(self.client)
        try:
            return await client.call_tool(name, dict(arguments))
        except Exception as error:
            if self.lost.is_set():  # the library tells who waits
                raise ToolDied(f"{self._server.where}: the server ended during a call") from error
            raise


class Unreachable(ConnectionError):
    """A server cannot be started or reached."""


class MCPTool(BoundTool):
    """One tool of a server."""

    kind = "a tool of an MCP server"

    def __init__(self, server: MCPServer, declared: DeclaredTool) -> None:
        super().__init__(declared.name, server.spec)
        self.server = server
        self.holder = None if server.mcp.session == "shared" else server
        self.where = f"{server.where}: '{declared.name}'"
        shown = tidy({key: value for key, value in declared.input_schema.items() if key != "$schema"})
        shown.setdefault("properties", {})
        shown.pop("additionalProperties", None)  # as for other tools: no training data shows it
        description = declared.description or declared.title or declared.name
        self.schema: Schema = {
            "type": "function",
            "function": {"name": declared.name, "description": description.strip(), "parameters": shown},
        }
        kind = jsonschema.validators.validator_for(declared.input_schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(declared.input_schema)
        except jsonschema.SchemaError as error:
            raise ToolError(f"{self.where}: its schema is wrong: {error.message}; leave it out by `allow`") from None
        self._validator = kind(declared.input_schema)
        self._names = list(declared.input_schema.get("properties", {}))

    def read(self, arguments: Mapping[str, object]) -> Arguments:
        """Check a model's arguments against the declared schema, and return a copy, or raise BadArguments."""
        if unknown := [name for name in arguments if self._names and name not in self._names and self._is_closed]:
            raise BadArguments(f"argument '{unknown[0]}' is not a parameter{did_you_mean(unknown[0], self._names)}")
        problems = [
            f"argument '{'.'.join(map(str, problem.absolute_path))}': {problem.message}"
            if problem.absolute_path
            else problem.message
            for problem in self._validator.iter_errors(dict(arguments))
        ]
        if problems:
            raise BadArguments("; ".join(problems[:5]))
        return dict(fresh(arguments))

    @property
    def _is_closed(self) -> bool:
        """Whether the schema declares all arguments that there are; what it does not name would be lost in silence."""
        schema = self._validator.schema
        return (
            isinstance(schema, Mapping)
            and not schema.get("additionalProperties")
            and not schema.get("patternProperties")
        )

    async def call(self, session: Session, arguments: Arguments, context: MakeContext) -> object:
        """Have the server carry it out, and return the text of its answer."""
        try:
            result = await self.server.connection(session).call(self.name, arguments)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise BadArguments(error.message) from error
            raise ConnectionError(error.message) from error
        shown = _shown_by(result)
        text = "".join(part for part in shown if isinstance(part, str))
        if result.is_error:
            raise ReportedFailure(text or "it failed and did not say why")
        return text if all(isinstance(part, str) for part in shown) else shown


def _shown_by(result: CallToolResult) -> list[str | dict[str, str]]:
    """Return what a result says and shows. Nothing is left out in silence: of other content its kind is told."""
    shown = [_block(block) for block in result.content]
    if not shown and result.structured_content is not None:
        shown.append(tool_messages.result(result.structured_content))
    for before, after in pairwise(range(len(shown))):  # texts on lines of their own
        if isinstance(text := shown[before], str) and isinstance(shown[after], str):
            shown[before] = f"{text}\n"
    return shown


def _block(block: ContentBlock) -> str | dict[str, str]:
    match block.type:
        case "text":
            return block.text
        case "image":
            return {"type": "image", "data": block.data}
        case "resource" if isinstance(text := getattr(block.resource, "text", None), str):
            return text
        case "resource_link":
            return f"{block.name}: {block.uri}"
        case kind:
            return f"[{kind} left out: only text and pictures can be shown]"


class _WatchedStream:
    """A stream from a server that notes when nothing will come any more."""

    def __init__(self, stream: Any, lost: asyncio.Event) -> None:
        self._stream = stream
        self._lost = lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> _WatchedStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self._stream)
        except BaseException:  # its end, and whatever breaks it
            self._lost.set()
            raise

    async def __aenter__(self) -> _WatchedStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        ended: bool | None = await self._stream.__aexit__(*error)
        return ended


@asynccontextmanager
async def _watched(transport: Transport, lost: asyncio.Event) -> AsyncIterator[TransportStreams]:
    async with transport as (read, write):
        yield _WatchedStream(read, lost), write


def _explained(failure: BaseException, errors: IO[str]) -> str:
    """Say why a session could not be opened, with the last of what the server's program wrote."""
    failure = single(failure)
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    errors.seek(0)
    output = errors.read().strip()[-SHOWN_OUTPUT:]
    return f"{tool_messages.described(failure)}" + (f"; it wrote: …{output}" if output else "")
