"""Text of what `hsx install-units` writes for a job: unit files, polkit rule, users, folders. Nothing is written here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hsx.config_load import LoadedConfig

UNITS: Final = Path(__file__).with_name("units")
TEMPLATES: Final = ("hsx@.service", "hsx-sglang@.service", "hsx-failed@.service")
"""Units as they are shipped, one instance a job; drop-ins say what depends on the job."""
DROP_IN: Final = "50-job.conf"
SYSTEMD: Final = Path("/etc/systemd/system")
POLKIT: Final = Path("/etc/polkit-1/rules.d")
_HEAD: Final = "# Made by `hsx install-units`, which writes it anew; what you add belongs in a file of your own beside it.\n"
_INSTANCE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.-]*")
_HIDDEN: Final = tuple(map(Path, ("/home", "/root", "/run/user", "/tmp", "/var/tmp")))  # noqa: S108 - where units see nothing
_SPARE_INODES: Final = 65536
_SERVER: Final = "hsx-sglang@{}.service"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What units have to be told of the host.

    Attributes:
        python: the interpreter that runs hsx, absolute.
        user: the user, and the group, of both units.
        huge_pages: whether the kernel has huge pages for a tmpfs.
    """

    python: str
    user: str = "hsx"
    huge_pages: bool = True


def instance(loaded: LoadedConfig) -> str:
    """The instance of the units: the job file's name without its ending."""
    return loaded.path.stem


def problems(loaded: LoadedConfig, host: Host) -> list[str]:
    """What keeps this job from running in the units; one sentence each."""
    found = []
    if _INSTANCE.fullmatch(instance(loaded)) is None:
        found.append(
            f"job file {loaded.path.name}: expected a name of letters, digits, ':', '_', '.' and '-': units are called after it"
        )
    own = loaded.config.engine.unit
    if loaded.config.engine.ownership == "systemd" and own not in ("", _SERVER.format(instance(loaded))):
        found.append(f"engine.unit = {own!r}: expected none, or {_SERVER.format(instance(loaded))!r}, the unit that is written")
    places = {
        "the job file": loaded.path,
        "hsx's interpreter": Path(host.python),
        "what hsx's interpreter is a link to": Path(host.python).resolve(),
        "job.store": loaded.store,
        "job.state_dir": loaded.state_dir,
        "model.path": loaded.model,
        "dataset.path": loaded.dataset,
        "staging.dump_dir": loaded.dump_dir,
        **{f"roots.{root.name}": root.path for root in loaded.roots},
    }
    for name, path in places.items():
        found += [
            f"{name} is {path}; expected a place outside of {folder}, which the units do not see"
            for folder in _HIDDEN
            if path.is_relative_to(folder)
        ]
        if re.search(r"[\s:\\]", str(path)):
            found.append(f"{name} is {str(path)!r}; expected a path without spaces, colons and backslashes")
    return found


def files(loaded: LoadedConfig, host: Host) -> dict[Path, str]:
    """Every file to be written, by its place; all texts end in a newline."""
    name, ownership = instance(loaded), loaded.config.engine.ownership
    written = {
        Path("/etc/sysusers.d/hsx.conf"): f'{_HEAD}u {host.user} - "hsx, extraction of hidden states" /var/lib/hsx\n',
        Path(f"/etc/tmpfiles.d/hsx-{name}.conf"): _tmpfiles(loaded, host),
        SYSTEMD / f"{escape_path(loaded.dump_dir)}.mount": _mount(loaded, host),
        SYSTEMD / f"hsx@{name}.service.d" / DROP_IN: _hsx(loaded, host),
    }
    templates = [unit for unit in TEMPLATES if ownership != "spawn" or "sglang" not in unit]
    written |= {SYSTEMD / unit: (UNITS / unit).read_text(encoding="utf-8") for unit in templates}
    if ownership != "spawn":
        written[SYSTEMD / f"{_SERVER.format(name)}.d" / DROP_IN] = _server(loaded, host)
    if ownership == "systemd":
        written[POLKIT / f"50-hsx-{name}.rules"] = _rule(loaded, host)
    return written


def next_steps(loaded: LoadedConfig) -> list[str]:
    """Commands that make it work, in their order."""
    return [
        "systemd-sysusers",
        f"systemd-tmpfiles --create /etc/tmpfiles.d/hsx-{instance(loaded)}.conf",
        "systemctl daemon-reload",
        f"systemctl enable hsx@{instance(loaded)}.service",
        f"systemctl start hsx@{instance(loaded)}.service",
    ]


