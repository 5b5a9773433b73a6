"""`fsm-rollout serve --training` and its trainer, both killed or told to end: the rows are as if nobody had been."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import fsm_rollout as fr
from tests.integration.kill_points import RUN, patient
from tests.integration.remote_trainer import here, read, trained
from tests.programs import PATIENCE, fsm_rollout, program, started

pytestmark = [pytest.mark.process, pytest.mark.real]
SERVE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
SERVE += "from fsm_rollout.cli import main; main()"
ENDS = (*[signal.SIGKILL] * 5, signal.SIGINT, *[signal.SIGKILL] * 5, signal.SIGTERM)  # of a service, in this order
TRAIN = "import asyncio, signal, sys; from pathlib import Path; from tests.integration.remote_trainer import main\n"
TRAIN += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
TRAIN += "asyncio.run(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]))"


class Service:
    """A service that can be killed, or told to end, and is started again at the same address."""

    def __init__(self, run: Path, place: Path, *changes: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.folder = place / "service"
        self._arguments = ["serve", run, "--training", "--port", port, f"serve.out={self.folder}", *changes]
        self._life = ExitStack()
        self.deaths = -1
        self._ends = iter(ENDS)
        self.start_again()

    def start_again(self) -> None:
        """End it by the next of the ways there are, and start it again."""
        if self.deaths >= 0:
            os.kill(self._process.pid, end := next(self._ends))
            self._process.wait(PATIENCE)
            assert end is signal.SIGKILL or (self.folder / "summary.json").exists()
        self.close()
        self.deaths += 1
        started_one = started(SERVE, *map(str, self._arguments), searched=())
        self._process, output, errors = self._life.enter_context(started_one)
        first = output.readline()
        assert first.startswith(self.url), (first, errors.read())

    def close(self) -> None:
        """Kill it."""
        self._life.close()


@contextmanager
def expecting(place: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield a run, and what its rollout gives its trainer when nobody dies."""
    run = patient(RUN, place)
    expected: dict[str, str] = {}

    async def undisturbed() -> None:
        async with here(run) as rollout:
            await trained(rollout, run, (), expected.__setitem__)

    asyncio.run(undisturbed())
    yield run, expected


# Of what each process gets by itself: a group that it has not said to have done with comes again to the next.
POINTS = ["before 1", "after 1 SIGINT", "before 2", "after 2 SIGINT", "before 3", "after 2", "before 2 SIGINT",
          "before 1", "before 2", "before 1 SIGINT",
          # When the stream's last group is written; when the step that is a batch has it, and has written it.
          "after 1", "before 3", "before 1", "after 1"]  # fmt: skip


def test_a_trainer_that_is_killed_at_ten_points_gets_every_group_once(tmp_path: Path) -> None:
    assert sum("SIGINT" not in point for point in POINTS) == 10
    with expecting(tmp_path) as (run, expected):
        service, file = Service(run, tmp_path), tmp_path / "had"
        for point in POINTS:
            done = program(TRAIN, service.url, run, file, point)
            assert done.returncode == (1 if "SIGINT" in point else -9), (point, done.stderr)
        done = program(TRAIN, service.url, run, file)
        assert done.returncode == 0, done.stderr
        service.close()
        refused = fsm_rollout("resume", service.folder)
        assert (refused.returncode, "then the trainer" in refused.stderr) == (2, True), refused.stderr
    had = read(file)
    assert dict(had) == expected
    assert len(had) == len(expected), "none of them twice"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_service_that_is_killed_at_ten_points_loses_nothing(tmp_path: Path, workers: int) -> None:
    with expecting(tmp_path) as (run, expected):
        service = Service(run, tmp_path, f"workers={workers}")
        had: list[tuple[str, str]] = []

        def write(name: str, rows: str) -> None:
            had.append((name, rows))
            if len(had) <= 8:
                service.start_again()

        async def train() -> None:
            async with fr.RemoteRollout(service.url) as rollout:
                ask = rollout.line.ask

                async def asking(question: object, kind: object = None) -> object:
                    for moment in ("before", "after"):
                        if len(had) == 9 and service.deaths < len(ENDS):  # in the step that is a batch
                            await asyncio.to_thread(service.start_again)
                        if moment == "before":
                            answer = await ask(question, kind)  # type: ignore[arg-type]
                    return answer

                rollout.line.ask = asking  # type: ignore[method-assign]
                await trained(rollout, run, (), write)

        asyncio.run(train())
        assert service.deaths == len(ENDS), [name for name, _ in had]
        service.close()
    assert dict(had) == expected
    assert len(had) == len(expected), "none of them twice"
