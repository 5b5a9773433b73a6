"""Tests of the pages that a server makes."""
