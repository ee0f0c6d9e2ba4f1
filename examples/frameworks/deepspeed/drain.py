"""train.py with a stop at its own step boundary: when an agent or a worker gets SIGTERM, no step is lost.

elastic-launch --standalone --nproc 2 examples/frameworks/deepspeed/drain.py --dir runs/deepspeed
"""

from train import main

import elastic_launch as el

if __name__ == "__main__":
    main(el.integrations.drain.Drain())
