"""Scripts of the scripted engine: which turn answers a request, and in which pieces.

Invariant: :func:`plan` is a pure function of turn and request. It keeps every promise of an engine about tokens, so the
engine itself only has to time them: a stop token ends the turn and is its last token, ``max_tokens`` and the window
cut it, and a request that continues another gets what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Annotated

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, ValidationError, model_validator

from fsm_rollout.agent.yaml.source import MAX_VALUES, SourceMap, read_text, read_yaml
from fsm_rollout.engines.protocol import NO_IDS, NO_LOGPROBS, Request
from fsm_rollout.errors import ConfigError, EngineError, Problem
from fsm_rollout.trajectory.config_errors import explanations
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.settings import StrictModel
from fsm_rollout.trajectory.tokens import Ids, Logprobs, Note, TokenScores, Usage, as_ids, as_logprobs


class Turn(StrictModel):
    """One answer of a script: its tokens come in ``chunks`` pieces, each after ``delay`` seconds."""

    text: str | None = None
    """what the model says; special tokens may stand in it by name"""
    ids: tuple[int, ...] | None = None
    """the tokens themselves, instead of text"""
    delay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """seconds before each piece"""
    chunks: int = Field(1, ge=1)
    """how many pieces the tokens come in"""
    finish_reason: FinishReason = FinishReason.STOP
    """`stop`: a stop token is appended if there is none"""
    logprob: Annotated[float, Field(le=0, allow_inf_nan=False)] | None = None
    """of every token; default: `scripted_logprob` of each"""
    error: str | None = None
    """after its tokens the request fails with this error: `Class: message`"""
    crash: str | None = None
    """after its tokens the whole dispatch fails with this EngineError"""
    fails: int | None = Field(None, ge=1)
    """so many tries fail (`error`, `crash`), the next ones succeed"""
    hang: bool = False
    """after its tokens, if any, nothing more ever comes"""

    @model_validator(mode="after")
    def _one_ending(self) -> Turn:
        if self.text is not None and self.ids is not None:
            raise ValueError("a turn has text or ids, not both")
        if sum((self.error is not None, self.crash is not None, self.hang)) > 1:
            raise ValueError("a turn ends in one way: error, crash or hang")
        if self.fails is not None and self.error is None and self.crash is None:
            raise ValueError("'fails' counts failing tries; it needs an error or a crash")
        if self.text is None and self.ids is None and (self.fails is not None or not self.broken):
            raise ValueError("a turn needs text or ids")
        return self

    @property
    def broken(self) -> bool:
        """Whether the turn ends otherwise than by a finish reason."""
        return self.error is not None or self.crash is not None or self.hang

    def mended(self) -> Turn:
        """Return the turn as it is once its failing tries are over."""
        return self.model_copy(update={"error": None, "crash": None, "fails": None})


# Turns for every context; or turns by `agent/context`, `context` or `agent`; or a function of the request.
WrittenScript = Sequence[Turn | str] | Mapping[str, Sequence[Turn | str]]
Script = WrittenScript | Callable[[Request], Turn | str]


SpokenTurns = tuple[
    Annotated[Turn, BeforeValidator(lambda turn: {"text": turn} if isinstance(turn, str) else turn)], ...
]


def _form(turns: object) -> str | None:
    return "<mapping>" if isinstance(turns, Mapping) else "<list>" if isinstance(turns, list | tuple) else None


Turns = Annotated[
    Annotated[SpokenTurns, Tag("<list>")] | Annotated[Mapping[str, SpokenTurns], Tag("<mapping>")],
    Discriminator(_form, "turns_type", "should be a list, or a mapping of agent/context, context or agent to lists"),
]


class ScriptError(EngineError):
    """A script has no turn for a request, which then fails with this error."""


def scripted_logprob(token: int, position: int) -> float:
    """Return the logprob given to ``token`` at ``position`` of its stream: exact in float32, within [-1, 0)."""
    return -((token * 31 + position * 17) % 64 + 1) / 64


def turn_for(script: Script, request: Request) -> Turn:
    """Return the turn that answers ``request``, of several that fit the most specific; ScriptError: there is none."""
    if callable(script):
        turn = script(request)
        return Turn(text=turn) if isinstance(turn, str) else turn
    where = f"agent '{request.agent}', context '{request.context}'"
    turns: Sequence[Turn | str] | None
    if isinstance(script, Mapping):
        keys = (f"{request.agent}/{request.context}", request.context, request.agent)
        turns = next((script[key] for key in keys if key in script), None)
        if turns is None:
            raise ScriptError(
                f"the script has no turns for {where} (it has {', '.join(map(repr, script)) or 'none at all'}); "
                f"add the key '{keys[0]}', '{keys[1]}' or '{keys[2]}'"
            )
    else:
        turns = script
    if request.turn >= len(turns):
        raise ScriptError(
            f"the script has {len(turns)} turn(s) for {where}, and turn {request.turn} (from 0) was asked for; "
            f"add a turn, or lower limits.assistant_turns"
        )
    turn = turns[request.turn]
    return Turn(text=turn) if isinstance(turn, str) else turn


class AnswerPlan(msgspec.Struct, frozen=True):
    """How a request will be answered: its pieces, each after ``delay`` seconds, and its end."""

    pieces: tuple[tuple[Ids, Logprobs] | tuple[Ids, Logprobs, list[Note]], ...] = ((NO_IDS, NO_LOGPROBS),)
    """At least one: ids, log-probs and, of a recorded run, what else the engine said."""
    delay: float = 0.0
    finish_reason: FinishReason = FinishReason.STOP
    error: str | None = None
    crash: str | None = None
    hang: bool = False
    versions: tuple[int, ...] = ()
    """Of each piece, the weights that sampled it; default: the engine's when it is given."""
    usage: Usage | None = None
    """As in a chunk, of a recorded answer."""
    scores: TokenScores | None = None
    """As in a chunk."""


