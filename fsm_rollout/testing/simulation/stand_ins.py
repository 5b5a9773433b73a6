"""The world around a simulated run: tools and users that act as a plan says, engines that can die.

Invariant: a simulated tool keeps the real one's schema and the real check of a model's arguments, and calls none of its
code. Which fate a call meets depends on the call's own randomness alone (trajectory, call, try), never on any order.
The log of :class:`MortalReplicas` is the replicas' own: every request that reached one and every chunk that left one,
over all lives, in the order in which that happened.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from pydantic import TypeAdapter

from fsm_rollout.agent.graph import POLICY, AgentGraph, InteractionSpec
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Chunk, Engine, ReplicaLost, Request, TokenSource
from fsm_rollout.engines.replica import LocalPlacement
from fsm_rollout.engines.scripted.engine import Logged, ScriptedEngine, SessionEnded
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.states.external.agent_histories import AgentHistories
from fsm_rollout.states.external.chat_request import ChatRequest, ProtocolError
from fsm_rollout.states.external.handler import External
from fsm_rollout.testing.simulation.plan import ReplyFate, ToolFate
from fsm_rollout.tools.base import ToolResult
from fsm_rollout.tools.bound_tools import BoundTool, MakeContext, Session
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory


def with_agents(graph: AgentGraph, change: Callable[[AgentGraph], AgentGraph]) -> AgentGraph:
    """Return the agent with ``change`` made to it and to those that it uses as tools."""
    tools = {
        name: tool if tool.agent is None else tool.model_copy(update={"agent": with_agents(tool.agent, change)})
        for name, tool in graph.tools.items()
    }
    return change(graph.model_copy(update={"tools": tools}))


# -- tools ----------------------------------------------------------------------------------------------------------


class SimulatedTool(BoundTool):
    """Stands in for a tool that runs code."""

    def __init__(self, real: BoundTool, fates: Sequence[ToolFate]) -> None:
        super().__init__(real.name, real.spec)
        self.schema = real.schema
        self.read = real.read  # type: ignore[method-assign]  # the arguments are checked as the real tool does
        self.fates = tuple(fates)

    def check(self, tools_kwargs: Mapping[str, object]) -> None:
        """Accept whatever a prompt gives, or nothing: none of the tool's code runs."""

    async def call(self, session: Session, arguments: dict[str, object], context: MakeContext) -> object:
        """Do what the plan says."""
        fate = self.fates[0] if len(self.fates) == 1 else context("fate").rng.choice(self.fates)
        await fate.meet()
        return ToolResult(fate.text, fate.reward)


# -- users ----------------------------------------------------------------------------------------------------------

_reply_fates = TypeAdapter(tuple[ReplyFate, ...])
_read_fates = lru_cache(maxsize=64)(_reply_fates.validate_json)


class SimulatedUser:
    """An interaction whose replies are drawn; after the last one the conversation is over."""

    resumable = True  # how many replies there were tells it all

    def __init__(self, replies: str = "[]") -> None:
        self._fates = _read_fates(replies)

    async def reply(self, conversation: Conversation) -> Reply:
        """Say what the plan says."""
        if conversation.replies >= len(self._fates):
            return Reply(None, done=True)
        fate = self._fates[conversation.replies]
        await fate.meet()
        return Reply(fate.text, fate.score, done=fate.done or fate.text is None)


def with_simulated_users(graph: AgentGraph, replies: Sequence[ReplyFate]) -> AgentGraph:
    """Return the agent with every interaction replaced, those of its sub-agents too."""
    user = InteractionSpec(
        use=f"{__name__}:{SimulatedUser.__name__}",
        kwargs={"replies": _reply_fates.dump_json(tuple(replies)).decode()},  # as one text: every trajectory copies it
    )

    def replaced(graph: AgentGraph) -> AgentGraph:
        states = {
            name: state if state.interaction is None else state.model_copy(update={"interaction": user})
            for name, state in graph.states.items()
        }
        return graph.model_copy(update={"interaction": graph.interaction and user, "states": states})

    return with_agents(graph, replaced)


# -- foreign agents -------------------------------------------------------------------------------------------------


