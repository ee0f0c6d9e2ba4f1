"""Where this process is among the others, and what they do together: ``elastic_launch.dist``.

Names, parameters and defaults are those of Composer's ``composer.utils.dist``
(https://docs.mosaicml.com/projects/composer/en/stable/api_reference/composer.utils.dist.html), so that a script written
against it needs another import only; docs/reference/dist.md says where the two differ. Without a launcher it is a world
of one process, in which nothing has to be joined. In a larger one, everything beyond the ranks and sizes needs the
process group that :func:`initialize_dist` or ``elastic_launch.session`` joins, and raises a UsageError before that.
Every collective must be called by all ranks of its group, in the same order.
"""

from __future__ import annotations

import atexit
import os
import random
import string
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.utils.data import Dataset, DistributedSampler

from elastic_launch.errors import ElasticLaunchError, UsageError
from elastic_launch.training.ranks.ranks import (
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_world_size,
    is_available,
    is_initialized,
    joined,
    rank_on_node,
)
from elastic_launch.training.ranks.world import environment, join, leave

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "busy_wait_for_local_rank_zero",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_node_signal_file_name",
    "get_sampler",
    "get_world_size",
    "initialize_dist",
    "is_available",
    "is_initialized",
    "local_rank_zero_download_and_wait",
    "run_local_rank_zero_first",
    "write_signal_file",
]

T = TypeVar("T")

_OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_DEVICES = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}
_POLL = 0.1  # seconds between two looks for a file
_REASON_BYTES = 1024  # of an error's text, told to the other ranks
_NAME_LENGTH = 6  # letters and digits of a signal file's name that differ
_DONE = "local rank zero done"


