"""From trajectories to tensors: one row for each trained stream, padded or packed."""
