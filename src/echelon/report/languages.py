"""Pages and pictures by language: neither is written over the other.

report.html is in English, report.zh.html in Chinese; pictures are named in the same way. A page
links to those in other languages that are there when it is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from echelon.report.texts import Lang

_TITLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"en": ("en", "English"), "zh": ("zh-CN", "中文")}
)
"""Language → its code in HTML, and its own name."""


def file_name(stem: str, ending: str, lang: str) -> str:
    """Name of a page or picture: `report.html`, `report.zh.html`."""
    return f"{stem}.{ending}" if lang == "en" else f"{stem}.{lang}.{ending}"


def languages_with(directory: Path, stem: str, lang: str) -> list[str]:
    """`lang`, and those that the directory has a page in already."""
    return [
        name
        for name in get_args(Lang)
        if name == lang or (directory / file_name(stem, "html", name)).is_file()
    ]


def language_of(file: str) -> str:
    """Language of a file by its name."""
    middle = file.split(".")[-2] if file.count(".") > 1 else "en"
    return middle if middle in get_args(Lang) else "en"


def language_links(stem: str, lang: str, written: Sequence[str]) -> str:
    """HTML of the links from a page to those in other languages; empty where there are none."""
    return "".join(
        f' · <a href="{escape(file_name(stem, "html", name))}" hreflang="{code}" lang="{code}">'
        f"{title}</a>"
        for name, (code, title) in _TITLES.items()
        if name in written and name != lang
    )
