"""Run the benchmarks: `python -m bench [name …]`, or `make bench`.

A benchmark is a module of this directory with a `main()` that prints its table and raises, or
returns something other than 0, where what it promises does not hold; its docstring says what
that is. Each runs in a process of its own, so that one
does not warm caches, compile kernels or raise the peak memory of another. One that fails does not
stop the rest; the closing lines name it and the exit code is 1. Those that take many minutes
(`LONG`) run only when they are named.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
THREADS = (
    "POLARS_MAX_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
LONG = (
    "budget",
    "guards",
    "live",
    "pendulum",
    "population",
    "routing",
    "scale",
    "sharing",
    "tuning",
)
SHOWN = ("numpy", "numba", "polars", "pyarrow", "pandas", "TA-Lib", "torch")


def discover(directory: Path = HERE) -> dict[str, str]:
    """Return name → first line of the docstring, of every module with a `main()`, sorted.

    The files are parsed, not imported: a benchmark's imports belong to its own process.
    """
    found = {}
    for path in sorted(directory.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or path.stem).splitlines()[0]
    return found


def describe_machine() -> str:
    """One line about the machine and one about the versions, for whoever compares numbers."""
    threads = " ".join(f"{name}={os.environ[name]}" for name in THREADS)
    versions = ", ".join(f"{name} {version(name)}" for name in SHOWN)
    return (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}\n{versions}\n{threads}"
    )


def run(name: str) -> tuple[bool, float]:
    """Run one benchmark in a fresh process; whether it succeeded, and its seconds."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "bench", "--here", name]
    done = subprocess.run(command, cwd=HERE.parent, check=False)
    return done.returncode == 0, time.perf_counter() - started


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Run the benchmarks.")
    parser.add_argument("names", nargs="*", help="which ones; all of them by default")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--here", metavar="NAME", help="run one in this very process")
    args = parser.parse_args(argv)
    # Before anything heavy is imported: one thread unless the caller says otherwise.
    for name in THREADS:
        os.environ.setdefault(name, "1")

    known = discover()
    unknown = [n for n in [*args.names, *filter(None, [args.here])] if n not in known]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(known) or 'none'}")
    if args.list:
        for name, title in known.items():
            print(f"{name}: {title}{' (only when named)' if name in LONG else ''}")
        return 0
    if args.here:
        return int(importlib.import_module(f"bench.{args.here}").main() or 0)

    print(describe_machine(), flush=True)
    failed = []
    for name in args.names or [name for name in known if name not in LONG]:
        print(f"\n== {name}: {known[name]}", flush=True)
        good, seconds = run(name)
        print(f"-- {name}: {'done' if good else 'FAILED'} in {seconds:.0f} s", flush=True)
        failed += [] if good else [name]
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
