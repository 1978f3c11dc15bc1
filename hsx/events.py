"""The catalogue of log events: what each says, its level and fields, and what to do when it comes. Also in docs/events.md.

Events are facts, named `noun.verb_past`. Their names, levels and fields are relied upon by log-based rules: new ones are added,
old ones keep their meaning. No event carries token ids, states, or anything that the job file keeps secret.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

Level = Literal["debug", "info", "warning", "error"]
Writer = Literal["hsx", "server"]

NOTHING: Final = "Nothing."


@dataclass(frozen=True, slots=True)
class Event:
    """One kind of log line.

    Attributes:
        name: dotted, past tense.
        level: the level it is written at.
        says: what has happened.
        todo: what a person should do about it.
        fields: what it carries besides `BOUND`, by name: what each field is.
        optional: names out of `fields` that may be absent.
        writer: `hsx`; or `server`, for the capture plugin's lines of text in the server's own log.
    """

    name: str
    level: Level
    says: str
    todo: str = NOTHING
    fields: dict[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    writer: Writer = "hsx"


BOUND: Final[dict[str, str]] = {
    "event": "the name",
    "level": "`debug`, `info`, `warning` or `error`",
    "timestamp": "UTC, ISO 8601",
    "run": "the 8 hex digits of the job's markers, once the job is open",
}
"""What every line of hsx carries."""

PER_SAMPLE: Final = "sample.committed"
"""The canonical line of one sample: an audit trail in JSON, noise on a terminal."""

PER_TWIN: Final = "sample.shared"
"""The same for a sample whose prompt is another one's."""

ONCE_A_SAMPLE: Final = frozenset((PER_SAMPLE, PER_TWIN))
"""What a million samples would drown the rest with."""

_MARKER: Final = "the attempt: `hsx1-<run>-<sample>-<attempt>-<tokens>`"
_EPOCH: Final = "the server's epoch"
_EVIDENCE: Final = "what was expected and what was found"
_REASON: Final = "an invariant's name or an error kind"
_COUNTS: Final = {
    "pending": "samples that are neither committed nor quarantined",
    "committed": "samples committed by earlier runs",
    "quarantined": "samples quarantined by earlier runs",
    "rejected": "rows of the dataset that were never samples",
    "tokens_total": "tokens of all samples",
    "tokens_committed": "tokens of committed samples",
    "bytes_committed": "bytes of committed shards",
    "shared": "committed samples whose prompt is another one's, and whose shard is a link to that one's",
    "tokens_shared": "tokens of these",
    "bytes_shared": "bytes of these, which are in no other count",
}

