"""Plain calls: interrupted ones clean up, and nothing that is left open keeps the interpreter from ending."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable

import pytest

import fsm_rollout as fr
from fsm_rollout.concurrency.loop_thread import LoopThread
from fsm_rollout.errors import EngineError
from tests.cases import PROGRAMS
from tests.embedded import tokenizer
from tests.kit import ROOT
from tests.programs import program

AGENT = ROOT / "configs/agents/single_turn.yaml"
HEAD = f"import fsm_rollout as fr\nagent = fr.load_agent({str(AGENT)!r})\n"


def script(text: str, *, finalized: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a program of a user's to its end, which is to come.

    What a shell starts in the background ignores Ctrl-C, and so would all that it starts; this hears it.
    """
    return program(
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + text, finalized=finalized
    )


INTERRUPTED = HEAD + PROGRAMS["presses Ctrl-C while rewards are given"]


THROWN_AWAY = PROGRAMS["throws rollouts away"]


def test_what_is_not_closed_is_cleared_away_without_a_warning() -> None:
    """Rollouts are thrown away with their event loops after a run, with samples that were set aside, and at the end."""
    done = script(HEAD + THROWN_AWAY, finalized=True)
    assert (done.returncode, done.stderr) == (0, "")


STUCK = PROGRAMS["a reward that leaves a thread"]


def test_a_thread_that_never_ends_keeps_no_interpreter_from_ending() -> None:
    """A stranger's async code may leave such a job to `asyncio.to_thread`, as the advice about blocking calls says."""
    done = script(HEAD + STUCK + PROGRAMS["gives that reward"], finalized=True)
    assert done.returncode == 0, done.stderr
    assert "1" in done.stdout


def test_ctrl_c_waits_for_what_it_cancels() -> None:
    done = script(INTERRUPTED)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "1 1 [] []"
    assert second.count("answered") == 4, "the rollout goes on afterwards"


def test_a_second_ctrl_c_does_not_wait() -> None:
    text = PROGRAMS["presses Ctrl-C twice"]
    done = script(text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "")


def test_a_ctrl_c_that_another_thread_was_given_is_heard() -> None:
    """The kernel gives a signal to any thread, and Python's handlers run in the main one: nothing wakes that then."""
    text = PROGRAMS["presses Ctrl-C in another thread"]
    done = script(text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "")


SPECS = (
    {"kind": "scripted", "turns": ["a"]},
    {"kind": "scripted", "turns": ["a"], "replicas": 2},
    {"kind": "transformers", "model": "embedded:early", "threads": 1},
)


def test_rollouts_that_are_not_closed_keep_no_program_from_ending() -> None:
    """One of each engine, called in a plain way, and another one that is awaited; SGLang's is in `test_docs_site`."""
    done = script(HEAD + PROGRAMS["closes no rollout"].replace("SPECS", repr(SPECS)), finalized=True)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("still closing")]  # of a slow machine
    assert (done.returncode, done.stdout.split(), errors) == (0, ["1"] * len(SPECS) * 2, [])


def test_forks_executors_and_threads_beside_a_rollout_that_is_never_closed() -> None:
    """A forked child closes nothing of its parent's; the interpreter's end waits for no thread of an executor.

    A thread that it does wait for may go on calling.
    """
    text = HEAD + PROGRAMS["forks, and calls from threads"]
    done = script(text, finalized=True)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["child", "0", "1", "2", "3"], "")


def test_a_closed_rollout_takes_no_call() -> None:
    rollout = fr.Rollout(fr.load_agent(AGENT), {"kind": "scripted", "turns": ["a"]})
    rollout.close()
    before = set(threading.enumerate())
    calls: list[Callable[[], object]] = [
        rollout.sleep,
        rollout.wake,
        lambda: rollout.update_weights({}),
        lambda: rollout.run(["x"]),
    ]
    for call in calls:
        with pytest.raises(EngineError, match="is closed"):
            call()
    assert set(threading.enumerate()) <= before


def test_a_call_from_its_own_loop_says_so() -> None:
    loop = LoopThread()

    async def nested() -> None:
        loop.call(nested)

    with pytest.raises(EngineError, match="await the async form"):
        loop.call(nested)
    loop.close()
    assert not loop.alive


def test_a_loop_that_nobody_knows_ends() -> None:
    loop = LoopThread()
    thread = loop._thread

    async def nothing() -> None:
        return None

    loop.call(nothing)
    del loop
    thread.join()


@pytest.mark.parametrize("first", ["plain", "async"])
def test_a_pool_serves_plain_or_async_calls_and_says_so_at_once(first: str) -> None:
    spec = {"kind": "scripted", "turns": ["a"], "replicas": 2}
    with fr.Rollout(fr.load_agent(AGENT), spec) as rollout:

        async def main() -> None:
            if first == "async":
                assert len(await rollout.arun(["x"])) == 1
                with pytest.raises(EngineError, match="the engine serves another event loop"):
                    rollout.run(["y"])
            else:
                with pytest.raises(EngineError, match="the engine serves another event loop"):
                    await rollout.arun(["y"])

        if first == "plain":
            assert len(rollout.run(["x"])) == 1
        asyncio.run(main())
        if first == "async":
            assert len(asyncio.run(rollout.arun(["z"]))) == 1, "a loop that has ended is left for the next"


def test_an_engine_without_a_loop_of_its_own_serves_both_forms() -> None:
    with fr.Rollout(fr.load_agent(AGENT), fr.ScriptedEngine(["a"], tokenizer=tokenizer())) as rollout:
        assert len(rollout.run(["x"])) == len(asyncio.run(rollout.arun(["y"]))) == 1


def test_a_fork_has_threads_of_its_own() -> None:
    """Those that waited for a job in the process that was forked are not in it; a job in either finds one."""
    ended = script(PROGRAMS["forks beside a pool of threads"])
    assert (ended.returncode, ended.stdout.count("done"), ended.stderr) == (0, 2, "")
