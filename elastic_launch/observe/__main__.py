"""``python -m elastic_launch.observe LOGDIR``: the ledger of a run, from its event files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_launch.errors import ElasticLaunchError, UsageError
from elastic_launch.observe.reading import event_files, read
from elastic_launch.observe.report import as_json, as_table, joined

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ledger; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m elastic_launch.observe", description="Tell what a run's incidents cost."
    )
    parser.add_argument("directory", metavar="LOGDIR", type=Path, help="a run's directory, as elastic-launch names it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    try:
        hosts = [read(path) for path in event_files(options.directory)]
        for complaint in (text for host in hosts for text in host.complaints):
            print(f"elastic_launch.observe: {complaint}", file=sys.stderr)
        hosts = [host for host in hosts if host.chronicle.since is not None]
        if not hosts:
            raise UsageError(f"The event files in {options.directory} have no event that can be read.")
    except ElasticLaunchError as error:
        print(f"elastic_launch.observe: error: {error}", file=sys.stderr)
        return error.exit_code
    node, ledger = joined(hosts)
    print(json.dumps(as_json(node, ledger), indent=2) if options.json else as_table(ledger))
    return 0


if __name__ == "__main__":
    sys.exit(main())
