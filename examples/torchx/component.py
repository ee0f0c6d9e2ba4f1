"""A TorchX component: elastic-launch in the place of torchrun, one agent in each replica.

torchx run -s local_cwd examples/torchx/component.py:elastic -j 1:2x1 --script train.py -- --epochs 10
"""

# TorchX reads these annotations itself, and understands no other spelling.
# ruff: noqa: UP006, UP035, UP045

import shlex
from typing import Dict, Optional

import torchx
from torchx import specs


def elastic(
    *script_args: str,
    script: str,
    j: str = "1:2x1",
    image: str = torchx.IMAGE,
    name: str = "train",
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,
    port: int = 29400,
    token_file: Optional[str] = None,
    max_retries: int = 0,
    env: Optional[Dict[str, str]] = None,
) -> specs.AppDef:
    """A training on a minimum to a maximum number of replicas, which goes on when one of them is lost.

    Args:
        script_args: arguments of the script
        script: the script, in the image
        j: [{min_nnodes}:]{nnodes}x{nproc_per_node}
        image: the image, with elastic-launch in it
        name: the name of the app
        h: a registered named resource, instead of cpu, gpu and memMB
        cpu: cpus of each replica
        gpu: gpus of each replica
        memMB: memory of each replica in MB
        port: the port at which replica 0 hosts the run
        token_file: a file, in the image or mounted, with the secret by which the replicas authenticate each other
        max_retries: how often the scheduler starts a lost replica again
        env: further variables of the replicas
    """
    if j.count("x") != 1:
        raise ValueError(f"j must be like 4x8 or 2:4x8, not {j!r}")
    nodes, workers = j.split("x")
    least, _, most = nodes.rpartition(":")
    options = ["--nnodes", f"{least or most}:{most}", "--nproc", workers, "--rdzv-id", specs.macros.app_id]
    if token_file:
        options += ["--token-file", token_file]
    # Schedulers put the name of the first replica's host into a variable; there, it is `localhost`, or not set.
    find_host = f'host="$${{{specs.macros.rank0_env}:-localhost}}"; [[ $host != localhost ]] || host=$(hostname)'
    agent = f'exec elastic-launch --rdzv-endpoint "$host:{port}" {shlex.join([*options, script, *script_args])}'
    return specs.AppDef(
        name=name,
        roles=[
            specs.Role(
                name="node",
                image=image,
                entrypoint="bash",
                args=["-c", f"{find_host}; {agent}"],
                env=env or {},
                num_replicas=int(most),
                min_replicas=int(least or most),
                max_retries=max_retries,
                # Only the lost replica: the others train on.
                retry_policy=specs.RetryPolicy.REPLICA,
                resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
                port_map={"rendezvous": port},
            )
        ],
    )
