"""Run a script without DeepSpeed's extension for CPUs: ``plain_deepspeed.py SCRIPT [ARGUMENT ...]``.

The extension exchanges gradients through shared memory where there are no GPUs, and takes a minute to compile.
"""

import runpy
import sys

import deepspeed.ops

import elastic_launch  # noqa: F401

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
