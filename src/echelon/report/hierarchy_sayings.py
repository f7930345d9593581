"""Names and events of a hierarchy, in the reader's language.

Training and risk control record a code and values; the sentence is made here, from the text
`event_CODE`. An event that has none is shown by its code and values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

from echelon.report.texts import Words, catalogue

_EXPERT = re.compile(r"expert (\d+)")
_NAMES = {"portfolio": "who_portfolio", "router": "who_router"}


def said_name(name: str, words: Words) -> str:
    """What an expert, the portfolio or the router is called; other names are their own."""
    match = _EXPERT.fullmatch(name)
    if match is not None:
        return words("expert_n", n=match[1])
    return words(_NAMES[name]) if name in _NAMES else name


def event_text(code: str, values: Mapping[str, float | str], words: Words) -> str:
    """The sentence of an event."""
    key = f"event_{code}"
    if key in catalogue(words.lang):
        with suppress(KeyError, ValueError):  # values that are not those of the text
            return words(key, **values)
    details = (f"{name} {value}" for name, value in values.items())
    return words("comma").join((code.replace("_", " "), *details))


def event_kind(kind: str, words: Words) -> str:
    """What a kind of event of the population, or of life in its lineage, is called."""
    key = f"life_{kind}"
    return words(key) if key in catalogue(words.lang) else kind.replace("_", " ")
