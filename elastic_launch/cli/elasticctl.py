"""``elasticctl``: status and control of a run, from any host that can reach its leader."""

from __future__ import annotations

if __name__ == "__main__":
    from elastic_launch.system.interrupts import end_quietly

    end_quietly()  # before the slow imports below

import argparse
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NoReturn

from elastic_launch import __version__
from elastic_launch.cli.batch_table import show_plan
from elastic_launch.cli.completion import SHELLS, completion_of
from elastic_launch.cli.doctor import examine
from elastic_launch.cli.event_lines import show_events
from elastic_launch.cli.flags import Values
from elastic_launch.cli.log_tail import show_logs
from elastic_launch.config.backends import kind_of, names_of_backends
from elastic_launch.config.endpoints import parse_endpoint
from elastic_launch.config.launch_config import LaunchConfig, parse_nnodes, state_directory
from elastic_launch.config.settings import Setting
from elastic_launch.errors import ElasticLaunchError, EndpointError, ExitCode, RendezvousError, StoreError, UsageError
from elastic_launch.events.types import counted
from elastic_launch.observe.node_watch import QUIET, span
from elastic_launch.observe.reading import read
from elastic_launch.observe.report import end_of, last_run, show_report
from elastic_launch.rendezvous.admin import messages as a
from elastic_launch.rendezvous.admin.client import Address, AdminClient, RunEndedError
from elastic_launch.rendezvous.old_runs import prune, runs_in
from elastic_launch.rendezvous.run_file import FoundRun, damaged, find
from elastic_launch.secret import read_token
from elastic_launch.system.plain_text import plain
from elastic_launch.system.private_files import untrusted
from elastic_launch.system.program import LOST_OUTPUT, open_streams

PROGRAM = "elasticctl"

WATCH = 2.0
"""Seconds between two updates of ``status --watch``."""

LOST_FOR = 30.0
"""Seconds for which ``status --watch`` searches for a lost leader."""

COLUMNS = 31
"""Characters of a node's line besides its names."""

UNCONFIRMED = (
    "the store has not confirmed for {:.0f} s that the leader still leads; its node adds checkpoints and removes none"
)

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What writing to a file or a terminal raises if it takes no more. All files but stdout have errors of their own."""

_WHERE = ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--log-dir", "--token-file")


def console_main() -> NoReturn:
    open_streams()
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except OSError as error:
        code = ExitCode.DONE
        if not isinstance(error, BrokenPipeError):
            if error.filename is not None or error.errno not in _UNWRITABLE:
                raise
            print(f"{PROGRAM}: error: the output could not be written: {error.strerror}.", file=sys.stderr)
            code = LOST_OUTPUT
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes again at exit
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the command line.

    Returns:
        0 on success, 1 if the request was not carried out or the run has ended, 2 on a wrong command line, 95 if the
        run is not found, does not answer or refuses.
    """
    options = parser().parse_args(argv)
    try:
        if getattr(options, "run", None):
            _name_run(options)
        if options.offline:
            return int(options.act(options))
        address, found = _address(options, os.environ)
        try:
            return int(options.act(options, address))
        except (EndpointError, StoreError):
            if found is None or found.run.code is None:
                raise
            ended = RunEndedError(found.run.run_id, found.run.code, found.run.cause)
        except RunEndedError as error:
            ended = error
        ended = _with_files(ended, found)
        if getattr(options, "json", False):
            print(_as_json(ended))
        raise ended
    except ElasticLaunchError as error:
        print(plain(f"{PROGRAM}: error: {error}"), file=sys.stderr)
        return error.exit_code


