"""Checks argument types before the training begins."""

from __future__ import annotations

from elastic_launch.errors import UsageError


def check_kind(where: str, given: object, kind: type | tuple[type, ...], remedy: str) -> None:
    """Check the type of an argument.

    Args:
        where: the call and its argument, such as ``run.steps(loader=...)``.
        remedy: what to give instead; for the error.
    """
    if not isinstance(given, kind):
        raise UsageError(f"{where} is {found(given)}.", remedy)


def check_function(where: str, given: object, remedy: str) -> None:
    """Check that an argument can be called, and is not a class by mistake, such as ``MSELoss`` for ``MSELoss()``."""
    if not callable(given) or isinstance(given, type):
        raise UsageError(f"{where} is {found(given)}.", remedy)


def found(given: object) -> str:
    """Describe an argument in words: by its type, or by its name if it is a class."""
    if given is None:
        return "None"
    if isinstance(given, type):
        return f"the class {given.__name__}, not an object of it"
    name = type(given).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"
