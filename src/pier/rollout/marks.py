"""Methods of an environment or rubric that are called at certain moments: `@stop`, `@cleanup`, `@teardown`.

Each is called with the arguments that it names. Those with a higher `priority` come first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
Mark = Literal["stop", "cleanup", "teardown"]


def _marker(mark: Mark, func: Any, priority: int) -> Any:
    def apply(method: F) -> F:
        setattr(method, f"_pier_{mark}", priority)
        return method

    return apply if func is None else apply(func)


def stop(func: Any = None, *, priority: int = 0) -> Any:
    """Mark a method as a stop condition: it takes the state and says whether the rollout is over."""
    return _marker("stop", func, priority)


def cleanup(func: Any = None, *, priority: int = 0) -> Any:
    """Mark a method to be called at the end of each rollout, while its sandbox is still there."""
    return _marker("cleanup", func, priority)


def teardown(func: Any = None, *, priority: int = 0) -> Any:
    """Mark a method to be called when the environment is done with."""
    return _marker("teardown", func, priority)


def marked(owner: object, mark: Mark) -> list[Callable[..., Any]]:
    """The marked methods of an object in the order in which they are called."""
    found: list[tuple[int, str, Callable[..., Any]]] = []
    for name in dir(type(owner)):
        declared = inspect.getattr_static(owner, name, None)
        priority = getattr(declared, f"_pier_{mark}", None)
        if priority is not None:
            found.append((-priority, name, getattr(owner, name)))
    return [method for _, _, method in sorted(found, key=lambda each: each[:2])]


async def call_named(func: Callable[..., Any], objects: Mapping[str, Any]) -> Any:
    """Call a plain or async function with those of the objects that it names; with all if it takes any."""
    parameters = inspect.signature(func).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        named = {parameter.name for parameter in parameters}
        objects = {name: value for name, value in objects.items() if name in named}
    found = func(**objects)
    return await found if inspect.isawaitable(found) else found
