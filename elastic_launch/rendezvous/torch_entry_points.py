"""The entry points of the group ``torchrun.handlers``.

torch loads them whenever its elastic package is imported, in every worker too, so nothing heavy is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousHandler,
        RendezvousHandlerCreator,
        RendezvousParameters,
    )

__all__ = ["c10d_handler_creator", "etcd_handler_creator"]


def c10d_handler_creator() -> RendezvousHandlerCreator:
    """Return what makes a handler for ``--rdzv-backend elastic-c10d``."""
    return _creator("c10d")


def etcd_handler_creator() -> RendezvousHandlerCreator:
    """Return what makes a handler for ``--rdzv-backend elastic-etcd``."""
    return _creator("etcd")


def _creator(backend: str) -> RendezvousHandlerCreator:
    def create(params: RendezvousParameters) -> RendezvousHandler:
        from elastic_launch.rendezvous.torch_handler import TorchrunHandler

        return TorchrunHandler(params, backend)

    return create
