"""The text of a compose file as data, as engines read YAML. Apart from what reads it further, since a parser of YAML
takes long to load and most tasks have no such file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from pier.errors import TaskError


class _Loader(yaml.SafeLoader):
    """YAML as engines read it: `yes` and `on` are texts, and so are dates and numbers with colons."""


_PLAIN = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    "float": (r"[-+]?[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?", "-+0123456789"),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rows if tag.rpartition(":")[2] not in {*_PLAIN, "timestamp"}]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, (_pattern, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))


def read_document(path: Path) -> Any:
    """What the file holds. `TaskError` if it cannot be read."""
    try:
        return yaml.load(path.read_bytes(), _Loader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise TaskError(f"{path}: cannot be read: {error}", code="compose") from error
