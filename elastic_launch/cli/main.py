"""``elastic-launch``: builds a :class:`LaunchConfig` from flags and environment, and starts the agent."""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import NoReturn

from elastic_launch import __version__
from elastic_launch.cli import kubernetes, slurm
from elastic_launch.cli.command import check_directory, read_command
from elastic_launch.cli.flags import BY_NAME, CommandLine, Sourced, Values, split
from elastic_launch.cli.help import help_text
from elastic_launch.cli.job import Job, shown
from elastic_launch.cli.options import (
    read_drill,
    read_exit_codes,
    read_hang_timeout,
    read_limits,
    read_notices,
    read_signals,
    read_torch_options,
)
from elastic_launch.cli.output_flags import (
    make_run_directory,
    read_keep_runs,
    read_log_dir,
    read_log_format,
    read_output,
    read_progress,
)
from elastic_launch.cli.rendezvous_flags import read_meeting
from elastic_launch.config.endpoints import Endpoint, parse_host, parse_listening
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.config.notice_sources import claimed
from elastic_launch.config.settings import TIMES, Setting, default_node_id, parse_conf, read_timing
from elastic_launch.config.torch_options import EVENT_LOG_HANDLERS, visible_device
from elastic_launch.config.torchrun_mode import DEFAULTS, NAME, SOURCE, called_so, errors_told, wanted
from elastic_launch.errors import ExitCode, UsageError
from elastic_launch.faults import ENV_FAULTS, FaultPlan
from elastic_launch.secret import Token, read_token
from elastic_launch.system.program import PROGRAM, check_kernel, exiting, reported

log = logging.getLogger(__name__)

_ACCELERATORS = ("cuda", "xpu", "mps", "hpu", "mtia", "xla", "npu")
"""Names that torch has, or a known extension of it, for a kind of accelerator."""


def console_main() -> NoReturn:
    exiting(lambda: main(whole=True))


def main(argv: Sequence[str] | None = None, *, whole: bool = False) -> int:
    """Run a launch as the command line requests.

    Args:
        argv: arguments without the program's name; None for those of this process.
        whole: whether this process only serves the launch, and may restart itself to share torch with its workers.

    Returns:
        The exit code, see :class:`~elastic_launch.errors.ExitCode`.
    """
    return reported(lambda: _main(sys.argv[1:] if argv is None else argv, whole))


def _main(argv: Sequence[str], whole: bool) -> int:
    program = sys.argv[0] if whole else ""
    # Most launches do not need this; the script's own arguments may contain these words, too.
    if not wanted(os.environ, program) and any(
        token.replace("_", "-").startswith(("--world-size", "--base-rank")) for token in argv
    ):
        from elastic_launch.cli import composer

        if composer.wanted(argv):
            return composer.start(argv)
    return launch(split(argv), whole=whole, program=program)


def launch(
    line: CommandLine, prepare: Callable[[Job], None] = lambda job: None, *, whole: bool = False, program: str = ""
) -> int:
    """Carry out a command line, and return the exit code.

    Args:
        prepare: changes by another front end, made before the job is read.
        program: the name by which this process was called.

    Raises:
        ElasticLaunchError: if that fails.
    """
    as_torchrun = wanted(os.environ, program)
    with errors_told(as_torchrun=as_torchrun):
        if line.wants is not None:
            return _inform(line, line.wants, program, as_torchrun=as_torchrun)
        return _launch(line, prepare, whole=whole, as_torchrun=as_torchrun)


def _inform(line: CommandLine, wants: str, program: str, *, as_torchrun: bool) -> int:
    if wants == "--help":
        sys.stdout.write(help_text(as_torchrun=as_torchrun))
    elif wants == "--version":
        print(f"{PROGRAM} {__version__}")
    else:
        from elastic_launch.cli.completion import completion

        sys.stdout.write(completion(line.given[wants][-1], NAME if called_so(program) else PROGRAM))
    return ExitCode.DONE


def _launch(line: CommandLine, prepare: Callable[[Job], None], *, whole: bool, as_torchrun: bool) -> int:
    job = Job(line, os.environ)
    prepare(job)
    values = job.values
    _settle_defaults(values, as_torchrun=as_torchrun)
    from elastic_agents.console import configure_logging

    with values.attributed():
        # For the first messages; the agent configures logging again.
        configure_logging(read_log_format(values), quiet=values.torchrun)
        _find_out(values)
        printed = values.switch("--print-config")
        if printed:
            sys.stdout.write(shown(job, {key: value for layer in _layers(values) for key, value in layer.items()}))
        config = build(job.line, values)
    if printed:
        return ExitCode.DONE
    check_kernel()
    check_directory()
    config = make_run_directory(config)
    if config.alone and config.token is None:
        config = replace(config, token=Token.made(), own_token=True)
    os.environ.update(job.added)
    begun = None
    if whole:
        from elastic_agents.warm.reexec import reexec

        begun = reexec(config)
    # Imported late because torch takes seconds: errors in flags must be reported before.
    from elastic_agents.main import run

    return run(config, begun)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> LaunchConfig:
    """Convert arguments and environment to a configuration; nothing is started or written."""
    job = Job(split(argv), environ)
    _settle_defaults(job.values, as_torchrun=wanted(environ))
    with job.values.attributed():
        _find_out(job.values)
        return build(job.line, job.values)


