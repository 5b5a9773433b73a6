"""What is importable is what is listed, and importing is cheap."""

import subprocess
import sys

import pytest

import fsm_rollout
from tests.cases import PROGRAMS
from tests.kit import ROOT

HEAVY = ("torch", "transformers", "ray", "sglang", "tensordict", "graphviz", "pygraphviz", "pyarrow")
CODE = [
    "import fsm_rollout as f; f.journal.histories", "import fsm_rollout as f; f.load_agent, f.verify, f.prove",
    "import fsm_rollout.chat, fsm_rollout.chat.formats", PROGRAMS["checks an agent"],
]  # fmt: skip


@pytest.mark.parametrize("code", CODE)
def test_importing_and_checking_load_nothing_heavy(code: str) -> None:
    program = f"{code}\nimport sys\nsys.exit(' '.join(m for m in {HEAVY!r} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_listed_name_exists_and_is_documented() -> None:
    assert fsm_rollout.__all__ == sorted(fsm_rollout.__all__)
    assert fsm_rollout.__all__ == dir(fsm_rollout)
    for name in fsm_rollout.__all__:
        assert getattr(fsm_rollout, name).__doc__, name


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        fsm_rollout.nonsense  # noqa: B018
