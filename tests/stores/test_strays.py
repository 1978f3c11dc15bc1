"""A shard that a killed writer left on one root goes once its sample is committed on another; nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.core.layout import StoreLayout
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.errors import RunError
from hsx.stores.attach import attach_roots
from hsx.stores.draining import begin_draining, is_draining
from hsx.stores.group import create_store
from hsx.stores.root import ShardRoot, discard_strays
from hsx.stores.view import visible
from hsx.testing.stores import payload, random_states

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def roots(tmp_path: Path) -> list[ShardRoot]:
    """Two roots; samples 0, 1 and 2 lie on both."""
    places = {name: tmp_path / name for name in ("a", "b")}
    for place in places.values():
        place.mkdir()
    info = create_store(tmp_path / "store", StoreLayout(4, 10, 2, 8), CaptureSpec((1,), "post_norm"), {})
    _, roots = attach_roots(info, places)
    for root in roots:
        for index in range(3):
            root.write(payload(Marker("0a1b2c3d", index, 1, 5), random_states(np.random.default_rng(index), 5, 2, 8)))
    return roots


def test_only_copies_of_samples_committed_elsewhere_go(roots: list[ShardRoot]) -> None:
    assert discard_strays(roots, [(0, "a"), (1, "b"), (3, "a")], 4) == 2
    assert visible(roots[0].folder).tolist() == [0, 2]
    assert visible(roots[1].folder).tolist() == [1, 2]


def test_a_copy_stays_while_the_root_of_the_committed_one_is_not_attached(roots: list[ShardRoot]) -> None:
    assert discard_strays(roots[:1], [(0, "b")], 4) == 0
    assert visible(roots[0].folder).tolist() == [0, 1, 2]


def test_the_only_copy_stays_where_the_committed_one_is_missing(roots: list[ShardRoot]) -> None:
    roots[0].discard(0)
    assert discard_strays(roots, [(0, "a"), (1, "a")], 4) == 1
    assert visible(roots[1].folder).tolist() == [0, 2], "a ledger of before a move was put back: 0 lies on b alone"


def test_a_slip_in_the_job_file_ends_no_draining(tmp_path: Path) -> None:
    place = tmp_path / "a"
    place.mkdir()
    info = create_store(tmp_path / "store", StoreLayout(4, 10, 2, 8), CaptureSpec((1,), "post_norm"), {})
    info, (root,) = attach_roots(info, {"a": place})
    begin_draining(root.folder, "a")
    with pytest.raises(RunError) as caught:
        attach_roots(info, {"a": place, "b": place})
    assert caught.value.kind == "root_unusable"
    assert is_draining(root.folder)


def test_shards_of_revoked_samples_go_on_every_root(roots: list[ShardRoot]) -> None:
    assert discard_strays(roots, [(0, "a")], 4, revoked=[2, 3]) == 3
    assert visible(roots[0].folder).tolist() == [0, 1]
    assert visible(roots[1].folder).tolist() == [1]


def test_discarding_what_is_not_there_is_fine(roots: list[ShardRoot]) -> None:
    roots[0].discard(3)
    roots[0].discard(0)
    assert visible(roots[0].folder).tolist() == [1, 2]
