"""What a trainer and a training service say to each other: MessagePack over HTTP, one answer to each question.

Invariant: every question may be asked again, because its answer was lost or either side has died meanwhile, and changes
nothing a second time. Groups travel as those of a shard do: what is known of each, the events of its trajectories where
the trainer looks at them, and its packed rows (:mod:`fsm_rollout.jobs.shard_run`). All of it is plain data: reading it
runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, TypeVar, cast

import msgspec

from fsm_rollout.jobs.shard_run import PackedPicture
from fsm_rollout.scheduler.group import GroupState
from fsm_rollout.scheduler.leased_group import LeasedGroup
from fsm_rollout.trajectory.event_bytes import encode, unpack_plain
from fsm_rollout.trajectory.pictures import StoredPicture, stored
from fsm_rollout.trajectory.prompt import Prompt

API = 1
"""The version of all that is here; both sides have the same."""
PATH = "/v1/training"
# The codes of refusals that clients act upon.
UNKNOWN_RUN, TAKEN_OVER, WEIGHTS_MISSING = "unknown_run", "taken_over", "weights_missing"
Q = TypeVar("Q", bound="Question")
WireError = tuple[str, list[tuple[Any, ...]], str]  # an error, as shards send theirs
Waiting = tuple[str, int, int, bytes]  # a group that waits for the next run: its id, index, n and prompt


class Question(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every question says."""

    client: str
    """A random name of the trainer's process; the one that has opened the service last is served, and no other."""


class Open(Question):
    """Be the one who is served; answered by :class:`Facts`."""

    api: int


class Begin(Question):
    """Begin a run, or go on with it where it stands; answered by nothing."""

    run: int
    """Its number among those of the client."""
    n: int
    target_groups: int | None = None
    over_sample: float = 1.5
    max_filtered: float | None = None
    step: int | None = None
    at_end: bool = False
    """Whether its groups are handed over all together, at its end."""
    histories: bool = False
    """Whether the events of trajectories are wanted."""
    batch: dict[str, Any] = {}
    evaluation: dict[str, Any] | None = None
    """The sampling of an evaluation beside the training; ``None``: this is the training."""
    prompts: list[bytes] = []
    pictures: list[PackedPicture] = []
    closed: bool = False
    """Whether these are all prompts."""
    resume: list[list[bytes]] = []
    acked: list[str] = []
    """Groups of earlier runs that the trainer has done with."""
    held: list[str] = []
    """Groups of this run that the trainer has."""
    counted: int = 0
    """How many groups of this run that it has count towards the target."""

    @property
    def digest(self) -> str:
        """What tells it from other runs: the same trainer, started again, asks for the same."""
        same = [self.n, self.target_groups, self.over_sample, self.max_filtered, self.step, self.at_end, self.batch]
        return sha256(encode([*same, self.prompts if self.closed else None, self.resume])).hexdigest()


class Next(Question):
    """Ask for groups that have ended; answered by :class:`Groups`, soon also where there are none."""

    run: int
    at: int
    """How many of its groups have come since it was begun, or begun again."""
    acked: list[str] = []
    """Groups that the trainer has done with since."""
    prompts: list[bytes] = []
    pictures: list[PackedPicture] = []
    position: int = 0
    """How many prompts came before these."""
    closed: bool = False
    starved: bool = False
    """Whether there are no further prompts at the moment."""
    wait: bool = True
    """Whether groups are waited for, for a while."""


class End(Question):
    """End a run before its end; answered when it has."""

    run: int


class Do(Question):
    """Have something done, by the name of one of the service's orders; answered by what it gives."""

    name: str
    number: int
    """Its number among the orders of the client: the same one is carried out once."""
    arguments: dict[str, Any] = {}


class Facts(msgspec.Struct):
    """What a client must know of a rollout to speak for it."""

    agents: dict[str, str]
    description: dict[str, Any]
    state_names: list[str]
    pad_id: int
    processor: str | None
    """Where the model's processor was loaded from, if it sees pictures."""
    evaluation_samplings: list[dict[str, Any]]
    weight_version: int
    stats: dict[str, dict[str, int]]
    body_bytes: int
    """How long a question may be."""


class Groups(msgspec.Struct):
    """Groups that have ended, in the order in which they did, and how the run stands."""

    groups: list[tuple[int, int, bytes, list[Any]]] = []
    """Of each: its index, its n, its prompt where that is wanted, and what a shard says of a group."""
    part: bytes = b""
    """The rows of all of them, packed."""
    weight_version: int = 0
    stats: dict[str, dict[str, int]] = {}
    wanted: bool = False
    """Whether the run could begin one more prompt."""
    received: int = 0
    """How many prompts it has."""
    ended: bool = False
    error: WireError | None = None
    carried: list[Waiting] = []
    """What waits for the next run, once it has ended."""
    pictures: list[PackedPicture] = []
    """Those in the prompts of what waits."""


# -- prompts and groups -----------------------------------------------------------------------------------------------


def packed_prompt(prompt: Prompt) -> bytes:
    """Return a prompt as bytes, its pictures by their names."""
    return encode(prompt.model_dump(exclude_none=True))


def prompts_of(packed: Iterable[bytes], pictures: Sequence[PackedPicture]) -> list[Prompt]:
    """Return packed prompts as they were."""
    held: list[StoredPicture] = [stored(*picture) for picture in pictures]  # until the prompts hold them
    prompts = [Prompt.model_validate(unpack_plain(each)) for each in packed]
    del held
    return prompts


def groups_of(answer: Groups) -> list[LeasedGroup]:
    """Return the groups of an answer, as they were."""
    groups = []
    for index, n, prompt, header in answer.groups:
        known = cast(Prompt, prompts_of([prompt], header[-1])[0] if prompt else None)  # `None`: nobody looks at it
        group = LeasedGroup.of(header[0], index, known, n)
        group.came_back(header, answer.part)
        group.state = GroupState.DELIVERED
        groups.append(group)
    return groups


# -- as bytes ---------------------------------------------------------------------------------------------------------


def read(body: bytes, kind: type[Q]) -> Q:
    """Return a question that was sent; ValueError: it is none of that kind, see :func:`param_of`."""
    return msgspec.msgpack.decode(body, type=kind)


def param_of(error: Exception) -> str | None:
    """Return the key at fault, where an error of :func:`read` says one."""
    found = re.findall(r"`(?:\$\.)?(\w+)[^`]*`", str(error))
    return found[-1] if found else None


write = msgspec.msgpack.Encoder().encode


def answered(body: bytes, kind: Any) -> Any:
    """Return what a service has answered, as a kind; an error is raised by whoever asked."""
    error, value = msgspec.msgpack.decode(body, type=tuple[WireError | None, msgspec.Raw])
    return error, None if error is not None else msgspec.msgpack.decode(value, type=kind)
