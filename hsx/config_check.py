"""Cross-checks of a job file: what is wrong between its settings, with the machine and with the model.

Nothing is created or changed. An error means that a run would fail or store something else than was meant; a warning, that
it would be slow, fragile or surprising.
"""

from __future__ import annotations

import ipaddress
import re
import resource
import shutil
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from hsx.capture.versions import OLDEST
from hsx.core.amounts import in_words, in_words_and_bytes
from hsx.core.dump import ALIGNMENT, ID_BYTES
from hsx.core.layout import PAGE, round_up
from hsx.core.spec import bytes_per_token
from hsx.datasets import SERVER_MARGIN, longest_allowed
from hsx.datasets.fields import Columns
from hsx.datasets.sources import find_files
from hsx.disks import MEMORY_KINDS, NETWORK_KINDS, Disks, Place
from hsx.errors import RunError
from hsx.serve import Environment, plan_launch
from hsx.status.token import read_token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hsx.config_load import LoadedConfig
    from hsx.core.spec import ModelShape

_UNIT: Final = re.compile(r"[A-Za-z0-9:_.@-]+\.service")
FILES_BESIDE_REQUESTS: Final = 100
"""Files that a run has open besides one connection a request: ledger, dumps, roots, shards, the token index."""

Level = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found.

    Attributes:
        level: `error` or `warning`.
        key: the key of the job file to change.
        message: what was found, and what was expected.
    """

    level: Level
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.key}: {self.message}"


def check(
    loaded: LoadedConfig,
    shape: ModelShape | None,
    longest: int | None,
    disks: Disks | None = None,
    open_files: int | None = None,
) -> list[Finding]:
    """All findings, errors first. That the model cannot be read is not among them: `read_model_shape` says why.

    Args:
        loaded: the job file.
        shape: the model's, where its config could be read.
        longest: tokens of the longest sample, where the dataset has been indexed.
        disks: the mounted file systems; default: this machine's.
        open_files: how many files a process may have open; default: this one's hard RLIMIT_NOFILE, up to which a
            run raises its own.
    """
    places = _Places(loaded, disks or Disks())
    findings = [
        *_capture(loaded, shape),
        *_storage(loaded, shape),
        *_lengths(loaded, shape),
        *_staging(loaded, shape, longest, places),
        *_roots(loaded, places),
        *_overlaps(loaded),
        *_inputs(loaded),
        *_writable(places, go_on=loaded.config.storage.on_missing_root == "go_on"),
        *_state_dir(loaded, places),
        *_engine(loaded),
        *_status(loaded),
        *_watchdog(loaded),
        *_open_files(loaded, resource.getrlimit(resource.RLIMIT_NOFILE)[1] if open_files is None else open_files),
    ]
    return sorted(findings, key=lambda finding: finding.level != "error")


class _Places:
    """Looks at each folder of the job once; one that cannot be looked at is left out, `_inputs` and `_writable` tell."""

    def __init__(self, loaded: LoadedConfig, disks: Disks) -> None:
        self.failures: list[Finding] = []
        self.by_key: dict[str, tuple[Path, Place]] = {}
        wanted = [("job.store", loaded.store), ("job.state_dir", loaded.state_dir), ("staging.dump_dir", loaded.dump_dir)]
        wanted += [(f"roots[{number}].path", root.path) for number, root in enumerate(loaded.roots)]
        self.roots = len(loaded.roots)
        for key, path in wanted:
            try:
                self.by_key[key] = (path, disks.place(path))
            except OSError as error:
                self.failures.append(Finding("error", key, f"{path} cannot be looked at: {error.strerror or error}"))


def _capture(loaded: LoadedConfig, shape: ModelShape | None) -> Iterator[Finding]:
    spec = loaded.spec
    # Without the model, only what holds for any: a model deeper than the highest layer asked for.
    layers = shape.layers if shape else max((*spec.layers, 1)) + 1
    for problem in spec.problems(layers):
        key, _, message = problem.partition(" ")  # each sentence begins with its key
        yield Finding("error", key, message)


def _storage(loaded: LoadedConfig, shape: ModelShape | None) -> Iterator[Finding]:
    storage = loaded.config.storage
    if storage.context and storage.tokens == "all":
        yield Finding(
            "error", "storage.context", f"is {storage.context}, and storage.tokens is 'all'; expected 0, or tokens = 'loss'"
        )
    if storage.dtype != "bf16" and shape is not None and shape.hidden_size % 2:
        yield Finding(
            "error", "storage.dtype", f"is {storage.dtype!r}; expected 'bf16' for a model of the odd width {shape.hidden_size}"
        )


def _lengths(loaded: LoadedConfig, shape: ModelShape | None) -> Iterator[Finding]:
    allowed = loaded.config.dataset.max_tokens
    if allowed is None or shape is None:
        return
    room = shape.context_length - SERVER_MARGIN
    if allowed > shape.context_length:
        yield Finding(
            "error",
            "dataset.max_tokens",
            f"is {allowed}; expected at most {room} for a context of {shape.context_length}",
        )
    elif allowed > room:
        yield Finding(
            "warning",
            "dataset.max_tokens",
            f"is {allowed}; the server keeps up to {SERVER_MARGIN} of the model's {shape.context_length} positions for itself "
            f"and may refuse samples longer than {room}",
        )


def _staging(loaded: LoadedConfig, shape: ModelShape | None, longest: int | None, places: _Places) -> Iterator[Finding]:
    budget, text = loaded.staging_bytes, loaded.config.staging.max_bytes
    tokens = longest
    if tokens is None:
        tokens = longest_allowed(loaded.config, shape) if shape is not None else loaded.config.dataset.max_tokens
    size = None
    if tokens is not None and shape is not None:
        size = ALIGNMENT + round_up(tokens * (bytes_per_token(loaded.spec, shape.hidden_size) + ID_BYTES), PAGE)
        if size > budget:
            yield Finding(
                "error",
                "staging.max_bytes",
                f"is {text} ({in_words(budget)}); expected at least {in_words_and_bytes(size)}, the dump of a sample of "
                f"{tokens} tokens",
            )
    if tokens is not None and loaded.config.pipeline.max_tokens_in_flight < tokens:
        yield Finding(
            "warning",
            "pipeline.max_tokens_in_flight",
            f"is {loaded.config.pipeline.max_tokens_in_flight}; a sample of {tokens} tokens will run alone",
        )
    if "staging.dump_dir" in places.by_key:
        path, place = places.by_key["staging.dump_dir"]
        lies = "is on" if place.existing == path else "does not exist and would be made on"
        if place.kind and place.kind not in MEMORY_KINDS:
            kind = place.kind if place.existing == path else f"{place.kind}, in {place.existing}"
            yield Finding(
                "warning",
                "staging.dump_dir",
                f"{path} {lies} {kind}; expected a tmpfs: every dump would go to a disk twice",
            )
        if size is not None and place.total < size:
            yield Finding(
                "error",
                "staging.dump_dir",
                f"{path} {lies} a file system of {in_words(place.total)}; expected at least "
                f"{in_words_and_bytes(size)}, the dump of a sample of {tokens} tokens",
            )
        elif place.total < budget:
            yield Finding(
                "warning",
                "staging.max_bytes",
                f"is {text} ({in_words(budget)}); the file system of staging.dump_dir has {in_words(place.total)}",
            )


def _roots(loaded: LoadedConfig, places: _Places) -> Iterator[Finding]:
    names = [root.name for root in loaded.roots]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Finding("error", "roots", f"{names.count(name)} roots are named {name!r}; expected names to differ")
    devices: dict[int, list[str]] = {}
    for number, root in enumerate(loaded.roots):
        _, place = places.by_key.get(f"roots[{number}].path", (None, None))
        if place is None:
            continue
        devices.setdefault(place.device, []).append(f"{root.name} ({root.path})")
        if root.reserve >= place.total:
            yield Finding(
                "error",
                f"roots[{number}].reserve",
                f"is {in_words(root.reserve)}; the whole file system has {in_words(place.total)}",
            )
        if place.kind in MEMORY_KINDS:
            yield Finding("warning", f"roots[{number}].path", f"{root.path} is on {place.kind}: it is lost at a reboot")
    for shared in devices.values():
        if len(shared) > 1:
            yield Finding(
                "warning",
                "roots",
                f"{', '.join(shared)} are on one device; expected one root per disk: they share its speed and its space",
            )


def _overlaps(loaded: LoadedConfig) -> Iterator[Finding]:
    named = [("job.store", loaded.store), ("staging.dump_dir", loaded.dump_dir)]
    named += [(f"roots[{number}].path", root.path) for number, root in enumerate(loaded.roots)]
    for (key, path), (other_key, other) in combinations(named, 2):
        # Links are followed here: two names of one folder are one folder.
        a, b = path.resolve(), other.resolve()
        if a == b:
            yield Finding("error", key, f"{path} is also {other_key}; expected folders of their own")
        elif a.is_relative_to(b) or b.is_relative_to(a):
            inner, outer = ((key, path), other_key) if a.is_relative_to(b) else ((other_key, other), key)
            yield Finding("error", inner[0], f"{inner[1]} is inside {outer}; expected folders beside each other")
    if loaded.state_dir.resolve().is_relative_to(loaded.store.resolve()):
        yield Finding("error", "job.state_dir", f"{loaded.state_dir} is inside job.store; expected it outside")


def _inputs(loaded: LoadedConfig) -> Iterator[Finding]:
    dataset = loaded.config.dataset
    if not loaded.dataset.exists() and not any(letter in str(loaded.dataset) for letter in "*?["):
        yield Finding("error", "dataset.path", f"{loaded.dataset} does not exist")
    else:
        try:
            find_files(loaded.dataset)
        except RunError as error:
            yield Finding("error", "dataset.path", error.message)
    names = Columns.__slots__
    for name, field in dataset.columns.items():
        if name not in names:
            yield Finding("error", "dataset.columns", f"has the key {name!r}; expected one of {', '.join(names)}")
        elif not field:
            yield Finding("error", "dataset.columns", f"{name} is ''; expected the name of a field")
    if dataset.text_markers and (len(dataset.text_markers) != 2 or not all(dataset.text_markers)):
        yield Finding(
            "error", "dataset.text_markers", f"is {dataset.text_markers}; expected two texts: before and after what counts"
        )
    if loaded.chat_template is not None and not loaded.chat_template.is_file():
        yield Finding("error", "dataset.chat_template", f"{loaded.chat_template} is not a file")


def _writable(places: _Places, *, go_on: bool) -> Iterator[Finding]:
    """Folders that cannot be used; with `go_on` roots may be missing, as long as one is there."""
    found = list(places.failures)
    for key, (path, place) in places.by_key.items():
        if place.obstacle:
            found.append(Finding("error", key, f"{path} cannot be written: {place.obstacle}"))
        elif key.startswith("roots[") and place.existing != path:
            # hsx never makes a root: on an unmounted disk's mount point it would fill the system disk instead.
            found.append(Finding("error", key, f"{path} does not exist; mount its disk, or make the folder on that disk"))
    missing = {finding.key for finding in found if finding.key.startswith("roots[")}
    if go_on and len(missing) < places.roots:
        found = [replace(finding, level="warning") if finding.key in missing else finding for finding in found]
    yield from found


def _state_dir(loaded: LoadedConfig, places: _Places) -> Iterator[Finding]:
    _, place = places.by_key.get("job.state_dir", (None, None))
    if place is None:
        return
    if place.kind in NETWORK_KINDS:
        yield Finding(
            "warning",
            "job.state_dir",
            f"{loaded.state_dir} is on {place.kind}; expected a local file system: the ledger's locks may not hold there",
        )
    elif place.kind in MEMORY_KINDS:
        yield Finding(
            "warning", "job.state_dir", f"{loaded.state_dir} is on {place.kind}: a reboot loses the ledger, and with it the job"
        )


def _engine(loaded: LoadedConfig) -> Iterator[Finding]:
    engine = loaded.config.engine
    if engine.ownership == "external":
        given = [key for key in ("args", "env", "python") if getattr(engine, key)]
        for key in given:
            yield Finding("warning", f"engine.{key}", "is not used: engine.ownership is 'external', so hsx starts no server")
        return
    if engine.unit and engine.ownership != "systemd":
        yield Finding("warning", "engine.unit", f"is not used: engine.ownership is {engine.ownership!r}")
    if engine.ownership == "systemd":
        yield from _unit(loaded)
    if engine.python:
        found = shutil.which(engine.python)
        if found is None:
            missing = "is not executable" if Path(engine.python).exists() else "does not exist"
            yield Finding("error", "engine.python", f"{engine.python} {missing}; expected the server environment's Python")
    if engine.kind == "sglang":
        yield from _server_args(loaded)


def _unit(loaded: LoadedConfig) -> Iterator[Finding]:
    if shutil.which("systemctl") is None:
        yield Finding("error", "engine.ownership", "is 'systemd'; expected the program systemctl, which is not installed")
    if _UNIT.fullmatch(loaded.server_unit) is None:
        yield Finding(
            "error",
            "engine.unit",
            f"is {loaded.server_unit!r}; expected the name of a service unit: letters, digits, '@', '.', '_', ':' and '-', and "
            "'.service' at its end (the default is made from the job file's name)",
        )


def _server_args(loaded: LoadedConfig) -> Iterator[Finding]:
    """What `hsx serve` would refuse in `engine.args`; what it asks of the server's environment is left to it."""
    fit = Environment(engine_version=".".join(map(str, OLDEST)), plugin=True, variables={})
    try:
        plan_launch(loaded.config, loaded.config.engine.args, fit)
    except RunError as error:
        for line in error.message.splitlines()[1:]:
            yield Finding("error", "engine.args", line.strip())


