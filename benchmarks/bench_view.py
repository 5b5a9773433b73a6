"""How quick `fsm-rollout view` is on a large run: until its pages are there, and until they are painted.

    python benchmarks/bench_view.py --trajectories 100000

Writes a journal of copies of one trajectory of the scripted engine (a call, its result, an answer), starts the server,
and prints seconds: to the first answer of the run's list while next to nothing has been read, until all is read, and
then for the list, orders, filters, words (rare and common) and a trajectory's page. `--browser` asks chromium for the
first contentful paint of the list instead of taking the answer for it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

from msgspec.structs import replace

import fsm_rollout as fr
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.trajectory.event_bytes import encode
from fsm_rollout.trajectory.events import Prompted
from fsm_rollout.trajectory.journal import Journal, histories, metadata

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": 20, "operator": "+", "right": 22}}\n</tool_call>'
PROMPT = {"messages": [{"role": "user", "content": "What is 20 + 22?"}]}
PAGES = {
    "list": "",
    "ordered by score": "?sort=-score",
    "with an error": "?error=any",
    "a word that is nowhere": "?text=xylophone",
    "a word that is everywhere": "?text=calculate",
    "a trajectory": f"trajectories/{quote('7~2F3.html')}",
}


def write(folder: Path, trajectories: int) -> None:
    """Write the journal: groups of eight."""
    with Journal(folder / "one.sqlite") as journal:
        agent, engine = (
            "configs/agents/tool_agent.yaml",
            ScriptedEngine([CALL, "It is 42."], tokenizer=embedded_tokenizer()),
        )
        with fr.Rollout(agent, engine, journal=journal) as rollout:
            rollout.run([PROMPT])
    first, *rest = next(histories(folder / "one.sqlite"))
    assert isinstance(first, Prompted)
    following = [(event, encode(event)) for event in rest]
    with Journal(folder / "journal.sqlite", metadata(folder / "one.sqlite")) as journal:
        for number in range(trajectories):
            group, sample = divmod(number, 8)
            id_ = f"{group}/{sample}"
            journal.append(id_, replace(first, trajectory_id=id_, group_id=str(group), sample=sample))
            for event, payload in following:
                journal.append(id_, event, payload)


def answer(url: str) -> tuple[float, str]:
    """Return how long an answer took, and what it says."""
    started = time.perf_counter()
    text = urlopen(url).read().decode()
    return time.perf_counter() - started, text


def painted(url: str) -> float:
    """Return when chromium has painted something of a page, in seconds from when it was asked for it."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.get(url)
        return browser.execute_async_script(  # type: ignore[no-any-return]
            """const done = arguments[0];
               new PerformanceObserver((list) => done(list.getEntries()[0].startTime / 1000))
                 .observe({ type: "paint", buffered: true });"""
        )
    finally:
        browser.quit()


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--browser", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "large"
        folder.mkdir()
        write(folder, arguments.trajectories)
        size = (folder / "journal.sqlite").stat().st_size / 1e6
        print(f"{arguments.trajectories:,} trajectories, {size:,.0f} MB")
        command = [sys.executable, "-m", "fsm_rollout", "view", str(folder), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = f"{server.stdout.readline().split()[0]}large/"
                seconds = painted(url) if arguments.browser else answer(url)[0]
                print(f"{seconds:7.2f} s  {'first paint' if arguments.browser else 'first answer'}, little read yet")
                started = time.perf_counter()
                while '"soon":true' in answer(url)[1]:
                    time.sleep(0.25)
                print(f"{time.perf_counter() - started:7.2f} s  until all is read")
                for name, path in PAGES.items():
                    print(f"{answer(url + path)[0]:7.2f} s  {name}")
                if arguments.browser:
                    print(f"{painted(url):7.2f} s  first paint, all read")
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
