"""Tests of models that see pictures, by processors that need torchvision: collected where that is."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torchvision") else ["test_*.py"]