def _status(loaded: LoadedConfig) -> Iterator[Finding]:
    status, engine = loaded.config.status, loaded.config.engine
    if not status.enabled:
        return
    if not _is_loopback(status.host) and not status.token_file:
        yield Finding("warning", "status.host", f"is {status.host}, not loopback: whoever reaches it can read the status")
    if status.token_file:
        try:
            read_token(status.token_file, {})
        except RunError as error:
            yield Finding("error", "status.token_file", error.message.removeprefix("status.token_file: "))
    if status.port == engine.port and status.host == engine.host:
        yield Finding("error", "status.port", f"is {status.port}, as is engine.port on the same host; expected another one")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _watchdog(loaded: LoadedConfig) -> Iterator[Finding]:
    watchdog = loaded.config.watchdog
    if watchdog.backoff_first_s > watchdog.backoff_longest_s:
        yield Finding(
            "error",
            "watchdog.backoff_first_s",
            f"is {watchdog.backoff_first_s}; expected at most watchdog.backoff_longest_s, {watchdog.backoff_longest_s}",
        )


def _open_files(loaded: LoadedConfig, limit: int) -> Iterator[Finding]:
    requests = loaded.config.pipeline.concurrency
    if limit != resource.RLIM_INFINITY and limit < requests + FILES_BESIDE_REQUESTS:
        yield Finding(
            # Below one file a request, the run cannot but fail.
            "error" if limit <= requests else "warning",
            "pipeline.concurrency",
            f"is {requests}; this process may open {limit} files (ulimit -Hn, LimitNOFILE=), and a run needs about "
            f"{requests + FILES_BESIDE_REQUESTS}",
        )
