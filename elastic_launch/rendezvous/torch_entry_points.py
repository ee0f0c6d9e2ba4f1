"""The entry points of the group ``torchrun.handlers``.

torch loads them whenever its elastic package is imported, also in every worker, so this module imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousHandler,
        RendezvousHandlerCreator,
        RendezvousParameters,
    )


def c10d_handler_creator() -> RendezvousHandlerCreator:
    """Return the factory of handlers for ``--rdzv-backend elastic-c10d``."""
    return _creator("c10d")


def etcd_handler_creator() -> RendezvousHandlerCreator:
    """Return the factory of handlers for ``--rdzv-backend elastic-etcd``."""
    return _creator("etcd")


def _creator(backend: str) -> RendezvousHandlerCreator:
    def create(params: RendezvousParameters) -> RendezvousHandler:
        from elastic_launch.rendezvous.torch_handler import TorchrunHandler

        return TorchrunHandler(params, backend)

    return create
