"""``session()``: joins this process to a training run, and leaves it at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import timedelta
from subprocess import Popen
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from elastic_launch import snapshot
from elastic_launch.batch import GlobalBatch
from elastic_launch.contract import ENV_START_REASON
from elastic_launch.errors import UsageError
from elastic_launch.shared_progress import Activity
from elastic_launch.system.forks import never_freed
from elastic_launch.training.checkpoints.checkpoint import Checkpoint, check_checkpoint
from elastic_launch.training.checkpoints.parts import Stateful
from elastic_launch.training.checkpoints.saving import Trained
from elastic_launch.training.data.loader import Loader, check_loader, epochs_of
from elastic_launch.training.durations import seconds_of
from elastic_launch.training.engine import Engine
from elastic_launch.training.evaluations import Evaluations, Evaluator, evaluations_of
from elastic_launch.training.gradients.buffer_rules import checked_rules
from elastic_launch.training.kinds import check_kind, found
from elastic_launch.training.link import AgentLink
from elastic_launch.training.live.groups import RoundGroups
from elastic_launch.training.loop import Loop
from elastic_launch.training.loop_options import LoopOptions
from elastic_launch.training.ranks.determinism import Determinism
from elastic_launch.training.ranks.place import is_ahead, joining, refuse_in_rehearsal
from elastic_launch.training.ranks.same_arguments import check_same
from elastic_launch.training.ranks.world import (
    GROUP_TIMEOUT,
    World,
    device_ahead,
    environment,
    join,
    leave,
    variables_restored,
)
from elastic_launch.training.rounds import CONFIRMED, AskedLive
from elastic_launch.training.steps import Step
from elastic_launch.training.stopping import UNCONFIRMED, DrainedExit
from elastic_launch.training.swapping import mode_swapped, weights_swapped
from elastic_launch.training.together import as_part
from elastic_launch.training.verification import share_of
from elastic_launch.training.wrapped import check_not_flat

Process = TypeVar("Process", str, bytes)

_LONGEST = 10 * 365 * 24 * 3600.0
"""Largest timeout in seconds; every clock's arithmetic can represent it."""


