"""``--http`` of real agents: what Prometheus reads while a worker is killed, and the spans that are sent."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from typing import Any

import pytest
from changes import Changes, ctl
from harness import Job, asked, free_port, wait_for
from otlp_receiver import receiver
from prometheus_client.parser import text_string_to_metric_families

from elastic_launch.faults import FaultPlan


def sample(port: int, name: str, **labels: str) -> float | None:
    """A metric's value; None if there is none with these labels."""
    status, text = asked(f"http://127.0.0.1:{port}/metrics")
    assert status == 200
    for family in text_string_to_metric_families(text + "\n"):
        for found in family.samples:
            if found.name == f"elastic_launch_{name}" and labels.items() <= found.labels.items():
                return found.value
    return None


def test_the_metrics_tell_of_a_killed_worker(job: Job) -> None:
    with receiver() as (address, spans):
        killed_worker(job, {"OTEL_EXPORTER_OTLP_ENDPOINT": address})
    assert {"round 1", "round 2", "start", "run"} <= set(spans)


def killed_worker(job: Job, env: dict[str, str]) -> None:
    port = free_port()
    agent = job.launch("--standalone", "--nproc", "2", "--http", str(port), env=env)
    agent.says(f"a page of this run: http://127.0.0.1:{port}/, with /metrics and /status of this node")
    workers = job.world(2)
    wait_for("a running node", lambda: sample(port, "phase", phase="running") == 1)
    assert sample(port, "world_size") == 2
    os.kill(workers[-1]["pid"], signal.SIGKILL)
    wait_for("a charged restart", lambda: sample(port, "restarts_charged_total", kind="crash") == 1)
    wait_for("the next round", lambda: sample(port, "round") == 2)
    assert sample(port, "rounds_ended_total", how="broken", kind="crash") == 1
    assert sample(port, "worker_failures_total") == 1
    found = json.loads(asked(f"http://127.0.0.1:{port}/status")[1])
    assert (found["round"], found["leads"], found["restarts"]) == (2, True, 1)
    assert asked(f"http://127.0.0.1:{port}/livez")[0] == 200
    job.finish()
    assert agent.wait() == 0


def test_a_restart_is_given_back_while_the_round_trains(job: Job) -> None:
    port, changes = free_port(), Changes(job, step_time=0.05, live=True)
    plan = FaultPlan.fail_at(1, 5)
    flags = "--nproc", "2", "--max-restarts", "2", "--restart-refill", "1", "--http", str(port)
    agent = changes.alone(*flags, plan=plan)
    agent.says("a page of this run: ")
    wait_for("the next round", lambda: sample(port, "round") == 2)
    wait_for("a restart given back", lambda: sample(port, "max_restarts") == 3)
    assert sample(port, "restarts") == 1
    found = json.loads(asked(f"http://127.0.0.1:{port}/status")[1])
    assert (found["round"], found["restarts"], found["max_restarts"]) == (2, 1, 3)
    changes.finish(agent)


def test_a_node_that_waits_has_no_budget_yet(job: Job) -> None:
    """0 of 0 restarts would look like a budget that is used up."""
    port = free_port()
    agent = job.node("a", "--http", str(port), nnodes="2")
    agent.says("a page of this run: ")
    wait_for("a waiting node", lambda: sample(port, "phase", phase="waiting") == 1)
    assert (sample(port, "restarts"), sample(port, "max_restarts")) == (None, None)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143


def test_each_node_shows_all_nodes_as_the_leader_sees_them(job: Job) -> None:
    """Once the leader is gone, the other node says how old its table is."""
    ports = {"a": free_port(), "b": free_port()}
    token = {"ELASTIC_LAUNCH_TOKEN": "a token of sixteen characters"}
    conf = {"a": "is_host=true", "b": "is_host=false"}
    a, b = (
        job.node(name, "--http", str(ports[name]), "--rdzv-conf", conf[name], nnodes="2", env=token) for name in ports
    )
    job.world(2)
    for name in ports:
        nodes = wait_for("workers that run", lambda: running(ports[name]))  # noqa: B023
        assert sorted((x["node_id"], x["workers"]) for x in nodes) == [("a", 1), ("b", 1)]
        assert sorted(x["ranks"] for x in nodes) == [[0, 0], [1, 1]]
        assert all(x["silence"] < 5 for x in nodes)
    page = nodes_shown(ports["b"])
    assert "a (leads)" in page
    assert "1 run" in page
    assert "This is how it was" not in page
    a.signal(signal.SIGKILL)
    wait_for("an old table", lambda: "s ago" in nodes_shown(ports["b"]))
    reason = f"The leader does not answer: Nothing answers at the rendezvous endpoint 127.0.0.1:{job.port}"
    wait_for("a reason", lambda: reason in nodes_shown(ports["b"]))
    assert "a (leads)" in nodes_shown(ports["b"])
    found = roster(ports["b"])
    assert found["age"] > 0
    assert found["problem"]
    b.signal(signal.SIGTERM)
    assert b.wait() == 143


