"""Runs one node's part of a run, and reports how it ended."""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, NoReturn

from elastic_agents.console import Consoles, announce, configure_logging, name_incidents
from elastic_agents.inbox import Inbox, dropping, signals_to, withheld
from elastic_agents.notices import NoticeWatch, sources_of
from elastic_agents.prctl import set_dumpable
from elastic_agents.probes.node_check import check_node
from elastic_agents.summary import failure_summary, leave_error, root_cause
from elastic_agents.warm.processes import start_processes
from elastic_agents.workers.placement import shared_environment
from elastic_agents.workers.watchdog import watchdog
from elastic_launch import __version__
from elastic_launch.clock import Clock, MonotonicClock
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.config.notice_sources import claimed
from elastic_launch.config.torch_options import TorchOptions, untested_torch
from elastic_launch.config.torchrun_mode import code_of, errors_told
from elastic_launch.error_file import ENV_ERROR_FILE
from elastic_launch.errors import ExitCode
from elastic_launch.events.incidents import Incidents
from elastic_launch.events.sentences import last_saved, sentence
from elastic_launch.events.sinks import JsonLines
from elastic_launch.events.types import Event, counted
from elastic_launch.observe.live import LiveLedger
from elastic_launch.rendezvous.old_runs import prune
from elastic_launch.secret import Token
from elastic_launch.system.descriptors import raise_limit, reserve, shortage_told
from elastic_launch.system.program import exiting, reported
from elastic_launch.system.termination_log import write_termination_log
from elastic_launch.system.threads import deaths_reported_to
from elastic_launch.system.writer_thread import IDLE, Writer

if TYPE_CHECKING:
    from elastic_agents.agent import NodeAgent
    from elastic_agents.calls.process import Watcher
    from elastic_agents.live_view import LiveView
    from elastic_agents.outcome import NodeOutcome
    from elastic_agents.output_sinks import Kept
    from elastic_agents.probes.health import Health
    from elastic_agents.warm.fork_bootstrap import AgentState, Bootstrap
    from elastic_launch.observe.ledger import RoundIncident
    from elastic_launch.observe.metrics import NodeMetrics
    from elastic_launch.observe.node_watch import NodeWatch
    from elastic_launch.observe.present import Present

_log = logging.getLogger("elastic_launch")

LIMIT = 4 * 1024 * 1024
"""Bytes of events queued for writing at most."""

PATIENCE = 3.0
"""Seconds without an answer after which the file system that holds a run's files counts as hanging."""


class _Journal:
    """Writes events to the node's file; prints the leader's decisions, and their cost, as one line each.

    Attributes:
        follow: called with each event.
        over: called with each incident that is over.
        output, leader: of the agent, once there is one.
    """

    def __init__(self, file: JsonLines, clock: Clock) -> None:
        self.ledger = LiveLedger(clock)
        self.follow: list[Callable[[Event], object]] = [file.emit]
        self.over: list[Callable[[RoundIncident], object]] = []
        self.watch: NodeWatch | None = None
        self.metrics: NodeMetrics | None = None
        self.output: Callable[[int], Sequence[str]] = lambda rank: ()
        self.leader: Callable[[], str] = lambda: ""

    def emit(self, event: Event) -> None:
        for follow in self.follow:
            follow(event)
        if event.printed:
            _log.info("%s", sentence(event))
        for incident in self.ledger.add(event):
            _log.info("%s", incident.line(), extra={"incident": incident.round})  # another one may be under way
            for over in self.over:
                over(incident)