def plan(
    turn: Turn, request: Request, *, encode: Callable[[str], Sequence[int]], eos: int | None, max_context: int
) -> AnswerPlan:
    """Return how ``turn`` answers ``request``; ScriptError if it ends with a stop token, and there is none."""
    sampling, start = request.sampling, len(request.ids)
    ids, stopped = _turn_ids(turn, request, encode, eos)
    budget = min(sampling.max_tokens, max_context - start)
    sampled = request.sampled - request.written
    if sampling.ignore_eos and ids and not turn.broken:
        pending, stopped = list(islice(cycle(ids), sampled, sampled + budget)), False
    else:
        pending = ids[sampled:]
    pieces = _pieces(pending[:budget], turn.chunks, start, turn.logprob)
    if len(pending) > budget or (len(pending) == budget and not stopped):
        return AnswerPlan(pieces, turn.delay, FinishReason.LENGTH)
    if stopped:  # a stop token ends a generation, whatever the turn would have come to
        return AnswerPlan(pieces, turn.delay, FinishReason.STOP)
    return AnswerPlan(pieces, turn.delay, turn.finish_reason, turn.error, turn.crash, turn.hang)


def score_plan(request: Request, delay: float) -> AnswerPlan:
    """Return how a request for log-probs of its own ids is answered: by :func:`scripted_logprob`, after ``delay``.

    The likeliest tokens in a token's place are those of the lowest ids, and are said to be ever less likely.
    """
    places = range(request.scored_from, len(request.ids))
    logprobs = as_logprobs([scripted_logprob(request.ids[place], place) for place in places])
    top = range(request.score_top)
    scores = TokenScores(
        logprobs, as_ids([*top] * len(places)), as_logprobs([-float(rank + 1) for rank in top] * len(places))
    )
    return AnswerPlan(delay=delay, finish_reason=FinishReason.LENGTH, scores=scores)


def _turn_ids(
    turn: Turn, request: Request, encode: Callable[[str], Sequence[int]], eos: int | None
) -> tuple[list[int], bool]:
    """Return the turn's tokens, and whether they end in a stop token."""
    ids = list(encode(turn.text or "") if turn.ids is None else turn.ids)
    stops = request.sampling.stop_ids
    if not request.sampling.ignore_eos:
        for index, token in enumerate(ids):
            if token in stops:
                return ids[: index + 1], True
    if turn.finish_reason != FinishReason.STOP or turn.broken:
        return ids, False
    end = eos if eos in stops or not stops else min(stops)
    if end is None:
        raise ScriptError("a turn ends with 'stop', but neither the request nor the tokenizer names a stop token")
    return [*ids, end], True


def _pieces(ids: Sequence[int], count: int, start: int, logprob: float | None) -> tuple[tuple[Ids, Logprobs], ...]:
    """Split into ``count`` pieces of nearly equal length (some empty when there are fewer tokens)."""
    logprobs = [
        scripted_logprob(token, position) if logprob is None else logprob for position, token in enumerate(ids, start)
    ]
    bounds = [len(ids) * index // count for index in range(count + 1)]
    return tuple((as_ids(ids[a:b]), as_logprobs(logprobs[a:b])) for a, b in pairwise(bounds))


def read_script(path: Path) -> WrittenScript:
    """Read a file of turns: a list, or a mapping of ``agent/context``, ``context`` or ``agent`` to lists.

    Raises:
        ConfigError: it is missing, no YAML, or no script; all problems at once.
    """
    source = SourceMap(str(path))
    text = read_text(path)
    if isinstance(text, Problem):
        raise ConfigError(text)
    data, problems = read_yaml(text, source, max_lines=MAX_VALUES)  # JSON is YAML, too
    if problems:
        raise ConfigError(problems)
    try:
        return TypeAdapter[WrittenScript](Turns).validate_python(data)
    except ValidationError as error:
        raise ConfigError([source.problem(*explained) for explained in explanations(error, Turns)]) from None
