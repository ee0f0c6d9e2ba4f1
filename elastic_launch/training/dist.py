"""``elastic_launch.dist``: ranks, world sizes and collectives.

Names, parameters and defaults are those of Composer's ``composer.utils.dist``
(https://docs.mosaicml.com/projects/composer/en/stable/api_reference/composer.utils.dist.html), so that a script written
against it only needs a different import; docs/reference/dist.md lists the differences. Without a launcher, the world is
one process and no process group is needed. In a larger world, everything except ranks and sizes needs the process group
that :func:`initialize_dist` or ``elastic_launch.session`` joins, and raises a UsageError before that. Every collective
must be called by all ranks of its group, in the same order.

Ranks and sizes come from the process group once it is joined, before that from the environment. A variable that is not
a number, is missing although there are several ranks, or contradicts the group is a UsageError. A process that was
started ahead waits for its place, unless it only asks for its local rank or for the number of workers on its node.
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

from elastic_launch.contract import ENV_FIRST_ON_NODE, ENV_LOCAL_RANK, UNPLACED
from elastic_launch.errors import ElasticLaunchError, UsageError
from elastic_launch.training.ranks.place import find_place
from elastic_launch.training.ranks.world import environment, hidden_rank_on_node, join, leave

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

_POLL = 0.1
"""Seconds between two checks for a file."""

_REASON_BYTES = 1024
"""Maximum number of bytes of an error's text that the other ranks get."""

_NAME_LENGTH = 6
"""Random letters and digits in a signal file's name."""

_DONE = "local rank zero done"


def is_available() -> bool:
    """Return whether torch was built with its distributed package."""
    return distributed.is_available()


def is_initialized() -> bool:
    """Return whether this process has joined a process group."""
    find_place()
    return is_available() and distributed.is_initialized()


def get_world_size() -> int:
    """Return the number of processes in the job; 1 without a launcher."""
    if is_initialized():
        return _agreed("WORLD_SIZE", distributed.get_world_size())
    size = _variable("WORLD_SIZE")
    return 1 if size is None else size


def get_global_rank(group: ProcessGroup | None = None) -> int:
    """Return this process' rank among all processes, from 0, or its rank in a group."""
    if is_initialized():
        return distributed.get_rank(group) if group is not None else _agreed("RANK", distributed.get_rank())
    return _place("RANK")


def get_local_rank() -> int:
    """Return this process' rank among the processes of its node, from 0."""
    return _place("LOCAL_RANK")


def get_local_world_size() -> int:
    """Return the number of processes on this node; 1 without a launcher."""
    return _place("LOCAL_WORLD_SIZE", alone=1)


def get_node_rank() -> int:
    """Return the rank of this node among the nodes, from 0.

    It is torchrun's GROUP_RANK or, if that is not set, Composer's NODE_RANK: a cluster may have set the latter for the
    host, whose rank in an elastic round may differ.
    """
    find_place()
    return _place("GROUP_RANK" if os.environ.get("GROUP_RANK") else "NODE_RANK")


def initialize_dist(device: str | torch.device | None = None, timeout: float = 300.0) -> None:
    """Join the process group that the environment describes, unless this process has already joined one.

    The backends are those of ``elastic_launch.session``: NCCL and gloo if each local rank can have its own GPU, which
    then becomes the current device, else gloo alone. Within a session this function does nothing, and a session that
    begins later uses this group. Without a launcher, no group is made. The group is left when the interpreter exits
    without an error.

    Args:
        device: ``"cpu"``, ``"gpu"`` (or ``"cuda"``), or None for whatever is available; the group must support it.
        timeout: seconds after which a collective fails if not all ranks have joined it.

    Raises:
        UsageError: if the group does not support the device, or the environment describes the world only in part.
    """
    kind = _kind(device)
    if is_initialized():
        backends = distributed.get_backend_config()
        if {None: "", "cpu": "cpu:", "cuda": "cuda:nccl"}[kind] not in backends:
            raise UsageError(
                f"initialize_dist: the process group that this process has joined has the backends {backends}, none "
                f"for {kind}.",
                "Ask for the device that the group was made for, or let initialize_dist make it.",
            )
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
    """Wait until all ranks have called it; returns at once if this is the only process.

    Args:
        group: as for all collectives here, the process group; None: all ranks.
    """
    if _joined("barrier"):
        distributed.barrier(group=group)


