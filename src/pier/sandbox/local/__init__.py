"""The backend that needs no daemon: Linux namespaces over copy-on-write layers, forked from a warm process."""

from pier.sandbox.local.backend import LocalBackend

__all__ = ["LocalBackend"]
