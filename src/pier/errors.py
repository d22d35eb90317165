"""Errors with blame.

    PierError
    ├── UsageError       invalid command line, configuration file or API call
    ├── TaskError        invalid task directory or dataset
    ├── InfraError       the infrastructure below the agents failed
    │   ├── ImageError       an image cannot be found, read, pulled or built
    │   ├── SandboxError     a sandbox could not be started, reached or controlled
    │   │   ├── PolicyError  a network policy cannot be enforced here, so nothing was started
    │   │   ├── ArgumentError   invalid argument of a call; also a ValueError
    │   │   └── PathError    a path in a sandbox is missing, denied or of the wrong type; also an OSError: its
    │   │                    subclasses are FileNotFoundError, PermissionError, ...
    │   └── StorageError     a file could not be stored, read or copied on this machine
    ├── AgentError       the agent program failed
    ├── ProviderError    the model provider failed
    ├── VerifierError    the verifier gave no usable verdict
    ├── JobError         a job directory is broken or owned by another process
    └── WorkspaceError   a workspace cannot be found, started or used

Each error names the party at fault (`blame`), whether a retry may succeed (`retryable`) and a stable `code` for
programs. Retry policy reads only those three, never class names or message texts. `hint` is the one thing a person
should try next.
"""

from __future__ import annotations

from typing import Literal

Blame = Literal["infra", "agent", "task", "user", "provider"]


class PierError(Exception):
    """Base class of every error that pier raises on purpose."""

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
        self.code = code or self.code
        self.blame = blame or self.blame
        self.retryable = self.retryable if retryable is None else retryable

    def __str__(self) -> str:
        return self.message

    def explain(self) -> str:
        """Return the message and the hint for people."""
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
    """Invalid argument. Raised before anything is sent, so the sandbox is unchanged."""

    blame = "user"
    retryable = False
    code = "bad_argument"


class PathError(SandboxError, OSError):
    """A path is too long, read-only, busy or of the wrong type; `errno` has the reason."""

    blame = "user"
    retryable = False
    code = "bad_path"

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.errno = number


class DirectoryInTheWayError(PathError, IsADirectoryError):
    """A file cannot be written or removed because the path is a directory."""

    code = "is_directory"


class NoDirectoryError(PathError, NotADirectoryError):
    """A path leads through something that is not a directory."""

    code = "not_directory"


class MissingPathError(PathError, FileNotFoundError):
    """A path does not exist."""

    code = "not_found"


class DeniedPathError(PathError, PermissionError):
    """The user of the call lacks permission for this path."""

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
