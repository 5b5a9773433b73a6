"""A run from a YAML file: its configuration, its progress, its folder and its summary."""
