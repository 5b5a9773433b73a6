"""A foreign agent as a state: programs and coroutines that we did not write, and every token that they had sampled."""