def _settle_defaults(values: Values, *, as_torchrun: bool) -> None:
    """Apply torchrun's defaults to unset values, if requested."""
    if as_torchrun:
        values.torchrun = True
        values.beneath = (*values.beneath, {name: Sourced(text, SOURCE) for name, text in DEFAULTS.items()})


def _find_out(values: Values) -> None:
    if not values.torchrun:  # torchrun derives no defaults
        values.beneath = (*values.beneath, slurm.found_out(values) or kubernetes.found_out(values))


def build(line: CommandLine, values: Values) -> LaunchConfig:
    """Build a configuration."""
    command = read_command(line, values)
    limits = read_limits(values)
    meeting = read_meeting(values, limits)
    timing, is_host, reuse = read_timing([] if meeting.foreign else _layers(values), one_wait=values.torchrun)
    if meeting.kind.fixed_ranks:
        limits = limits.resized(limits.max_nodes, limits.max_nodes)
        if is_host is not None:
            raise UsageError(
                "--rdzv-conf is_host contradicts --rdzv-backend static, whose host is the node of rank 0.",
                "Drop is_host.",
            )
        is_host = meeting.node_rank == 0
    if meeting.endpoint is None and is_host is False:
        raise UsageError(
            "--rdzv-conf is_host: this node must not host the run, and no other node does.",
            "Name the node that hosts it with --rdzv-endpoint, or drop is_host.",
        )
    if planned := FaultPlan.of(values.environ).faults:
        log.warning("%s is set: workers of this run fail on purpose, %d in all.", ENV_FAULTS, len(planned))
    log_dir, link_dir = read_log_dir(values)
    notices = read_notices(values, own_agent=meeting.foreign is None)
    health = parse_listening(text, "--health-port") if (text := values.text("--health-port")) else None
    http = parse_listening(text, "--http") if (text := values.text("--http")) else None
    # Nodes with a given endpoint must agree on an id, as torchrun's nodes do on "none".
    given = meeting.endpoint or meeting.foreign
    run_id = values.text("--rdzv-id") or (LaunchConfig.run_id if given else secrets.token_hex(6))
    output = read_output(values)
    config = LaunchConfig(
        command=command,
        limits=limits,
        run_id=run_id,
        backend=meeting.backend,
        endpoint=meeting.endpoint,
        endpoints=meeting.endpoints if meeting.kind.elected else (),
        announce=limits.max_nodes > 1 and meeting.endpoint is None,
        found_out=slurm.sentence(values) or kubernetes.sentence(values),
        timing=timing,
        node_id=meeting.node_id or default_node_id(),
        node_rank=meeting.node_rank,
        local_addr=parse_host(text, "--local-addr") if (text := values.text("--local-addr")) else None,
        is_host=is_host,
        health_port=health.port if health else None,
        health_host=(health.host or None) if health else None,
        http=Endpoint(http.host or "127.0.0.1", http.port) if http else None,
        http_hosts=_hosts(values),
        reuse=reuse,
        role=values.text("--role") or LaunchConfig.role,
        fatal_exit_codes=read_exit_codes(values),
        shutdown_timeout=values.seconds("--shutdown-timeout", LaunchConfig.shutdown_timeout),
        wait_for_children=values.seconds("--wait-for-children", LaunchConfig.wait_for_children),
        hang_timeout=read_hang_timeout(values),
        log_dir=log_dir,
        live=not values.switch("--no-live"),
        exclude_corrupt=not values.switch("--no-exclude-corrupt"),
        snapshots=not values.switch("--no-snapshots"),
        split_snapshots=values.switch("--split-snapshots"),
        warm=not values.switch("--no-warm"),
        preload=_modules("--preload", values),
        no_preload=_modules("--no-preload", values),
        keep_runs=read_keep_runs(values, own=link_dir is not None),
        link_dir=link_dir,
        # Local ranks are unique only on a node.
        log_name=f"{run_id}_{secrets.token_hex(4)}" if output.layout == "torchrun" else "",
        output=output,
        progress=read_progress(values, own_agent=meeting.foreign is None),
        log_format=read_log_format(values),
        token=read_token(values.text("--token-file"), values.environ),
        signals=read_signals(values, claimed(notices)),
        notices=notices,
        node_check=values.switch("--node-check"),
        drill=read_drill(values, own_agent=meeting.foreign is None and not meeting.kind.fixed_ranks),
        options=read_torch_options(values, own_agent=meeting.foreign is None),
        foreign=meeting.foreign,
        torchrun=values.torchrun,
        # Last, because counting devices imports torch.
        nproc=_nproc(values.text("--nproc") or "1"),
        replica_size=values.integer("--replica-size", LaunchConfig.replica_size),
    )
    if config.foreign is not None and config.replica_size > 1:
        raise UsageError("--replica-size needs this project's own rendezvous.", "Use --rdzv-backend c10d or etcd.")
    if config.options.virtual_local_rank:
        visible_device(config.nproc - 1, values.environ)
    if config.preload and not config.warm:
        log.warning("%s has no effect: %s.", values.origin("--preload"), values.origin("--no-warm"))
    if config.options.event_log_handler not in EVENT_LOG_HANDLERS:
        check_directory()  # torch cannot be imported in one that is gone
        from elastic_agents.torch_events import check_handler

        check_handler(config.options.event_log_handler)
    if (ranks := config.output.local_ranks) and not any(rank < config.nproc for rank in ranks):
        text = "%s shows no output: this node has the local ranks 0 to %d."
        log.warning(text, values.origin("--local-ranks-filter"), config.nproc - 1)
    return config


