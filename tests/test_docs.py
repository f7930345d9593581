"""What the README and the guide say is what happens: commands, outputs, Python lines, messages."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import typer
import yaml

from echelon import errors
from echelon.cli import app
from echelon.cli.app import main
from echelon.config import Config, SyntheticConfig, load_config
from echelon.config.agents import EvalConfig
from echelon.config.live import LiveConfig
from echelon.config.load import load_section
from echelon.data.calendars import sessions
from echelon.data.sources._columns import BARS, recognise
from echelon.data.sources.synthetic import SyntheticSource
from echelon.errors import FeatureError
from echelon.features import Bars
from echelon.features.registry import load_modules, run
from echelon.market import Reason
from echelon.market.presets import PRESETS
from echelon.market.rows import HAIRCUTS
from echelon.ops.measures import LABELS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GUIDE = DOCS / "guide"
KERNEL = DOCS / "concepts" / "kernel.md"
READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
WRITTEN = sorted(p for p in DOCS.rglob("*.md") if p.parent.name != "reference")
PAGES = (*READMES, *WRITTEN)
BROKEN = """\
Date,Ticker,Open,High,Low,Close,Volume
2020-01-02,AAPL,296.24,300.60,295.19,300.35,33870100
2020-01-03,AAPL,297.15,300.58,296.50,297.43,36580700
2020-01-03,AAPL,297.15,300.58,296.50,297.43,36580700
2020-01-04,AAPL,297.00,299.00,296.00,298.00,1000
2020-01-06,AAPL,293.79,292.00,299.96,299.80,29596800
2020-01-07,AAPL,299.84,300.90,297.48,-298.39,27218000
2020-01-08,AAPL,297.16,304.44,297.16,n/a,33019800
2020-01-09,AAPL,307.24,310.43,306.20,309.63,42527100
"""


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(kind, body) for kind, body in found if kind in languages]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(command, lines it prints) of a console block; a trailing backslash goes on."""
    found: list[tuple[str, list[str]]] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((re.sub(r"\s{2,}# .*|\s+$", "", line[2:]), []))
        elif line.strip():
            found[-1][1].append(line)
    return found


