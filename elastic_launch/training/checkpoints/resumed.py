"""The state that a training resumes from, and whether it is this training's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_launch.errors import UsageError
from elastic_launch.training.checkpoints.options import Options
from elastic_launch.training.checkpoints.step_start import Start

_log = logging.getLogger(__name__)

Outcome = tuple[float, dict[str, float]]
"""Loss and metrics of a pass over a step's micro-batches."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The state that a training resumes from."""

    step: int = 0  # optimizer steps done
    state: dict[str, Any] | None = None  # by part; None if the training starts from scratch
    identity: dict[str, int] = field(default_factory=dict)  # what must not change on a resume, as it was then
    worlds: list[int] = field(default_factory=list)  # world sizes of the rounds so far
    origin: str = ""  # names the checkpoint in error messages
    classes: dict[str, str] = field(default_factory=dict)  # of those parts whose state fits no other class
    compared: bool = True  # False if the ranks were compared in this training, but not in this state
    equal: int = 0  # in that case, the step after which the ranks were last equal
    orders: dict[str, list[list[str]]] = field(default_factory=dict)  # parameter names of each optimizer, by group
    last: Outcome | None = None  # of the last step, if the state is that of a process that was suspended
    anew: frozenset[str] = frozenset()  # names of the parts that begin anew, and of those that are not taken
    frozen: dict[str, int] = field(default_factory=dict)  # checksums of the frozen weights that were left out, by part
    passes: tuple[Outcome, ...] = ()  # each updated pass of the next step, if it was suspended between two passes
    trained: dict[str, bool] = field(default_factory=dict)  # in that process, whether each parameter needs a gradient
    everywhere: bool = False  # all ranks were suspended with it
    starts: Sequence[Start] = ()  # what was small at the start of that step, and of each of its passes so far
    stored: bool = False  # it was read from durable storage, and no process has one
    given: dict[str, Options] = field(default_factory=dict)  # those in effect when it was saved, by part
    agreed: int | None = None  # the last step before it in which all ranks agreed; None: not known
    late: dict[str, bool] = field(default_factory=dict)  # parts that are registered late, and whether they were then
    snapshot: int | None = None  # the step of the newest snapshot in memory, if it is not this; -1: there is none

    @property
    def uncompared(self) -> int:
        """Number of the last steps after which the ranks were not compared."""
        return 0 if self.compared else self.step - self.equal

    @staticmethod
    def of(step: int, state: dict[str, Any] | None, meta: dict[str, Any], origin: str) -> Resumed:
        """Make a ``Resumed`` from a state and its meta."""
        named: dict[str, Any] = {
            name: dict(meta.get(name, {})) for name in ("classes", "orders", "trained", "frozen", "given", "late")
        }
        return Resumed(
            step,
            state,
            dict(meta["identity"]),
            [int(size) for size in meta["worlds"]],
            origin,
            compared=meta.get("compared", True) is not False,
            equal=int(meta.get("equal", (0, 0))[1]),
            last=_outcome(meta["last"]) if "last" in meta else None,
            passes=tuple(map(_outcome, meta.get("passes", ()))),
            agreed=meta.get("agreed"),
            **named,
        )


def _outcome(value: Any) -> Outcome:
    loss, metrics = value
    return float(loss), dict(metrics)


def meta_of(identity: dict[str, int], worlds: list[int]) -> dict[str, Any]:
    """Return the meta of a state, which can be read without the state."""
    return {"identity": identity, "worlds": worlds, "fingerprint": fingerprint()}


def check_identity(identity: dict[str, int], meta: dict[str, Any], origin: str) -> None:
    """Refuse a state that another training saved; ``origin`` names the checkpoint in the error."""
    saved = meta.get("identity", {})
    for name, value in identity.items():
        if saved.get(name) != value:
            was = f"with {name} {saved[name]}" if name in saved else f"without {name}"
            raise UsageError(
                f"{origin} was made {was}, this training has {value}.",
                "Use the same, or another directory: the samples of the steps to come would not be those left over. If "
                "that is wanted: Checkpoint(another directory, start_from=this one, allow=[...]).",
            )
    differing = [name for name, value in fingerprint().items() if meta.get("fingerprint", {}).get(name) != value]
    if differing and torch.are_deterministic_algorithms_enabled():
        _log.warning(
            "%s was made with another %s: the weights will not be the same to the bit",
            origin,
            ", ".join(differing),
        )


def fingerprint() -> dict[str, str]:
    """Return what results to the bit depend on besides the program: torch's version, device and threads."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return {"torch": str(torch.__version__), "device": device, "threads": str(torch.get_num_threads())}
