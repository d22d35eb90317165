"""Where the helper's interpreter begins: `python far_boot.py`. Packages are stubbed, as for a zygote.

With `--parts` it says which files it is made of instead, one in each line.
"""

from __future__ import annotations

import importlib
import sys
import types


def main() -> None:
    source = __file__.removesuffix("/pier/sandbox/docker/far_boot.py")
    own = source + "/pier/sandbox/docker"
    sys.path[:] = [path for path in sys.path if path != own]
    sys.modules["ssl"] = None  # type: ignore[assignment]
    for name in ("pier", "pier.network", "pier.sandbox", "pier.sandbox.linux", "pier.sandbox.docker"):
        module = types.ModuleType(name)
        module.__path__ = ["/".join([source, *name.split(".")])]
        sys.modules[name] = module
    far = importlib.import_module("pier.sandbox.docker.far")
    if sys.argv[1:] == ["--parts"]:
        far.list_parts()
    else:
        far.main()


if __name__ == "__main__":
    main()