_ALL: Final = (
    Event(
        "job.began",
        "info",
        "The job is open; what earlier runs have done is counted.",
        fields={"name": "the job's", "run": "the 8 hex digits of its markers", "store": "path of the store", **_COUNTS},
    ),
    Event(
        "job.progressed",
        "info",
        "Where the run stands: every half a minute, where there is no terminal.",
        fields={"summary": "one line for people"},
    ),
    Event(
        "config.doubted",
        "warning",
        "The job file works, but a setting is doubtful.",
        "Read the message once; `hsx check` prints the same.",
        {"key": "key of the job file", "message": "what is doubtful about it"},
    ),
    Event(
        "dataset.indexing",
        "info",
        "The dataset is being read, which comes once for each dataset.",
        fields={"rows": "rows read so far", "tokens": "tokens of these"},
    ),
    Event("status.listening", "info", "The status endpoint is up.", fields={"url": "its address"}),
    Event(
        "status.failed",
        "warning",
        "The process that serves the status died; another one is started. The job goes on.",
        "If it comes again and again, look what kills it: the machine may be out of memory.",
        {"exit_status": "its exit status; below 0: minus the signal"},
    ),
    Event(
        "run.draining",
        "info",
        "A signal came: no new samples; what is in flight is finished and committed.",
        "Wait. A second signal ends the run at once; neither loses anything.",
        {"signal": "its name", "attempts": "attempts that are under way"},
    ),
    Event(
        "run.stuck",
        "error",
        "hsx itself does not get on: nothing changes, and it waits for nothing that it knows of.",
        "Under systemd its watchdog ends it and starts it again, with nothing lost. If it comes again, report it with the log.",
        {"message": _EVIDENCE},
    ),
    Event("run.recovered", "info", "hsx gets on again."),
    Event(
        "config.reloaded",
        "info",
        "The job file was read again, and what may change in a run took effect.",
        NOTHING,
        {"changed": "new values by key; empty where nothing differs"},
    ),
    Event(
        "config.refused",
        "warning",
        "The job file was read again, and some of it does not take effect.",
        "Keys that may not change in a run take effect at the next start of hsx, if at all; correct what is wrong, and reload.",
        {"keys": "the keys that were refused", "message": "why"},
    ),
    Event(
        "run.forced",
        "warning",
        "A second signal came: the run ends now.",
        "Run the job again: what was not committed is done again.",
        {"signal": "its name"},
    ),
    Event(
        "run.unvouched",
        "warning",
        "The run ends, and no canary stands behind the last samples of some epochs.",
        "Run the job again, with a server: it ends as soon as they are vouched for.",
        {"epochs": "epochs whose last samples are in doubt"},
    ),
    Event(
        PER_SAMPLE,
        "info",
        "One sample is durable: its canonical line. At most `log.samples_per_second` of them in the long run; after a pause "
        "ten seconds' worth at once.",
        fields={
            "index": "the sample's",
            "id": "the dataset's own id, where it is at hand",
            "marker": _MARKER,
            "epoch": _EPOCH,
            "sequence": "the dump's capture number in its epoch",
            "tokens": "prompt tokens",
            "bytes": "bytes of the shard file",
            "root": "where it lies",
            "attempt": "number of the attempt",
            "adopted": "whether the dump was asked for by an earlier hsx",
            "timings": "seconds by step",
            "unlogged": "samples committed since the last of these lines that got none, to keep the log small",
        },
        optional=frozenset({"id", "unlogged"}),
    ),
    Event(
        PER_TWIN,
        "info",
        "One sample is durable without a prefill of its own: its prompt is that of another, and its shard a link to that "
        "one's. Thinned out as `sample.committed` is, and together with it.",
        fields={
            "index": "the sample's",
            "id": "the dataset's own id, where it is at hand",
            "marker": "the attempt that was prefilled, and whose shard it is",
            "tokens": "prompt tokens",
            "bytes": "bytes of the shard file, which both share",
            "root": "where it lies",
            "unlogged": "samples committed since the last of these lines that got none, to keep the log small",
        },
        optional=frozenset({"id", "unlogged"}),
    ),
    Event(
        "root.lost",
        "error",
        "A root is out of service for the rest of this run; what is committed there stays committed.",
        "Look at the disk (`dmesg`), mend or mount it, then start hsx again; `hsx verify` says what is whole.",
        {"root": "its name", "kind": "error kind", "message": "what the disk answered"},
    ),
    Event(
        "root.silent",
        "error",
        "A root did not say in time how much room it has. It gets no new samples until it answers; the other roots go on.",
        "Look at the mount (`df` hangs too): a network disk whose server is away, or a device that is being reset. Once it "
        "answers it is used again by itself; what is being written there waits until then.",
        {"root": "its name", "message": "how long it was waited for"},
    ),
    Event(
        "root.answered",
        "info",
        "A root that was silent answers again, and takes samples.",
        fields={"root": "its name"},
    ),
    Event(
        "intake.paused",
        "error",
        "No sample is started: the disks or the dump directory have no room. The run waits, and goes on by itself.",
        "Free what the message says, or add a root.",
        {"kind": "`roots_full` or `staging_full`", "message": "what to free, and how much"},
    ),
    Event(
        "intake.resumed",
        "info",
        "There is room again, or nobody waits for it.",
        fields={"kind": "as in `intake.paused`", "seconds": "how long it took"},
    ),
    Event(
        "attempt.failed",
        "warning",
        "An attempt failed by the sample's own fault, and will be repeated.",
        "Nothing, unless there are many: then look at the reason in the guide.",
        {"marker": _MARKER, "reason": _REASON, "evidence": _EVIDENCE},
    ),
    Event(
        "sample.quarantined",
        "error",
        "A sample failed for good; the run goes on without it.",
        "`hsx quarantine list`; once the cause is mended, `hsx quarantine requeue`.",
        {"marker": _MARKER, "reason": _REASON, "evidence": _EVIDENCE},
    ),
    Event(
        "sample.convicted",
        "error",
        "A sample was found to kill the server, or to make it hang; its quarantine is logged besides.",
        "Look at the sample (`hsx show`) and at the server's log.",
        {"index": "the sample's", "deaths": "how often the server died with it"},
    ),
    Event(
        "samples.revoked",
        "error",
        "Committed samples are taken back and extracted again: no sound canary stands behind them, or a power cut may have "
        "cost them.",
        "Nothing the first time. If it comes again, the server or its hardware computes wrongly.",
        {"epoch": _EPOCH, "invariant": "which did not hold, or `unsynced`", "evidence": _EVIDENCE, "count": "how many"},
    ),
    Event(
        "invariant.violated",
        "warning",
        "An invariant does not hold; nothing was stored for it.",
        "Look the invariant up in the guide.",
        {"invariant": "its name", "evidence": _EVIDENCE, "marker": f"{_MARKER}; null where it speaks of the whole run"},
    ),
    Event(
        "engine.state_changed",
        "info",
        "The engine's life took a step.",
        fields={"state": "STOPPED, STARTING, READY, DRAINING, BACKOFF or FAILED", "reason": "why, if there is a reason"},
    ),
    Event(
        "engine.waiting",
        "info",
        "What the engine waits for while it comes up; written when that changes.",
        "Start the server, if it says that there is none.",
        {"reason": "what it waits for"},
    ),
    Event(
        "engine.restarted",
        "error",
        "The epoch is void, and a restart of the server follows.",
        "Nothing for one in a day. For more, read the evidence and the server's log before the budget is spent.",
        {
            "reason": "the invariant that did not hold",
            "evidence": _EVIDENCE,
            "requeued": "samples that went back to the queue",
            "delay_s": "seconds until the restart",
        },
    ),
    Event(
        "epoch.began",
        "info",
        "A server passed the boot gate and gets samples.",
        fields={"epoch": _EPOCH, "continued": "whether an earlier run had used this very server"},
    ),
    Event(
        "canary.passed",
        "info",
        "hsx's own prompts came back sound.",
        fields={"epoch": _EPOCH, "sequence": "the capture number up to which that vouches"},
    ),
    Event(
        "error.met",
        "error",
        "Anything else that went wrong; the run goes on, or ends with this error.",
        "Look the kind up in the guide.",
        {"kind": "error kind", "message": "for people"},
    ),
    Event(
        "systemd.notify_failed",
        "warning",
        "The service manager's socket took no message.",
        "Look at the unit: hsx is restarted by its watchdog if this goes on.",
        {"message": "what was to be told", "error": "the system's answer"},
    ),
    Event(
        "capture.installed",
        "info",
        "The plugin's hooks are in the model.",
        fields={
            "epoch": _EPOCH,
            "layers": "captured layers",
            "method": "`model` hands them out, or their `norms` are watched",
            "final": "kind of the final state",
            "folder": "of the dumps",
        },
        writer="server",
    ),
    Event(
        "capture.not_installed",
        "info",
        "The server was not started by `hsx serve`, so the plugin does nothing.",
        "Start it with `hsx serve` if it is to serve a job.",
        {"reason": "the variable that is not set"},
        writer="server",
    ),
    Event(
        "capture.refused",
        "error",
        "The hooks do not fit this server; hsx refuses it at the boot gate.",
        "Read the traceback or the reason: the model or the SGLang version is not supported.",
        {"reason": "why, where the hooks themselves have found it"},
        frozenset({"reason"}),
        writer="server",
    ),
    Event(
        "capture.layers_proved",
        "info",
        "The first forward's layers are those that the norms saw.",
        fields={"states": "names of the states compared", "worst": "largest relative difference"},
        writer="server",
    ),
    Event(
        "capture.layers_unproved",
        "warning",
        "The layers could not be compared with what the norms saw: only the boot canary vouches for them.",
        "Have the states compared by `hsx verify --against-hf` on some samples.",
        fields={"states": "names of the states", "reason": "why"},
        writer="server",
    ),
    Event(
        "capture.closed",
        "info",
        "The server ends; what capture cost it.",
        fields={
            "forwards": "prefill forwards",
            "chunks": "pieces handed over",
            "us_per_chunk": "microseconds of the forward path a chunk",
            "us_per_forward": "and a forward",
            "bytes": "handed over in all",
            "peak_bytes": "most that waited for the writer",
            "of": "bytes of the pool",
            "blocked_us": "microseconds that forwards waited for room",
            "published": "dumps",
            "failed": "error files",
            "incomplete": "markers given up",
            "left": "dumps that were not written any more",
        },
        writer="server",
    ),
    Event(
        "capture.published",
        "debug",
        "A dump was published.",
        fields={"marker": _MARKER, "sequence": "its number"},
        writer="server",
    ),
    Event(
        "capture.dropped",
        "info",
        "A prompt ended before all of it was captured (an abort): no dump.",
        fields={"marker": _MARKER},
        writer="server",
    ),
    Event(
        "capture.marker_failed",
        "error",
        "One dump could not be written; hsx is told by an error file.",
        "Where the reason is a full dump directory, enlarge the tmpfs or lower `staging.max_bytes`.",
        {"marker": _MARKER, "reason": "what the system said"},
        writer="server",
    ),
    Event(
        "capture.writer_died",
        "error",
        "The process that writes the dumps died; the server writes them from now on. Dumps under way are asked for again.",
        "Look for who killed it: the kernel's log, if memory was short. The next start of the server has one again.",
        {"pid": "the process", "ended": "by which signal, or with which exit status", "given": "last number that it told of"},
        writer="server",
    ),
    Event(
        "capture.no_writer_process",
        "warning",
        "No process can be started that writes the dumps: the server writes them itself, which costs it a little more.",
        "Look what the system refuses: processes or memory.",
        {"reason": "what the system said"},
        writer="server",
    ),
    Event(
        "capture.memory_unshared",
        "warning",
        "The pool's memory cannot be shared with a process that writes the dumps: the server writes them itself.",
        "Look what the system refuses: a memfd, or pinning it.",
        {"bytes": "size of the pool", "reason": "what the system said"},
        writer="server",
    ),
    Event(
        "capture.error_file_failed",
        "error",
        "Not even the error file could be written; hsx notices by its own deadline.",
        "Look at the dump directory's file system.",
        {"marker": _MARKER, "reason": "what the system said"},
        frozenset({"marker", "reason"}),
        writer="server",
    ),
    Event(
        "capture.state_failed",
        "error",
        "The capture counter's file could not be written.",
        "Look at the dump directory's file system.",
        writer="server",
    ),
    Event("capture.failed", "error", "A fault inside the hook.", "Report it with the traceback.", writer="server"),
)

EVENTS: Final[dict[str, Event]] = {event.name: event for event in _ALL}
"""Every event, by name."""


def objections(line: dict[str, object]) -> list[str]:
    """What a log line of hsx does that the catalogue does not say: an unknown event, another level, other fields.

    Lines of libraries (with `logger`) may say anything.
    """
    if "logger" in line:
        return []
    name = str(line.get("event"))
    event = EVENTS.get(name)
    if event is None or event.writer != "hsx":
        return [f"event {name!r} is not in the catalogue (hsx.events)"]
    found = []
    level = line.get("level", line.get("log_level"))
    if level is not None and level != event.level:
        found.append(f"{name} was written at level {level}; the catalogue has {event.level}")
    extra = sorted(set(line) - set(event.fields) - set(BOUND) - {"log_level", "exception"})
    if extra:
        found.append(f"{name} has fields that the catalogue does not have: {', '.join(extra)}")
    missing = sorted(set(event.fields) - event.optional - set(line))
    if missing:
        found.append(f"{name} lacks fields: {', '.join(missing)}")
    return found
