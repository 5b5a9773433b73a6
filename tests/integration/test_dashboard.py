"""The dashboard for Grafana: a real Prometheus that reads a server answers each of its queries."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.foreign import CALL
from tests.kit import CONFIGS, closed_port
from tests.unit.serve.kit import served

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.process,
    pytest.mark.real,
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus here: apt-get install prometheus"),
]
BOARD: dict[str, Any] = json.loads((CONFIGS / "dashboards/grafana.json").read_text())
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
FAILS = CALL.replace('"+"', '"/"').replace("22", "0")


@contextmanager
def prometheus(server: str, folder: Path) -> Iterator[str]:
    """Have a Prometheus read a server; yield its address."""
    target = server.removeprefix("http://")
    scraped = {"job_name": "agents", "scrape_interval": "200ms", "static_configs": [{"targets": [target]}]}
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scraped | {"scrape_timeout": "200ms"}]}))
    address = f"127.0.0.1:{closed_port()}"
    options = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    process = subprocess.Popen([str(PROMETHEUS), *options, f"--web.listen-address={address}", "--log.level=error"])
    try:
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


async def test_every_query_has_an_answer(tmp_path: Path) -> None:
    waits = dict.fromkeys(QUERIES)
    options: dict[str, Any] = {"reward": lambda trajectory: 0.5}
    async with (
        served([CALL, FAILS, "It is 42."], rollout=options, waiting=1) as server,
        aiohttp.ClientSession() as http,
    ):
        with prometheus(server.url, tmp_path) as url:
            async with asyncio.timeout(600):
                while waits:
                    await server.ask("What is 20 + 22?")
                    await server.stream([{"role": "user", "content": "What is 20 + 22?"}])
                    for query in list(waits):
                        text = query.replace("$__rate_interval", "30s").replace("$agent", ".*")
                        try:
                            async with http.get(f"{url}/api/v1/query", params={"query": text}) as response:
                                said = await response.json()
                        except aiohttp.ClientConnectionError:  # it starts
                            await asyncio.sleep(0.05)
                            continue
                        if response.status != 503:
                            assert said["status"] == "success", said
                            if any(float(each["value"][1]) >= 0 for each in said["data"]["result"]):
                                del waits[query]


def test_what_it_lets_choose_from_is_there() -> None:
    source, agent = BOARD["templating"]["list"]
    assert source["query"] == "prometheus"
    assert "label_values(fsm_rollout_trajectories_ended_total, agent)" in agent["query"]["query"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len({*places}) == len(places) == len({panel["id"] for panel in BOARD["panels"]})
