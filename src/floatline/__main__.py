"""`python -m floatline`, and the command `floatline`: what it needs is imported where Ctrl-C is heard."""

import sys


def main() -> None:
    """Entry point of the `floatline` script."""
    try:
        from floatline.cli.main import main as run

        run()
    except KeyboardInterrupt:  # before the command was known: it says more itself
        sys.stderr.write("floatline: interrupted. The same command begins again.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
