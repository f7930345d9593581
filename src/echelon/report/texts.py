"""Every word a report says: one catalogue a language, catalogue/en.yaml and catalogue/zh.yaml.

`Words("zh")("equity")` gives the Chinese text; texts with fields take them by name. A measure, a
baseline or a reason that has no text is shown by its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Literal, get_args

import yaml

from echelon.errors import UsageError
from echelon.ops.measures import LABELS

try:
    from yaml import CSafeLoader as _Loader
except ImportError:  # PyYAML built without libyaml: the same, slower
    from yaml import SafeLoader as _Loader  # type: ignore[assignment]

Lang = Literal["en", "zh"]


@cache
def catalogue(lang: str) -> Mapping[str, str]:
    """Key → text of a language."""
    file = files("echelon.report").joinpath("catalogue", f"{lang}.yaml")
    tree: dict[str, str] = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    return tree


class Words:
    """The texts of one language."""

    def __init__(self, lang: str) -> None:
        if lang not in get_args(Lang):
            raise UsageError(f"no report in language {lang!r}: choose en or zh.")
        self.lang = lang
        self._texts = catalogue(lang)

    def __call__(self, key: str, **fields: object) -> str:
        """The text of `key`, its fields filled in."""
        return self._texts[key].format(**fields)

    def count(self, key: str, n: int) -> str:
        """So many of something: the text of `key`_one, or of `key`_n."""
        return self(f"{key}_one") if n == 1 else self(f"{key}_n", n=n)

    def measure(self, name: str) -> str:
        """What a measure is called; without a translation, as in English."""
        label = LABELS.get(name)
        return self._known("measure", name, label.text if label else name.replace("_", " "))

    def meaning(self, name: str) -> str:
        """What a measure means, in a sentence; without a translation, in English."""
        label = LABELS.get(name)
        return self._known("meaning", name, label.meaning if label else name.replace("_", " "))

    def name(self, key: str) -> str:
        """What a baseline, or an agent (`seed-42`), is called."""
        if key.startswith("seed-"):
            return self("seed_n", seed=key.removeprefix("seed-"))
        return self._known("book", key, key.replace("_", " "))

    def in_text(self, key: str) -> str:
        """What a baseline is called in the middle of a sentence."""
        return self._known("in_text", key, self.name(key))

    def reason(self, key: str) -> str:
        """Why an order was cut."""
        return self._known("reason", key, key.replace("_", " "))

    def ledger(self, phrase: str) -> str:
        """A phrase of a world's ledger."""
        return self._known("ledger", phrase, phrase)

    def _known(self, kind: str, key: str, default: str) -> str:
        return self._texts.get(f"{kind}_{key}", default)
