"""Colours: the same for a state wherever it is shown, and readable on light and on dark."""

import itertools
import re

import pytest

from fsm_rollout.diagrams.palette import INK, PALE, Colour, colour_of, css_variables

BUILT_IN = ("PENDING", "GENERATING", "PROCESSING_TOOLS", "INTERACTING", "TERMINATED")
OWN = tuple(f"OWN_{i}" for i in range(9))
ALL = {**{name: colour_of(name, OWN) for name in (*BUILT_IN, *OWN)}, "ink": INK, "pale": PALE}


def luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(colour: str, other: str) -> float:
    darker, lighter = sorted((luminance(colour), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("name", ALL)
def test_lines_and_text_stand_out(name: str) -> None:
    for shades, page, pale in ((ALL[name].light, INK.light, PALE.light), (ALL[name].dark, INK.dark, PALE.dark)):
        assert contrast(shades.line, page.fill) >= 3
        assert contrast(shades.ink, shades.fill) >= 4.5
        assert contrast(shades.ink, page.fill) >= 4.5
        assert contrast(pale.ink, shades.fill) >= 4.5  # details in a state's box


@pytest.mark.parametrize("variant", ["light", "dark"])
def test_no_two_states_are_alike(variant: str) -> None:
    assert len({getattr(colour, variant).line for colour in ALL.values()}) == len(ALL)


def test_a_colour_stands_for_one_thing_so_it_has_one_dark_variant() -> None:
    dark: dict[str, set[str]] = {}
    for colour, role in itertools.product(ALL.values(), ("line", "fill", "ink")):
        dark.setdefault(getattr(colour.light, role), set()).add(getattr(colour.dark, role))
    assert [light for light, variants in dark.items() if len(variants) > 1] == []


def test_a_state_added_at_the_end_changes_no_other() -> None:
    for name in ("A", "B", "GENERATING", "TERMINATED"):
        assert colour_of(name, ("A", "GENERATING", "B")) == colour_of(name, ("A", "GENERATING", "B", "C"))
    assert colour_of("GENERATING", ()) == colour_of("GENERATING", ("A",))


def test_a_tenth_state_begins_again_and_an_unknown_one_has_none() -> None:
    assert colour_of("TENTH", (*OWN, "TENTH")) == colour_of("OWN_0", OWN)
    with pytest.raises(ValueError, match="NOWHERE"):
        colour_of("NOWHERE", OWN)


def test_the_page_s_variables_are_these_colours() -> None:
    css = css_variables(("A",))
    light, dark_by_system, dark_by_choice = css.splitlines()
    for name, colour in {"state-A": colour_of("A", ("A",)), "state-GENERATING": colour_of("GENERATING", ())}.items():
        assert isinstance(colour, Colour)
        for role in ("line", "fill", "ink"):
            assert f"--{name}-{role}:{getattr(colour.light, role)};" in light
            dark = f"--{name}-{role}:{getattr(colour.dark, role)};"
            assert dark in dark_by_system
            assert dark in dark_by_choice
    assert len(re.findall(r"--[\w-]+:", light)) == 3 * len((*BUILT_IN, "A", "page", "pale"))
