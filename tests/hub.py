"""A Hugging Face hub on this machine: its few routes that a download asks, and its cache's layout, with real models."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "5" * 40


def fill_cache(cache: Path, name: str, files: Path, *, kind: str = "models", revision: str = "main") -> Path:
    """Put a folder into a cache as a download would, and return the snapshot."""
    repo = cache / f"{kind}--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / revision).write_text(COMMIT)
    for file in files.iterdir():
        (snapshot / file.name).symlink_to(file)
    return snapshot


@dataclass
class Hub:
    """What it has, and what was asked of it."""

    url: str
    repos: Mapping[str, Path]
    """Folders by `models/organisation/name` or `datasets/…`."""
    token: str | None = None
    """What callers must send."""
    asked: list[str] = field(default_factory=list)
    """Path after path."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(path)
        if self.hub.token is not None and self.headers["Authorization"] != f"Bearer {self.hub.token}":
            return self._send(401, {"X-Error-Code": "RepoNotFound"}, b"{}")
        found = re.fullmatch(r"/api/(\w+/[^/]+/[^/]+)/(revision|tree)/([^/]+)", path)
        if found:
            folder, route, revision = self.hub.repos.get(found[1]), found[2], found[3]
            if folder is None:
                return self._send(404, {"X-Error-Code": "RepoNotFound"}, b"{}")
            if revision not in ("main", COMMIT):
                return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
            files = sorted(folder.iterdir())
            siblings = [{"rfilename": file.name} for file in files]
            info: object = {"id": found[1].partition("/")[2], "sha": COMMIT, "siblings": siblings}
            if route == "tree":
                info = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}
                    for file in files
                ]
            return self._send(200, {"Content-Type": "application/json"}, json.dumps(info).encode())
        found = re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        file = self.hub.repos[f"{found[1] or 'models'}/{found[2]}"] / found[4] if found else None
        if file is None or not file.is_file():
            return self._send(404, {"X-Error-Code": "EntryNotFound"}, b"")
        return self._send(200, {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT}, file.read_bytes())

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serving(repos: Mapping[str, Path], token: str | None = None) -> Iterator[Hub]:
    """Serve folders as a hub does."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {}))
    hub = server.RequestHandlerClass.hub = Hub(f"http://127.0.0.1:{server.server_port}", repos, token)  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
