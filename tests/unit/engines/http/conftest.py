"""Fixtures of several modules here."""

from tests.unit.engines.http.sglang_kit import made, server  # noqa: F401
