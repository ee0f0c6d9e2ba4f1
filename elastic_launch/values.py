"""Values: objects that never change, and are equal if their fields are."""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Value:
    """Base class of values. A subclass declares fields, and becomes a frozen dataclass.

    It has no slots, which need another class than the one declared: of what is kept or made by the ten thousand,
    a dataclass with slots is smaller.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
