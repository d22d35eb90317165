"""Trajectories: ATIF documents, the rules they keep, and readers of agents' own session logs."""