class _PrintCompletion(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, options: object, shell: object, flag: str | None = None
    ) -> None:
        try:
            print(completion_of(parser, str(shell)))
        except UsageError as error:
            parser.error(f"{error.message} {error.hint}")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    where = argparse.ArgumentParser(add_help=False)
    group = where.add_argument_group("which run", "By default, the run in the user's state directory that is alive.")
    group.add_argument("--rdzv-backend", metavar="NAME", help="as given to elastic-launch")
    group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="as given to elastic-launch, or as it printed it")
    group.add_argument("--rdzv-id", metavar="ID", help="name of the run")
    group.add_argument("--log-dir", metavar="DIR", help="look for the run in the directory given to elastic-launch")
    group.add_argument("--token-file", metavar="PATH", help="file with the run's token, if it has one")
    top = argparse.ArgumentParser(prog=PROGRAM, description="Show the state of a run, and control it while it runs.")
    top.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    top.add_argument(
        "--print-completion", action=_PrintCompletion, choices=SHELLS, help="show the completion script for this shell"
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, act: Callable[..., int], purpose: str, *, offline: bool = False) -> argparse.ArgumentParser:
        made = commands.add_parser(name, parents=[where], help=purpose)
        made.set_defaults(act=act, offline=offline)
        return made

    status = command("status", _status, "show the run's status")
    status.add_argument("run", metavar="RUN", nargs="?", help="the run's directory, or its id [--rdzv-id]")
    status.add_argument("--json", action="store_true", help="one JSON object in a line")
    status.add_argument("--watch", action="store_true", help=f"show it again every {WATCH:g} s, until the run ends")

    drain = command("drain", _drain, "drain a node, or all of them, without losing a step")
    drain.add_argument("node", metavar="NODE", nargs="?", default="", help="its id; without it, the whole run stops")
    drain.add_argument("--deadline", metavar="S", help="seconds after which the round is broken instead")

    command("checkpoint", _checkpoint, "write a durable checkpoint now")

    resize = command("resize", _resize, "change how many nodes the run may have")
    resize.add_argument("nnodes", metavar="MIN:MAX", help="as --nnodes of elastic-launch")

    events = command("events", _events, "show what happened, from the files on this host", offline=True)
    events.add_argument(
        "--follow", action="store_true", help="follow new events while the run has an agent on this host"
    )
    events.add_argument("--since", metavar="S", help="only the events of the last S seconds")
    events.add_argument("--json", action="store_true", help="the lines as they are in the files")

    logs = command("logs", _logs, "show what a rank prints, from the files on this host", offline=True)
    logs.add_argument("rank", metavar="RANK", help="its newest worker on this host is shown")
    logs.add_argument(
        "--follow", action="store_true", help="follow new lines, also of later rounds, while the run has an agent here"
    )

    command("stacks", _stacks, "show the stacks of all workers, without stopping them")

    report = command("report", _report, "show what each incident cost, from the files on this host", offline=True)
    report.add_argument("run", metavar="RUN", nargs="?", help="the run's directory, or its id [--rdzv-id]")
    report.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    report.add_argument("--html", metavar="FILE", help="write a report to look at in a browser: one file")

    doctor = command("doctor", _doctor, "find out why nodes cannot meet, with remedies", offline=True)
    doctor.add_argument("--checkpoint", metavar="DIR|URL", default="", help="where the training's checkpoints go")

    old = commands.add_parser("prune", help="remove the files of runs that are over, except for the newest ones")
    old.add_argument("--log-dir", metavar="DIR", help="as given to elastic-launch [user's state directory]")
    old.add_argument("--keep-runs", metavar="N", default="0", help="number of the newest runs that stay [0]")
    old.set_defaults(act=_prune, offline=True)

    plan = commands.add_parser("plan", help="show how a global batch is divided at each world size")
    plan.add_argument("--global-batch", metavar="G", required=True, help="samples of an optimizer step")
    plan.add_argument("--micro-batch", metavar="M", required=True, help="samples of a forward and backward pass")
    plan.add_argument("--world", metavar="MIN:MAX", default="1:8", help="numbers of workers [1:8]")
    plan.set_defaults(act=lambda told: show_plan(told.global_batch, told.micro_batch, told.world), offline=True)
    return top


# Finding the run.


def _name_run(options: argparse.Namespace) -> None:
    """Take the run that is named without a flag for the one of a flag."""
    if options.rdzv_id or (options.log_dir and Path(options.run).is_dir()):
        raise UsageError(f"{options.run!r} names the run, and so does a flag.", "Name it once.")
    # A directory is one that elastic-launch has named in its first line; anything else is an id.
    setattr(options, "log_dir" if Path(options.run).is_dir() else "rdzv_id", options.run)


def _address(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Address, FoundRun | None]:
    """Return how to reach the run, and the file by which it was found, if any."""
    values = _values(options, environ)
    backend, endpoint, run_id, log_dir, token_file = (values.text(name) for name in _WHERE)
    if "--log-dir" in values.given and "--rdzv-endpoint" not in values.given:
        endpoint = None
    token = read_token(token_file, environ)
    found, leader = None, None
    if endpoint is None:
        found = _found(log_dir, run_id, environ)
        backend, endpoint, run_id = found.run.backend, found.run.endpoint, found.run.run_id
        token = token or found.token()
        leader = parse_endpoint(found.run.leader) if found.run.leader else None
    backend = LaunchConfig.backend if backend is None else backend
    kind = kind_of(backend)
    if not kind.own:
        hint = f"Supported: {', '.join(names_of_backends())}."
        raise UsageError(f"--rdzv-backend {backend} is not supported.", hint)
    if kind.service is not None and not run_id:
        raise UsageError(f"--rdzv-backend {backend} keeps many runs.", "Name one with --rdzv-id ID.")
    return Address(run_id or LaunchConfig.run_id, backend, kind.parse(endpoint), token, leader), found


