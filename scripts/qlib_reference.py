"""Make the Qlib fixture: a small data directory and what pyqlib itself reads from it.

    python scripts/qlib_reference.py [--venv DIR]

1. Makes a virtual environment of its own (default .venvs/qlib) with pyqlib and only what reading
   needs: pyqlib's full requirements are heavy and clash with ours.
2. In it, writes tests/fixtures/qlib/bin through pyqlib's own file storage: symbols with a
   suspension, a late listing, a delisting, a change of factor, a name that Windows reserves, an
   index; days and minutes.
3. Reads it back through qlib.init, D.calendar, D.instruments and D.features and stores the answer
   in tests/fixtures/qlib/reference.json, with the versions that gave it.

The market is seeded, so that a second run gives the same files. Tests read only the fixture.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

PYQLIB = "0.9.7"
NEEDED = (
    *("numpy==2.4.6", "pandas==3.1.1", "ruamel.yaml", "PyYAML", "joblib", "python-redis-lock"),
    *("requests", "mlflow", "filelock", "dill", "pydantic-settings", "tqdm"),
)
SEED = 20
ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "tests" / "fixtures" / "qlib"
FIELDS = ("open", "high", "low", "close", "volume", "vwap", "factor")
INDEX = "SH000300"
# (symbol, first and last index in the day calendar, suspended days, day of a factor change)
SYMBOLS = (
    ("SH600000", 0, 59, (), 30),
    ("SZ000001", 0, 59, (10, 11, 12, 40), None),
    ("SH688001", 20, 59, (), None),
    ("SZ000002", 0, 40, (), 15),
    ("CON", 5, 59, (), None),
    (INDEX, 0, 59, (), None),
)
# Price levels from a penny stock to 1,800 yuan: rounding is tried at both ends.
CENTS = {"SZ000002": 200, "SH688001": 180_000, INDEX: 380_000}
MARKET = (("SH600000", 0, 25), ("SH600000", 40, 59), ("SZ000002", 0, 40), ("SH688001", 30, 59))
MINUTE_SYMBOLS = (("SH600000", 0, 479, tuple(range(100, 120))), ("SZ000001", 240, 479, (300,)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venvs" / "qlib")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        write_fixture()
        return
    python = args.venv / "bin" / "python"
    if not python.exists():
        venv.create(args.venv, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", f"pyqlib=={PYQLIB}"], check=True)
        subprocess.run([*pip, *NEEDED], check=True)
    subprocess.run([str(python), str(Path(__file__).resolve()), "--child"], check=True)
    size = sum(f.stat().st_size for f in FIXTURE.rglob("*") if f.is_file())
    print(f"{FIXTURE.relative_to(ROOT)}: {size / 1024:.0f} KB, made with pyqlib {PYQLIB}")


def write_fixture() -> None:
    """Write the directory and the reference; runs where pyqlib is installed."""
    import pandas as pd
    import qlib

    assert qlib.__version__ == PYQLIB, f"pyqlib {qlib.__version__} instead of {PYQLIB}"
    target = FIXTURE / "bin"
    shutil.rmtree(target, ignore_errors=True)
    for name in ("calendars", "instruments", "features"):
        (target / name).mkdir(parents=True)
    qlib.init(
        provider_uri={"day": str(target), "1min": str(target)},
        expression_cache=None,
        dataset_cache=None,
        kernels=1,
    )
    # Sessions of Shanghai: weekdays without Qingming and Labour Day.
    holidays = pd.to_datetime(["2020-04-06", "2020-05-01", "2020-05-04", "2020-05-05"])
    days = pd.bdate_range("2020-03-02", "2020-06-30").difference(holidays)[:60]
    minutes = _minutes(days[-2:])
    traded = _write_market(target, days, minutes)
    reference = {
        "provenance": {
            "pyqlib": qlib.__version__,
            "python": platform.python_version(),
            "pandas": pd.__version__,
            "script": "scripts/qlib_reference.py",
            "seed": SEED,
        },
        "traded": traded,
        **_read_back(target),
    }
    text = json.dumps(reference, ensure_ascii=False, separators=(",", ":"))
    (FIXTURE / "reference.json").write_text(text + "\n", encoding="utf-8")


def _minutes(days: pd.DatetimeIndex) -> pd.DatetimeIndex:
    """Starts of the 240 minutes of each day, as Qlib names them."""
    import pandas as pd

    spans = [("09:30", "11:29"), ("13:00", "14:59")]
    pieces = [
        pd.date_range(f"{d:%Y-%m-%d} {a}", f"{d:%Y-%m-%d} {b}", freq="1min")
        for d in days
        for a, b in spans
    ]
    return pieces[0].append(pieces[1:])


def _write_market(
    target: Path, days: pd.DatetimeIndex, minutes: pd.DatetimeIndex
) -> dict[str, Any]:
    """Write calendars, instruments and features; returns the traded closes and volumes."""
    import numpy as np

    rng = np.random.default_rng(SEED)
    np.savetxt(target / "calendars" / "day.txt", [f"{d:%Y-%m-%d}" for d in days], fmt="%s")
    stamps = [f"{m:%Y-%m-%d %H:%M:%S}" for m in minutes]
    np.savetxt(target / "calendars" / "1min.txt", stamps, fmt="%s")
    listed = [(s, a, b) for s, a, b, _, _ in SYMBOLS]
    for market, rows in (("all", listed), ("csi3", MARKET)):
        lines = [f"{s}\t{days[a]:%Y-%m-%d}\t{days[b]:%Y-%m-%d}\n" for s, a, b in rows]
        (target / "instruments" / f"{market}.txt").write_text("".join(lines), encoding="utf-8")
    traded: dict[str, Any] = {"day": {}, "1min": {}}
    for symbol, first, last, gaps, change in SYMBOLS:
        factor = np.full(last - first + 1, 1.0 if symbol == INDEX else rng.uniform(0.05, 3.0))
        if change is not None:
            factor[change - first :] *= 1.0873
        traded["day"][symbol] = _write_symbol(target, symbol, "day", first, factor, gaps, rng)
    for symbol, first, last, missing in MINUTE_SYMBOLS:
        factor = np.full(last - first + 1, rng.uniform(0.05, 3.0))
        traded["1min"][symbol] = _write_symbol(target, symbol, "1min", first, factor, missing, rng)
    return traded


def _write_symbol(
    target: Path,
    symbol: str,
    freq: str,
    first: int,
    factor: NDArray[np.float64],
    gaps: tuple[int, ...],
    rng: np.random.Generator,
) -> dict[str, list[float | None]]:
    import numpy as np
    from qlib.data.storage.file_storage import FileFeatureStorage
    from qlib.utils import code_to_fname

    n = len(factor)
    cents = np.maximum(CENTS.get(symbol, 1_500) + rng.integers(-3, 4, (n, 4)).cumsum(axis=0), 50)
    raw = np.sort(cents, axis=1) / 100
    low, open_, close, high = raw.T
    volume = rng.integers(1, 2_000_000, n) * 100.0
    fields = {
        "open": open_ * factor,
        "high": high * factor,
        "low": low * factor,
        "close": close * factor,
        "volume": volume / factor,
        "vwap": (low + high) / 2 * factor,
        "factor": factor,
    }
    missing = [g - first for g in gaps]
    folder = code_to_fname(symbol)
    (target / "features" / folder.lower()).mkdir(exist_ok=True)
    for field, values in fields.items():
        values = values.copy()
        values[missing] = np.nan
        storage = FileFeatureStorage(
            instrument=folder, field=field, freq=freq, provider_uri={freq: str(target)}
        )
        storage.write(values, first)
    close, volume = close.copy(), volume.copy()
    close[missing] = volume[missing] = np.nan
    return {"close": _plain(close), "volume": _plain(volume)}


def _read_back(target: Path) -> dict[str, Any]:
    """Everything in the directory as pyqlib gives it."""
    from qlib.data import D

    result: dict[str, Any] = {}
    for freq, names in (
        ("day", [s for s, *_ in SYMBOLS]),
        ("1min", [s for s, *_ in MINUTE_SYMBOLS]),
    ):
        table = D.features(names, [f"${f}" for f in FIELDS], freq=freq)
        result[freq] = {
            "calendar": [str(t) for t in D.calendar(freq=freq)],
            "features": {
                symbol: {
                    "time": [str(t) for t in part.index.get_level_values("datetime")],
                    **{f: _single(part[f"${f}"]) for f in FIELDS},
                }
                for symbol, part in table.groupby(level="instrument")
            },
        }
    result["instruments"] = {
        market: {
            symbol: [[str(a.date()), str(b.date())] for a, b in spans]
            for symbol, spans in D.list_instruments(D.instruments(market), freq="day").items()
        }
        for market in ("all", "csi3")
    }
    members = D.features(D.instruments("csi3"), ["$close"], freq="day")
    result["member_days"] = {
        symbol: [str(t.date()) for t in part.index.get_level_values("datetime")]
        for symbol, part in members.groupby(level="instrument")
    }
    return result


def _plain(values: Iterable[float]) -> list[float | None]:
    return [None if v != v else float(v) for v in values]


def _single(values: Iterable[float]) -> list[float | None]:
    """Float32 values by their shortest decimal, which reads back to the same float32."""
    import numpy as np

    return [None if v != v else float(str(np.float32(v))) for v in values]


if __name__ == "__main__":
    main()