class Run:
    """The training run, as seen by one of its processes; :func:`session` yields it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unchanging: dict[str, int] = {}

    @property
    def world(self) -> World:
        """This process' ranks and the world's sizes."""
        return self._engine.world

    @property
    def device(self) -> torch.device:
        """The device to train on."""
        return self._engine.rounds.device

    @property
    def rank(self) -> int:
        """This process' rank in the current round, from 0."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of processes that train in the current round."""
        return self.world.world_size

    @property
    def replica_size(self) -> int:
        """Number of processes of a replica, as given by ``--replica-size``; else 1."""
        return self.world.replica_size

    @property
    def replica(self) -> int:
        """Number of this process' replica in the current round, from 0."""
        return self.world.replica

    @property
    def replica_rank(self) -> int:
        """This process' rank in its replica, from 0; it never changes."""
        return self.world.replica_rank

    @property
    def replicas(self) -> int:
        """Number of replicas in the current round."""
        return self.world.replicas

    @property
    def worlds(self) -> list[int]:
        """World sizes of all rounds of the training so far; the last one is this round's."""
        self._engine.meet()
        return self._engine.worlds

    @property
    def resumed_step(self) -> int:
        """Optimizer steps that were done when this process joined the current round; set once steps have begun."""
        return self._engine.resumed_step

    @property
    def stopped(self) -> bool:
        """Whether all ranks have agreed to stop before the training's end."""
        return self._engine.stopped

    @property
    def draining(self) -> bool:
        """Whether all ranks stopped so that other processes can continue the training, and no results follow here."""
        return self._engine.draining

    @property
    def restarts(self) -> int:
        """Restarts of the run so far."""
        return self.world.restarts

    @property
    def start_reason(self) -> str:
        """``first`` in the run's first processes, else what ended the last round (``restart`` under torchrun)."""
        return os.environ.get(ENV_START_REASON) or ("restart" if self.restarts else "first")

    def register(self, name: str, stateful: Stateful) -> None:
        """Save and restore a further object with every checkpoint.

        What is made in the course of a training, such as an average that starts late, is registered when it is made,
        after the step's update, on all ranks in the same step. If the state that the training resumed from has it, it
        gets that at once. A process that resumes or joins after that step registers it in its first step, or after the
        loop if it makes no step; until then the saved state is kept, and saved again, and a warning says so after the
        first step. If only some ranks register it, that is an error within a few steps. What was registered before the
        loop must still be when the training resumes.

        Args:
            name: the object's name in checkpoints.
            stateful: has ``state_dict()`` and ``load_state_dict(state)``.

        Raises:
            UsageError: if the name is taken, the object lacks ``state_dict`` or ``load_state_dict``, is sharded
                by FullyShardedDataParallel, or does not fit its restored state.
        """
        engine = self._engine
        if isinstance(stateful, torch.nn.Module):
            check_not_flat(stateful)
        refuse_in_rehearsal()
        late = engine.trainings.begun or name in engine.state.unregistered  # which is so after the loop, too
        engine.state.register(name, stateful, late=late)

    def on_save(self, function: Callable[[], None]) -> None:
        """Call ``function()`` on every rank before a checkpoint captures the state."""
        self._engine.state.on_save(function)

    def on_restore(self, function: Callable[[], None]) -> None:
        """Call ``function()`` on every rank after a checkpoint was restored.

        Raises:
            UsageError: if the state was restored already.
        """
        self._engine.trainings.refuse_after_restoring("run.on_restore()")
        self._engine.state.on_restore(function)

    def on_checkpoint(self, function: Callable[[snapshot.WriteOutcome], None]) -> None:
        """Call ``function(outcome)`` at the first step boundary after a checkpoint was written or failed.

        It is called only on the ranks that write checkpoints.
        """
        self._engine.saver.listen(function)

    def record(self, metrics: Mapping[str, float]) -> None:
        """Note the results of the script's own evaluation, by which ``Checkpoint(keep_best=...)`` keeps the best.

        Call it after a step's update, or before :meth:`boundary`, on all ranks with the same values. A checkpoint is
        saved as soon as all ranks know of it: in ``steps``, after the next step at the latest.

        Raises:
            UsageError: if the metric of ``keep_best`` is missing.
        """
        if self._engine.checkpoint is not None:
            self._engine.checkpoint.record(metrics)

    def grad_accum(self, batch: GlobalBatch) -> int:
        """Return the number of this rank's micro-batches in a full global batch."""
        return batch.plan(self.world.data_size, self.world.data_rank).grad_accum

    def mesh(self, shard: int = 1, tensor: int = 1) -> Any:
        """Return the mesh of this rank's replica, for models that are divided within replicas; called by all ranks.

        ::

            mesh = run.mesh(shard=2, tensor=2)
            parallelize_module(model, mesh["tensor"], plan)
            fully_shard(model, mesh=mesh["shard"])

        A replica consists of ``shard * tensor`` consecutive ranks on one node. What is elastic is the number of
        replicas: the gradients are summed over them after each step's passes. Each pair of a replica and a ``shard``
        coordinate has micro-batches of its own, which all its ``tensor`` ranks get, with the same random state. So what
        a loop counts itself on all ranks has each micro-batch ``tensor`` times. Where ``tensor`` ranks have copies of a
        parameter or of its gradient, those of the first of them count, and norms count them once. The replicas get the
        shards of the first one, and are compared for each coordinate. Call it before the loop, and before the script
        forms groups of some ranks. A process that goes on in another round has the same mesh, whose ranks are those of
        that round: take ``mesh["shard"]`` and ``mesh["tensor"]`` before the loop. A step that breaks in
        :meth:`Step.grad_norm` or :meth:`Step.update` is then done again from its start, and in its first attempt
        ``step.repeated`` is true after ``update()``.

        A process that was started ahead gets the mesh before it has a place, if ``--replica-size`` is the size of the
        shape: ``fully_shard`` and ``parallelize_module`` take its part of what the script has built, and what else the
        script exchanges waits for the place. In a rehearsal the model's own exchanges end at once, with undefined
        results, and an exchange of the script's ends the rehearsal. With ``tensor`` above 1, a process that is kept
        ends if its replica gets a process that has not started ahead, because that one exchanges in
        ``parallelize_module``.

        These are refused: a mesh that the script has made itself, the whole mesh given to ``fully_shard`` (HSDP), a
        dimension of a tensor that both dimensions of the mesh cut into parts that do not fit, and in exact mode a
        script's own exchange between ``tensor`` ranks within a micro-batch. On GPUs, which are untried, parameters on
        different meshes may need ``foreach=False`` in the optimizer, torch gives DTensors the random state of rank 0
        when the first of them draws, and copies of buffers are not made the same again. Dropout of a tensor of which
        each ``tensor`` rank has a part draws the same numbers for each part.

        Args:
            shard: number of ranks that ``fully_shard`` divides the model among.
            tensor: number of ranks that compute a micro-batch together, as ``parallelize_module`` has it.

        Returns:
            The ``DeviceMesh`` with the dimensions ``"shard"`` and ``"tensor"``, also where the size is 1; the same one
            in each call.

        Raises:
            UsageError: if a size is not a whole number above 0, there is no process group, the shape is not that of an
                earlier call or of ``--replica-size``, the workers of a node are not a multiple of it, or training has
                begun.
        """
        rounds, meet = self._engine.rounds, self._engine.meet
        if rounds.mesh is None:
            self._engine.trainings.refuse_after_restoring("run.mesh()")
        mesh = rounds.form_mesh_ahead(shard, tensor, meet) if rounds.is_ahead else None
        if mesh is None:
            meet()
            mesh = rounds.form_mesh(shard, tensor)
        return mesh.inner

    def expect(self, what: str, duration: float | str) -> AbstractContextManager[None]:
        """Announce that what follows may take longer than a step, so that it does not count as a hang.

        ::

            with run.expect("evaluation", "5min"):
                evaluate(model)

        It is for what the script does itself within ``run.steps()`` or a callback of a ``Trainer``. If only some ranks
        do it, the limit also holds for the others, which wait.

        Args:
            what: a short description, for the message if it does hang.
            duration: how long it may take at most: seconds, or as ``"30s"``, ``"5min"`` or ``"2h"``.

        Raises:
            UsageError: if ``duration`` is not a duration.
        """
        return self._engine.rounds.link.doing(Activity.PAUSE, seconds_of(duration), what)

    @contextmanager
    def swapped(
        self, average: torch.nn.Module | torch.optim.Optimizer, model: torch.nn.Module | None = None
    ) -> Iterator[None]:
        """Evaluate the average of a model: within the block, the model has the average's parameters and buffers.

        ::

            with run.swapped(average):
                evaluate(model)

        The average has the model's meanwhile. When the block ends, also by an exception, both have their own again, to
        the bit. They are exchanged in place and shard by shard, which needs memory for the largest tensor. Names,
        shapes and dtypes must be the same: evaluate an average of another dtype by calling it. Nothing is saved within
        the block. Call it after ``step.update()``, or in :class:`Evaluator`'s ``within``; on any ranks, for it
        exchanges nothing. An evaluator may be called before the first step of a process: make the average there if
        ``run.resumed_step`` is not below its start.

        Args:
            average: a ``torch.optim.swa_utils.AveragedModel``, another module whose ``module`` is the average, or a
                module with the same parameters and buffers as the model. Or an optimizer that evaluates other weights
                than it trains, such as those of schedulefree: ``eval()`` is called, and at the end ``train()``; a copy
                of its parameters is kept meanwhile. By themselves these calls change the weights by rounding, and a
                snapshot between them has the weights to evaluate. Call ``optimizer.train()`` before the loop.
            model: the model it belongs to; None: the one that is trained.

        Raises:
            UsageError: if the average does not fit the model, several models are trained and none is given, the model
                is swapped already, a training step goes on within the block, or the optimizer is in evaluation mode.
        """
        engine = self._engine
        known = engine.trainings.models if model is None else [model]
        if not isinstance(average, torch.nn.Module):
            swap = mode_swapped(average, known)
        elif len(known) == 1:
            swap = weights_swapped(average, known[0])
        else:
            raise UsageError(f"run.swapped(average): {len(known)} models are trained.", "Name it: swapped(average, m).")
        with engine.trainings.swapping(average, *known):
            engine.saver.settle()  # a snapshot may still be copied
            with swap:
                yield

    def background(self, process: Popen[Process], wait: float | str | None = None) -> Popen[Process]:
        """Have a process beside the training end with this process, or be waited for at the session's end.

        ::

            run.background(subprocess.Popen(["rclone", "sync", "runs", "remote:runs"]))
            run.background(subprocess.Popen([sys.executable, "serve.py"]), wait=0)

        The process stays while this one takes part in further rounds. It is killed (SIGKILL) if an exception leaves the
        session, including the one by which a process ends whose training continues in another one, and by the launcher
        if this process is killed (as by torchrun; without a launcher it goes on). Otherwise the session's end waits for
        it, once the process group was left and the last checkpoint was written, or until the run is to stop; a line
        names it. With a number for ``--hang-timeout`` the wait counts as a hang if the process does nothing. If it
        fails, there is a warning, at the session's end at the latest, and the training does not fail. A daemon that it
        starts is not noticed, and goes on. If it is a launcher that is killed, the workers of ``elastic-launch`` end
        with it, those of torchrun go on.

        Args:
            wait: how long the session's end waits at most: seconds, or as ``"30s"``, ``"5min"`` or ``"2h"``. Then the
                process and all that it has started get SIGTERM, and SIGKILL 5 s later. 0: at once, for servers. None:
                until the process ends.

        Returns:
            The process.

        Raises:
            UsageError: if ``process`` is not a ``subprocess.Popen``, or was started with ``start_new_session=True``, or
                ``wait`` is not a duration.
        """
        refuse_in_rehearsal()
        self._engine.background.add(process, wait)
        return process

    def request_stop(self) -> None:
        """Make all ranks stop after the same step: the next one, or the one after it. One rank's request is enough."""
        self._engine.request_stop()

    def steps(
        self,
        loader: Loader,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        *,
        until: int | str,
        checkpoint: Checkpoint | None = None,
        exact: bool = False,
        verify: bool | str = False,
        buffers: Mapping[str, str] | None = None,
        scheduler: Stateful | Mapping[str, Stateful] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        metrics: Sequence[str] = (),
        evaluator: Evaluator | None = None,
        rehearse: Callable[[Step], None] | None = None,
    ) -> Iterator[Step]:
        """Restore the newest checkpoint, then yield the optimizer steps that remain.

        ::

            def train(step):
                for inputs, targets in step:
                    step.backward(loss_fn(step.model(inputs), targets))
                step.update()

            for step in run.steps(loader, model, optimizer, until="3ep", rehearse=train):
                train(step)
                log(step.number, step.loss)

        Args:
            loader: loads the training data; its micro-batches are divided among the ranks.
            model: an unwrapped module on its device; call ``step.model`` in the loop, which is the same object. Models
                that are trained together, such as those of a GAN, are given as a dict, by their names in checkpoints.
                All its parameters and those of the optimizer are trained; what only the optimizer has is saved under
                its position there. Between two steps, and on all ranks, it may be pruned by ``torch.nn.utils.prune``
                (also ``prune.remove``): a process that begins or resumes later is pruned as the state that it loads.
                It may be converted by ``model.to(dtype)``, if the optimizer takes it: as a checkpoint is loaded only
                into a model of its dtypes, convert it before the loop when the script resumes. An optimizer's state
                keeps the dtypes that it was saved with. Other changes of modules are to be made before the loop.
            optimizer: an optimizer, or a dict of several by name. With several, each pass over the micro-batches ends
                with ``step.update(optimizer=name)``, or with ``step.update()`` for all of them.
            until: length of the whole training: epochs (3 or ``"3ep"``) or steps (``"1000ba"``). To end it earlier and
                save its state, call :meth:`request_stop`; a ``break`` leaves the current step unsaved.
            checkpoint: where to save to and resume from.
            exact: whether the weights must be bitwise equal at every world size.
            verify: with ``exact=True``, whether some steps give a micro-batch once more, while ``step.checking`` is
                True, to find what its result depends on besides the micro-batch; see docs/training/exactness.md.
                ``"1%"``: in this share of the steps each rank is given a micro-batch of another rank so, to find
                hardware that computes wrong; see docs/training/corruption.md.
            buffers: rules for buffers that micro-batches change, by pattern of their names, such as
                ``{"*.queue": "last"}``: ``mean``, ``sum``, ``last``, ``min``, ``max``, ``ignore`` or ``error``; see
                docs/training/exactness.md. The first pattern that fits counts; ``"*"`` is for buffers without a rule.
                Other patterns are for frozen parameters, too, which the forward pass changes. The buffers of BatchNorm,
                InstanceNorm, spectral norm, torch's ``FakeQuantize`` and its observers (not those that are per channel
                or keep histograms) have a built-in rule, and so have floating-point buffers with a name such as
                ``running_mean``, ``loss_ema`` or ``embed_avg``.
            scheduler: a scheduler, or a dict of several by name; saved and restored with the rest. The script steps it.
            scaler: a gradient scaler; saved and restored with the rest.
            metrics: names of the metrics passed to ``step.backward``, which are averaged over the global batch.
            evaluator: evaluates between steps; its results are saved and restored with the rest.
            rehearse: a function that goes through a step as the body of the loop does. A process that is started while
                others train calls it once, before it joins them, so that what is slow in the first step, such as
                compilation, does not hold them up. Its step has one micro-batch in each pass, ``update`` does nothing,
                and ``step.loss`` is NaN. What the function writes into parameters or the optimizer itself is replaced
                when the process joins. What else it changes stays changed: leave logs and counters in the loop.

        Raises:
            UsageError: if an argument has the wrong type, a step ends without ``update``, the checkpoint belongs to
                another training, another loop over steps is running, or the session has ended.
            BatchError: if the micro-batch size is ``"auto"``, which only a ``Trainer`` supports.
        """
        check_loader("run.steps(loader=...)", loader)
        if checkpoint is not None:
            check_checkpoint("run.steps(checkpoint=...)", checkpoint)
        loader.batch.micro_batches()
        parts: dict[str, Stateful | None] = {
            "scheduler": as_part("run.steps(scheduler=...)", scheduler),
            "scaler": as_part("run.steps(scaler=...)", scaler),
        }
        if rehearse is not None and not callable(rehearse):
            raise UsageError(f"run.steps(rehearse=...) is {found(rehearse)}.", "Give a function that takes the step.")
        evaluations = Evaluations(None, dict, lambda evaluation: None)  # none is due
        if evaluator is not None:
            check_kind("run.steps(evaluator=...)", evaluator, Evaluator, "Give an el.Evaluator of its data.")
            evaluations = evaluations_of(evaluator, self._engine, loader.steps_per_epoch, checkpoint, exact=exact)
            parts["evaluations"] = evaluations
        share = share_of(verify, "run.steps(verify=...)")
        if verify and not exact:
            raise UsageError(
                f"run.steps(verify={verify!r}) checks what only exact=True promises.", "Give both, or neither."
            )
        options = LoopOptions(
            exact=exact,
            verify=verify is True,
            share=share,
            buffers=checked_rules(buffers),
            parts=parts,
            scaler=scaler,
            metrics=metrics,
            evaluations=evaluations,
            unwatched=["evaluations"],
            rehearse=rehearse,
        )
        return iter(
            Loop(self._engine, epochs_of(loader), model, optimizer, until=until, checkpoint=checkpoint, options=options)
        )

    def resume(self, checkpoint: Checkpoint, unchanging: Mapping[str, int] | None = None) -> int:
        """Restore all registered objects from the newest checkpoint, for a script with its own training loop.

        Args:
            checkpoint: from now on, :meth:`boundary` saves to it, and leaving the session waits until it is written.
            unchanging: integers by name, such as the global batch size, that must be the same on every resume.

        Returns:
            The optimizer steps done.

        Raises:
            UsageError: if nothing was registered, or the checkpoint belongs to another training.
        """
        check_checkpoint("run.resume(checkpoint)", checkpoint)
        engine = self._engine
        engine.trainings.refuse_beside_steps("run.resume()")
        if engine.state.holds_nothing:
            raise UsageError(
                "run.resume() came without run.register() before it: checkpoints would hold nothing.",
                'Before it: run.register("model", model), and likewise the optimizer and what else changes.',
            )
        self._unchanging = dict(unchanging or {})
        saved = {"checkpoint": checkpoint.arguments, "saved objects": engine.state.described()}
        check_same(self.world, {**self._unchanging, **saved}, engine.rounds.link)
        state = engine.state
        resumed = engine.restore(checkpoint, self._unchanging, state, (state,))
        engine.saver.watch_restored()
        engine.trainings.resumed = True
        engine.begin(resumed.step)
        return resumed.step

    def boundary(self, step: int | None = None, *, end: bool = False) -> bool:
        """Mark a step boundary in the script's own training loop: save if it is due, and learn whether to stop.

        All ranks must call it equally often.

        Args:
            step: optimizer steps done in the whole training, if a step has just ended. None in loops without steps,
                such as an evaluation: nothing is saved, and True means that the next boundary with a step stops.
            end: whether the training ends here; its state is then always saved.

        Returns:
            Whether all ranks must stop here, because a rank called :meth:`request_stop` or a node joins or leaves. The
            state is saved. If :attr:`draining` is then set, leave the session: this ends the process, and the training
            continues in another one.

        Raises:
            UsageError: if ``step`` is lower than before, objects were registered but not restored by :meth:`resume`,
                or it is called within ``run.steps()`` or a ``Trainer``.
        """
        engine = self._engine
        engine.trainings.refuse_swapped("run.boundary()")
        engine.trainings.refuse_after_end("run.boundary()")
        if step is not None:
            engine.trainings.refuse_beside_steps(f"run.boundary({step})")
            engine.trainings.refuse_before_restoring(f"run.boundary({step})", engine.state.names)
            if engine.trainings.resumed and step < engine.rounds.step:
                raise UsageError(
                    f"run.boundary({step}) came after step {engine.rounds.step}.",
                    "Give the steps done in the whole training, not in an epoch: run.resume() returns those before.",
                )
        engine.begin(step or 0)
        if step is None:
            return engine.ask_whether_to_stop()
        after = Trained(step, engine.checkpoint, self._unchanging, engine.state, engine.worlds)
        return engine.step_boundary(after, end=end)


