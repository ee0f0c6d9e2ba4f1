"""Log a training to Weights & Biases and to MLflow. No step is there twice, however often workers are killed.

After a fault steps may be done again. What was logged stays as it is, and these steps are not logged again: in exact
mode they have the same values.
"""

import json
import os
from pathlib import Path
from typing import Any

import elastic_launch as el


class Tracker(el.Callback):
    """Passes on each step once, on rank 0.

    A subclass has ``open``, which returns the last step that is logged, ``log``, ``mark`` and ``close``.
    """

    writes = False
    logged = 0

    def on_round(self, start: el.RoundStart) -> None:
        if self.writes and start.rank:
            self.close()
        if not self.writes and start.rank == 0:
            self.logged = self.open(start)
        self.writes = start.rank == 0

    def on_step(self, end: el.StepEnd) -> None:
        if self.writes and end.step > self.logged:
            self.log(end.step, {"loss": end.loss, "lr": end.lrs[0]})
            self.logged = end.step

    def on_incident(self, incident: el.Incident) -> None:
        if self.writes:
            self.mark(incident.step, f"{incident.kind}: {incident.cause}")

    def open(self, start: el.RoundStart) -> int:
        raise NotImplementedError

    def log(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError

    def mark(self, step: int, text: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.writes = False


class WandB(Tracker):
    """Writes offline runs, of which ``wandb sync`` takes the last one; needs ``pip install wandb``.

    What an offline run holds in memory is lost if its process is killed, and it cannot be gone on with. So each process
    that becomes rank 0 writes a run that begins with all that was logged before, and replaces those of others.

    Args:
        lines: the file of a :class:`JsonLines` that is called before this object.
    """

    def __init__(self, directory: Path, name: str, lines: Path) -> None:
        self.directory, self.name, self.lines = directory, name, lines
        self.incidents = directory / f"{name}-incidents.jsonl"
        self.run: Any = None

    def open(self, start: el.RoundStart) -> int:
        import wandb

        self.directory.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT", "elastic-launch")
        self.run = wandb.init(project=project, id=self.name, dir=self.directory, mode="offline")
        steps = [line for line in _read(self.lines) if "loss" in line]
        for line in steps:
            self.log(line["step"], {"loss": line["loss"], "lr": line["lr"]})
        for line in _read(self.incidents):
            self.run.summary[f"incident/{line['step']}"] = line["text"]
        return max((int(line["step"]) for line in steps), default=0)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def mark(self, step: int, text: str) -> None:
        with self.incidents.open("a") as file:
            file.write(json.dumps({"step": step, "text": text}) + "\n")
        self.run.alert(f"incident at step {step}", text)
        self.run.summary[f"incident/{step}"] = text

    def close(self) -> None:
        if self.writes:
            self.run.finish()
        super().close()


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class MLflow(Tracker):
    """Writes to the server, database or directory that ``uri`` names, which needs ``pip install mlflow``.

    MLflow refuses directories unless ``MLFLOW_ALLOW_FILE_STORE`` is ``true``. The run is found again by a tag, and is
    asked for the last step that it has.
    """

    def __init__(self, uri: str, name: str, experiment: str = "elastic-launch") -> None:
        self.uri, self.name, self.experiment = uri, name, experiment
        self.client: Any = None
        self.id = ""

    def open(self, start: el.RoundStart) -> int:
        from mlflow import MlflowClient

        self.client = MlflowClient(tracking_uri=self.uri)
        found = self.client.get_experiment_by_name(self.experiment)
        experiment = self.client.create_experiment(self.experiment) if found is None else found.experiment_id
        runs = self.client.search_runs([experiment], f"tags.elastic_launch = '{self.name}'")
        run = runs[0] if runs else self.client.create_run(experiment, tags={"elastic_launch": self.name})
        self.id = run.info.run_id
        return max((metric.step for metric in self.client.get_metric_history(self.id, "loss")), default=0)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name in sorted(values, reverse=True):  # the loss last: with it, the step counts as logged
            self.client.log_metric(self.id, name, values[name], step=step)

    def mark(self, step: int, text: str) -> None:
        self.client.set_tag(self.id, f"incident.{step}", text)

    def close(self) -> None:
        if self.writes:
            self.client.set_terminated(self.id)
        super().close()
