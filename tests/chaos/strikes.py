"""How faults are carried out; each returns whether it has happened."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harness import alive, freeze, tree

if TYPE_CHECKING:
    from harness import Agent

    from chaos.plan import Fault
    from chaos.scene import Scene

__all__ = ["STRIKES", "copier"]

GUARD = b"guard_process"
COPIER = b"snapshots.copying"

LEFT = 30.0
"""Seconds within which the processes of killed agents end; of training in which storage that fails is asked for
anything."""

ASKED = 0.2
"""Seconds between two looks at whether storage that fails was asked for anything."""

WHILE = 2.0
"""Seconds of failing storage within which training that nothing else disturbs must do a step."""


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
    return _kill_this(scene, fault, scene.agent(fault))


def _kill_leader(scene: Scene, fault: Fault) -> bool:
    return _kill_this(scene, fault, scene.leader(fault))


def _kill_tree(scene: Scene, fault: Fault) -> bool:
    """Kill a node's agent with all its processes, so that none of them can remove what they have made."""
    agent = scene.agent(fault)
    if agent is None:
        return False
    for pid in agent.freeze():
        _send(pid, signal.SIGKILL)
    return _kill_this(scene, fault, agent)


def _kill_this(scene: Scene, fault: Fault, agent: Agent | None) -> bool:
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
    begun = bool(agent.output)
    agent.signal(signal.SIGTERM)
    # If the run ended meanwhile, it has ended for it, too. An agent that has just been started handles no signals yet.
    scene.gone(agent, {128 + signal.SIGTERM, *([] if begun else [-signal.SIGTERM])})

    def back() -> None:
        # A supervisor starts it again once it has ended; the host's port is in use until then.
        if agent.process.poll() is None:
            scene.later(0.2, back)
        else:
            scene.start(agent.name)

    scene.later(fault.seconds, back)
    return True


def _notice(scene: Scene, fault: Fault) -> bool:
    """Have a node leave within some seconds, as for a machine that will be preempted."""
    agent = scene.agent(fault)
    if agent is None:
        return False
    notice = scene.notice_of(agent.name)
    notice.with_suffix(".new").write_text(f"{fault.seconds + 0.5:g}")
    notice.with_suffix(".new").rename(notice)
    scene.gone(agent, {128 + signal.SIGTERM})

    def back() -> None:
        if agent.process.poll() is None:
            scene.later(0.2, back)
        else:
            notice.unlink()
            scene.start(agent.name)

    scene.later(fault.seconds, back)
    return True


def _lose_node(scene: Scene, fault: Fault) -> bool:
    """Kill a node that the others can do without, which does not come back."""
    found = [agent for agent in scene.agents() if not scene.needed(agent.name)]
    if not found:
        return False
    agent = found[fault.node % len(found)]
    agent.kill()
    scene.gone(agent, {-signal.SIGKILL})
    return True


def _lose_all(scene: Scene, fault: Fault) -> bool:
    """Kill all agents, and with them all workers and all memory; start them again later."""
    if not scene.take("all nodes"):
        return False
    names = scene.kill_all()
    deadline = time.monotonic() + LEFT
    while scene.processes():
        if time.monotonic() > deadline:
            return False
        scene.wait(0.02)  # those that are frozen end when they are thawed

    def back() -> None:
        scene.give_back("all nodes")
        for name in names:
            scene.start(name)

    scene.later(fault.seconds, back)
    return True


def _tear_checkpoint(scene: Scene, fault: Fault) -> bool:
    """Lose all nodes and, while none runs, cut off or alter the newest checkpoint."""
    if len(scene.whole()) < 2 or not _lose_all(scene, fault):
        return False
    torn, *rest = scene.whole()
    random_ = random.Random(str(fault))
    file = torn / random_.choice(("manifest.json", "state.json", "tensors.safetensors"))
    data = bytearray(file.read_bytes())
    place = random_.randrange(len(data))
    if random_.random() < 0.5:
        del data[place:]
    else:
        data[place] ^= 1 << random_.randrange(8)
    file.write_bytes(data)
    scene.tore(torn, rest[0])
    return True


def _freeze_agent(scene: Scene, fault: Fault) -> bool:
    return _freeze_this(scene, fault, scene.agent(fault))


def _freeze_leader(scene: Scene, fault: Fault) -> bool:
    return _freeze_this(scene, fault, scene.leader(fault))


def _freeze_this(scene: Scene, fault: Fault, agent: Agent | None) -> bool:
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


def _kill_copier(scene: Scene, fault: Fault) -> bool:
    """Kill a process that copies a snapshot to the checkpoints, whichever node's it is."""
    return (pid := copier(scene)) is not None and _send(pid, signal.SIGKILL)


def copier(scene: Scene) -> int | None:
    """A process that copies a snapshot to the checkpoints now; None: none does."""
    for agent in scene.agents():
        for pid in tree(agent.process.pid)[1:]:
            if COPIER in _command(pid) and alive(pid):
                return pid
    return None


def _out_of_memory(scene: Scene, fault: Fault) -> bool:
    """Have the memory of a node's control group run out, so that the kernel kills a worker."""
    agent, pid = scene.agent(fault), scene.worker(fault)
    return agent is not None and pid is not None and scene.groups[agent.name].run_out(pid)


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


def _fail_storage(scene: Scene, fault: Fault) -> bool:
    return _disturb_storage(scene, fault, "EIO" if fault.worker % 2 else "ENOSPC")


def _hang_storage(scene: Scene, fault: Fault) -> bool:
    return _disturb_storage(scene, fault, "hang")


def _disturb_storage(scene: Scene, fault: Fault, how: str) -> bool:
    """Have the storage fail for the fault's time, and until it was asked for anything."""
    storage = scene.storage
    assert storage is not None
    if not scene.take("storage"):
        return False
    storage.fail(how)
    began, steps, quiet = time.monotonic(), scene.step(), scene.trains()
    strikes, trained, last = scene.landed + 1, 0.0, steps

    def back() -> None:
        nonlocal trained, last
        lasted, now = time.monotonic() - began, scene.step()
        # A run that has just been started again asks for nothing until it trains.
        trained, last = trained + (ASKED if now > last else 0.0), now
        if not storage.hit and trained < LEFT:
            scene.later(ASKED, back)
            return
        storage.mend()
        scene.give_back("storage")
        if not storage.hit:
            scene.problem(f"{fault.kind}: nothing was asked of the storage within {LEFT:g} s of training")
        if quiet and lasted > WHILE and scene.landed == strikes and scene.step() == steps:
            scene.problem(f"{fault.kind}: no step within {lasted:.1f} s, though nothing else was disturbed")

    scene.later(fault.seconds, back)
    return True


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
    "kill leader": _kill_leader,
    "kill tree": _kill_tree,
    "term agent": _term_agent,
    "freeze agent": _freeze_agent,
    "freeze leader": _freeze_leader,
    "freeze node": _freeze_node,
    "kill guard": _kill_guard,
    "kill helper": _kill_helper,
    "kill copier": _kill_copier,
    "notice": _notice,
    "lose node": _lose_node,
    "lose all": _lose_all,
    "tear checkpoint": _tear_checkpoint,
    "kill etcd": _kill_etcd,
    "freeze etcd": _freeze_etcd,
    "cut": _cut,
    "fill disk": _fill_disk,
    "fail storage": _fail_storage,
    "hang storage": _hang_storage,
    "out of memory": _out_of_memory,
}
