"""`hsx serve`: becomes the server, after checking its arguments and writing the epoch record.

The user's own arguments stand after `--` and are passed on. What would make capture wrong or incomplete is refused here, by
the name of the argument to change, before a large model is loaded for half an hour; the plugin and the boot gate check the
same again from the inside. `exec` keeps the process id, so the record written before it names the server.

Runs in the server's environment, where hsx is installed without its dependencies: standard library, msgspec, hsx.core,
hsx.config, hsx.config_load, hsx.errors, hsx.engines.process, hsx.capture.targets and hsx.capture.versions only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from hsx import __version__
from hsx.capture.targets import missing_in_source
from hsx.capture.versions import refusal, warning
from hsx.config_load import parse_size
from hsx.core.dump import PART_SUFFIX
from hsx.core.epoch import RECORD_NAME, RECORD_VARIABLE, EpochRecord, to_json
from hsx.engines.process import boot_id
from hsx.engines.process import start_ticks as start_ticks
from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hsx.config import Config

PLUGIN_GROUP: Final = "sglang.srt.plugins"
PLUGIN_NAME: Final = "hsx"
NO_FUSION: Final = "--enforce-disable-flashinfer-allreduce-fusion"
"""SGLang turns it on by itself for many models; see `hsx.capture.fusion`."""
KEEP_ALIVE_S: Final = "600"
"""How long SGLang keeps an idle connection; hsx itself closes its own after a second."""

_REFUSED: Final[tuple[tuple[str, str], ...]] = (
    ("--speculative-", "a draft model's forwards cannot be told from prefills"),
    ("--enable-return-hidden-states", "hsx takes the hidden states itself"),
    ("--return-hidden-states-mode", "hsx takes the hidden states itself"),
    ("--enable-return-aux-hidden-states", "it sets the captured layers, as hsx does"),
    ("--return-aux-hidden-state-layer-ids", "it sets the captured layers, as hsx does"),
    ("--enable-pdmux", "a prefill split over several forwards is not captured"),
    ("--dllm-algorithm", "a diffusion model has no prefill in one direction"),
    ("--is-embedding", "an embedding model has no logits processor, where states are taken"),
    ("--enable-prefill-cp", "each rank would hold a part of the prompt only"),
    ("--enable-hierarchical-cache", "a cached prefix is not computed, so it has no states"),
    ("--enable-hicache", "a cached prefix is not computed, so it has no states"),
    ("--enable-lmcache", "a cached prefix is not computed, so it has no states"),
    ("--enable-flexkv", "a cached prefix is not computed, so it has no states"),
    ("--enable-flashinfer-allreduce-fusion", "layers may be handed out before the ranks' parts are added up"),
    ("--flashinfer-allreduce-fusion-backend", "layers may be handed out before the ranks' parts are added up"),
    ("--enable-aiter-allreduce-fusion", "layers may be handed out before the ranks' parts are added up"),
    ("--allow-auto-truncate", "it cuts long prompts silently"),
    ("--encoder-only", "there is no language model to capture"),
    ("--config", "its arguments would escape this check: give them here"),
)
"""Arguments (or their beginnings, where they end in '-') that make capture wrong, and why."""

_MUST_BE: Final[tuple[tuple[tuple[str, ...], str, str], ...]] = (
    (
        ("--pp-size", "--pipeline-parallel-size"),
        "1",
        "only the last stage's layers would be captured",
    ),
    (
        ("--attn-cp-size", "--attention-context-parallel-size"),
        "1",
        "each rank would hold a part of the prompt only",
    ),
    (("--disaggregation-mode",), "null", "prefill and decode would run in different servers"),
)


_DATA_PARALLEL: Final = (("--dp-size", "--data-parallel-size"), ("--attn-dp-size", "--attention-data-parallel-size"))


@dataclass(frozen=True, slots=True)
class Environment:
    """What is found in the server's environment.

    Attributes:
        engine_version: version of the package `sglang`; "" where it is not installed.
        plugin: whether hsx's entry point is there for SGLang to find.
        variables: the process's environment variables.
        missing: what the plugin uses of SGLang and its source does not have, in sentences that name the hook.
    """

    engine_version: str
    plugin: bool
    variables: Mapping[str, str]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """What is about to be executed.

    Attributes:
        command: the interpreter and its arguments.
        variables: environment variables to set; the record's own path is added when it is written.
        host: address that the server binds.
        port: its HTTP port.
        model: model path as given to it.
        revision: model revision, or "".
        engine_version: version of SGLang, or of hsx for the reference engine.
    """

    command: tuple[str, ...]
    variables: dict[str, str]
    host: str
    port: int
    model: str
    revision: str
    engine_version: str


def plan_launch(config: Config, args: Sequence[str], found: Environment) -> Launch:
    """Checks the server's arguments and completes them from the job file.

    Model path, revision, host and port come from the job file where `args` has none; `NO_FUSION` is added.

    Raises:
        RunError: kind `serve_refused`; one line for each argument that is to be changed.
    """
    given = _options(args)
    problems = _model_problems(config, given)
    reference = config.engine.kind == "reference"
    if not reference:
        problems += _environment_problems(found) + _capture_problems(given) + _node_problems(given)
    port_text = _last(given, ("--port",)) or str(config.engine.port)
    if not port_text.isdecimal() or not 1 <= int(port_text) <= 65535:
        problems.append(f"--port is {port_text!r}; expected 1 to 65535")
    problems += _address_problems(config, given)
    if problems:
        raise RunError("serve_refused", "the server cannot be started for capture:\n" + "\n".join(f"  {p}" for p in problems))
    model = _last(given, _MODEL) or config.model.path
    host = _last(given, ("--host",)) or config.engine.host
    revision = _last(given, ("--revision",)) or config.model.revision
    added: list[str] = []
    for names, value in ((_MODEL, model), (("--revision",), revision), (("--host",), host), (("--port",), port_text)):
        if value and _last(given, names) is None:
            added += [names[0], value]
    if not reference and NO_FUSION not in {name for name, _ in given}:
        added.append(NO_FUSION)
    module = "hsx.testing.reference_engine" if reference else "sglang.launch_server"
    return Launch(
        command=(sys.executable, "-m", module, *args, *added),
        variables={} if reference else _sglang_variables(found.variables),
        host=host,
        port=int(port_text),
        model=model,
        revision=revision,
        engine_version=__version__ if reference else found.engine_version,
    )


def serve(config: Config, args: list[str], epoch: str | None = None) -> NoReturn:
    """Makes the epoch's folder and record, then becomes the server. Returns only by raising.

    Args:
        config: the job file.
        args: the server's arguments, those after `--`.
        epoch: uuid of the new epoch; drawn where None.

    Raises:
        RunError: `serve_refused` where an argument makes capture wrong or the epoch exists already; `staging_failed` where
            the dump directory cannot be written.
    """
    found = look_around()
    launch = plan_launch(config, args, found)
    if config.engine.kind == "sglang" and (advice := warning(found.engine_version)):
        sys.stderr.write(f"hsx serve: {advice}\n")
    name = str(uuid.uuid4()) if epoch is None else epoch
    record = write_record(config, launch, name)
    os.environ.update(launch.variables)
    os.environ[RECORD_VARIABLE] = str(record)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(launch.command[0], launch.command)  # noqa: S606 - the server replaces this process: no shell is involved


def write_record(config: Config, launch: Launch, epoch: str) -> Path:
    """Makes `<dump_dir>/<epoch>/` (mode 0700) and publishes `server.json` in it for this process. Returns its path.

    Raises RunError `serve_refused` for an epoch that is no uuid or exists already, `staging_failed` for any failure to write.
    """
    try:
        valid = str(uuid.UUID(epoch)) == epoch
    except ValueError:
        valid = False
    if not valid:
        raise RunError("serve_refused", f"--epoch is {epoch!r}; expected a uuid in its 36-character form")
    folder = Path(config.staging.dump_dir).resolve() / epoch
    record = EpochRecord(
        epoch=epoch,
        boot_id=boot_id(),
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()) or 0,
        invocation_id=os.environ.get("INVOCATION_ID", ""),
        command=launch.command,
        model=launch.model,
        revision=launch.revision,
        layers=tuple(config.capture.layers),
        final=config.capture.final,
        engine=config.engine.kind,
        engine_version=launch.engine_version,
        plugin_version=__version__,
        host=launch.host,
        port=launch.port,
        staging_bytes=parse_size(config.capture.staging_bytes),
        when_full=config.capture.when_full,
        convert=config.capture.convert,
    )
    if folder.exists():
        raise RunError("serve_refused", f"epoch {epoch} exists already in {folder.parent}; epochs are never reused")
    path = folder / RECORD_NAME
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        part = folder / (RECORD_NAME + PART_SUFFIX)
        part.write_text(to_json(record), encoding="utf-8")
        part.rename(path)
    except OSError as error:
        raise RunError("staging_failed", f"epoch folder {folder} cannot be written: {error.strerror}") from error
    return path


def look_around() -> Environment:
    """The environment of this process, as `plan_launch` wants it."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    plugin = any(importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME))
    # Found without being imported, which would take half a minute.
    spec = importlib.util.find_spec("sglang")
    missing = missing_in_source(Path(spec.origin).parent) if version and spec is not None and spec.origin else []
    return Environment(version, plugin, os.environ, tuple(missing))


