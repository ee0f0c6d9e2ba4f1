"""``python -m elastic_launch`` is ``elastic-launch``."""

if __name__ == "__main__":
    from elastic_launch.programs import launch

    launch()
