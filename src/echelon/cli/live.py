"""`echelon live`: run a bundle on a feed and a broker, look at it, and give it orders."""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.console import err, open_alerter, out, set_up_logging
from echelon.cli.live_view import Recorder, read_recent, status_view
from echelon.cli.options import ConfigFile, Level, Overrides, TrustCode
from echelon.errors import EchelonError, Stopped, UsageError, shorten

if TYPE_CHECKING:
    from rich.console import RenderableType

    from echelon.serving.bundle import Bundle

app = typer.Typer(help="Trade by a bundle, on paper or at a broker.", no_args_is_help=True)
journal_app = typer.Typer(help="Verify a journal, and export it.", no_args_is_help=True)
app.add_typer(journal_app, name="journal")

BundleOption = Annotated[Path, typer.Option("--bundle", help="Directory of a bundle.")]
JournalOption = Annotated[Path, typer.Option("--journal", help="File of the engine's journal.")]
StoreOption = Annotated[
    Path | None,
    typer.Option("--store", help="Store with the history; default: the configuration's."),
]
FeedOption = Annotated[
    str,
    typer.Option(
        "--feed",
        help="Where bars come from: store, store:PATH?speed=60, file:PATH, "
        "kafka://HOST:PORT/TOPIC, alpaca.",
    ),
]
BrokerOption = Annotated[
    str,
    typer.Option(
        "--broker",
        help="Where orders go: paper, paper:http://127.0.0.1:PORT, alpaca, sheet:DIRECTORY.",
    ),
]
Begin = Annotated[
    datetime | None,
    typer.Option(
        "--from",
        formats=["%Y-%m-%d"],
        help="First day of a new journal; the history before it warms the engine up.",
    ),
]
_REFRESH_SECONDS = 0.5


@app.command()
def run(
    bundle: BundleOption,
    journal: JournalOption,
    feed: FeedOption = "store",
    broker: BrokerOption = "paper",
    config: ConfigFile = None,
    override: Overrides = None,
    store: StoreOption = None,
    begin: Begin = None,
    bars: Annotated[
        int | None, typer.Option("--bars", min=1, help="Stop after so many bar sets.")
    ] = None,
    no_control: Annotated[
        bool,
        typer.Option("--no-control", help="Hear no commands, export no metrics; needs no token."),
    ] = False,
    trust_code: TrustCode = None,
    log_level: Level = "INFO",
) -> None:
    """Run the engine until the feed ends or Ctrl-C; the same command goes on after any stop.

    Settings of gate, risk limits and broker are those of `--config` (docs/guide/live.md). Commands
    come over loopback with the token in ECHELON_TOKEN.
    """
    from echelon.config.live import LiveConfig
    from echelon.config.load import load_section
    from echelon.config.secrets import require_token
    from echelon.live.alerts import AlertWatcher, metrics_of
    from echelon.live.brokers import open_broker
    from echelon.live.control import ControlServer
    from echelon.live.engine import Interrupted, LiveEngine
    from echelon.live.feeds import open_feed
    from echelon.live.monitor import Monitor
    from echelon.monitoring.alerts import Alert
    from echelon.monitoring.metrics import LIVE, Metrics
    from echelon.stopping import stop_requests

    set_up_logging(log_level)
    settings = load_section(LiveConfig, config, override or ())
    token = None if no_control else require_token()
    loaded, place, until = _open_bundle(bundle, store, begin, trust_code)
    with ExitStack() as stack:
        name = f"{loaded.manifest['policy']} · {broker.partition(':')[0]} · {journal.name}"
        alert = stack.enter_context(open_alerter(settings.alerts, name))
        source = open_feed(feed, loaded, place)
        venue = open_broker(broker, loaded, journal, place, until, settings)
        engine = LiveEngine.open(loaded, place, journal, source, venue, settings, until=until)
        stack.enter_context(engine)
        engine.watchers.append(AlertWatcher(alert, settings.alerts.drawdown))
        if token is not None:
            metrics = Metrics(*LIVE)
            engine.watchers.append(Monitor(metrics, engine, feed))
            metrics.refresh.append(metrics_of(metrics, alert, journal))
            stack.enter_context(ControlServer(engine, token, metrics, settings.metrics.port))
        state = engine.state
        typer.echo(
            f"{'goes on behind ' + state.time[:16] if state.bars else 'starts'}: "
            f"{loaded.manifest['policy']} on {feed}, orders to {venue.name}, journal {journal}"
        )
        stop = stack.enter_context(stop_requests())
        with _watching(journal, lambda: engine.published):
            try:
                engine.run(stop, bars=bars)
            except Interrupted as error:
                raise Stopped(str(error)) from None
            except Exception as error:
                values = {"detail": shorten(f"{type(error).__name__}: {error}", 600)}
                alert(Alert("ended", "critical", time=state.time, values=values))
                raise
        typer.echo(_line(engine.published))
        if stop():
            raise Stopped("the journal is whole; the same command goes on.")


