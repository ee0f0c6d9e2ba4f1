"""This process' world, and joining its process group.

Without an agent of this project, RANK, WORLD_SIZE and MASTER_* describe the world (torchrun, srun, by hand). Without
these variables, the world is this one process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from elastic_launch.contract import ENV_FIRST_ON_NODE, ENV_LOCAL_RANK, ENV_REPLICA_SIZE, ENV_ROUND, ENV_RUN_NUMBER
from elastic_launch.errors import UsageError
from elastic_launch.training.ranks.place import find_place

_log = logging.getLogger(__name__)

ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""What NCCL's watchdog does about a collective that fails: with 0 only this process, by aborting it, ends it."""

_ABORTABLE = {
    ASYNC_ERROR_HANDLING: "0",
    # Once a communicator is aborted on any rank, torch's monitor may end the process, and its watchdog waits for dumps.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
"""Variables that torch reads when it makes a process group; with these NCCL's communicators may be aborted."""

GROUP_TIMEOUT = 600.0
"""Seconds after which a collective fails if not all ranks have joined it."""


@dataclass(frozen=True, slots=True)
class World:
    """A process' ranks, and the sizes of its world.

    Attributes:
        rank, world_size: among all processes.
        local_rank, local_world_size: among the processes of this node.
        node_rank: rank of this node.
        round: number of the round under an agent of this project, else 0.
        run: number of the run under an agent of this project, else empty.
        alone: whether there is no launcher: one process without a process group.
        one_gpu: whether this process sees only its own GPU.
        first_on_node: whether ``local_rank`` is the lowest on this node in the round; it need not be 0.
        placed: whether ``local_rank`` is known, not just assumed to be 0.
        tensor: number of consecutive ranks that share micro-batches, see :meth:`elastic_launch.Run.mesh`.
        replica_size: processes of a replica, which have consecutive ranks; see ``--replica-size``.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    nodes: int = field(default=1, kw_only=True)
    round: int = 0
    run: str = field(default="", kw_only=True)
    restarts: int = 0
    alone: bool = True
    one_gpu: bool = False
    first_on_node: bool = True
    placed: bool = True
    tensor: int = 1
    replica_size: int = 1

    @property
    def data_size(self) -> int:
        """How many ranks, or groups of ranks that share them, have micro-batches of their own."""
        return self.world_size // self.tensor

    @property
    def data_rank(self) -> int:
        """This rank's number among those that have micro-batches of their own, or that of the ranks that share them."""
        return self.rank // self.tensor

    @property
    def speaks(self) -> bool:
        """Whether this is the first of the ranks that share micro-batches, which tells the others what came out."""
        return self.rank % self.tensor == 0

    @property
    def replica(self) -> int:
        """Number of this process' replica, from 0."""
        return self.rank // self.replica_size

    @property
    def replica_rank(self) -> int:
        """Rank of this process in its replica, from 0."""
        return self.rank % self.replica_size

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self.world_size // self.replica_size

    @staticmethod
    def of(environ: Mapping[str, str]) -> World:
        """Read the world from a worker's environment."""
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if not environ.get(name)]
        if len(missing) == len(needed) or missing == ["RANK", "WORLD_SIZE"]:
            if len(missing) < len(needed) and (several := _tasks(environ)):
                raise UsageError(
                    f"This is one of several tasks ({several}) with MASTER_ADDR and MASTER_PORT, but without RANK and "
                    "WORLD_SIZE.",
                    "Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for each task; or unset MASTER_ADDR and "
                    "MASTER_PORT, and each trains alone.",
                )
            return World()
        if missing:
            raise UsageError(
                f"The environment describes a world without {', '.join(missing)}.",
                "Start the script by elastic-launch or torchrun, or set all of " + ", ".join(needed) + ".",
            )

        number = partial(_number, environ)
        rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
        if rank >= world_size:
            raise UsageError(f"RANK={rank} is not one of the {world_size} ranks of WORLD_SIZE.", "They start at 0.")
        local_rank = number(ENV_LOCAL_RANK, number("LOCAL_RANK", number("SLURM_LOCALID", 0)))
        local_rank = local_rank or hidden_rank_on_node(environ)
        return World(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            first_on_node=number(ENV_FIRST_ON_NODE, int(local_rank == 0)) == 1,
            one_gpu=ENV_LOCAL_RANK in environ or (ENV_FIRST_ON_NODE not in environ and _has_own_gpu(environ)),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            node_rank=number("GROUP_RANK", number("NODE_RANK", 0)),
            nodes=number("GROUP_WORLD_SIZE", 1),
            round=number(ENV_ROUND, 0),
            run=environ.get(ENV_RUN_NUMBER, ""),
            restarts=number("TORCHELASTIC_RESTART_COUNT", 0),
            alone=False,
            placed=world_size == 1 or bool(environ.get("LOCAL_RANK") or environ.get("SLURM_LOCALID")),
            replica_size=max(1, number(ENV_REPLICA_SIZE, 1)),
        )

    def device(self) -> torch.device:
        """Return this rank's GPU if each local rank can have one of its own, else the CPU."""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gpus and not self.placed:
            raise UsageError(
                f"Rank {self.rank} of {self.world_size} cannot tell which GPU is its own: LOCAL_RANK is not set.",
                "Set LOCAL_RANK and LOCAL_WORLD_SIZE for each process, as elastic-launch and torchrun do.",
            )
        if gpus == 1 and self.one_gpu:
            return torch.device("cuda", 0)
        # A node may take part with some of its workers only: each keeps the GPU of its local rank.
        if gpus >= max(self.local_world_size, self.local_rank + 1):
            return torch.device("cuda", self.local_rank)
        # Rank 0 of the node has taken a GPU, as it knows of no other rank there.
        if gpus and self.local_rank >= self.local_world_size and not self.run:
            raise UsageError(
                f"Rank {self.rank} has local rank {self.local_rank}, but sees {gpus} GPU(s), and LOCAL_WORLD_SIZE="
                f"{self.local_world_size} does not tell how many processes share them.",
                "Set LOCAL_WORLD_SIZE for each process; CUDA_VISIBLE_DEVICES, too, if each has a GPU of its own.",
            )
        if gpus and self.first_on_node:
            _log.warning(
                "training on the CPU: this node has %d workers and %d GPU(s); start at most one worker per GPU",
                self.local_world_size,
                gpus,
            )
        return torch.device("cpu")


