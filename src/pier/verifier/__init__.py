"""Verification: running a task's tests out of the agent's reach and reading the reward."""
