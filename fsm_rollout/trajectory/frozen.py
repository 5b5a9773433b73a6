"""A mapping that cannot be changed by accident.

Invariant: a :class:`FrozenMap` equals, dumps, pickles and deep-copies like the dict it was made of, and every way to
change it raises. Only the mapping itself is frozen: plain data inside free-form values (a tool's ``kwargs``) stays as
it was read, so that it compares equal to lists and dicts.
"""

from __future__ import annotations

from typing import Any, Generic, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FrozenMap(dict[K, V], Generic[K, V]):
    """A read-only dict (a dict, and no proxy: proxies neither pickle nor compare)."""

    __slots__ = ()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("an agent's configuration is frozen; build a new one with `model_copy(update=…)`")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        """Hash the keys alone: cheap, defined whatever the values are, and equal maps have equal keys."""
        return hash(frozenset(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by content (the default way would set item by item)."""
        return (FrozenMap, (dict(self),))
