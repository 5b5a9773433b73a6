"""What a schedule of trajectories would cost: the real scheduler, in virtual time, on a server's memory and pace."""
