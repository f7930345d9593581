"""`python -m reliability fuzz …`, `… kill …`, `… chaos …`, `… scale …`; each has a --help."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "fuzz": "mutated configurations, data, run, store and cache files, and command lines",
    "chaos": "live trading: kills, cut logs, failing venues; every order exactly once",
    "scale": "nodes and drivers killed while work is on a Ray cluster",
    "kill": "kill -9 at random and at named points of every command, then resume",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print("usage: python -m reliability COMMAND [options]", file=sys.stderr)
        for name, text in COMMANDS.items():
            print(f"  {name}: {text}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"reliability.{argv[0]}")
    return int(command.main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
