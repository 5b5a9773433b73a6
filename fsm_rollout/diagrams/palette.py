"""One colour per state, the same in every view, on light and on dark.

Invariant: a colour depends on the state's name and on the order in which the states are declared, on nothing else. The
five built-in states have theirs for good; the others take theirs in turn, so a state added at the end changes no other.

The hues are those of Okabe and Ito (2008, https://jfly.uni-koeln.de/color) and, after them, of Tol's *muted* scheme
(2021, https://personal.sron.nl/~pault): both are told apart with any of the common colour deficiencies. Each has been
darkened for white and lightened for black until a line of it stands out by 3:1 (WCAG 2.2, 1.4.11), and text on its fill
by 4.5:1 (1.4.3). No two of the first nine states of one's own share a colour; there are no more hues than that which
everybody can tell apart, so the tenth has the colour of the first, and labels have to say which is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fsm_rollout.agent.graph import GENERATING, INTERACTING, PENDING, PROCESSING_TOOLS, TERMINATED

_WHITE, _BLACK = "#ffffff", "#0d1117"


class Shades(NamedTuple):
    """A colour on one background, each as ``#rrggbb``."""

    line: str  # borders, lines, bars, dots: at least 3:1 against the background
    fill: str  # areas behind text; nearly the background
    ink: str  # text on `fill` or on the background: at least 4.5:1


class Colour(NamedTuple):
    """A colour in both of its variants."""

    light: Shades
    dark: Shades


def _mix(colour: str, other: str, share: float) -> str:
    """Return ``colour`` with ``share`` (0 to 1) of ``other`` in it."""
    pairs = zip(bytes.fromhex(colour[1:]), bytes.fromhex(other[1:]), strict=True)
    return "#" + bytes(round(a + (b - a) * share) for a, b in pairs).hex()


def _colour(on_white: str, on_black: str) -> Colour:
    return Colour(
        light=Shades(on_white, _mix(on_white, _WHITE, 0.88), _mix(on_white, "#000000", 0.55)),
        dark=Shades(on_black, _mix(on_black, _BLACK, 0.83), _mix(on_black, "#ffffff", 0.55)),
    )


_BUILT_IN = {
    PENDING: _colour("#7d8590", "#99a2ad"),
    GENERATING: _colour("#0072b2", "#4aa8e0"),  # Okabe–Ito blue
    PROCESSING_TOOLS: _colour("#c77700", "#e69f00"),  # orange
    INTERACTING: _colour("#008a65", "#2bb88f"),  # bluish green
    TERMINATED: _colour("#3d444d", "#c9d1d9"),
}
_FURTHER = (
    _colour("#b5568c", "#e08fbb"),  # Okabe–Ito reddish purple
    _colour("#d55e00", "#f0803c"),  # vermillion
    _colour("#2f93c9", "#7cc8f2"),  # sky blue
    _colour("#9a8a00", "#f0e442"),  # yellow
    _colour("#332288", "#a79bea"),  # Tol indigo
    _colour("#882255", "#d9709f"),  # wine
    _colour("#117733", "#57b873"),  # green
    _colour("#2f8f80", "#63ccba"),  # teal
    _colour("#8f8f2f", "#c4c463"),  # olive
)

# What has no state: lines, the page itself, and text.
INK = Colour(Shades("#6e7781", _WHITE, "#1f2328"), Shades("#8b949e", _BLACK, "#e6edf3"))
# What stands back: implicit transitions, captions, panels.
PALE = Colour(Shades("#848d97", "#f6f8fa", "#59636e"), Shades("#6e7681", "#161b22", "#a3abb4"))


def colour_of(state: str, order: Sequence[str]) -> Colour:
    """Return the colour of ``state`` in a graph that declares its states in ``order`` (``tuple(graph.states)``).

    Raises:
        ValueError: ``state`` is neither built in nor in ``order``.
    """
    if state in _BUILT_IN:
        return _BUILT_IN[state]
    own = [name for name in order if name not in _BUILT_IN]
    if state not in own:
        raise ValueError(f"state '{state}' is not among {', '.join(order) or 'no states'}")
    return _FURTHER[own.index(state) % len(_FURTHER)]


def css_variables(order: Sequence[str]) -> str:
    """Return CSS that declares every colour for a page about a graph that declares its states in ``order``.

    ``--NAME-line``, ``--NAME-fill`` and ``--NAME-ink``, where ``NAME`` is ``state-GENERATING`` and so on, ``page`` or
    ``pale``. They follow the reader's ``prefers-color-scheme``; ``<html data-theme="light">`` (or ``dark``) overrides.
    """
    colours = {f"state-{name}": colour_of(name, order) for name in (*_BUILT_IN, *order)} | {"page": INK, "pale": PALE}
    light, dark = (
        "".join(
            f"--{name}-{role}:{shade};"
            for name, colour in colours.items()
            for role, shade in colour[variant]._asdict().items()
        )
        for variant in (0, 1)
    )
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
    )
