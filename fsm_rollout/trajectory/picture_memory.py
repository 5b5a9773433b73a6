"""Pictures on their way between two processes: whole the first time, and then by their hash.

Invariant: both ends remember the same pictures, as long as both see the same ones in the same order, each with a memory
that began empty; of what is beyond its capacity the least recent is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict

from fsm_rollout.trajectory.pictures import StoredPicture, stored

MOST_BYTES = 256 * 2**20  # of pictures that each end keeps
# A picture as it travels: its bytes (none where the other end has them), hash, media type, width and height.
PlainPicture = tuple[bytes | None, str, str, int, int]


class PictureMemory:
    """What one end remembers: so many bytes of pictures; with 0 each one travels whole."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._bytes = 0
        self._pictures: OrderedDict[str, StoredPicture] = OrderedDict()

    def plain(self, picture: StoredPicture) -> PlainPicture:
        """Return a picture as it travels."""
        data = None if self._remember(picture) else picture.data
        return data, picture.sha256, picture.mime, picture.width, picture.height

    def picture(self, plain: PlainPicture) -> StoredPicture:
        """Return the picture that travelled."""
        data, name, mime, width, height = plain
        picture = self._pictures[name] if data is None else stored(data, mime, width, height)
        self._remember(picture)
        return picture

    def _remember(self, picture: StoredPicture) -> bool:
        """Remember a picture; say whether it was known."""
        is_known = self._pictures.pop(picture.sha256, None) is not None
        self._pictures[picture.sha256] = picture
        self._bytes += 0 if is_known else len(picture.data)
        while self._bytes > self._most:
            self._bytes -= len(self._pictures.popitem(last=False)[1].data)
        return is_known