def engine_of(run: Run) -> Engine:
    """Return what the library needs of a run."""
    return run._engine


def session(
    *,
    threads: int | None = None,
    deterministic: bool | None = None,
    timeout: float | timedelta | None = None,
    live: AskedLive = None,
) -> AbstractContextManager[Run]:
    """Take part in a training run: join the world on entry, leave it on exit. ``with`` gets the :class:`Run`.

    Without a launcher, the world is this one process. A process group that was made before the session is used, and
    stays joined on exit. A worker that is started while others train joins at its first use of the world, and waits for
    its place there: :attr:`Run.rank`, :attr:`Run.world_size`, :attr:`Run.world`, :attr:`Run.worlds`,
    :attr:`Run.restarts`, :meth:`Run.grad_accum` and what a run says of replicas; ``elastic_launch.dist``, except
    ``get_local_rank``, ``get_local_world_size`` and ``local_rank_zero_download_and_wait``; the first step of
    :meth:`Run.steps` or ``Trainer.fit``, :meth:`Run.resume` and :meth:`Run.boundary`. This function,
    :attr:`Run.device` and :attr:`Run.start_reason` do not wait.

    Args:
        threads: threads of each CPU operation; None: 1 in trainings with ``exact=True``, else torch's setting. Results
            are bitwise equal only for the same number.
        deterministic: whether torch uses deterministic algorithms, and warns where it has none; None: only in trainings
            with ``exact=True``, where it raises an error on GPUs. The previous settings are restored at the session's
            end.
        timeout: timeout of the process groups, in seconds or as a timedelta: a collective that not all ranks join
            fails after it; None: 600 s.
        live: whether this process goes on in the next round, where its loop allows that, instead of ending with its
            round; None: as True. On GPUs it then goes back to the last snapshot in memory after a fault, and repeats
            the steps since, see :attr:`elastic_launch.Step.repeated`. With ``"confirmed"`` each step there waits until
            all ranks have confirmed its exchange, and none is repeated. The same on all ranks. On GPUs the session
            then sets ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0``, since the ranks that are left abort NCCL's communicators,
            turns off a thread of torch that ends a process after an abort, and shortens another one's wait for dumps. A
            thread of the library ends a process (SIGABRT) whose collective has outlasted its group's timeout.

    Raises:
        UsageError: on entry, if an argument is invalid, the environment describes the world only in part, or
            ``timeout`` is given although the process group was made before the session, or an earlier session has left
            the run with this process. Also if what this returns is used as the run, without ``with``.
        SystemExit: if the training continues in other processes.
        CheckpointError: on exit, if the last checkpoint could not be saved; under an agent of this project,
            ``SystemExit`` with 93.
    """
    return _Session(_take_part(threads, deterministic, timeout, live))


