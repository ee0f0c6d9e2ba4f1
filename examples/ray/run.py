"""Run elastic-launch on a Ray cluster: one agent in each of several tasks. What follows `--` is for elastic-launch.

    python examples/ray/run.py --agents 4 --gpus 8 -- --nnodes 2:4 --nproc gpu train.py --epochs 10

Each agent that starts joins the run. If its node or process is lost, Ray starts it again, on any node with room for it.
The first agent hosts the run, and stays on its node. If that node is lost, everything starts again on the others, from
the newest checkpoint; not so with `--rdzv-backend etcd` and its endpoint, where no agent is special.
"""

import argparse
import os
import secrets
import socket
import subprocess
import sys

import ray
from ray.exceptions import TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

AGAIN = 1000
"""How often one agent may be started again."""

LEAVE = 30
"""Seconds that the other agents have to end when the run is over. The first agent leaves last if it hosts the run."""


@ray.remote
def find_host() -> tuple[str, str]:
    """Return a node with room for an agent, and an endpoint there."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return ray.get_runtime_context().get_node_id(), f"{ray.util.get_node_ip_address()}:{port}"


@ray.remote(max_retries=AGAIN, retry_exceptions=[ChildProcessError])
def agent(arguments: list[str], directory: str, token: str) -> int:
    """Run an agent, and return its exit code."""
    # It leaves the run when the task's process ends: Ray then starts another one.
    command = ["setpriv", "--pdeathsig", "TERM", "--", "elastic-launch", *arguments]
    code = subprocess.run(command, cwd=directory, env={**os.environ, "ELASTIC_LAUNCH_TOKEN": token}).returncode
    if code < 0:
        raise ChildProcessError(f"the agent was ended by signal {-code}")
    return code


def run(agents: int, resources: dict[str, float], arguments: list[str]) -> int:
    """Run the agents until the run is over, and return its exit code.

    Raises:
        TaskUnschedulableError: if the node of the first one is lost, which hosts the run.
    """
    given = any(argument.startswith(("--rdzv-endpoint", "--rdzv_endpoint")) for argument in arguments)
    first = "SPREAD"
    if not given:
        node, endpoint = ray.get(find_host.options(**resources, scheduling_strategy="SPREAD").remote())
        first = NodeAffinitySchedulingStrategy(node, soft=False)
        run_id = ray.get_runtime_context().get_job_id()
        arguments = ["--rdzv-endpoint", endpoint, "--rdzv-id", run_id, *arguments]
    token = os.environ.get("ELASTIC_LAUNCH_TOKEN") or secrets.token_hex(32)
    where = [first, *["SPREAD"] * (agents - 1)]
    tasks = [
        agent.options(**resources, scheduling_strategy=strategy).remote(arguments, os.getcwd(), token)
        for strategy in where
    ]
    waiting, code = tasks, 0
    try:
        while waiting:
            (ended,), waiting = ray.wait(waiting)
            code = ray.get(ended)
            if code == 0 or (ended == tasks[0] and not given):
                break  # others may still wait for room
        if given and waiting:
            ray.wait(waiting, num_returns=len(waiting), timeout=LEAVE)
        return code
    finally:
        for task in ray.wait(tasks, num_returns=agents, timeout=0)[1]:
            ray.cancel(task, force=True)  # its agent leaves the run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, required=True, help="how many, at the most")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of each agent")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each agent")
    parser.add_argument("arguments", nargs="+", help="of elastic-launch")
    args = parser.parse_args()
    ray.init()
    while True:
        try:
            return run(args.agents, {"num_cpus": args.cpus, "num_gpus": args.gpus}, args.arguments)
        except TaskUnschedulableError as error:
            print(f"The first agent's node is lost, so all agents start again: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
