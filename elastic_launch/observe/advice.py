"""What to change after a run: from the causes of its incidents and from what they cost."""

from __future__ import annotations

import signal

from elastic_launch.events.types import counted
from elastic_launch.observe.ledger import PARTS, Ledger, spoken

SHARE, LEAST = 0.01, 1.0
"""Share of the whole time, and seconds, from which a cost is worth advice."""

SHORTER = {
    "detect_s": "--dead-after and --hang-timeout: silence after which a node is dead, or a worker hangs",
    "stop_s": "--shutdown-timeout: what workers get to end; scripts on the training library leave a round at once",
    "form_s": "--join-settle and --return-after: how long a round waits for nodes",
    "start_s": "--preload for the first start of a node; with the training library, replacements start ahead",
    "restore_s": "snapshots in memory, which the training library takes: they are restored without storage",
    "first_step_s": "compilation and caches of the script's first step",
}
"""What makes a part of an incident shorter."""


def advice(ledger: Ledger) -> list[str]:
    """Return one line for each cause or cost that is worth a change, the causes first."""
    kinds = [incident.kind for incident in ledger.incidents]
    killed = [x for x in ledger.incidents if x.exit_code == -signal.SIGKILL and x.kind == "crash"]
    found = []
    if memory := kinds.count("out of memory"):
        found.append(
            f"workers ran out of memory in {counted(memory, 'incident')}: use smaller micro-batches, or more memory"
        )
    if killed:
        names = ", ".join(str(incident.round) for incident in killed)
        found.append(
            f"SIGKILL ended workers (incident {names}): if no user sent it, the kernel lacked memory; see its log"
        )
    if lost := kinds.count("node loss"):
        found.append(
            f"{counted(lost, 'incident')} of lost nodes: check host and network; a spare node (--nnodes) fills the gap"
        )
    if hangs := kinds.count("hang"):
        found.append(
            f"{counted(hangs, 'hang')}: the cause names the rank and its place; see stacks-*.txt of that round"
        )
    again = (ledger.lost_steps or 0) - (ledger.unsaved_steps or 0)
    if ledger.steps and again > max(1, SHARE * ledger.steps):
        found.append(f"{counted(again, 'step')} had to be done again: take snapshots more often")
    if ledger.unsaved_steps:
        unsaved = counted(ledger.unsaved_steps, "step")
        found.append(f"{unsaved} since the last checkpoint could not be resumed from: write checkpoints more often")
    if (most := ledger.max_restarts) and ledger.restarts >= max(1, most - 1):
        spent = f"{ledger.restarts} of {counted(most, 'restart')}"
        how = "spent" if ledger.restarts >= most else "nearly spent"
        found.append(f"the budget was {how} ({spent}): fix the cause, or set --max-restarts or --restart-refill")
    whole = sum(incident.still_s for incident in ledger.incidents)
    costs = {part: sum(getattr(incident, part) or 0.0 for incident in ledger.incidents) for part in PARTS}
    for part, seconds in sorted(costs.items(), key=lambda cost: -cost[1]):
        if seconds >= max(LEAST, SHARE * ledger.total_s):
            found.append(f"{spoken(part)}, {seconds:.1f} s ({seconds / whole:.0%}): {SHORTER[part]}")
    return found
