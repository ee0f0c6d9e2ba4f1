"""Tests of the torchrun replacement, compared with torch's parser: defaults, refusals and exit codes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch.distributed.run as torchrun
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from elastic_launch.cli import main as cli
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.config.torchrun_mode import DEFAULT_ENDPOINT, DEFAULTS, ENV_TORCHRUN, wanted
from elastic_launch.errors import UsageError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script in it, and an environment without settings."""
    for name in list(os.environ):
        if name.startswith(("PET_", "TORCH_ELASTIC_", "ELASTIC_LAUNCH_")) or name in ("PYTHON_EXEC", "LOGLEVEL"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def parse(line: str, **environ: str) -> LaunchConfig:
    return cli.parse(line.split(), {"PATH": os.environ["PATH"], "HOME": os.getcwd(), ENV_TORCHRUN: "1", **environ})


# When it is wanted.


@pytest.mark.parametrize(
    ("value", "program", "expected"),
    [
        (None, "elastic-launch", False),
        (None, "torchrun", True),
        (None, "/opt/bin/torchrun", True),
        (None, "/opt/torchrun/elastic-launch", False),
        ("", "torchrun", True),
        ("1", "elastic-launch", True),
        ("yes", "", True),
        ("0", "/opt/bin/torchrun", False),
    ],
)
def test_it_is_wanted_by_the_variable_or_else_the_name(value: str | None, program: str, expected: bool) -> None:
    assert wanted({} if value is None else {ENV_TORCHRUN: value}, program) is expected


@pytest.mark.usefixtures("here")
def test_a_bad_value_is_one_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_TORCHRUN, "maybe")
    assert cli.main(["train.py"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "elastic-launch: error: ELASTIC_LAUNCH_TORCHRUN=maybe is neither yes nor no.",
        "  Give 1 or 0, true or false, yes or no.",
    ]


def test_the_name_of_a_link_is_enough(here: Path) -> None:
    link = here / "torchrun"
    link.symlink_to(Path(sys.executable).parent / "elastic-launch")
    ends = {
        word: subprocess.run([link, *word.split()], capture_output=True, text=True, timeout=100)
        for word in ("--bogus", "nonesuch.py", "--print-completion bash")
    }
    assert [end.returncode for end in ends.values()] == [2, 1, 0]
    assert "there is no script 'nonesuch.py'" in ends["nonesuch.py"].stderr
    assert ends["--print-completion bash"].stdout.endswith(" torchrun\n")


# Defaults.


@pytest.mark.usefixtures("here")
def test_the_defaults_are_torchs() -> None:
    config = parse("--rdzv-backend c10d --nnodes 1:2 train.py")
    own = torchrun.get_args_parser().parse_args(["train.py"])
    assert own.rdzv_backend == DEFAULTS["--rdzv-backend"]
    assert own.max_restarts == config.limits.max_restarts
    assert config.timing.join_settle == RendezvousTimeout._DEFAULT_TIMEOUTS["last_call"].seconds
    assert config.timing.join_timeout == config.timing.min_wait == RendezvousTimeout._DEFAULT_TIMEOUTS["join"].seconds
    beats = signature(DynamicRendezvousHandler.from_backend).parameters
    assert config.timing.dead_after == beats["keep_alive_interval"].default * beats["keep_alive_max_attempt"].default
    assert str(config.endpoint) == DEFAULT_ENDPOINT == f"localhost:{DEFAULT_PORT}"
    assert config.run_id == own.rdzv_id
    assert config.role == own.role
    assert config.signals.forward == ()
    assert config.notices == ()
    assert config.output.layout == "torchrun"
    assert config.run_directory.parent.name.startswith("torchelastic_")
    assert config.torchrun


@pytest.mark.usefixtures("here")
def test_flags_and_variables_win_over_them() -> None:
    config = parse("--log-dir logs --dead-after 6 train.py", PET_MAX_RESTARTS="4", PET_SIGNALS_TO_FORWARD="USR1")
    assert (config.limits.max_restarts, config.timing.dead_after, len(config.signals.forward)) == (4, 6, 1)
    assert config.run_directory.parent == Path("logs").absolute()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {"join_settle": 30, "dead_after": 15, "min_wait": 600}),
        ("--rdzv-conf join_timeout=7", {"join_timeout": 7, "min_wait": 7}),
        ("--rdzv-conf timeout=7,min_wait=9", {"join_timeout": 7, "min_wait": 9}),
        ("--rdzv-conf last_call_timeout=3,keep_alive_interval=2", {"join_settle": 3, "beat": 2, "dead_after": 6}),
        ("--rdzv-conf beat=2 --rdzv-conf last_call_timeout=3", {"beat": 1, "join_settle": 3}),
        ("--rdzv-conf= --rdzv-endpoint= --log-dir= --role= --rdzv-id=", {"join_settle": 30}),
    ],
)
def test_the_rendezvous_is_read_as_torchrun_reads_it(line: str, expected: dict[str, float]) -> None:
    timing = parse(f"{line} train.py").timing
    assert {name: getattr(timing, name) for name in expected} == expected


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("line", "backend", "endpoint", "nodes"),
    [
        ("", "c10d", None, (1, 1)),
        ("--standalone", "c10d", None, (1, 1)),
        ("--nnodes 2", "static", Endpoint("127.0.0.1", 29500), (2, 2)),
        ("--nnodes 1:4", "static", Endpoint("127.0.0.1", 29500), (4, 4)),
        ("--rdzv-endpoint h:7", "static", Endpoint("h", 7), (1, 1)),
        ("--nnodes 1:4 --rdzv-backend c10d", "c10d", Endpoint("localhost", 29400), (1, 4)),
        ("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint h:7", "c10d", Endpoint("h", 7), (1, 4)),
    ],
)
def test_nodes_meet_where_torchrun_has_them_meet(
    line: str, backend: str, endpoint: Endpoint | None, nodes: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    config = parse(f"{line} train.py")
    assert (config.backend, config.endpoint) == (backend, endpoint)
    assert (config.limits.min_nodes, config.limits.max_nodes) == nodes
    assert not caplog.records


@pytest.mark.usefixtures("here")
def test_what_torchrun_does_not_know_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse("--rdzv-conf protocol=http train.py")
    assert [record.message for record in caplog.records] == [
        "--rdzv-conf protocol=http has no effect: the key is not known."
    ]
    with pytest.raises(UsageError, match="unknown key 'protocol'"):
        parse("--rdzv-conf protocol=http train.py", **{ENV_TORCHRUN: "0"})
    caplog.clear()
    parse("--run-path -m train.py")
    assert [record.message for record in caplog.records] == ["--module has no effect: --run-path takes precedence."]


@pytest.mark.usefixtures("here")
def test_a_job_file_and_its_printed_form(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_TORCHRUN, "1")
    Path("job.yaml").write_text("script: train.py\njoin-settle: 5\n")
    assert cli.main(["--config", "job.yaml", "--print-config"]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {
        "max-restarts: 0 # default of torchrun",
        "join-settle: 5 # job.yaml:2",
        "rdzv-backend: static # default of torchrun",
    } <= set(shown)


# Codes of what is refused.

REFUSED = """
    |--bogus train.py|--nnodes|--standalone=1 train.py|--max-restarts x train.py|--node-rank x train.py
    |--master-port x train.py|--monitor-interval x train.py|--shutdown-timeout x train.py|--start-method x train.py
    |--numa-binding x train.py|--nnodes abc train.py|--nnodes 0 train.py|--nnodes 2:1 train.py|--nnodes= train.py
    |--nproc-per-node unknown train.py|--max-restarts -1 train.py|-r x train.py
    |--local-ranks-filter x train.py|--logs-specs x train.py|--rdzv-backend x train.py|--rdzv-conf junk train.py
    |--module --no-python train.py
    |--help
"""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("line", [line.strip() for line in REFUSED.split("|")])
def test_refusals_have_torchruns_code(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_TORCHRUN, "1")
    theirs: object = 0  # torch makes nothing of an exit with 0
    try:
        torchrun.main(line.split())
    except SystemExit as end:
        theirs = end.code
    except (ValueError, AssertionError, RuntimeError, OSError):
        theirs = 1
    assert cli.main(line.split()) == theirs


@pytest.mark.usefixtures("here")
def test_composers_flags_are_not_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_TORCHRUN, "1")
    assert cli.main(["--world_size", "2", "train.py"]) == 2
