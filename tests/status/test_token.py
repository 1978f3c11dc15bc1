"""The token of the endpoint: from a file, or a credential; wrong ones are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hsx.errors import RunError
from hsx.status.token import CREDENTIAL, read_token

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "0123456789abcdef"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_a_file_goes_before_a_credential(tmp_path: Path) -> None:
    write(tmp_path / CREDENTIAL, "f" * 16)
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert read_token(str(write(tmp_path / "token", TOKEN + "\n")), environ) == TOKEN
    assert read_token("", environ) == "f" * 16


def test_without_either_there_is_none(tmp_path: Path) -> None:
    assert read_token("", {}) == read_token("", {"CREDENTIALS_DIRECTORY": str(tmp_path)}) == ""


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("short", 0o600, "holds no token; expected one line of 16 characters or more"),
        (f"{TOKEN}\n{TOKEN}", 0o600, "holds no token"),
        (f"{TOKEN} {TOKEN}", 0o600, "holds no token"),
        ("ä" * 16, 0o600, "is not ASCII text"),
        (TOKEN, 0o644, "every user may read .*; expected `chmod o-r`"),
    ],
)
def test_what_is_no_token_is_told(tmp_path: Path, text: str, mode: int, says: str) -> None:
    with pytest.raises(RunError, match=rf"status.token_file: .*{says}") as caught:
        read_token(str(write(tmp_path / "token", text, mode)), {})
    assert caught.value.kind == "status_failed"


def test_who_named_the_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"\[status_failed\] --token-file: .*absent cannot be read"):
        read_token(str(tmp_path / "absent"), {}, "--token-file")


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be read: No such file"):
        read_token(str(tmp_path / "absent"), {})
