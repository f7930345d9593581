"""The `echelon` command."""

from echelon.cli.app import app, main

__all__ = ["app", "main"]
