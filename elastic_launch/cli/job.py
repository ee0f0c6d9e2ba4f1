"""A command line together with its job file, and how it is shown as a job file.

YAML is imported only to read or write such a file, since the import would delay every launch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_launch.cli.flags import FLAGS, CommandLine, Flag, Sourced, Values
from elastic_launch.config.settings import Setting

NOT_IN_FILES = ("--help", "--version", "--config", "--print-config", "--print-completion")

_MERGED = ("--rdzv-conf", "--preload", "--no-preload", "--notice")
"""Flags whose repeated values are merged."""

_COLUMN = 40


@dataclass(frozen=True, slots=True)
class JobFile:
    """The content of a job file, each value with its file and line.

    Attributes:
        script: what the workers run; None if the command line names it.
        args: arguments of the script, before those of the command line.
        env: variables for the launcher and its workers, unless set in the environment.
    """

    values: Mapping[str, Sourced] = field(default_factory=dict)
    script: Sourced | None = None
    args: tuple[Sourced, ...] = ()
    env: Mapping[str, Sourced] = field(default_factory=dict)


class Job:
    """A command line together with the job file that it names, if any.

    Attributes:
        line: the command line with the file's script and arguments.
        values: the values of flags, environment and file.
        file: the job file; empty if none is named.
        added: variables that the file adds to the environment.
    """

    def __init__(self, line: CommandLine, environ: Mapping[str, str]) -> None:
        path = Values(line.given, environ).text("--config")
        self.asked = line
        self.file = JobFile()
        if path is not None:
            from elastic_launch.cli.job_file_reader import JobFileReader  # which imports YAML

            self.file = JobFileReader(path).read()
        arguments = tuple(value.text for value in self.file.args)
        if self.file.script is None:
            self.line = replace(line, arguments=(*arguments, *line.arguments))
        else:  # everything after the flags is the script's
            further = () if line.script is None else (line.script,)
            self.line = replace(line, script=self.file.script.text, arguments=(*arguments, *further, *line.arguments))
        self.added = {name: value.text for name, value in self.file.env.items() if name not in environ}
        self.values = Values(line.given, {**environ, **self.added}, (self.file.values, line.defaults))


def shown(job: Job, settings: Mapping[str, Setting]) -> str:
    """Return every value with its source, as an equivalent job file; defaults are commented out.

    Args:
        settings: the rendezvous settings, merged from all sources.
    """
    lines = [_shown_flag(job.values, flag, settings) for flag in FLAGS if flag.name not in NOT_IN_FILES]
    file, asked = job.file, job.asked
    typed: Sequence[str] = asked.arguments
    if file.script is not None:
        lines.append(_entry("script", file.script.text, file.script.source))
        typed = typed if asked.script is None else (asked.script, *typed)
    elif asked.script is not None:
        lines.append(_entry("script", asked.script, "command line"))
    if file.args or typed:
        lines.append("args:")
        lines += [_entry("  -", value.text, value.source) for value in file.args]
        lines += [_entry("  -", text, "command line") for text in typed]
    if file.env:
        lines.append("env:")
        for name, value in file.env.items():
            source = value.source if name in job.added else "environment"
            lines.append(_entry(f"  {name}", job.values.environ[name], source))
    return "\n".join(lines) + "\n"


def _shown_flag(values: Values, flag: Flag, settings: Mapping[str, Setting]) -> str:
    key = flag.name[2:]
    origin = values.origin(flag.name)
    if origin is not None:
        text = ",".join(values.given.get(flag.name, ())) if flag.name in _MERGED else ""
        text = text or (values.text(flag.name) or "") if flag.metavar else str(values.switch(flag.name)).lower()
        return _entry(key, text, origin)
    if setting := settings.get(key.replace("-", "_")):
        return _entry(key, setting.text, setting.asked.rpartition(" ")[0])
    return _entry(f"# {key}", flag.default or ("none" if flag.metavar else "false"), "default", plain=True)


def _entry(key: str, text: str, source: str, *, plain: bool = False) -> str:
    if not plain and (text.lower() == "null" or not re.fullmatch(r"[\w./][\w./:=,+@-]*(?<!:)", text, re.ASCII)):
        import yaml

        text = yaml.safe_dump(text, default_style='"', width=2**31, allow_unicode=False).strip()
    start = f"{key} {text}" if key.endswith("-") else f"{key}: {text}"
    return f"{start.ljust(_COLUMN)}  # {source}"
