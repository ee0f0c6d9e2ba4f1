"""The settings of a training's checkpoints, as a script gives them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from elastic_launch.contract import Best
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.format.manifest import DISTRIBUTED
from elastic_launch.snapshot.location import Url, place
from elastic_launch.snapshot.storage.url_storage import check_driver
from elastic_launch.training.checkpoints.start_from import StartFrom
from elastic_launch.training.durations import Interval
from elastic_launch.training.kinds import check_kind

SAFETENSORS = "safetensors"

SPLIT = 2**30
"""Bytes of tensors from which on the nodes write a checkpoint together."""


class Checkpoint:
    """Where and how often a training saves its state, and where it resumes from.

    Args:
        directory: a directory, or a URL, as text, that fsspec can open, such as ``s3://bucket/runs/a``. If the nodes do
            not share the directory, each node keeps a copy in its own. A relative one is relative to the working
            directory at this call. A run that reads its checkpoints puts its id and number into ``owner.json`` there,
            on each node that has its own, which is read again before a checkpoint appears. A node that joins late, and
            finds the files of another run on its own disk, takes over that directory; the run goes on from none of
            them. Checkpoints of other runs are not reported as saved.
        every: interval between checkpoints: steps (50 or ``"50ba"``) or a duration (``"5min"``).
        keep: number of newest checkpoints to keep; older ones are removed, except for those that the next two arguments
            name. Those of later rounds than the writer's are neither removed nor counted. What other nodes have saved
            of steps that the training did not go through is not counted, and removed with those that are older.
        keep_every: the first checkpoint at or after each multiple of this number of steps is never removed.
        keep_best: the best checkpoints by a metric are not removed, as long as they are among the best. A ``Trainer``
            then saves after each evaluation; other loops call :meth:`elastic_launch.Run.record`.
        skip_frozen: do not save, not even in memory, the parameters of models that are frozen (``requires_grad=False``)
            when the training begins; on a resume the script's own are used, and must be the same. Buffers are always
            saved, and so is a weight that is frozen later. A frozen weight that changes or is unfrozen is an error at
            the next snapshot or checkpoint, as is one that differs at a resume. A checkpoint with all weights may be
            resumed in this way, and the reverse. Values are compared by a checksum, which costs less than to copy them;
            of a sharded model, all ranks gather the frozen weights in turn at the first snapshot and at a resume.
        format: of the tensor files: "safetensors", or "dcp" for those that torch.distributed.checkpoint reads and
            writes. Then a thread of one worker writes a checkpoint from a copy of the whole state, whatever its size;
            if that worker is killed meanwhile, the checkpoint before it counts. Tensors are named ``<name>`` and
            ``model.<name>`` (a weight of the part ``model``), ``optimizer.state.<name>.exp_avg``, by the parameter's
            name, and in any other part by the part's name and the keys in its ``state_dict``, with dots. Options are
            ``optimizer.param_groups.<name>.lr`` and ``optimizer.param_groups.0.lr``, which
            ``get_optimizer_state_dict`` reads with and without ``flatten_optimizer_state_dict``. What is no tensor and
            no option of an optimizer is only in ``state.json``. A read needs memory for all of the checkpoint.
        split: size of the state's tensors, in bytes, from which on each node writes a share of the checkpoint; only
            under an agent of this project and in a directory or URL that all nodes share. A share is a sequence of
            whole tensors, so one tensor that is most of the state is not written faster; there are 256 at most. The
            first node commits, and writes any share itself that differs from the state in its memory, or comes later
            than its own by more than 5 s. A checkpoint that is due while the last one is being copied is taken some
            steps later, by all nodes together.
        start_from: directory or URL of another training's checkpoints, or of one of them. As long as this training has
            no state of its own, it begins with that one: with all of it, or with what the next arguments say. Or one
            that ``dcp.save`` has written, with any number of ranks: the weights under the model's own names, all after
            one prefix or none, the optimizer's state as ``get_optimizer_state_dict`` returns it. The training then
            begins at step 0 with both and with the saved options, and parts that are missing have to be allowed. The
            pickle in its ``.metadata`` is read by an unpickler that knows only torch's classes for it; a file that
            names anything else, or that is compressed, is an error.
        weights_only: take only the weights, and begin at step 0 with the rest anew.
        allow: differences from that training that are wanted, such as ``["global batch", "dataset length"]``; any
            other is an error. They are ``global batch``, ``micro-batch``, ``seed``, ``dataset length``,
            ``list of shards`` and ``order of samples``, as far as the loader has them, and the names of
            ``run.resume(unchanging=...)``. A part of the state that is named, such as ``"scheduler"``, begins anew, or
            is dropped if the script has none.
        override: options of optimizers and schedulers, such as ``["lr", "T_max"]``, or names of parts of the state with
            all of theirs, such as ``["scheduler"]``: if the script gives other values than before, a run that resumes
            from a checkpoint uses the script's. Those of other options are the checkpoint's, and a warning names them.
            A name that no option and no part has is an error that lists the known ones. What schedulers or the loop
            change in the training does not count, and restarts within a run continue with the options that it began
            with. ``lr`` is the rate before any scheduler: a single scheduler makes its steps again with the new
            options, so the rate is that of an undisturbed training with them. With several, the present rates are
            scaled by the ratio of the new ``lr`` to the old one, and other options of a scheduler count from now on.
            With none, or only a ``ReduceLROnPlateau``, the new ``lr`` is set. An option that needs values which the
            optimizer has not kept, such as ``amsgrad``, cannot be turned on. With ``deepspeed_config=`` options are
            neither compared nor overridden.

    Raises:
        UsageError: if ``every`` or ``format`` is not valid, ``keep`` or ``split`` is less than 1, or no installed
            driver opens the URL.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | str = "10min",
        keep: int = 3,
        keep_every: int | None = None,
        keep_best: Best | None = None,
        skip_frozen: bool = False,
        format: str = SAFETENSORS,
        split: int = SPLIT,
        start_from: str | os.PathLike[str] | None = None,
        weights_only: bool = False,
        allow: Sequence[str] = (),
        override: Sequence[str] = (),
    ) -> None:
        if not os.fspath(directory):
            raise UsageError("Checkpoint('') names no directory.", "Name one; '.' is the working directory.")
        # Now: the script may change the working directory later.
        self.directory = place(directory).absolute()
        """Where it saves to."""
        if isinstance(self.directory, Url):
            check_driver(self.directory)
        if format not in (SAFETENSORS, DISTRIBUTED):
            raise UsageError(f"Checkpoint(format={format!r}): it is {SAFETENSORS!r} or {DISTRIBUTED!r}.")
        if type(keep) is not int or keep < 1:
            raise UsageError(f"Checkpoint(keep={keep!r}): it must be 1 or more.", "Give a whole number.")
        if not isinstance(split, int | float) or split < 1:
            raise UsageError(f"Checkpoint(split={split!r}): it must be a number of bytes, 1 or more.")
        if keep_every is not None and (type(keep_every) is not int or keep_every < 1):
            raise UsageError(f"Checkpoint(keep_every={keep_every!r}): it must be a number of steps, 1 or more.")
        if keep_best is not None:
            check_kind("Checkpoint(keep_best=...)", keep_best, Best, 'Give el.Best("loss").')
        if isinstance(override, str):
            raise UsageError(f"Checkpoint(override={override!r}) is a string.", f"Give a list: [{override!r}].")
        self.keep = keep
        self.keep_every = keep_every or 0
        self.keep_best = keep_best
        self.skip_frozen = skip_frozen
        self.format = format
        self.split = split
        self.override = tuple(override)
        self.every = Interval.parse(every)
        self.start_from = StartFrom.of(start_from, weights_only, allow, self.directory)
        # Each node may have a directory of its own; a URL is one for all.
        where = str(directory) if isinstance(self.directory, Url) else "a directory"
        arguments = f"{where}, every={every}, keep={keep}, split={split}"
        if skip_frozen:
            arguments += ", skip_frozen=True"
        if format != SAFETENSORS:
            arguments += f", format={format}"
        if keep_every is not None or keep_best is not None:
            arguments += f", keep_every={keep_every}, keep_best={keep_best}"
        if self.start_from is not None:
            arguments += f", start_from={start_from}, weights_only={weights_only}, allow={list(allow)}"
        if override:
            arguments += f", override={list(override)}"
        self.arguments = arguments
        """The arguments that must be the same on all ranks, as text."""


def check_checkpoint(where: str, checkpoint: object) -> None:
    """Raise a UsageError unless an argument is a :class:`Checkpoint` and not, for example, its directory."""
    check_kind(where, checkpoint, Checkpoint, "Give el.Checkpoint(directory, every=...).")
