"""Errors with blame.

    PierError
    ├── UsageError       the command line, a config file or an API call is wrong
    ├── TaskError        a task directory or dataset is wrong
    ├── InfraError       something that agents run on failed
    │   ├── ImageError       an image cannot be found, read, pulled or built
    │   ├── SandboxError     a sandbox could not be started, reached or controlled
    │   │   ├── PolicyError  a network policy cannot be enforced here, so nothing was started
    │   │   ├── ArgumentError   an argument of a call is wrong; also a ValueError
    │   │   └── PathError    a path in a sandbox is missing, not allowed or not of the kind that the call needs; also
    │   │                    an OSError: its subclasses are FileNotFoundError, PermissionError, ...
    │   └── StorageError     this machine could not keep, read or hand on a file
    ├── AgentError       the agent program failed
    ├── ProviderError    the model provider failed
    ├── VerifierError    the verifier gave no usable verdict
    ├── JobError         a job directory is broken or owned by another process
    └── WorkspaceError   a workspace cannot be found, started or used

Each error says where the fault lies (`blame`), whether doing the same again may help (`retryable`) and has a stable
`code` for machines. Retry policy reads those three, never class names nor the text of a message. `hint` is the one
thing a person should try next.
"""

from __future__ import annotations

from typing import Literal

Blame = Literal["infra", "agent", "task", "user", "provider"]


class PierError(Exception):
    """The root of every error that pier raises on purpose."""

    blame: Blame = "infra"
    retryable: bool = False
    code: str = "pier"

    def __init__(
        self,
        message: str = "",
        *,
        hint: str | None = None,
        code: str | None = None,
        blame: Blame | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code
        if blame is not None:
            self.blame = blame
        if retryable is not None:
            self.retryable = retryable

    def __str__(self) -> str:
        return self.message

    def explain(self) -> str:
        """The message with its hint, as a person should see it."""
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(PierError):
    blame = "user"
    code = "usage"


class TaskError(PierError):
    blame = "task"
    code = "task"


class InfraError(PierError):
    blame = "infra"
    code = "infra"


class ImageError(InfraError):
    code = "image"


class SandboxError(InfraError):
    retryable = True
    code = "sandbox"


class PolicyError(SandboxError):
    blame = "user"
    retryable = False
    code = "policy"


class ArgumentError(SandboxError, ValueError):
    """Raised before anything is sent, so the sandbox is as it was."""

    blame = "user"
    retryable = False
    code = "bad_argument"


class PathError(SandboxError, OSError):
    """A path is too long, read-only, busy, or something else than the call needs. `errno` says which."""

    blame = "user"
    retryable = False
    code = "bad_path"

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.errno = number


class DirectoryInTheWayError(PathError, IsADirectoryError):
    """A file was to be written or removed where a directory is."""

    code = "is_directory"


class NoDirectoryError(PathError, NotADirectoryError):
    """A path leads through something that is not a directory."""

    code = "not_directory"


class MissingPathError(PathError, FileNotFoundError):
    """A path does not exist."""

    code = "not_found"


class DeniedPathError(PathError, PermissionError):
    """The user that a call acts as may not do that to this path."""

    code = "permission_denied"


class AgentError(PierError):
    blame = "agent"
    code = "agent"


class ProviderError(PierError):
    blame = "provider"
    retryable = True
    code = "provider"


class VerifierError(PierError):
    blame = "task"
    code = "verifier"


class StorageError(InfraError):
    retryable = True
    code = "storage"


class JobError(PierError):
    blame = "user"
    code = "job"


class WorkspaceError(PierError):
    blame = "user"
    code = "workspace"