class _Session(AbstractContextManager[Run]):
    """Can only be entered; the process that did so leaves it."""

    def __init__(self, part: AbstractContextManager[Run]) -> None:
        self._part = part
        self._pid = 0

    def __enter__(self) -> Run:
        self._pid = os.getpid()
        return self._part.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        if os.getpid() != self._pid:  # the script has forked in it, without os._exit() at the end
            never_freed(self._part)
            return None
        return self._part.__exit__(*raised)

    def __getattr__(self, name: str) -> NoReturn:
        if not hasattr(Run, name):
            raise AttributeError(f"a session has no attribute {name!r}")
        # An AttributeError would look like a crash, after which a restart may help.
        raise UsageError(f"session().{name}: the session was not entered.", "Write: with session() as run: ...")


@contextmanager
def _take_part(
    threads: int | None, deterministic: bool | None, timeout: float | timedelta | None, live: AskedLive
) -> Iterator[Run]:
    seconds = _seconds(timeout)
    if live is not None and not isinstance(live, bool) and live != CONFIRMED:
        raise UsageError(
            f"session(live={live!r}) is not known.", f"Give True, False or {CONFIRMED!r}, or leave it out."
        )
    with closing(Determinism(threads, deterministic)) as settings, variables_restored():
        found = dist.is_initialized()
        if found and timeout is not None:
            raise UsageError(
                f"session(timeout={timeout}): the process group was made before the session, with its own timeout.",
                "Give it to init_process_group(timeout=...), or leave joining to the session.",
            )
        if is_ahead():
            engine = Engine(None, device_ahead(), settings=settings, timeout=seconds, live=live)
        else:
            engine = _joined(settings, seconds, live)
        try:
            with engine.background, _ended_in_order(engine, found), joining(engine.meet):
                yield Run(engine)
                engine.leave_if_draining()
        finally:
            engine.release()