def _values(options: argparse.Namespace, environ: Mapping[str, str]) -> Values:
    given = {name: getattr(options, name[2:].replace("-", "_")) for name in _WHERE}
    values = Values({name: [text] for name, text in given.items() if text is not None}, environ)
    if values.text("--log-dir") != os.devnull:
        return values
    # With it elastic-launch keeps no output, and has the run's own files in the default directory.
    unset = ("--log-dir", *values.table["--log-dir"].variables)
    kept = {name: texts for name, texts in values.given.items() if name not in unset}
    return Values(kept, {name: text for name, text in environ.items() if name not in unset})


def _found(log_dir: str | None, run_id: str | None, environ: Mapping[str, str]) -> FoundRun:
    """Return the run with a file in the directory; by default, a live one in the user's state directory."""
    base = Path(log_dir) if log_dir else state_directory(environ)
    if not log_dir and (reason := untrusted(base, exclusive=True)):
        raise EndpointError(f"Runs in {base} are ignored: {reason}.", "Name the run's directory with --log-dir.")
    try:
        runs, alive = find(base, run_id, depth=1 if log_dir else 2)
        if log_dir and not runs:
            runs, alive = find(base, run_id, depth=0)
    except OSError as error:
        hint = "Ask as the user that started the run."
        raise EndpointError(f"Cannot look for runs in {base}: {error.strerror}.", hint) from error
    which = f"run {run_id!r}" if run_id else "run"
    flags = "Name the run with --rdzv-endpoint HOST:PORT and --rdzv-id ID, or with its --log-dir."
    if not runs:
        unusable = [path for depth in ((1, 0) if log_dir else (2,)) for path in damaged(base, depth)]
        but = f", but {unusable[0]}, which is damaged or cannot be read" if unusable else ""
        raise EndpointError(f"There is no {which} in {base}{but}.", flags)
    if not alive and not log_dir and not run_id:
        last = runs[0].run
        ended = "was killed" if last.code is None else f"ended with exit code {last.code}: {last.cause}"
        hint = f"For the last run, add --rdzv-id {last.run_id}; for another run, give its --log-dir."
        raise EndpointError(f"There is no {which} alive in {base}; the last one, {last.run_id}, {ended}.", hint)
    if len(runs) > 1 and (alive or not run_id):
        names = ", ".join(f"{run.run_id} at {run.endpoint}" for run, _ in runs[:10])
        ended = "" if alive else ", none with an agent alive on this host"
        raise UsageError(f"There are {len(runs)} runs in {base}{ended}: {names}.", "Say which with --rdzv-id ID.")
    return runs[0]


# Requests.


def _status(options: argparse.Namespace, address: Address) -> int:
    if not options.watch:
        with AdminClient(address) as client:
            _show(client.status(), address, as_json=options.json)
        return ExitCode.DONE
    lost_at: float | None = None
    seen = False
    _, found = _address(options, os.environ)
    while True:
        try:
            with AdminClient(address) as client:
                while True:
                    status = client.status()
                    seen, lost_at = True, None
                    if sys.stdout.isatty():
                        sys.stdout.write("\x1b[H\x1b[2J")
                    _show(status, address, as_json=options.json)
                    client.pause(WATCH)
        except RunEndedError as error:
            if not seen:
                raise
            return _ended(_with_files(error, found), as_json=options.json)
        except RendezvousError:
            lost_at = time.monotonic() if lost_at is None else lost_at
            if not seen or time.monotonic() - lost_at > LOST_FOR:
                raise
            # The leader's last message may be lost with the link; the file by which the run was found has it, too.
            options.rdzv_id = address.run_id
            address, found = _address(options, os.environ)
            if found is not None and found.run.code is not None:
                ended = RunEndedError(found.run.run_id, found.run.code, found.run.cause)
                return _ended(_with_files(ended, found), as_json=options.json)
            time.sleep(0.5)


def _ended(error: RunEndedError, *, as_json: bool) -> int:
    print(_as_json(error) if as_json else plain(str(error)), flush=True)
    return ExitCode.DONE


