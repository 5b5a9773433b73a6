"""The HTTP side of ``fsm-rollout view``.

Invariant: it reads, and never writes; it answers this machine alone, and no page from elsewhere. What is asked for
again (``If-None-Match``) is made again only where what it shows may have changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from aiohttp import web
from multidict import MultiMapping

from fsm_rollout.concurrency.threads import DaemonThreads
from fsm_rollout.errors import ConfigError, RolloutError
from fsm_rollout.model.folders import plain_tokenizers
from fsm_rollout.report.pages import REPORT
from fsm_rollout.serve.strangers import stranger
from fsm_rollout.states.external.responding import listening_at
from fsm_rollout.trajectory.journal import rows_of
from fsm_rollout.view.pages import compare_page, file_page, path_of_run, run_page, runs_page, trajectory_at, two_page
from fsm_rollout.view.runs import Runs, ViewedRun

Query = MultiMapping[str]
logger = logging.getLogger(__name__)

COMPARE, BESIDE = "compare.html", "beside.html"
HOST = "127.0.0.1"
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
REST = 0.3  # seconds until it is looked again whether there is more of what somebody looks at
PATIENCE = 5.0  # a page that takes long to make is made anew when it is older than so many times that long
KEPT = 8  # of such pages


@dataclass(frozen=True, slots=True)
class ServedPage:
    """A page that can be made."""

    state: Callable[[], object]
    """Changes with what the page shows; quick."""
    make: Callable[[str], str | None]
    """Makes it, with its version in it; ``None``: there is none."""
    slow: bool = False
    """Whether that reads a whole run."""


@dataclass(frozen=True, slots=True)
class _Made:
    version: str
    text: str
    seconds: float
    at: float


class ViewServer:
    """Answers with the pages of all runs in a folder."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._quick = DaemonThreads("view", 1)  # one after the other: reading on, and pages of what was read
        self._slow = DaemonThreads("view of all", 2)
        self._warm: object = None
        self._kept: dict[str, _Made] = {}
        self._nonce = uuid4().hex  # another server may be of another version

    def app(self) -> web.Application:
        """Return what answers."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/favicon.ico", self._nothing)
        app.router.add_get("/{path:.*}", self._answer)
        app.cleanup_ctx.append(self._following)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], object]) -> web.StreamResponse:
        if (wrong := stranger(request, loopback=True)) is not None:
            return _said(403, wrong[1])
        try:
            return await handler(request)  # type: ignore[misc,no-any-return]
        except web.HTTPException as error:
            return _said(error.status, f"{request.method} {request.path}: {error.reason}")
        except RolloutError as error:
            return _said(404 if isinstance(error, ConfigError) else 500, str(error))

    async def _following(self, app: web.Application):  # type: ignore[no-untyped-def]
        task = asyncio.create_task(self._follow())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        for threads in (self._quick, self._slow):
            threads.end(0.0)

    async def _follow(self) -> None:
        """Read on what somebody looks at."""
        loop = asyncio.get_running_loop()
        while True:
            more = False
            watched = self.runs.watched()
            for run in watched:
                try:
                    more |= await loop.run_in_executor(self._quick, run.read)
                except RolloutError as error:
                    logger.warning("%s", error)
            if watched and not more and self._warm is None:  # a trajectory's page needs seconds of imports
                self._warm = self._slow.submit(plain_tokenizers)
            if not more:
                await asyncio.sleep(REST)

    async def _nothing(self, request: web.Request) -> web.Response:
        return web.Response(status=204)

    async def _answer(self, request: web.Request) -> web.Response:
        path, query = request.match_info["path"], request.query
        loop = asyncio.get_running_loop()
        page = await loop.run_in_executor(self._quick, self._page, path, query)
        if page is None:
            raise web.HTTPNotFound(reason="there is no such page")
        # 1. What there is, and whether that is known.
        state = await loop.run_in_executor(self._quick, page.state)
        key = f"{path}?{request.query_string}"
        version = hashlib.sha256(repr((self._nonce, key, state)).encode(errors="backslashreplace")).hexdigest()[:24]
        made = self._kept.get(key)
        if made is not None and time.monotonic() - made.at < PATIENCE * made.seconds:
            version = made.version
        etag = f'"{version}"'
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers={**HEADERS, "ETag": etag})
        # 2. What is new is made.
        if made is None or made.version != version:
            started = time.monotonic()
            text = await loop.run_in_executor(self._slow if page.slow else self._quick, page.make, version)
            if text is None:
                raise web.HTTPNotFound(reason="there is no such page")
            made = _Made(version, text, time.monotonic() - started, time.monotonic())
        if page.slow:
            self._kept.pop(key, None)
            self._kept[key] = made
            for old in list(self._kept)[:-KEPT]:
                del self._kept[old]
        body = made.text.encode("utf-8", "backslashreplace")
        return web.Response(body=body, content_type="text/html", charset="utf-8", headers={**HEADERS, "ETag": etag})

    def _page(self, path: str, query: Query) -> ServedPage | None:
        if not path:
            return ServedPage(self._runs_state, lambda version: runs_page(self.runs, version))
        if path in (COMPARE, BESIDE):
            return self._of_two(path, query)
        found = [run for run in self.runs.all() if path.startswith(path_of_run(run.name))]
        if not found:
            return None
        run = max(found, key=lambda run: len(run.name))
        rest = path.removeprefix(path_of_run(run.name))
        if not rest:
            run.asked_at = time.monotonic()
            return ServedPage(lambda: _list_state(run), lambda version: run_page(run, query, version))
        if rest == REPORT:
            return ServedPage(
                lambda: (run.written_at, run.status), lambda version: file_page(run, rest, version), slow=True
            )
        if rest == BESIDE:
            return _beside([run, run], query.getall("id", []), run.folder / BESIDE)
        trajectory_id = trajectory_at(run, rest)
        if trajectory_id is None:
            return None
        return ServedPage(
            lambda: (rows_of(run.folder, trajectory_id), run.status), lambda version: file_page(run, rest, version)
        )

    def _of_two(self, path: str, query: Query) -> ServedPage:
        names, every = query.getall("run", []), {run.name: run for run in self.runs.all()}
        if len(names) != 2 or not all(name in every for name in names):
            raise ConfigError(f"pick two of the runs; {len(names)} {'is' if len(names) == 1 else 'are'} picked")
        runs = [every[name] for name in names]
        if path == BESIDE:
            return _beside(runs, query.getall("id", []), self.runs.folder.parent / BESIDE)
        return ServedPage(
            lambda: [(run.written_at, run.status) for run in runs],
            lambda version: compare_page(runs[::-1], version),
            slow=True,
        )

    def _runs_state(self) -> object:
        return [(*_list_state(run), run.written_at) for run in self.runs.all()]


def _beside(runs: Sequence[ViewedRun], ids: Sequence[str], page: Path) -> ServedPage:
    if len(ids) != 2:
        raise ConfigError(f"pick two trajectories; {len(ids)} {'is' if len(ids) == 1 else 'are'} picked")
    return ServedPage(
        lambda: [(rows_of(run.folder, id_), run.status) for run, id_ in zip(runs, ids, strict=True)],
        lambda version: two_page(runs, ids, page, version),
    )


def _list_state(run: ViewedRun) -> tuple[object, ...]:
    if (status := run.status) != "ended":
        run.asked_at = time.monotonic()
    return run.reader.version, run.reader.unread, status


def _said(status: int, sentence: str) -> web.Response:
    return web.Response(status=status, text=f"{sentence}\n", headers=HEADERS)


async def serve_view(runs: Runs, port: int, ready: Callable[[str], object]) -> None:
    """Serve until it is cancelled; ``ready`` is called with the address.

    Raises:
        ConfigError: the port cannot be listened at.
    """
    async with listening_at(ViewServer(runs).app(), HOST, port, 1.0) as url:
        ready(f"{url}/")
        await asyncio.Event().wait()
