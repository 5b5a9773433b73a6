"""The pytest plugin: agents tested without a line of code, and a fixture for tests of your own."""
