"""Entry point of `pier` and `python -m pier`. `pier exec` reaches a running workspace without loading the whole CLI."""

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
        except Exception as error:  # noqa: BLE001 - explain_failure raises unknown errors again
            from pier.cli.main import explain_failure

            code = explain_failure(error)
        if code is not None:
            sys.exit(code)
    from pier.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
