"""Hosted models behind chat APIs, which give text and no token ids."""
