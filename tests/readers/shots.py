"""Pages of readers, as a browser shows them; ``PICTURES=1`` writes those of the documentation anew."""

from __future__ import annotations

import io
import os
from typing import Any

from PIL import Image

from tests.integration.chromium import emulate
from tests.kit import ROOT
from tests.readers.servers import until

FOLDER = ROOT / "docs/howto/readers"
LARGEST = 200_000


def shot(browser: Any, name: str, *texts: str) -> str:
    """Wait until a page says all of this; return what it says."""
    emulate(browser, 1280, dark=False, height=800)

    def text() -> str:
        said = str(browser.execute_script("return document.body ? document.body.innerText : ''"))
        return said if all(part in said for part in texts) else ""

    said = until(text, f"{name} shows {texts}")
    if os.environ.get("PICTURES"):
        browser.execute_async_script("setTimeout(arguments[0], 1500)")  # menus that fade
        picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB").quantize(128)
        picture.save(FOLDER / f"{name}.png", optimize=True)
        assert (FOLDER / f"{name}.png").stat().st_size <= LARGEST
    return said
