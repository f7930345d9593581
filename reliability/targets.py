"""What is fuzzed: a table of targets, each a line; a new one is a function and a line.

A target makes a case from a random generator and the corpus of valid files, and names how it is
run: as a command line, or as a call of a reader where a command would spend its time elsewhere.
Weights are shares of the cases. They follow the cost: what takes milliseconds has thousands of
cases, a report or a resumed training has hundreds.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from reliability import mutate
from reliability.cases import Case, CommandEnd, Outcome, run_command
from reliability.mutate import Rng
from reliability.watched import Job, Runner
from reliability.worlds import ROOT, SERVED, SMALL, live_engine, options

_EVIL = {"evil.py": mutate.CODE.encode()}
"""A module that a configuration may name; nothing that only looks at the configuration runs it."""


class Corpus:
    """Valid files to start from."""

    def __init__(self, worlds: Path) -> None:
        self.worlds = worlds

    @functools.cache  # noqa: B019 (there is one corpus, for as long as the process lives)
    def names(self, world: str, part: str = ".") -> tuple[str, ...]:
        """Paths in a world, below one of its parts, sorted."""
        root = self.worlds / world
        inside = (root / part).rglob("*") if (root / part).is_dir() else [root / part]
        return tuple(sorted(str(p.relative_to(root)) for p in inside if p.is_file()))

    @functools.cache  # noqa: B019
    def data(self, world: str, name: str) -> bytes:
        """Content of a file of a world."""
        return (self.worlds / world / name).read_bytes()

    def table(self, name: str) -> mutate.Table:
        """Rows of a CSV file of the world of files."""
        text = self.data("files", name).decode("gbk" if name == "chinese.csv" else "utf-8")
        return [line.split("," if "," in line else "\t") for line in text.splitlines()]

    @functools.cache  # noqa: B019
    def configs(self) -> tuple[str, ...]:
        """The shipped configurations, and resolved ones, which have every key."""
        shipped = sorted((ROOT / "configs").rglob("*.yaml"))
        texts = [path.read_text(encoding="utf-8") for path in shipped if "rl_zoo" not in path.parts]
        return (*texts, self.data("flat", "run/config.yaml").decode())

    @functools.cache  # noqa: B019
    def keys(self) -> tuple[str, ...]:
        """Every key of a resolved configuration, with dots."""
        keys = []
        waiting = [("", yaml.safe_load(self.data("flat", "run/config.yaml")))]
        while waiting:
            prefix, node = waiting.pop()
            for key, value in node.items():
                keys.append(prefix + key)
                if isinstance(value, dict):
                    waiting.append((f"{prefix}{key}.", value))
        return tuple(sorted(keys))


# --- configurations


def config_file(rng: Rng, corpus: Corpus) -> Case:
    """A configuration file, checked or shown."""
    data = mutate.mutate_yaml(rng, rng.choice(corpus.configs()))
    words = rng.choice((["config", "validate", "c.yaml"], ["config", "show", "-c", "c.yaml"]))
    return Case(words, {"c.yaml": data, **_EVIL})


def override(rng: Rng, corpus: Corpus) -> Case:
    """Overrides of the command line."""
    words = ["config", rng.choice(("show", "validate"))]
    if words[1] == "validate":
        words.append("c.yaml")
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        words += ["-o", _argument(_override(rng, corpus))]
    return Case(words, {"c.yaml": b"seed: 1\n"})


def _override(rng: Rng, corpus: Corpus) -> str:
    key = rng.choice(corpus.keys())
    if rng.random() < 0.1:
        key = mutate.mutate_text(rng, key)
    value = mutate.odd(rng)
    text = value if isinstance(value, str) else mutate.yaml_text(value)
    if rng.random() < 0.15:
        text = mutate.mutate_text(rng, text)
    return f"{key}{rng.choice(('=',) * 9 + ('',))}{text[:4000]}"


def _argument(text: str) -> str:
    """As the system would hand it over: no NUL, and only such surrogates as stand for bytes."""
    return (
        text.replace("\x00", "").encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    )


# --- the command line

_COMMANDS = (
    *("prepare", "train", "evaluate", "ablate", "compare", "walk-forward", "report", "prove"),
    *("study", "demo", "data import", "data synth", "data check", "data show", "data universe"),
    *("config show", "config validate", "runs list", "runs compare", "execution train"),
    *("execution evaluate", "execution compare", "execution prove", "nothing", ""),
)
_FLAGS = (
    *("--config", "-c", "-o", "--override", "--output-dir", "--seeds", "--workers", "--resume"),
    *("--split", "--name", "--lang", "--log-level", "--dataset", "--store", "--freq", "--symbols"),
    *("--start", "--end", "--benchmark", "--universe", "--update", "--quarantine", "--days"),
    *("--seed", "--export", "--leakage", "--cuts", "--source", "--help", "--version", "--"),
    *(
        "--overwrite",
        "--nothing",
        "-x",
        "-",
        "--runs",
        "--baseline",
        "--folds",
        "--show-completion",
    ),
)
_VALUES = (
    "run",
    "bars.csv",
    "c.yaml",
    "store",
    "1",
    "3",
    "valid",
    "test",
    "en",
    "csv",
    "1d",
    "2015-01-05",
)


def command_line(rng: Rng, corpus: Corpus) -> Case:
    """Words of a command line, most of which fit nothing.

    The last word names a configuration that is not there, so that no command begins a long
    training; those which take none stop at it.
    """
    words = rng.choice(_COMMANDS).split()
    if words[:1] == ["data"] and rng.random() < 0.3:
        words += ["csv", "bars.csv"]
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        kind = rng.random()
        if kind < 0.55:
            words.append(rng.choice(_FLAGS))
        elif kind < 0.8:
            words.append(rng.choice(_VALUES))
        else:
            words.append(_argument(str(rng.choice((mutate.word(rng), mutate.number(rng))))))
    if words[:1] != ["--show-completion"]:  # elsewhere it may be the value of another option
        words += ["--config", "absent.yaml"]
    files = {"bars.csv": corpus.data("files", "bars.csv"), "c.yaml": b"seed: 1\n"}
    return Case(words, files)


# --- data files


def _data_words(rng: Rng, source: str, path: str, *more: str) -> list[str]:
    if rng.random() < 0.5:
        words = ["data", "check", path, "--source", source]
    else:
        words = ["data", "import", source, path, "--store", "store", "--dataset", "d"]
        words += ["--quarantine"] if rng.random() < 0.5 else []
    if rng.random() < 0.15:
        words += ["--freq", rng.choice(("1min", "5min"))]
    return [*words, *more]


def text_file(rng: Rng, corpus: Corpus) -> Case:
    """CSV, TSV, gzip and GBK files of bars."""
    name = rng.choice(("bars.csv", "bars.csv", "bars.tsv", "chinese.csv", "bars.csv.gz"))
    data = corpus.data("files", name)
    if name != "bars.csv.gz" and rng.random() < 0.8:
        data = mutate.csv_bytes(rng, mutate.mutate_table(rng, corpus.table(name)))
    elif name == "bars.csv.gz" and rng.random() < 0.5:
        table = mutate.mutate_table(rng, corpus.table("bars.csv"))
        data = gzip.compress(mutate.csv_bytes(rng, table), mtime=0)
    else:
        data = mutate.mutate_bytes(rng, data)
    return Case(_data_words(rng, "csv", name), {name: data})


def wide_file(rng: Rng, corpus: Corpus) -> Case:
    """Bars with a header or a line of absurd length."""
    width = rng.choice((5_000, 100_000, 1_000_000))
    cell = rng.choice(("a", "", "close", "column_"))
    head = ",".join(f"{cell}{k}" if cell.endswith("_") else cell for k in range(width))
    line = rng.choice(("", "1," * width, "x" * width))
    text = rng.choice(
        (head + "\n" + line, "date,close\n" + head, f"date,{head}\n2015-01-05,{line}\n")
    )
    return Case(["data", "check", "bars.csv"], {"bars.csv": text.encode()})


def parquet_file(rng: Rng, corpus: Corpus) -> Case:
    """Parquet files of bars."""
    table = corpus.table("bars.csv")
    if rng.random() < 0.7:
        table = mutate.mutate_table(rng, table)
    data = mutate.parquet_bytes(rng, table)
    return Case(_data_words(rng, "parquet", "bars.parquet"), {"bars.parquet": data})


def ticks_file(rng: Rng, corpus: Corpus) -> Case:
    """Tick files, as text and as Parquet."""
    table = mutate.mutate_table(rng, corpus.table("ticks.csv"))
    if rng.random() < 0.3:
        name, data = "ticks.parquet", mutate.parquet_bytes(rng, table)
    else:
        name, data = "ticks.csv", mutate.csv_bytes(rng, table)
    words = _data_words(rng, "ticks", name, "--freq", rng.choice(("1min", "5min", "1d")))
    return Case(words, {name: data})


def qlib_directory(rng: Rng, corpus: Corpus) -> Case:
    """A Qlib directory with a file damaged or removed."""
    name = rng.choice(corpus.names("files", "qlib"))
    data = corpus.data("files", name)
    if rng.random() < 0.1:
        changed: bytes | None = None
    elif name.endswith(".txt"):
        changed = mutate.encode(rng, mutate.mutate_text(rng, data.decode()))
    else:
        changed = mutate.mutate_bytes(rng, data)
    return Case(_data_words(rng, "qlib", "qlib"), {name: changed}, "files", ("qlib",))


_SIDE = {
    "universe.csv": "data.universe",
    "instruments.csv": "data.instruments",
    "index.csv": "data.benchmark_path",
}


def side_file(rng: Rng, corpus: Corpus) -> Case:
    """Files beside the bars: universe, instruments, benchmark."""
    name = rng.choice(tuple(_SIDE))
    table = mutate.mutate_table(rng, corpus.table(name))
    if rng.random() < 0.25:
        path, data = name.replace(".csv", ".parquet"), mutate.parquet_bytes(rng, table)
    else:
        path, data = name, mutate.csv_bytes(rng, table)
    more = ["-o", f"{_SIDE[name]}={path}"]
    if name == "index.csv":
        more += [
            "-o",
            f"data.benchmark={rng.choice(('IDX', 'IDX', mutate.word(rng).strip(chr(0))))}",
        ]
    words = _data_words(rng, "csv", "bars.csv", *(_argument(word) for word in more))
    return Case(words, {path: data, "bars.csv": corpus.data("files", "bars.csv")})


def exogenous_file(rng: Rng, corpus: Corpus) -> Case:
    """A file of macro series with publication times."""
    table = mutate.mutate_table(rng, corpus.table("exogenous.csv"))
    if rng.random() < 0.25:
        name, data = "series.parquet", mutate.parquet_bytes(rng, table)
    else:
        name, data = "series.csv", mutate.csv_bytes(rng, table)
    return Case((), {name: data}, extra={"path": name})


def run_exogenous(case: Case) -> None:
    """Read the file as `prepare` does."""
    from echelon.config.data import ExogenousConfig
    from echelon.data.exogenous import read_exogenous

    read_exogenous(ExogenousConfig(path=Path(case.extra["path"])), "America/New_York")


def orders_file(rng: Rng, corpus: Corpus) -> Case:
    """A file of parent orders, worked by the policies of an execution run."""
    table = mutate.mutate_table(rng, corpus.table("orders.csv"))
    words = ["execution", "evaluate", "run", "--split", "valid"]
    return Case(
        [*words, "--orders", "orders.csv"],
        {"orders.csv": mutate.csv_bytes(rng, table)},
        "execution",
        ("run", "store"),
    )


_VENDORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "yahoo": ("yfinance_daily", ("history",)),
    "eastmoney": (
        "",
        ("stock_zh_a_hist", "stock_zh_a_daily", "stock_zh_index_daily_em", "stock_info_sh_delist"),
    ),
    "pro": ("", ("daily", "adj_factor", "namechange", "index_daily")),
}


def vendor_frame(rng: Rng, corpus: Corpus) -> Case:
    """A vendor's answer that is not what it was when it was recorded."""
    vendor = rng.choice(tuple(_VENDORS))
    function = rng.choice(_VENDORS[vendor][1])
    return Case((), extra={"vendor": vendor, "function": function, "seed": rng.getrandbits(32)})


