"""Tasks of several services: what their compose files say, for the backends that run them."""

from pier.sandbox.compose.model import MAIN, Compose, Composition, Health, Service, ServiceBuild, Volume

__all__ = ["MAIN", "Compose", "Composition", "Health", "Service", "ServiceBuild", "Volume"]
