"""Runs in virtual time: the real scheduler in a world that a plan describes, and the laws every run keeps."""
