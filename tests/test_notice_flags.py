"""The effect of --notice, and how it changes the signals."""

from __future__ import annotations

import signal
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2

import pytest

from elastic_launch.cli.main import parse
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.config.notice_sources import AUTO, NoticeSource
from elastic_launch.config.torch_options import Signals
from elastic_launch.errors import UsageError


def parsed(*flags: str, **environ: str) -> LaunchConfig:
    return parse([*flags, __file__], environ)


def test_notices_are_watched_by_default_and_can_be_given_several_times() -> None:
    assert parsed().notices == (AUTO,)
    assert parsed("--notice", "none").notices == ()
    found = parsed("--notice", "aws:rebalance,gcp", "--notice", "slurm", "--notice", "gcp").notices
    assert found == (NoticeSource("aws", early=True), NoticeSource("gcp"), NoticeSource("slurm", number=SIGUSR1))


def test_a_signal_that_is_a_notice_is_nothing_else() -> None:
    config = parsed("--notice", "signal:USR1,signal:TERM")
    assert config.signals == Signals((SIGINT, SIGHUP, SIGQUIT), (SIGUSR2,))
    for flag in ("--signals-to-forward", "--signals-to-handle"):
        with pytest.raises(UsageError, match=f"--notice and {flag} both take SIGUSR1"):
            parsed("--notice", "slurm", flag, "USR1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("asw", "'asw' is not a source"),
        ("aws:spot", "'aws:spot' is not a source"),
        ("file:", "'file:' is not a source"),
        ("signal:USR9", "names SIGUSR9, which is not a signal"),
        ("signal:KILL", "names SIGKILL, which cannot be a notice"),
        ("signal:USR1@soon", "gives 'soon' as the seconds"),
        ("signal:USR1@10000000000", "gives '10000000000' as the seconds"),
        ("signal:USR1@60,signal:USR1@30", "gives two times for SIGUSR1"),
        ("none,aws", "none beside others"),
        (",", "names nothing"),
    ],
)
def test_an_unknown_source_of_notices_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parsed("--notice", text)


def test_notices_with_another_handler_are_reported_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    assert parsed("--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "a:1", "--notice", "aws").notices == ()
    assert "--notice has no effect: torch's own agent runs the workers." in caplog.messages


def test_signals_ignored_at_the_start_are_handled_only_if_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = {SIGHUP, SIGINT, SIGUSR2}
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    assert parsed().signals == Signals((SIGTERM, SIGQUIT), (SIGUSR1,), (SIGINT, SIGHUP, SIGUSR2))
    named = parsed("--signals-to-handle", "HUP,TERM", "--notice", "signal:USR2").signals
    assert named == Signals((SIGHUP, SIGTERM), (SIGUSR1,), (SIGINT,))
