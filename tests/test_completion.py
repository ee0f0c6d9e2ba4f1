"""Shell completion."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
import shtab

from elastic_launch.cli import elasticctl
from elastic_launch.cli.completion import SHELLS
from elastic_launch.cli.flags import FLAGS
from elastic_launch.cli.main import main


def test_bash_completes_flags_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "bash"]) == 0
    ask = 'COMP_WORDS=(elastic-launch "$1"); COMP_CWORD=1; _elastic_launch; printf "%s\\n" "${COMPREPLY[@]}"'
    program = f"{capsys.readouterr().out}\n{ask}"
    said = [
        subprocess.run(["bash", "-c", program, "bash", word], capture_output=True, text=True, check=True, timeout=60)
        for word in ("--nproc", "/etc/pass")
    ]
    assert said[0].stdout.split() == ["--nproc", "--nproc-per-node"]
    assert "/etc/passwd" in said[1].stdout.split()
    assert not said[0].stderr


def test_other_shells_have_the_names_too_and_unknown_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in SHELLS:
        assert main(["--nproc", "2", "--print-completion", shell, "--not-looked-at"]) == 0
        said = capsys.readouterr().out
        assert "-l nnodes" in said if shell == "fish" else "-nnodes" in said
        assert "elastic-launch" in said
        assert not {"NAMES", "SHORT", "PROGRAM"} & set(said.split())
    assert main(["--print-completion", "powershell"]) == 2
    assert "Give bash, zsh, tcsh, fish." in capsys.readouterr().err


def test_fish_gets_each_flag_with_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line is one command of fish's ``complete``, whose values shlex splits as fish does."""
    assert main(["--print-completion", "fish"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == len(FLAGS)
    for flag, words in zip(FLAGS, lines, strict=True):
        assert words[:3] == ["complete", "-c", "elastic-launch"]
        assert words[-2:] == ["-d", flag.purpose]
        spelled = words[3:-2]
        assert ("-r" in spelled) == bool(flag.metavar)
        pairs = list(zip(spelled[::2], spelled[1::2], strict=False))
        assert ["-" * (1 + (kind == "-l")) + name for kind, name in pairs] == list(flag.names)


def test_elasticctl_has_a_script_for_fish_and_names_a_shtab_without_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        elasticctl.main(["--print-completion", "fish"])
    assert ended.value.code == 0
    assert "-a resize" in capsys.readouterr().out.replace('"', "").replace("'", "")
    monkeypatch.setattr(shtab, "SUPPORTED_SHELLS", ["bash", "zsh"])
    with pytest.raises(SystemExit) as ended:
        elasticctl.main(["--print-completion", "fish"])
    assert ended.value.code == 2
    assert "pip install --upgrade shtab" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "completed"), [("re", {"resize", "report"}), ("--v", {"--version"})])
def test_bash_completes_the_commands_of_elasticctl(
    capsys: pytest.CaptureFixture[str], typed: str, completed: set[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        elasticctl.main(["--print-completion", "bash"])
    assert ended.value.code == 0
    ask = 'COMP_WORDS=(elasticctl "$1"); COMP_CWORD=1; _shtab_elasticctl; printf "%s\\n" "${COMPREPLY[@]}"'
    program = f"{capsys.readouterr().out}\n{ask}"
    said = subprocess.run(
        ["bash", "-c", program, "bash", typed], capture_output=True, text=True, check=True, timeout=60
    )
    assert set(said.stdout.split()) == completed


def test_without_shtab_elasticctl_names_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        elasticctl.main(["--print-completion", "zsh"])
    assert ended.value.code == 2
    assert "pip install 'elastic-launch[completion]'" in capsys.readouterr().err
