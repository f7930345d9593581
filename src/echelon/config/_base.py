"""The base of every configuration model: frozen, strict about keys and about what is a number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

_POWER_OF_TEN = re.compile(r"[-+]?\d{1,20}(?:\.\d*)?[eE]\+?\d{1,2}")
_LEADING_ZERO = re.compile(r"[-+]?0\d{1,40}")


class Section(BaseModel):
    """A frozen section of the configuration; `load` says what an unknown key should have been."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    def _contradictions(self) -> Iterator[str]:
        """What settings that are sound one by one cannot mean together, each in words."""
        return iter(())

    @field_validator("*", mode="before")
    @classmethod
    def _read_numbers(cls, value: Any, info: ValidationInfo) -> Any:  # noqa: ANN401 (as YAML read it)
        """Refuse what pydantic would take for another number, and read 1e6 where YAML does not."""
        assert info.field_name is not None
        types = set(types_in(cls.model_fields[info.field_name].annotation))
        if types & {int, float, date} and not types & {bool, str}:
            return _read_number(value, types)
        return value

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if problems := list(self._contradictions()):
            raise ValueError("; ".join(problems))
        return self


def types_in(annotation: Any) -> Iterator[Any]:  # noqa: ANN401 (any type hint)
    parts = () if get_origin(annotation) is Literal else get_args(annotation)
    if not parts:
        yield annotation
    for part in parts:
        yield from types_in(part)


def _read_number(value: Any, types: set[Any]) -> Any:  # noqa: ANN401 (as YAML read it)
    """A number, or a list of some, of a setting whose values have these types."""
    if isinstance(value, list | tuple):
        return [_read_number(part, types) for part in value]
    if isinstance(value, bool):
        wanted = "a date" if date in types else "a number"
        literal = str(value).lower()
        raise ValueError(
            f"expected {wanted}, found {literal} (which YAML makes of yes, no, on, off)"
        )
    if not isinstance(value, str) or date in types:
        return value
    if _LEADING_ZERO.fullmatch(value):
        raise ValueError(f"{value!r} may be octal or decimal; write {int(value)}")
    if _POWER_OF_TEN.fullmatch(value) and float not in types:
        number = float(value)
        # Exact up to here; more is beyond 64 bits or was not meant.
        return int(number) if number.is_integer() and abs(number) < 2**53 else value
    return value
