"""Tests of the rendezvous' settings: --rdzv-conf, the flags of its keys, and which of them wins."""

from __future__ import annotations

import tempfile

import pytest
from command_lines import refused

from elastic_launch.cli import main as cli
from elastic_launch.config.launch_config import LaunchConfig, Timing


def parse(line: str, **environ: str) -> LaunchConfig:
    return cli.parse(["--log-dir", tempfile.gettempdir(), *line.split(), __file__], environ)


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        # Several merge; of one key the last wins; spaces and empty items do no harm.
        ("--rdzv-conf beat=.5,dead_after=3", {}, {"beat": 0.5, "dead_after": 3}),
        ("--rdzv-conf beat=.5 --rdzv-conf dead_after=3", {}, {"beat": 0.5, "dead_after": 3}),
        ("--rdzv-conf beat=.5,beat=.25 --rdzv-conf beat=2", {}, {"beat": 2}),
        ("--rdzv-conf=beat=.5,,", {}, {"beat": 0.5}),
        ("--rdzv-conf=", {}, {}),
        # In quotes that no shell has removed.
        ("--rdzv-conf 'beat=.5,dead_after=3'", {}, {"beat": 0.5, "dead_after": 3}),
        ('--rdzv-conf="beat=.5"', {"PET_RDZV_CONF": "'min_wait=7'"}, {"beat": 0.5, "min_wait": 7}),
        ("--rdzv-conf join_timeout=5,read_timeout=6", {}, {"join_timeout": 5, "read_timeout": 6}),
        # A flag over the key, the command line over the environment, key by key.
        ("--join-settle 1 --rdzv-conf join_settle=9", {}, {"join_settle": 1}),
        ("--rdzv-conf beat=.5", {"PET_RDZV_CONF": "beat=2,min_wait=7"}, {"beat": 0.5, "min_wait": 7}),
        ("--rdzv-conf join_settle=1", {"PET_JOIN_SETTLE": "9"}, {"join_settle": 1}),
        ("", {"PET_JOIN_SETTLE": "1", "PET_RDZV_CONF": "join_settle=9"}, {"join_settle": 1}),
        # A value that is overruled is not read.
        ("--join-settle 1", {"PET_JOIN_SETTLE": "soon"}, {"join_settle": 1}),
        # torch's words, which ours overrule in the same place or a stronger one.
        ("--rdzv-conf last_call_timeout=7", {}, {"join_settle": 7}),
        ("--rdzv-conf last_call_timeout=0", {}, {"join_settle": 0}),
        ("--rdzv-conf last_call_timeout=7,join_settle=1", {}, {"join_settle": 1}),
        ("--rdzv-conf last_call_timeout=7 --join-settle 1", {}, {"join_settle": 1}),
        ("--rdzv-conf last_call_timeout=7", {"PET_JOIN_SETTLE": "1"}, {"join_settle": 7}),
        ("--join-settle 1", {"PET_RDZV_CONF": "last_call_timeout=7"}, {"join_settle": 1}),
        (
            "--rdzv-conf keep_alive_interval=2,keep_alive_max_attempt=4",
            {},
            {"beat": 2, "dead_after": 8},
        ),
        ("--rdzv-conf keep_alive_interval=4", {}, {"beat": 4, "dead_after": 12}),
        ("--rdzv-conf keep_alive_max_attempt=2", {}, {"dead_after": 10}),
        ("--rdzv-conf keep_alive_max_attempt=6,beat=.5", {}, {"beat": 0.5, "dead_after": 3}),
        ("--rdzv-conf keep_alive_interval=2 --dead-after 9", {}, {"beat": 2, "dead_after": 9}),
        ("--rdzv-conf keep_alive_interval=9,beat=2,dead_after=4", {}, {"beat": 2, "dead_after": 4}),
    ],
)
def test_rdzv_conf(line: str, environ: dict[str, str], expected: dict[str, float]) -> None:
    assert parse(line, **environ).timing == Timing(**expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("true", True), ("1", True), ("Yes", True), ("t", True), ("false", False), ("0", False), ("n", False)],
)
def test_is_host(text: str, expected: bool) -> None:
    assert parse(f"--rdzv-endpoint node0 --rdzv-conf is_host={text}").is_host is expected


def test_one_node_has_to_host() -> None:
    assert "is_host" in refused(parse, "--nnodes 1:2 --rdzv-conf is_host=0").message


@pytest.mark.parametrize(
    ("line", "environ", "message"),
    [
        ("--rdzv-conf joinsettle=3", {}, "--rdzv-conf has the unknown key 'joinsettle'"),
        ("", {"PET_RDZV_CONF": "joinsettle=3"}, "PET_RDZV_CONF has the unknown key 'joinsettle'"),
        ("--rdzv-conf =3", {}, "--rdzv-conf has the unknown key ''"),
        ("--rdzv-conf beat", {}, "--rdzv-conf gives beat no value"),
        ("--rdzv-conf beat=", {}, "--rdzv-conf gives beat no value"),
        ("--rdzv-conf beat=soon", {}, "--rdzv-conf beat=soon is not a number of seconds"),
        ("--rdzv-conf beat=nan", {}, "--rdzv-conf beat=nan is not a time to wait"),
        ("--rdzv-conf min_wait=0", {}, "--rdzv-conf min_wait=0 is not a time to wait"),
        ("--rdzv-conf is_host=maybe", {}, "--rdzv-conf is_host=maybe is neither yes nor no"),
        ("--rdzv-conf keep_alive_max_attempt=0", {}, "keep_alive_max_attempt=0 is below 1"),
        ("--rdzv-conf keep_alive_max_attempt=x", {}, "keep_alive_max_attempt=x is not a whole number"),
        ("--rdzv-conf keep_alive_interval=-1", {}, "keep_alive_interval=-1 is not a time to wait"),
        ("--rdzv-conf last_call_timeout=-1", {}, "last_call_timeout=-1 is not a time to wait"),
        ("--join-settle soon", {}, "--join-settle soon is not a number of seconds"),
        ("--join-settle -1", {}, "--join-settle -1 is not a time to wait"),
        ("--dead-after 0", {}, "--dead-after 0 is not a time to wait"),
        ("--min-wait inf", {}, "--min-wait inf is not a time to wait"),
        ("", {"PET_MIN_WAIT": "-3"}, "PET_MIN_WAIT=-3 is not a time to wait"),
        ("--dead-after 1", {}, "dead_after=1 leaves no room for beats every 1 s"),
        ("--join-settle=", {}, "--join-settle has an empty value"),
    ],
)
def test_settings_that_cannot_work(line: str, environ: dict[str, str], message: str) -> None:
    assert message in refused(parse, line, **environ).message


def test_an_unknown_key_names_the_nearest_and_all() -> None:
    hint = refused(parse, "--rdzv-conf joinsettle=3").hint
    assert "Did you mean join_settle?" in hint
    assert "keep_alive_interval" in hint