def initialize_dist(device: str | torch.device | None = None, timeout: float = 300.0) -> None:
    """Join the process group that the environment describes, unless this process has joined one.

    The backends are those of ``elastic_launch.session``: NCCL beside gloo if each local rank can have a GPU of its own,
    which then becomes the current device, else gloo. Within a session there is nothing left to do, and a session that
    begins later uses this group. Without a launcher there is no group to join, and none is made. The group is left
    when the interpreter exits without an error.

    Args:
        device: ``"cpu"``, ``"gpu"`` (or ``"cuda"``), or None for what there is; the group must be able to serve it.
        timeout: seconds after which a collective that not everybody joins fails.

    Raises:
        UsageError: if the group cannot serve the device, or the world is described only in part.
    """
    kind = _kind(device)
    if is_initialized():
        _check_serves(kind)
        return
    if not is_available() and get_world_size() > 1:
        raise UsageError(
            f"WORLD_SIZE is {get_world_size()}, but this torch was built without torch.distributed.",
            "Install a torch that has it.",
        )
    world = environment()
    if kind == "cuda" and world.device().type != "cuda":
        raise UsageError(
            f"initialize_dist({str(device)!r}): {torch.cuda.device_count()} GPUs were found for "
            f"{world.local_world_size} processes on this node.",
            "Start at most one process per GPU, or ask for 'cpu'.",
        )
    join(world, timeout)
    if is_initialized():
        atexit.register(_leave_at_exit, os.getpid())


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait until all ranks are here; nothing to wait for outside a job.

    Raises:
        UsageError: if there are several ranks and no process group.
    """
    if joined("barrier"):
        distributed.barrier(group=group)


def all_reduce(tensor: Tensor, reduce_operation: str = "SUM", group: ProcessGroup | None = None) -> None:
    """Replace the tensor by its reduction over all ranks, the same bits everywhere; outside a job it stays as it is.

    The order in which floats are added depends on the number of ranks; the exact mode of ``run.steps`` does not.

    Args:
        tensor: of the same shape and dtype on all ranks; changed in place.
        reduce_operation: SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, or, with NCCL only, AVG; in any case of letters.

    Raises:
        UsageError: if there is no such operation, or there are several ranks and no process group.
    """
    name = reduce_operation.upper()
    if name not in _OPERATIONS:
        raise UsageError(
            f"all_reduce(reduce_operation={reduce_operation!r}): there is no such operation.",
            "Choose one of " + ", ".join(_OPERATIONS) + ".",
        )
    if joined("all_reduce"):
        distributed.all_reduce(tensor, op=getattr(distributed.ReduceOp, name), group=group)


def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> None:
    """Overwrite the tensor on all ranks with that of the global rank ``src``; outside a job it stays as it is.

    Args:
        tensor: of the same shape and dtype on all ranks; changed in place.

    Raises:
        UsageError: if there are several ranks and no process group.
    """
    if joined("broadcast"):
        distributed.broadcast(tensor, src=src, group=group)


def all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    """Return copies of all ranks' tensors, in rank order; outside a job, of this one.

    The copies carry no gradient. Composer returns the tensor itself outside a job, where a change to the result then
    changes the input; here it is a copy in either case.

    Args:
        tensor: of the same shape and dtype on all ranks.

    Raises:
        UsageError: if there are several ranks and no process group.
    """
    mine = tensor.detach().contiguous()
    if not joined("all_gather"):
        return [mine.clone()]
    gathered = [torch.empty_like(mine) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(gathered, mine, group=group)
    return gathered


def all_gather_object(obj: T, group: ProcessGroup | None = None) -> list[T]:
    """Return all ranks' objects, in rank order; outside a job, a list of this one itself.

    Objects travel as pickles over the process group, as torch's own function sends them. Unpickling runs what a pickle
    says: whoever can join the group can run code on every rank, so keep its network to trusted hosts.

    Raises:
        UsageError: if there are several ranks and no process group.
    """
    if not joined("all_gather_object"):
        return [obj]
    gathered: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(gathered, obj, group=group)
    return gathered


def broadcast_object_list(object_list: list[Any], src: int = 0, group: ProcessGroup | None = None) -> None:
    """Overwrite the list's items on all ranks with those of the global rank ``src``; outside a job they stay.

    Objects travel as pickles, see :func:`all_gather_object`.

    Args:
        object_list: of the same length on all ranks; changed in place.

    Raises:
        UsageError: if there are several ranks and no process group.
    """
    if joined("broadcast_object_list"):
        distributed.broadcast_object_list(object_list, src=src, group=group)


def get_sampler(
    dataset: Dataset[Any],
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> DistributedSampler[int]:
    """Return a DistributedSampler: each rank draws its own len(dataset) / world size of the samples.

    Which samples those are depends on the world size, so a resized run does not go on where it was; ``ElasticLoader``
    does. With ``shuffle``, call its ``set_epoch`` before each epoch.

    Args:
        dataset: whole on every rank.
        drop_last: drop the samples that do not divide evenly; else the first ones are drawn again to fill up.
        num_replicas, rank: instead of this process' world size and global rank.
        seed: of the shuffling; the same on all ranks.
    """
    return DistributedSampler(
        dataset,
        num_replicas=get_world_size() if num_replicas is None else num_replicas,
        rank=get_global_rank() if rank is None else rank,
        shuffle=shuffle,
        drop_last=drop_last,
        seed=seed,
    )


@contextmanager
def run_local_rank_zero_first() -> Iterator[None]:
    """Run the body on every node's local rank 0, then on the other ranks: for a download into a shared directory.

    The others wait for the local ranks 0 of all nodes, and no longer than the process group's timeout. If one of these
    raises, all ranks raise, naming it; behind Composer's barrier they would wait for it until that timeout.

    Raises:
        ElasticLaunchError: on the ranks beside a local rank 0 whose body raised.
        UsageError: if there are several ranks and no process group.
    """
    if not joined("run_local_rank_zero_first"):
        yield
        return
    if rank_on_node() != 0:
        _raise_if_one_failed(None)
        yield
        return
    try:
        yield
    except (Exception, SystemExit) as error:
        # Its own error is the one to be seen, also where the others are gone by now.
        with suppress(ElasticLaunchError, RuntimeError):
            _raise_if_one_failed(error)
        raise
    _raise_if_one_failed(None)


@contextmanager
def local_rank_zero_download_and_wait(
    expected_file_path: str | os.PathLike[str], *, timeout: float = 3600.0
) -> Iterator[None]:
    """Run the body on local rank 0 at once, and on its node's other ranks when the file exists; needs no process group.

    A file that is being written exists as well: let the body write to another name and rename it. A file that is there
    from an earlier run holds nobody back. Where a process group is joined, :func:`run_local_rank_zero_first` is better:
    this one looks for the file ten times a second, and cannot know that local rank 0 failed.

    Args:
        expected_file_path: made by local rank 0 in the body.
        timeout: seconds to wait for it; Composer waits for ever.

    Raises:
        ElasticLaunchError: if the file is not there in time, or local rank 0 leaves the body without it.
    """
    path, local_rank = os.fspath(expected_file_path), rank_on_node()
    deadline = time.monotonic() + timeout
    while local_rank != 0 and not os.path.exists(path):
        if time.monotonic() >= deadline:
            raise ElasticLaunchError(
                f"Local rank {local_rank} waited {timeout:g} s for {path}, and local rank 0 has not made it.",
                "See what local rank 0 says; a long download may need a longer timeout=.",
            )
        time.sleep(_POLL)
    yield
    if local_rank == 0 and not os.path.exists(path):
        raise ElasticLaunchError(
            f"Local rank 0 has not made {path}, and the others of its node wait for it.",
            "Make the file in the body, or name the one that it makes.",
        )


def get_node_signal_file_name(rng: random.Random | None = None) -> str:
    """Return a name for a file by which the ranks of this node wait for each other; called by all ranks.

    All ranks get the same random part, so that no file of an earlier wait has this name. The number in it is that of
    this node: nodes that share a directory have files of their own.

    Args:
        rng: what the random part is drawn from; only that of rank 0 counts.

    Raises:
        UsageError: if there are several ranks and no process group.
    """
    drawn = "".join((rng or random.Random()).choices(string.ascii_letters + string.digits, k=_NAME_LENGTH))
    if joined("get_node_signal_file_name"):
        letters = torch.tensor(list(drawn.encode()), dtype=torch.uint8, device=_device())
        distributed.broadcast(letters, src=0)
        drawn = bytes(letters.tolist()).decode()
    return f"._signal_file_node{get_node_rank()}_{drawn}"


def write_signal_file(signal_file_name: str, dir_path: str | os.PathLike[str] | None = None) -> str:
    """Make a file on local rank 0, and return its path on every rank.

    Args:
        dir_path: where; made if it is missing. None: the working directory.
    """
    return _write_signal(signal_file_name, dir_path, _DONE)


@contextmanager
def busy_wait_for_local_rank_zero(
    dir_path: str | os.PathLike[str] | None = None, *, timeout: float = 3600.0
) -> Iterator[None]:
    """Run the body on all ranks, and have none go on before local rank 0 of each node has left it.

    For work of local rank 0 that takes longer than the process group's timeout, such as an upload: the others look for
    a file, and meet in a barrier after that.

    Args:
        dir_path: where that file is made, and removed again; all ranks of a node must see it. None: the working
            directory.
        timeout: seconds to wait for the file; Composer waits for ever.

    Raises:
        ElasticLaunchError: on the other ranks of a node, if the body has failed on local rank 0 or is not done in time.
        UsageError: if there are several ranks and no process group.
    """
    name = get_node_signal_file_name()
    try:
        yield
    except (Exception, SystemExit) as error:
        _write_signal(name, dir_path, f"{type(error).__name__}: {error}")
        raise
    path = write_signal_file(name, dir_path)
    with local_rank_zero_download_and_wait(path, timeout=timeout):
        with open(path, errors="replace") as file:
            said = file.read()
        if said != _DONE:
            raise ElasticLaunchError(
                f"Local rank 0 failed in dist.busy_wait_for_local_rank_zero: {said}",
                "The traceback of local rank 0 tells the cause.",
            )
        barrier()
    if rank_on_node() == 0:
        os.remove(path)


def _write_signal(name: str, directory: str | os.PathLike[str] | None, text: str) -> str:
    path = os.path.join(os.getcwd() if directory is None else directory, name)
    if rank_on_node() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.new", "w") as file:
            file.write(text)
        os.replace(f"{path}.new", path)  # who finds it finds it whole
    return path


def _kind(device: str | torch.device | None) -> str | None:
    """Return torch's name of a kind of device, or None if any will do."""
    if device is None:
        return None
    name = str(device).partition(":")[0].lower()
    if name not in _DEVICES:
        raise UsageError(f"initialize_dist({str(device)!r}): no backend for such a device.", "Ask for 'cpu' or 'gpu'.")
    return _DEVICES[name]


