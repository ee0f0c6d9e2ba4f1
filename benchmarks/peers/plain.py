"""The plain DDP script of ../workload.py, which saves every ten steps; it can be made to hang."""

from datetime import timedelta
from pathlib import Path

import workload
from hangs import hanging


def main() -> None:
    options = workload.parser()
    options.add_argument("--snapshot", type=Path, required=True, help="file to save to and to go on from")
    options.add_argument("--every", type=int, default=10, help="steps between snapshots")
    options.add_argument("--collective-timeout", type=float, required=True, help="seconds")
    options.add_argument("--heartbeats", action="store_true", help="send one to ft_launcher after each step")
    args = options.parse_args()
    workload.COLLECTIVE_TIMEOUT = timedelta(seconds=args.collective_timeout)
    with workload.noting(args.file) as write:
        write(0, mark="begin", clock=workload.BEGAN)
        write(0, mark="imported", clock=workload.IMPORTED)
        workload.train(args, hanging(write, args.file.parent, heartbeat() if args.heartbeats else None))


def heartbeat():  # type: ignore[no-untyped-def]
    """Connect to the rank's monitor of ft_launcher, and return what sends it a heartbeat."""
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client.send_heartbeat


if __name__ == "__main__":
    main()
