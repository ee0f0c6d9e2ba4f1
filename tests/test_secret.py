"""The run's token: its sources, invalid tokens, and that it is never printed."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_launch.cli import main as cli
from elastic_launch.config.launch_config import Command, LaunchConfig
from elastic_launch.errors import UsageError
from elastic_launch.secret import ENV_TOKEN, MIN_LENGTH, Token, keyed, read_token

TEXT = "correct-horse-battery-staple"
OTHER = "another-token-of-some-length"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TEXT + "\n")
    path.chmod(0o600)
    return path


def _refused(path: str | None, environ: dict[str, str]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_token(path, environ)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    return caught.value


def test_without_a_source_there_is_none() -> None:
    assert read_token(None, {}) is None


def test_file_and_variable_give_the_same_token(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = Token(TEXT, "test")
    assert read_token(str(file), {}) == expected
    assert read_token(None, {ENV_TOKEN: TEXT}) == expected
    assert read_token(str(file), {ENV_TOKEN: f" {TEXT} "}) == expected
    assert not caplog.records


def test_different_ones_are_an_error(file: Path) -> None:
    error = _refused(str(file), {ENV_TOKEN: OTHER})
    assert ENV_TOKEN in error.message
    assert f"--token-file {file}" in error.message
    assert TEXT not in str(error)
    assert OTHER not in str(error)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_file_that_others_can_read_earns_a_warning(file: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert read_token(str(file), {}) is not None
    (record,) = caplog.records
    assert f"{mode:03o}" in record.getMessage()
    assert f"chmod 600 {file}" in record.getMessage()
    assert TEXT not in record.getMessage()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "holds no token"),
        (b" \n\n", "holds no token"),
        (b"short", "a token of 5 characters"),
        (b"x" * (MIN_LENGTH - 1) + b"\n", f"a token of {MIN_LENGTH - 1} characters"),
        (TEXT.encode() + b"\n" + OTHER.encode(), "more than one line"),
        (b"\x00" * 32, "printable"),
        (b"x" * 5000, "more than 4096 bytes"),
    ],
)
def test_a_file_without_a_token_is_a_usage_error(file: Path, content: bytes, found: str) -> None:
    file.write_bytes(content)
    error = _refused(str(file), {})
    assert error.message.startswith(f"--token-file {file}")
    assert found in error.message


def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    assert "No such file" in _refused(str(tmp_path / "none"), {}).message
    assert "directory" in _refused(str(tmp_path), {}).message


@pytest.mark.parametrize("text", ["", "  ", "short", "x" * (MIN_LENGTH - 1)])
def test_a_variable_without_a_token_is_a_usage_error_even_if_empty(text: str) -> None:
    assert ENV_TOKEN in _refused(None, {ENV_TOKEN: text}).message


def test_the_command_line_takes_a_file_and_never_the_token(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    environ = {"HOME": str(tmp_path)}
    assert cli.parse(["--token-file", str(file), "train.py"], environ).token == Token(TEXT, "test")
    assert cli.parse(["train.py"], {**environ, "PET_TOKEN_FILE": str(file)}).token == Token(TEXT, "test")
    assert cli.parse(["train.py"], {**environ, ENV_TOKEN: TEXT}).token == Token(TEXT, "test")
    for arguments in (["--token", TEXT], [f"--token={TEXT}"]):
        with pytest.raises(UsageError, match="--token is not a flag") as caught:
            cli.parse([*arguments, "train.py"], environ)
        assert TEXT not in str(caught.value)
        assert "--token-file" in caught.value.hint


def test_nothing_prints_it() -> None:
    token = Token(TEXT, "test")
    config = LaunchConfig(command=Command(("a",), ("a",)), token=token)
    plain = dataclasses.replace(config, token=None)
    shown = [repr(config), str(config), repr(token), f"{token}", repr(dataclasses.asdict(config))]
    shown.append(json.dumps(dataclasses.asdict(config), default=repr))
    assert not any(TEXT in text for text in shown)
    assert config.digest() == plain.digest()
    assert copy.deepcopy(config) == config
    assert config != plain
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="not to be pickled"):
            pickle.dumps(config, protocol)
    with pytest.raises(TypeError):
        vars(token)


def test_keys_differ_by_token_purpose_and_run() -> None:
    keys = {Token(text, "t").key(purpose, run) for text in (TEXT, OTHER) for purpose in "ab" for run in ("x", "\udcff")}
    assert len(keys) == 8
    assert {len(key) for key in keys} == {32}
    assert Token(TEXT, "t").key("a", "x") == Token(TEXT, "elsewhere").key("a", "x")


PARTS = st.lists(st.binary(max_size=6), max_size=4)


@settings(max_examples=200)
@given(PARTS, PARTS)
def test_parts_that_differ_have_different_macs(first: list[bytes], second: list[bytes]) -> None:
    assert (keyed(b"k", *first) == keyed(b"k", *second)) == (first == second)
