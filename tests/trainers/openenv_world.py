"""A program: a game on OpenEnv's own server, which writes down what happens in its sessions.

    python -m tests.trainers.openenv_world LOG SESSIONS [fields]

With ``fields`` an action has two required fields instead of one.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

LOG = Path(sys.argv[1])
_numbers = itertools.count()


class Guess(Action):
    text: str


class Move(Action):
    x: int
    y: int


class Seen(Observation):
    text: str


class Game(Environment[Any, Seen, State]):
    """Says higher or lower; some words make it misbehave."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.session, self.steps = 0, next(_numbers), 0
        self.log("begin")

    def log(self, what: str) -> None:
        with LOG.open("a") as file:
            file.write(f"{self.session} {what}\n")

    def reset(self, seed: int | None = None, episode_id: str | None = None, most: int = 100, **_: Any) -> Seen:
        self.number = random.Random(seed).randint(1, most)
        self.log(f"reset {seed}")
        return Seen(text=f"I think of a number from 1 to {most}.")

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Seen:
        self.steps += 1
        if isinstance(action, Move):
            return Seen(text=f"{self.steps}: {action.x + action.y}", reward=0.5, done=self.steps >= 2)
        self.log(f"step {action.text}")
        match action.text:
            case "fail":
                raise RuntimeError("the game is broken")
            case "die":
                os._exit(1)
            case "hang":
                time.sleep(600)
            case "clock":
                return Seen(text=f"it is {time.time_ns()}", reward=0.0)
        words = [word for word in action.text.replace(".", " ").split() if word.isdigit()]
        guess = int(words[-1]) if words else 0
        if guess == self.number:
            return Seen(text=f"{self.steps}: found", reward=1.0, done=True)
        return Seen(text=f"{self.steps}: {'higher' if guess < self.number else 'lower'}", reward=0.0)

    def close(self) -> None:
        self.log("close")

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(Game, Move if "fields" in sys.argv else Guess, Seen, max_concurrent_envs=int(sys.argv[2]))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
