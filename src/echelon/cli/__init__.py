"""The `echelon` command."""


def main() -> None:
    """Run the command line."""
