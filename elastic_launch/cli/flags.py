"""The table of flags, the argparse parser that is made of it, and the values that result."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from elastic_launch.config.backends import SERVICES
from elastic_launch.config.launch_config import KEPT_RUNS, LaunchConfig, Limits, Timing
from elastic_launch.config.settings import Setting, nearest
from elastic_launch.config.torchrun_mode import EMPTY
from elastic_launch.errors import CommandLineError, UsageError
from elastic_launch.system.program import PROGRAM

T = TypeVar("T")

USAGE = f"{PROGRAM} [flags] script.py [arguments of the script]"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        names: every spelling, with dashes.
        purpose: its purpose, in a few words.
        metavar: the name of its value in the help; empty for a switch.
        default: the default as shown in the help.
        in_environment: whether ``PET_<NAME>`` can set it.
        fallback: another variable that can set it, with lower precedence.
    """

    names: tuple[str, ...]
    purpose: str
    metavar: str = ""
    default: str = ""
    in_environment: bool = True
    fallback: str = ""

    @property
    def name(self) -> str:
        """The name under which its values are stored: the first long one."""
        return next(name for name in self.names if name.startswith("--"))

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that can set its value; the first one that is set wins."""
        long = [name[2:] for name in self.names if name.startswith("--") and self.in_environment]
        own = ["PET_" + name.upper().replace("-", "_") for name in long]
        return (*own, self.fallback) if self.fallback else tuple(own)


def _timing(name: str, purpose: str) -> Flag:
    default = getattr(Timing(), name)
    return Flag((f"--{name.replace('_', '-')}",), purpose, "S", f"{default:g}")


GROUPS: dict[str, tuple[Flag, ...]] = {
    "Size": (
        Flag(("--nnodes",), "nodes of the run", "N|MIN:MAX", "1:1"),
        Flag(("-n", "--nproc", "--nproc-per-node"), "workers here: number, auto, cpu, gpu", "N", "1"),
        Flag(("--replica-size",), "workers of a replica, on one node", "N", "1"),
        Flag(("--standalone",), "this node only; a given endpoint is ignored"),
    ),
    "Where nodes meet": (
        Flag(("--rdzv-backend",), f"c10d, {', '.join(SERVICES)}, static, or torch's", "NAME", "c10d"),
        Flag(("--rdzv-endpoint",), "host(s) of the run or its store", "HOST:PORT", "this one"),
        Flag(("--rdzv-id",), "name of the run [none; random if no endpoint]", "ID"),
        Flag(("--rdzv-conf",), "rendezvous settings; repeated flags merge", "K=V,..."),
        Flag(("--node-rank",), "requested rank of this node", "N", "any"),
        Flag(("--node-id",), "unique name of this node", "ID", "host name-random"),
        Flag(("--local-addr",), "address to advertise", "ADDR", "that of the route"),
        Flag(("--master-addr",), "address of node 0, for static", "ADDR", "127.0.0.1"),
        Flag(("--master-port",), "port of node 0, for static", "PORT", "29500"),
        Flag(("--token-file",), "file with the run's token", "PATH"),
        Flag(("--health-port",), "serve /livez and /readyz on this port", "[HOST:]PORT"),
        Flag(("--http",), "serve a page and metrics on this port", "[HOST:]PORT"),
        Flag(("--http-host",), "host names that --http also answers to", "NAME,..."),
    ),
    "Times, in seconds": (
        _timing("join_settle", "wait for more nodes before round 1"),
        _timing("resize_delay", "wait after a node joins before a resize"),
        _timing("dead_after", "silence after which a node is dead"),
        _timing("return_after", "time to stop, beyond --shutdown-timeout"),
        _timing("min_wait", "wait while there are too few nodes"),
        Flag(
            ("--shutdown-timeout",),
            "time from SIGTERM to SIGKILL",
            "S",
            f"{LaunchConfig.shutdown_timeout:g}",
            fallback="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        ),
        Flag(("--wait-for-children",), "wait for processes left behind", "S", f"{LaunchConfig.wait_for_children:g}"),
    ),
    "Workers": (
        Flag(("--max-restarts",), "restarts after faults of workers", "N", str(Limits().max_restarts)),
        Flag(("--restart-refill",), "training time that gives a restart back", "S", "0"),
        Flag(("--max-idle-restarts",), "restarts in a row without a step; 0: any", "N", "0"),
        Flag(("--fatal-exit-codes",), "workers' exit codes that end the run", "N,N-N,..."),
        Flag(("--node-check",), "test this node before it joins"),
        Flag(("--drill",), "file with planned faults", "PLAN"),
        Flag(("--hang-timeout",), "idle time that is a hang: auto, off, S", "S", "auto"),
        Flag(("-m", "--module"), "the script is a module, as in python -m"),
        Flag(("--no-python",), "the script is a program, not Python"),
        Flag(("--no-warm",), "workers do their imports themselves"),
        Flag(("--no-live",), "start all workers again in each new round"),
        Flag(("--no-exclude-corrupt",), "report a node with wrong results, but keep it"),
        Flag(("--no-snapshots",), "take no snapshots of the state in memory"),
        Flag(("--split-snapshots",), "split snapshots of sharded models among nodes"),
        Flag(("--preload",), "import these modules ahead, too", "MODULE,..."),
        Flag(("--no-preload",), "do not import these modules ahead", "MODULE,..."),
        Flag(("--run-path",), "run the script by its full path, with runpy"),
        Flag(("--virtual-local-rank",), "each worker sees one GPU, and LOCAL_RANK 0"),
        Flag(("--numa-binding",), "bind to CPUs near the GPU, as node", "MODE", "unbound"),
        Flag(("--role",), "name of the workers' role", "NAME", LaunchConfig.role),
    ),
    "Output": (
        Flag(("--log-dir",), "base of the logs", "DIR", "user's state directory"),
        Flag(("--keep-runs",), "newest launches whose logs stay, or all", "N", str(KEPT_RUNS)),
        Flag(("--log-layout",), "log directories: rounds, torchrun", "NAME", "rounds"),
        Flag(("-r", "--redirects"), "streams not shown, as 3 or 0:1,1:2", "STREAMS", "0"),
        Flag(("-t", "--tee"), "streams shown with a prefix", "STREAMS", "0"),
        Flag(("--local-ranks-filter",), "local ranks that are shown", "N,...", "all"),
        Flag(("--duplicate-stdout-filters",), "copy stdout lines that contain TEXT to a file", "TEXT"),
        Flag(("--duplicate-stderr-filters",), "copy stderr lines that contain TEXT to a file", "TEXT"),
        Flag(
            ("--log-line-prefix-template",),
            "prefix of tee'd lines",
            "TEXT",
            fallback="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        ),
        Flag(("--prefix",), "[node:rank] before each line that is shown"),
        Flag(("--progress",), "auto, live view, plain lines, none", "HOW", "auto"),
        Flag(("--log-format",), "launcher's lines: plain, time, json", "NAME", LaunchConfig.log_format),
        Flag(("--logs-specs",), "entry point that says where logs go", "NAME", "default"),
    ),
    "Job file": (
        Flag(("--config",), "YAML file with values of these flags", "FILE"),
        Flag(("--print-config",), "show every value and its source, and exit"),
    ),
    "Signals": (
        Flag(("--signals-to-handle",), "signals to leave on", "LIST", "TERM,INT,HUP,QUIT"),
        Flag(("--signals-to-forward",), "signals to pass to the workers", "LIST", "USR1,USR2"),
    ),
    "Preemption": (Flag(("--notice",), "sources of preemption notices", "SOURCE,...", "auto"),),
    "For torch": (
        Flag(("--event-log-handler",), "handler of torch's events", "NAME", "null"),
        Flag(("--monitor-interval",), "used by torch's agent only", "S", "0.1"),
        Flag(("--start-method",), "used by torch's agent only", "NAME", "spawn"),
    ),
    "Information": (
        Flag(("-h", "--help"), "show this and exit", in_environment=False),
        Flag(("--print-completion",), "show a script for bash, zsh, tcsh, fish", "SHELL", in_environment=False),
        Flag(("--version",), "show the version and exit", in_environment=False),
    ),
}

FLAGS: tuple[Flag, ...] = tuple(chain.from_iterable(GROUPS.values()))

BY_NAME = {name: flag for flag in FLAGS for name in flag.names}

_TORCHRUN = """
    nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf standalone max-restarts monitor-interval
    start-method event-log-handler role module no-python run-path log-dir redirects tee local-ranks-filter
    duplicate-stdout-filters duplicate-stderr-filters node-rank master-addr master-port local-addr logs-specs
    numa-binding signals-to-handle shutdown-timeout virtual-local-rank help
