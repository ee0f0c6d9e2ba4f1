"""A program that launches one of its own functions: ``calling.py FUNCTION CONFIG``, with CONFIG as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys


def place(text: str) -> list[str]:
    """Return this worker's place, from its environment."""
    names = ("RANK", "WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
    return [text, __name__, *(os.environ[name] for name in names)]


def sleep(directory: str) -> None:
    """Report that this worker runs, and sleep for a long time."""
    from called import linger

    linger(directory)


def wait_for_another_round(directory: str) -> str:
    """Return the round, but in the first round only report that this worker runs, and sleep."""
    number = os.environ["ELASTIC_LAUNCH_ROUND"]
    if number == "1":
        sleep(directory)
    return number


def main() -> None:
    # Here, since workers import this file, too, and need none of it.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from elastic_launch.api import LaunchConfig, elastic_launch

    function, settings = sys.argv[1:3]
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    config = LaunchConfig(**json.loads(settings))
    try:
        print("results", json.dumps(elastic_launch(config, globals()[function])(*sys.argv[3:])), flush=True)
    except (SignalException, ChildFailedError) as error:
        same = before == {number: signal.getsignal(number) for number in before}
        print("raised", type(error).__name__, getattr(error, "sigval", None), same, flush=True)


if __name__ == "__main__":
    main()
