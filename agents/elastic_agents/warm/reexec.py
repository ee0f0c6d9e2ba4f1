"""Re-executes an agent's process as one that imports torch for both the agent and the warm server.

After the exec, :mod:`elastic_agents.warm.fork_bootstrap` takes over.
"""

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
from elastic_agents.warm._preload import first_of
from elastic_agents.warm.fork_bootstrap import AgentState, Bootstrap
from elastic_agents.warm.run_script import BLOCKED
from elastic_agents.warm.server import entered, server_environment, server_settings, wants_server
from elastic_agents.workers.placement import shared_environment
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.config.notice_sources import claimed

_log = logging.getLogger("elastic_launch.warm")

AGENT = "elastic_agents.main:resume"
"""The function that continues as the agent after the exec."""


def reexec(config: LaunchConfig) -> Bootstrap | None:
    """Replace this process by one that imports torch for the agent and the server.

    For a process that exists for this launch alone, and has nothing to lose. Signals stay pending until the agent
    handles them.

    Returns:
        what to continue with if the exec was impossible; None if this process is not to be re-executed.

    Raises:
        EndpointError: if the port for ``--health-port`` is unavailable.
    """
    if not wants_server(config) or not _is_plain() or not _gains(config):
        return None
    health = None
    if config.health_port is not None:
        from elastic_agents.probes.health import health_listener

        health = health_listener(config)
    heard = {*BLOCKED, *config.signals.leave, *config.signals.forward, *claimed(config.notices)}
    # Notices stay blocked, in the server and the workers, too; see inbox.withheld.
    mask = sorted({*signal.pthread_sigmask(signal.SIG_BLOCK, heard), *claimed(config.notices)})
    with contextlib.closing(Consoles()) as consoles:
        configure_logging(config.log_format, node=config.node_id, consoles=consoles, quiet=config.torchrun)
        announce(config)
        told = {"form": config.log_format, "node": config.node_id} if _log.isEnabledFor(logging.INFO) else None
        if not consoles.flush():  # the console is not being read; the lines are kept until it is
            return Bootstrap(mask, health)
    try:
        state = _state(config, mask).put()
        try:
            _execute(config, mask, state, health, told)
        finally:
            os.close(state)
    except OSError as error:  # for example, the command is too long
        _log.debug("agent and workers import torch each for themselves: %s", error)
        if health is not None:
            health.set_inheritable(False)
    return Bootstrap(mask, health)


def _is_plain() -> bool:
    """Whether nothing distinguishes this process: neither interpreter options nor what it has loaded.

    One that has imported torch, to count devices, would import it again, and contact the other nodes later.
    """
    first = sys.orig_argv[1] if len(sys.orig_argv) > 1 else "-"
    return "torch" not in sys.modules and (first == "-m" or not first.startswith("-"))


def _gains(config: LaunchConfig) -> bool:
    """Whether the server may import torch before everything else, so that both processes can share it."""
    return first_of((*config.preload, "torch")) == "torch" and "torch" not in config.no_preload


def _state(config: LaunchConfig, mask: list[int]) -> AgentState:
    return AgentState(
        config=pickle.dumps(replace(config, token=None)),
        token=config.token.reveal() if config.token else None,
        environ=dict(os.environ),
        path=sys.path,
        argv=sys.argv,
        command=sys.orig_argv,
        name=Path("/proc/self/comm").read_bytes().rstrip(b"\n"),
        mask=mask,
    )


def _execute(
    config: LaunchConfig, mask: list[int], state: int, health: socket.socket | None, told: Mapping[str, str] | None
) -> NoReturn:
    health_descriptor = health.fileno() if health is not None else None
    settings = {**server_settings(config), "mask": mask, "agent": AGENT, "state": state, "health": health_descriptor}
    settings |= {"told": told, "leave": sorted(config.signals.leave)}
    env = server_environment(shared_environment(config))
    code = entered("from elastic_agents.warm.fork_bootstrap import bootstrap", "bootstrap(sys.argv[1])()")
    python, *_ = argv = config.command.argv
    # Padded with blanks, to leave room for this process' own command in its place.
    label = "agent and warm server of".ljust(len(" ".join(sys.orig_argv)))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            stream.flush()
    if health is not None:
        health.set_inheritable(True)
    os.execve(python, [python, "-u", "-c", code, json.dumps(settings), label, *argv], env)
