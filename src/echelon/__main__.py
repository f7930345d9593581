"""`python -m echelon` is the `echelon` command."""

from echelon.cli import main

if __name__ == "__main__":
    main()
