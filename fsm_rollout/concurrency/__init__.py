"""Time, threads, cancellation and Ray's session: the means of waiting that every other folder uses."""