def _check_serves(kind: str | None) -> None:
    backends = distributed.get_backend_config()
    needed = {None: "", "cpu": "cpu:", "cuda": "cuda:nccl"}[kind]
    if needed not in backends:
        raise UsageError(
            f"initialize_dist: the process group that this process has joined has the backends {backends}, none for "
            f"{kind}.",
            "Ask for the device that the group was made for, or let initialize_dist make it.",
        )


def _leave_at_exit(joined_by: int) -> None:
    # Not in a forked child, whose group it is not; and not after an error, when the others may never come to the end.
    if os.getpid() == joined_by and getattr(sys, "last_value", None) is None:
        leave()


def _raise_if_one_failed(error: BaseException | None) -> None:
    """Learn on all ranks whether one came with an error, and raise naming the first.

    The error's text travels as bytes in a tensor: nobody has to trust a pickle for it.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    device = _device()
    first = torch.tensor([size if error is None else rank], device=device)
    distributed.all_reduce(first, op=distributed.ReduceOp.MIN)
    failed = int(first)
    if failed == size:
        return
    reason = f"{type(error).__name__}: {error}" if rank == failed else ""
    told = torch.tensor(list(_padded(reason)), dtype=torch.uint8, device=device)
    distributed.broadcast(told, src=failed)
    text = bytes(told.tolist()).rstrip(b"\0").decode(errors="ignore")
    raise ElasticLaunchError(
        f"Rank {failed}, which was to run first, failed in dist.run_local_rank_zero_first: {text}",
        f"The traceback of rank {failed} tells the cause.",
    )


def _device() -> str:
    """Where small tensors of this module's own travel."""
    return "cpu" if "cpu:" in distributed.get_backend_config() else "cuda"


def _padded(text: str) -> bytes:
    return text.encode(errors="replace")[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