_MODEL: Final = ("--model-path", "--model")


def _options(args: Sequence[str]) -> list[tuple[str, str | None]]:
    """Pairs of option and value; a value is whatever follows the option and is no option itself."""
    found: list[tuple[str, str | None]] = []
    for position, argument in enumerate(args):
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            following = args[position + 1] if position + 1 < len(args) else "--"
            found.append((name, value if equals else None if following.startswith("--") else following))
    return found


def _last(given: list[tuple[str, str | None]], names: Sequence[str]) -> str | None:
    """The value that counts: the last one."""
    return next((value for name, value in reversed(given) if name in names), None)


def _model_problems(config: Config, given: list[tuple[str, str | None]]) -> list[str]:
    problems = []
    model = _last(given, _MODEL)
    if model is not None and model != config.model.path and Path(model).resolve() != Path(config.model.path).resolve():
        problems.append(f"--model-path is {model!r}; expected {config.model.path!r}, the job's model.path")
    revision = _last(given, ("--revision",))
    if revision is not None and revision != config.model.revision:
        problems.append(f"--revision is {revision!r}; expected {config.model.revision!r}, the job's model.revision")
    return problems


def _address_problems(config: Config, given: list[tuple[str, str | None]]) -> list[str]:
    engine, problems = config.engine, []
    port = _last(given, ("--port",))
    if port is not None and port.isdecimal() and 1 <= int(port) <= 65535 and int(port) != engine.port:
        problems.append(f"--port is {port}, engine.port of the job file is {engine.port}; hsx would wait for the other one")
    host = _last(given, ("--host",))
    # A server on all addresses answers on engine.host, too.
    everywhere = "::" if ":" in engine.host else "0.0.0.0"  # noqa: S104 - compared, not bound
    if host is not None and host not in (engine.host, everywhere):
        problems.append(f"--host is {host}, engine.host of the job file is {engine.host}; hsx would wait for the other one")
    return problems


