"""Block at the n-th sleep of a script's main thread until a file exists: ``halted.py N FILE SCRIPT ...``.

See ``paced.py`` for its imports.
"""

import os
import runpy
import sys
import threading
import time

import torch  # noqa: F401
from sklearn.datasets import load_digits  # noqa: F401

import elastic_launch  # noqa: F401

count, gate, script, *arguments = sys.argv[1:]
really_sleep = time.sleep
left = int(count)


def sleep(seconds: float) -> None:
    global left
    really_sleep(seconds)
    if threading.current_thread() is threading.main_thread():
        left -= 1
        while left == 0 and not os.path.exists(gate):
            really_sleep(0.02)


time.sleep = sleep
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
