"""One table registers the sources: what is left out of it does not half work."""

from __future__ import annotations

import ast
import importlib
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import get_args

import pytest

import echelon
from echelon.config import Config
from echelon.data import datasets, sources
from echelon.data.datasets import dataset_name, grows
from echelon.data.importing import Extras
from echelon.data.sources import open_source
from echelon.data.sources.yfinance_ import YFinanceSource
from echelon.errors import ConfigError
from echelon.sources import IN_STORE, SOURCES, SourceFacts, SourceName

SRC = Path(str(echelon.__file__)).parent
TABLE = SRC / "sources.py"


def test_every_file_of_a_source_is_in_the_table_and_every_line_has_its_file() -> None:
    home = SRC / "data" / "sources"
    files = {p.stem for p in home.glob("*.py") if not p.stem.startswith("_")}
    assert {facts.module for facts in SOURCES.values()} == files
    for module in files:
        made = importlib.import_module(f"echelon.data.sources.{module}")
        assert callable(made.from_config), module
    assert set(get_args(SourceName)) == {*SOURCES, IN_STORE}


def test_options_that_sources_read_exist_and_are_refused_elsewhere() -> None:
    read = set().union(*(facts.reads for facts in SOURCES.values()))
    assert read <= set(type(Config().data).model_fields)
    assert read - {"benchmark"} <= set(sources._OPTIONS)


def test_no_other_place_lists_sources() -> None:
    """A second list would have to be kept in step by hand: a vendor missing there half works."""
    lists = []
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
                continue
            parts = node.keys if isinstance(node, ast.Dict) else node.elts
            named = {p.value for p in parts if isinstance(p, ast.Constant)} & set(SOURCES)
            if len(named) > 1 and named - {"csv", "parquet"} and path != TABLE:  # endings of files
                lists.append(f"{path}:{node.lineno}: {sorted(named)}")
    assert not lists


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new vendor: its file, and its line in the table."""
    module = ModuleType("echelon.data.sources.acme_")

    class AcmeSource(YFinanceSource):
        name = "acme"

    module.from_config = AcmeSource.from_config  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    table = MappingProxyType({**SOURCES, "acme": SourceFacts("acme_", "vendor")})
    for place in (sources, datasets):
        monkeypatch.setattr(place, "SOURCES", table)


def asked(source: str, **data: object) -> Config:
    tree = Config()
    changed = tree.data.model_copy(update={"source": source, "symbols": ("AAPL",), **data})
    return tree.model_copy(update={"data": changed})


@pytest.mark.usefixtures("acme")
def test_vendor_with_a_line_has_one_dataset_over_the_days(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = asked("acme")
    names = set()
    for day in (1, 2):
        now = datetime(2030, 1, day, tzinfo=UTC)
        source = open_source(tree)
        monkeypatch.setattr(source, "_now", lambda now=now: now)
        names.add(dataset_name(tree, source, Extras()))
    assert len(names) == 1
    assert grows(tree)
    with pytest.raises(ConfigError, match="membership_index"):
        open_source(asked("acme", membership_index="000300.SH"))
    with pytest.raises(ConfigError, match="timezone"):
        open_source(asked("acme", timezone="Asia/Tokyo"))


def test_vendor_without_a_line_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="source"):
        Config.model_validate({"data": {"source": "acme", "symbols": ["AAPL"]}})
    with pytest.raises(ConfigError):
        open_source(asked("acme"))


def test_names_of_vendors_datasets_are_what_they_were() -> None:
    tree = asked("yfinance")
    name = dataset_name(tree, open_source(tree), Extras())
    assert name == "yfinance-e6efc0c8c560"
