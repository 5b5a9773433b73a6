"""Two numbers in a noisy picture, to be added: the drawing, the `zoom` tool, the prompts and their controls.

Invariant: where the numbers stand and what they are is in the pixels alone. The picture has 4 × 4 cells, two of which
hold a number of two digits. A model that sees it whole, at a quarter of its size, sees which cells hold something; a
crop has the cell's own pixels. No pair of numbers of a held-back prompt occurs in training, in either order.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from fsm_rollout import BadArguments
from fsm_rollout.tools import Hidden
from fsm_rollout.trajectory.pictures import picture_of

CELL = 32  # pixels to a side, of a cell, and of a picture as the model sees it
CELLS = 4  # to a side
QUESTION = "What is the sum of the two numbers?"
Control = Literal["blank", "swapped"]
Pixels = NDArray[np.uint8]

_FONT = """
.###. ..#.. .###. .###. ...#. ##### .###. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... #.... ....# #...# #...#
#..## ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ..##. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# ..#.. #...# ....#
.###. .###. ##### .###. ...#. .###. .###. ..#.. .###. .###.
"""
DIGITS = np.array(
    [[[dot == "#" for dot in row.split()[digit]] for row in _FONT.strip().splitlines()] for digit in range(10)]
)
_NUMBERS = np.zeros((100, 14, 22), bool)  # of two digits, a dot being 2 × 2 pixels
for _number in range(100):
    for _at, _digit in enumerate(divmod(_number, 10)):
        _NUMBERS[_number, :, 12 * _at : 12 * _at + 10] = DIGITS[_digit].repeat(2, 0).repeat(2, 1)


def cells(rng: np.random.Generator, numbers: NDArray[np.int64]) -> Pixels:
    """Draw cells ``[n, 32, 32]``: each a number of two digits, or nothing where it is negative; light, on noise."""
    drawn = np.zeros((len(numbers), CELL, CELL), np.float32)
    places = rng.integers(0, 5, (len(numbers), 2))
    for at in np.nonzero(numbers >= 0)[0]:
        top, left = places[at] + (7, 3)
        drawn[at, top : top + 14, left : left + 22] = _NUMBERS[numbers[at]]
    drawn = 80 + drawn * rng.uniform(90, 130, (len(numbers), 1, 1)).astype(np.float32)
    drawn += 25 * rng.standard_normal(drawn.shape, np.float32)
    return drawn.clip(0, 255).astype(np.uint8)


def pictures(rng: np.random.Generator, numbers: NDArray[np.int64]) -> Pixels:
    """Draw whole pictures ``[n, 128, 128]``; ``numbers`` ``[n, 16]`` are those of their cells."""
    drawn = cells(rng, numbers.reshape(-1)).reshape(len(numbers), CELLS, CELLS, CELL, CELL)
    return drawn.swapaxes(2, 3).reshape(len(numbers), CELLS * CELL, CELLS * CELL)


def is_held_back(left: int, right: int) -> bool:
    """Say whether a pair of numbers is one of the tenth that training never meets."""
    return crc32(f"{min(left, right)},{max(left, right)}".encode()) % 10 == 0


def zoom(row: int, column: int, picture: Annotated[str, Hidden]) -> Any:
    """Look at one cell.

    Args:
        row: 1 to 4, from the top.
        column: 1 to 4, from the left.
        picture: The whole, as a ``data:`` URI; the model is not shown this parameter.
    """
    if not (1 <= row <= CELLS and 1 <= column <= CELLS):
        raise BadArguments(f"there are {CELLS} rows and {CELLS} columns")
    top, left = CELL * (row - 1), CELL * (column - 1)
    return picture_of(picture).image().crop((left, top, left + CELL, top + CELL))


def prompts(number: int = 256, seed: int = 0, held_back: bool = True, control: Control | None = None) -> list[Any]:
    """Return prompts, each with its picture; as a control, with a blank picture or the next prompt's.

    The tool crops what the prompt shows, so a control is one all the way down.
    """
    rng = np.random.default_rng(seed)
    pairs = list[tuple[int, int]]()
    while len(pairs) < number:
        left, right = rng.integers(10, 100, 2).tolist()
        if is_held_back(left, right) == held_back:
            pairs.append((left, right))
    grid = np.full((number, CELLS * CELLS), -1)
    for at, pair in enumerate(pairs):
        grid[at, np.sort(rng.permutation(CELLS * CELLS)[:2])] = pair
    shown = list(map(picture_of, pictures(rng, np.full_like(grid, -1) if control == "blank" else grid)))
    if control == "swapped":
        shown = shown[1:] + shown[:1]
    return [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]}
            ],
            "answer": str(sum(pair)),
            "tools_kwargs": {"zoom": {"picture": image.data_uri()}},
        }
        for pair, image in zip(pairs, shown, strict=True)
    ]
