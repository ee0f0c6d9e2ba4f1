"""Runs ``scripts/hanging.py``, and has its ranks hang."""

from __future__ import annotations

from typing import Any

from harness import SCRIPTS, Agent, Job, read_lines, wait_for

SCRIPT = str(SCRIPTS / "hanging.py")


class Hanging:
    """A run of ``scripts/hanging.py``."""

    def __init__(self, job: Job, *script_flags: str) -> None:
        self.job = job
        self.command = [SCRIPT, str(job.work), *script_flags]

    def alone(self, *flags: str, nproc: int = 3) -> Agent:
        return self.job.launch("--standalone", "--nproc", str(nproc), *flags, command=self.command)

    def steps(self, number: int) -> list[int]:
        return [x["step"] for x in read_lines(self.job.work / "steps.jsonl") if x["round"] == number]

    def trains(self, world: int, after: int = 0) -> int:
        """Wait until the newest round, which is above a number, has a world size and has done some steps.

        It may be preceded by one without the workers that are missing.
        """

        def probe() -> int:
            noted = read_lines(self.job.work / "steps.jsonl")
            number = noted[-1]["round"] if noted else 0
            steps = [x for x in noted if x["round"] == number and x["world"] == world]
            return number if number > after and len(steps) >= 5 else 0

        try:
            return wait_for(f"steps in a world of {world} after round {after}", probe, 60)
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(agent.output for agent in self.job.agents)) from None

    def hangs(self, kind: str, rank: int, more: str = "") -> None:
        """Have a rank hang in some step from the tenth on; ``twice``: and in the first step after that."""
        self.job.tell("hang", f"{kind} {rank} 10 {more}")

    def found(self) -> dict[str, Any]:
        wait_for("a verdict", lambda: self.job.events("hang_found"), 60)
        return self.job.event("hang_found")

    def pids(self, number: int) -> dict[int, int]:
        """The pids of a round's workers by rank."""
        events = [e for e in self.job.events() if e["event"] in ("worker_started", "worker_kept")]
        return {e["rank"]: e["pid"] for e in events if e["round"] == number}
