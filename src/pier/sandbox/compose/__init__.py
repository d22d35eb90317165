"""Tasks of several services: what their compose files say, for the backends that run them."""

from pier.sandbox.compose.model import MAIN, Build, Compose, Composition, Health, Service, Volume

__all__ = ["MAIN", "Build", "Compose", "Composition", "Health", "Service", "Volume"]
