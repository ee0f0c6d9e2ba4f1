"""Implementation of torch's ``RendezvousHandler`` for plain torchrun: elastic-c10d and elastic-etcd.

This project's agent receives events from its membership directly. torchrun's agent calls ``next_rendezvous`` for a
round and polls ``num_nodes_waiting``, which rises above 0 once its workers must be restarted: the leader broke the
round, left this node out of it, or is gone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
from functools import cached_property

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic_launch.clock import MonotonicClock
from elastic_launch.config.backends import kind_of
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import Command, LaunchConfig, Limits
from elastic_launch.config.settings import Setting, check_key, default_node_id, read_timing
from elastic_launch.errors import ExitCode, UsageError
from elastic_launch.events.types import Event
from elastic_launch.rendezvous.backends.registry import backend_of
from elastic_launch.rendezvous.node.failure_detector import CutOff
from elastic_launch.rendezvous.node.membership import Membership
from elastic_launch.rendezvous.node.membership_events import LinkDown, MembershipEvent, RendezvousLost
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.worker_store import WorkerStore, store_client
from elastic_launch.secret import read_token

END_TIMEOUT = 10.0
"""Seconds that a node whose workers have finished waits for the run's end to be recorded."""


class _Handler(RendezvousHandler):
    """What both handlers say of the rendezvous."""

    def __init__(self, config: LaunchConfig) -> None:
        self.config = config

    def get_backend(self) -> str:
        return f"elastic-{self.config.backend}"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self.config.run_id


class MembershipHandler(_Handler):
    """The ``RendezvousHandler`` that torch's ``WorkerSpec`` requires, for this project's own agent."""

    def __init__(self, config: LaunchConfig, membership: Membership) -> None:
        super().__init__(config)
        self._membership = membership

    def next_rendezvous(self) -> RendezvousInfo:
        raise RendezvousClosedError("The agent takes part in rounds by its membership, not by its handler.")

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        self._membership.report(m.Leaving("closed"))

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._membership.close()
        return True


class _NoEvents:
    def emit(self, event: Event) -> None:
        return


_TORCHRUN_COUNTS = 2**31 - 1
"""Restarts of a run whose nodes count their own: torchrun's agent leaves once it has none left."""


