"""The command `isotype`, and `python -m isotype`."""

import sys


def start() -> int:
    """Run the command line and return its exit status; Ctrl-C also works while isotype is being imported."""
    try:
        from isotype.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(start())