def echelon_commands(page: Path) -> list[str]:
    lines = [line for _, text in blocks(page, "console") for line, _ in commands(text)]
    return [line for line in lines if line.startswith("echelon ")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory like a checkout: the shipped configurations and examples, and nothing else."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "broken.csv").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # agents train here, not in new processes
    return tmp_path


class Shell:
    """Runs documented command lines in-process, as `main` would."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys = capsys
        self.monkeypatch = monkeypatch

    def __call__(self, line: str) -> tuple[int, str]:
        self.monkeypatch.setattr(sys, "argv", shlex.split(line))
        code = 0
        try:
            main()
        except SystemExit as leave:
            code = int(leave.code or 0)
        return code, "".join(self.capsys.readouterr())


@pytest.fixture
def shell(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


def train_little(path: Path) -> None:
    """Make a configuration file's work short, so that documented commands run as written.

    One update and one validation for an agent, and two of the baselines, those that take no time.
    """
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    tree["model"] |= {"d_model": 16, "n_layers": 2}
    tree["train"] |= {"total_env_steps": tree["train"]["books"] * 50}
    tree["eval"] = {"baselines": ["equal_weight", "cash"]}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")


@pytest.fixture
def little(home: Path) -> None:
    """The demo's training made short, and its test window: a year of the five."""
    path = home / "configs" / "demo.yaml"
    train_little(path)
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    tree["split"]["test"][0] = "2022-01-03"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")


def run_python(text: str) -> int:
    """Run a block; an expression with a comment must be what the comment says. Returns how many."""
    names: dict[str, Any] = {}
    lines = text.splitlines()
    checked = 0
    for node in ast.parse(text).body:
        comment = re.search(r"\s# (.+)$", lines[(node.end_lineno or node.lineno) - 1])
        if isinstance(node, ast.Expr) and comment is not None:
            value = eval(compile(ast.Expression(node.value), "doc", "eval"), names)
            assert repr(value) == comment[1], ast.unparse(node)
            checked += 1
        else:
            exec(compile(ast.Module([node], []), "doc", "exec"), names)
    return checked


def first_screen(page: Path, language: str, word: str) -> str:
    """The page's first block of the language that holds the word."""
    return next(text for _, text in blocks(page, language) if word in text)


def test_first_screen_of_the_readme_runs_as_written(shell: Shell, little: None, home: Path) -> None:
    lines = [line for line, _ in commands(first_screen(READMES[0], "console", "echelon train"))]
    assert lines.pop(0) == ". .venv/bin/activate"
    assert len(lines) == 3
    for line in lines:
        code, output = shell(line)
        assert code == 0, output
    assert output.strip().endswith("report: runs/first/report/report.html")
    assert (home / "runs" / "first" / "report" / "report.html").is_file()
    assert run_python(first_screen(READMES[0], "python", "PPO")) == 2


def test_guides_train_evaluate_and_compare_as_written(
    shell: Shell, little: None, home: Path
) -> None:
    ran, output = 0, ""
    for page in ("training.md", "evaluation.md"):
        for kind, text in blocks(GUIDE / page, "console", "text"):
            if kind == "text" and "state.include_cash" in text:
                (home / "variants.yaml").write_text(text, encoding="utf-8")
            for line, _ in commands(text) if kind == "console" else ():
                # tensorboard would not end, and the other lines take data of the user's or long.
                if not line.startswith("echelon ") or re.search(
                    r"us\.parquet|qtmrl-fast|sac\.yaml|echelon prove", line
                ):
                    continue
                made = sorted((home / "runs" / "first").glob("seeds/42/checkpoints/step-*"))
                newest = made[-1].name if made else ""
                code, output = shell(re.sub(r"step-\d+", newest, line))
                assert code == 0, f"{line}\n{output}"
                ran += 1
    assert ran == 12
    assert (home / "runs" / "ablation" / "ablation.png").is_file()
    for page, checked in (("training.md", [3, 2]), ("evaluation.md", [5])):
        assert [run_python(text) for _, text in blocks(GUIDE / page, "python")] == checked


def test_python_of_the_environment_guide_says_what_it_gives(shell: Shell) -> None:
    page = GUIDE / "environments.md"
    code, output = shell(echelon_commands(page)[0])
    assert code == 0, output
    assert [run_python(text) for _, text in blocks(page, "python")] == [5, 1, 3]


def test_documented_message_of_a_diverging_loss_is_the_real_one(shell: Shell, little: None) -> None:
    code, output = shell("echelon train --config configs/demo.yaml --seeds 1 -o reward.scale=1e30")
    assert code == errors.TrainingError.exit_code
    (title,) = re.findall(r"“training diverged at step …: (\S+) = inf”", page_text("guide"))
    assert f"{title} = inf" in output


def page_text(folder: str, name: str = "troubleshooting.md") -> str:
    return (DOCS / folder / name).read_text(encoding="utf-8")


def test_readme_prepares_a_users_csv_file_and_shows_real_messages(shell: Shell, home: Path) -> None:
    market = SyntheticSource(SyntheticConfig(n_symbols=4, n_days=1000), seed=7)
    bars = [raw.frame.drop("row", "factor", "st") for raw in market.frames()]
    bars[0].write_csv(home / "prices.csv")
    wanted = [
        line for line in echelon_commands(READMES[0]) if "prices.csv" in line or "mine" in line
    ]
    assert len(wanted) == 3
    for line in wanted:
        code, output = shell(line)
        assert code == 0, output
    assert "bars × assets × features │ 1000 × 4 × 20, window 20" in output
    _, output = shell("echelon data import csv broken.csv")
    shown = [text for kind, text in blocks(READMES[0], "text") if "broken.csv" in text]
    assert len(shown) == 1
    assert all(line in output for line in shown[0].splitlines())


def test_quickstart_runs_from_its_first_command_to_its_last(shell: Shell, home: Path) -> None:
    skipped = ("git clone", "cd echelon", "make demo", ". .venv/bin/activate")
    ran, output = 0, ""
    for kind, text in blocks(GUIDE / "quickstart.md", "console", "yaml", "text", "python"):
        if kind == "yaml":
            (home / "mine.yaml").write_text(text, encoding="utf-8")
            train_little(home / "mine.yaml")
        elif kind == "python":
            assert run_python(text) == 7
        elif kind == "text" and "│" in text:
            rows = [line for line in text.splitlines() if line.startswith("│")]
            assert len(rows) > 5
            assert not [row for row in rows if row not in output]
        elif kind == "text":
            assert text.strip() in shell("echelon prepare -o windo=3")[1]
        for line, expected in commands(text) if kind == "console" else ():
            if line.startswith(skipped):
                continue
            code, output = shell(line)
            assert code == (4 if "broken.csv" in line else 0), output
            assert not [part for part in expected if part not in output], output
            ran += 1
    assert ran == 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_documented_command_is_one_the_command_line_knows(page: Path) -> None:
    for line in echelon_commands(page):
        if "SOURCE" in line or line == "echelon --help":
            continue
        command: Any = typer.main.get_command(app)
        words = shlex.split(line)[1:]
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert not getattr(command, "commands", None), f"{line}: a group, not a command"
        context = command.make_context(line, words)  # parses, and does not run
        assert context.args == [], f"{line}: words left over"
        file = ROOT / (context.params.get("config") or "none")
        overrides = context.params.get("override") or ()
        settings = file if file.is_file() else None
        if line.startswith("echelon live"):
            assert isinstance(load_section(LiveConfig, settings, overrides), LiveConfig)
        else:
            assert isinstance(load_config(settings, overrides), Config)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_documented_configuration_is_valid(page: Path) -> None:
    for _, text in blocks(page, "yaml"):
        given = yaml.safe_load(text)
        # A whole section that no field took would leave the defaults as they are.
        assert Config.model_validate(given).model_fields_set == set(given)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_every_documented_name_of_ours_exists(page: Path) -> None:
    for name in re.findall(r"`(echelon(?:\.\w+)+)[`(]", page.read_text(encoding="utf-8")):
        path, _, last = name.rpartition(".")
        above = importlib.import_module(path)
        if not hasattr(above, last):  # a module that nobody has imported yet
            assert importlib.import_module(name).__name__ == name


def test_first_page_leads_to_every_page_and_promises_nothing_that_is_there() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = [page for page in WRITTEN if page.parent.name in ("guide", "concepts")]
    missing = [page.name for page in pages if f"({page.relative_to(DOCS)}" not in text]
    assert not missing
    to_come = re.findall(r"Not here yet: ([\w ]+),", text)
    readme = READMES[0].read_text(encoding="utf-8")
    assert re.findall(r"Not here yet: ([\w ]+)\.", readme) == to_come


def table(page: Path, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, its head left out."""
    text = page.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1]
    rows = [line for line in text.split("\n## ", 1)[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_documented_presets_are_the_real_ones() -> None:
    def row(name: str) -> list[str]:
        p = PRESETS[name]  # type: ignore[index]
        size = "" if p.slippage == "none" else f", {p.slippage_bps:g} bp"
        cap = "none" if p.participation is None else f"{p.participation:.0%}".replace("%", " %")
        words = ["yes" if rule else "no" for rule in (p.lots, p.t_plus_one, p.price_limits)]
        duty = "yes" if p.stamp_duty else "no"
        costs = [f"{p.commission_bps:g} bp", f"{p.min_commission:g}", duty, p.slippage + size]
        return [f"`{name}`", *costs, cap, *words, f"{p.min_order_value:g}"]

    assert table(KERNEL, "Presets") == [row(name) for name in PRESETS]


def test_readmes_name_the_presets_that_people_try() -> None:
    for page in READMES:
        text = page.read_text(encoding="utf-8")
        for name in ("cn", "ashare", "us", "crypto"):
            assert f"`{name}`" in text, (page.name, name)


def test_documented_reasons_and_haircuts_are_the_real_ones() -> None:
    listed = re.findall(r"`([A-Z_]+)`", " ".join(row[0] for row in table(KERNEL, "Rejections")))
    assert listed == [reason.name for reason in Reason if reason]
    text = KERNEL.read_text(encoding="utf-8").split("## Splits", 1)[1].split("\n## ", 1)[0]
    assert {name for name, share in HAIRCUTS.items() if f"`{name}`" in text} == set(HAIRCUTS)


def test_documented_measures_and_baselines_are_the_real_ones() -> None:
    rows = table(GUIDE / "evaluation.md", "Measures")
    assert [(row[1].strip("`"), row[0]) for row in rows] == [
        (name, label.text) for name, label in LABELS.items()
    ]
    known = get_args(get_args(EvalConfig.model_fields["baselines"].annotation)[0])
    names = [row[0].strip("`") for row in table(GUIDE / "evaluation.md", "Baselines")]
    assert names == list(known)


def test_python_of_the_kernel_page_says_what_it_gives() -> None:
    ((_, text),) = blocks(KERNEL, "python")
    assert run_python(text) == 3


def test_python_of_the_configuration_guide_says_what_it_gives(home: Path) -> None:
    (block,) = blocks(GUIDE / "configuration.md", "python")
    assert run_python(block[1]) == 3


def test_python_of_the_source_guide_runs(home: Path) -> None:
    rows = [f"600000.SH,20200102,0930{k:02}000,12.3{k % 10},100" for k in range(60)]
    header = "万得代码,自然日,时间,成交价格,成交数量"
    (home / "trades.csv").write_bytes("\n".join([header, *rows, ""]).encode("gbk"))
    book, ticks = blocks(GUIDE / "sources.md", "python")
    assert run_python(book[1]) == 1
    run_python(ticks[1])
    assert (home / "ticks" / "trades.parquet").is_file()


def test_chinese_readme_has_the_same_commands_and_code() -> None:
    english, chinese = READMES
    for language in ("python", "text"):
        assert blocks(english, language) == blocks(chinese, language)
    lines = [[c for _, text in blocks(p, "console") for c in commands(text)] for p in READMES]
    assert lines[0] == lines[1]
    assert exit_codes(english) == exit_codes(chinese)
    links = [set(re.findall(r"\]\(([^)]+)\)", p.read_text(encoding="utf-8"))) for p in READMES]
    assert links[0] - {"README.zh-CN.md"} == links[1] - {"README.md"}


def exit_codes(page: Path) -> list[int]:
    rows = re.findall(r"^\| (\d+) \| [^|]+ \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [int(code) for code in rows]


def test_readme_lists_every_exit_code_of_the_error_tree() -> None:
    def tree(error: type[errors.EchelonError]) -> Iterator[int]:
        yield error.exit_code
        for child in error.__subclasses__():
            yield from tree(child)

    assert {0, 130, *tree(errors.EchelonError)} <= set(exit_codes(READMES[0]))


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)
def test_readme_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert len(links) > 15
    assert not [link for link in links if not (ROOT / link).exists()]


def test_picture_is_a_small_png() -> None:
    data = (ROOT / "docs" / "img" / "demo.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert len(data) < 200_000


def test_documented_column_names_are_recognised_as_documented() -> None:
    table = (GUIDE / "sources.md").read_text(encoding="utf-8").split("### Columns", 1)[1]
    rows = re.findall(r"^\| `(\w+)` \| (`.+`) \|$", table.split("\n### ", 1)[0], re.MULTILINE)
    assert [ours for ours, _ in rows] == [name for name in BARS if name != "clock"]
    for ours, listed in rows:
        field = "time" if ours in ("time", "date") else ours
        rest = {"time": ["close"], "close": ["date"]}.get(field, ["date", "close"])
        for name in [ours, *re.findall(r"`([^`]+)`", listed)]:
            assert recognise([name, *rest], file="x").by_field[field].name == name


def test_documented_units_scale() -> None:
    text = (GUIDE / "sources.md").read_text(encoding="utf-8")
    found = re.findall(r"`([^`]+\([^`]+\))` × ([\d,]+)", text)
    assert len(found) == 3
    for name, scale in found:
        columns = recognise(["date", "close", name], file="x").by_field
        assert [c.scale for c in columns.values() if c.name == name] == [
            float(scale.replace(",", ""))
        ]


HEAD = "import numpy as np\nfrom echelon.features import Bars, factor\n"
MISTAKES = {
    "nan": "@factor(lookback=10)\ndef momentum_20(bars: Bars):\n"
    "    out = np.full(len(bars), np.nan)\n"
    "    out[20:] = bars.close[20:] / bars.close[:-20] - 1\n    return out\n",
    "shape": "@factor(lookback=2)\ndef ret(bars: Bars):\n    return np.diff(np.log(bars.close))\n",
    "undeclared": '@factor(lookback=1, needs=("close",))\ndef bar_range(bars: Bars):\n'
    "    return bars.high / bars.low - 1\n",
    "field": '@factor(lookback=1, needs=("turnover",))\ndef gap(bars: Bars):\n'
    "    return bars.close\n",
    "zero": "@factor(lookback=0)\ndef same(bars: Bars):\n    return bars.close\n",
    "dup": "@factor(lookback=21)\ndef ret_20(bars: Bars):\n    return bars.close\n",
    "none": "def ret(bars: Bars):\n    return bars.close\n",
}


def bars(n: int = 500, **fields: np.ndarray) -> Bars:
    """Bars whose price grows by 0.1 % each, with opens a little above."""
    times = sessions("XNYS", date(2015, 1, 5), date(2016, 12, 30))[:n]
    close = np.exp(0.001 * np.arange(n))
    given = {"open": close * 1.01, "value": np.full(n, 1e6), **fields}
    return Bars(times=times, close=close, raw_close=close, **given)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_documented_message_of_a_wrong_factor_is_the_real_one(mistake: str, home: Path) -> None:
    (home / f"{mistake}.py").write_text(HEAD + MISTAKES[mistake])

    def use() -> None:
        (feature,) = load_modules([f"{mistake}.py"], taken=["ret_20"])
        run(feature, bars(), "S0000")

    with pytest.raises(FeatureError) as caught:
        use()
    assert str(caught.value) in (GUIDE / "factors.md").read_text(encoding="utf-8")


def test_example_factors_compute_what_they_say() -> None:
    momentum, session, illiquidity = load_modules([ROOT / "examples" / "factors.py"])
    grown = run(momentum, bars(), "S")
    assert np.isnan(grown[:252]).all()
    np.testing.assert_allclose(grown[252:], 0.001 * 231)
    parts = run(session, bars(), "S")
    np.testing.assert_allclose(parts[1:, 0], 0.001 + np.log(1.01))
    np.testing.assert_allclose(parts[1:, 1], -np.log(1.01))
    ratio = run(illiquidity, bars(), "S")
    np.testing.assert_allclose(ratio[20:], np.log((0.001 + 1e-6) / (1e6 + 1)))
    still = run(illiquidity, bars(value=np.zeros(500)), "S")
    assert np.isfinite(still[20:]).all()


@pytest.mark.parametrize("n", [1, 20, 21, 252, 253])
def test_example_factors_bear_short_histories(n: int) -> None:
    for feature in load_modules([ROOT / "examples" / "factors.py"]):
        values = run(feature, bars(n), "S")
        assert np.isfinite(values[feature.lookback - 1 :]).all()
        assert len(values) == n


def test_example_factors_do_not_leak(shell: Shell, home: Path) -> None:
    (home / "mine.yaml").write_text(
        "data: {source: synthetic, synthetic: {n_symbols: 6, n_days: 500}}\n"
        "split:\n"
        "  train: [2015-01-05, 2016-06-30]\n"
        "  valid: [2016-07-01, 2016-09-30]\n"
        "  test: [2016-10-03, 2016-12-27]\n"
    )
    (line,) = [c for c in echelon_commands(GUIDE / "factors.md") if "--leakage" in c]
    code, output = shell(line)
    assert code == 0, output
    assert "no leak: 4 features" in output
