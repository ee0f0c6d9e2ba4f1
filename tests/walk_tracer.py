"""Runs an agent, and records which modules a killed worker passes: ``walk_tracer.py FILE ARGUMENTS``.

The walk begins as the process is reaped, and ends with the first step of the next round. What its functions do as well
while training goes on undisturbed is not part of it. FILE has the walk as JSON: ``new`` are the modules that a function
was called in which is not called then, in order; ``passed`` all modules that were called; ``entries`` the events that
the agent's loop has given to the policy.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from elastic_launch.cli.main import main

REAPED = "elastic_agents.exits", "Exits.reaped"
RECORDED = "elastic_launch.events.sinks", "JsonLines.emit"
FOLLOWED = "elastic_agents.agent", "NodeAgent._follow"


class Tracer:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._phase = "start"
        self._calm: set[tuple[str, str]] = set()
        self._names: dict[CodeType, tuple[str, str] | None] = {}
        self._new: dict[str, None] = {}
        self._passed: set[str] = set()
        self._entries: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or self._phase == "over":
            return
        name = self._name(frame.f_code)
        if name is None:
            return
        recorded = type(frame.f_locals.get("event")).__name__ if name == RECORDED else ""
        match self._phase:
            case "start":
                self._phase = "calm" if recorded == "FirstStep" else "start"
            case "calm" if name != REAPED:
                self._calm.add(name)
            case _:
                self._phase = "walk"
                self._walk(name, frame, recorded)

    def _walk(self, name: tuple[str, str], frame: FrameType, recorded: str) -> None:
        self._passed.add(name[0])
        if name not in self._calm:
            self._new[name[0]] = None
        if name == FOLLOWED:
            followed = frame.f_locals["event"]
            report = getattr(followed, "report", followed)
            self._entries.append(type(report).__name__)
        if recorded == "FirstStep":
            self._phase = "over"
            found = {"new": list(self._new), "passed": sorted(self._passed), "entries": self._entries}
            self._path.write_text(json.dumps(found))

    def _name(self, code: CodeType) -> tuple[str, str] | None:
        if code not in self._names:
            parts = Path(code.co_filename).with_suffix("").parts
            roots = [index for index, part in enumerate(parts) if part in ("elastic_launch", "elastic_agents")]
            ours = roots and "site-packages" not in parts
            self._names[code] = (".".join(parts[roots[-1] :]), code.co_qualname) if ours else None
        return self._names[code]


if __name__ == "__main__":
    tracer = Tracer(Path(sys.argv[1]))
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    sys.exit(main(sys.argv[2:]))
