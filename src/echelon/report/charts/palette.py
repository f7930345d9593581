"""The colours of a report, by role: one accent for the agent, muted ones for what it is held to.

Gains are blue and losses orange: red and green mean opposite things in China and in the West, and
one reader in twelve cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.config.agents import EvalConfig

BASELINES: tuple[str, ...] = EvalConfig().baselines
"""Baselines with colours of their own; any other one is grey."""
ASSET_COLOURS = 16

_ASSETS = (
    *("#3b6ea8", "#7fb0d6", "#5d9c8f", "#a9cdbd", "#c79a4b", "#ead09a", "#8d6f9f", "#c3aecf"),
    *("#b3665f", "#dfa9a1", "#5c7f5a", "#a7bf8f", "#6f7c8c", "#aab4c0", "#937860", "#cdb9a4"),
)

LIGHT: Mapping[str, str] = {
    "page": "#f5f6f8",
    "card": "#ffffff",
    "ink": "#172033",
    "soft": "#5b6577",
    "faint": "#8d96a5",
    "line": "#e3e6eb",
    "accent": "#1f4fd1",
    "accent_soft": "rgba(31,79,209,0.36)",
    "accent_area": "rgba(31,79,209,0.10)",
    "gain": "#2f6fd0",
    "loss": "#d9772b",
    "buy": "#2f6fd0",
    "sell": "#d9772b",
    "hold": "#dde1e7",
    "commission": "#6f8fe3",
    "stamp": "#1c3f9e",
    "slippage": "#e0b866",
    "free_cash": "#e9ebef",
    "rest": "#c9ced6",
    "benchmark": "#3c4557",
    "buy_and_hold": "#b08a4e",
    "equal_weight": "#4f8f7b",
    "min_variance": "#8b7cb3",
    "hrp": "#b86f86",
    "momentum": "#5b97ad",
    "random": "#a3a9b3",
    "cash": "#c3c8d0",
} | {f"asset{k}": colour for k, colour in enumerate(_ASSETS)}
DARK: Mapping[str, str] = dict(LIGHT) | {
    "page": "#10141c",
    "card": "#181e29",
    "ink": "#e8ecf3",
    "soft": "#a5aebd",
    "faint": "#77808f",
    "line": "#2b3342",
    "accent": "#7aa2ff",
    "accent_soft": "rgba(122,162,255,0.45)",
    "accent_area": "rgba(122,162,255,0.14)",
    "gain": "#5b95f0",
    "loss": "#e08a45",
    "buy": "#5b95f0",
    "sell": "#e08a45",
    "hold": "#333c4b",
    "commission": "#6286d8",
    "stamp": "#a9c2ff",
    "free_cash": "#2a3240",
    "rest": "#4a5362",
    "benchmark": "#d3d9e3",
    "random": "#7d8695",
    "cash": "#5d6675",
}


def colour_of(key: str) -> str:
    """Role of the colour of a baseline."""
    return key if key in BASELINES else "random"


def css_variables() -> str:
    """Both palettes as CSS variables, by the reader's screen; paper is always light."""

    def block(palette: Mapping[str, str]) -> str:
        names = ("page", "card", "ink", "soft", "faint", "line", "accent", "gain", "loss")
        return "".join(f"--{name}:{palette[name]};" for name in names)

    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {block(DARK)} }} }}"
    paper = f"@media print {{ :root {{ {block(LIGHT)} }} }}"
    return f":root {{ {block(LIGHT)} }}\n{dark}\n{paper}"
