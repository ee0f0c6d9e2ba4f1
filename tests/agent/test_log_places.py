"""Where the exceptions of workers are kept, however slow that file system is."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

from elastic_agents.workers.logs import LogPlaces, keep_error
from elastic_launch.config.launch_config import Command, LaunchConfig
from elastic_launch.contract import Placement
from elastic_launch.system.writer_thread import Writer


def test_an_exception_is_copied_before_its_directory_is_removed(tmp_path: Path) -> None:
    config = LaunchConfig(Command(("true",), ("true",)), log_dir=tmp_path)
    placement = Placement(0, 0, 0, 1, 1, 1, "127.0.0.1", 29500, 0, 1, True)
    with closing(Writer("files", limit=1 << 20, patience=3.0)) as files:
        places = LogPlaces(config, files)
        logs = places.prepare(1, [placement], lambda placement, error_file: {}, {})[0][0]
        logs.error_file.write_text("what it raised")
        files.put(lambda data: time.sleep(0.2))  # a slow disk
        files.put(lambda data: keep_error(logs))
        places.close()
    assert not logs.error_file.parent.exists()
    assert logs.kept_error is not None
    assert logs.kept_error.read_text() == "what it raised"
