"""Tests against the trainers' own packages, each collected only where its packages are (``make test-trainers``)."""

from __future__ import annotations

import typing
from importlib.util import find_spec

import typing_extensions

NEEDS = {
    "test_verl.py": ("verl", "transfer_queue"),
    "test_verl_pictures.py": ("verl", "transfer_queue", "torchvision"),
    "test_trl.py": ("trl", "accelerate", "openenv"),  # not in verl's environment, whose transformers is older
    "test_openenv.py": ("openenv", "fastmcp"),
    "test_datasets.py": ("datasets",),
    "test_own_loop.py": ("datasets",),
    "test_verifiers.py": ("verifiers", "reasoning_gym"),
    "test_validators.py": ("skyrl", "areal", "tinker_cookbook", "openenv"),
}
"""The packages that a file of tests needs; ``test_laws.py`` tests the adapters whose packages there are."""

collect_ignore = [name for name, packages in NEEDS.items() if not all(map(find_spec, packages))]

if find_spec("skyrl"):  # SkyRL 0.3 has pydantic models over `typing.TypedDict`, which pydantic refuses on Python 3.11
    typing.TypedDict = typing_extensions.TypedDict
