"""``python -m elastic_launch.observe LOGDIR``: the ledger of a run, from its event files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_launch.errors import ElasticLaunchError
from elastic_launch.observe.report import show_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ledger; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m elastic_launch.observe", description="Tell what a run's incidents cost."
    )
    parser.add_argument("directory", metavar="LOGDIR", type=Path, help="a run's directory, as elastic-launch names it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the report as one HTML file")
    options = parser.parse_args(arguments)
    try:
        show_report(options.directory, as_object=options.json, html=options.html)
    except ElasticLaunchError as error:
        print(f"elastic_launch.observe: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