def _layers(values: Values) -> Iterable[dict[str, Setting]]:
    """Yield the settings of the rendezvous by source, weakest first: the environment's, then the command line's."""
    flags = {key: name for key in TIMES if (name := f"--{key.replace('_', '-')}") in BY_NAME}
    times = {key: values.levels(name) for key, name in flags.items() if values.text(name) is not None}
    for level, confs in enumerate(values.levels("--rdzv-conf")):
        merged: dict[str, Setting] = {}
        for conf in confs[-1:] if values.torchrun else confs:
            merged |= parse_conf(conf.asked.rstrip(" :="), conf.text, lenient=values.torchrun)
        yield merged
        yield {key: found[level][-1] for key, found in times.items() if found[level]}


def _nproc(text: str) -> int:
    """Return the number of workers that --nproc requests; torch is imported only to count devices."""
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text in ("auto", "gpu") or _may_be_device(text):
        import torch

        if text == "gpu":
            if not torch.cuda.is_available():
                raise UsageError(
                    f"--nproc gpu: torch {torch.__version__} finds no CUDA device here.",
                    "Give a number or cpu, or fix the driver, CUDA_VISIBLE_DEVICES or the build of torch.",
                )
            return torch.cuda.device_count()
        found = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        if text == "auto":
            return found or len(os.sched_getaffinity(0))
        accelerator = torch.accelerator.current_accelerator() if found else None
        if accelerator and accelerator.type == text:  # torch's name for a kind of device, such as xpu
            return found
    try:
        return Setting("--nproc ", text).whole()
    except UsageError:
        raise UsageError(f"--nproc {text} is not a number of workers.", "Give 1 or more, auto, cpu or gpu.") from None


def _may_be_device(text: str) -> bool:
    """Whether torch may know a kind of accelerator by this name; it is not imported for a misspelled number."""
    return text in _ACCELERATORS or (text.isalpha() and bool(entry_points(group="torch.backends")))


def _listed(name: str, values: Values) -> tuple[str, ...]:
    """Return the parts of a repeatable flag's values."""
    text = values.text(name)  # raises if it is empty
    texts = values.given.get(name) or [text or ""]
    return tuple(filter(None, (part.strip() for text in texts for part in text.split(","))))


def _hosts(values: Values) -> tuple[str, ...]:
    """Return the names that ``--http-host`` gives."""
    found = tuple(host.lower().rstrip(".") for host in _listed("--http-host", values))
    for host in found:
        if not re.fullmatch(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", host) or ".." in host:
            raise UsageError(
                f"--http-host {host!r} is not the name of a host.",
                "Write names without port or path, as in runs.example.org,train.default.svc.",
            )
    return found


def _modules(name: str, values: Values) -> tuple[str, ...]:
    found = _listed(name, values)
    for module in found:
        if not all(part.isidentifier() for part in module.split(".")):
            raise UsageError(f"{name} {module!r} is not the name of a module.", "Write names, as in numpy,torch.nn.")
    return found
