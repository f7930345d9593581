"""Run a reliability harness: `python -m reliability {fuzz,kill} …`, or `make fuzz`, `make kill`."""

from __future__ import annotations

import importlib
import sys

HARNESSES = ("fuzz", "kill")


def main(argv: list[str]) -> int:
    """Hand the arguments over; a harness is imported only when it is named."""
    if not argv or argv[0] not in HARNESSES:
        print(f"usage: python -m reliability {{{','.join(HARNESSES)}}} …", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"reliability.{argv[0]}").main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
