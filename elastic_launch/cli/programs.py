"""Entry points of the installed programs.

Before their imports, Ctrl-C is set to end the process silently, since a traceback would not help the user.
"""

from __future__ import annotations

from elastic_launch.system.interrupts import end_quietly

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def launch() -> NoReturn:
    """``elastic-launch``."""
    end_quietly()
    from elastic_launch.cli.main import console_main

    console_main()


def composer() -> NoReturn:
    """``elastic-composer``."""
    end_quietly()
    from elastic_launch.cli.composer import console_main

    console_main()


def ctl() -> NoReturn:
    """``elasticctl``."""
    end_quietly()
    from elastic_launch.cli.elasticctl import console_main

    console_main()
