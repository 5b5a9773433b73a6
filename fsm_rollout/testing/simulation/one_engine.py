"""One engine under every name: whatever engine a context, a handler or an interaction asks for, this one answers.

Invariant: each name has a dispatcher of its own, made when it is first asked for, as each engine of a run has.
"""

from __future__ import annotations

from typing import Any

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Engine


class OneEngine(dict[str, EngineClient]):
    """Dispatchers by engine name, all of them to ``engine``.

    Args:
        engine: answers for all.
        chats: chat templates that the dispatchers shall share, instead of learning their own.
        options: those of :class:`~fsm_rollout.engines.client.EngineClient`.
    """

    def __init__(self, engine: Engine, *, chats: dict[object, ChatTemplate] | None = None, **options: Any) -> None:
        super().__init__()
        self._engine, self._chats, self._options = engine, chats, options
        self[POLICY]  # a run wants to see it

    def __contains__(self, name: object) -> bool:
        """Say yes: it will be there when it is asked for."""
        return isinstance(name, str)

    def __missing__(self, name: str) -> EngineClient:
        dispatcher = EngineClient(self._engine, **self._options)
        if self._chats is not None:
            dispatcher.chats = self._chats
        self[name] = dispatcher
        return dispatcher