def hidden_rank_on_node(environ: Mapping[str, str]) -> int:
    """Return the rank on the node where torchrun tells each of its workers 0 (``--virtual-local-rank``); else 0."""
    if environ.get("LOCAL_RANK") != "0" or ENV_FIRST_ON_NODE in environ or not environ.get("GROUP_RANK"):
        return 0
    rank, size = _number(environ, "RANK", 0), max(1, _number(environ, "LOCAL_WORLD_SIZE", 1))
    node, local_rank = divmod(rank, size)
    # Where nodes have different numbers of workers, the first rank of one need not be a multiple of its own number.
    same = _number(environ, "WORLD_SIZE", 1) == size * _number(environ, "GROUP_WORLD_SIZE", 1)
    return local_rank if same and node == _number(environ, "GROUP_RANK", 0) else 0


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.strip().isdecimal():
        raise UsageError(f"{name}={text} in the environment is not a rank or a size.", "Give a number.")
    return int(text)


def _has_own_gpu(environ: Mapping[str, str]) -> bool:
    """Whether another launcher has given this process one GPU, rather than all processes of the node theirs."""
    if any(_is_one(environ.get(name, "")) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")):
        return True
    if environ.get("LOCAL_RANK"):
        return False  # not a task of srun, but a process of one
    per_task = environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]  # a type of GPU may come first
    return per_task == "1" or "," in environ.get("SLURM_STEP_GPUS", "")


def _tasks(environ: Mapping[str, str]) -> str:
    """Return the variable by which srun or mpirun says that this is one of several tasks; "" if it is not."""
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    # A batch job's script has variables of tasks that do not run it; its step has no number, or a reserved one.
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < 0xFFFF_FF00 and environ.get("SLURM_PROCID"):
        names.append("SLURM_STEP_NUM_TASKS")
    sizes = {name: environ.get(name, "") for name in names}
    return next((f"{name}={size}" for name, size in sizes.items() if size.isdecimal() and int(size) > 1), "")


