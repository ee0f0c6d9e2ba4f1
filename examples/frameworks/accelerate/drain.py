"""train.py with one added line: a node that joins or leaves costs it no step.

elastic-launch --nnodes 1:4 --nproc 2 examples/frameworks/accelerate/drain.py --dir runs/accelerate
"""

from train import main

import elastic_launch as el

if __name__ == "__main__":
    main(drain_callback=el.integrations.accelerate.DrainCallback)
