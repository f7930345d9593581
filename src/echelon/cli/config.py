"""`echelon config`: look at a configuration and check it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.console import out
from echelon.cli.options import ConfigFile, Overrides
from echelon.errors import ConfigError

app = typer.Typer(help="Look at a configuration and check it.", no_args_is_help=True)


@app.command()
def show(config: ConfigFile = None, override: Overrides = None) -> None:
    """Print the resolved configuration: the file, the overrides and every default."""
    from rich.syntax import Syntax

    from echelon.config import fingerprint, load_config, to_yaml

    tree = load_config(config, override or ())
    text = to_yaml(tree)
    if out.is_terminal:
        out.print(Syntax(text, "yaml", background_color="default"))
    else:
        typer.echo(text, nl=False)
    typer.echo(f"# hash: {fingerprint(tree)}")


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(help="YAML files to check.")],
    override: Overrides = None,
) -> None:
    """Check configuration files; says what is wrong and where, exit code 3 if anything is."""
    from echelon.config import fingerprint, load_config
    from echelon.config.sizes import refuse_settings, refuse_sizes

    for path in files:
        tree = load_config(path, override or ())
        try:
            refuse_sizes(tree)
            refuse_settings(tree)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        typer.echo(f"{path}: valid, hash {fingerprint(tree)[:16]}")
