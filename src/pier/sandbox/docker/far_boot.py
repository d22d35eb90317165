"""Where the helper's interpreter begins: `python far_boot.py`. Packages are stubbed, as for a zygote.

With `--keep` it keeps the helper's container, with `--parts` it says which files it is made of, one in each line; else
it is a session in it.
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
    if sys.argv[1:] == ["--keep"]:
        importlib.import_module("pier.sandbox.docker.keeper").main()
        return
    far = importlib.import_module("pier.sandbox.docker.far")
    if sys.argv[1:] == ["--parts"]:
        far.list_parts()
    else:
        far.main()


if __name__ == "__main__":
    main()
