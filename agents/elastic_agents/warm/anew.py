"""Has an agent's process begin anew as what a warm server is, so that both can come from one: see ``parting``."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from elastic_agents.console import Consoles, announce, configure_logging
from elastic_agents.placing import shared_environment
from elastic_agents.warm.become import BLOCKED
from elastic_agents.warm.parting import Begun, Kept
from elastic_agents.warm.planning import Plan, plan
from elastic_agents.warm.server import entered
from elastic_agents.warm.spying import PER_WORKER
from elastic_launch.config import LaunchConfig
from elastic_launch.notice_sources import claimed

_log = logging.getLogger("elastic_launch.warm")

__all__ = ["begin_anew", "server_environment", "server_settings", "wants_server"]


def wants_server(config: LaunchConfig) -> bool:
    """Whether a node's workers can be forked: they are Python processes like this one."""
    python, *rest = config.command.argv
    if not config.warm or config.foreign is not None or config.options.numa_binding is not None:
        return False
    if config.command.function or config.command.display[0] == "--no-python":
        return False
    return python == sys.executable and rest[0] == "-u"


def begin_anew(config: LaunchConfig) -> Begun | None:
    """Replace this process by one that imports torch for the agent and the server.

    For a process that is here for this launch alone, and has nothing to lose. Signals wait until the agent hears them.

    Returns:
        what it goes on with if that was impossible; None if it is not to be.

    Raises:
        EndpointError: if the port for ``--health-port`` cannot be had.
    """
    if not wants_server(config) or not _is_plain() or not _gains(config):
        return None
    health = None if config.health_port is None else _listener(config)
    heard = {*BLOCKED, *config.signals.leave, *config.signals.forward, *claimed(config.notices)}
    mask = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, heard))
    with contextlib.closing(Consoles()) as consoles:
        configure_logging(config.log_format, node=config.node_id, consoles=consoles, quiet=config.torchrun)
        announce(config)
        if not consoles.flush():  # nobody reads it now; the lines stay until somebody does
            return Begun(mask, health)
    try:
        kept = _kept(config, mask).put()
        try:
            _execute(config, mask, kept, health)
        finally:
            os.close(kept)
    except OSError as error:  # a command that is too long, perhaps
        _log.debug("agent and workers import torch each for themselves: %s", error)
        if health is not None:
            health.set_inheritable(False)
    return Begun(mask, health)


def _is_plain() -> bool:
    """Whether this process could be any: by its interpreter's options, and by what it has loaded.

    One that has imported torch, to count devices, would do so once more, and tell other nodes of this one later.
    """
    first = sys.orig_argv[1] if len(sys.orig_argv) > 1 else "-"
    return "torch" not in sys.modules and (first == "-m" or not first.startswith("-"))


def _gains(config: LaunchConfig) -> bool:
    """Whether torch is what comes first, so that both can have it at once."""
    try:
        mine = os.getcwd() if sys.orig_argv[1] == "-m" else os.path.dirname(sys.orig_argv[1])
    except FileNotFoundError:
        mine = ""
    own = not sys.flags.safe_path and sys.path[0] == mine
    found = plan(server_settings(config), sys.path[1:] if own else sys.path)
    return isinstance(found, Plan) and found.torch_comes_first


def _listener(config: LaunchConfig) -> socket.socket | None:
    from elastic_agents.health import health_listener

    return health_listener(config)


def _kept(config: LaunchConfig, mask: list[int]) -> Kept:
    return Kept(
        config=pickle.dumps(replace(config, token=None)),
        token=config.token.reveal() if config.token else None,
        environ=dict(os.environ),
        path=sys.path,
        argv=sys.argv,
        command=sys.orig_argv,
        name=Path("/proc/self/comm").read_bytes().rstrip(b"\n"),
        mask=mask,
    )


def _execute(config: LaunchConfig, mask: list[int], kept: int, health: socket.socket | None) -> NoReturn:
    """Be another program.

    Raises:
        OSError: if that is impossible.
    """
    health_descriptor = health.fileno() if health is not None else None
    settings = {**server_settings(config), "mask": mask, "kept": kept, "health": health_descriptor}
    env = server_environment(shared_environment(config))
    code = entered("from elastic_agents.warm.parting import part", "part(sys.argv[1])()")
    python, *_ = argv = config.command.argv
    # With blanks to leave room for this process' own command in its place.
    label = "agent and warm server of".ljust(len(" ".join(sys.orig_argv)))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nowhere to write to
            stream.flush()
    if health is not None:
        health.set_inheritable(True)
    os.execve(python, [python, "-u", "-c", code, json.dumps(settings), label, *argv], env)


def server_settings(config: LaunchConfig) -> dict[str, object]:
    """Return what a server is told of a launch, see :func:`~elastic_agents.warm.server.serve_as`."""
    return {
        "argv": config.command.argv,
        "preload": config.preload,
        "without": config.no_preload,
        "restarts": 0,
        "mask": None,
        "log": str(config.run_directory / f"imports-{config.node_id}.log"),
    }


def server_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment without what differs between workers."""
    return {name: value for name, value in env.items() if name not in PER_WORKER}
