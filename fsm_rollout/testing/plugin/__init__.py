"""The pytest plugin: agents tested without a line of code, and fixtures for tests of your own."""