def _as_json(error: RunEndedError) -> str:
    told = {"ended": error.code, "cause": error.cause, "saved": error.saved, "root_cause": error.root_cause}
    return json.dumps(told)


def _with_files(error: RunEndedError, found: FoundRun | None) -> RunEndedError:
    """Add what the run's files tell of its end."""
    paths = found.directory.glob("events-*.jsonl") if found is not None else ()
    return RunEndedError(error.run_id, error.code, error.cause, *end_of(last_run([read(path) for path in paths])))


def _drain(options: argparse.Namespace, address: Address) -> int:
    seconds = None if options.deadline is None else Setting("--deadline ", options.deadline).seconds()
    with AdminClient(address) as client:
        if options.node and not address.kind.elected and options.node == client.status().leader:
            raise UsageError(
                f"Node {options.node} hosts the run: without it the run cannot go on.",
                f"{PROGRAM} drain without a node stops the whole run, and says whether its state is saved.",
            )
        return _tell(client.ask(a.AskDrain(options.node, seconds)))


def _checkpoint(options: argparse.Namespace, address: Address) -> int:
    with AdminClient(address) as client:
        return _tell(client.ask(a.AskSave()))


def _stacks(options: argparse.Namespace, address: Address) -> int:
    with AdminClient(address) as client:
        return _tell(
            client.ask(a.AskStacks(), lambda told: print(plain(f"node {told.node}:\n{told.text}"), flush=True))
        )


def _resize(options: argparse.Namespace, address: Address) -> int:
    low, high = parse_nnodes(options.nnodes, "resize")
    if not 1 <= low <= high:
        raise UsageError(f"resize {low}:{high} is not a range of nodes.", "Write MIN:MAX with 1 <= MIN <= MAX.")
    with AdminClient(address) as client:
        return _tell(client.ask(a.AskResize(low, high)))


def _tell(answer: a.AdminAnswer) -> int:
    print(plain(answer.text))
    return ExitCode.DONE if answer.done else ExitCode.TRAINING_FAILED


# From files, or from nothing.


def _events(options: argparse.Namespace) -> int:
    since = None if options.since is None else Setting("--since ", options.since).seconds()
    directory = _directory(options)
    alive = partial(_has_agent, directory)
    return show_events(directory, since=since, follow=options.follow, as_json=options.json, alive=alive)


def _logs(options: argparse.Namespace) -> int:
    rank = Setting("logs ", options.rank).whole()
    if rank < 0:
        raise UsageError(f"logs {rank}: ranks begin at 0.", "Write the rank before the flags.")
    directory = _directory(options)
    return show_logs(directory, rank, follow=options.follow, alive=partial(_has_agent, directory))


def _report(options: argparse.Namespace) -> int:
    directory = _directory(options)
    alive = True if _has_agent(directory) else None  # other hosts' agents are not seen
    html = Path(options.html) if options.html else None
    show_report(directory, as_object=options.json, html=html, alive=alive)
    return ExitCode.DONE


def _directory(options: argparse.Namespace) -> Path:
    """Return the directory with the run's event files."""
    values = _values(options, os.environ)
    endpoint, run_id, log_dir = (values.text(name) for name in ("--rdzv-endpoint", "--rdzv-id", "--log-dir"))
    if endpoint is not None and not log_dir:
        raise UsageError(
            "this is read from files, not from the run's leader.", "Name the run's directory with --log-dir."
        )
    if log_dir and any(Path(log_dir).glob("events-*.jsonl")):
        directory = Path(log_dir)
        # A variable is for many commands; the directory of one run on this command line says more.
        if options.rdzv_id or not options.log_dir:
            _check_id(directory, run_id)
        return directory
    return _found(log_dir, run_id, os.environ).directory


def _has_agent(directory: Path) -> bool:
    """Whether an agent of the run with this directory is alive on this host."""
    return find(directory, None, depth=0)[1]


def _check_id(directory: Path, run_id: str | None) -> None:
    """Refuse another id than that of the run with this directory, whose name is the id if no file has it."""
    here = {each.run.run_id for each in find(directory, None, depth=0)[0]} or {directory.resolve().name}
    if run_id and run_id not in here:
        raise EndpointError(
            f"There is no run {run_id!r} in {directory}: it is the directory of run {', '.join(sorted(here))}.",
            "Leave --rdzv-id out, or name the directory that was given to elastic-launch.",
        )