"""

TORCHRUN = frozenset(f"--{name}" for name in _TORCHRUN.split())
"""The long names of torchrun's own flags (torch 2.13); a test compares them with its parser.

Flags that torch 2.14 adds follow them: an abbreviation that is unambiguous in 2.13 must stay so.
"""

TORCHRUN_2_14 = TORCHRUN | {"--print-completion", "--log-line-prefix-template"}


@dataclass(frozen=True, slots=True)
class Sourced:
    """A flag's value from a ``source`` other than the command line and the environment."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command line, split but not yet interpreted.

    Attributes:
        given: values by flag name, in order; the value of a switch is empty.
        script: what the workers run, or None if not given.
        arguments: the arguments after it, verbatim.
        wants: ``--help``, ``--version`` or ``--print-completion``, if given.
        defaults: values by flag name that another front end uses as defaults.
    """

    given: dict[str, list[str]] = field(default_factory=dict)
    script: str | None = None
    arguments: tuple[str, ...] = ()
    wants: str | None = None
    defaults: Mapping[str, Sourced] = field(default_factory=dict)


class _InformationAskedError(Exception):
    """A flag asks for information: what follows it does not matter."""


class _Information(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: object = None
    ) -> None:
        if isinstance(values, str):
            setattr(namespace, self.dest, [values])
        raise _InformationAskedError(self.dest)


class FlagParser(argparse.ArgumentParser):
    """argparse for a command line of torchrun's kind: flags, a script, and the script's own arguments.

    argparse gets each token with the full name of its flag, so it has neither spellings nor abbreviations to resolve.
    A token that starts with a dash and is not a flag gets a mark, with which argparse takes it for a value or for the
    script. The script and all that follows are one argument of argparse, and are returned as they were given.
    """

    _NO_FLAG = "\0"  # not possible in an argument vector

    def __init__(self, flags: Sequence[Flag]) -> None:
        super().__init__(
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            conflict_handler="resolve",
            exit_on_error=False,
        )
        self.table = {name: flag for flag in flags for name in flag.names}
        for flag in flags:
            informs = flag.name in ("--help", "--version", "--print-completion")
            if flag.metavar:
                action: Any = _Information if informs else "append"
                self.add_argument(*flag.names, dest=flag.name, action=action, type=self._value)
            elif informs:
                self.add_argument(*flag.names, dest=flag.name, action=_Information, nargs=0)
            else:
                self.add_argument(*flag.names, dest=flag.name, action="append_const", const="")
        self.add_argument("rest", nargs=argparse.REMAINDER)

    def split(self, argv: Sequence[str]) -> CommandLine:
        """Split an argument vector; see :func:`split`."""
        tokens = [self._full(token) for token in argv]
        found, wants = argparse.Namespace(), None
        try:
            self.parse_args(tokens, found)
        except _InformationAskedError as asked:
            wants = str(asked)
        except argparse.ArgumentError as error:
            raise self._lacks_value(argv, tokens, str(error.argument_name).split("/")) from None
        given: dict[str, Any] = vars(found)
        count = len(given.pop("rest", ()))
        rest = list(argv[len(argv) - count :])
        if count and tokens[-count].startswith(self._NO_FLAG):
            try:
                self._resolve(rest[0])
            except CommandLineError as error:
                if "--config" in given:
                    error.hint += " If the job file names it, they go after --."
                raise
        if rest[:1] == ["--"]:
            del rest[0]
        return CommandLine(given, rest[0] if rest else None, tuple(rest[1:]), wants)

    def _full(self, token: str) -> str:
        if not token.startswith("-") or token in ("-", "--"):
            return token
        try:
            name, value = self._resolve(token)
        except CommandLineError:
            return self._NO_FLAG + token
        return name if value is None else f"{name}={value}"

    def _value(self, token: str) -> str:
        value = token.removeprefix(self._NO_FLAG)
        if value is not token and value.startswith("--"):
            raise argparse.ArgumentTypeError
        return value

    def _resolve(self, token: str) -> tuple[str, str | None]:
        """Return the full name of the flag that ``token`` spells, and the value after its equals sign."""
        spelled, equals, text = token.partition("=")
        name, value = spelled.replace("_", "-"), text if equals else None
        if not name.startswith("--") and re.fullmatch("-n[0-9]+|-[rt][0-9][0-9:,]*", token) and name[:2] in self.table:
            # As in getopt. Nothing else may follow a letter directly: -nnodes is a typo of --nnodes.
            return name[:2], name[2:]
        if name not in self.table:
            name = self._completed(spelled, name)
        if value is not None and not self.table[name].metavar:
            raise CommandLineError(f"{token} gives a value to a switch.", f"Write {self.table[name].name} alone.")
        return name, value

    def _completed(self, spelled: str, name: str) -> str:
        """Return the full name of an abbreviated flag."""
        if name == "--token":
            raise CommandLineError(
                "--token is not a flag: every user of the host can read the command lines of its processes.",
                "Put the token into ELASTIC_LAUNCH_TOKEN, or into a file that --token-file names.",
            )
        # An abbreviation that torchrun accepts must work, whatever other flags there are.
        for names in (TORCHRUN, TORCHRUN_2_14, self.table) if name.startswith("--") else ():
            candidates = dict.fromkeys(self.table[known].name for known in names if known.startswith(name))
            if len(candidates) == 1:
                return next(iter(candidates))
            if candidates and names is self.table:
                *others, last = candidates
                raise CommandLineError(f"{spelled} could be {', '.join(others)} or {last}.", "Write more of its name.")
        meant = nearest("--" + name.lstrip("-"), (known for known in self.table if known.startswith("--")))
        raise CommandLineError(
            f"unknown flag {spelled}.",
            f"{f'Did you mean {meant}? ' if meant else ''}{PROGRAM} --help lists the flags; those of the script go "
            "after the script.",
        )

    def _lacks_value(self, argv: Sequence[str], tokens: Sequence[str], names: Sequence[str]) -> CommandLineError:
        """Return the error for the first of these flags that no value follows."""
        ends = (*tokens[1:], "--")
        at = next(
            at
            for at, (token, following) in enumerate(zip(tokens, ends, strict=True))
            if token in names and following.removeprefix(self._NO_FLAG).startswith("-")
        )
        flag = self.table[tokens[at]]
        found = f"found {argv[at + 1]}" if at + 1 < len(argv) else "the command ends there"
        return CommandLineError(f"{argv[at]} needs a value, {found}.", f"Write {flag.name} {flag.metavar}.")


def split(argv: Sequence[str], also: Sequence[Flag] = ()) -> CommandLine:
    """Split an argument vector into the launcher's flags, the script, and the script's arguments.

    Args:
        also: additional flags of another front end.
    """
    return FlagParser((*FLAGS, *also)).split(argv)


class Values:
    """The values of the flags: from the command line, then the environment, then a job file.

    Attributes:
        given: see :class:`CommandLine`.
        beneath: values by flag name that apply where neither sets one; the first mapping wins.
        torchrun: whether to follow torchrun where this project differs.
    """

    def __init__(
        self,
        given: Mapping[str, Sequence[str]],
        environ: Mapping[str, str],
        beneath: Sequence[Mapping[str, Sourced]] = (),
        table: Mapping[str, Flag] = BY_NAME,
    ) -> None:
        self.given = given
        self.environ = environ
        self.beneath = tuple(beneath)
        self.table = table
        self.torchrun = False

    def variable(self, name: str) -> str | None:
        """The environment variable that sets a flag; empty ones count as unset."""
        return next((variable for variable in self.table[name].variables if self.environ.get(variable)), None)

    def below(self, name: str) -> Sourced | None:
        """A flag's value that applies only if neither the command line nor the environment sets one."""
        return next((layer[name] for layer in self.beneath if name in layer), None)

    def origin(self, name: str) -> str | None:
        """Where a flag's value comes from: the flag, a variable, or a line of a job file; None if it is not set."""
        if name in self.given:
            return name
        below = self.below(name)
        return self.variable(name) or (below.source if below else None)

    def text(self, name: str) -> str | None:
        """The value of a flag as the user wrote it, or None."""
        texts = self.given.get(name)
        if texts and (texts[-1].strip() or not (self.torchrun and name in EMPTY)):
            if not texts[-1].strip():
                raise UsageError(f"{name} has an empty value.", "Give a value, or leave the flag out.")
            return texts[-1]
        if variable := self.variable(name):
            return self.environ[variable]
        below = self.below(name)
        return below.text if below else None

    def switch(self, name: str) -> bool:
        """Whether a switch is on."""
        text = self.text(name) if name not in self.given else None
        return name in self.given or (text is not None and Setting(self.asked(name), text).truth())

    def asked(self, name: str) -> str:
        """What stands before a value where it was given: ``--nproc ``, ``PET_NPROC=`` or ``job.yaml:3: nproc: ``."""
        return next((found[-1].asked for found in reversed(self.levels(name)) if found), "")

    def levels(self, name: str) -> list[list[Setting]]:
        """The values of a flag by where they are set, weakest first: each layer beneath, environment, command line."""
        below = [layer.get(name) for layer in reversed(self.beneath)]
        variable = self.variable(name)
        return [
            *([Setting(f"{value.source}: {name[2:]}: ", value.text)] if value else [] for value in below),
            [Setting(f"{variable}=", self.environ[variable])] if variable else [],
            [Setting(f"{name} ", text) for text in self.given.get(name, ())],
        ]

    def setting(self, name: str) -> Setting | None:
        """The value of a flag as a setting to be parsed, or None."""
        text = self.text(name)
        return None if text is None else Setting(f"{name} ", text)

    def choice(self, name: str, known: Sequence[str], what: str = "is unknown") -> str | None:
        """The value of a flag that takes one of a few words, or None."""
        text = self.text(name)
        if text is not None and text not in known:
            raise UsageError(f"{name} {text} {what}.", f"Give {', '.join(known)}.")
        return text

    def integer(self, name: str, default: T) -> int | T:
        """The value of a flag that takes a whole number, or the default."""
        setting = self.setting(name)
        return setting.whole() if setting else default

    def seconds(self, name: str, default: float, *, zero: bool = True) -> float:
        """The value of a flag that takes a time to wait, or the default; ``zero`` says whether 0 is allowed."""
        setting = self.setting(name)
        return setting.seconds(zero=zero) if setting else default

    @contextmanager
    def attributed(self) -> Iterator[None]:
        """Extend an error by the origin of flags in its message that were not on the command line."""
        try:
            yield
        except UsageError as error:
            found = [
                f"{flag.name} comes from {self._place(flag.name)}."
                for flag in FLAGS
                if self.origin(flag.name) not in (None, flag.name)
                and re.search(rf"(?<![\w-]){flag.name}(?![\w-])", error.message)
            ]
            raise type(error)(" ".join([error.message, *found]), error.hint) from None

    def _place(self, name: str) -> str | None:
        variable = self.variable(name)
        return f"{variable}={self.environ[variable]} in the environment" if variable else self.origin(name)
