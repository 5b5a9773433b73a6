"""The agent of a simulation: its trajectories say what a workload has them say, in *blocks* of tokens.

Invariant: scheduler, pool, streams and sessions are the real ones; only what is said and how long tools take comes from
the workload. A token of the simulation stands for a block of :attr:`Lives.block` tokens, so a context of 128k tokens is
an array of a few thousand; all that a trajectory says is one id, of its own, so engines share what trajectories share:
the system's prompt, and the prompt of a group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.markers import Encoded
from fsm_rollout.chat.reference import FollowUp, Opening
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.script import Turn as Answer
from fsm_rollout.simulation.workload import Life, Workload
from fsm_rollout.states.base import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.trajectory.enums import LimitName
from fsm_rollout.trajectory.events import Message, ToolCall
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.stream import text_of
from fsm_rollout.trajectory.tokens import Ids
from fsm_rollout.trajectory.trajectory import Trajectory

END, SYSTEM, FIRST = 0, 1, 2  # the id that ends a turn, that of the system's prompt, and the first of all others


class Lives:
    """What each trajectory of a workload does, in blocks.

    Args:
        workload: in tokens.
        block: tokens that one id stands for.
    """

    def __init__(self, workload: Workload, block: int) -> None:
        self.workload, self.block = workload, block
        self._ids: dict[tuple[int, ...], int] = {}  # by group, sample, and the turns that sub-agents were asked after
        openings = [self._opening(FIRST + number, lives[0][0].adds) for number, lives in enumerate(workload.groups)]
        self.prompts = [
            Prompt(prompt_id=f"g{number}", messages=({"role": "user", "content": opening},))
            for number, opening in enumerate(openings)
        ]

    def blocks(self, tokens: int) -> int:
        """Return in how many blocks some tokens are."""
        return max(1, round(tokens / self.block))

    def _opening(self, id_: int, tokens: int) -> str:
        """Return a first message of so many tokens, the system's among them."""
        system = min(self.workload.system, tokens - 1)
        shared = f"{SYSTEM}:{self.blocks(system)} " if system else ""
        return f"{shared}{id_}:{self.blocks(tokens - system)}"

    def of(self, trajectory_id: str) -> tuple[int, Life]:
        """Return the id that stands for what a trajectory says, and its turns."""
        group, sample, *calls = trajectory_id.split("/")
        lives = self.workload.groups[int(group[1:])]
        number = int(sample.partition("~")[0]) % len(lives)
        life, path = lives[number], [int(group[1:]), number]
        for call in calls:
            turn = int(call.partition("~")[0].rpartition("h")[2])
            life, path = life[turn].helper, [*path, turn]
        return self._ids.setdefault(tuple(path), FIRST + len(self.workload.groups) + len(self._ids)), life

    def says(self, request: Request) -> Answer:
        """Return what an engine says to a request."""
        id_, life = self.of(request.trajectory_id)
        # The first block comes with the prompt, and takes no step: half a block more evens that out.
        return Answer(ids=(id_,) * (life[request.turn].says // self.block) + (END,))

    def result(self, trajectory_id: str, turn: int) -> Message:
        """Return what comes after a turn, before the next."""
        id_, life = self.of(trajectory_id)
        return {"role": "user", "content": f"{id_}:{self.blocks(life[turn + 1].adds)}"}

    def task(self, trajectory_id: str, turn: int) -> str:
        """Return what a sub-agent is asked."""
        id_, life = self.of(f"{trajectory_id}/delegate.h{turn}")
        return self._opening(id_, life[0].adds)


class Working(State):
    """WORKING: waits as long as the workload says, asks a sub-agent if it says so, and writes the next message."""

    triggers = ("worked", "over")
    spends = LimitName.TOOL_CALLS

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Do what comes after the latest turn."""
        lives: Lives = LIVES[-1]
        turn = trajectory.generations - 1
        _, life = lives.of(trajectory.trajectory_id)
        if life[turn].helper:
            task = lives.task(trajectory.trajectory_id, turn)
            await ctx.call_tool(ToolCall(id=f"h{turn}", name="delegate", arguments={"task": task}))
        if turn + 1 >= len(life):
            return Outcome("over")
        if gap := life[turn].gap:
            await asyncio.sleep(gap)
        ctx.write([lives.result(trajectory.trajectory_id, turn)], context=self.spec.context)
        return Outcome("worked")


LIVES: list[Lives] = []
"""Those of the simulation that runs, the latest one last: handlers are made by name."""


class BlockChat(ChatTemplate):
    """A chat template that writes the ids which messages name: ``"1:30 7:12"`` is 30 times 1 and 12 times 7."""

    def __init__(self) -> None:
        self.history, self.stop_ids, self.pads = "keep", frozenset({END}), frozenset()
        self.decode = lambda ids: ""

    sees = False
    drops_results_pictures = ""

    def hidden_tools(self, system: str | None, tools: Sequence[Any]) -> list[str]:
        """Return none: nobody reads it."""
        return []

    def encode_here(self, asked: Opening | FollowUp) -> Encoded:
        """Return the ids that messages name."""
        return Encoded(_ids(asked.messages if isinstance(asked, Opening) else asked.new))

    async def encode(self, asked: Opening | FollowUp) -> Encoded:
        """Return the ids that messages name."""
        return self.encode_here(asked)


def _ids(messages: Iterable[Mapping[str, Any]]) -> Ids:
    ids = Ids("i")
    for message in messages:
        for run in text_of(dict(message)).split():
            id_, _, count = run.partition(":")
            ids.extend(Ids("i", [int(id_)]) * int(count))
    return ids


class _Chats(dict[object, ChatTemplate]):
    """One chat template for all settings."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> ChatTemplate:
        return self.setdefault(None, BlockChat())


def client_of(pool: EnginePool) -> EngineClient:
    """Return a client of a pool whose chats are written in blocks."""
    client = EngineClient(pool)
    client.chats = _Chats()
    return client


class BlockTokenizer:
    """What engines want of a tokenizer: the token that ends a turn."""

    eos_token_id = pad_token_id = END
    chat_template = ""

    def encode(self, text: str, **_: object) -> list[int]:
        """Return the ids that a text names."""
        return list(_ids([{"role": "user", "content": text}]))

    def decode(self, ids: Sequence[int], **_: object) -> str:
        """Return nothing: nobody reads it."""
        return ""
