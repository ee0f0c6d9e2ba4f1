"""``python -m elastic_launch`` is ``elastic-launch``."""

if __name__ == "__main__":
    from elastic_launch.safe_path import leave_out_working_directory

    leave_out_working_directory()
    from elastic_launch.cli.programs import launch

    launch()
