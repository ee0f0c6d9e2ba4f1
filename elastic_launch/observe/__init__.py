"""What became of a run, told from its events."""