def _prune(options: argparse.Namespace) -> int:
    keep = Setting("--keep-runs ", options.keep_runs).whole()
    if keep < 0:
        raise UsageError(f"--keep-runs {keep} is below 0.", "Give the number of runs that stay.")
    named = options.log_dir not in (None, os.devnull)
    base = Path(options.log_dir) if options.log_dir and named else state_directory(os.environ)
    removed = 0
    try:
        for path in prune(base, keep, named=named):
            removed += 1
            print(f"removed {path}", flush=True)
        left = len(runs_in(base, named=named))
    except OSError as error:
        raise UsageError(f"prune: {error}.", "Correct --log-dir, or the permissions.") from error
    print(f"{counted(removed, 'run')} removed, {left} left in {base}")
    return ExitCode.DONE


def _doctor(options: argparse.Namespace) -> int:
    values = _values(options, os.environ)
    address, found, about = None, None, ""
    try:
        address, found = _address(options, os.environ)
    except ElasticLaunchError as error:
        if any(values.text(name) is not None for name in _WHERE[:3]):
            raise
        about = error.message  # no run is alive, or several are: the host itself can be examined
    if found is not None and (run := found.run).code is not None:
        address, about = None, f"run {run.run_id} has ended with exit code {run.code}: {run.cause}"
    logs = Path(values.text("--log-dir") or state_directory(os.environ))
    return examine(address, logs, os.environ, about, options.checkpoint)


# Output.


def _show(status: a.Status, address: Address, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"backend": address.backend, **asdict(status)}), flush=True)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(plain("\n".join(shown(status, str(address), width))), flush=True)


def shown(status: a.Status, where: str, width: int | None = None) -> list[str]:
    """Return a status as readable lines.

    Args:
        width: width of the terminal, in which each line fits; None: nothing is cut.
    """
    limits = f"{status.min_nodes}:{status.max_nodes}"
    step = "no step reported" if status.step is None else f"step {status.step}"
    members = [node for node in status.nodes if node.ranks] if status.world_size else []
    size = status.replica_size
    of_replicas = f" ({counted(status.world_size // size, 'replica')} of {size})" if size > 1 else ""
    lines = [
        f"run at {where}" if status.run_id == LaunchConfig.run_id else f"run {status.run_id} at {where}",
        f"round {status.round}, term {status.term}, leader {status.leader}; {status.next}",
        f"world size {status.world_size}{of_replicas} on {counted(len(members), 'node')} of {limits}, {step}, "
        f"restarts {status.restarts} of {status.max_restarts}",
        *_pace(status),
        f"last checkpoint: {_kept(status.checkpoint)}; last snapshot: {_kept(status.snapshot)}",
        *([] if status.unconfirmed is None else [UNCONFIRMED.format(status.unconfirmed)]),
        "",
    ]
    rows = [("NODE", "ADDRESS"), *((node.node_id, node.address) for node in status.nodes)]
    # On a terminal the names get what the other columns leave.
    most = max(16, (width - COLUMNS) // 2) if width else None
    longest = [max(len(row[column]) for row in rows) for column in (0, 1)]
    first, second = (min(x, most) if most else x for x in longest)
    lines.append(f"{'NODE':<{first}}  {'ADDRESS':<{second}}  WORKERS  {'STATE':<9} {'SILENT':>8}  LOAD")
    for node in status.nodes:
        names = f"{_cut(node.node_id, first):<{first}}  {_cut(node.address, second):<{second}}"
        load = "-" if node.load is None else node.load
        lines.append(f"{names}  {node.workers:>7}  {node.state:<9} {node.silence:>6.1f} s  {load}")
    if status.incidents:
        lines += ["", "the leader's last decisions:"]
        lines += [f"  {_ago(incident.ago):>12}  {incident.text}" for incident in status.incidents]
    return [_cut(line, width) if width else line for line in lines]


def _pace(status: a.Status) -> list[str]:
    least, times = QUIET
    if status.stepped is not None and status.stepped > max(least, times * (status.step_s or 0.0)):
        return [f"no step for {span(status.stepped)}"]
    if not status.step_s:
        return []
    left = "" if status.remaining is None else f", about {span(status.remaining)} left"
    loss = "" if status.loss is None else f", loss {status.loss:.4g}"
    return [f"{1 / status.step_s:.3g} steps/s{left}{loss}"]


def _kept(save: a.LastSave | None) -> str:
    return "none reported" if save is None else f"step {save.step}, {_ago(save.ago)}"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


if __name__ == "__main__":
    console_main()