def _open_bundle(
    bundle: Path, store: Path | None, begin: datetime | None, trust_code: list[Path] | None
) -> tuple[Bundle, Path, Any]:
    """(the bundle, its store, last day of the history of a new journal)."""
    from datetime import timedelta

    from echelon.serving.bundle import load_bundle

    loaded = load_bundle(bundle, trust_code=trust_code or ())
    place = loaded.config.data.store if store is None else store
    return loaded, place, None if begin is None else (begin - timedelta(days=1)).date()


@app.command()
def status(
    journal: JournalOption,
    watch: Annotated[bool, typer.Option("--watch", help="Keep looking, until Ctrl-C.")] = False,
    log_level: Level = "INFO",
) -> None:
    """Say how an engine stands: of a running one over loopback, else from its journal."""
    set_up_logging(log_level)
    if not watch:
        standing = _standing(journal)
        out.print(status_view(standing, read_recent(journal, standing)))
        return
    with _watching(journal, lambda: _standing(journal), always=True):
        while True:
            time.sleep(_REFRESH_SECONDS)


@app.command()
def halt(journal: JournalOption, log_level: Level = "INFO") -> None:
    """Send no orders from now on; bars are read and decided on as before."""
    _command("halt", journal, log_level)


@app.command()
def resume(journal: JournalOption, log_level: Level = "INFO") -> None:
    """Send orders again, after a halt or reduce-only."""
    _command("resume", journal, log_level)


@app.command("reduce-only")
def reduce_only(journal: JournalOption, log_level: Level = "INFO") -> None:
    """Send only orders that sell, from now on."""
    _command("reduce-only", journal, log_level)


@app.command()
def flatten(journal: JournalOption, log_level: Level = "INFO") -> None:
    """Sell all that is held, then halt."""
    _command("flatten", journal, log_level)


@app.command()
def reconcile(
    journal: JournalOption,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Take what the venue holds for the truth.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Send orders that bring the venue back.")
    ] = False,
    log_level: Level = "INFO",
) -> None:
    """Compare the venue with the journal; where they differ, adopt or undo. `resume` follows."""
    if adopt and undo:
        raise UsageError("--adopt and --undo exclude each other. Choose one.")
    answer = _command("reconcile", journal, log_level, adopt=adopt, undo=undo)
    for difference in answer.get("differences", ()):
        typer.echo(difference)


@app.command()
def replay(
    bundle: BundleOption,
    journal: JournalOption,
    trust_code: TrustCode = None,
    log_level: Level = "INFO",
) -> None:
    """Run a journal again offline; every decision must come out as it was, bit for bit.

    With the paper broker, fills and equity must also equal the backtest of the same bars. Exit code
    1 where anything differs.
    """
    from echelon.live.journal import Journal
    from echelon.live.replay import replay_journal
    from echelon.serving.bundle import load_bundle

    set_up_logging(log_level)
    with Journal.read(journal) as opened:
        done = replay_journal(load_bundle(bundle, trust_code=trust_code or ()), opened)
    _refuse_differences(done.differences)
    typer.echo(
        f"{len(done.decisions)} decisions of {journal} made again: equal, bit for bit"
        + (
            f"; {done.compared} bars with {done.orders} orders, fills and equity equal the backtest"
            if done.compared
            else "; a backtest is compared from the second bar on, where fills were the kernel's"
        )
        + (f" (up to {done.touched}, where orders were stopped)" if done.touched else "")
    )