def _environment_problems(found: Environment) -> list[str]:
    if not found.engine_version:
        return [f"sglang is not installed in {sys.prefix}; run hsx serve with the Python of the server's environment"]
    problems = [reason] if (reason := refusal(found.engine_version)) else []
    problems += [f"sglang {found.engine_version} is not as hsx knows it: {missing}" for missing in found.missing if not reason]
    if not found.plugin:
        problems.append(f"the entry point {PLUGIN_NAME} of {PLUGIN_GROUP} is missing; install hsx into {sys.prefix}")
    return problems


def _capture_problems(given: list[tuple[str, str | None]]) -> list[str]:
    names = {name for name, _ in given}
    problems = []
    if "--disable-radix-cache" not in names:
        problems.append("--disable-radix-cache is missing; a cached prefix is not computed, so it has no states")
    for refused, why in _REFUSED:
        problems += [
            f"{name} is given; remove it: {why}"
            for name in sorted(names)
            if name == refused or (refused.endswith("-") and name.startswith(refused))
        ]
    for aliases, expected, why in _MUST_BE:
        value = _last(given, aliases)
        if value is not None and value != expected:
            problems.append(f"{aliases[0]} is {value}; expected {expected}: {why}")
    # argparse takes any unambiguous beginning of a name, which would slip past the tables above.
    watched = [refused for refused, _ in _REFUSED] + [alias for aliases, _, _ in _MUST_BE for alias in aliases]
    exact = {*watched, *_MODEL, "--disable-radix-cache"}
    problems += [
        f"{name} is short for {full}; write names in full"
        for name in sorted(names - exact)
        for full in watched
        if len(name) > len("--") and full.startswith(name)
    ]
    return problems


def _node_problems(given: list[tuple[str, str | None]]) -> list[str]:
    """Over nodes there may be tensor parallelism alone: its only writer is on the first node, where hsx is."""
    nodes = _last(given, ("--nnodes",)) or "1"
    if nodes == "1":
        return []
    return [
        f"{names[0]} is {value} and --nnodes {nodes}; expected 1: the ranks of other nodes would write their dumps there, "
        "where hsx does not see them; start one server and one job on each node"
        for names in _DATA_PARALLEL
        if (value := _last(given, names) or "1") != "1"
    ]


def _sglang_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """What SGLang needs: cheap health checks, patience with idle connections, and our plugin on the list where there is one."""
    found = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    # A server that stood still for its default of 5 s closes a connection on which a request has come meanwhile: that is lost.
    found["SGLANG_TIMEOUT_KEEP_ALIVE"] = variables.get("SGLANG_TIMEOUT_KEEP_ALIVE", KEEP_ALIVE_S)
    listed = [name.strip() for name in variables.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if listed and PLUGIN_NAME not in listed:
        found["SGLANG_PLUGINS"] = ",".join([*listed, PLUGIN_NAME])
    return found
