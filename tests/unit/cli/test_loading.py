"""A command that is slow to load says so, and one that is not says nothing."""

import threading

import pytest

from fsm_rollout.cli import terminal


def test_packages_that_take_long_are_worth_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    told, said = threading.Event(), list[str]()

    def echo(words: str, err: bool) -> None:
        assert err
        said.append(words)
        told.set()

    monkeypatch.setattr(terminal.typer, "echo", echo)
    monkeypatch.setattr(terminal, "SLOW_AFTER", 600.0)
    with terminal.loading():
        ticking = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    for thread in ticking:
        thread.join()
    assert ticking
    assert said == []
    monkeypatch.setattr(terminal, "SLOW_AFTER", 0.0)
    with terminal.loading():
        assert told.wait(600)
    assert said == ["loading packages …"]
