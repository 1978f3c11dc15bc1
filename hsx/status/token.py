"""The bearer token of the status endpoint: from a file that the job file names, or from a credential of the service manager."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping

CREDENTIAL: Final = "hsx-status-token"
"""Name of the credential (`LoadCredential=hsx-status-token:/etc/hsx/status-token`)."""
SHORTEST: Final = 16


def read_token(file: str, environ: Mapping[str, str], said_by: str = "status.token_file") -> str:
    """The token in force; "" where there is none.

    Args:
        file: its path; "" where none is named. It goes before a credential.
        environ: the process's environment; CREDENTIALS_DIRECTORY names the folder of credentials.
        said_by: the key or option that names `file`, for messages.

    Raises:
        RunError: `status_failed` where the file cannot be read, others may read it, or what it holds is no token.
    """
    folder = environ.get("CREDENTIALS_DIRECTORY", "")
    path = Path(file) if file else Path(folder) / CREDENTIAL
    if not file and not (folder and path.is_file()):
        return ""
    name = said_by if file else f"credential {CREDENTIAL}"
    try:
        if path.stat().st_mode & stat.S_IROTH:
            raise RunError("status_failed", f"{name}: every user may read {path}; expected `chmod o-r`")
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise RunError("status_failed", f"{name}: {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RunError("status_failed", f"{name}: {path} is not ASCII text") from error
    if len(token) < SHORTEST or not token.isprintable() or " " in token:
        raise RunError(
            "status_failed",
            f"{name}: {path} holds no token; expected one line of {SHORTEST} characters or more, without spaces",
        )
    return token