class SimulatedAgent(External):
    """A foreign agent whose calls are drawn: it goes on with its history, or rewrites it; none of its code runs."""

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Make up to three calls."""
        histories = AgentHistories(ctx, self.spec.context, {})
        messages = [dict(message) for message in trajectory.prompt_messages]
        for number in range(ctx.rng.randint(0, 3)):
            try:
                answer = await histories.answer(ChatRequest([dict(message) for message in messages]))
            except ProtocolError:
                break
            answer.delivered()
            reply = answer.reply.message if ctx.rng.random() < 0.8 else {"role": "assistant", "content": "shorter"}
            messages += [reply, {"role": "user", "content": f"go on {number}"}]
        return histories.outcome()


# -- engines --------------------------------------------------------------------------------------------------------


class OneEngine(dict[str, EngineClient]):
    """Clients by engine name, all of them of ``engine``, each made when it is first asked for.

    Args:
        engine: answers for all.
        chats: chat templates that the clients share, instead of learning their own.
    """

    def __init__(self, engine: TokenSource | EnginePool, *, chats: dict[object, ChatTemplate] | None = None) -> None:
        super().__init__()
        self._pool = EngineClient(engine).pool
        self._chats = chats
        self[POLICY]  # a run wants to see it

    def __contains__(self, name: object) -> bool:
        """Return True: a client is made when it is first asked for."""
        return isinstance(name, str)

    def __missing__(self, name: str) -> EngineClient:
        client = self[name] = EngineClient(self._pool)
        if self._chats is not None:
            client.chats = self._chats
        return client


class MortalReplica:
    """One life of a scripted engine, which gets everything until it is killed; ``log`` is that of all lives."""

    def __init__(self, name: str, scripted: ScriptedEngine, log: list[Logged]) -> None:
        self.name, self.scripted, self._traffic = name, scripted, log
        self.failure: ReplicaLost | None = None

    def __getattr__(self, name: str) -> Any:
        """Return the scripted engine's attribute; after a kill, orders raise the failure."""
        if self.failure is not None and name in ("update_weights", "pause", "resume", "sleep", "wake"):
            raise self.failure
        return getattr(self.scripted, name)

    async def ping(self) -> None:
        """Answer while it lives."""

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Hear of it, while it lives."""
        if self.failure is None:
            now = asyncio.get_running_loop().time()
            self._traffic += [Logged(now, SessionEnded(session)) for session in sessions]
            self.scripted.end_sessions(sessions)

    def kill(self) -> None:
        """End this life as the death of a process does: nothing more leaves it, nothing more reaches it."""
        if self.failure is None:
            self.failure = ReplicaLost(f"the process of {self.name} was killed")
            self.scripted.crash(str(self.failure))

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Start a dispatch; after a kill, raise the failure."""
        if self.failure is not None:
            raise self.failure
        self._traffic += [Logged(asyncio.get_running_loop().time(), request) for request in requests]
        return self._logged(self.scripted.generate(requests))

    async def _logged(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        loop = asyncio.get_running_loop()
        async for chunk in chunks:
            if self.failure is None:  # else the error comes next
                self._traffic.append(Logged(loop.time(), chunk))
                yield chunk


class MortalReplicas(LocalPlacement):
    """Makes replicas of engines that keep a log, and knows every life there was.

    Args:
        build: makes the engine of one life from its replica's name; with ``log=True``.
    """

    def __init__(self, build: Callable[[str], ScriptedEngine]) -> None:
        super().__init__(build)
        self.lives: dict[str, list[MortalReplica]] = defaultdict(list)
        self.traffic: list[Logged] = []  # every request that reached a replica and every chunk that left one, so far
        self._scripted = build

    async def start(self, name: str) -> Engine:
        """Begin another life at once: a thread would end at any step of the loop, and no two runs would be the same."""
        life = MortalReplica(name, self._scripted(name), self.traffic)
        self.lives[name].append(life)
        return cast(Engine, life)

    def kill(self, number: int) -> None:
        """Kill a replica, counted from 0 and round again; one that is dead stays so until it is started again."""
        names = list(self.lives)
        self.lives[names[number % len(names)]][-1].kill()

    @property
    def living(self) -> list[ScriptedEngine]:
        """The engines that have not been killed."""
        return [lives[-1].scripted for lives in self.lives.values() if lives[-1].failure is None]

    def log(self, up: Iterable[str]) -> list[Logged]:
        """Return the whole log, as it stands while the replicas named in ``up`` take part.

        Tokens that a life had sampled and not sent when it ended are left out: nobody received them. Those that a
        living engine has not sent come last, so a law finds that no stream has them.
        """
        received = {id(line.what) for line in self.traffic}
        living = [life for life in (self.lives[name][-1] for name in up) if life.failure is None]
        logged = [line for life in living for line in life.scripted.log]
        unsent = [line for line in logged if isinstance(line.what, Chunk) and len(line.what.ids)]
        return self.traffic + [line for line in unsent if id(line.what) not in received]
