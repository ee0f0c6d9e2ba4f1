"""Parses job files.

The YAML is composed, not loaded: YAML 1.1 would read ``nnodes: 1:4`` as 64 and ``role: no`` as False, and a composed
node knows its line.
"""

from __future__ import annotations

import re
from typing import NoReturn

import yaml

from elastic_launch.cli.flags import FLAGS, Flag, Sourced
from elastic_launch.cli.job import NOT_IN_FILES, JobFile
from elastic_launch.config.settings import nearest
from elastic_launch.contract import FOR_WORKERS
from elastic_launch.errors import UsageError
from elastic_launch.system.private_files import read_bounded

MAX_BYTES = 1024 * 1024
"""Bytes of a job file at most."""

_FLAG_KEYS = {
    name[2:]: flag for flag in FLAGS for name in flag.names if name.startswith("--") and flag.name not in NOT_IN_FILES
}

_OWN_KEYS = ("script", "args", "env")

_SET_BY_US = FOR_WORKERS - {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}

_TAG = "tag:yaml.org,2002:"

_SCALARS = {_TAG + kind for kind in ("str", "int", "float", "bool", "null", "timestamp", "value", "merge")}
"""Accepted tags of scalars; all of them are used as written."""


class JobFileReader:
    """Reads one job file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: dict[str, int] = {}

    def read(self) -> JobFile:
        root = self._compose()
        if root is None:
            return JobFile()
        if not isinstance(root, yaml.MappingNode):
            self._refuse(root, "holds no keys", "Write KEY: VALUE lines, as in nproc: 8.")
        values: dict[str, Sourced] = {}
        own: dict[str, yaml.Node] = {}
        for key, node in self._items(root, ""):
            if key in _OWN_KEYS:
                own[key] = node
            else:
                flag = self._flag(key, node)
                values[flag.name] = self._value(key, flag, node)
        path = "Write the script's path, as in script: train.py."
        return JobFile(
            values,
            self._text("script", own["script"], path) if "script" in own else None,
            self._args(own["args"]) if "args" in own else (),
            self._env(own["env"]) if "env" in own else {},
        )

    def _compose(self) -> yaml.Node | None:
        try:
            text = read_bounded(self._path, MAX_BYTES).decode("utf-8")
        except (OSError, ValueError) as error:
            problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            if isinstance(error, UnicodeDecodeError):
                problem = f"is not a text in UTF-8: {error.reason}"
            raise UsageError(f"--config {self._path} {problem}.", "Name a YAML file.") from None
        try:
            return yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{self._path}:{mark.line + 1}" if mark else self._path
            problem = error.problem or error.context or "no YAML"
            raise UsageError(f"{where}: {problem}.", "Correct the YAML there; a value may need quotes.") from None
        except (yaml.YAMLError, RecursionError) as error:
            problem = getattr(error, "reason", None) or "nested too deeply"
            raise UsageError(f"{self._path} is not YAML: {problem}.", "Correct the file.") from None

    def _items(self, node: yaml.MappingNode, within: str) -> list[tuple[str, yaml.Node]]:
        """Return a mapping's keys and values, each key only once; in top-level keys, underscores become dashes."""
        found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(key_node, "has a key that is not a word", "Write KEY: VALUE.")
            key = key_node.value if within else key_node.value.replace("_", "-")
            if key in found:
                before = found[key][0].start_mark.line + 1
                self._refuse(key_node, f"gives {within}{key} again; line {before} has it already", "Keep one of them.")
            found[key] = key_node, value
        return [(key, value) for key, (_, value) in found.items()]

    def _flag(self, key: str, node: yaml.Node) -> Flag:
        flag = _FLAG_KEYS.get(key)
        if flag is None:
            meant = nearest(key.lstrip("-"), [*_FLAG_KEYS, *_OWN_KEYS])
            first = f"Did you mean {meant}? " if meant else ""
            self._refuse(
                node,
                f"has the unknown key {key!r}",
                f"{first}Keys are script, args, env, and the names of the flags without the leading dashes.",
            )
        before = self._lines.setdefault(flag.name, node.start_mark.line + 1)
        if before != node.start_mark.line + 1:
            self._refuse(node, f"gives {key} again; line {before} has it under another name", "Keep one of them.")
        return flag

    def _value(self, key: str, flag: Flag, node: yaml.Node) -> Sourced:
        if not flag.metavar:
            if node.tag != f"{_TAG}bool":
                self._refuse(
                    node, f"gives {key} {_kind(node)}, and it is a switch", f"Write {key}: true or {key}: false."
                )
            truth = str(node.value).lower() in ("true", "yes", "on")
            return Sourced("true" if truth else "false", self._where(node))
        remedy = f"Write {key}: {flag.metavar}."
        if isinstance(node, yaml.SequenceNode) and _takes_list(flag):
            return Sourced(",".join(self._text(key, item, remedy).text for item in node.value), self._where(node))
        if isinstance(node, yaml.MappingNode) and "K=V" in flag.metavar:
            pairs = [
                f"{name}={self._text(f'{key}.{name}', item, remedy).text}" for name, item in self._items(node, key)
            ]
            return Sourced(",".join(pairs), self._where(node))
        return self._text(key, node, remedy)

    def _text(self, key: str, node: yaml.Node, remedy: str, *, empty: bool = False) -> Sourced:
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS:
            self._refuse(node, f"gives {key} {_kind(node)} where one value belongs", remedy)
        if node.tag == f"{_TAG}null" or not (empty or node.value.strip()):
            self._refuse(node, f"gives {key} no value", f"{remedy} Or leave the key out.")
        if "\0" in node.value:
            self._refuse(node, f"gives {key} a value with a NUL in it", remedy)
        return Sourced(node.value, self._where(node))

    def _args(self, node: yaml.Node) -> tuple[Sourced, ...]:
        remedy = "Write a list, as in args: [--lr, 0.1]."
        if not isinstance(node, yaml.SequenceNode):
            self._refuse(node, f"gives args {_kind(node)} where a list belongs", remedy)
        return tuple(self._text("args", item, remedy, empty=True) for item in node.value)

    def _env(self, node: yaml.Node) -> dict[str, Sourced]:
        if not isinstance(node, yaml.MappingNode):
            self._refuse(node, f"gives env {_kind(node)} where variables belong", "Write env: {NAME: VALUE}.")
        found = {}
        for name, item in self._items(node, "env."):
            self._check_variable(name, item)
            found[name] = self._text(
                f"env.{name}", item, f'Write {name}: VALUE, or {name}: "" for an empty one.', empty=True
            )
        return found

    def _check_variable(self, name: str, node: yaml.Node) -> None:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            self._refuse(
                node, f"has {name!r} in env, which is not a valid variable name", "Use letters, digits and underscores."
            )
        if name in _SET_BY_US:
            self._refuse(node, f"has {name} in env, which the launcher itself sets for each worker", "Leave it out.")
        if name.startswith("PET_"):
            key = name.removeprefix("PET_").lower().replace("_", "-")
            self._refuse(
                node, f"has {name} in env, which is the default of a flag", f"Write {key}: as a key of its own."
            )
        if name.startswith("ELASTIC_LAUNCH_"):
            self._refuse(
                node,
                f"has {name} in env, which is the launcher's and not for workers",
                "Set it in the environment; a token also fits into a file that token-file names.",
            )

    def _where(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"

    def _refuse(self, node: yaml.Node, problem: str, hint: str) -> NoReturn:
        raise UsageError(f"{self._where(node)} {problem}.", hint)


def _takes_list(flag: Flag) -> bool:
    return "," in flag.metavar or flag.metavar == "LIST" or flag.name == "--rdzv-endpoint"


def _kind(node: yaml.Node) -> str:
    """Return the name of a node's kind, for errors."""
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if node.tag == f"{_TAG}null":
        return "no value"
    if node.tag not in _SCALARS:
        return f"a value tagged {node.tag}"
    return repr(node.value)
