"""A run under a third-party rendezvous handler: torch's own agent runs the workers, as under torchrun.

Such a handler says which nodes are in a round, and when it must be called again. Links, drains, a shared restart budget
and in-memory snapshots need more than that, so leaving the rest to the agent that handlers are made for loses nothing.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
from inspect import signature
from typing import TYPE_CHECKING, Any

from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import ExitCode, RendezvousError, UsageError
from elastic_launch.rendezvous.leader.verdict import own_code
from elastic_launch.secret import without_secrets

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as TorchConfig

_log = logging.getLogger("elastic_launch.agent")


def run_torch_agent(config: LaunchConfig) -> int:
    """Run this node's part of a run under torch's agent and return the exit code.

    Raises:
        UsageError: if the handler cannot be created.
        RendezvousError: if it fails.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError as TorchError
    from torch.distributed.launcher.api import elastic_launch

    _log.warning(
        "--rdzv-backend %s is a rendezvous handler of torch or another package: torch's own agent runs the workers, "
        "without drains, memory snapshots, elasticctl and a restart budget of the run",
        config.backend,
    )
    for name in os.environ.keys() - without_secrets(os.environ).keys():
        del os.environ[name]  # torch's agent passes its entire environment to the workers
    if config.nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    try:
        elastic_launch(torch_config(config), config.command.argv[0])(*config.command.argv[1:])
    except ChildFailedError as error:
        return _failed(config, error)
    except SignalException as error:
        _log.warning("stopped by %s", signal.Signals(error.sigval).name)
        return 128 + int(error.sigval)
    except TorchError as error:
        raise RendezvousError(f"the rendezvous {config.backend} failed: {error}") from error
    except (ValueError, ImportError) as error:
        raise UsageError(f"--rdzv-backend {config.backend}: {error}", "See what its handler needs.") from error
    _log.info("done: all workers finished; logs in %s", config.log_dir)
    return ExitCode.DONE


def torch_config(config: LaunchConfig) -> TorchConfig:
    """Return the equivalent configuration of torch's own agent."""
    from torch.distributed.launcher.api import LaunchConfig as TorchConfig
    from torch.numa.binding import AffinityMode, NumaOptions

    from elastic_agents.workers.logs_specs import torch_logs_specs

    foreign, options = config.foreign, config.options
    assert foreign is not None
    of_version: dict[str, Any] = {}
    if "shutdown_timeout" in signature(TorchConfig).parameters:
        of_version["shutdown_timeout"] = math.ceil(config.shutdown_timeout)
    elif config.shutdown_timeout != LaunchConfig.shutdown_timeout:
        _log.warning("--shutdown-timeout has no effect: torch's own agent waits 30 s before torch 2.12.")
    return TorchConfig(
        min_nodes=config.limits.min_nodes,
        max_nodes=config.limits.max_nodes,
        nproc_per_node=config.nproc,
        logs_specs=torch_logs_specs(config),
        duplicate_stdout_filters=list(config.output.stdout_filters),
        duplicate_stderr_filters=list(config.output.stderr_filters),
        run_id=config.run_id,
        role=config.role,
        rdzv_endpoint=foreign.endpoint,
        rdzv_backend=config.backend,
        rdzv_configs=dict(foreign.conf),
        max_restarts=config.limits.max_restarts,
        monitor_interval=options.monitor_interval,
        start_method=options.start_method,
        # torch 2.13 and older do not replace the host name.
        log_line_prefix_template=config.output.header.replace("${hostname}", socket.gethostname()),
        local_addr=config.local_addr,
        event_log_handler=options.event_log_handler,
        numa_options=NumaOptions(AffinityMode(options.numa_binding)) if options.numa_binding else None,
        signals_to_handle=",".join(number.name for number in config.signals.leave),
        virtual_local_rank=options.virtual_local_rank,
        **of_version,
    )


def _failed(config: LaunchConfig, error: ChildFailedError) -> int:
    rank, failure = error.get_first_failure()
    code = own_code(failure.exitcode) if config.limits.max_restarts == 0 else ExitCode.BUDGET_SPENT
    _log.error("exit code %d: the workers of this node have failed; logs in %s", code, config.log_dir)
    _log.error("root cause: rank %d (pid %d): %s", rank, failure.pid, failure.message)
    return code
