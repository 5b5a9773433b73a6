"""How prompts with pictures are written for SGLang; that it reads them so is tested with the real one."""

import base64
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pytest

from fsm_rollout.engines.sglang.pictures import SentPictures
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.pictures import StoredPicture, picture_of
from fsm_rollout.trajectory.tokens import MediaSpan, as_ids

PAD, BEGIN, VIDEO = 90, 91, 92  # of a family whose template writes BEGIN for a picture, which pads stand for
PROCESSOR = SimpleNamespace(image_token_id=PAD, video_token_id=VIDEO)


def picture(grey: int) -> StoredPicture:
    return picture_of(np.full((4, 5, 3), grey, np.uint8))


@pytest.mark.parametrize("in_files", [False, True])
def test_each_picture_is_one_placeholder_and_one_address(in_files: bool) -> None:
    sent = SentPictures(PROCESSOR, in_files=in_files)
    ids = as_ids([1, BEGIN, PAD, PAD, 2, BEGIN, PAD, 3, BEGIN, PAD, PAD])
    shown = [picture(1), picture(2), picture(1)]
    media = [MediaSpan(at, size, of, BEGIN) for at, size, of in zip((1, 5, 8), (3, 2, 3), shown, strict=True)]
    prompt = sent.prompt(ids, media)
    assert prompt["input_ids"] == [1, BEGIN, 2, BEGIN, 3, BEGIN]
    first, second, third = addresses = prompt["image_data"]  # type: ignore[misc, has-type]
    assert first is third, "made once"
    for address, of in zip(addresses, shown, strict=True):
        data = Path(urlsplit(address).path).read_bytes() if in_files else base64.b64decode(address.partition(",")[2])
        assert data == of.data
    assert ("mm_content_hashes" in prompt) == in_files
    assert sent.prompt(as_ids([1, 2]), []) == {"input_ids": [1, 2]}
    # A file stays as long as its picture.
    path = Path(urlsplit(second).path)
    del of, shown[1], media[1]
    assert not path.exists()
    sent.close()
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("ids", "pictures"), [([1, PAD], 0), ([1, VIDEO], 0), ([BEGIN, PAD, 2, BEGIN], 1), ([BEGIN, PAD, PAD], 1)], ids=str
)
def test_a_placeholder_without_a_picture_is_not_sent(ids: Sequence[int], pictures: int) -> None:
    """SGLang would take it for text in silence, or never answer."""
    media = [MediaSpan(0, 2, picture(1), BEGIN)][:pictures]
    with pytest.raises(
        EngineError, match=f"{pictures + 1} ids of the prompt stand for pictures, and it has {pictures}"
    ):
        SentPictures(PROCESSOR, in_files=False).prompt(as_ids(ids), media)
