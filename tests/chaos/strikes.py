"""How faults are carried out; each returns whether it has happened."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harness import alive, freeze, tree

if TYPE_CHECKING:
    from chaos.plan import Fault
    from chaos.scene import Scene

__all__ = ["STRIKES"]

GUARD = b"guard_process"


def _send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _kill_worker(scene: Scene, fault: Fault) -> bool:
    return (pid := scene.worker(fault)) is not None and _send(pid, signal.SIGKILL)


def _two_kills(scene: Scene, fault: Fault) -> bool:
    """Kill two workers of the run, some 50 ms apart."""
    pids = scene.workers()
    if not pids:
        return False
    first = pids[fault.worker % len(pids)]
    second = pids[(fault.worker + 1) % len(pids)]
    done = _send(first, signal.SIGKILL)
    time.sleep(min(fault.seconds, 0.5) / 10)
    _send(second, signal.SIGKILL)
    return done


def _term_worker(scene: Scene, fault: Fault) -> bool:
    return (pid := scene.worker(fault)) is not None and _send(pid, signal.SIGTERM)


def _freeze_worker(scene: Scene, fault: Fault) -> bool:
    pid = scene.worker(fault)
    if pid is None or not _send(pid, signal.SIGSTOP):
        return False
    scene.later(fault.seconds, lambda: _send(pid, signal.SIGCONT))
    return True


def _kill_agent(scene: Scene, fault: Fault) -> bool:
    agent = scene.agent(fault)
    if agent is None:
        return False
    agent.kill()
    scene.gone(agent, {-signal.SIGKILL})
    scene.later(fault.seconds, lambda: scene.start(agent.name))
    return True


def _term_agent(scene: Scene, fault: Fault) -> bool:
    agent = scene.agent(fault)
    if agent is None:
        return False
    agent.signal(signal.SIGTERM)
    # If the run ended meanwhile, it has ended for it, too.
    scene.gone(agent, {128 + signal.SIGTERM})

    def back() -> None:
        # A supervisor starts it again once it has ended; the host's port is in use until then.
        if agent.process.poll() is None:
            scene.later(0.2, back)
        else:
            scene.start(agent.name)

    scene.later(fault.seconds, back)
    return True


def _freeze_agent(scene: Scene, fault: Fault) -> bool:
    agent = scene.agent(fault)
    if agent is None:
        return False
    pid = agent.process.pid
    freeze(pid)
    scene.later(fault.seconds, lambda: _send(pid, signal.SIGCONT))
    return True


def _freeze_node(scene: Scene, fault: Fault) -> bool:
    agent = scene.agent(fault)
    if agent is None:
        return False
    standing = agent.freeze()
    scene.later(fault.seconds, lambda: agent.thaw(standing))
    return True


def _kill_guard(scene: Scene, fault: Fault) -> bool:
    return _kill_one(scene, fault, lambda pid: GUARD in _command(pid))


def _kill_helper(scene: Scene, fault: Fault) -> bool:
    """Kill a process of the agent that is neither worker nor guard: warm server, forked ahead, or one that copies."""
    workers = scene.workers()
    return _kill_one(scene, fault, lambda pid: pid not in workers and GUARD not in _command(pid))


def _kill_one(scene: Scene, fault: Fault, wanted: Callable[[int], bool]) -> bool:
    agent = scene.agent(fault)
    if agent is None:
        return False
    found = [pid for pid in tree(agent.process.pid)[1:] if alive(pid) and wanted(pid)]
    return bool(found) and _send(found[fault.worker % len(found)], signal.SIGKILL)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _kill_etcd(scene: Scene, fault: Fault) -> bool:
    member = scene.members[fault.node % len(scene.members)]
    return _disturb(scene, fault, member.name, member.kill, lambda: member.start(scene.cluster))


def _freeze_etcd(scene: Scene, fault: Fault) -> bool:
    member = scene.members[fault.node % len(scene.members)]
    return _disturb(scene, fault, member.name, member.freeze, member.thaw)


def _cut(scene: Scene, fault: Fault) -> bool:
    """Cut a node off from all others, and from etcd."""
    host = scene.hosts["abcd"[fault.node]]
    return _disturb(scene, fault, host.name, host.cut, host.mend)


def _fill_disk(scene: Scene, fault: Fault) -> bool:
    filler = scene.checkpoints / "filler"

    def fill() -> None:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))

    return _disturb(scene, fault, "disk", fill, filler.unlink)


def _disturb(scene: Scene, fault: Fault, what: str, hit: Callable[[], object], mend: Callable[[], object]) -> bool:
    """Put something that the run needs out of service for the fault's time, unless anything else is."""
    if not scene.take(what):
        return False
    hit()

    def back() -> None:
        mend()
        scene.give_back(what)

    scene.later(fault.seconds, back)
    return True


STRIKES: dict[str, Callable[[Scene, Fault], bool]] = {
    "kill worker": _kill_worker,
    "two kills": _two_kills,
    "term worker": _term_worker,
    "freeze worker": _freeze_worker,
    "kill agent": _kill_agent,
    "term agent": _term_agent,
    "freeze agent": _freeze_agent,
    "freeze node": _freeze_node,
    "kill guard": _kill_guard,
    "kill helper": _kill_helper,
    "kill etcd": _kill_etcd,
    "freeze etcd": _freeze_etcd,
    "cut": _cut,
    "fill disk": _fill_disk,
}
