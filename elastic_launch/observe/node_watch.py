"""What those who watch a run see of it: a few figures with names, for a terminal and for a page."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Sequence

from elastic_launch.clock import Clock
from elastic_launch.errors import ExitCode
from elastic_launch.events import types as ev
from elastic_launch.events.sentences import sentence
from elastic_launch.events.types import counted
from elastic_launch.failure import Suspect
from elastic_launch.observe.ledger import PARTS, PLANNED, RoundIncident, spoken
from elastic_launch.observe.live import LiveLedger
from elastic_launch.observe.present import Present
from elastic_launch.system.plain_text import one_line

WINDOW = 15.0
"""Seconds whose steps make the rate of steps."""

NODES = 8
"""Nodes that are named at most; of the others there is the number."""

LONGEST = 20
"""Characters of a node's name that are shown."""

QUIET = 5.0, 5.0
"""A round does not advance if it has done no step for so many seconds, and so many times as long as a step takes."""

PARTS_SHOWN = 2
"""Parts of an incident in progress that are shown: those that have taken the longest, and a tenth of it at least."""

_STILL = ("waiting", "suspended", "stopping", "ended")
"""Phases of an agent in which none of its workers trains."""

_ENDED = (ExitCode.DONE, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
"""Exit codes of a run that has not failed."""

HAPPENED = 8
"""Events that are told with their times: the last ones."""

_RANDOM = re.compile("-[0-9a-f]{6}$")
"""The end of a node's default name."""


class NodeWatch:
    """Follows a node's events, and how the node is at moments. Thread-safe.

    Args:
        replica_size: workers of a replica, see ``--replica-size``.
    """

    def __init__(self, clock: Clock, ledger: LiveLedger, replica_size: int = 1) -> None:
        self._replica_size = replica_size
        self._clock = clock
        self._ledger = ledger
        self._lock = threading.Lock()
        self._since = clock.now()
        self._linked = False
        self._next = "finds the run's leader"
        self._ended: tuple[float, str] | None = None  # when something last happened that may end a round, and what
        self._still: tuple[float, str] | None = None  # since when this node's workers do not train, and why
        self._started = 0  # workers of this node in the round
        self._stepless: str | None = "workers start"  # what the round waits for before its first step; None: it steps
        self._checkpoint: tuple[int, float] | None = None
        self._snapshot: tuple[int, float] | None = None
        self._steps: deque[tuple[float, int, float]] = deque()
        self._moved = 0, self._since  # the steps done, and when they were first seen
        self._stepped = self._planned = False
        self._saves_itself = False  # the script does, or nothing
        self._path = ""  # of the checkpoint
        self._word = "starting", self._since
        self._begun = 0  # the step with which the round has begun to train
        self._slow: dict[str, int] = {}  # ranks found to be slow in this round, by node
        self._happened: deque[tuple[float, str]] = deque(maxlen=HAPPENED)

    def add(self, event: ev.Event) -> None:
        with self._lock:
            ahead = isinstance(event, ev.WorkerExited) and not event.round and event.failed
            if event.printed or ahead or isinstance(event, ev.StragglerFound):
                self._happened.append((self._clock.now(), sentence(event)))
            if isinstance(event, ev.RoundDraining | ev.RoundBroken | ev.OrderReceived) and event.kind:
                self._planned = event.kind in PLANNED
            match event:
                case ev.StragglerFound(node=node, rank=rank):
                    self._slow[node] = rank
                case ev.LinkChanged(up=True):
                    # Of the leader's node, more may be known already.
                    self._next = self._next if self._linked else "waits for a round to form"
                    self._linked, self._ended = True, None
                case ev.LinkChanged(cause=cause):
                    self._linked, self._next = False, f"no link to the leader: {cause}"
                    self._ends(self._next)
                case ev.NodeJoined(next=following):
                    self._linked, self._next = True, following
                case ev.Parked():
                    self._next = sentence(event)
                case ev.RoundDraining(cause=cause) | ev.RoundBroken(cause=cause):
                    self._next = cause
                case ev.OrderReceived(order="form"):
                    self._started, self._stepless = 0, "workers start"
                    self._slow.clear()
                case ev.OrderReceived(order="drain" | "break" | "evicted", cause=cause):
                    self._next = cause
                    self._ends(cause)
                case ev.WorkerStarted() | ev.WorkerKept() | ev.WorkerPlaced() if event.round:
                    self._started += 1
                    self._ended, self._still, self._next = None, None, "its workers have left the round"
                case ev.WorkerStarted():
                    self._next = "its workers start ahead of a round"
                case ev.WorkerAhead():
                    self._next = "its workers wait for a place in a round"
                case ev.TrainingBegun(step=step, saves_itself=alone):
                    self._stepless, self._saves_itself, self._begun = "first step", alone, step
                case ev.FirstStep():
                    self._stepless, self._stepped = None, True
                    self._moved = self._moved[0], self._clock.now()
                case ev.CheckpointSaved(step=step, path=path):
                    self._checkpoint, self._path = (step, self._clock.now()), path

    def figures(self, present: Present, named: int = NODES) -> list[tuple[str, str]]:
        """Return names and values, the most important first; at most ``named`` nodes are named."""
        with self._lock:
            now = self._clock.now()
            rate = self._rate(present, now)
            steps = present.phase not in (*_STILL, "held") and self._stepless is None
            advances = steps and self._quiet(present, now) is None
            if present.snapshot is None:
                self._snapshot = None
            elif self._snapshot is None or self._snapshot[0] != present.snapshot:
                self._snapshot = present.snapshot, now
            found = [("world size", _world(present, named))]
            if present.step is not None:
                share = f" of {present.total} ({present.step / present.total:.0%})" if present.total else ""
                found.append(("step", f"{present.step}{share}"))
            if rate is not None and advances:
                found.append(("steps/s", f"{rate:.3g}" if rate < 100 else f"{rate:.0f}"))
            if present.remaining is not None and advances:
                found.append(("time left", span(present.remaining)))
            if present.loss is not None:
                found.append(("loss", f"{present.loss:.4g}"))
            if present.restarts is not None and (most := present.max_restarts) is not None:
                found.append(("restarts left", f"{max(0, most - present.restarts)} of {most}"))
            for name, saved in (("snapshot", self._snapshot), ("checkpoint", self._saved(present, now))):
                if saved is not None:
                    found.append((name, f"step {saved[0]}, {span(now - saved[1])} ago"))
            if present.batch:
                found.append(("global batch", f"{present.batch}, accumulation {present.passes}"))
            found.append(("running for", span(now - self._since)))
            return found

    def state(self, present: Present) -> tuple[str, float]:
        """Return what the run, as far as this node knows, does now in one word or two, and since when by the clock."""
        last = self._ledger.incident()
        with self._lock:
            now = self._clock.now()
            word, since = self._state(present, last[0] if last is not None and not last[0].recovered else None, now)
            if word != self._word[0] or since is not None:
                self._word = word, now if since is None else since
            return self._word

    def _state(self, present: Present, incident: RoundIncident | None, now: float) -> tuple[str, float | None]:
        if present.end is not None:
            return "ended" if present.end.code in _ENDED else "failed", None
        if present.phase in ("saving", "over", "leaving"):
            return "saving", None
        if present.phase == "starting" or (present.phase == "waiting" and not present.round):
            return "starting", None
        if present.parked or (present.phase == "waiting" and incident is None):
            return "parked", None
        if incident is not None:
            word = "changing" if incident.drained and incident.kind in PLANNED else "standing still"
            return word, now - incident.still_s
        if present.phase == "draining":
            return "changing", None
        if present.phase in (*_STILL, "held"):
            return "changing" if self._planned else "standing still", None if self._still is None else self._still[0]
        if (quiet := self._quiet(present, now)) is not None:
            return "standing still", now - quiet
        begins = self._stepless == "first step" or self._started < present.workers
        return "starting" if begins and not self._stepped else "training", None

    def safe(self, present: Present) -> str:
        """Return where the state is, in one line; empty as long as nothing is known of it."""
        if present.end is not None and present.end.saved:
            return present.end.saved
        with self._lock:
            now, saved = self._clock.now(), self._saved(present, self._clock.now())
            held = present.snapshot is not None and present.end is None
            memory = f"step {present.snapshot} in this node's memory" if held else ""
            newest = max(present.snapshot or 0, saved[0] if saved else 0)
            if 1 < self._replica_size == present.world_size and newest < self._begun and not present.end:
                memory += f"{memory and '; '}unprotected: only one replica has the state after step {newest}"
            if saved is None:
                nothing = "the launcher knows of no saved state" if present.step else ""
                nothing += "; a script with its own loop may save by itself" if nothing and self._saves_itself else ""
                return f"no checkpoint yet; {memory}" if memory else nothing
            path = f" in {self._path}" if self._path and saved == self._checkpoint else ""
            clock = time.strftime("%H:%M:%S", time.gmtime(time.time() - (now - saved[1])))
            text = f"step {saved[0]} is saved{path}, at {clock} UTC, {span(now - saved[1])} ago"
            return f"{text}; {memory}" if memory else text

    def in_question(self, present: Present) -> tuple[Suspect, ...]:
        """Return the nodes and ranks for which the run stands still or has failed."""
        if present.end is not None and (present.end.code in _ENDED or present.end.suspects):
            return present.end.suspects if present.end.code not in _ENDED else ()
        last = self._ledger.incident()
        return last[0].suspects if last is not None and not last[0].recovered else ()

    def slow(self) -> dict[str, int]:
        """Return the ranks that were found to be slow in this round, by node."""
        with self._lock:
            return dict(self._slow)

    def happened(self) -> tuple[float, list[tuple[float, str]]]:
        """Return the time by the clock, and the last decisions and findings with theirs, the last one first."""
        with self._lock:
            return self._clock.now(), list(self._happened)[::-1]

    def doing(self, present: Present, width: int | None = None) -> str:
        """Return what the node does or waits for, and the last incident, in one line.

        Args:
            width: a longer line has its cause cut, so that the rest is seen.
        """
        if present.end is not None:
            return _plain(present.end.line(), present)
        last = self._ledger.incident()
        with self._lock:
            now = self._clock.now()
            phase, why = self._phase(present, now)
            if present.phase not in _STILL:
                self._still = None
            elif self._still is None and present.round:
                self._still = self._ended or (now, "")  # workers may leave a round before its end is known here
            still = None if self._still is None else (self._still[0], self._still[1] or self._next)
        if last is not None and not last[0].recovered:
            incident = last[0]
            cause = f"{incident.kind}, {incident.cause}" if incident.cause else incident.kind
            known = [(x, seconds) for x in PARTS if (seconds := getattr(incident, x) or 0.0) > incident.still_s / 10]
            most = sorted(known, key=lambda part: -part[1])[:PARTS_SHOWN]
            phases = ", ".join(f"{spoken(part)} {seconds:.1f} s" for part, seconds in most)
            before, after = f"still for {incident.still_s:.1f} s: ", f" ({phases})" if phases else ""
        elif still is not None:
            cause, before, after = still[1], f"still for {span(now - still[0])}: ", ""
        else:
            text = f"{phase}: {why}" if why else phase
            if last is None:
                return _plain(text, present)
            incident, ago = last
            cause = f"{incident.kind}, {incident.cause}" if incident.cause else incident.kind
            lost = f", {counted(incident.lost_steps, 'step')} lost" if incident.lost_steps else ""
            head = f"{text}; incident {incident.round}, {span(ago)} ago, cost {incident.still_s:.1f} s{lost}"
            return _plain(f"{head}: {cause}", present)
        cause, why = _plain(cause, present), _plain(why, present)
        after += f"; {phase}" if not why or why in cause else f"; {phase}: {why}"
        room = len(cause) if width is None else max(LONGEST, width - len(before) - len(after))
        return f"{before}{cause if len(cause) <= room else cause[: room - 1] + '…'}{after}"

    def _phase(self, present: Present, now: float) -> tuple[str, str]:
        """Return what the node does, and why or what it waits for."""
        match present.phase:
            case "starting":
                return "starts: imports torch", ""
            case "running" if self._stepless == "workers start" and self._started < present.workers:
                return f"workers start: {self._started} of {present.workers} have", ""
            case "running" if self._stepless == "workers start":
                # Whether they train is not known: a script need not report it.
                return "workers run; no step reported", ""
            case "running" if self._stepless:
                return f"trains; {self._stepless}", ""
            case "running" if present.unconfirmed is not None:
                added = "checkpoints are added and none is removed until the store answers"
                return f"trains; membership not confirmed for {span(present.unconfirmed)}", added
            case "running":
                quiet = self._quiet(present, now)
                return "trains" if quiet is None else f"no step for {span(quiet)}", ""
            case "held":
                return "the workers are stopped until the leader answers", "this agent did not run"
            case "leaving" | "over" | "finished" | "saving":
                return present.phase, ""
            case "waiting" if present.outlook:
                return present.phase, present.outlook
            case phase:
                return phase, self._next

    def _ends(self, cause: str) -> None:
        if self._ended is None:
            self._ended = self._clock.now(), cause

    def _saved(self, present: Present, now: float) -> tuple[int, float] | None:
        """Return the last checkpoint, of this node or of which the leader has told, and when it was written.

        Steps do not tell which one that is: a later training of the script counts anew, and checkpoints are withdrawn.
        """
        own, step, written = self._checkpoint, present.checkpoint, now - (present.checkpoint_age or 0.0)
        if step is None or (own is not None and (own[0] == step or own[1] >= written)):
            return own
        return step, written

    def _quiet(self, present: Present, now: float) -> float | None:
        """Return the seconds since the last step, if they are many and steps are due."""
        if present.trained != self._moved[0]:
            self._moved = present.trained, now
        least, times = QUIET
        each = present.trained_s / present.trained if present.trained else 0.0
        seconds = now - self._moved[1]
        due = present.phase == "running" and self._stepless is None and present.trained > 0
        return seconds if due and seconds > max(least, times * each) else None

    def _rate(self, present: Present, now: float) -> float | None:
        self._steps.append((now, present.trained, present.trained_s))
        while len(self._steps) > 2 and now - self._steps[0][0] > WINDOW:
            self._steps.popleft()
        for _, trained, seconds in (self._steps[0], (0.0, 0, 0.0)):
            if present.trained > trained and present.trained_s > seconds:
                return (present.trained - trained) / (present.trained_s - seconds)
        return None


def _world(present: Present, named: int) -> str:
    if not present.members:
        return "none yet"
    names = short_names([node for node, _ in present.members])
    shown = [f"{names[node]} {workers}" for node, workers in present.members[:named]]
    if shown and len(present.members) > named:
        shown.append(f"{len(present.members) - named} more")
    text = f"{present.world_size} on {counted(present.nodes, 'node')}" + (f": {', '.join(shown)}" if shown else "")
    return f"none trains; the last was {text}" if present.phase in _STILL else text


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return nodes' names as they are shown: without the domain that all have, and not longer than others can be."""
    parts = {name: (_RANDOM.sub("", name), "".join(_RANDOM.findall(name))) for name in names}
    domains = {base.partition(".")[2] for base, _ in parts.values()}
    bare = {name: base.partition(".")[0] + random for name, (base, random) in parts.items()}
    (domain,) = domains if len(domains) == 1 else ("",)
    needed = len(names) > 1 or len("".join(names)) > LONGEST
    if not (domain and needed and len(set(bare.values())) == len(names)) or domain.replace(".", "").isdigit():
        bare = {name: name for name in names}
    shown = {name: one_line(text) for name, text in bare.items()}
    if max(map(len, shown.values()), default=0) <= LONGEST:
        return shown
    # Mostly the end is what differs, a number for example.
    ends = {name: text if len(text) <= LONGEST else "…" + text[1 - LONGEST :] for name, text in shown.items()}
    if len(set(ends.values())) == len(ends):
        return ends
    return {name: text if len(text) <= LONGEST else text[: LONGEST - 1] + "…" for name, text in shown.items()}


def _plain(text: str, present: Present) -> str:
    """Return a text in one line, with the names of nodes as they are shown elsewhere."""
    text = one_line(text)
    for name, short in short_names([node for node, _ in present.members]).items():
        if len(short) < len(name):
            text = text.replace(name, short)
    return text


def span(seconds: float) -> str:
    """Return a time as people say it: ``3 s``, ``12 min``, ``2 h 5 min``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes // 1440} days"
