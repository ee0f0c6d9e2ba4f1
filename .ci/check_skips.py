"""Print every test that JUnit reports name as skipped; fail on one that is outside the listed set.

usage: check_skips.py ALLOWED REPORT...
"""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def main(allowed_file: str, *reports: str) -> int:
    lines = (line.strip() for line in Path(allowed_file).read_text().splitlines())
    allowed = [re.compile(line) for line in lines if line and not line.startswith("#")]
    missing = [report for report in reports if not Path(report).is_file()]
    if missing:
        print(f"ci: no test report {', '.join(missing)}: the tests did not run to their end", file=sys.stderr)
        return 1
    skips = set()
    for report in reports:
        for case in ET.parse(report).iter("testcase"):
            for skipped in case.iter("skipped"):
                test = "::".join(filter(None, (case.get("classname"), case.get("name"))))
                kind = (skipped.get("type") or "").removeprefix("pytest.")
                skips.add(f"{test}: {kind}: {skipped.get('message', '')}")
    unlisted = 0
    for skip in sorted(skips):
        listed = any(pattern.search(skip) for pattern in allowed)
        unlisted += not listed
        print(f"ci: {'listed' if listed else 'NOT LISTED'}: {skip}")
    print(f"ci: {len(skips)} skipped, {unlisted} of them outside {allowed_file}")
    return 1 if unlisted else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
