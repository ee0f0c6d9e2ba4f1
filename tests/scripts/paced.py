"""Run a script whose steps sleep until a file exists: ``paced.py FILE SCRIPT [ARGUMENT ...]``.

It imports what the scripts import, which the launcher cannot read from this file: so their workers are forked.
"""

import os
import runpy
import sys
import time

import torch  # noqa: F401
from sklearn.datasets import load_digits  # noqa: F401

import elastic_launch  # noqa: F401

gate, script, *arguments = sys.argv[1:]
really_sleep = time.sleep


def sleep(seconds: float) -> None:
    if not os.path.exists(gate):
        really_sleep(seconds)


time.sleep = sleep
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