@app.command()
def report(
    bundle: BundleOption,
    journal: JournalOption,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Directory of the report.")],
    lang: Annotated[str, typer.Option("--lang", help="en or zh.")] = "en",
    trust_code: TrustCode = None,
    log_level: Level = "INFO",
) -> None:
    """Write the report that a backtest has, live against backtest, and why nothing was traded."""
    from echelon.live.journal import Journal
    from echelon.live.report import write_live_report
    from echelon.serving.bundle import load_bundle

    set_up_logging(log_level)
    with Journal.read(journal) as opened:
        loaded = load_bundle(bundle, trust_code=trust_code or ())
        typer.echo(f"report: {write_live_report(loaded, opened, output_dir, lang)}")


@app.command()
def summary(
    bundle: BundleOption,
    journal: JournalOption,
    day: Annotated[
        datetime | None,
        typer.Option("--date", formats=["%Y-%m-%d"], help="Day; default: of the last decision."),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", help="Directory of the page; default: none.")
    ] = None,
    language: Annotated[
        str | None,
        typer.Option("--language", "--lang", help="en or zh; default: alerts.language."),
    ] = None,
    send: Annotated[
        bool, typer.Option("--send", help="Send it to every channel of the configuration.")
    ] = False,
    config: ConfigFile = None,
    override: Overrides = None,
    trust_code: TrustCode = None,
    log_level: Level = "INFO",
) -> None:
    """Summarise a day: profit, trades, who was in charge and why, costs, alerts.

    The day's decisions are made again from the journal first; exit code 1 where one differs. With
    `--send` the text goes to the channels of `alerts.channels`, and the page with an e-mail.
    """
    from echelon.config.live import LiveConfig
    from echelon.config.load import load_section
    from echelon.files import write_atomic
    from echelon.live.journal import Journal
    from echelon.live.summary import message, render, summarise
    from echelon.monitoring.alerts import send_now
    from echelon.report.texts import Words, file_name
    from echelon.serving.bundle import load_bundle

    set_up_logging(log_level)
    alerts = load_section(LiveConfig, config, override or ()).alerts
    words = Words(language or alerts.language)
    with Journal.read(journal) as opened:
        loaded = load_bundle(bundle, trust_code=trust_code or ())
        done = summarise(loaded, opened, None if day is None else day.date(), alerts.drawdown)
    page = render(done, words)
    said = message(done, words, page)
    typer.echo(said.text)
    if output_dir is not None:
        path = output_dir / file_name(f"summary-{done.day}", "html", words.lang)
        write_atomic(path, page)
        typer.echo(f"page: {path}")
    if send:
        send_now(alerts, said)
    _refuse_differences(done.differences)


@app.command()
def publish(
    bundle: BundleOption,
    to: Annotated[
        str, typer.Option("--to", help="kafka://HOST:PORT/TOPIC, or file:PATH of messages.")
    ],
    store: StoreOption = None,
    begin: Begin = None,
    bars: Annotated[int | None, typer.Option("--bars", min=1, help="Bar sets to send.")] = None,
    trust_code: TrustCode = None,
    log_level: Level = "INFO",
) -> None:
    """Send bars of the store as messages, for tests and demonstrations."""
    from echelon.live.feeds import publish_bars

    set_up_logging(log_level)
    loaded, place, until = _open_bundle(bundle, store, begin, trust_code)
    sent = publish_bars(loaded, place, to, until, bars)
    typer.echo(f"sent {sent:,} messages to {to}")


