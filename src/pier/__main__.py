"""`python -m pier` is the same program as `pier`."""

from pier.cli.main import main

if __name__ == "__main__":
    main()
