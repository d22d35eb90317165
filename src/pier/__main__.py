"""The program `pier`; `python -m pier` is the same. A command in a running workspace is passed on at once."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit."""
    if sys.argv[1:2] == ["exec"]:
        try:
            from pier.cli.workspace_exec import run_quickly

            code = run_quickly(sys.argv[2:])
        except KeyboardInterrupt:
            code = 130
        except Exception as error:  # noqa: BLE001 - the command line knows what each error means to its user
            from pier.cli.main import explain_failure

            code = explain_failure(error)
        if code is not None:
            sys.exit(code)
    from pier.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
