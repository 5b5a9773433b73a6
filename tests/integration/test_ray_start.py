"""What is said of a Ray that is not there, is another one or does not start, and of mistakes in what is asked of it."""

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray

from fsm_rollout.concurrency import ray_session
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.ray_placement import fitting
from fsm_rollout.errors import ConfigError, EngineError
from tests.cases import cases
from tests.kit import closed_port

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def spec(**keys: Any) -> dict[str, Any]:
    return {"kind": "scripted", "turns": ["a"], "placement": "ray", **keys}


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "nonsense"])
def test_no_ray_at_the_address(address: str):
    assert not ray.is_initialized()
    address = address.format(port=closed_port())
    with pytest.raises(EngineError, match=f"no Ray could be reached at '{address}': .*start one there"):
        build_engine(spec(ray={"address": address}), Path())
    assert not ray.is_initialized()


@contextmanager
def peer(kind: str) -> Iterator[int]:
    """Something that listens and is no Ray; yields its port."""
    if kind == "web":
        server = HTTPServer(("127.0.0.1", 0), QuietHandler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield int(server.server_address[1])
        server.shutdown()
        thread.join()
        server.server_close()
        return
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            connection, _ = server.accept()
            connection.recv(100)
            connection.close()

        thread = threading.Thread(target=hang_up)
        if kind == "hangs up":
            thread.start()
        yield int(server.getsockname()[1])
        if kind == "hangs up":
            thread.join()


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("web", r"what listens there is no Ray: asked in Ray's protocol \(gRPC\) it answers b'<!DOCTYPE'"),
        ("hangs up", r"what listens there is no Ray: .* it hangs up"),
        ("is silent", r"what listens there says nothing for 0\.2 s"),
    ],
)
def test_something_else_listens_at_the_address(kind: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_session, "CONNECT", 0.2 if kind == "is silent" else 60)
    with (
        peer(kind) as port,
        pytest.raises(EngineError, match=f"no Ray could be reached at '127.0.0.1:{port}': {message}"),
    ):
        build_engine(spec(ray={"address": f"127.0.0.1:{port}"}), Path())
    assert not ray.is_initialized()


def test_rays_client_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(EngineError, match=r"pip install 'ray\[client\]', or give the address of the cluster itself"):
        build_engine(spec(ray={"address": "ray://127.0.0.1:10001"}), Path())


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for module in ("ray", "ray_placement"):
        monkeypatch.delitem(sys.modules, f"fsm_rollout.engines.{module}")
    with pytest.raises(EngineError, match=r"pip install 'fsm-rollout\[ray\]', or use placement 'local'"):
        build_engine(spec(), Path())


def test_a_ray_that_does_not_start_in_time_says_so(monkeypatch: pytest.MonkeyPatch):
    """Ray waits for half a minute for its own processes, and then raises what has no class of its own."""

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(EngineError, match="no Ray could be reached at 'local': The current node timed out"):
        ray_session.connect("local")


@pytest.mark.real
def test_a_ray_that_starts_when_its_caller_is_interrupted_is_shut_down():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    others = set(threading.enumerate())

    async def main() -> None:
        signal.raise_signal(signal.SIGINT)  # asyncio cancels this task, which does not await anything
        ray_session.connect("local")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    signal.signal(signal.SIGINT, before)
    for thread in set(threading.enumerate()) - others:
        if thread.name == "fsm-rollout-ray":
            thread.join(600)
            assert not thread.is_alive()
    assert not ray.is_initialized()


@cases("integration")
def test_mistakes_in_a_spec_are_named_before_anything_starts(keys: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        build_engine(spec(**keys), Path())
    assert message in str(error.value)
    assert not ray.is_initialized()


def test_how_many_replicas_fit_into_a_node():
    node = {"CPU": 8.0, "GPU": 4.0, "memory": 1e9}
    assert fitting(node, {"CPU": 1.0, "GPU": 2.0}) == 2
    assert fitting(node, {"CPU": 0.1}) == 80
    assert fitting(node, {"CPU": 1.0, "TPU": 1.0}) == 0


@pytest.mark.ray("shared")
@pytest.mark.parametrize("address", [None, "auto", "local", "{there}", "localhost:{port}", "ray://127.0.0.1:10001"])
def test_the_ray_that_is_connected_is_asked_for(address: str | None):
    there = ray.get_runtime_context().gcs_address
    address = address and address.format(there=there, port=there.rpartition(":")[2])
    assert not ray_session.connect(address), "it is not ours"


@pytest.mark.ray("shared")
@pytest.mark.parametrize("address", ["127.0.0.1:{other}", "203.0.113.7:{port}", "ray://203.0.113.7:10001"])
def test_another_ray_than_the_connected_one_is_asked_for(address: str):
    there = ray.get_runtime_context().gcs_address
    address = address.format(port=there.rpartition(":")[2], other=closed_port())
    message = f"the Ray at '{address}', but this process is connected to the one at '{there}'.*ray.shutdown"
    with pytest.raises(EngineError, match=message):
        build_engine(spec(ray={"address": address}), Path())
    assert ray.is_initialized()


@pytest.mark.ray("shared")
def test_what_is_no_address_is_told_of_where_ray_is_connected():
    with pytest.raises(EngineError, match="'nonsense' is wrong: an address is 'auto', host:port or ray://host:port"):
        build_engine(spec(ray={"address": "nonsense"}), Path())
