"""Programs of others as agents on small repositories: install one, run it behind walls, and let the tests judge.

Invariant: a program has its own copy of the task's files, reaches the model and nothing else, and the tests that score
it are written anew after it has ended, so it can neither change them nor leave anything that runs beside them.

A prompt's ``files`` are the repository, its ``tests`` what is run at the end (``python -m unittest``); the score is 1
where all pass. With ``sandbox: {image: …}`` that image's files stand in the place of this machine's, Python's too.

What a program needs is installed once, in the versions that are named here, into ``runs/harnesses`` below the folder
where the run was started (``FSM_HARNESSES`` names another).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from fsm_rollout import ForeignVisit
from fsm_rollout.errors import ToolError
from fsm_rollout.tools.sandbox.enclosed import Command, run_enclosed, unpacked

logger = logging.getLogger(__name__)

TESTS_SECONDS = "60"
HARNESSES = Path(os.environ.get("FSM_HARNESSES", "runs/harnesses")).absolute()
_installer = ThreadPoolExecutor(1)  # one at a time, whichever event loops ask


async def installed(name: str, packages: tuple[str, ...], *, npm: bool = False) -> Path:
    """Return the folder of a program with all that it needs, which is made once; ToolError says why it cannot be.

    What comes from PyPI has an environment of its own there, for the Python that runs this.
    """
    steps = Steps(name)
    try:
        return await asyncio.get_running_loop().run_in_executor(_installer, _installed, name, packages, npm, steps)
    finally:
        steps.end()


class Steps:
    """Carries out the steps of an installation, each a process in a session of its own, until it is ended."""

    def __init__(self, name: str) -> None:
        self._name, self._ended = name, False
        self._process: subprocess.Popen[str] | None = None

    def do(self, words: list[str]) -> None:
        """Carry out a step; ToolError says why it could not be done."""
        self._process = process = subprocess.Popen(
            words, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
        if self._ended:
            self.end()
        _, errors = process.communicate()
        if process.returncode:
            raise ToolError(f"{self._name} could not be installed ({' '.join(words)}): {errors.strip()[-600:]}")

    def end(self) -> None:
        """Kill what is under way, with all that it has started: nobody waits for it any more."""
        self._ended = True
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _installed(name: str, packages: tuple[str, ...], npm: bool, steps: Steps) -> Path:
    folder = HARNESSES / name
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"{name}: installing {', '.join(packages)} into {folder}, once", file=sys.stderr, flush=True)
        if npm:
            if (program := shutil.which("npm")) is None:
                raise ToolError(f"{name} comes from npm, which is not installed; install Node.js, or take another")
            words = [program, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
        else:
            steps.do([sys.executable, "-m", "venv", str(folder)])
            words = [str(folder / "bin/python"), "-m", "pip", "install", "--progress-bar", "off", "-q", *packages]
        steps.do(words)
        (folder / "installed").touch()
    return folder


def program_in(folder: Path, name: str) -> str:
    """Return where a native program of a folder of npm's is behind the walls."""
    for path in sorted(folder.glob(f"node_modules/**/bin/{name}")):
        if not path.is_symlink() and path.is_file():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    return f"/program/{path.relative_to(folder)}"
    raise ToolError(f"npm has installed no program {name} for this machine into {folder}")


