# SPDX-License-Identifier: Apache-2.0
"""Field types of the config schema: numbers with ranges, values without a choice, defaults that follow other keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler

Precision = Literal["float32", "bfloat16"]
EnginePrecision = Literal["float32", "bfloat16", "fp8"]

_LARGEST = 2**31
"""A larger size is a typing error; below it no product of sizes loses precision."""


def follows(expression: str) -> Any:
    """A default from other keys, in OmegaConf's syntax. Any: the text stands for the field's type until resolved."""
    return "${" + expression + "}"


def required() -> Any:
    """OmegaConf's mark for a key that has no default."""
    return "???"


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, the ends included unless open. pydantic checks it in `Annotated`."""

    low: float = -math.inf
    high: float = math.inf
    is_low_open: bool = False
    is_high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.is_low_open else value >= self.low
        below = value < self.high if self.is_high_open else value <= self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "finite"
        low = f"{'above' if self.is_low_open else 'at least'} {self.low:g}"
        if self.high in (math.inf, _LARGEST):
            return low
        return f"{low} and {'below' if self.is_high_open else 'at most'} {self.high:g}"

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> object:
        from pydantic import WrapValidator

        def check(value: object, validate: Callable[[object], float]) -> float:
            # pydantic takes true for 1, and 2.0 for 2.
            if source is int and isinstance(value, float) and value.is_integer() and value in self:
                raise ValueError(f"must be a whole number; write {int(value)}")
            if isinstance(value, bool) or (source is int and isinstance(value, float)):
                raise ValueError(f"must be a {'whole ' if source is int else ''}number; correct the value")
            number = validate(value)
            if math.isfinite(number) and number > self.high == _LARGEST:
                raise ValueError(f"out of range; use a number that is at most {_LARGEST}")
            if number not in self:
                raise ValueError(f"out of range; use a number that is {self}")
            return number

        return WrapValidator(check).__get_pydantic_core_schema__(source, handler)


@dataclass(frozen=True)
class Only:
    """The one value of a key that mrl has so far, and why. pydantic checks it in `Annotated`.

    `others` are the texts that `reason` is about; any other is an unknown value.
    """

    value: object
    reason: str
    others: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> object:
        from pydantic import AfterValidator

        def check(value: object) -> object:
            if isinstance(value, str) and value not in (self.value, *self.others):
                raise ValueError(f"no such value; use {self.value}")
            if value != self.value:
                raise ValueError(
                    f"{self.reason}; set it to "
                    f"{str(self.value).lower() if isinstance(self.value, bool) else self.value}"
                )
            return value

        return AfterValidator(check).__get_pydantic_core_schema__(source, handler)


Positive = Annotated[int, Range(1, _LARGEST)]
Count = Annotated[int, Range(0, _LARGEST)]
AllOrCount = Annotated[int, Range(-1, _LARGEST)]
AtLeastTwo = Annotated[int, Range(2, _LARGEST)]
Workers = Annotated[int, Range(1, 4096)]
Port = Annotated[int, Range(1024, 65535)]
PortEnd = Annotated[int, Range(1025, 65536)]
Finite = Annotated[float, Range()]
AboveZero = Annotated[float, Range(0, is_low_open=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
ShareBelowOne = Annotated[float, Range(0, 1, is_high_open=True)]
ShareAboveZero = Annotated[float, Range(0, 1, is_low_open=True)]
