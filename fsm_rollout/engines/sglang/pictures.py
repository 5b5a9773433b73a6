"""How a prompt with pictures is written for SGLang.

Invariant: SGLang makes the same ids of it as the stream holds. It expands each picture's placeholder by itself, keeps
all other ids as they are, and says how many it has read, which is compared with the stream's (``Endpoint.stream``). A
placeholder without a picture would be taken for text in silence, and one too many beside pictures would never be
answered (0.5.21), so neither is sent. A picture is encoded, or written to a file, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.markers import Encoded
from fsm_rollout.chat.reference import Opening
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.pictures import StoredPicture, picture_of
from fsm_rollout.trajectory.tokens import Ids, MediaSpan, collapsed


class SentPictures:
    """The pictures that a server has been sent.

    Args:
        processor: the model's, if it sees any.
        in_files: the server is ours and on this host, so it reads them from a folder, and knows them by their hashes;
            else they travel with each request.
    """

    def __init__(self, processor: Any, *, in_files: bool) -> None:
        # Ids that stand for pictures; the placeholder of a family's template may be another one.
        ids = [getattr(processor, f"{kind}_token_id", None) for kind in ("image", "video")]
        self._placeholders = frozenset(id_ for id_ in ids if isinstance(id_, int))
        self._in_files = in_files
        self._folder: TemporaryDirectory[str] | None = None
        self._addresses: WeakKeyDictionary[StoredPicture, str] = WeakKeyDictionary()

    def prompt(self, ids: Ids, media: Sequence[MediaSpan]) -> dict[str, object]:
        """Return the part of a request that says the prompt; EngineError: some id stands for a picture without one."""
        short = collapsed(ids, media)
        placeholders = self._placeholders.union(span.placeholder for span in media)
        if (count := sum(map(short.count, placeholders))) != len(media):
            raise EngineError(f"{count} ids of the prompt stand for pictures, and it has {len(media)}")
        prompt: dict[str, object] = {"input_ids": short.tolist()}
        if media:
            prompt["image_data"] = [self._address(span.picture) for span in media]
            if self._in_files:
                prompt["mm_content_hashes"] = [f"sha256:{span.picture.sha256}" for span in media]
        return prompt

    def close(self) -> None:
        """Remove what was written."""
        if self._folder is not None:
            self._folder.cleanup()

    def _address(self, picture: StoredPicture) -> str:
        """Return where the server finds a picture."""
        if (address := self._addresses.get(picture)) is None:
            address = self._addresses[picture] = self._stored(picture) if self._in_files else picture.data_uri()
        return address

    def _stored(self, picture: StoredPicture) -> str:
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="fsm-rollout-pictures-")
        path = Path(self._folder.name) / picture.sha256
        path.write_bytes(picture.data)
        finalize(picture, path.unlink, missing_ok=True).atexit = False
        return path.as_uri()


def shown_once(processor: Any) -> Encoded:
    """Return a prompt with a picture; ChatTemplateError: the model's own template shows none."""
    chat = ChatTemplate(processor.tokenizer, chat_template=processor.chat_template, processor=processor)
    picture = picture_of(np.zeros((200, 300, 3), np.uint8))
    return chat.encode_here(Opening([{"role": "user", "content": [{"type": "image", "image": picture}]}], None))
