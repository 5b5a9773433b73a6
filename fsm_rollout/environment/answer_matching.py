"""Reading the answer out of what a model says.

Invariant: the same rule judges an answer wherever one is judged, in a reward or by a scripted user. What a text states
as its answer is looked for after the last "answer is" (in the whole text when there is none), up to the end of that
sentence: the last number there, or the last word where there is no number. The whole phrase counts as well, for
answers of several words. Numbers are compared by value (1,234.0 is 1234), words without regard to case.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_PHRASE = re.compile(r"answer\s+is\b:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
# A minus sign belongs to a number unless it stands behind one (10-5) or behind a word (covid-19).
_NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w,]*\d)")
_WORD = re.compile(r"\w+(?:[-'’]\w+)*")


def stated_answers(text: str) -> tuple[str, ...]:
    """Return what ``text`` may be said to state as its answer, normalised: the short form, then the whole phrase."""
    phrases = list(_PHRASE.finditer(text))
    tail = text[phrases[-1].end() :] if phrases else text.rstrip()
    sentences = [s for s in _SENTENCE_END.split(tail) if s.strip()]
    if not sentences:
        return ()
    sentence = sentences[0] if phrases else sentences[-1]
    matches = _NUMBER.findall(sentence) or _WORD.findall(sentence)
    return (*(_normal(item) for item in matches[-1:]), _normal(sentence))


def gives_answer(text: str, expected: object) -> bool:
    """Whether ``text`` states ``expected`` (a string or a number) as its answer."""
    return _normal(str(expected)) in stated_answers(text)


def _normal(answer: str) -> str:
    """Return one spelling for all that count as equal."""
    answer = " ".join(answer.split()).strip("\"'“”‘’`*_$ ").rstrip(".!?,;:").casefold()
    try:
        number = Decimal(answer.replace(",", "").replace("−", "-"))
    except InvalidOperation:
        return answer
    if not number.is_finite() or abs(number.adjusted()) > 1000:  # "nan" and "infinity" are words; 1e999999999 is long
        return answer
    return f"{number.normalize() + 0:f}"
