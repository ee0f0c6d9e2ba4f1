"""Stop a process of ``changes.py`` by SIGSTOP as it enters a round: ``frozen.py WHERE WHO DIRECTORY [ARGUMENT ...]``.

WHERE: ``place``, before it reads that it has one; ``join``; ``restore``, before it restores; or ``receive``, as it
exchanges with others there. WHO: local rank 1 as a ``survivor``, in round 2, or local rank 2 as a ``new`` one. It
happens once.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import elastic_launch.training.ranks.exchange as exchange
import elastic_launch.training.rounds as rounds
import elastic_launch.training.session as session
from elastic_launch.training.checkpoints.saving import Saver
from elastic_launch.training.link import AgentLink

# What is put in the place of the library's functions below counts as the library's own.
__name__ = "elastic_launch.training.frozen"

between_ranks = exchange.exchanging
where, who, *arguments = sys.argv[1:]
began = os.environ.get("ELASTIC_LAUNCH_ROUND")
me = os.environ["LOCAL_RANK"] == ("1" if who == "survivor" else "2") and (began == "1") == (who == "survivor")


def stopped_in(number: str, function: Any) -> Any:
    def stopping(*args: Any, **options: Any) -> Any:
        if me and (os.environ["ELASTIC_LAUNCH_ROUND"] == number or who == "new"):
            try:
                (Path(arguments[0]) / "frozen").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGSTOP)
        return function(*args, **options)

    return stopping


@contextmanager
def receiving() -> Iterator[None]:
    with between_ranks():
        stopped_in("2", lambda: None)()
        yield


match where:
    case "place":
        AgentLink.wait_for_place = stopped_in("1", AgentLink.wait_for_place)  # type: ignore[method-assign]
    case "join":
        rounds.join = session.join = stopped_in("2", rounds.join)  # type: ignore[attr-defined]
    case "restore":
        Saver.restore = stopped_in("2", Saver.restore)  # type: ignore[method-assign]
    case "receive":
        exchange.exchanging = receiving  # type: ignore[attr-defined]
script = Path(__file__).with_name("changes.py")
sys.argv = [str(script), *arguments]
runpy.run_path(str(script), run_name="__main__")
