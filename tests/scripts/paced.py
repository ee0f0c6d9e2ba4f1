"""Run a script whose steps sleep, until a file is there: ``paced.py FILE SCRIPT [ARGUMENT ...]``."""

import os
import runpy
import sys
import time

gate, script, *arguments = sys.argv[1:]
really_sleep = time.sleep


def sleep(seconds: float) -> None:
    if not os.path.exists(gate):
        really_sleep(seconds)


time.sleep = sleep
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
