"""``interaction: {use: openenv, url: …}``: an environment behind a server of OpenEnv's protocol answers the model.

Invariants: a trajectory has one session at the server, from its reset to its end, and no other session ever takes that
one's place in silence: where it is lost, the trajectory fails (class ``environment``). Every sample of a group is reset
with the same seed.

The protocol is spoken here, because OpenEnv's own client opens a new session where the old one was lost.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from fsm_rollout.concurrency.seeds import derive_seed
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.tools.commands import from_environment
from fsm_rollout.tools.tool_messages import clean
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.stream import text_of

NOT_SHOWN = ("done", "reward", "metadata")  # what an observation may hold beside what the model is to read
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between two tries to get a place at a server that has no more
MOST_BYTES = 64 * 2**20  # the longest message of a server
NOT_UNDERSTOOD = "VALIDATION_ERROR"
FULL = "CAPACITY_REACHED"


class EnvironmentLost(ConnectionError):
    """The server cannot be reached, or the session at it is gone."""


class EnvironmentFailed(RuntimeError):
    """The server answers with an error."""

    def __init__(self, message: str, code: object = None, details: object = None) -> None:
        super().__init__(message)
        self.code, self.details = code, details


class OpenEnv:
    """An environment of OpenEnv (``reset``, ``step``, ``reward``, ``done``).

    Where the model has not spoken yet, the reply is the observation of the reset; then each turn is an action, and the
    reply its observation, with its reward as the turn's score. An action that does not fit the environment's schema is
    answered with what is wrong with it, and not taken.

    Args:
        url: where the server is.
        seed: of the reset. By default it follows from the prompt's id, so it is the same for all samples of a group.
        reset: further arguments of the reset.
        action: the field of the action that a turn's text goes to; by default the only one that is required, else a
            turn must be a JSON object with the action's fields.
        observation: the field of the observation that the model reads; by default the only one there is, else all of
            them as JSON.
        repeatable: whether the same seed and actions always give the same observations. Then a trajectory can go on in
            another process, by its actions; otherwise it begins anew there.
        headers: sent to the server; ``$NAME`` is read from our environment.
    """

    def __init__(
        self,
        url: str,
        *,
        seed: int | None = None,
        reset: Mapping[str, object] | None = None,
        action: str | None = None,
        observation: str | None = None,
        repeatable: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`url` must begin with http:// or https://, got {url!r}")
        self._url = url.rstrip("/")
        self._seed, self._reset, self._headers = seed, dict(reset or {}), dict(headers or {})
        self._action, self._observation, self._repeatable = action, observation, repeatable
        self.resumable = repeatable  # else a trajectory begins anew in another process
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._is_open = False  # whether the session stands where the conversation stands

    async def reply(self, conversation: Conversation) -> Reply:
        """Take the model's turn as an action; before its first turn, return what there is to see.

        Raises:
            EnvironmentLost: the server cannot be reached, it has ended, or the session was another process's.
            EnvironmentFailed: the server answers with an error.
        """
        try:
            was_open, self._is_open = self._is_open, False
            state: Mapping[str, Any] | None = None
            if not was_open:
                state = await self._open(conversation)
            spoken = any(message["role"] == "assistant" for message in self._since_the_prompt(conversation))
            reply = await self._step(conversation.text) if spoken else self._reply(state or {}, None)
            self._is_open = True
            return reply
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, EnvironmentLost):
                raise
            raise EnvironmentLost(f"environment {self._url}: {type(error).__name__}: {error}") from error
        finally:
            if not self._is_open:  # whatever comes now would be the answer to something else
                await self.close()

    async def close(self) -> None:
        """End the session."""
        http, socket, was_open = self._http, self._socket, self._is_open
        self._http, self._socket, self._is_open = None, None, False
        try:
            if socket is not None and was_open and not socket.closed:
                await socket.send_json({"type": "close"})
                await socket.close()
        except (aiohttp.ClientError, OSError):
            pass  # it is gone
        finally:
            if http is not None:
                await http.close()

    # -- the session ----------------------------------------------------------------------------------------------

    async def _open(self, conversation: Conversation) -> Mapping[str, Any]:
        """Open a session that stands where the conversation stands, and return the reset's result."""
        replies = conversation.replies
        if replies and not self._repeatable:
            raise EnvironmentLost(
                f"environment {self._url}: its session was lost after {replies} replies, and a new one knows nothing "
                "of them; if the same seed and actions always give the same observations, set `repeatable: true`"
            )
        state = await self._begin(conversation)
        if not replies:
            return state
        # The earlier replies are replayed, and must come to the same observations.
        messages, text, done_again = self._since_the_prompt(conversation), None, 0
        for message in messages:
            if message["role"] == "assistant":
                text = text_of(message)
            elif message["role"] == "user" and done_again < replies:
                reply = await self._step(text) if text is not None else self._reply(state, None)
                if clean(reply.content or "") != text_of(message):
                    raise EnvironmentLost(
                        f"environment {self._url}: replayed, reply {done_again + 1} is {reply.content!r:.200} "
                        f"instead of {text_of(message)!r:.200}: it is not `repeatable`"
                    )
                done_again += 1
        if done_again < replies:
            raise EnvironmentLost(
                f"environment {self._url}: the conversation holds {done_again} of its {replies} replies, so they "
                "cannot be replayed"
            )
        return state

    async def _begin(self, conversation: Conversation) -> Mapping[str, Any]:
        """Connect and reset; where the server has no place, wait for one (as long as the visit's timeout allows)."""
        await self.close()
        no_timeout = aiohttp.ClientTimeout(total=None)  # the visit has one
        self._http = aiohttp.ClientSession(headers=from_environment(self._headers), timeout=no_timeout)
        if self._action is None:
            self._action = await self._only_field()
        seed = self._seed
        if seed is None:
            seed = derive_seed("environment", conversation.trajectory.group_id) % 2**31
        pause = FIRST_PAUSE
        while True:
            self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=MOST_BYTES)
            try:
                return await self._ask("reset", {"seed": seed} | self._reset)
            except EnvironmentFailed as error:
                if error.code != FULL:
                    raise
            await self._socket.close()
            await asyncio.sleep(pause * (0.5 + conversation.rng.random() / 2))
            pause = min(LONGEST_PAUSE, 2 * pause)

    async def _only_field(self) -> str:
        """Return the action's one required field; nothing, if a turn must name its fields itself."""
        assert self._http is not None
        async with self._http.get(f"{self._url}/schema") as response:
            response.raise_for_status()
            required = (await response.json())["action"].get("required", [])
        return str(required[0]) if len(required) == 1 else ""

    async def _ask(self, kind: str, data: Mapping[str, object]) -> Mapping[str, Any]:
        assert self._socket is not None
        await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentLost(f"environment {self._url}: the server closed the session during `{kind}`")
        answer = json.loads(message.data)
        result: Mapping[str, Any] = answer.get("data") or {}
        if answer.get("type") != "error":
            return result
        text = f"environment {self._url}: {kind}: {result.get('message', answer)} ({result.get('code', 'no code')})"
        raise EnvironmentFailed(text, result.get("code"), result.get("errors"))

    # -- actions and observations ---------------------------------------------------------------------------------

    async def _step(self, text: str) -> Reply:
        assert self._action is not None
        action: Any = {self._action: text}
        if not self._action:
            try:
                action = json.loads(text)
            except ValueError as error:
                return Reply(f"Your action was not understood: it is not JSON ({error}).")
            if not isinstance(action, dict):
                return Reply("Your action was not understood: it must be a JSON object with the action's fields.")
        try:
            result = await self._ask("step", action)
        except EnvironmentFailed as error:
            if error.code != NOT_UNDERSTOOD:
                raise
            return Reply(f"Your action was not understood: {'; '.join(_problems(error.details))}.")
        reward = result.get("reward")
        return self._reply(result, None if reward is None else float(reward))

    def _reply(self, result: Mapping[str, Any], score: float | None) -> Reply:
        observation = result.get("observation") or {}
        shown = {key: value for key, value in observation.items() if key not in NOT_SHOWN}
        if self._observation is not None and self._observation not in shown:
            there_are = ", ".join(shown) or "none"
            raise EnvironmentFailed(
                f"environment {self._url}: the observation has no field '{self._observation}'; it has: {there_are}"
            )
        value: object = shown
        if self._observation is not None:
            value = shown[self._observation]
        elif len(shown) == 1:
            (value,) = shown.values()
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return Reply(text, score, done=bool(result.get("done")))

    @staticmethod
    def _since_the_prompt(conversation: Conversation) -> Sequence[Message]:
        """Return the messages after those of the prompt."""
        skipped = len(conversation.trajectory.prompt_messages)
        added = conversation.messages[0]["role"] == "system" != conversation.trajectory.prompt_messages[0]["role"]
        return conversation.messages[skipped + added :]


def _problems(details: object) -> Iterator[str]:
    for problem in details if isinstance(details, list) else []:
        yield f"{'.'.join(map(str, problem.get('loc', ())))}: {problem.get('msg', 'it is wrong')}"