def run(
    config: LaunchConfig, begun: Bootstrap | None = None, *, level: int | None = None, watcher: Watcher | None = None
) -> int:
    """Run this node's part of a run and return its exit code.

    Args:
        begun: what this process has already started, after announcing the run; None: nothing.
        level: level of the launcher's own lines; None: as LOGLEVEL says.
        watcher: observes what the agent does.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, claimed(config.notices))  # before any thread is started, see withheld
    consoles = Consoles()
    with closing(consoles):
        configure_logging(
            config.log_format,
            node=config.node_id,
            consoles=consoles,
            quiet=config.torchrun or config.progress == "none",
            level=level,
        )
        if line := untested_torch():
            _log.warning("%s", line)
        with errors_told(as_torchrun=config.torchrun), shortage_told():
            code = _run(config, begun, consoles, watcher) if config.foreign is None else _run_foreign(config)
        return _told(config, code)


def resume(state: AgentState, begun: Bootstrap, error: BaseException | None) -> NoReturn:
    """Run an agent that has re-executed itself (:mod:`elastic_agents.warm.reexec`), to the end of its process.

    Args:
        state: what it kept across the exec.
        error: the exception that ended the import of torch, if any; a second import would fail on what it left.
    """
    config: LaunchConfig = pickle.loads(state.config)
    if state.token is not None:
        config = replace(config, token=Token(state.token, "what this process has kept"))

    def act() -> int:
        if error is not None:
            with shortage_told():
                raise error
        return run(config, begun)

    exiting(lambda: reported(act))


def _told(config: LaunchConfig, code: int) -> int:
    return code_of(code) if config.torchrun else code


def _run_foreign(config: LaunchConfig) -> int:
    for flag, given in (("--health-port", config.health_port), ("--http", config.http)):
        if given is not None:
            _log.warning("%s has no effect: torch's own agent runs the workers.", flag)
    from elastic_agents.torch_agent import run_torch_agent

    return run_torch_agent(config)


def _run(config: LaunchConfig, begun: Bootstrap | None, consoles: Consoles, watcher: Watcher | None) -> int:
    clock = MonotonicClock()
    inbox: Inbox[object] = Inbox(clock)
    set_dumpable(False)
    raise_limit(1 if config.is_host is False and not config.kind.elected else config.limits.max_nodes)
    reserve()
    signals = signals_to(inbox, (*config.signals.leave, *config.signals.forward, *claimed(config.notices)))
    files = Writer("files", limit=LIMIT, patience=PATIENCE, lost=_tell_lost)
    incidents = Incidents(config.node_id)
    name_incidents(incidents)
    events_file = JsonLines(
        config.run_directory / f"events-{config.node_id}.jsonl",
        clock,
        lambda error: _log.warning("events are not recorded: %s", error),
        files,
        __version__,
        incidents,
    )
    journal = _Journal(events_file, clock)
    if watcher is not None:
        journal.follow.append(watcher.emit)
    _observe(config, journal, clock)
    reported = deaths_reported_to(inbox.put)
    served, shown = ExitStack(), ExitStack()
    blocked = withheld(inbox, claimed(config.notices))
    with closing(files), signals, dropping(config.signals.reset), reported, blocked, watchdog(inbox.put), served, shown:
        health = served.enter_context(_health(config, begun))
        pages = served.enter_context(_pages(config, journal, inbox, clock))
        if config.progress == "live":
            shown.enter_context(_live_view(config, journal, inbox, consoles))
        if begun is None:
            announce(config)
        else:
            signal.pthread_sigmask(signal.SIG_SETMASK, begun.mask)
        if pages is not None:
            _log.info("a page of this run: http://%s/, with /metrics and /status of this node", pages.endpoint)
        _check(config)
        served.enter_context(_spans(config, journal, clock))
        if config.node_check:
            checked = check_node(config)
            journal.emit(checked)
            _log.info("%s", sentence(checked))
        # First, because it takes longest and depends on nothing below.
        env = shared_environment(config)
        processes = start_processes(config, env, begun.server if begun is not None else None, files)
        with _quiet_torch():
            from elastic_agents.agent import NodeAgent
            from elastic_agents.parts import AgentParts
            from elastic_agents.torch_events import TorchEvents
            from elastic_agents.workers.logs import link_latest
            from elastic_launch.rendezvous.backends.registry import backend_of

        files.put(lambda data: link_latest(config))
        if config.keep_runs is not None:
            # It may take long, and nothing waits for it: what it has not removed is left to the next launch.
            Thread(target=_prune, args=(config, config.keep_runs), name="old runs", daemon=True).start()
        events = served.enter_context(closing(TorchEvents(config, journal, clock, consoles)))
        backend = backend_of(config, clock, events)
        parts = AgentParts(
            config, backend, events, files, consoles, clock=clock, inbox=inbox, processes=processes, env=env
        )
        agent = NodeAgent(parts)
        events.group = agent.get_worker_group()
        journal.over.append(events.over)
        if watcher is not None:
            watcher.begun(agent)
        journal.output = agent.output
        journal.leader = lambda: agent.state.leader
        for asking in (health, pages):
            if asking is not None:
                asking.ask(inbox)
        with NoticeWatch(sources_of(config.notices, os.environ), inbox.put) as watch:
            result = agent.run()
            # The user may still use the remaining time to save what is not saved.
            if agent.notice is not None and agent.outcome.code == ExitCode.TERMINATED and not agent.outcome.unsaved:
                watch.acknowledge(agent.notice)
        if watcher is not None:
            watcher.ended(agent, result)
        shown.close()
        if pages is not None:
            pages.ended(_last(config, agent))
        events.ended(agent.outcome.code, agent.outcome.cause, agent.outcome.restarts)
        if line := journal.ledger.summary(agent.state.max_restarts):
            _log.info("%s", line)
        if agent.outcome.code != ExitCode.DONE and (path := os.environ.get(ENV_ERROR_FILE)):
            with suppress(TimeoutError):
                files.ask(partial(leave_error, Path(path), agent.outcome, agent.error_file), IDLE)
        return _tell(config, agent.outcome, agent.kept if agent.state.view.round else None, files)


def _prune(config: LaunchConfig, keep: int) -> None:
    """Remove the directories of old runs."""
    named = config.link_dir is None
    base, own = (config.log_dir, config.run_directory) if named else (config.link_dir, config.log_dir)
    assert base is not None
    try:
        removed = sum(1 for _ in prune(base, keep, named=named, own=own))
    except OSError as error:
        _log.warning(
            "not all directories of old runs in %s can be removed (--keep-runs all keeps them): %s", base, error
        )
    else:
        level = logging.INFO if removed else logging.DEBUG
        _log.log(level, "the files of %s are removed (--keep-runs %d)", counted(removed, "old run"), keep)


def _tell_lost(lines: int, seconds: float) -> None:
    _log.warning("%d events are not recorded: the file system did not answer for %.0f s", lines, seconds)


@contextmanager
def _health(config: LaunchConfig, begun: Bootstrap | None) -> Iterator[Health | None]:
    """Answer health probes, if that is configured; from the start, because starting may take long."""
    if config.health_port is None:
        yield None
        return
    from elastic_agents.probes.health import Health, health_listener

    listener = (begun.health if begun is not None else None) or health_listener(config)
    with closing(Health(listener)) as health:
        yield health


def _live_view(
    config: LaunchConfig, journal: _Journal, inbox: Inbox[object], consoles: Consoles
) -> AbstractContextManager[LiveView]:
    from elastic_agents.live_view import LiveView

    assert journal.watch is not None
    return closing(LiveView(f"{config.title}, node {config.node_id}", journal.watch, inbox, consoles))


def _observe(config: LaunchConfig, journal: _Journal, clock: Clock) -> None:
    """Keep what this node's page and live view show, if it has any."""
    if config.http is not None:
        from elastic_launch.observe.metrics import NodeMetrics

        journal.metrics = NodeMetrics(config.run_id, config.node_id, __version__)
        journal.follow.append(journal.metrics.add)
        journal.over.append(journal.metrics.over)
    if config.http is not None or config.progress == "live":
        from elastic_launch.observe.node_watch import NodeWatch

        journal.watch = NodeWatch(clock, journal.ledger, config.replica_size)
        journal.follow.append(journal.watch.add)


