"""Token streams, built the way trajectories build them.

Invariant: :class:`~fsm_rollout.trajectory.tokens.TokenStream` itself has put together every stream, from pieces that
are kept beside it, so that a test knows what went in.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from fsm_rollout.testing.strategies.histories import ids, logprob, token
from fsm_rollout.trajectory.tokens import TokenStream


@dataclass(frozen=True)
class Piece:
    """A run of tokens that went into a stream; ``logprobs`` is ``None`` for what the environment wrote."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    turn: int
    version: int


_sampled = st.builds(
    lambda pairs, turn, version: Piece(tuple(t for t, _ in pairs), tuple(p for _, p in pairs), turn, version),
    st.lists(st.tuples(token, logprob), max_size=4),
    st.integers(0, 2),
    st.integers(0, 3),
)
_written = st.builds(lambda drawn, turn: Piece(tuple(drawn), None, turn, -1), ids, st.integers(0, 2))


@st.composite
def token_streams(draw: st.DrawFn, *, max_pieces: int = 6) -> tuple[TokenStream, list[Piece]]:
    """Draw a stream and the pieces that it was made of, the opening prompt first."""
    prompt = draw(ids)
    stream = TokenStream(prompt, state="PENDING", trained=draw(st.booleans()))
    pieces = draw(st.lists(_sampled | _written, max_size=max_pieces))
    for piece in pieces:
        if piece.logprobs is None:
            stream.write(piece.ids, state="PROCESSING_TOOLS", turn=piece.turn)
        else:
            stream.sample(piece.ids, piece.logprobs, state="GENERATING", turn=piece.turn, version=piece.version)
    return stream, [Piece(tuple(prompt), None, 0, -1), *pieces]
