"""What happened, as plain data: prompts, tokens, events, trajectories and the journal that keeps them."""
