"""In the real IPython, nothing has to be done for agents and trajectories to be shown."""

import subprocess
import sys

import pytest

from tests.cases import PROGRAMS
from tests.kit import ROOT

pytestmark = pytest.mark.process

CELL = PROGRAMS["a session of IPython"]


def test_importing_the_package_is_enough() -> None:
    """The pictures stay inside the formatter here: a terminal shows text, a notebook all of it."""
    cell = CELL.replace("AGENT", str(ROOT / "configs/agents/delegate.yaml"))
    switch_on = "get_ipython().display_formatter.active_types = get_ipython().display_formatter.format_types\n"
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--quick", "--colors=NoColor", "-c", switch_on + cell],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip().endswith("shown"), done.stdout + done.stderr
