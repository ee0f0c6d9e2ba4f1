"""Exchanges with other ranks: messages, and states as JSON and raw tensors, never as a pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch.shared_progress import Activity
from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.format.dtypes import bytes_of, flat_bytes, unexpanded
from elastic_launch.training.link import AgentLink
from elastic_launch.training.live.waits import on_host, wait_for
from elastic_launch.training.ranks.mesh import ALL, RankGroup
from elastic_launch.training.ranks.world import World

CHUNK = 64 * 2**20
"""Bytes of a tensor that are sent at once: what has arrived is reported."""

SMALL = 64 * 2**10
"""Bytes of a tensor up to which it is sent together with others."""

_NO_AGENT = AgentLink()
_link: ContextVar[AgentLink] = ContextVar("link", default=_NO_AGENT)
"""The connection to the agent of the process that restores a state now."""


@contextmanager
def telling(link: AgentLink) -> Iterator[None]:
    """Within this context, a state is restored: the agent knows when that is an exchange with other ranks."""
    token = _link.set(link)
    try:
        with link.doing(Activity.RESTORE):
            yield
    finally:
        _link.reset(token)


def exchanging() -> AbstractContextManager[None]:
    """Within this context, this process only waits for other ranks, or sends to them and receives from them."""
    return _link.get().doing(Activity.FORMING)


_ELSEWHERE = (
    "elastic_launch.snapshot.format.",  # a state is sent tensor by tensor, as it is decoded
    "contextlib",
    "torch.utils._contextlib",  # no_grad() as a decorator
    "torch.distributed.",
    # Gradients are exchanged within the backward pass.
    "torch._tensor",
    "torch.autograd",
    "torch.nn.modules._functions",  # SyncBatchNorm
    "torch.utils.checkpoint",
    # DTensor's exchanges are custom operators.
    "torch._ops",
    "torch._library.",
)


def is_of_exchange(error: BaseException) -> bool:
    """Whether an error that the library caught was raised by an exchange of its own.

    The traceback of an error that a script raises, in a callback for example, has a frame of the script's code. The
    message cannot tell: a script may raise an error with the same words.
    """
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    return all(name.startswith(("elastic_launch.training.", *_ELSEWHERE)) for name in modules)


def numbers_of_all(world: World, numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return the numbers of all ranks, by rank; called by all ranks with equally many."""
    if world.world_size == 1:
        return [[*numbers]]
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    gathered = [torch.zeros_like(mine) for _ in range(world.world_size)]
    with exchanging():
        on_host(dist.all_gather, gathered, mine, group=group)
    return [entry.tolist() for entry in gathered]


def send_bytes(data: bytes, target: int) -> None:
    """Send a message to a rank that calls :func:`receive_bytes`."""
    with exchanging():
        wait_for(dist.isend(torch.tensor([len(data)], device="cpu"), dst=target))
        if data:
            wait_for(dist.isend(torch.frombuffer(bytearray(data), dtype=torch.uint8), dst=target))


def receive_bytes(source: int, timeout: float | None = None) -> bytes:
    """Receive a message from a rank.

    Raises:
        RuntimeError: if that rank is gone, or nothing has come for so many seconds.
    """

    def receive(target: Tensor) -> Tensor:
        wait_for(dist.irecv(target, src=source), timedelta(seconds=timeout or 0))
        return target

    with exchanging():
        size = int(receive(torch.zeros(1, dtype=torch.int64, device="cpu")))
        return bytes(receive(torch.empty(size, dtype=torch.uint8, device="cpu")).tolist()) if size else b""


def broadcast_tensors(tensors: Iterable[Tensor], *, by_host: bool = False, among: RankGroup = ALL) -> None:
    """Overwrite tensors on all ranks with those of rank 0.

    Args:
        by_host: whether those on GPUs go through the hosts' memory, by gloo, which fails if it is aborted.
        among: the ranks, if not all; they get those of the first of them.
    """
    for tensor in tensors:
        value = tensor.detach()
        if not value.numel():
            continue
        value = unexpanded(value, value.stride())
        # As bytes: not every backend supports every dtype, and none supports gaps.
        dense = flat_bytes(value)
        if by_host:
            dense = dense.cpu()
        broadcast: Callable[..., object] = partial(on_host, dist.broadcast) if dense.is_cpu else dist.broadcast
        broadcast(dense, src=among.rank(0), group=among.group)
        if dense.data_ptr() != value.data_ptr():
            value.copy_(dense.view(value.dtype).view(value.shape))


