"""The generated reference pages say what the code says, and nothing is left undocumented."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import BaseModel, ConfigDict, Field

from echelon import errors
from echelon.config import Config
from scripts import gen_reference


@pytest.mark.parametrize("page", gen_reference.pages(), ids=lambda path: path.stem)
def test_reference_page_is_what_the_code_says(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == gen_reference.pages()[page], (
        f"{page.name} is stale: run `make reference`"
    )


def test_every_command_and_option_is_documented() -> None:
    command = typer.main.get_command(gen_reference.app)
    undocumented = []
    for context in gen_reference.walk(typer.Context(command, info_name="echelon")):
        if not context.command.help:
            undocumented.append(context.command_path)
        undocumented += [
            f"{context.command_path} {'/'.join(parameter.opts)}"
            for parameter in context.command.get_params(context)
            if not getattr(parameter, "help", None)
        ]
    assert not undocumented


def test_every_configuration_field_is_documented() -> None:
    undocumented = [
        f"{path}.{name}"
        for path, section, _ in gen_reference.sections(Config)
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert not undocumented


def test_exit_codes_are_distinct_between_branches_and_never_pythons_own() -> None:
    branches = errors.EchelonError.__subclasses__()
    codes = [branch.exit_code for branch in branches if branch.__module__ == errors.__name__]
    assert len(set(codes)) == len(codes)
    assert not {0, 1, 70} & set(codes)
    # A training that Ctrl-C stopped leaves as any other interrupted command does.
    assert [branch for branch in branches if branch.exit_code == 130] == [errors.Stopped]


def test_error_page_lists_every_exit_code_once() -> None:
    table = gen_reference.errors_page().split("## Exceptions")[0]
    codes = [line.split(" | ")[0] for line in table.splitlines() if line[2:3].isdigit()]
    assert codes == [f"| {code}" for code in (0, 1, 2, 3, 4, 5, 6, 7, 8, 70, 130, 143)]


def test_shipped_page_shows_what_files_change_and_nothing_else() -> None:
    changed = Config.model_validate({"window": 30, "train": {"books": 64}, "assets": list("ABCDE")})
    page = gen_reference.shipped_page({"a.yaml": Config(), "b.yaml": changed})
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert rows == [
        "| key | default | `a.yaml` | `b.yaml` |",
        "|---|---|---|---|",
        "| `assets` | `[]` |  | 5 of them |",
        "| `window` | `20` |  | `30` |",
        "| `train.books` | `1` |  | `64` |",
    ]


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    """An inner section."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    size: int
    """How large; a | b."""


class Outer(BaseModel):
    """The outer section."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    inner: Inner = Inner(size=7)
    """Nested."""
    several: tuple[Inner, ...] = ()
    """A list of sections."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A share."""
    mode: Literal["a", "b"] | None = None
    """A mode."""
    pair: tuple[int, float] = (1, 2.0)
    """A pair."""
    names: dict[str, str] = Field(default_factory=dict)
    """Names."""
    colour: Colour = Colour.RED
    """A colour."""


def test_config_page_shows_types_bounds_and_inherited_defaults() -> None:
    page = gen_reference.config_page(Outer)
    assert "| `inner` | [section](#inner) |  | Nested. |" in page
    assert "| `inner.size` | integer | `7` | How large; a \\| b. |" in page
    assert "| `several[].size` | integer | required |" in page
    assert "| `share` | number > 0, ≤ 1 | `0.5` | A share. |" in page
    assert "| `mode` | `a`, `b` or null | `null` | A mode. |" in page
    assert "| `pair` | [integer, number] | `[1, 2.0]` | A pair. |" in page
    assert "| `names` | mapping of text | `{}` | Names. |" in page
    assert "| `colour` | `red`, `blue` | `red` | A colour. |" in page


def test_cli_page_shows_usage_help_options_and_hides_the_hidden() -> None:
    app = typer.Typer(help="Trade.")
    data = typer.Typer(help="Data.")
    app.add_typer(data, name="data")

    @data.command("import")
    def import_(
        path: Annotated[Path, typer.Argument(help="What to read.")],
        rows: Annotated[int, typer.Option(help="How many | at most.", min=1)] = 3,
        colour: Annotated[Colour | None, typer.Option(help="In `<hue>`, not <b>.")] = None,
    ) -> None:
        """Read bars.

        In pieces.
        """

    @data.command(hidden=True)
    def secret() -> None:
        """Never shown."""

    page = gen_reference.cli_page(app)
    assert "### `echelon data`" in page
    assert "- [`import`](#echelon-data-import): Read bars." in page
    assert "```\nechelon data import [OPTIONS]" in page
    assert "Read bars.\n\nIn pieces." in page
    assert "How many \\| at most. [default: 3; x>=1]" in page
    assert "What to read. [required]" in page
    assert "| `--colour <red/blue>` | In `<hue>`, not &lt;b>. |" in page
    assert "secret" not in page


def test_check_names_the_stale_page_and_writing_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = tmp_path / "docs" / "reference"
    monkeypatch.setattr(gen_reference, "PAGES", pages)
    assert gen_reference.main([]) == 0
    assert gen_reference.main(["--check"]) == 0
    (pages / "errors.md").write_text("old\n")
    capsys.readouterr()
    assert gen_reference.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "errors.md is stale: run `make reference`" in out
    assert "-old" in out
    assert gen_reference.main([]) == 0
    assert gen_reference.main(["--check"]) == 0
