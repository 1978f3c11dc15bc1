"""Errors, grouped by how much they take down.

`SampleError` fails one attempt of one sample, `EngineError` voids one epoch (one life of the server), `RunError` ends the
job. Every error carries a stable `kind` out of `KINDS`, which logs, the status document and scripts may rely on; the
message is for people and names the thing, what was expected and what was found. Foreign exceptions are translated once,
in the adapter that met them.
"""

from __future__ import annotations

from typing import Final

KINDS: Final[dict[str, str]] = {
    # the job's own files
    "config_unreadable": "the job file cannot be read or is not TOML",
    "config_invalid": "a key of the job file is unknown, missing, of the wrong type or out of range",
    "config_conflict": "two settings contradict each other, or a folder or file that one of them names is missing",
    "job_changed": "the store or ledger was made by a job with other settings, or they belong to different jobs",
    "job_locked": "another hsx holds the job, its store or its dump directory",
    "ledger_failed": "the ledger cannot be read or written",
    "not_run_yet": "the job has no ledger or store yet",
    # the dataset
    "dataset_unreadable": "the dataset file cannot be opened, decompressed or decoded",
    "dataset_rejected": "the dataset has bad rows and on_bad_row is 'refuse'",
    "dataset_empty": "the dataset has no usable row",
    "dataset_ambiguous": "a row can be read in several ways, and the job file does not say in which",
    "mask_empty": "no token of any row counts for the loss, and zero_masks is 'refuse'",
    "chat_unavailable": "conversations need the 'chat' extra, a tokenizer that transformers loads alike, and a chat template",
    "model_unreadable": "the model folder has no usable config.json",
    # one sample
    "violation": "an invariant on this sample does not hold",
    "request_refused": "the server refused the request (HTTP 4xx)",
    "request_duplicate": "the server still works on a request under the same marker",
    "request_failed": "the request failed in transport or with HTTP 5xx",
    "request_timeout": "the server did not answer within the request's budget",
    "answer_invalid": "the server's answer lacks the counts that prove the sample",
    "dump_invalid": "a dump file is torn, has a bad header or another format version",
    "dump_failed": "the capture side reported that it could not write this dump",
    "server_killed": "the server died or stood still each time this sample was in it, and not without it",
    # one epoch
    "server_start_failed": "the server ended or stayed silent before it was ready",
    "unit_refused": "systemd does not know the server's unit, or does not let hsx start or stop it",
    "server_gone": "the server process ended or its HTTP port no longer answers",
    "server_refused": "the server's settings make capture wrong or incomplete",
    "server_protocol": "the server answered in a shape that hsx does not know",
    "staging_full": "the dump directory is full or failing; the intake pauses until there is room",
    "hsx_stopped": "hsx itself was stopped or starved for so long that a request's time ran out unwatched",
    "server_full": "the server's queue is full (HTTP 503)",
    "staging_gone": "the epoch's folder in the dump directory was deleted or replaced under hsx",
    "capture_off": "the capture plugin is absent, failed to install or reports another spec",
    "canary_failed": "a canary's states are not what they must be: the server computes or pairs wrongly",
    "epoch_void": (
        "the epoch was declared void while this was under way, or the server was voided in an earlier run "
        "and has to be restarted"
    ),
    "epoch_unknown": "no epoch record matches the server",
    # the job
    "root_unusable": "a root is missing, is not the root it was, or cannot be written",
    "roots_full": "no root has room for the next shard; the intake pauses until there is some",
    "root_silent": "a root does not answer, for its mount hangs; it gets nothing new until it does",
    "staging_failed": "the dump directory is missing or cannot be written",
    "out_of_files": "hsx ran out of file descriptors; raise LimitNOFILE",
    "status_failed": "the status endpoint cannot listen on its address",
    "status_unreachable": "the status endpoint does not answer, or nobody listens there",
    "status_refused": "the status endpoint wants a token, another one than was given, or another name of its host",
    "status_foreign": "what answers on the status endpoint's address is not hsx",
    "status_version": "the status document is of a version that this hsx does not know",
    "restart_budget": "the server needed more restarts than the budget allows",
    "store_invalid": "the store is not an hsx store, or a shard cannot be decoded",
    "store_unwritable": "the folder of the store cannot be created or written",
    "sample_unknown": "the store, ledger or dataset has no such sample",
    "store_sealed": "the store was sealed: nothing in it may change any more",
    "store_damaged": "verification found shards that are missing, torn or wrong",
    "incomplete": "the job ended with samples that are neither committed nor allowed to be quarantined",
    "interrupted": "the job was stopped before it was complete",
    "dependency_missing": "an optional package that this command needs is not installed",
    "serve_refused": "hsx serve was given server arguments under which capture would be wrong",
    "report_unwritable": "the page of hsx report cannot be written where it should go",
    "units_unwritable": "a unit file, or what belongs to it, cannot be written",
    "export_refused": "the store cannot be exported so, or the folder holds something else",
    "export_unwritable": "the folder of an export is full or cannot be written",
    "import_refused": "the folder is not what it is said to be, or the store to make, or another import into it, is there",
    "import_incomplete": "samples of an import were not taken; the others are in the store",
    "usage": "a command was called with arguments that make no sense together",
}


class HsxError(Exception):
    """Base of all hsx errors.

    Args:
        kind: one of `KINDS`; stable across releases.
        message: names the thing, the expected and the actual.
    """

    def __init__(self, kind: str, message: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown error kind {kind!r}; add it to hsx.errors.KINDS")
        super().__init__(message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"[{self.kind}] {self.message}"


class SampleError(HsxError):
    """This attempt of this sample failed; the rest of the job goes on."""


class EngineError(HsxError):
    """This epoch is void: what is in flight goes back to the queue and the server is restarted or awaited."""


class RunError(HsxError):
    """The job cannot go on; nothing that was committed is touched."""


class ConfigError(RunError):
    """The job file is wrong. `problems` holds one complete sentence for each fault found."""

    def __init__(self, kind: str, problems: list[str]) -> None:
        super().__init__(kind, "\n".join(problems))
        self.problems = problems
