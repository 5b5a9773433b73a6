"""What users reach as ``fsm_rollout.journal.NAME``; see :mod:`fsm_rollout.trajectory.journal`."""

from fsm_rollout.trajectory.journal import Journal, blob, events, histories, is_journal, metadata, read, trajectory_ids

__all__ = ["Journal", "blob", "events", "histories", "is_journal", "metadata", "read", "trajectory_ids"]
