"""The base of every configuration model: frozen, and strict about keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A frozen section of the configuration; `load` says what an unknown key should have been."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    def _contradictions(self) -> Iterator[str]:
        """What settings that are sound one by one cannot mean together, each in words."""
        return iter(())

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if problems := list(self._contradictions()):
            raise ValueError("; ".join(problems))
        return self