def broadcast_state(state: Any, source: int, rank: int, among: RankGroup = ALL) -> Any:
    """Return the source rank's state on all ranks.

    Args:
        state: a state that a checkpoint can hold; used only on the source rank.
        among: the ranks, if not all; ``source`` and ``rank`` are places among them.
    """
    send = partial(on_host, dist.broadcast, src=among.rank(source), group=among.group)
    tensors: dict[str, Tensor] = {}
    header = b""
    if rank == source:
        tensors, rest = tree.encode(state)
        header = json.dumps([described(tensors), rest]).encode()
    with exchanging():
        size = torch.tensor([len(header)], dtype=torch.int64, device="cpu")
        send(size)
        content = torch.frombuffer(bytearray(header.ljust(int(size))), dtype=torch.uint8)
        send(content)
    shapes, rest = json.loads(bytes(bytes_of(content)))
    if rank != source:
        tensors = {
            name: torch.empty(s, dtype=getattr(torch, dtype), device="cpu") for name, (dtype, s) in shapes.items()
        }
    # An optimizer has many tensors of one element, and each message takes its time.
    if small := [flat_bytes(tensors[name].cpu()) for name in shapes if tensors[name].nbytes <= SMALL]:
        together = torch.cat(small)
        in_chunks(together, send)
        for target, part in zip(small, torch.split(together, [*map(len, small)]), strict=True):
            if rank != source:
                target.copy_(part)
    for name in shapes:
        if tensors[name].nbytes > SMALL:
            in_chunks(tensors[name].cpu(), send)
    return state if rank == source else tree.decode(rest, tensors)


def states_of_all(world: World, mine: Any) -> list[Any]:
    """Return the small states of all ranks, which a checkpoint can hold, by rank; called by all ranks."""
    tensors, rest = tree.encode(mine)
    header = json.dumps([described(tensors), rest]).encode()
    content = b"".join(bytes(bytes_of(flat_bytes(tensor.cpu()))) for tensor in tensors.values())
    found = []
    for message in bytes_of_all(world, len(header).to_bytes(8, "big") + header + content):
        begin = 8 + int.from_bytes(message[:8], "big")
        shapes, rest = json.loads(message[8:begin])
        tensors = {}
        for name, (dtype, shape) in shapes.items():
            tensor = tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            begin, part = begin + tensor.nbytes, message[begin : begin + tensor.nbytes]
            if part:
                flat_bytes(tensor).copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))
        found.append(tree.decode(rest, tensors))
    return found


def described(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the dtype and the shape of each tensor, as JSON can hold them."""
    return {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}


def in_chunks(tensor: Tensor, transfer: Callable[[Tensor], object]) -> None:
    """Send a tensor as bytes, or receive a contiguous one, and report each chunk of it."""
    link = _link.get()
    with exchanging():
        for chunk in _chunks(tensor):
            transfer(chunk)
            link.advanced()


def swap(sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]]) -> None:
    """Send tensors to ranks, and receive others from ranks, all at the same time.

    Args:
        sends, receives: tensors in host memory, each with the other rank; several with one rank in the same order on
            both sides.
    """
    link = _link.get()
    dense = [(x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device="cpu"), x, n) for x, n in receives]
    coming = [(chunk, source) for buffer, _, source in dense for chunk in _chunks(buffer)]
    going = [(chunk, target) for tensor, target in sends for chunk in _chunks(tensor)]
    with exchanging():
        # A rank may send to one that sends to it: none waits for the other to receive.
        works = [dist.irecv(chunk, src=source) for chunk, source in coming]
        works += [dist.isend(chunk, dst=target) for chunk, target in going]
        for work in works:
            wait_for(work)
            link.advanced()
    for buffer, tensor, _ in dense:
        if buffer is not tensor:
            tensor.copy_(buffer)


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    content = flat_bytes(tensor)
    return (content[begin : begin + CHUNK] for begin in range(0, content.numel(), CHUNK))


def are_same(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[bool]:
    """Return which numbers of 63 bits are the same on all ranks; called by all ranks with equally many."""
    mine = torch.tensor([*numbers, *(~number for number in numbers)], dtype=torch.int64, device="cpu")
    on_host(dist.all_reduce, mine, op=dist.ReduceOp.MAX, group=group)
    most, most_inverted = mine.view(2, -1).tolist()
    # The maximum of the inverted numbers is the inverted minimum.
    return [high == ~inverted for high, inverted in zip(most, most_inverted, strict=True)]


def bytes_of_all(world: World, mine: bytes) -> list[bytes]:
    """Return the messages of all ranks, by rank; called by all ranks."""
    if world.world_size == 1:
        return [mine]
    sizes = [size for (size,) in numbers_of_all(world, [len(mine)])]
    padded = torch.frombuffer(bytearray(mine.ljust(max(1, *sizes))), dtype=torch.uint8)
    gathered = [torch.zeros_like(padded) for _ in sizes]
    with exchanging():
        on_host(dist.all_gather, gathered, padded)
    return [bytes(bytes_of(entry[:size])) for entry, size in zip(gathered, sizes, strict=True)]