@app.command()
def venue(
    bundle: BundleOption,
    journal: Annotated[Path, typer.Option("--journal", help="File of the venue's own journal.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port.")] = 8322,
    store: StoreOption = None,
    begin: Begin = None,
    trust_code: TrustCode = None,
    log_level: Level = "INFO",
) -> None:
    """Run the paper broker as a process of its own, on loopback, for `--broker paper:URL`."""
    from echelon.config.secrets import require_token
    from echelon.live.brokers.remote import serve_venue
    from echelon.stopping import stop_requests

    set_up_logging(log_level)
    token = require_token()
    loaded, place, until = _open_bundle(bundle, store, begin, trust_code)
    with serve_venue(loaded, journal, place, until, token, port) as url, stop_requests() as stop:
        typer.echo(f"paper venue on {url}, journal {journal}")
        while not stop():
            time.sleep(0.1)


@journal_app.command()
def verify(journal: JournalOption, log_level: Level = "INFO") -> None:
    """Verify the hash chain of a journal and its last snapshot; exit code 5 where it is broken."""
    from echelon.live.journal import Journal

    set_up_logging(log_level)
    with Journal.read(journal) as opened:
        typer.echo(f"{journal}: whole, {opened.verify():,} entries")


@journal_app.command("export")
def export_journal(
    journal: JournalOption,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Directory of the tables.")],
    log_level: Level = "INFO",
) -> None:
    """Write a journal as Parquet: a table of each kind of entry."""
    from echelon.live.journal import Journal
    from echelon.live.tables import export_tables

    set_up_logging(log_level)
    with Journal.read(journal) as opened:
        for path, rows in export_tables(opened, output_dir).items():
            typer.echo(f"{path}: {rows:,} rows")


def _refuse_differences(differences: Sequence[str]) -> None:
    if differences:
        some = "\n".join(differences[:10])
        raise EchelonError(f"the journal differs from what is computed of it:\n{some}")


def _command(name: str, journal: Path, log_level: str, **flags: bool) -> dict[str, Any]:
    from echelon.config.secrets import require_token
    from echelon.live.control import ask_engine, write_mode
    from echelon.live.engine import Command

    set_up_logging(log_level)
    token = require_token()
    command = Command(name, getpass.getuser(), **flags)
    answer = ask_engine(journal, token, command)
    if answer is None:
        write_mode(journal, command)
        typer.echo(f"{name}: written into {journal}; no engine runs, it holds when one starts")
        return {}
    typer.echo(_line(answer))
    return answer


def _standing(journal: Path) -> dict[str, Any]:
    from echelon.config.secrets import Secrets
    from echelon.live.control import ask_engine
    from echelon.live.journal import Journal
    from echelon.live.tables import last_status

    token = Secrets().echelon_token
    answer = None if token is None else ask_engine(journal, token.get_secret_value())
    if answer is not None:
        return {**answer, "running": True}
    with Journal.read(journal) as opened:
        # Without the token nobody can be asked: what the journal says, and no word of the engine.
        return {**last_status(opened), "running": None if token is None else False}


def _line(status: dict[str, Any]) -> str:
    why = f" ({status['why']})" if status["why"] else ""
    if not status["bars"]:
        return f"{status['mode']}{why}: no bars yet"
    return (
        f"{status['mode']}{why}: {status['bars']} bars, up to {status['time'][:16]}, equity "
        f"{status['equity']:,.2f}, {len(status['account'].get('positions', {}))} positions"
    )


@contextmanager
def _watching(
    journal: Path, standing: Callable[[], dict[str, Any]], *, always: bool = False
) -> Iterator[None]:
    """Show how an engine stands while the block runs, where somebody looks at a terminal."""
    if not (always or err.is_terminal):
        yield
        return
    from rich.live import Live

    recorder = Recorder(journal)

    class _View:
        def __rich__(self) -> RenderableType:
            status = standing()
            return status_view(status, recorder.look(status))

    with Live(_View(), console=err, refresh_per_second=1 / _REFRESH_SECONDS):
        yield
