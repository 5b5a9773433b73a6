"""An MCP server for tests: tools that count, fail, hang and die. With a PORT it speaks HTTP, else stdio."""

import asyncio
import io
import os
import sys

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests", log_level="ERROR")
calls = 0


@server.tool()
def add(left: int, right: int = 1) -> int:
    """Add two numbers."""
    return left + right


@server.tool()
def count() -> str:
    """Say which process this is and how often it was asked."""
    global calls
    calls += 1
    return f"{os.getpid()} {calls}"


@server.tool()
def read(path: str) -> str:
    """Read a file."""
    raise ToolError(f"there is no file {path}")


@server.tool()
async def hang(seconds: float) -> str:
    """Take so long."""
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
def draw() -> list[str | Image]:
    """Draw a red square."""
    from PIL import Image as Pillow

    file = io.BytesIO()
    Pillow.new("RGB", (30, 20), "red").save(file, "PNG")
    return ["Red:", "a square.", Image(data=file.getvalue(), format="png")]


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def environment() -> list[str]:
    """Name the environment's variables."""
    return sorted(os.environ)


@server.tool()
def trace(ctx: Context) -> str:
    """Say which span calls."""
    return str((ctx.request_context.meta or {}).get("traceparent"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print("starting", file=sys.stderr)
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
