"""Law 8, of engines: each session that one has begun to keep ends there once, by the engine's own log."""

from collections.abc import Iterable

from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import Logged, SessionEnded
from fsm_rollout.testing.simulation.laws import LawBroken
from fsm_rollout.testing.simulation.simulate import Simulation


def ends_sessions(run: Simulation) -> None:
    """Law 8: each session that an engine has begun to keep ends there once; an engine that was killed keeps nothing."""
    lives = [life for lives in run.replicas.lives.values() for life in lives]
    for life in lives:
        left = kept_sessions(life.scripted.log, alone=len(lives) == 1)
        if life.failure is None and left:
            raise LawBroken(8, f"the engine never heard of the end of session '{left[0]}'")


def kept_sessions(log: Iterable[Logged], *, alone: bool = True) -> list[str]:
    """Return the sessions of which an engine has not heard the end, by its own log.

    Raises:
        LawBroken: one ends that is not kept, or (of an engine ``alone``, to which it cannot have moved) comes back.
    """
    kept: dict[str, bool] = {}
    for what in [line.what for line in log]:
        if isinstance(what, Request) and what.session:
            if alone and kept.get(what.session) is False:
                raise LawBroken(8, f"session '{what.session}' comes back after its end", what.trajectory_id)
            kept[what.session] = True
        elif isinstance(what, SessionEnded):
            if not kept.get(what.session):
                raise LawBroken(8, f"session '{what.session}' ends, and the engine keeps nothing for it")
            kept[what.session] = False
    return [session for session, is_kept in kept.items() if is_kept]
