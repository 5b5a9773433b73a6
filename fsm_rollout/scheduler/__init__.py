"""Making trajectories happen: groups, admission, limits, staleness, resuming."""
