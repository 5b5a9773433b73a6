"""Conformance: whether an engine, a state handler, a tool, an interaction or a tool format keeps its promises."""
