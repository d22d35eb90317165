"""What the calls of a sandbox accept, checked before anything is sent, the same for every backend.

A wrong argument is an `ArgumentError` of the caller, and the sandbox is as it was. Strings must be such that the kernel
can take them: no NUL, and no surrogates but those by which Python stands in for bytes that are not UTF-8
(`os.fsdecode`, U+DC80 to U+DCFF), so that every file name can be given.
"""

from __future__ import annotations

import ipaddress
import math
import os
import signal
from collections.abc import AsyncIterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pier.errors import ArgumentError
from pier.network.policy import NetworkMode, NetworkPolicy
from pier.sandbox.contract import NewFile, SandboxSpec

_SHOWN = 80
_HOSTNAME = 64
"""Bytes that the kernel has for a host name."""


def check_command(command: Any, cwd: Any = None, env: Any = None, user: Any = None) -> None:
    """What to run, where, with which variables and as whom."""
    if not isinstance(command, str):
        check_texts("command", command)
        if not command:
            raise _invalid("command", command, "at least the name of a program")
    else:
        _check_text("command", command)
    _check_optional_text("cwd", cwd)
    _check_optional_text("user", user)
    check_env("env", env)


def check_env(name: str, env: Any) -> None:
    """Variables. Their values are never shown: they may be secret."""
    if env is None:
        return
    if not isinstance(env, Mapping):
        raise _invalid(name, env, "a mapping of strings")
    for key, value in env.items():
        _check_text(f"a name in {name}", key)
        if not key or "=" in key:
            raise _invalid(f"a name in {name}", key, "a name that is not empty and has no '='")
        if (problem := _problem(value)) is not None:
            raise ArgumentError(f"invalid value for {name}[{key!r:.{_SHOWN}}]: expected {problem}")


def check_streams(tty: Any, on_output: Any, output_limit: Any) -> None:
    check_flag("tty", tty)
    check_size("output_limit", output_limit)
    if on_output is not None and not callable(on_output):
        raise _invalid("on_output", on_output, "a function or None")


def check_timeout(timeout: Any) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or math.isnan(timeout):
        raise _invalid("timeout", timeout, "a number of seconds or None")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _invalid(name, value, "True or False")


def check_path(name: str, value: Any) -> None:
    """A path inside a sandbox."""
    _check_text(name, value)
    if not value:
        raise _invalid(name, value, "a path")


def check_paths(name: str, values: Any) -> None:
    check_texts(name, values)
    for value in values:
        check_path(name, value)


def check_folders(name: str, values: Any) -> None:
    """Directories inside a sandbox, with their modes."""
    if not isinstance(values, Mapping):
        raise _invalid(name, values, "a mapping of paths to modes")
    for path, mode in values.items():
        check_path(name, path)
        check_number(f"{name}[{path!r}]", mode, 0, 0o7777)


def check_files(name: str, values: Any) -> None:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, NewFile) for value in values):
        raise _invalid(name, values, "a sequence of NewFile")
    for value in values:
        check_path(name, value.path)
        check_mode(value.mode)
        if value.data is not None:
            check_bytes(name, value.data)


def check_host_path(name: str, value: Any) -> None:
    """A path of this machine."""
    if not isinstance(value, Path):
        raise _invalid(name, value, "a pathlib.Path")
    _check_text(name, str(value))


def check_source(source: Any) -> None:
    """A file or a directory of this machine that is to be read. Reading anything else might never end."""
    check_host_path("source", source)
    if source.exists() and not (source.is_file() or source.is_dir()):
        raise _invalid("source", source, "a regular file or a directory")


def check_user(user: Any, owner: Any = None) -> None:
    """Who a file is written as: a user, or root for an owner."""
    _check_optional_text("user", user)
    _check_optional_text("owner", owner)
    if user is not None and owner is not None:
        raise ArgumentError("invalid arguments: expected user or owner, got both")


def check_mode(mode: Any) -> None:
    if mode is not None:
        check_number("mode", mode, 0, 0o7777)


def check_bytes(name: str, value: Any) -> None:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise ArgumentError(f"invalid value for {name}: expected bytes, got {type(value).__name__}")


def as_bytes(name: str, value: Any) -> bytes:
    """Text as UTF-8."""
    if isinstance(value, str):
        try:
            return value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ArgumentError(f"invalid value for {name}: expected text that UTF-8 can hold") from None
    check_bytes(name, value)
    return value


def check_stream(stream: Any) -> None:
    if not isinstance(stream, AsyncIterable):
        raise _invalid("stream", stream, "an asynchronous iterator of bytes")


def check_texts(name: str, values: Any) -> None:
    """Several strings. A single one is refused: it would be taken for its letters."""
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Sequence):
        raise _invalid(name, values, "a sequence of strings")
    for value in values:
        _check_text(f"a part of {name}", value)


def check_size(name: str, value: Any, *, optional: bool = False) -> None:
    if value is not None or not optional:
        check_number(name, value, 0, 1 << 62)


def check_number(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _invalid(name, value, f"a whole number from {least} to {most}")


def check_signal(number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number not in signal.valid_signals():
        raise _invalid("number", number, "the number of a signal")


def check_terminal(rows: Any, columns: Any) -> None:
    check_number("rows", rows, 0, 0xFFFF)
    check_number("columns", columns, 0, 0xFFFF)


def check_listener(port: Any, factory: Any, host: Any) -> None:
    check_number("port", port, 0, 0xFFFF)
    if not callable(factory):
        raise _invalid("factory", factory, "a function that makes a protocol")
    _check_text("host", host)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise _invalid("host", host, "an IP address") from None


def check_policy(policy: Any) -> None:
    if not isinstance(policy, NetworkPolicy) or policy.mode not in get_args(NetworkMode):
        raise _invalid("policy", policy, "a network policy")
    check_texts("policy.hosts", policy.hosts)


def check_spec(spec: SandboxSpec) -> None:
    """What a sandbox is started with. What the image says is the task's choice."""
    check_command(("none",), spec.workdir, spec.env, spec.user)
    check_env("labels", spec.labels)
    check_policy(spec.network)
    _check_text("hostname", spec.hostname)
    if not 0 < len(os.fsencode(spec.hostname)) <= _HOSTNAME or any(each.isspace() for each in spec.hostname):
        raise _invalid("hostname", spec.hostname, f"a name of at most {_HOSTNAME} bytes without spaces")
    for mount in spec.mounts:
        check_path("mount.target", mount.target)
        check_size("mount.size", mount.size, optional=True)
        if mount.source is not None:
            check_host_path("mount.source", mount.source)
    config = spec.image.config
    try:
        check_command([*config.shell, ""], config.workdir, config.env, config.user)
    except ArgumentError as error:
        raise ArgumentError(f"the image {spec.image.reference}: {error.message}", blame="task") from error


def _check_optional_text(name: str, value: Any) -> None:
    if value is not None:
        _check_text(name, value)


def _check_text(name: str, value: Any) -> None:
    if (problem := _problem(value)) is not None:
        raise _invalid(name, value, problem)


def _problem(value: Any) -> str | None:
    """What a value is not, that had to be a string for the kernel."""
    if not isinstance(value, str):
        return f"a string, got {type(value).__name__}"
    if "\0" in value:
        return "a string without a NUL"
    if value.isascii():
        return None
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return "a string that UTF-8 can hold, without lone surrogates"
    return None


def _invalid(name: str, value: Any, expected: str) -> ArgumentError:
    shown = repr(value[:_SHOWN] if isinstance(value, (str, bytes)) else value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return ArgumentError(f"invalid value {shown} for {name}: expected {expected}")