def _joined(settings: Determinism, timeout: float, live: AskedLive) -> Engine:
    world, groups = environment(), RoundGroups()
    link = AgentLink.connect(world)
    try:
        with link.forming(), groups.forming():
            device = join(world, timeout, abortable=live is not False and link.patience > 0)
    except BaseException:
        link.close()
        raise
    return Engine(world, device, link, groups=groups, settings=settings, timeout=timeout, live=live)


def _seconds(timeout: float | timedelta | None) -> float:
    if timeout is None:
        return GROUP_TIMEOUT
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < _LONGEST:
        raise UsageError(f"session(timeout={timeout!r}) is not a timeout.", "Give seconds above 0, or a timedelta.")
    return float(seconds)


@contextmanager
def _ended_in_order(engine: Engine, found: bool) -> Iterator[None]:
    """Close the engine at its end or after a drain; leave the world unless it was joined before the session."""
    drained: DrainedExit | None = None
    try:
        yield
    except DrainedExit as reason:
        drained = reason
    except BaseException:
        # No collectives: the other ranks may never join them, and this process is about to fail.
        engine.saver.abandon()
        raise
    engine.close()
    if not found:
        leave()
    if drained is not None:
        raise DrainedExit(UNCONFIRMED) if engine.unconfirmed else drained
