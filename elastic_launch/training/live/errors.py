"""Tells errors of the library's own exchanges with other ranks from those of a script."""

from __future__ import annotations

from traceback import walk_tb

_ELSEWHERE = (
    "contextlib",
    "torch.utils._contextlib",  # no_grad() as a decorator
    "torch.distributed.",
    # Gradients are exchanged within the backward pass.
    "torch._tensor",
    "torch.autograd",
    "torch.nn.modules._functions",  # SyncBatchNorm
    "torch.utils.checkpoint",
)


def is_of_exchange(error: BaseException) -> bool:
    """Whether an error that the library caught was raised by an exchange of its own.

    The traceback of an error that a script raises, in a callback for example, has a frame of the script's code. The
    message cannot tell: a script may raise an error with the same words.
    """
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    return all(name.startswith(("elastic_launch.training.", *_ELSEWHERE)) for name in modules)
