"""What a sandbox may reach: policies, and the machinery that enforces them from outside the sandbox."""

from pier.network.policy import NetworkMode, NetworkPolicy

__all__ = ["NetworkMode", "NetworkPolicy"]
