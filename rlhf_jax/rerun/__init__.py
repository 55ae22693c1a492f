"""Updates of a run, recomputed: what differs between two runs, and what happened in one update."""
