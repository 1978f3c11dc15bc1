"""`python -m hsx.integrations.speculators_cli train ARGUMENTS`: speculators' own command, which then knows the backend `hsx`.

The backend has to be registered before speculators builds its command line; that is all this does.
"""

from __future__ import annotations

try:
    from hs_connectors import HiddenStatesBackend
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; expected the packages speculators and hs-connectors to be installed here") from error

import hsx.integrations.speculators  # noqa: F401 - importing it registers the backend


def main() -> None:
    """Runs speculators' own command line."""
    from speculators.__main__ import app

    assert "hsx" in HiddenStatesBackend.registry
    app()


if __name__ == "__main__":
    main()