def run_vendor(case: Case) -> None:
    """Import from a fake of the vendor's library, one of whose answers is changed."""
    tests = str(ROOT / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    import vendor_fakes as fakes  # type: ignore[import-not-found]

    from echelon.data.importing import import_source
    from echelon.data.store import Store

    rng = random.Random(case.extra["seed"])
    function = case.extra["function"]
    if case.extra["vendor"] == "yahoo":
        source: Any = fakes.yahoo(fakes.Yahoo(_change_frame(rng, fakes.recorded("yfinance_daily"))))
    elif case.extra["vendor"] == "eastmoney":
        client = fakes.akshare_client()
        client.answers[function] = [_change_frame(rng, client.answers[function][0])]
        source = fakes.eastmoney(client)
    else:
        client = fakes.tushare_client()
        client.answers[function] = [_change_frame(rng, client.answers[function][0])]
        source = fakes.pro(client)
    import_source(source, Store(Path("store")), "d", quarantine=rng.random() < 0.5)


def _change_frame(rng: Rng, frame: Any) -> Any:
    """A pandas frame with a column or cells that are not what they were."""
    import pandas as pd

    frame = frame.copy()
    name = rng.choice(list(frame.columns))
    kind = rng.randrange(9)
    if kind == 0:
        return frame.drop(columns=name)
    if kind == 1:
        return rng.choice(
            (None, pd.DataFrame(), frame.head(0), frame.to_dict(), "error", {"code": -1}, [])
        )
    if kind == 2:
        new = mutate.word(rng)
        frame.columns = pd.Index([new if n == name else n for n in frame.columns], dtype=object)
        return frame
    if kind == 3:
        frame[name] = None
    elif kind == 4:
        cells = list(frame[name])
        cells[rng.randrange(len(cells))] = mutate.odd(rng)
        frame[name] = pd.Series(cells, index=frame.index, dtype=object)
    elif kind == 5:
        frame[name] = [mutate.number(rng) for _ in range(len(frame))]
    elif kind == 6:
        words = [mutate.word(rng) for _ in range(len(frame))]
        frame[name] = pd.Series(words, index=frame.index, dtype=object)
    elif kind == 7:
        frame = pd.concat([frame, frame.head(3)])
    else:
        frame = frame.reset_index(drop=True)
    return frame


# --- what Echelon wrote: runs, stores, prepared sets, caches


def _damage(
    rng: Rng, corpus: Corpus, world: str, part: str, *endings: str
) -> dict[str, bytes | None]:
    """One or two files of a world, damaged or removed; at times their digests made to fit."""
    names = [name for name in corpus.names(world, part) if not endings or name.endswith(endings)]
    files: dict[str, bytes | None] = {}
    for name in rng.sample(names, min(len(names), rng.choice((1, 1, 1, 2)))):
        if rng.random() < 0.05:
            files[name] = None
            continue
        before = corpus.data(world, name)
        after = mutate.mutate_file(rng, name, before)
        files[name] = after
        if rng.random() < 0.5:
            _sign(corpus, world, part, files, before, after)
    return files


def _sign(
    corpus: Corpus,
    world: str,
    part: str,
    files: dict[str, bytes | None],
    before: bytes,
    after: bytes,
) -> None:
    """Put the new digest where the old one stood: an author would, an accident does not."""
    old, new = (hashlib.sha256(data).hexdigest().encode() for data in (before, after))
    for name in corpus.names(world, part):
        data = files.get(name, corpus.data(world, name)) if name.endswith(".json") else None
        if data is not None and old in data:
            files[name] = data.replace(old, new)


def store_file(rng: Rng, corpus: Corpus) -> Case:
    """Manifest, partitions and tables of a store."""
    world = rng.choice(("flat", "execution"))
    dataset = corpus.names(world, "store")[0].split("/")[1]
    words = rng.choice(
        (
            ["data", "show", dataset, "--symbols", "--store", "store"],
            ["data", "show", "--store", "store"],
            ["data", "check", "--dataset", dataset, "--store", "store"],
            ["data", "universe", "u.csv", "--dataset", dataset, "--store", "store"],
        )
    )
    files = _damage(rng, corpus, world, "store") | {"u.csv": corpus.data("files", "universe.csv")}
    return Case(words, files, world, ("store",))


def prepare_from(rng: Rng, corpus: Corpus) -> Case:
    """`prepare` on a damaged store or with a damaged cache."""
    part = rng.choice(("store", "cache"))
    words = ["prepare", *options(SMALL["flat"]), "--output-dir", "out"]
    files = _damage(rng, corpus, "flat", part)
    parts = ("store", "cache") if part == "cache" else ("store",)
    return Case(words, {**files, "bars.csv": corpus.data("flat", "bars.csv")}, "flat", parts)


def prepared_set(rng: Rng, corpus: Corpus) -> Case:
    """A prepared set, opened and made a world of."""
    return Case(
        (),
        _damage(rng, corpus, "flat", "run/prepared"),
        "flat",
        ("run/prepared", "run/config.yaml"),
    )


def run_prepared(case: Case) -> None:
    """Open a prepared set as `evaluate` does."""
    from echelon.config import load_config
    from echelon.envs.world import world_of
    from echelon.features import Prepared

    config = load_config(Path("run/config.yaml"))
    world_of(Prepared.open(Path("run")), config)


def local_cache(rng: Rng, corpus: Corpus) -> Case:
    """An entry of the local cache."""
    return Case((), _damage(rng, corpus, "flat", "cache"), "flat", ("cache",))


def run_local_cache(case: Case) -> None:
    """Look the entry up; it is there, or it costs a warning."""
    from echelon.features.cache import LocalCache

    Path("into").mkdir()
    key = next(Path("cache").iterdir()).name
    LocalCache(Path("cache"), 10**9).get(key, Path("into"))


class FakeRedis:
    """What `RedisCache` uses of a client, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        """The value as a server would send it."""
        return self.values.get(key)

    def set(self, key: str, value: bytes | str, **_: object) -> None:
        """Keep a value."""
        self.values[key] = value.encode() if isinstance(value, str) else value

    def strlen(self, key: str) -> int:
        """Length of a value; 0 where there is none."""
        return len(self.values.get(key, b""))

    def getrange(self, key: str, start: int, end: int) -> bytes:
        """Bytes of a value, the last one included."""
        return self.values.get(key, b"")[start : end + 1]


def redis_entry(rng: Rng, corpus: Corpus) -> Case:
    """An entry of a Redis that somebody else can write to."""
    return Case((), world="flat", parts=("cache",), extra={"seed": rng.getrandbits(32)})


def run_redis(case: Case) -> None:
    """Put an entry, damage what the server holds, get it: it is whole, or it costs a warning."""
    from echelon.features.cache import RedisCache

    rng = random.Random(case.extra["seed"])
    client = FakeRedis()
    cache = RedisCache(client)  # type: ignore[arg-type]
    entry = next(Path("cache").iterdir())
    (entry / "entry.json").unlink()
    cache.put(entry.name, entry)
    described = next(key for key in client.values if key.endswith(entry.name))
    for _ in range(rng.choice((1, 1, 2))):
        key = described if rng.random() < 0.7 else rng.choice(sorted(client.values))
        text = client.values[key]
        if key == described and rng.random() < 0.5:
            names = sorted(file.name.encode() for file in entry.iterdir())
            text = text.replace(
                rng.choice(names), mutate.as_bytes(mutate.word(rng)).replace(b'"', b"")
            )
        elif key == described:
            text = mutate.mutate_json(rng, text)
        elif rng.random() < 0.2:
            del client.values[key]
            continue
        else:
            text = mutate.mutate_bytes(rng, text)
        client.values[key] = text
    Path("into").mkdir()
    cache.get(entry.name, Path("into"))


def run_listing(rng: Rng, corpus: Corpus) -> Case:
    """Runs, listed or compared."""
    world = rng.choice(("flat", "flat", "hierarchy"))
    words = rng.choice(
        (
            ["runs", "list", "."],
            ["runs", "compare", "run", "--split", "test"],
            ["runs", "compare", "run", "run"],
        )
    )
    names = ("run.json", "summary.json", "trust.json", "config.yaml", "result.json")
    files = _damage(rng, corpus, world, "run", *names)
    return Case(
        words, files, world, ("run/run.json", "run/evaluations", "run/config.yaml", "run/seeds")
    )


def _run_case(rng: Rng, corpus: Corpus, world: str, words: list[str], *endings: str) -> Case:
    """A command on a damaged run, with the store and cache it was made from."""
    part = "run" if rng.random() < 0.9 or world == "execution" else "registry"
    files = _damage(rng, corpus, world, part, *(endings if part == "run" else ()))
    if rng.random() < 0.03:
        files["run/seeds/42 copy/result.json"] = b"{}"
    parts = ("run", "store", *(("registry", "bars.csv") if world != "execution" else ()))
    return Case(words, {**files, **_EVIL, "run/evil.py": _EVIL["evil.py"]}, world, parts)


def evaluate_run(rng: Rng, corpus: Corpus) -> Case:
    """`evaluate` on a damaged run."""
    world = rng.choice(("flat", "flat", "flat", "expert", "hierarchy"))
    words = ["evaluate", "run", "--split", rng.choice(("valid", "valid", "test"))]
    wanted = (
        "config.yaml",
        "run.json",
        ".npy",
        "prepared/manifest.json",
        "splits.json",
        "scaler.json",
    )
    best = (
        "best/state.json",
        "best/tensors.safetensors",
        "result.json",
        "encoder.json",
        "weights.safetensors",
        "population.json",
    )
    return _run_case(rng, corpus, world, words, *wanted, *best)


def report_run(rng: Rng, corpus: Corpus) -> Case:
    """`report` on a damaged run."""
    world = rng.choice(("flat", "flat", "expert", "hierarchy"))
    wanted = (
        "summary.json",
        "trust.json",
        ".parquet",
        ".jsonl",
        "run.json",
        "config.yaml",
        "result.json",
        "population.json",
        "splits.json",
    )
    return _run_case(rng, corpus, world, ["report", "run"], *wanted)


def resume_run(rng: Rng, corpus: Corpus) -> Case:
    """`train --resume` on a damaged run that is not finished."""
    world = rng.choice(("flat", "flat", "flat", "expert", "hierarchy"))
    wanted = (
        "config.yaml",
        "state.json",
        "tensors.safetensors",
        "metrics.jsonl",
        "metrics.parquet",
        "manifest.json",
        ".npy",
        "encoder.json",
        "weights.safetensors",
        "population.json",
        "result.json",
    )
    case = _run_case(rng, corpus, world, ["train", "--resume", "run", "--workers", "1"], *wanted)
    unfinished: dict[str, bytes | None] = {}
    if rng.random() < 0.6:
        last = max(
            n for n in corpus.names(world, "run/seeds/42/checkpoints") if "/step-" in n
        ).rpartition("/")[0]
        unfinished = {"run/seeds/42/result.json": None}
        unfinished |= {f"{last}/{name}": None for name in ("state.json", "tensors.safetensors")}
    return Case(case.argv, {**unfinished, **case.files}, world, case.parts)


def execution_run(rng: Rng, corpus: Corpus) -> Case:
    """`execution evaluate`, `compare` and `train --resume` on a damaged run."""
    words = rng.choice(
        (
            ["execution", "evaluate", "run", "--split", "valid"],
            ["execution", "compare", "run", "run", "--output-dir", "both"],
            ["execution", "train", "--resume", "run", "--workers", "1"],
        )
    )
    return _run_case(rng, corpus, "execution", words)


# --- what decides: bundles, an engine's state, requests of its service


def bundle_files(rng: Rng, corpus: Corpus) -> Case:
    """A bundle with damaged files; at times its manifest says that they are right."""
    world = rng.choice(SERVED)
    words = rng.choice((["bundle", "verify", "bundle"], ["bundle", "show", "bundle"]))
    files = _damage(rng, corpus, world, "bundle")
    if rng.random() < 0.1:
        files[f"bundle/{rng.choice(('evil.py', 'more.onnx', '.hidden', 'a b'))}"] = _EVIL["evil.py"]
    return Case(words, files, world, ("bundle",), {"signed": rng.random() < 0.6})


def bundle_replay(rng: Rng, corpus: Corpus) -> Case:
    """A damaged bundle, replayed on its run and store, of which one may be damaged as well."""
    case = bundle_files(rng, corpus)
    words = ["bundle", "replay", "bundle", "--run", "run", "--bars", "3"]
    more = _damage(rng, corpus, case.world, rng.choice(("bundle", "store", "run/prepared")))
    parts = ("bundle", "run", "store")
    return Case(words, {**case.files, **more}, case.world, parts, case.extra)


def run_bundle(case: Case) -> None:
    """Sign the bundle as an author could, whatever it holds now, and look at it."""
    manifest = Path("bundle/manifest.json")
    if case.extra["signed"] and manifest.exists():
        from echelon.files import json_line
        from echelon.serving.bundle import write_manifest

        try:
            facts = json.loads(manifest.read_bytes())
            json_line(facts, allow_nan=True, ensure_ascii=False).encode()
        except (ValueError, RecursionError):  # nothing that could be signed
            facts = None
        if isinstance(facts, dict):
            facts.pop("sha256", None)
            manifest.unlink()
            write_manifest(Path("bundle"), facts)
    run_command(case)


_SERVICE = ("bundle", "bodies.json")


def engine_state(rng: Rng, corpus: Corpus) -> Case:
    """The state of an engine: its bytes damaged, or its content with a hash that fits."""
    world = rng.choice(SERVED)
    case = Case((), {}, world, (*_SERVICE, "engine.state"), {"seed": rng.getrandbits(32)})
    if rng.random() < 0.4:
        data = mutate.mutate_safetensors(rng, corpus.data(world, "engine.state"))
        return Case((), {"engine.state": data}, world, _SERVICE, {"seed": None})
    return case


def run_state(case: Case) -> None:
    """Restore an engine from the file and push two bars, as a service that starts again does."""
    from echelon.serving.engine import DecisionEngine
    from echelon.serving.state_file import read_state, write_state

    path = Path("engine.state")
    if case.extra["seed"] is not None:
        rng = random.Random(case.extra["seed"])
        arrays, facts = read_state(path, "")
        _change_state(rng, arrays)
        if rng.random() < 0.4:
            facts = _storable(mutate.mutate_tree(rng, facts), facts)
        write_state(path, arrays, facts)
    engine = DecisionEngine.restore(_served_bundle(case.world), path)
    for body in json.loads(Path("bodies.json").read_bytes())[1:3]:
        engine.answer(engine.read_bars(body["time"], body["bars"]))
        engine.complete()
        json.dumps(engine.summary(), allow_nan=False)


def _change_state(rng: Rng, arrays: dict[str, Any]) -> None:
    """Some arrays of a state changed, or gone."""
    for name in rng.sample(sorted(arrays), rng.choice((0, 1, 1, 2))):
        if rng.random() < 0.1:
            del arrays[name]
            continue
        array = mutate.mutate_array(rng, arrays[name])
        if array.dtype.str[1:] in _STORABLE:
            arrays[name] = array


_STORABLE = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u8", "b1"})


def _storable(tree: Any, otherwise: Any) -> Any:
    """A mapping that a state file can hold, or what was there before."""
    try:
        json.dumps(tree).encode()
    except (ValueError, TypeError, RecursionError):
        return otherwise
    return tree if isinstance(tree, dict) else otherwise


@functools.cache
def _served_bundle(world: str) -> Any:
    """The bundle of a world, which no case damages, loaded once a worker."""
    from echelon.serving.bundle import load_bundle

    return load_bundle(Path("bundle"))


@functools.cache
def _expected(world: str) -> tuple[int, Any]:
    """Status and answer to the good request that every case of `service_request` ends with."""
    return _ask(_client(world), _bodies()[1])


def service_request(rng: Rng, corpus: Corpus) -> Case:
    """A request of the decision service that it did not expect."""
    world = rng.choice(SERVED)
    body = json.loads(corpus.data(world, "bodies.json"))[1]
    if rng.random() < 0.4:
        account = {"cash": 1000.0, "positions": {"AAA": 10.0}, "locked": {"AAA": 5.0}}
        body |= rng.choice(({"account": account}, {"benchmark": 100.0}, {"account": None}))
    data = mutate.mutate_json(rng, json.dumps(body).encode())
    headers = {"authorization": f"Bearer {_TOKEN}", "content-type": "application/json"}
    if rng.random() < 0.1:
        name = rng.choice((*headers, "content-length", "transfer-encoding", "host", "accept"))
        headers[name] = str(rng.choice((mutate.word(rng), mutate.number(rng), "chunked")))[:1000]
    place = "/v1/bars" if rng.random() < 0.95 else rng.choice(_PLACES)
    extra = {"headers": headers, "method": rng.choice(("POST",) * 9 + ("PUT",)), "place": place}
    return Case((), {"request": data}, world, (*_SERVICE, "engine.state"), extra)


_TOKEN = "a-token-of-some-length"
_PLACES = ("/v1/decision", "/v1/state", "/healthz", "/openapi.json", "/v1/../v1/bars", "/%00")


def run_service(case: Case) -> None:
    """Send the request; whatever is refused, the good one after it gets its usual answer."""
    expected = _expected(case.world)
    client = _client(case.world)
    status, answer = _ask(client, Path("request").read_bytes(), case.extra)
    if status >= 500:
        raise RuntimeError(f"status {status}: {str(answer)[:300]}")
    if status < 400:
        return
    if not isinstance(answer, dict) or not str(answer.get("error", "")):
        raise RuntimeError(f"refused without a reason: {str(answer)[:300]}")
    if (after := _ask(client, _bodies()[1])) != expected:
        raise RuntimeError(f"refused, and then another answer: {str(after)[:300]}")
    raise CommandEnd(Outcome("error", f"HTTP {status}", text=str(answer["error"])))


def _bodies() -> list[bytes]:
    bodies = json.loads(Path("bodies.json").read_bytes())
    return [json.dumps(body).encode() for body in bodies]


def _client(world: str) -> Any:
    """A service that starts again from its state."""
    from fastapi.testclient import TestClient

    from echelon.serving.engine import DecisionEngine
    from echelon.serving.service import create_app

    engine = DecisionEngine.restore(_served_bundle(world), Path("engine.state"))
    return TestClient(create_app(engine, _TOKEN))


def _ask(client: Any, body: bytes, more: Mapping[str, Any] | None = None) -> tuple[int, Any]:
    """(status, JSON of the answer, or its text)."""
    given = more or {
        "headers": {"authorization": f"Bearer {_TOKEN}", "content-type": "application/json"},
        "method": "POST",
        "place": "/v1/bars",
    }
    headers = {k: v.encode("utf-8", "surrogatepass") for k, v in given["headers"].items()}
    answer = client.request(given["method"], given["place"], content=body, headers=headers)
    try:
        return answer.status_code, answer.json()
    except ValueError:
        return answer.status_code, answer.text


# --- live trading: messages of a feed, a journal, settings


def feed_file(rng: Rng, corpus: Corpus) -> Case:
    """Messages of a feed, as somebody else may write them."""
    world = rng.choice(SERVED)
    data = mutate.mutate_messages(rng, corpus.data(world, "feed.jsonl"))
    extra = {"seed": rng.getrandbits(32), "live": rng.random() < 0.5}
    return Case((), {"feed.jsonl": data}, world, (*_SERVICE, "engine.state"), extra)


def run_feed(case: Case) -> None:
    """Read them, pass them through the gate, decide: whatever passes, the engine takes."""
    from echelon.config.live import GateConfig
    from echelon.data.stream import BarSet
    from echelon.errors import DataError
    from echelon.files import json_line
    from echelon.live.feeds.history import FileFeed
    from echelon.live.gate import Gate
    from echelon.serving.engine import DecisionEngine

    rng = random.Random(case.extra["seed"])
    engine = DecisionEngine.restore(_served_bundle(case.world), Path("engine.state"))
    settings: dict[str, Any] = {
        "gap": rng.choice(("halt", "carry")),
        "missing": rng.choice(("halt", "carry")),
    }
    settings |= {"pending_sets": rng.choice((1, 64)), "stale_bars": rng.choice((0, 1, 20))}
    gate = Gate.from_engine(engine, GateConfig(**settings), live=case.extra["live"])
    feed, now = FileFeed(Path("feed.jsonl"), "once"), 0.0
    feed.start({}, engine.time)
    while not feed.ended:
        gate.take(feed.poll(0.0), now, feed.sources)
        for item in gate.ready(now, ended=feed.ended):
            if isinstance(item, BarSet):
                try:
                    engine.push(item)
                except DataError as error:
                    raise RuntimeError(f"passed, and was then refused: {error}") from error
                engine.complete()
        for refusal in gate.drain():
            if len(json_line(refusal._asdict())) > 2_000:
                raise RuntimeError(f"a refusal without bounds: {str(refusal)[:300]}")
        json_line({"offsets": gate.offsets, "seen": gate.seen, "doubted": gate.doubted})
        now += rng.choice((0.0, 1.0, 100.0))
    feed.close()


_JOURNAL = ("live.db", "live.db.venue")


def journal_file(rng: Rng, corpus: Corpus) -> Case:
    """A journal with damaged bytes, or with other entries in a chain that holds."""
    world = rng.choice(SERVED)
    files: dict[str, bytes | None] = {}
    name = rng.choice((*_JOURNAL, _JOURNAL[0]))
    extra = {"do": rng.choice(tuple(_DO)), "name": name, "seed": rng.getrandbits(32)}
    if rng.random() < 0.35:
        files[name] = mutate.mutate_bytes(rng, corpus.data(world, name))
        extra["seed"] = None
    return Case((), files, world, (*_SERVICE, *_JOURNAL, "store"), extra)


def run_journal(case: Case) -> None:
    """Look at the journal, or go on by it."""
    if case.extra["seed"] is not None:
        _edit_journal(random.Random(case.extra["seed"]), Path(case.extra["name"]))
    _DO[case.extra["do"]](_served_bundle(case.world))


def _edit_journal(rng: Rng, path: Path) -> None:
    """Change an entry or a snapshot, and make the chain of hashes anew."""
    import sqlite3
    from contextlib import closing

    from echelon.live.journal import _digest

    with closing(sqlite3.connect(path)) as db:
        db.executescript("DROP TRIGGER entries_stay; DROP TRIGGER entries_keep;")
        rows = db.execute("SELECT seq, kind, body, data FROM entries ORDER BY seq").fetchall()
        seq, kind, body, data = rng.choice(rows)
        change = rng.random()
        if change < 0.6:
            body = mutate.tree_text(mutate.mutate_tree(rng, json.loads(body)))
        elif change < 0.7:
            kind = rng.choice(("bars", "decision", "order", "status", "fills", "nothing"))
        elif change < 0.8:
            data = mutate.mutate_bytes(rng, data or b"")
        elif change < 0.9:
            db.execute("DELETE FROM entries WHERE seq = ?", (seq,))
        else:
            _edit_snapshot(rng, db)
        db.execute("UPDATE entries SET kind=?, body=?, data=? WHERE seq=?", (kind, body, data, seq))
        before = b""
        for seq, kind, body, data in db.execute("SELECT seq, kind, body, data FROM entries"):
            before = _digest(before, kind, body, data)
            db.execute("UPDATE entries SET hash = ? WHERE seq = ?", (before, seq))
        db.commit()


def _edit_snapshot(rng: Rng, db: Any) -> None:
    from echelon.serving.state_file import decode_state, encode_state

    rows = db.execute("SELECT seq, data FROM snapshots").fetchall()
    if not rows:
        return
    seq, data = rng.choice(rows)
    if rng.random() < 0.3:
        data = mutate.mutate_safetensors(rng, data)
    else:
        arrays, facts = decode_state(data, Path("snapshot"), "")
        _change_state(rng, arrays)
        facts = _storable(mutate.mutate_tree(rng, facts), facts)
        data = encode_state(arrays, facts)
    db.execute("UPDATE snapshots SET data = ? WHERE seq = ?", (data, seq))
    body = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    db.execute("UPDATE entries SET body = ? WHERE seq = ?", (json.dumps(body), seq))


def _verify_journal(bundle: Any) -> None:
    from echelon.live.journal import Journal

    with Journal.read(Path("live.db")) as journal:
        journal.verify()
        journal.last("bars")


def _show_journal(bundle: Any) -> None:
    from echelon.live.journal import Journal
    from echelon.live.tables import export_tables, last_status

    with Journal.read(Path("live.db")) as journal:
        json.dumps(last_status(journal))
        export_tables(journal, Path("tables"))


def _replay_live(bundle: Any) -> None:
    from echelon.live.journal import Journal
    from echelon.live.replay import replay_journal

    with Journal.read(Path("live.db")) as journal:
        replay_journal(bundle, journal)


def _go_on(bundle: Any) -> None:
    with live_engine(bundle) as engine:
        engine.run(bars=1)
        json.dumps(engine.status())


_DO: Mapping[str, Callable[[Any], None]] = {
    "verify": _verify_journal,
    "show": _show_journal,
    "replay": _replay_live,
    "go on": _go_on,
}


def live_settings(rng: Rng, corpus: Corpus) -> Case:
    """The settings of live trading."""
    from echelon.config.live import LiveConfig

    text = mutate.yaml_text(LiveConfig().model_dump(mode="json"))
    return Case((), {"live.yaml": mutate.mutate_yaml(rng, text)})


def run_settings(case: Case) -> None:
    """Read them as the commands do."""
    from echelon.config.live import LiveConfig
    from echelon.config.load import load_section

    load_section(LiveConfig, Path("live.yaml"))


# --- the table


class Target(NamedTuple):
    """weight: share of the cases; seconds: of processor time that a case may take; worlds: which
    the case needs; roams: the user named the places it writes to
    """

    name: str
    weight: float
    make: Callable[[Rng, Corpus], Case]
    run: Callable[[Case], object] = run_command
    seconds: float = 20.0
    worlds: tuple[str, ...] = ("flat",)
    roams: bool = False


_ALL = ("flat", "expert", "hierarchy")
TARGETS = {
    target.name: target
    for target in (
        Target("config", 22, config_file),
        Target("override", 14, override),
        Target("argv", 10, command_line, worlds=("files",), roams=True),
        Target("csv", 8, text_file, worlds=("files",)),
        Target("wide", 0.05, wide_file, worlds=()),
        Target("parquet", 3, parquet_file, worlds=("files",)),
        Target("ticks", 4, ticks_file, worlds=("files",)),
        Target("qlib", 1.5, qlib_directory, worlds=("files",)),
        Target("side", 5, side_file, worlds=("files",)),
        Target("exogenous", 8, exogenous_file, run_exogenous, worlds=("files",)),
        Target("orders", 0.1, orders_file, seconds=60, worlds=("files", "execution")),
        Target("vendor", 1.5, vendor_frame, run_vendor, worlds=()),
        Target("store", 4, store_file, worlds=("files", "flat", "execution")),
        Target("prepare", 0.6, prepare_from, seconds=60),
        Target("prepared", 3, prepared_set, run_prepared),
        Target("cache", 5, local_cache, run_local_cache),
        Target("redis", 6, redis_entry, run_redis),
        Target("runs", 5, run_listing, worlds=("flat", "hierarchy")),
        Target("evaluate", 0.3, evaluate_run, seconds=60, worlds=_ALL),
        Target("report", 0.02, report_run, seconds=90, worlds=_ALL),
        Target("resume", 0.15, resume_run, seconds=90, worlds=_ALL),
        Target("bundle", 2, bundle_files, run_bundle, worlds=SERVED),
        Target("replay", 0.05, bundle_replay, run_bundle, seconds=60, worlds=SERVED),
        Target("state", 2, engine_state, run_state, worlds=SERVED),
        Target("request", 4, service_request, run_service, worlds=SERVED),
        Target("feed", 3, feed_file, run_feed, worlds=SERVED),
        Target("journal", 1, journal_file, run_journal, seconds=60, worlds=SERVED),
        Target("live", 2, live_settings, run_settings, worlds=()),
        Target("execution", 0.15, execution_run, seconds=60, worlds=("execution",)),
    )
}


def generator(seed: int, index: int) -> Rng:
    """The random generator of a case: of its number and the seed, and of nothing else."""
    return random.Random(f"{seed}/{index}")


@functools.cache
def corpus_in(worlds: Path) -> Corpus:
    """The corpus of a directory of worlds."""
    return Corpus(worlds)


def make_case(target: str, seed: int, index: int, worlds: Path) -> Case:
    """The case of that number."""
    limit = sys.getrecursionlimit()
    # Deep trees are made here, whatever the depth of the caller's own stack; they are then run
    # under the limit that a user has.
    sys.setrecursionlimit(50_000)
    try:
        return TARGETS[target].make(generator(seed, index), corpus_in(worlds))
    finally:
        sys.setrecursionlimit(limit)


def lookup(name: str, seed: int, worlds: Path) -> Runner:
    """How a worker makes and runs a case of a target."""
    target = TARGETS[name]

    def make(job: Job) -> Case:
        return make_case(name, seed, job.number, worlds)

    return make, target.run, target.roams
