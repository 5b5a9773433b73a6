"""Takes the README's pictures of a trajectory page, light and dark: `make diagrams`.

Invariant: a picture carries the fingerprint of the page that it shows, so whether it is stale can be told without a
browser and without comparing pixels. The page is that of a recorded trajectory (`diagrams/demo`: one of
`fsm-rollout run configs/runs/demo.yaml engine.model=embedded:early`), so it changes only when the pages do.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsm_rollout.report.pages import Links, write_page
from fsm_rollout.report.recording import open_run
from fsm_rollout.report.trajectory import page_of_run

HERE = Path(__file__).parent
RUN, TRAJECTORY = HERE / "demo", "10/1"
PICTURES = {"light": HERE / "trajectory_light.png", "dark": HERE / "trajectory_dark.png"}
WIDTH, SCALE = 900, 1.5
"""CSS pixels, and picture pixels for each: a README is about 830 wide, and many screens show more than one for one."""
SHOWN = "article.card.model"
"""The picture ends below the first of these."""
LEFT_OUT = ".steps, #limits, #prompt { display: none }"
"""What repeats the graph, or has its place further down."""
KEYWORD = b"page"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars")  # fmt: skip


def page() -> str:
    """Return the page of the recorded trajectory."""
    return page_of_run(open_run(RUN), TRAJECTORY, Links(RUN, RUN / "F.html"))


def fingerprint(page: str) -> str:
    """Return a hash of all that a page shows, but for where Graphviz put what: its versions differ in that."""
    drawn = re.compile(r"<svg.*?</svg>", re.DOTALL)
    shown = drawn.sub(lambda svg: " ".join(re.findall(r">([^<>]*\S[^<>]*)<", svg.group())), page)
    return hashlib.sha256(shown.encode()).hexdigest()


def shown_by(picture: Path) -> str | None:
    """Return the fingerprint that a PNG carries; ``None`` if it carries none."""
    for kind, content in _chunks(picture.read_bytes()):
        if kind == b"tEXt" and content.startswith(KEYWORD + b"\0"):
            return content[len(KEYWORD) + 1 :].decode("ascii")
    return None


def marked(png: bytes, text: str) -> bytes:
    """Return a PNG that carries ``text``."""
    content = KEYWORD + b"\0" + text.encode("ascii")
    head = 8 + 12 + 13  # the signature and the first chunk, which must stay first
    checksum = zlib.crc32(b"tEXt" + content)
    return png[:head] + struct.pack(">I4s", len(content), b"tEXt") + content + struct.pack(">I", checksum) + png[head:]


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        yield kind, png[at + 8 : at + 8 + size]
        at += 12 + size


def take(browser: Any, html: Path, theme: str) -> bytes:
    """Return the picture of a page in one theme."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    size = {"width": WIDTH, "height": 3000, "deviceScaleFactor": SCALE, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(html.as_uri())
    browser.set_script_timeout(30)
    bottom = browser.execute_async_script(
        """const done = arguments[2], style = document.createElement("style");
           style.textContent = arguments[0];
           document.head.append(style);
           const drawn = () => document.querySelector(".empty") ? requestAnimationFrame(drawn)
             : requestAnimationFrame(() => done(document.querySelector(arguments[1]).getBoundingClientRect().bottom));
           drawn();""",
        LEFT_OUT,
        SHOWN,
    )
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": bottom + 2, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
    return base64.b64decode(shot["data"])


def main() -> None:
    """Take the pictures that are stale; without a browser, say so and keep the old ones."""
    text = page()
    wanted = fingerprint(text)
    if all(picture.is_file() and shown_by(picture) == wanted for picture in PICTURES.values()):
        return
    driver = shutil.which("chromedriver")
    if shutil.which("chromium") is None or driver is None:
        print("the pictures of the trajectory page are stale and kept: no chromium with chromedriver here")
        return
    from selenium import webdriver

    with tempfile.TemporaryDirectory() as scratch:
        html = Path(scratch) / "page.html"
        write_page(html, text)
        options = webdriver.ChromeOptions()
        for flag in [*FLAGS, f"--user-data-dir={scratch}/profile"]:
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            for theme, picture in PICTURES.items():
                picture.write_bytes(marked(take(browser, html, theme), wanted))
                print(f"{picture.relative_to(HERE.parent)} written")
        finally:
            browser.quit()


if __name__ == "__main__":
    main()
