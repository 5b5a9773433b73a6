"""Deadlines, threads, child processes, cancellation, seeds, Ray: what all other folders run and wait with."""
