"""Text for display: of tokens, of numbers and times, and of anything a model or a tool wrote.

Invariants: every character that would be invisible, would move the cursor or would turn the direction of its
neighbours is shown as a symbol, and newlines are both shown and kept; there is exactly one text per token, also where a
character is spread over several tokens (the first of them shows it, the others show that they go on).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fsm_rollout.trajectory.tokens import TokenStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GOES_ON = "⋯"  # shown for a token that only finishes the character of the token before it
LONG = 240  # characters of a message that stand where there is more to be seen than it
SMALLEST = 1e-6  # numbers closer to 0 are written with an exponent
_LONGEST_CHARACTER = 4  # bytes of the longest character in UTF-8, hence the most tokens that one can be spread over
_ONE_LINE = 100  # characters of JSON that stand on one line

_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_LOOK = {"\n": "↵\n", "\r": "␍", "\t": "→\t", "\x7f": "␡"} | {
    chr(c): chr(0x2400 + c) for c in range(32) if c not in (9, 10)
}


def visible(text: str) -> str:
    """Return ``text`` with all that cannot be seen written out: ``↵`` before newlines, ``␀``, ``⟨202E⟩`` and so on."""
    return _HIDDEN.sub(lambda found: _LOOK.get(found.group()) or f"⟨{ord(found.group()):04X}⟩", text)


def folded(text: str) -> tuple[str, str]:
    """Return the beginning of a text, and the rest of it where it is long."""
    return (text, "") if len(text) <= LONG else (text[: LONG - 40], text[LONG - 40 :])  # never for a word or two


def shortened(text: str) -> str:
    """Return a text, and of a long one its beginning and how much more there is."""
    begins, rest = folded(text)
    return f"{begins} … {len(rest):,} more characters" if rest else text


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that suits them: ``340 µs``, ``12 ms``, ``3.4 s``, ``2 min 5 s``."""
    if seconds is None:
        return "–"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs" if seconds > 0 else "0 s"
    if seconds < 0.1:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    return f"{seconds // 60:,.0f} min {seconds % 60:.0f} s"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number without noise: ``1``, ``0.333``, ``2.5``, ``548.8``, ``12,345``, ``0.00042``, ``–`` for none."""
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if not math.isfinite(value) or abs(value) < SMALLEST:
        return f"{value:.1e}"
    if abs(value) < 10 ** (-digits):
        return f"{value:.{1 - math.floor(math.log10(abs(value)))}f}".rstrip("0")  # the first two of its digits
    before = len(str(int(abs(value))))  # the more digits before the point, the fewer are worth reading behind it
    text = f"{value:,.{max(0, min(digits, 4 - before))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    """Return a share in percent; what is not nothing, and not all, is never said to be: ``<0.1 %``, ``>99.9 %``."""
    if share <= 0 or share >= 1:
        return "0 %" if share <= 0 else f"{share:.0%}".replace("%", " %")
    if share < 0.001:
        return "<0.1 %"
    if share > 0.999:
        return ">99.9 %"
    return f"{100 * share:.1f} %" if share < 0.0095 or share > 0.995 else f"{100 * share:.0f} %"


def replica_name(name: str) -> str:
    """Return how a replica is called in a sentence: pools name theirs ``replica-0``, engines of others as they like."""
    return name if "replica" in name.lower() else f"replica {name}"


def as_json(value: object) -> str:
    """Return text as it is, and data as JSON: on one line where it fits."""
    if isinstance(value, str):
        return visible(value)
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > _ONE_LINE:
        text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
    return "\n".join(map(visible, text.split("\n")))


class TokenTexts:
    """What the tokens of one tokenizer look like."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_vocab()
        # The added tokens, special or not: what text of the environment must not be able to write.
        self.markers: Mapping[int, str] = {id_: text for text, id_ in added.items() if text.strip()}

    def vocabulary(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each different id, as it stands (not made visible)."""
        return {id_: self._text_of(id_) for id_ in sorted(set(ids))}

    def whole(self, ids: Iterable[int]) -> str:
        """Return the text of a sequence, control tokens included."""
        return self._decode(list(ids))

    def spread(self, stream: TokenStream) -> dict[int, str]:
        """Return the texts, by position, of tokens that hold only part of a character."""
        ids, spread = stream.ids, {}
        partial = {id_ for id_, text in self.vocabulary(ids).items() if "\ufffd" in text}
        for span in stream.spans if partial else ():
            at = span.start
            while at < span.end:
                size = (
                    self._whole_characters(ids[at : min(span.end, at + 2 * _LONGEST_CHARACTER)])
                    if ids[at] in partial
                    else 1
                )
                if size > 1:
                    spread[at] = self._decode(list(ids[at : at + size]))
                    spread.update(dict.fromkeys(range(at + 1, at + size), GOES_ON))
                at += size
        return spread

    def _whole_characters(self, ids: Sequence[int]) -> int:
        """Return how many of the first tokens make up whole characters together; 1 when none do."""
        for size in range(2, len(ids) + 1):
            if "\ufffd" not in self._decode(list(ids[:size])):
                return size
        return 1

    def _text_of(self, id_: int) -> str:
        text = self.markers.get(id_)
        if text is not None:
            return text
        text = self._decode([id_])
        piece = self._tokenizer.convert_ids_to_tokens(id_) if 0 <= id_ < len(self._tokenizer) else None
        # SentencePiece drops the space of a first word; within a stream it is there.
        return f" {text}" if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" ") else text

    def _decode(self, ids: list[int]) -> str:
        if not all(0 <= id_ < len(self._tokenizer) for id_ in ids):
            return "⟨not in the vocabulary⟩"
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
