"""Write the man pages of elastic-launch, elastic-composer and elasticctl from their own tables and parsers.

    python scripts/man_pages.py DIRECTORY

The release's wheel contains them, see build_dist.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic_launch import __version__
from elastic_launch.cli import composer, elasticctl
from elastic_launch.cli.flags import GROUPS, USAGE, Flag
from elastic_launch.cli.help import EXIT_CODES, SUMMARY


def escaped(text: str) -> str:
    """The text as roff shows it: a dash is a minus, and no line begins with a command."""
    shown = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join("\\&" + line if line.startswith((".", "'")) else line for line in shown.splitlines())


def page(name: str, summary: str, usage: str, body: list[str], beside: str) -> str:
    head = [
        f'.TH {name.upper()} 1 "" "elastic-launch {__version__}"',
        *(".SH NAME", escaped(f"{name} - {summary}")),
        *(".SH SYNOPSIS", ".B " + escaped(usage)),
    ]
    return "\n".join([*head, *body, ".SH SEE ALSO", f".BR {escaped(beside)} (1)"]) + "\n"


def item(title: str, text: str) -> list[str]:
    return [".TP", ".B " + escaped(title), escaped(text) or "\\&"]


def described(flags: Sequence[Flag], variables: Callable[[Flag], Sequence[str]]) -> list[str]:
    found: list[str] = []
    for flag in flags:
        default = f" Default: {flag.default}." if flag.default else ""
        read = f" Variables: {', '.join(variables(flag))}." if variables(flag) else ""
        found += item(f"{', '.join(flag.names)} {flag.metavar}".rstrip(), f"{flag.purpose}.{default}{read}")
    return found


def launcher() -> str:
    body = [".SH DESCRIPTION", escaped(SUMMARY)]
    for title, flags in GROUPS.items():
        body.append(f'.SH "{escaped(title).upper()}"')
        body += described(flags, lambda flag: flag.variables)
    body.append('.SH "EXIT STATUS"')
    for code, meaning in EXIT_CODES:
        body += item(str(code.value), meaning)
    return page("elastic-launch", "run an elastic PyTorch training job", USAGE, body, "elasticctl")


def fixed_world() -> str:
    body = [".SH DESCRIPTION", escaped(composer.SUMMARY), ".SH OPTIONS"]
    body += described(composer.FLAGS, lambda flag: (flag.fallback,) if flag.fallback else ())
    body += [".SH NOTES", *(escaped(note) for line in composer.NOTES for note in (line, ".br"))][:-1]
    summary = "run one node's part of a PyTorch training job of fixed size"
    return page(composer.PROGRAM, summary, composer.USAGE, body, "elastic-launch")


def options(parser: argparse.ArgumentParser) -> list[str]:
    found: list[str] = []
    for action in parser._actions:
        if action.option_strings and action.help and action.dest != "help":
            found += item(f"{', '.join(action.option_strings)} {action.metavar or ''}".rstrip(), action.help)
    return found


def control() -> str:
    top = elasticctl.parser()
    (commands,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    body = [".SH DESCRIPTION", escaped(top.description or ""), *options(top)]
    for choice in commands._choices_actions:
        command = commands.choices[choice.dest]
        arguments = [
            f" [{x.metavar}]" if x.nargs == "?" else f" {x.metavar}" for x in command._get_positional_actions()
        ]
        body += [f'.SH "{escaped(choice.dest + "".join(arguments)).upper()}"', escaped(choice.help or "")]
        body += options(command)
    summary = "show and control a run of elastic-launch"
    return page("elasticctl", summary, "elasticctl COMMAND [flags]", body, "elastic-launch")


def main(directory: str) -> None:
    pages = {"elastic-launch": launcher(), "elastic-composer": fixed_world(), "elasticctl": control()}
    for name, text in pages.items():
        path = Path(directory, f"{name}.1")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