@contextmanager
def _pages(config: LaunchConfig, journal: _Journal, inbox: Inbox[object], clock: Clock) -> Iterator[Health | None]:
    """Serve the node's metrics and status, if that is configured."""
    if journal.metrics is None or journal.watch is None:
        yield None
        return
    from elastic_agents.inbox import HowAreYou
    from elastic_agents.probes.health import Health, own_names, page_listener
    from elastic_agents.probes.pages import SAMPLE_EVERY, node_pages
    from elastic_agents.probes.roster import Roster
    from elastic_launch.observe.history import History

    metrics, watch, history, listener = journal.metrics, journal.watch, History(clock), page_listener(config)
    roster = Roster(config, lambda: journal.leader())
    made = node_pages(config, metrics, journal.ledger, watch, history, lambda rank: journal.output(rank), roster)
    with closing(roster), closing(Health(listener, made, own_names(config))) as pages:

        def sample(present: Present) -> None:
            metrics.see(present)
            history.add(present)
            watch.state(present)
            pages.heard(present)

        inbox.put(HowAreYou(sample, SAMPLE_EVERY))
        yield pages


@contextmanager
def _spans(config: LaunchConfig, journal: _Journal, clock: Clock) -> Iterator[None]:
    """Send rounds and incidents as OpenTelemetry spans, if its variables name a place for them."""
    if not any(name.startswith("OTEL_") for name in os.environ):
        yield
        return
    from elastic_launch.observe.spans import Spans, processor, wanted

    sends = processor(os.environ) if wanted(os.environ) else None
    if sends is None:
        yield
        return
    with closing(Spans(config.run_id, config.node_id, clock, sends)) as spans:
        journal.follow.append(spans.add)
        journal.over.append(spans.over)
        yield


