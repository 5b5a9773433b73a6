"""Pages, tables and timelines of a run and of a trajectory. Everything here reads the journal and changes nothing."""
