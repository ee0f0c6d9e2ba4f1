"""Refusing arguments of the wrong kind, before anything of the training has begun."""

from __future__ import annotations

from elastic_launch.errors import UsageError

__all__ = ["check_kind", "found"]


def check_kind(where: str, given: object, kind: type | tuple[type, ...], remedy: str) -> None:
    """Refuse an argument that is not of its kind.

    Args:
        where: the call and its argument, such as ``run.steps(loader=...)``.

    Raises:
        UsageError: naming the argument, what was given, and the remedy.
    """
    if not isinstance(given, kind):
        raise UsageError(f"{where} is {found(given)}.", remedy)


def found(given: object) -> str:
    """Return what was given, in words: its type, or the class that it is itself."""
    if given is None:
        return "None"
    if isinstance(given, type):
        return f"the class {given.__name__}, not an object of it"
    name = type(given).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"
