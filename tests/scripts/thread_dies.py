"""``elastic-launch``, whose thread that listens to workers ends by an error at a worker's first message."""

from elastic_agents.workers.control import Control
from elastic_launch.cli.main import console_main


def fail(*_: object) -> None:
    raise ZeroDivisionError("a fault of the agent's own")


Control._hear = fail  # type: ignore[method-assign]
console_main()