def all_reduce(tensor: Tensor, reduce_operation: str = "SUM", group: ProcessGroup | None = None) -> None:
    """Replace the tensor by its reduction over all ranks, bitwise equal on all of them; unchanged in a single process.

    The order in which floats are added depends on the number of ranks, unlike in the exact mode of ``run.steps``.

    Args:
        tensor: of any shape, with the same shape and dtype on all ranks; changed in place.
        reduce_operation: SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR or, with NCCL only, AVG; not case-sensitive.

    Raises:
        UsageError: if the operation does not exist.
    """
    name = reduce_operation.upper()
    if name not in _OPERATIONS:
        raise UsageError(
            f"all_reduce(reduce_operation={reduce_operation!r}): there is no such operation.",
            "Choose one of " + ", ".join(_OPERATIONS) + ".",
        )
    if _joined("all_reduce"):
        with _dense(tensor) as dense:
            distributed.all_reduce(dense, op=getattr(distributed.ReduceOp, name), group=group)


def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> None:
    """Overwrite the tensor on all ranks with the one of global rank ``src``; unchanged in a single process.

    Its shape and dtype must be the same on all ranks.
    """
    if _joined("broadcast"):
        with _dense(tensor) as dense:
            distributed.broadcast(dense, src=src, group=group)


@contextmanager
def _dense(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, or in place of a view with gaps a copy, which is copied back: gloo ignores strides."""
    dense = tensor.contiguous() if tensor.layout is torch.strided else tensor
    yield dense
    if dense is not tensor:
        with torch.no_grad():
            tensor.copy_(dense)


def all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    """Return copies of all ranks' tensors, which have one shape and dtype, in rank order; one copy in a single process.

    The copies carry no gradient. In a single process Composer returns the tensor itself, so that changing the result
    changes the input; this function always copies.
    """
    mine = tensor.detach().contiguous()
    if not _joined("all_gather"):
        return [mine.clone()]
    gathered = [torch.empty_like(mine) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(gathered, mine, group=group)
    return gathered


def all_gather_object(obj: T, group: ProcessGroup | None = None) -> list[T]:
    """Return all ranks' objects, in rank order; in a single process, a list of this object itself.

    Objects are sent as pickles over the process group, as by torch's own function. Unpickling can run arbitrary code:
    any process that can join the group can run code on every rank, so restrict its network to trusted hosts.
    """
    if not _joined("all_gather_object"):
        return [obj]
    gathered: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(gathered, obj, group=group)
    return gathered


def broadcast_object_list(object_list: list[Any], src: int = 0, group: ProcessGroup | None = None) -> None:
    """Overwrite the list's items on all ranks with those of global rank ``src``; unchanged in a single process.

    The lists have one length. Objects are sent as pickles; see the warning at :func:`all_gather_object`.
    """
    if _joined("broadcast_object_list"):
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
    """Return torch's ``DistributedSampler``: each rank draws its own ``len(dataset) / world size`` of the samples.

    The choice of samples depends on the world size, so a resized run does not resume at the same place;
    ``ElasticLoader`` does. With ``shuffle``, call the sampler's ``set_epoch`` before each epoch.

    Args:
        drop_last: drop the samples that do not divide evenly among the ranks; otherwise the first samples are drawn
            again to fill up.
        num_replicas: used instead of the world size.
        rank: used instead of this process' global rank.
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

    The other ranks wait for local rank 0 of all nodes, for at most the process group's timeout. If the body raises on
    one of those, all ranks raise an error that names it; with Composer they would wait in a barrier until the timeout.

    Raises:
        ElasticLaunchError: on the other ranks, if the body raised on a local rank 0.
    """
    if not _joined("run_local_rank_zero_first"):
        yield
        return
    if not _first_on_node():
        _raise_if_one_failed(None)
        yield
        return
    try:
        yield
    except (Exception, SystemExit) as error:
        # Raise this rank's own error, even if the other ranks are already gone.
        with suppress(ElasticLaunchError, RuntimeError):
            _raise_if_one_failed(error)
        raise
    _raise_if_one_failed(None)


@contextmanager
def local_rank_zero_download_and_wait(
    expected_file_path: str | os.PathLike[str], *, timeout: float = 3600.0
) -> Iterator[None]:
    """Run the body on local rank 0 at once, and on the node's other ranks once a file exists; needs no process group.

    A partly written file exists too, so the body should write to another name and then rename it. If the file is left
    over from an earlier run, no rank waits. If a process group is joined, prefer :func:`run_local_rank_zero_first`:
    this function polls for the file ten times a second and cannot know that local rank 0 failed.

    Args:
        timeout: seconds to wait for the file; Composer waits for ever.

    Raises:
        ElasticLaunchError: if the file does not exist in time, or local rank 0 leaves the body without making it.
    """
    path, local_rank, first = os.fspath(expected_file_path), _rank_on_node(), _first_on_node()
    deadline = time.monotonic() + timeout
    while not first and not os.path.exists(path):
        if time.monotonic() >= deadline:
            raise ElasticLaunchError(
                f"Local rank {local_rank} waited {timeout:g} s for {path}, and local rank 0 has not made it.",
                "See what local rank 0 says; a long download may need a longer timeout=.",
            )
        time.sleep(_POLL)
    yield
    if first and not os.path.exists(path):
        raise ElasticLaunchError(
            f"Local rank 0 has not made {path}, and the others of its node wait for it.",
            "Make the file in the body, or name the one that it makes.",
        )


def get_node_signal_file_name(rng: random.Random | None = None) -> str:
    """Return the name of a file with which the ranks of this node wait for each other. Call it on all ranks.

    All ranks get the same random part, so that no file of an earlier wait has this name. The name also has the node's
    rank: nodes that share a directory use separate files.

    Args:
        rng: source of the random part; only the one of rank 0 is used.
    """
    drawn = "".join((rng or random.Random()).choices(string.ascii_letters + string.digits, k=_NAME_LENGTH))
    if _joined("get_node_signal_file_name"):
        letters = torch.tensor(list(drawn.encode()), dtype=torch.uint8, device=_device())
        distributed.broadcast(letters, src=0)
        drawn = bytes(letters.tolist()).decode()
    return f"._signal_file_node{get_node_rank()}_{drawn}"


def write_signal_file(signal_file_name: str, dir_path: str | os.PathLike[str] | None = None) -> str:
    """Make a file on local rank 0, and its directory (None: the working directory); return its path on every rank."""
    return _write_signal(signal_file_name, dir_path, _DONE)


@contextmanager
def busy_wait_for_local_rank_zero(
    dir_path: str | os.PathLike[str] | None = None, *, timeout: float = 3600.0
) -> Iterator[None]:
    """Run the body on all ranks; no rank leaves the context before local rank 0 of each node has finished the body.

    Use it for work of local rank 0, such as an upload, that takes longer than the process group's timeout: the other
    ranks poll for a file, and only then join a barrier.

    Args:
        dir_path: directory in which the file is made and removed again; all ranks of a node must see it. None: the
            working directory.
        timeout: seconds to wait for the file; Composer waits for ever.

    Raises:
        ElasticLaunchError: on a node's other ranks, if the body failed on local rank 0 or does not finish in time.
    """
    name = get_node_signal_file_name()
    try:
        yield
    except (Exception, SystemExit) as error:
        with suppress(OSError):  # the error itself says more
            _write_signal(name, dir_path, f"{type(error).__name__}: {error}")
        raise
    path = write_signal_file(name, dir_path)
    with local_rank_zero_download_and_wait(path, timeout=timeout):
        with open(path, encoding="utf-8", errors="replace") as file:
            said = file.read()
        if said != _DONE:
            raise ElasticLaunchError(
                f"Local rank 0 failed in dist.busy_wait_for_local_rank_zero: {said}",
                "The traceback of local rank 0 tells the cause.",
            )
    barrier()
    if _first_on_node():
        with suppress(FileNotFoundError):
            os.remove(path)


def _rank_on_node() -> int:
    """Return the rank on the node even if every worker's local rank is 0 (``--virtual-local-rank``: one GPU each)."""
    if os.environ.get(ENV_LOCAL_RANK):
        return _place(ENV_LOCAL_RANK)
    return get_local_rank() or hidden_rank_on_node(os.environ)


def _first_on_node() -> bool:
    """Return whether this process has the lowest rank on its node, which need not be 0 in a round of our agents.

    Before a process that was started ahead has a place, it is local rank 0.
    """
    told = os.environ.get(ENV_FIRST_ON_NODE, UNPLACED)
    return _rank_on_node() == 0 if told == UNPLACED else told == "1"


def _joined(name: str) -> bool:
    """Return whether there is a process group.

    Raises:
        UsageError: if there are several ranks and no process group.
    """
    if is_initialized():
        return True
    size = get_world_size()
    if size > 1:
        raise UsageError(
            f"dist.{name}: the world has {size} ranks, and this process has not joined their process group.",
            "Call elastic_launch.dist.initialize_dist(), or enter elastic_launch.session(), first.",
        )
    return False


def _variable(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise UsageError(f"{name}={text} in the environment is not a rank or a size.", "Give a number.")
    return int(text) if text else None


def _place(name: str, alone: int = 0) -> int:
    """Read a variable that may be missing only in a world of one process."""
    value = _variable(name)
    if value is not None:
        return value
    # A default of 0 would make every process the first of its node.
    size = get_world_size()
    if size > 1:
        raise UsageError(
            f"The environment describes a world of {size} ranks without {name}.",
            f"Start the script by elastic-launch or torchrun, or set {name}.",
        )
    return alone


def _agreed(name: str, joined: int) -> int:
    value = _variable(name)
    if value not in (None, joined):
        raise UsageError(
            f"{name}={value} in the environment, but the process group that was joined says {joined}.",
            "Join the group that the launcher describes, or unset the variable.",
        )
    return joined


def _write_signal(name: str, directory: str | os.PathLike[str] | None, text: str) -> str:
    path = os.path.join(os.getcwd() if directory is None else directory, name)
    if _first_on_node():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.new", "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(f"{path}.new", path)  # never visible half-written
    return path


def _kind(device: str | torch.device | None) -> str | None:
    """Return torch's name for a device type; None if any device will do."""
    if device is None:
        return None
    name = str(device).partition(":")[0].lower()
    if name not in _DEVICES:
        raise UsageError(f"initialize_dist({str(device)!r}): no backend for such a device.", "Ask for 'cpu' or 'gpu'.")
    return _DEVICES[name]


def _leave_at_exit(joined_by: int) -> None:
    # Not in a forked child, which does not own the group; and not after an error, when other ranks may not get here.
    if os.getpid() == joined_by and getattr(sys, "last_value", None) is None:
        leave()


def _raise_if_one_failed(error: BaseException | None) -> None:
    """Raise on all ranks if any rank passed an error, naming the first such rank.

    The error's text is sent as bytes in a tensor, so that no pickle has to be trusted.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    device = _device()
    first = torch.tensor([size if error is None else rank], device=device)
    distributed.all_reduce(first, op=distributed.ReduceOp.MIN)
    failed = int(first)
    if failed == size:
        return
    reason = f"{type(error).__name__}: {error}".encode(errors="replace")[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
    told = torch.tensor([*reason], dtype=torch.uint8, device=device)
    distributed.broadcast(told, src=failed)
    text = bytes(told.tolist()).rstrip(b"\0").decode(errors="ignore")
    raise ElasticLaunchError(
        f"Rank {failed}, which was to run first, failed in dist.run_local_rank_zero_first: {text}",
        f"The traceback of rank {failed} tells the cause.",
    )


def _device() -> str:
    """Return the device for this module's own small tensors."""
    return "cpu" if "cpu:" in distributed.get_backend_config() else "cuda"