def _is_one(devices: str) -> bool:
    return bool(devices.strip()) and "," not in devices


def join(world: World, timeout: float = GROUP_TIMEOUT, *, abortable: bool = False) -> torch.device:
    """Join the world's process group and return the device to train on.

    Args:
        abortable: whether this process may abort NCCL's communicators, and go on.
    """
    device = _use(world.device())
    if world.alone and (several := _tasks(os.environ)):
        _log.warning("each of several tasks (%s) trains alone: RANK, WORLD_SIZE and MASTER_* are not set", several)
    if dist.is_initialized():
        backends = dist.get_backend_config()
        if "cpu:" not in backends:
            raise UsageError(
                f"The process group that this process is in already has the backends {backends}, none for the CPU.",
                'Leave joining to el.session(), or make the group with "cpu:gloo,cuda:nccl".',
            )
    elif not world.alone:
        if _left and _left == _store_of_agent():
            raise UsageError(
                "This process has left the run already, with its first session, and cannot join it again.",
                "Put all trainings into one session, each with its own checkpoint directory.",
            )
        if abortable and device.type == "cuda":
            if can_abort():
                os.environ.update(_ABORTABLE)
            else:
                _log.warning(
                    "this process ends with its round: by %s, TORCH_DISTRIBUTED_DEBUG or TORCH_NCCL_DESYNC_DEBUG "
                    "torch ends it if the communicator of another one is aborted",
                    ASYNC_ERROR_HANDLING,
                )
        # gloo exchanges control values, which live on the CPU.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    return device


def can_abort() -> bool:
    """Whether the user's variables let this process abort NCCL's communicators, and go on."""
    # Either of these makes torch's watchdog end the process, for any value of the third variable.
    watches = os.environ.get("TORCH_NCCL_DESYNC_DEBUG", "0") not in ("", "0")
    detail = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    return os.environ.get(ASYNC_ERROR_HANDLING, "1") in ("0", "1") and not watches and not detail


_left = ""  # the store of the process group that this process has left

_before: dict[str, str | None] = {}


def before_session() -> Mapping[str, str | None]:
    """The variables that :func:`join` may set, as they were before this process' session; none without one."""
    return _before


@contextmanager
def variables_restored() -> Iterator[None]:
    """On exit, the variables that :func:`join` may set are as before."""
    global _before
    outer, before = _before, {name: os.environ.get(name) for name in _ABORTABLE}
    _before = outer or before
    try:
        yield
    finally:
        _before = outer
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def leave() -> None:
    """Leave the process group. If that is left to the interpreter's exit, the process occasionally aborts."""
    global _left
    if dist.is_initialized():
        dist.destroy_process_group()
        _left = _store_of_agent()


def _store_of_agent() -> str:
    """The address of the store in which a round's processes find each other, if that outlives their groups."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if agents else ""


def environment() -> World:
    """Return this process' world; one that was started ahead waits for its place.

    Raises:
        UsageError: see :meth:`World.of`.
        Drained: if there is no place for this process.
    """
    find_place()
    return World.of(os.environ)


def device_ahead() -> torch.device:
    """Return the device of a process that was started ahead: its local rank is known."""
    one_gpu = ENV_LOCAL_RANK in os.environ
    local_rank, workers = os.environ[ENV_LOCAL_RANK if one_gpu else "LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    world = World(local_rank=int(local_rank), local_world_size=int(workers), one_gpu=one_gpu, first_on_node=False)
    return _use(world.device())


def replica_ahead() -> World:
    """Return the replica of a process that was started ahead, as a world of its own; of rank 0 alone if there is none.

    Rounds have whole replicas of a node's consecutive workers.
    """
    size = int(os.environ.get(ENV_REPLICA_SIZE) or 1)
    own = int(os.environ.get(ENV_LOCAL_RANK) or os.environ["LOCAL_RANK"]) % size
    return World(own, size, own, size, alone=False, replica_size=size)


def _use(device: torch.device) -> torch.device:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
