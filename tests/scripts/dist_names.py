"""A worker of two that uses each name of ``elastic_launch.dist`` and writes what it got, by name, as ``<rank>.json``.

With ``--fail`` local rank 0 raises where it is to run first; the exception is not caught.
"""

import functools
import json
import os
import pathlib
import random
import sys
import time

import torch
from torch import distributed

import elastic_launch as el
from elastic_launch import dist
from elastic_launch.errors import ElasticLaunchError

directory = pathlib.Path(sys.argv[1])
rank = dist.get_global_rank()


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} has not appeared"
        time.sleep(0.01)


def entered(name, context):
    """Whether this rank enters after local rank 0, which leaves only when the other one waits to enter."""
    waiting, made = directory / f"{name}.waiting", directory / f"{name}.made"
    if rank == 1:
        waiting.touch()
    with context:
        late = made.exists()
        if rank == 0:
            wait_for(waiting)
            made.touch()
    return late


def barrier():
    """Whether rank 0 finds after the barrier what rank 1 made before it, once rank 0 was on its way."""
    on_its_way, made = directory / "barrier.on-its-way", directory / "barrier.made"
    if rank == 0:
        on_its_way.touch()
    else:
        wait_for(on_its_way)
        made.touch()
    dist.barrier()
    return made.exists()


def failure(failing=0):
    """What each rank gets if one of the local ranks 0 fails."""
    try:
        with dist.run_local_rank_zero_first():
            if rank == failing:
                raise OSError("no room on the disk")
            return "entered"
    except (OSError, ElasticLaunchError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def failure_elsewhere():
    """As if each rank was alone on its node, and the second one fails."""
    mine = {name: os.environ[name] for name in ("LOCAL_RANK", "ELASTIC_LAUNCH_FIRST_ON_NODE")}
    os.environ.update({"LOCAL_RANK": "0", "ELASTIC_LAUNCH_FIRST_ON_NODE": "1"})
    try:
        return failure(1)
    finally:
        os.environ.update(mine)


def reduced(*operation):
    tensor = torch.tensor([rank + 1, 5])
    returned = dist.all_reduce(tensor, *operation)
    return [tensor.tolist(), returned]


def column(exchange):
    """What a matrix has after an exchange of its first column, which is a view with gaps."""
    whole = torch.full((2, 2), rank + 1)
    exchange(whole[:, :1])
    return whole.tolist()


def broadcast():
    tensor = torch.full((2,), rank)
    dist.broadcast(tensor, src=1)
    return tensor.tolist()


def gathered():
    square = torch.tensor([[0.0, 1.0], [2.0, 3.0]], requires_grad=True).T + 10 * rank
    parts = dist.all_gather(square)
    parts[rank].zero_()
    return {
        "parts of 1": parts[1 - rank].tolist(),
        "mine": square.tolist(),
        "scalars": [x.item() for x in dist.all_gather(torch.tensor(rank))],
        "gradient": parts[0].requires_grad,
    }


def objects(**source):
    items = [rank, {"of": rank}]
    dist.broadcast_object_list(items, **source)
    return items


def waited():
    """Whether this rank leaves after local rank 0 has made something in its body, and what is left of the file."""
    made, inside, signals = directory / "work.made", directory / "work.inside", directory / "signals"
    with dist.busy_wait_for_local_rank_zero(signals):
        if rank == 0:
            wait_for(inside)  # the other one is in its body at the same time
            made.touch()
        else:
            inside.touch()
    late = made.exists()
    dist.barrier()
    return [late, list(signals.iterdir())]


def not_waited():
    """What each rank gets if local rank 0 fails."""
    try:
        with dist.busy_wait_for_local_rank_zero(directory / "failing"):
            if rank == 0:
                raise OSError("no room on the disk" + os.fsdecode(b"\xff"))
    except (OSError, ElasticLaunchError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0].rstrip("?\udcff")


def written():
    path = dist.write_signal_file("signal", directory / "made" / "here")
    if rank == 1:
        wait_for(pathlib.Path(path))
    return [os.path.relpath(path, directory), pathlib.Path(path).read_text()]


def samples(**options):
    return list(dist.get_sampler(list(range(5)), **options))


if "--fail" in sys.argv:
    with el.session(), dist.run_local_rank_zero_first():
        assert rank == 0, "rank 1 entered"
        raise OSError("no room on the disk")

initialized = [dist.is_initialized()]
dist.initialize_dist("cpu", timeout=60)
group = distributed.group.WORLD
initialized.append(dist.is_initialized())
with el.session() as run:
    dist.initialize_dist()
    of_rank_1 = distributed.new_group([1])
    found = {
        "initialize_dist": [distributed.group.WORLD is group, distributed.get_backend(), run.world_size],
        "is_available": dist.is_available(),
        "get_world_size": dist.get_world_size(),
        "get_global_rank": [dist.get_global_rank(), dist.get_global_rank(of_rank_1)],
        "get_local_rank": dist.get_local_rank(),
        "get_local_world_size": dist.get_local_world_size(),
        "get_node_rank": dist.get_node_rank(),
        "barrier": barrier(),
        "all_reduce": [reduced(), reduced("max"), reduced("PRODUCT"), column(dist.all_reduce)],
        "broadcast": [broadcast(), column(functools.partial(dist.broadcast, src=1))],
        "run_local_rank_zero_first": [
            entered("first", dist.run_local_rank_zero_first()),
            failure(),
            failure_elsewhere(),
        ],
        "local_rank_zero_download_and_wait": entered(
            "file", dist.local_rank_zero_download_and_wait(str(directory / "file.made"))
        ),
        "busy_wait_for_local_rank_zero": [waited(), not_waited()],
        "get_node_signal_file_name": dist.get_node_signal_file_name(random.Random(rank)),
        "write_signal_file": written(),
        # After a failure, which must not have brought the ranks' collectives out of step.
        "all_gather": gathered(),
        "all_gather_object": dist.all_gather_object({"rank": rank}),
        "broadcast_object_list": [objects(), objects(src=1)],
        "get_sampler": [
            samples(),
            samples(drop_last=True),
            samples(num_replicas=5, rank=3),
            samples(shuffle=True),
            samples(shuffle=True, seed=1),
        ],
    }
    if rank == 1:
        alone = torch.tensor([7])
        dist.all_reduce(alone, group=of_rank_1)
        found["get_global_rank"].append([alone.item(), len(dist.all_gather(alone, group=of_rank_1))])
initialized.append(dist.is_initialized())
found["is_initialized"] = initialized
(directory / f"{rank}.json").write_text(json.dumps(found))
