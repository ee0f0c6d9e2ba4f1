"""``python -m elastic_launch.observe LOGDIR``: the ledger of a run, from its event files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_launch.errors import ElasticLaunchError, UsageError
from elastic_launch.observe.page import as_page
from elastic_launch.observe.reading import event_files, read
from elastic_launch.observe.report import as_json as as_object
from elastic_launch.observe.report import as_table, joined

__all__ = ["main", "show_report"]


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
        show_report(options.directory, as_json=options.json, html=options.html)
    except ElasticLaunchError as error:
        print(f"elastic_launch.observe: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def show_report(directory: Path, *, as_json: bool, html: Path | None) -> None:
    """Print the ledger of a run's directory, or write it to an HTML file.

    Raises:
        UsageError: if there is nothing to read, or the file cannot be written.
    """
    hosts = [read(path) for path in event_files(directory)]
    for complaint in (text for host in hosts for text in host.complaints):
        print(f"elastic_launch.observe: {complaint}", file=sys.stderr)
    hosts = [host for host in hosts if host.chronicle.since is not None]
    if not hosts:
        raise UsageError(f"The event files in {directory} have no event that can be read.")
    node, ledger = joined(hosts)
    if html is not None:
        name = event_files(directory)[0].resolve().parent.name
        (host,) = (host for host in hosts if host.node == node)
        try:
            html.write_text(as_page(name, host, ledger))
        except OSError as error:
            raise UsageError(f"--html {html} cannot be written: {error.strerror}.") from error
    elif as_json:
        print(json.dumps(as_object(node, ledger), indent=2))
    else:
        print(as_table(ledger))


if __name__ == "__main__":
    sys.exit(main())
