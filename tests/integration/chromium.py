"""A real browser, and what tests do in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDED = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="no chromium with chromedriver here: apt-get install chromium-driver"
    ),
]
"""The marks of a module whose tests need it."""
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (the extra `dev` has it)")
    options = webdriver.ChromeOptions()
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1280,900"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(600)
    yield driver
    driver.quit()


def emulate(browser: Any, width: int, *, dark: bool, height: int = 900) -> None:
    """Have a window of that size, in that colour scheme."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def quiet(browser: Any) -> None:
    assert browser.get_log("browser") == []
    assert browser.title != "owned"


def unfolded(browser: Any) -> None:
    """Unfold everything and scroll through it, as a reader would; return when every token has been drawn."""
    browser.execute_script("for (const more of document.querySelectorAll('button.more')) more.click()")
    browser.execute_async_script(
        """
        const done = arguments[0];
        const step = () => {
          const next = document.querySelector(".empty");
          if (!next) {
            const more = document.querySelectorAll("button.more");
            if (!more.length) return done();
            more.forEach((button) => button.click());
          } else next.scrollIntoView();
          requestAnimationFrame(() => setTimeout(step));
        };
        step();
        """
    )
