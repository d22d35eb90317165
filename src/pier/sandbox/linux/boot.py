"""Where a zygote's interpreter begins: `python -I -S boot.py`.

Packages are stubbed, so that a zygote loads the few modules that it uses and not all that their packages import; so is
what only type checkers or compressed archives need. Each page that a zygote holds is paid for again at every fork.
"""

from __future__ import annotations

import importlib
import sys
import types

_NOT_NEEDED = ("bz2", "lzma", "zlib")


def main() -> None:
    source = __file__.removesuffix("/pier/sandbox/linux/boot.py")
    sys.path.remove(source + "/pier/sandbox/linux") if source + "/pier/sandbox/linux" in sys.path else None
    for name in ("pier", "pier.network", "pier.sandbox", "pier.sandbox.linux"):
        module = types.ModuleType(name)
        module.__path__ = ["/".join([source, *name.split(".")])]
        sys.modules[name] = module
    typing = types.ModuleType("typing")
    typing.Any = typing.IO = object  # type: ignore[attr-defined]
    sys.modules["typing"] = typing
    for name in _NOT_NEEDED:
        sys.modules[name] = None  # type: ignore[assignment]
    importlib.import_module("pier.sandbox.linux.zygote").main()


if __name__ == "__main__":
    main()
