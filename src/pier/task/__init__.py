"""Tasks: Harbor's task directories as typed values, and where to get them."""

from pier.task.load import Origin, Task, TaskStep, UnknownKey, VerifierEnvironment, load_task
from pier.task.model import TaskConfig, resolve_env, wanted_variables

__all__ = [
    "Origin",
    "Task",
    "TaskConfig",
    "TaskStep",
    "UnknownKey",
    "VerifierEnvironment",
    "load_task",
    "resolve_env",
    "wanted_variables",
]
