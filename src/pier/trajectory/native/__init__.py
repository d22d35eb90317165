"""Readers of agents' own session logs, one module per agent."""