async def judged(
    visit: ForeignVisit, words: list[str], env: Mapping[str, str], folder: Path | None,
    files: Mapping[str, str] | None = None,
) -> float:  # fmt: skip
    """Run a program on the prompt's files, then its tests; return 1.0 where all pass, else 0.0."""
    port = urlsplit(visit.base_url).port
    assert port is not None
    repository, tests = dict(visit.extra["files"]), dict(visit.extra["tests"])  # type: ignore[call-overload]
    image, python, shown = None, str(Path(sysconfig.get_config_var("BINDIR"), "python3")), [sys.base_prefix]
    if isinstance(sandbox := visit.extra.get("sandbox"), Mapping):
        image, python, shown = await unpacked(sandbox["image"], HARNESSES / "images"), "/usr/local/bin/python3", []
    elif sys.base_prefix == "/usr":
        shown = []
    gateway = {"OPENAI_BASE_URL": visit.base_url, "OPENAI_API_KEY": visit.api_key, "OPENAI_MODEL": visit.model}
    path = f"{Path(python).parent}:/usr/bin:/bin"
    agent = Command(words, {"PATH": path, "TASK": visit.task, **gateway, **env}, repository | dict(files or {}))
    judge = ["timeout", TESTS_SECONDS, "python3", "-B", "-m", "unittest", "-q", *map(_module, tests)]
    test = Command(judge, {"PATH": path}, tests)
    ended, passed = await run_enclosed([agent, test], port=port, program=folder, image=image, shown=shown)
    if ended.code:
        raise ToolError(f"{Path(words[0]).name} ended with exit code {ended.code}; it wrote: {ended.output[-1500:]}")
    if passed.code:
        logger.info("the tests: %s", passed.output[-600:])
    return float(passed.code == 0)


def _module(test: str) -> str:
    return test.removesuffix(".py").replace("/", ".")


CODEX = """
model = "MODEL"
model_provider = "here"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.here]
name = "here"
base_url = "URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""


async def codex(visit: ForeignVisit) -> float:
    """Run Codex (Apache-2.0), by npm."""
    folder = await installed("codex-0.169.0", ("@openai/codex@0.169.0",), npm=True)
    config = CODEX.replace("MODEL", visit.model).replace("URL", visit.base_url)
    words = [program_in(folder, "codex"), "exec", "--skip-git-repo-check", visit.task]
    return await judged(visit, words, {}, folder, {"/tmp/home/.codex/config.toml": config})


async def opencode(visit: ForeignVisit) -> float:
    """Run opencode (MIT), by npm."""
    folder = await installed("opencode-1.18.33", ("opencode-ai@1.18.33",), npm=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": visit.base_url, "apiKey": visit.api_key},
        "models": {visit.model: {"name": visit.model}},
    }
    config = {"model": f"here/{visit.model}", "autoupdate": False, "share": "disabled", "provider": {"here": provider}}
    env = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    words = [program_in(folder, "opencode"), "run", visit.task]
    return await judged(visit, words, env, folder, {"opencode.json": json.dumps(config)})


async def mini_swe_agent(visit: ForeignVisit) -> float:
    """Run mini-swe-agent (MIT), from PyPI."""
    folder = await installed("mini-swe-agent-2.4.6", ("mini-swe-agent==2.4.6", "litellm==1.110.2"))
    words = ["/program/bin/python", "-m", "minisweagent", "--yolo", "--exit-immediately", "--task", visit.task]
    words += ["--model", f"openai/{visit.model}", "--output", "/tmp/home/run.json"]
    words += ["--config", "mini.yaml", "--config", "agent.step_limit=12"]
    # Prices and updates are asked of nobody, and what was refused is not asked again.
    env = {"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}
    env |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
    return await judged(visit, words, env, folder)


async def openai_agents(visit: ForeignVisit) -> float:
    """Run an agent of the OpenAI Agents SDK (MIT), from PyPI."""
    folder = await installed("openai-agents-0.24.0", ("openai-agents==0.24.0", "openai==3.57.0"))
    return await _script(visit, ["/program/bin/python"], "openai_agents_agent.py", folder)


async def langgraph(visit: ForeignVisit) -> float:
    """Run an agent of LangGraph (MIT), from PyPI."""
    folder = await installed("langgraph-1.2.24", ("langgraph==1.2.24", "langchain-openai==1.7.4", "openai==3.57.0"))
    return await _script(visit, ["/program/bin/python"], "langgraph_agent.py", folder)


async def shell(visit: ForeignVisit) -> float:
    """Run a shell script, which needs curl and jq."""
    return await _script(visit, ["sh"], "shell_agent.sh", None)


async def _script(visit: ForeignVisit, words: list[str], name: str, folder: Path | None) -> float:
    """Run a program that lies beside this file."""
    path = f"/tmp/home/{name}"
    return await judged(visit, [*words, path], {}, folder, {path: Path(__file__).with_name(name).read_text("utf-8")})
