"""`python -m tierlog`: the program, if its script is not on the path."""

from tierlog.cli.main import main

if __name__ == "__main__":
    main()
