"""``python -m elastic_launch`` is ``elastic-launch``."""

from elastic_launch.cli import console_main

if __name__ == "__main__":
    console_main()
