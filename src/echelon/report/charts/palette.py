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

_ROLES = {
    "page": ("#f5f6f8", "#10141c"),
    "card": ("#ffffff", "#181e29"),
    "ink": ("#172033", "#e8ecf3"),
    "soft": ("#5b6577", "#a5aebd"),
    "faint": ("#8d96a5", "#77808f"),
    "line": ("#e3e6eb", "#2b3342"),
    "accent": ("#1f4fd1", "#7aa2ff"),
    "accent_soft": ("rgba(31,79,209,0.36)", "rgba(122,162,255,0.45)"),
    "accent_area": ("rgba(31,79,209,0.10)", "rgba(122,162,255,0.14)"),
    "gain": ("#2f6fd0", "#5b95f0"),
    "loss": ("#d9772b", "#e08a45"),
    "buy": ("#2f6fd0", "#5b95f0"),
    "sell": ("#d9772b", "#e08a45"),
    "hold": ("#dde1e7", "#333c4b"),
    "commission": ("#6f8fe3", "#6286d8"),
    "stamp": ("#1c3f9e", "#a9c2ff"),
    "slippage": ("#e0b866", "#e0b866"),
    "free_cash": ("#e9ebef", "#2a3240"),
    "rest": ("#c9ced6", "#4a5362"),
    "benchmark": ("#3c4557", "#d3d9e3"),
    "buy_and_hold": ("#b08a4e", "#b08a4e"),
    "equal_weight": ("#4f8f7b", "#4f8f7b"),
    "min_variance": ("#8b7cb3", "#8b7cb3"),
    "hrp": ("#b86f86", "#b86f86"),
    "momentum": ("#5b97ad", "#5b97ad"),
    "random": ("#a3a9b3", "#7d8695"),
    "cash": ("#c3c8d0", "#5d6675"),
} | {f"asset{k}": (colour, colour) for k, colour in enumerate(_ASSETS)}
LIGHT: Mapping[str, str] = {role: light for role, (light, _) in _ROLES.items()}
DARK: Mapping[str, str] = {role: dark for role, (_, dark) in _ROLES.items()}


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