def escape_path(path: Path) -> str:
    """A path as unit names spell it; what `systemd-escape --path` prints."""
    text = "/".join(path.parts[1:])
    if not text:
        return "-"
    plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:_."
    escaped = []
    for position, byte in enumerate(text.encode()):
        character = chr(byte)
        if character == "/":
            escaped.append("-")
        elif character in plain and not (position == 0 and character == "."):
            escaped.append(character)
        else:
            escaped.append(f"\\x{byte:02x}")
    return "".join(escaped)


def quote(words: Iterable[str]) -> str:
    """Words as one command line of a unit: systemd takes each as it is."""
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return text if re.fullmatch(r"[A-Za-z0-9_@%+=:,./-]+", text) else f'"{text}"'


def _environment(variables: Mapping[str, str]) -> str:
    # No $ here: systemd expands it in commands only.
    return "".join(f"Environment={_quoted(f'{name}={value}').replace('$$', '$')}\n" for name, value in variables.items())


def _paths(paths: Iterable[object]) -> str:
    return " ".join(str(path).replace("%", "%%") for path in dict.fromkeys(map(str, paths)))


def _hsx(loaded: LoadedConfig, host: Host) -> str:
    roots = [root.path for root in loaded.roots]
    needed = [loaded.dump_dir, *(roots if loaded.config.storage.on_missing_root == "refuse" else [])]
    # hsx says itself, in clear words, that a root is missing.
    writable = [loaded.store.parent, loaded.state_dir.parent, loaded.dump_dir, *(f"-{root}" for root in roots)]
    return (
        f"{_HEAD}[Unit]\n"
        "# Without its mounts a root would be an empty folder of the system disk.\n"
        f"RequiresMountsFor={_paths(needed)}\n"
        "\n[Service]\n"
        f"User={host.user}\nGroup={host.user}\n"
        "ExecStart=\n"
        f"ExecStart={quote([host.python, '-m', 'hsx', 'run', str(loaded.path)])}\n"
        f"ReadWritePaths={_paths(writable)}\n"
    )


def _server(loaded: LoadedConfig, host: Host) -> str:
    engine = loaded.config.engine
    command = [engine.python or host.python, "-m", "hsx", "serve", str(loaded.path), "--", *engine.args]
    return (
        f"{_HEAD}[Unit]\n"
        f"RequiresMountsFor={_paths([loaded.dump_dir])}\n"
        "\n[Service]\n"
        f"User={host.user}\nGroup={host.user}\n"
        f"{_environment(engine.env)}"
        "ExecStart=\n"
        f"ExecStart={quote(command)}\n"
        f"TimeoutStopSec={engine.stop_grace_s:g}s\n"
        f"ReadWritePaths={_paths([loaded.dump_dir])}\n"
    )


def _mount(loaded: LoadedConfig, host: Host) -> str:
    # Room for what is not counted as staging: canaries, and dumps of requests that were given up.
    size = (loaded.staging_bytes + max(loaded.staging_bytes // 8, 64 << 20)) >> 20
    inodes = _SPARE_INODES + 32 * loaded.config.pipeline.concurrency
    huge = "huge=within_size," if host.huge_pages else ""
    return (
        f"{_HEAD}[Unit]\n"
        f"Description=Dump directory of hsx, job {instance(loaded)}\n"
        "\n[Mount]\n"
        "What=tmpfs\n"
        f"Where={str(loaded.dump_dir).replace('%', '%%')}\n"
        "Type=tmpfs\n"
        f"# staging.max_bytes is {loaded.config.staging.max_bytes}; the rest is for what it does not count.\n"
        f"Options=size={size}M,nr_inodes={inodes},{huge}mode=0700,uid={host.user},gid={host.user},nosuid,nodev,noexec\n"
        "\n[Install]\n"
        "WantedBy=multi-user.target\n"
    )


def _tmpfiles(loaded: LoadedConfig, host: Host) -> str:
    folders = dict.fromkeys((loaded.store.parent, loaded.state_dir.parent))
    lines = "".join(f"d {folder} 0750 {host.user} {host.user} -\n" for folder in folders)
    return f"{_HEAD}# No root is made here: one that is not mounted must be missed.\n{lines}"


def _rule(loaded: LoadedConfig, host: Host) -> str:
    return f"""// Made by `hsx install-units`: {host.user} may start, stop and restart exactly its own server.
polkit.addRule(function(action, subject) {{
    if (action.id == "org.freedesktop.systemd1.manage-units" &&
        subject.user == "{host.user}" &&
        action.lookup("unit") == "{loaded.server_unit}" &&
        ["start", "stop", "restart", "reset-failed"].indexOf(action.lookup("verb")) >= 0) {{
        return polkit.Result.YES;
    }}
}});
"""
