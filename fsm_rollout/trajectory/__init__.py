"""What happened, as plain data: prompts, tokens, events, trajectories, the journal; and how settings are read."""
