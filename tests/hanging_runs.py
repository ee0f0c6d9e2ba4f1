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

    def trains(self, number: int) -> None:
        """Wait until a round has done some steps."""
        try:
            wait_for(f"steps of round {number}", lambda: len(self.steps(number)) >= 5, 60)
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(agent.output for agent in self.job.agents)) from None

    def hangs(self, kind: str, rank: int) -> None:
        """Have a rank hang in some step from the tenth on."""
        self.job.tell("hang", f"{kind} {rank} 10")

    def found(self) -> dict[str, Any]:
        wait_for("a verdict", lambda: self.job.events("hang_found"), 60)
        return self.job.events("hang_found")[0]

    def pids(self, number: int) -> dict[int, int]:
        """The pids of a round's workers by rank."""
        events = [e for e in self.job.events() if e["event"] in ("worker_started", "worker_kept")]
        return {e["rank"]: e["pid"] for e in events if e["round"] == number}
