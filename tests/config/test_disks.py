"""What lies under a path."""

from __future__ import annotations

from pathlib import Path

from hsx.disks import MEMORY_KINDS, Disks, Mount, parse_mounts

TABLE = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
23 22 0:5 / /mnt/with\040space rw - xfs /dev/sdb1 rw
24 22 0:6 / /mnt ro,nosuid master:1 - nfs4 host:/x rw
25 22 0:7 / /mnt/fresh rw - tmpfs tmpfs ro
26 22 0:8 / /mnt/fresh rw - ext4 /dev/sdc rw
nonsense
"""


def test_the_kernels_table_is_read() -> None:
    assert parse_mounts(TABLE) == [
        Mount(Path("/"), "ext4", False),
        Mount(Path("/mnt/with space"), "xfs", False),
        Mount(Path("/mnt"), "nfs4", True),
        Mount(Path("/mnt/fresh"), "tmpfs", True),
        Mount(Path("/mnt/fresh"), "ext4", False),
    ]


def test_the_nearest_mount_counts_and_of_stacked_ones_the_last() -> None:
    disks = Disks(TABLE)
    kinds = [disks.mount_of(Path(path)) for path in ("/home", "/mnt/with space/x", "/mnt/else", "/mnt/fresh/x", "/mntx")]
    assert [mount.kind if mount else "" for mount in kinds] == ["ext4", "xfs", "nfs4", "ext4", "ext4"]


def test_a_path_that_is_not_there_yet_is_judged_by_its_nearest_folder(tmp_path: Path) -> None:
    place = Disks().place(tmp_path / "not" / "yet")
    assert place.existing == tmp_path
    assert place.device == tmp_path.stat().st_dev
    assert place.obstacle == ""
    assert 0 < place.free <= place.total


def test_this_machines_memory_file_system_is_known() -> None:
    assert Disks().place(Path("/dev/shm/none")).kind in MEMORY_KINDS


def test_an_unknown_table_is_no_error(tmp_path: Path) -> None:
    assert Disks("").place(tmp_path).kind == ""
