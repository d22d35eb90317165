"""Sandboxes that are containers of a Docker engine, entered by pier itself."""

from pier.sandbox.docker.backend import DockerBackend

__all__ = ["DockerBackend"]
