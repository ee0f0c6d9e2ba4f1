"""Explores worlds, and prints how many states they have, and which events came in which phase, as Markdown.

python tests/explore [--soak] [--most STATES] [--seconds SECONDS] [NAME ...]
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from explore.cases import MOST, QUICK, QUICK_BESIDE, QUICK_VOTERS, SOAK, SOAK_BESIDE, SOAK_VOTERS
from explore.run_world import RunWorld
from explore.search import MET, explore, explore_beside
from explore.voting import VotingWorld


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soak", action="store_true", help="the worlds of make soak")
    parser.add_argument("--most", type=int, default=MOST, help="most states of each world")
    parser.add_argument("--seconds", type=float, default=math.inf, help="most CPU time of each world")
    parser.add_argument("names", nargs="*", help="only these worlds")
    args = parser.parse_args()
    runs, voters = (SOAK, SOAK_VOTERS) if args.soak else (QUICK, QUICK_VOTERS)
    print("| world | states | moves | longest path | all |\n|---|---|---|---|---|")
    begun = [(RunWorld, runs), (VotingWorld, voters)]
    for kind, name, (bounds, most) in ((kind, *case) for kind, cases in begun for case in cases.items()):
        if not args.names or name in args.names:
            found = explore(kind(bounds), min(most, args.most), seconds=args.seconds)
            whole = "yes" if found.whole else "no"
            print(f"| {name} | {found.states} | {found.moves} | {found.depth} | {whole} |", flush=True)
            print(f"{name}: {found.seconds:.1f} s of CPU", file=sys.stderr)
    for name, (bounds, most) in (SOAK_BESIDE if args.soak else QUICK_BESIDE).items():
        if not args.names or name in args.names:
            beside = RunWorld(bounds)
            for node_id in bounds.newcomers:
                beside.do(("arrives", node_id))
            found = explore_beside(beside, min(most, args.most), seconds=args.seconds)
            tried = "no" if found.whole else "no, nor all faults"
            print(f"| {name} | {found.states} | {found.moves} | {found.depth} | {tried} |", flush=True)
            print(f"{name}: {found.seconds:.1f} s of CPU", file=sys.stderr)
    for machine in ("leader", "policy", "voter", "register"):
        if any(phase.startswith(machine) for phase, _ in MET):
            print(f"\n{table(machine)}")


def table(machine: str) -> str:
    """The events that came to a machine, by its phase."""
    met = {
        (phase.removeprefix(f"{machine} "), event): n for (phase, event), n in MET.items() if phase.startswith(machine)
    }
    phases = sorted({phase for phase, _ in met})
    lines = [f"| {machine} | {' | '.join(phases)} |", "|---" * (len(phases) + 1) + "|"]
    for event in sorted({event for _, event in met}):
        lines.append(f"| {event} | {' | '.join(str(met.get((phase, event), '')) for phase in phases)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
