"""`python -m floatline`: the same as the command `floatline`."""

from floatline.cli.main import main

if __name__ == "__main__":
    main()
