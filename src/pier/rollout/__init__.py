"""Rollouts: training samples from recordings, and the formats that trainers load."""
