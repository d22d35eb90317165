"""What can go wrong with a rollout, under the names that users of `verifiers` catch. They are pier's own errors:
`Error` is `pier.PierError`, `ModelError` is `pier.ProviderError`, and `InfraError`, `SandboxError`, `AgentError` are
those of `pier.errors`."""

from __future__ import annotations

from pier.errors import InfraError, PierError, ProviderError, SandboxError

Error = PierError
ModelError = ProviderError


class TunnelError(InfraError):
    """The sandbox cannot reach the gateway."""

    code = "tunnel"
    retryable = True


class SandboxCreationError(SandboxError):
    """No sandbox could be started."""

    code = "sandbox_creation"


class SandboxNotReadyError(SandboxError):
    """A sandbox was not ready in time."""

    code = "sandbox_not_ready"


class SandboxSetupError(SandboxError):
    """`post_sandbox_setup` failed."""

    code = "sandbox_setup"