def test_each_node_says_that_the_run_is_parked_after_a_fault(job: Job) -> None:
    ports, changes = {"a": free_port(), "b": free_port()}, Changes(job)
    a, b = (changes.node(name, "--http", str(ports[name]), nnodes="3") for name in ports)
    c = changes.node("c", nnodes="3")
    changes.trains(3)
    c.signal(signal.SIGKILL)
    for name in ports:
        wait_for("a parked run", lambda: state(ports[name]) == "parked")  # noqa: B023
    for agent in (b, a):
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 143


def state(port: int) -> str:
    return str(json.loads(asked(f"http://127.0.0.1:{port}/live")[1])["now"]["state"])


def roster(port: int) -> dict[str, Any]:
    return dict(json.loads(asked(f"http://127.0.0.1:{port}/status")[1])["roster"])


def running(port: int) -> list[dict[str, Any]]:
    """Both nodes, once the workers of both run."""
    found = [x for x in roster(port)["nodes"] or () if (x["state"], x["doing"]) == ("training", "run")]
    return found if len(found) == 2 else []


def nodes_shown(port: int) -> str:
    body = asked(f"http://127.0.0.1:{port}/live")[1]
    return str(json.loads(body)["nodes"])


def test_a_service_or_proxy_is_named(job: Job) -> None:
    port = free_port()
    agent = job.launch("--standalone", "--http", str(port), "--http-host", "train.example.org,Train.default.svc")
    agent.says("a page of this run: ")

    def status(host: str) -> int:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as link:
            link.request("GET", "/status", headers={"Host": host})
            return link.getresponse().status

    assert [status(x) for x in ("train.example.org", "train.default.svc:80", "example.org")] == [200, 200, 421]
    job.finish()
    assert agent.wait() == 0


@pytest.mark.parametrize("code", [0, 137])
def test_all_who_watch_see_the_end_and_then_the_files_tell_it(job: Job, code: int) -> None:
    """By then the workers have ended."""
    port, last = free_port(), dict[str, str]()
    plan = FaultPlan.fail_at(1, 5) if code else None
    changes = Changes(job, step_time=0.05, live=True)
    agent = changes.alone("--nproc", "2", "--max-restarts", "0", "--http", str(port), plan=plan)
    agent.says("a page of this run: ")
    wait_for("a status", lambda: asked(f"http://127.0.0.1:{port}/status")[0] == 200)
    changes.hurry()

    def follow(path: str) -> None:
        with contextlib.suppress(OSError):
            while True:
                last[path] = asked(f"http://127.0.0.1:{port}/{path}")[1]
                time.sleep(0.5)

    threads = [threading.Thread(target=follow, args=(path,)) for path in ("status", "live", "metrics")]
    for thread in threads:
        thread.start()
    assert agent.wait() == code
    for thread in threads:
        thread.join(30)
    status, live = (json.loads(last[path]) for path in ("status", "live"))
    assert (status["phase"], status["end"]["code"], status["end"]["run"]) == ("ended", code, True)
    assert (status["workers"], live["now"]["ended"]) == (0, True)
    assert f"the run has ended with exit code {code}: " in live["now"]["doing"]
    assert f"{code}.0" in next(x for x in last["metrics"].splitlines() if x.startswith("elastic_launch_exit_code"))
    assert live["summary"].split("; restarts")[0] in agent.output
    over = ctl("status", "--log-dir", str(job.logs), "--json")
    assert over.returncode == 1
    told = json.loads(over.stdout)
    assert (told["ended"], told["cause"]) == (code, status["end"]["cause"])
    assert (told["saved"], told["root_cause"]) == (status["end"]["saved"], status["end"]["root_cause"])
    assert bool(told["root_cause"]) == bool(code)
    assert all(line in agent.output for line in [told["saved"], *told["root_cause"].splitlines()])
    report = ctl("report", "--log-dir", str(job.logs)).stdout
    assert all(line in report for line in [told["saved"], *told["root_cause"].splitlines()])


def test_port_0_means_any_free_port(job: Job) -> None:
    agent = job.launch("--standalone", "--http", "0")
    agent.says("a page of this run: ")
    port = int(re.findall(r"http://127\.0\.0\.1:(\d+)/,", agent.output)[0])
    assert asked(f"http://127.0.0.1:{port}/livez")[0] == 200
    job.finish()
    assert agent.wait() == 0


def test_a_port_in_use_ends_the_agent_before_it_begins(job: Job) -> None:
    with socket.create_server(("127.0.0.1", job.port)):
        agent = job.launch("--standalone", "--http", str(job.port))
        assert agent.wait() == 95
    assert f"--http 127.0.0.1:{job.port}: this node cannot listen there: Address already in use" in agent.output
