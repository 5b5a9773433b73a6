"""Tests of models that see pictures, by processors that need torchvision: collected where that is."""

from importlib.util import find_spec

from tests.integration.warm_sglang import imported, warm  # noqa: F401  # fixtures

collect_ignore_glob = [] if find_spec("torchvision") else ["test_*.py"]
