"""Qlib's Alpha158 over bars handed to it; run by `bench/alpha158.py` in Qlib's own environment.

    python bench/_qlib_alpha158.py BARS.npz OUT.npz WHEEL_DIRECTORY …

BARS: `SYMBOL/FIELD`, float64 [L], each symbol's own bars. They come from memory, so that none of
Qlib's reading counts, and are computed by its expression engine in one process. Writes `SYMBOL`
[L,158], and prints a JSON object: the columns' names and the processor time in seconds. Nothing of
Echelon is imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd


def main() -> None:
    """Compute every symbol once, after one that warms up."""
    bars = np.load(sys.argv[1])
    sys.path[:0] = sys.argv[3:]
    import qlib
    from qlib.contrib.data.loader import Alpha158DL
    from qlib.data import D
    from qlib.data.data import FeatureProvider

    class InMemory(FeatureProvider):  # type: ignore[misc]
        def feature(self, instrument: str, field: Any, start: int, end: int, freq: str) -> Any:
            return pd.Series(bars[f"{instrument}/{str(field)[1:]}"])[start : end + 1]

    symbols = sorted({name.partition("/")[0] for name in bars.files})
    longest = max(len(bars[f"{symbol}/close"]) for symbol in symbols)
    fields, names = Alpha158DL.get_feature_config()
    with tempfile.TemporaryDirectory() as folder:
        calendar = Path(folder) / "calendars" / "day.txt"
        calendar.parent.mkdir()
        days = pd.bdate_range("2000-01-03", periods=longest)
        calendar.write_text("".join(f"{day:%Y-%m-%d}\n" for day in days), encoding="utf-8")
        off = {"expression_cache": None, "dataset_cache": None, "kernels": 1}
        provider = {"class": InMemory, "kwargs": {}}
        qlib.init(provider_uri=folder, feature_provider=provider, logging_level=40, **off)
        D.features(symbols[:1], fields[:20], freq="day", disk_cache=0)
        began = time.process_time()
        table = D.features(symbols, fields, freq="day", disk_cache=0)
        seconds = time.process_time() - began
    values = {name: part.to_numpy() for name, part in table.groupby(level="instrument")}
    with Path(sys.argv[2]).open("wb") as file:
        np.savez(file, **values)
    print(json.dumps({"names": names, "seconds": seconds}))


if __name__ == "__main__":
    main()
