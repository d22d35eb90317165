"""Agents: how to start each one, and the packs that carry them."""
