"""A real browser, and what tests do in it."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cases import SCRIPTS

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


def ready(browser: Any) -> None:
    """Wait until the page's script ran: where machines are busy, the driver may be back before."""
    from selenium.webdriver.support.wait import WebDriverWait

    script = "return document.documentElement.dataset.ready"
    WebDriverWait(browser, 600, poll_frequency=0.05).until(lambda page: page.execute_script(script) == "1")


def emulate(browser: Any, width: int, *, dark: bool, height: int = 900) -> None:
    """Have a window of that size, in that colour scheme."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def quiet(browser: Any) -> None:
    assert browser.get_log("browser") == []
    assert browser.title != "owned"


@contextmanager
def chat_page(browser: Any, turns: Any, **options: Any) -> Iterator[Any]:
    """Open the chat page of a server (see ``served``) that says these turns; yield what waits for a condition."""
    from selenium.webdriver.support.wait import WebDriverWait

    from tests.unit.serve.kit import served

    address: list[str] = []
    done = threading.Event()

    async def main() -> None:
        async with served(turns, **options) as server:
            address.append(server.url)
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        wait = WebDriverWait(browser, 600, poll_frequency=0.05)
        wait.until(lambda _: address)
        browser.get_log("browser")
        browser.get(address[0])
        ready(browser)
        yield wait
    finally:
        browser.get("about:blank")
        done.set()
        thread.join()


def unfolded(browser: Any) -> None:
    """Unfold everything and scroll through it, as a reader would; return when every token has been drawn."""
    browser.execute_script("for (const more of document.querySelectorAll('button.more')) more.click()")
    browser.execute_async_script(SCRIPTS["unfolds everything"])
