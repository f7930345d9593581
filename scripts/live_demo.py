"""The demonstration of `make live`: a year of the sample through feed, engine and paper broker.

    python -m scripts.live_demo              bars from the store
    python -m scripts.live_demo --feed kafka bars through a broker of Kafka's protocol (Tansu)

It runs the ordinary commands, prints each, and needs no account and no network:

1. The demo's bundle; where there is none, its hierarchy is trained and exported first.
2. `live run`, which is killed in the middle by SIGKILL: no handler, no goodbye.
3. `live journal verify` and `live status`: what the dead engine left is whole.
4. The same `live run` again: starting is recovering.
5. `live replay`: decisions, fills and equity again from the journal alone, bit for bit.
6. `live report`: live beside the backtest, what orders cost, and why not more was traded.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.errors import EchelonError
from echelon.live.journal import Journal
from scripts.services import TANSU, ServiceError, running

CONFIG = "configs/demo-hierarchy.yaml"
SECONDS = 300.0
"""That the bars until the kill may take."""


class DemoError(Exception):
    """The demonstration did not go as it should."""


def main(argv: list[str] | None = None) -> int:
    """Run the demonstration; 0: it went as it should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--feed", choices=("store", "kafka"), default="store")
    parser.add_argument("--bundle", type=Path, default=Path("runs/demo-bundle"))
    parser.add_argument("--output-dir", type=Path, default=Path("runs/live"))
    parser.add_argument("--from", dest="begin", default="2021-12-31", metavar="DAY")
    parser.add_argument("--kill-after", type=int, default=100, metavar="BARS")
    args = parser.parse_args(argv)
    os.environ.setdefault("ECHELON_TOKEN", secrets.token_hex(16))  # for the commands below
    try:
        make_bundle(args.bundle)
        shutil.rmtree(args.output_dir, ignore_errors=True)
        args.output_dir.mkdir(parents=True)
        with feed_of(args.feed, args.bundle, args.begin) as feed:
            run_and_kill(args.bundle, args.output_dir, feed, args.begin, args.kill_after)
    except (DemoError, ServiceError, EchelonError) as error:
        print(f"live demo: {error}", file=sys.stderr)
        return 1
    return 0


def make_bundle(bundle: Path) -> None:
    """Train and export the demo's hierarchy where that was not done."""
    if (bundle / "manifest.json").is_file():
        return
    say(f"{bundle} is not there yet: the demo's hierarchy is trained and exported (once)")
    run = bundle.parent / "demo-hierarchy"
    if not (run / "seeds").is_dir():
        command("train", "--config", CONFIG, "--output-dir", str(run))
    command("export", str(run), "--seed", "42", "--output-dir", str(bundle))


@contextmanager
def feed_of(kind: str, bundle: Path, begin: str) -> Iterator[str]:
    """What to give to `--feed`; a broker of Kafka's protocol runs as long as the block does."""
    if kind == "store":
        yield "store"
        return
    missing = TANSU.missing()
    if missing is not None:
        raise DemoError(f"{missing} Or leave FEED=kafka out.")
    with running(TANSU) as broker:
        topic = f"kafka://127.0.0.1:{broker.port}/bars"
        say("a broker of Kafka's protocol runs on loopback; the bars go into a topic")
        command("live", "publish", "--bundle", str(bundle), "--to", topic, "--from", begin)
        yield f"{topic}?mode=once"


def run_and_kill(bundle: Path, directory: Path, feed: str, begin: str, bars: int) -> None:
    """Steps 2 to 6."""
    journal = directory / "live.db"
    about = ("--bundle", str(bundle), "--journal", str(journal))
    engine = ("live", "run", *about, "--feed", feed, "--broker", "paper", "--from", begin)
    say(f"the engine, until it has decided on {bars} bars; then kill -9")
    process = start(*engine)
    try:
        wait_for(journal, bars, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    say(f"killed: the process ended with {process.returncode}; what it left behind:")
    command("live", "journal", "verify", "--journal", str(journal))
    command("live", "status", "--journal", str(journal))
    say("the same command again: it recovers, and goes on to the last bar")
    command(*engine)
    say("all of it again from the journal alone, and as a backtest")
    command("live", "replay", *about)
    command("live", "report", *about, "--output-dir", str(directory / "report"))


def wait_for(journal: Path, bars: int, process: subprocess.Popen[bytes]) -> None:
    """Until an engine has decided on so many bars."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoError(f"the engine ended with {process.returncode} before it was killed.")
        if journal.is_file() and count_decisions(journal) >= bars:
            return
        time.sleep(0.05)
    raise DemoError(f"the engine did not get to {bars} bars within {SECONDS:.0f} s.")


def count_decisions(journal: Path) -> int:
    """How many there are, as far as it can be read."""
    try:
        with Journal.read(journal) as opened:
            return sum(1 for _ in opened.entries(kinds=("decision",)))
    except EchelonError:  # it is being made
        return 0


def command(*arguments: str) -> None:
    """Run a command of Echelon to its end."""
    code = start(*arguments).wait()
    if code:
        raise DemoError(f"`echelon {arguments[0]} …` ended with {code}.")


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a command of Echelon, and print it as one would type it."""
    print(f"\n$ {shlex.join(['echelon', *arguments])}", flush=True)
    return subprocess.Popen([sys.executable, "-m", "echelon", *arguments])


def say(text: str) -> None:
    """Print what is going on."""
    print(f"\n— {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