class TorchrunHandler(_Handler):
    """One node's membership, for torchrun's agent.

    Args:
        params: as created by torchrun; their configuration takes the keys of ``--rdzv-conf``.
        backend: ``c10d``, or one with a service for the record.

    Attributes:
        config: where nodes meet, and how many; without what they run.

    Raises:
        UsageError: if the parameters do not describe a valid rendezvous.
    """

    def __init__(self, params: RendezvousParameters, backend: str) -> None:
        # torch's LaunchConfig always adds a `timeout`, meant for handlers older than c10d.
        conf = {k: Setting(f"--rdzv-conf {k}=", str(v)) for k, v in params.config.items() if k != "timeout"}
        for key in conf:
            check_key("--rdzv-conf", key)
        timing, is_host, reuse = read_timing([conf])
        endpoints = _endpoints(params, backend)
        config = LaunchConfig(
            command=Command((), ("torchrun",)),
            limits=Limits(params.min_nodes, params.max_nodes, max_restarts=_TORCHRUN_COUNTS),
            run_id=params.run_id,
            backend=backend,
            endpoint=endpoints[0] if endpoints else None,
            endpoints=endpoints if kind_of(backend).elected else (),
            timing=timing,
            node_id=default_node_id(),
            local_addr=params.local_addr,
            is_host=is_host,
            reuse=reuse,
            token=read_token(None, os.environ),
        )
        super().__init__(config)
        self._clock = MonotonicClock()
        self._events: queue.SimpleQueue[MembershipEvent] = queue.SimpleQueue()
        self._store: WorkerStore | None = None
        self._started = False
        self._round = 0
        self._restart_due = False
        self._alone = False
        self._ended = False

    @cached_property
    def _membership(self) -> Membership:
        """Created with the first round, so that a handler that only describes a rendezvous holds nothing open."""
        way = backend_of(self.config, self._clock, _NoEvents())
        return Membership(self.config, way, self._clock, self._events.put, self._reserve)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round; torchrun calls this after it has stopped the workers of the last one.

        Raises:
            SystemExit: the run has ended with exit code 0.
            RendezvousClosedError: the run has ended with another code, or another agent replaced this one.
            RendezvousConnectionError: the leader could not be reached, or refuses this node.
            RendezvousTimeoutError: no round was formed within min_wait.
        """
        if not self._started:
            self._started = True
            self._membership.start()
        elif self._round:
            assert self._store is not None
            self._store.stop()
            self._membership.report(m.Stopped(self._round, self._store.reserve()))
        deadline = self._clock.now() + self.config.timing.join_timeout + self.config.timing.min_wait
        while True:
            try:
                event = self._next_event(deadline)
            except queue.Empty:
                raise RendezvousTimeoutError("No round was formed within join_timeout and min_wait.") from None
            self._note(event)
            if isinstance(event, m.Form):
                return self._info(event)

    def is_closed(self) -> bool:
        return self._ended

    def set_closed(self) -> None:
        if self._started:
            self._membership.report(m.Leaving("closed"))

    def num_nodes_waiting(self) -> int:
        self._drain()
        return int(self._restart_due)

    def shutdown(self) -> bool:
        """Leave the run; if this node's workers have finished, first wait up to END_TIMEOUT for its end to be recorded.

        torch does not say whether the workers have finished. But it calls this from a ``finally`` block, which has a
        pending exception only after a failure, and only after waiting for the other nodes' workers.
        """
        if self._started:
            if self._round and not self._ended and sys.exc_info()[0] is None:
                self._membership.report(m.Done(self._round))
                self._await_end()
            else:
                self._membership.report(m.Leaving("shutdown"))
            self._membership.close()
        if self._store is not None:
            self._store.close()
        return True

    def _reserve(self, address: str) -> int:
        self._store = WorkerStore(address)
        return self._store.reserve()

    def _next_event(self, deadline: float) -> MembershipEvent:
        return self._events.get(timeout=max(0.0, deadline - self._clock.now()))

    def _await_end(self) -> None:
        deadline = self._clock.now() + END_TIMEOUT
        with contextlib.suppress(queue.Empty):
            while not isinstance(self._next_event(deadline), m.RunEnd | m.Break | m.Evicted | RendezvousLost):
                pass

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._note(self._events.get_nowait())

    def _note(self, event: MembershipEvent) -> None:
        match event:
            case m.Break(round=number) if number == self._round:
                self._restart_due = True
            case m.Evicted(reason=reason, final=True):
                raise RendezvousClosedError(reason)
            case m.Evicted():
                self._restart_due = True
            case CutOff(certain=certain) if certain or self._alone:
                self._restart_due = True
            case LinkDown(gone=gone) if gone or self._alone:
                # The leader's workers died with it. A node alone might train in parallel to the others.
                self._restart_due = True
            case m.RunEnd(code=code, cause=cause):
                self._ended = True
                if code == ExitCode.DONE:
                    # torch's own error for this, RendezvousGracefulExitError, crashes its launcher (2.13).
                    raise SystemExit(0)
                raise RendezvousClosedError(f"The run has ended with {code}: {cause}")
            case m.LeftOut(cause=cause):
                raise RendezvousClosedError(f"The run goes on without this node: {cause}")
            case RendezvousLost(error=error):
                raise RendezvousConnectionError(str(error)) from error
            case _:
                return

    def _info(self, form: m.Form) -> RendezvousInfo:
        assert self._store is not None
        self._round, self._restart_due, self._alone = form.round.number, False, len(form.round.members) == 1
        rank = next(i for i, x in enumerate(form.round.members) if x.node_id == self.config.node_id)
        master = form.round.members[0]
        timeout = self.config.timing.read_timeout
        port = master.store_port
        store = self._store.serve(timeout) if rank == 0 else store_client(master.address, port, timeout)
        self._membership.report(m.Joined(self._round))
        meeting = RendezvousStoreInfo(master.address, port)
        prefix = PrefixStore(f"elastic_launch/round_{self._round}", store)
        return RendezvousInfo(prefix, rank, len(form.round.members), meeting)


def _endpoints(params: RendezvousParameters, backend: str) -> tuple[Endpoint, ...]:
    kind = kind_of(backend)
    if kind.service is None:
        if "," in params.endpoint:
            raise UsageError(
                f"--rdzv-backend elastic-{backend} takes one endpoint, not {params.endpoint}.",
                "Hosts that keep the record together are for elastic-launch only; torchrun can use elastic-etcd.",
            )
        return kind.parse(params.endpoint) if params.endpoint else ()
    if params.endpoint and params.run_id != "none":  # torchrun's default
        return kind.parse(params.endpoint)
    raise UsageError(
        f"--rdzv-backend elastic-{backend} needs the addresses of the cluster and a name for the run.",
        f"Give them with --rdzv-endpoint HOST:{kind.service.port}[,HOST:{kind.service.port}...] and --rdzv-id ID, the "
        "same on all nodes.",
    )
