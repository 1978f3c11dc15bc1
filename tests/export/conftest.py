"""One store of each kind of final state for all tests of a file."""

from __future__ import annotations

import pytest

from hsx.testing.exports import Truth, exportable_store


@pytest.fixture(scope="module")
def pre(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A store with pre_norm."""
    return exportable_store(tmp_path_factory.mktemp("pre"), "pre_norm")


@pytest.fixture(scope="module")
def post(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A store with post_norm."""
    return exportable_store(tmp_path_factory.mktemp("post"), "post_norm")
