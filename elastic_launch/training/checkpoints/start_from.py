"""A training that begins from another training's checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from elastic_launch.errors import UsageError
from elastic_launch.snapshot.location import Place, Url, place
from elastic_launch.snapshot.storage.reading import Taking
from elastic_launch.snapshot.storage.url_storage import check_driver
from elastic_launch.training.checkpoints.foreign import read_foreign
from elastic_launch.training.checkpoints.loading import find_and_load, weights_in
from elastic_launch.training.checkpoints.resumed import Resumed
from elastic_launch.training.checkpoints.shared_location import LocationRead, read_together
from elastic_launch.training.checkpoints.state import TrainingState
from elastic_launch.training.data.samplers import SAMPLE_ORDER
from elastic_launch.training.ranks.world import World

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartFrom:
    """Another training's checkpoint; see :class:`~elastic_launch.Checkpoint`."""

    place: Place
    weights_only: bool
    allow: tuple[str, ...]

    @staticmethod
    def of(
        start_from: str | os.PathLike[str] | None, weights_only: bool, allow: Sequence[str], own: Place
    ) -> StartFrom | None:
        """Check the arguments of a ``Checkpoint`` whose own place is ``own``, an absolute path or a URL."""
        if isinstance(allow, str):
            raise UsageError(f"Checkpoint(allow={allow!r}) is a string.", f"Give a list: allow=[{allow!r}].")
        if start_from is None:
            if weights_only or allow:
                raise UsageError("Checkpoint(weights_only=..., allow=...) came without start_from=.", "Leave them out.")
            return None
        where = place(start_from).absolute()
        if where == own:
            raise UsageError(
                f"Checkpoint(start_from=...) is its own directory, {own}.",
                "Give the new training another one. To continue a training, leave start_from out.",
            )
        if isinstance(where, Url):
            check_driver(where)
        return StartFrom(where, weights_only, tuple(allow))

    def begin(self, world: World, identity: dict[str, int], state: TrainingState) -> Resumed:
        """Return what a training begins with; called by all ranks, of which the first one reads the checkpoint.

        Raises:
            UsageError: if the checkpoint differs from this training in what must be equal and is not allowed to differ.
            CheckpointError: if there is no checkpoint, or it cannot be read.
        """
        found = read_together(world, self.place, partial(self._read, state), state.taking, reads=world.rank == 0)
        step, parts, meta = found.step, found.state or {}, found.meta
        origin = f"The checkpoint of step {step} in {found.path}"
        done = 0 if self.weights_only else step
        here, there = set(state.names), {*parts, *meta.get("parts", [])}
        known = [*map(_short, identity), *sorted(here | there)]
        if unknown := [name for name in self.allow if name not in known]:
            raise UsageError(
                f"Checkpoint(allow=...) names {unknown[0]!r}, but nothing here has that name.",
                f"Known: {', '.join(map(repr, known))}.",
            )
        anew = (here | there) & set(self.allow)
        if self.weights_only:
            anew |= (here - set(state.weights)) | (there - here)
        if late := sorted((parts.keys() & meta.get("late", {}).keys()) - here - anew):
            # A resume would keep it for the script, which here may mean another object by the same name.
            raise UsageError(
                f"{origin} has {', '.join(late)}, which that training registered after its first step.",
                f"To leave that out: Checkpoint(allow={[*self.allow, *late]}). To begin with it, call run.register() "
                "before the loop.",
            )
        compares = "identity" in meta and not self.weights_only  # else another program may have saved it
        changed = self._changed(identity, meta["identity"], origin) if compares else []
        if world.rank == 0:
            _log.warning(
                "a new training begins at step %d with %s of the checkpoint of step %d in %s; not taken: %s; "
                "different: %s",
                done,
                ", ".join(name for name in state.names if name not in anew) or "nothing",
                step,
                found.path,
                ", ".join([*sorted(anew), *([] if compares else ["the number of steps"])]) or "nothing",
                ", ".join(changed) or ("nothing" if compares else "not compared"),
            )
        resumed = Resumed.of(done, parts, {"worlds": []} | meta | {"identity": identity}, origin)
        return replace(resumed, worlds=resumed.worlds if done else [], anew=frozenset(anew))

    def _read(self, state: TrainingState, taking: Taking) -> LocationRead:
        without = {*self.allow, *(set(state.names) - set(state.weights) if self.weights_only else ())}
        foreign = read_foreign(self.place, state, without, taking)
        return LocationRead(
            foreign or find_and_load(self.place, None, weights_in if self.weights_only else None, taking)
        )

    def _changed(self, identity: Mapping[str, int], saved: Mapping[str, int], origin: str) -> list[str]:
        """Return the allowed differences, as text; refuse others."""
        differing = [name for name, value in identity.items() if saved.get(name) != value]
        if any(name in self.allow for name in differing):
            differing = [name for name in differing if name != SAMPLE_ORDER]  # it follows from the others
        texts = {name: f"{name} {saved.get(name)} (here {identity[name]})" for name in differing}
        if refused := [name for name in differing if _short(name) not in self.allow]:
            allow = [*self.allow, *map(_short, refused)]
            raise UsageError(
                f"{origin} was made with another {', '.join(texts[name] for name in refused)}.",
                f"If this is wanted: Checkpoint(allow={allow}). Or weights_only=True, to begin at step 0 with the "
                "weights alone.",
            )
        return list(texts.values())


def _short(name: str) -> str:
    """Return the name of what must be equal as it is given to ``allow``."""
    return name.partition(" (")[0]