def _check(config: LaunchConfig) -> None:
    """Have torch validate its own options before anything starts; torch is imported only if one of them is used."""
    options = config.options
    with _quiet_torch():
        if options.numa_binding is not None:
            from elastic_agents.workers.numa import check_binding

            check_binding(config)
        if options.event_log_handler != TorchOptions().event_log_handler:
            from elastic_agents.torch_events import check_handler

            check_handler(options.event_log_handler)


def _last(config: LaunchConfig, agent: NodeAgent) -> Present:
    """Return how this node is at its end, for its pages."""
    from elastic_launch.failure import Suspect
    from elastic_launch.observe.present import HowEnded

    outcome = agent.outcome
    failure = outcome.failure
    cause = "" if failure is None else root_cause(failure)
    suspects = () if failure is None else (Suspect(failure.node_id, failure.rank),)
    saved = last_saved(outcome.where)
    end = HowEnded(_told(config, outcome.code), outcome.cause, agent.state.run_over, saved, cause, suspects)
    return replace(agent.last_present, phase="ended", end=end)


def _tell(config: LaunchConfig, outcome: NodeOutcome, kept: Kept | None, files: Writer) -> int:
    """Print the summary; a root cause is printed last, where the user looks first.

    Args:
        kept: what happened to the logs of this node's workers; None if it never had any.
    """
    if outcome.unsaved and (outcome.where is None or outcome.unsaved != outcome.where.why):
        _log.error("the last checkpoint that this node was to save is not saved: %s", outcome.unsaved)
    if outcome.code == ExitCode.DONE:
        _log.info("done: %s; restarts: %d%s", outcome.cause, outcome.restarts, _logs(config, kept))
        return outcome.code
    stopped = outcome.code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
    level = logging.WARNING if stopped else logging.ERROR
    code = _told(config, outcome.code)
    words = failure_summary(code, outcome.cause, outcome.failure)
    with suppress(TimeoutError):
        files.ask(partial(write_termination_log, words), IDLE)
    if outcome.where:
        _log.log(level, "%s", last_saved(outcome.where))
    _log.log(level, "exit code %d: %s%s", code, outcome.cause, _logs(config, kept))
    if (failure := outcome.failure) is not None:
        # What is written is known by now; when the worker failed, its last output was still to be written.
        unwritten = failure.node_id == config.node_id and kept is not None and not kept.useful
        _log.log(level, "%s", root_cause(replace(failure, log="") if unwritten else failure))
    return outcome.code


def _logs(config: LaunchConfig, kept: Kept | None) -> str:
    """Where the workers' output is, if it is kept in files."""
    if kept is None or not config.output.keep or not kept.useful:
        return ""
    return f"; logs{', in part,' if kept.complaint else ''} in {config.run_directory}"


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keep the C++ side of torch from printing what this process reports itself.

    The workers' environment stays as it was.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "FATAL")
    try:
        if "torch" in sys.modules:
            _read_log_level()
        yield
    finally:
        if before is None:
            del os.environ[name]


def _read_log_level() -> None:
    """Have torch read its variable again: it was also imported for the warm server, which must print everything."""
    library = Path(sys.modules["torch"].__path__[0]) / "lib" / "libc10.so"
    try:
        ctypes.CDLL(str(library))._ZN3c1011initLoggingEv()  # c10::initLogging()
    except (OSError, AttributeError) as error:
        _log.debug("torch may print what this process reports itself: %s", error)
