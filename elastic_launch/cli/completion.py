"""Shell completion scripts, for ``--print-completion``."""

from __future__ import annotations

import argparse
import shlex

from elastic_launch.cli.flags import FLAGS
from elastic_launch.errors import UsageError
from elastic_launch.system.program import PROGRAM

_BASH = """\
_elastic_launch() {
    local word=${COMP_WORDS[COMP_CWORD]}
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "NAMES" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}
complete -o filenames -F _elastic_launch PROGRAM
"""

_SCRIPTS = {
    "bash": _BASH,
    "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}",
    "tcsh": "complete PROGRAM 'c/-/(SHORT)/' 'p/*/f/'\n",
}

SHELLS = (*_SCRIPTS, "fish")


def _fish(program: str) -> str:
    """The script for fish, which shows the purpose of each flag beside it."""
    lines = []
    for flag in FLAGS:
        spelled = " ".join(
            f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" if len(name) == 2 else f"-o {name[1:]}"
            for name in flag.names
        )
        value = " -r" if flag.metavar else ""
        lines.append(f"complete -c {program} {spelled}{value} -d {shlex.quote(flag.purpose)}\n")
    return "".join(lines)


def completion(shell: str, program: str = PROGRAM) -> str:
    """Return the completion script for a shell to evaluate."""
    if shell not in SHELLS:
        raise UsageError(f"--print-completion {shell}: there is no script for it.", f"Give {', '.join(SHELLS)}.")
    if shell == "fish":
        return _fish(program)
    names = [name for flag in FLAGS for name in flag.names]
    script = _SCRIPTS[shell].replace("NAMES", " ".join(names)).replace("PROGRAM", program)
    return script.replace("SHORT", " ".join(name[1:] for name in names))  # tcsh has read the first dash


def completion_of(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of a program with an argparse parser: its commands, and the flags of each."""
    try:
        import shtab
    except ImportError as error:
        raise UsageError(
            f"--print-completion needs the package shtab: {error}.",
            "Install it with: pip install 'elastic-launch[completion]'.",
        ) from None
    if shell not in shtab.SUPPORTED_SHELLS:
        raise UsageError(
            f"--print-completion {shell}: shtab {shtab.__version__} has no script for it.",
            "Install a newer one with: pip install --upgrade shtab.",
        )
    return str(shtab.complete(parser, shell))
