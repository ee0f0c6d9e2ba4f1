"""torchrun's options, one by one: their effect on a real run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import textwrap
from functools import partial
from pathlib import Path

import pytest
from harness import LOOP, SCRIPTS, Job, alive, round_of, wait_for

SIGNALLED = str(SCRIPTS / "signalled.py")


def begun(job: Job, workers: int) -> None:
    wait_for("the workers' handlers", lambda: len(list(job.work.glob("begun-*"))) == workers)


def _got(path: Path, name: str) -> bool:
    return path.exists() and name in path.read_text()


# How the script is run.


def test_role_and_virtual_local_rank(job: Job) -> None:
    flags = ["--role", "trainer", "--virtual-local-rank", "--nproc", "2", "--standalone"]
    agent = job.launch(*flags, env={"CUDA_VISIBLE_DEVICES": "5,3"})
    env = [worker["env"] for worker in job.world(2)]
    job.finish()
    assert agent.wait() == 0
    assert {e["ROLE_NAME"] for e in env} == {"trainer"}
    assert [(e["LOCAL_RANK"], e["CUDA_VISIBLE_DEVICES"]) for e in env] == [("0", "5"), ("0", "3")]
    assert [e["ELASTIC_LAUNCH_LOCAL_RANK"] for e in env] == ["0", "1"]


def test_run_path_runs_a_file_by_runpy_with_its_arguments(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "told.py"
    script.write_text("import sys; print('told', sys.argv, __name__, sys.path[0], flush=True)")
    agent = job.launch("--run-path", command=[str(script), "a b", "--nproc"], cwd=tmp_path.parent)
    assert agent.wait() == 0
    assert f"told {[str(script), 'a b', '--nproc']} __main__ " in agent.output
    assert f"__main__ {tmp_path}\n" not in agent.output


@pytest.mark.slow
def test_a_module(job: Job, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text("import sys; print('told', sys.argv[1:], __package__, flush=True)")
    agent = job.launch("-m", command=["told", "-m"], cwd=tmp_path)
    assert agent.wait() == 0
    assert "told ['-m'] \n" in agent.output


def test_a_program_and_its_local_rank(job: Job) -> None:
    program = ["sh", "-c", "echo told $0 $RANK", "${local_rank}"]
    agent = job.launch("--no-python", "--nproc", "2", command=program)
    assert agent.wait() == 0
    assert {"told 0 0", "told 1 1"} <= set(agent.output.splitlines())


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this host may have what is asked for")
def test_numa_binding_without_a_gpu_is_refused_before_anything_starts(job: Job) -> None:
    agent = job.launch("--numa-binding", "node")
    assert agent.wait() == 2
    assert "--numa-binding node is not possible for local rank 0" in agent.output
    assert "Traceback" not in agent.output
    assert not job.started()


@pytest.mark.gpu
@pytest.mark.skipif(
    shutil.which("nvidia-smi") is None or shutil.which("numactl") is None, reason="needs a GPU, nvidia-smi and numactl"
)
def test_numa_binding_binds_a_worker_to_cpus_of_its_gpu(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "told.py"
    script.write_text("import os; print('told', sorted(os.sched_getaffinity(0)), flush=True)")
    agent = job.launch("--numa-binding", "exclusive", command=[str(script)])
    assert agent.wait() == 0
    assert "told [" in agent.output


@pytest.mark.slow
def test_local_addr_is_where_the_workers_meet(job: Job) -> None:
    agent = job.launch("--standalone", "--local-addr", "127.0.0.7")
    assert job.world(1)[0]["env"]["MASTER_ADDR"] == "127.0.0.7"
    job.finish()
    assert agent.wait() == 0


# Torch's events.


def test_the_event_log_handler_gets_rounds_and_the_ends_of_workers_and_agent(job: Job) -> None:
    agent = job.launch("--standalone", "--event-log-handler", "console", "--max-restarts", "1", "--rdzv-id", "abc")
    os.kill(job.world(1)[0]["pid"], signal.SIGKILL)
    job.world(1, after=1)
    job.finish()
    assert agent.wait() == 0
    told = [json.loads(line) for line in agent.output.splitlines() if '{"name"' in line]
    orders = [event["metadata"]["metadata"] for event in told if event["name"] == "elastic_launch.order_received"]
    assert [json.loads(order)["order"] for order in orders] == ["form", "break", "form", "end"]
    found = [event for event in told if event["name"].startswith("torchelastic.")]
    assert [(event["source"], event["metadata"]["state"]) for event in found] == [
        ("WORKER", "FAILED"),
        ("WORKER", "SUCCEEDED"),
        ("AGENT", "SUCCEEDED"),
    ]
    assert {event["metadata"]["run_id"] for event in found} == {"abc"}
    assert found[2]["metadata"]["agent_restarts"] == 1


def test_a_handler_that_torch_does_not_know_is_refused(job: Job) -> None:
    agent = job.launch("--standalone", "--event-log-handler", "consle")
    assert agent.wait() == 2
    assert "--event-log-handler consle is not one that torch knows" in agent.output


# Signals.


def test_forwarded_signals_reach_the_workers_and_end_nothing(job: Job) -> None:
    agent = job.launch("--standalone", "--nproc", "2", command=[SIGNALLED, str(job.work)])
    begun(job, 2)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        agent.signal(number)
        for rank in (0, 1):
            wait_for(f"{number} at {rank}", partial(_got, job.work / f"got-{rank}", number.name))
    job.finish()
    assert agent.wait() == 0
    assert len(job.events("round_formed")) == 1


def test_a_worker_that_a_signal_would_end_does_not_get_it(job: Job) -> None:
    agent = job.launch("--standalone", command=[SIGNALLED, str(job.work), "deaf"])
    begun(job, 1)
    agent.signal(signal.SIGUSR1)
    agent.says("SIGUSR1 is not forwarded to rank 0")
    agent.signal(signal.SIGUSR1)
    job.finish()
    assert agent.wait() == 0
    assert agent.output.count("is not forwarded to rank") == 1


def test_a_signal_to_handle_makes_the_node_leave_and_others_have_their_default_action(job: Job) -> None:
    agent = job.launch("--standalone", "--signals-to-handle", "SIGUSR1")
    job.world(1)
    agent.signal(signal.SIGUSR1)
    assert agent.wait() == 128 + signal.SIGUSR1
    assert "stopped by SIGUSR1" in agent.output
    agent = job.launch("--standalone", "--signals-to-handle", "SIGUSR1")
    wait_for("its worker", lambda: len(job.started()) == 2)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == -signal.SIGTERM


@pytest.mark.slow
def test_the_shutdown_timeout_holds_on_restarts(job: Job) -> None:
    """torchrun always takes 30 s there."""
    flags = ["--standalone", "--nproc", "2", "--shutdown-timeout", "0.2"]
    agent = job.launch(*flags, script_flags=["--ignore-term"])
    first = job.world(2)
    os.kill(first[0]["pid"], signal.SIGKILL)
    job.world(2, after=1, timeout=20)
    job.finish()
    assert agent.wait() == 0
    stopped = [event for event in job.events("worker_exited") if event["stopped"]]
    assert [(event["pid"], event["exit_code"]) for event in stopped] == [(first[1]["pid"], -signal.SIGKILL)]


# Ranks.


@pytest.mark.slow
def test_node_rank_orders_ranks_on_c10d(job: Job) -> None:
    host = job.node("a", "--node-rank", "1", nnodes="2")
    host.says("hosts the run")
    other = job.node("b", "--node-rank", "0", nnodes="2", nproc=2)
    workers = job.world(3)
    assert [worker["env"]["LOCAL_WORLD_SIZE"] for worker in workers] == ["2", "2", "1"]
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)


# Third-party handlers.

HANDLER = '''
import sys
from torch.distributed import TCPStore, PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler, RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry,
)
from elastic_launch.cli import main as cli


class Alone(RendezvousHandler):
    """One node, whose rounds are counted."""

    def __init__(self, params):
        # One string: Python writes the pieces one by one, and the agent's lines come between.
        print(f"asked {params.endpoint} {params.run_id} {params.config.get('colour')}", flush=True)
        self.params, self.rounds = params, 0

    def get_backend(self): return "alone"
    @property
    def use_agent_store(self): return True
    def is_closed(self): return False
    def set_closed(self): pass
    def num_nodes_waiting(self): return 0
    def get_run_id(self): return self.params.run_id
    def shutdown(self): return True

    def next_rendezvous(self):
        self.rounds += 1
        print(f"round {self.rounds}", flush=True)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo("127.0.0.1", self.store.port))


rendezvous_handler_registry.register("alone", Alone)
sys.exit(cli.main(sys.argv[1:]))
'''


@pytest.mark.parametrize(("restarts", "code"), [("1", 91), pytest.param("0", 7, marks=pytest.mark.soak)])
def test_a_registered_handler_is_run_by_torchs_own_agent(job: Job, tmp_path: Path, restarts: str, code: int) -> None:
    program, script = tmp_path / "mine.py", tmp_path / "fails.py"
    program.write_text(textwrap.dedent(HANDLER))
    script.write_text("import os, sys; print('worker', os.environ['RANK'], sys.argv[1:], flush=True); sys.exit(7)")
    flags = ["--rdzv-backend", "alone", "--rdzv-endpoint", "somewhere", "--rdzv-conf", "colour=red"]
    more = ["--max-restarts", restarts, "--monitor-interval", "0.05", "--tee", "3", str(script), "--x"]
    agent = job.program([str(program), *flags, "--rdzv-id", "r7", "--log-dir", str(job.logs), *more])
    assert agent.wait(60) == code
    assert "asked somewhere r7 red" in agent.output
    assert agent.output.count("[default0]:worker 0 ['--x']") == agent.output.count("round ") == int(restarts) + 1
    assert "torch's own agent runs the workers, without drains" in agent.output
    assert "has no effect" not in agent.output


def test_a_signal_ends_torchs_own_agent_with_its_number(job: Job, tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(textwrap.dedent(HANDLER))
    command = [str(program), "--rdzv-backend", "alone", "--log-dir", str(job.logs), LOOP, str(job.work)]
    agent = job.program(command)
    worker = wait_for("its worker", job.started)[0]
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
    assert "stopped by SIGTERM" in agent.output
    assert "Traceback" not in agent.output
    assert not alive(worker["pid"])


# Called from Python.


def test_main_can_be_called(job: Job, tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(
        "import sys\nfrom elastic_launch.config import torch_options\nfrom elastic_launch.cli.main import main\n"
        "torch_options.NEWEST_TORCH = (2, 1)  # for the line that a torch which is newer gets\n"
        "print('code', main(sys.argv[1:]))\n"
    )
    agent = job.program([str(program), "--standalone", "--log-dir", str(job.logs), "-n", "2", LOOP, str(job.work)])
    assert [round_of(worker) for worker in job.world(2)] == [1, 1]
    job.finish()
    assert agent.wait() == 0
    assert "code 0" in agent.output.splitlines()
    assert agent.output.count("is newer than 2.1, the newest that this version of elastic-launch was tested with") == 1
