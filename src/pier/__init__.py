"""pier runs coding agents in sandboxes, records what they do, and grades the result so that it can be trusted."""

__version__ = "0.1.0"
