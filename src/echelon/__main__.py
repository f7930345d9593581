"""The `echelon` command, and `python -m echelon`.

Loading the command line takes a moment, in which Ctrl-C must already be understood.
"""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from echelon.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
