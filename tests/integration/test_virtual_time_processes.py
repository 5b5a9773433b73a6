"""Virtual time and processes: a process takes no virtual time, is waited for, and is left to nobody."""

import asyncio
import os
import subprocess

import pytest

from fsm_rollout.testing.simulation.virtual_time import run_virtual
from tests.unit.testing.test_virtual_time import Rests

pytestmark = pytest.mark.process


def test_a_process_takes_no_virtual_time_and_is_waited_for():
    async def main() -> tuple[bytes, float]:
        async with asyncio.timeout(30):
            process = await asyncio.create_subprocess_exec("expr", "2", "+", "2", stdout=subprocess.PIPE)
            output, _ = await process.communicate()
        return output, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (b"4\n", 0.0)


def test_a_process_without_pipes_is_waited_for():
    async def main() -> tuple[int, float]:
        async with asyncio.timeout(30):
            process = await asyncio.create_subprocess_shell("exit 3")
            code = await process.wait()
        return code, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (3, 0.0)


def test_a_process_that_is_silent_does_not_stop_time_for_ever():
    loop = Rests()

    async def main() -> float:
        process = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(1000):
            await asyncio.sleep(3600)
        assert loop.rests == [60.0]  # for the first of them
        loop.really = True
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        return loop.time()

    assert run_virtual(main(), loop=loop) == 3_600_000.0


def test_a_process_that_is_left_is_ended_with_the_loop():
    async def main() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    loop = Rests()
    loop.really = True
    process = run_virtual(main(), loop=loop)
    assert loop.rests  # the loop says that it waits: however long a process takes to end, nothing blocks
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)  # it has ended, and was waited for
