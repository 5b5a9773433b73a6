"""What importing the chat room loads, seen by a program of its own."""

import subprocess
import sys

import pytest

from tests.kit import ROOT

pytestmark = pytest.mark.process


def test_importing_it_loads_neither_torch_nor_transformers() -> None:
    heavy = "print([name in sys.modules for name in ('torch', 'transformers')])"
    code = f"import sys, fsm_rollout.chat, fsm_rollout.chat.formats\n{heavy}"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout.strip() == "[False, False]"
