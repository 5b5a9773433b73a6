"""Time, threads, cancellation and Ray's session: what every other room may wait with."""
