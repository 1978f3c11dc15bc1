"""Who listens on a TCP port of this host, told from /proc: that a server lives does not mean that it is the one that answers.

The table of sockets names inodes; the file descriptors of a process tell which of them it has open.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hsx.engines.process import command_of, descendants, pids, start_ticks

if TYPE_CHECKING:
    from hsx.core.epoch import EpochRecord

_LISTENING: Final = "0A"
_SOCKET: Final = "socket:["


class Hold(Enum):
    """Whether a server holds the port that its record names."""

    HELD = "it listens there, and nobody else does"
    FREE = "nobody listens there"
    TAKEN = "somebody else listens there"
    UNKNOWN = "this user may not see who listens there"


@dataclass(frozen=True, slots=True)
class Finding:
    """How a port is held.

    Attributes:
        hold: see there.
        sentence: who holds it, or why that is not known; "" where there is nothing to say.
    """

    hold: Hold
    sentence: str = ""


def holds_port(record: EpochRecord) -> Finding:
    """Whether the server of a living record, or a process below it, is what listens on the record's host and port."""
    tree = [record.pid, *descendants(record.pid)]
    if not _same_network(record.pid):
        return Finding(Hold.UNKNOWN, f"process {record.pid} is in another network namespace: its port was not checked")
    listening = listeners(record.host, record.port)
    if not listening:
        return Finding(Hold.FREE)
    own, hidden = set[int](), list[int]()
    for pid in tree:
        found = _sockets(pid)
        if found is None:
            hidden.append(pid)
        else:
            own |= found
    strangers = listening - own
    if not strangers:
        return Finding(Hold.HELD)
    if hidden:
        return Finding(Hold.UNKNOWN, f"this user may not see the sockets of process {hidden[0]}: its port was not checked")
    return Finding(Hold.TAKEN, f"port {record.port} is held by {_holder(strangers)}")


def taken(host: str, port: int) -> str:
    """Who listens on `host` and `port`, for a message; "" where nobody does."""
    listening = listeners(host, port)
    return _holder(listening) if listening else ""


def listeners(host: str, port: int) -> set[int]:
    """Inodes of the sockets that listen where a connection to `host` and `port` may end, in this network namespace.

    A host that is a name stands for all addresses, and so does 0.0.0.0 or ::.
    """
    try:
        wanted: IPv4Address | IPv6Address | None = _plain(ip_address(host))
    except ValueError:
        wanted = None
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            address, _, number = fields[1].partition(":")
            if fields[3] == _LISTENING and int(number, 16) == port:
                bound = _plain(_address(address))
                if wanted is None or wanted.is_unspecified or bound.is_unspecified or bound == wanted:
                    found.add(int(fields[9]))
    return found


def _address(text: str) -> IPv4Address | IPv6Address:
    """The kernel prints each 32 bits of an address as one number of the host's byte order."""
    words = (int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8))
    return ip_address(b"".join(words))


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def _sockets(pid: int) -> set[int] | None:
    """Inodes of the sockets that a process has open; None where this user may not see them."""
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(entry.readlink())
            except FileNotFoundError:
                continue
            if target.startswith(_SOCKET):
                found.add(int(target[len(_SOCKET) : -1]))
    except OSError:
        # Gone, or a zombie: it holds nothing.
        return None if start_ticks(pid) is not None else set()
    return found


def _same_network(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink()
    except OSError:
        return True  # what cannot be seen is judged by the sockets


def _holder(inodes: set[int]) -> str:
    for pid in pids():
        if inodes & (_sockets(pid) or set()):
            return f"process {pid} ({command_of(pid)})"
    return "a process that this user may not see"
