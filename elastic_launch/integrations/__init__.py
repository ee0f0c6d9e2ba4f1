"""Callbacks that let the training loops of other frameworks take part in planned changes.

``accelerate``, ``lightning``, ``transformers``  one module for each framework, imported on first use: only that one
                                                imports its framework
``drain``                                       shared by all three; also for loops of other frameworks
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_launch.integrations import accelerate as accelerate
    from elastic_launch.integrations import drain as drain
    from elastic_launch.integrations import lightning as lightning
    from elastic_launch.integrations import transformers as transformers

__all__ = ["accelerate", "drain", "lightning", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
