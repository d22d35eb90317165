"""Tasks of several services: what their compose files say, for the backends that run them."""

from pier.sandbox.compose.model import MAIN, Build, Compose, Composition, Health, Service, Volume
from pier.sandbox.compose.read import read_compose

__all__ = ["MAIN", "Build", "Compose", "Composition", "Health", "Service", "Volume", "read_compose"]
