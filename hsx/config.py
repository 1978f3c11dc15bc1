"""The job file: one TOML file, decoded into frozen structs, one per component.

`load` reads, checks and resolves a file; every fault it finds is reported at once, each with file, key, value and what was
expected. Relative paths are relative to the job file.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Size = Annotated[
    str,
    Meta(
        pattern=r"^[0-9]+(\.[0-9]+)? ?(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)$",
        description="a size in bytes with its unit, such as '8GiB' or '1.5TB'",
    ),
]
Name = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="a name of up to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit",
    ),
]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: immutable, and strict about unknown keys."""


class Job(Section, frozen=True, kw_only=True):
    """What the job is called and where its result and its state lie."""

    name: Name
    """Name of the job in logs, status and metrics."""
    store: str
    """Path of the Zarr group that is made."""
    state_dir: str = ""
    """Folder of the ledger and the locks; default: the store's path with `.job` appended. On a local file system."""


class Model(Section, frozen=True, kw_only=True):
    """The model whose states are taken."""

    path: str
    """Local folder with `config.json` (and the tokenizer, for chat datasets); also what a spawned server is given."""
    revision: str = ""
    """Revision of the model, recorded in the store."""


class Dataset(Section, frozen=True, kw_only=True):
    """The samples."""

    path: str
    """A file of JSONL (also `.gz`, `.zst`), Parquet or Arrow; a folder that `datasets` saved (`save_to_disk`); any other
    folder, whose data files are read in the order of their names; or a pattern of files, such as `rows/*.parquet`."""
    format: Literal["auto", "tokens", "chat", "text"] = "auto"
    """`tokens`: rows with input_ids; `chat`: rows with conversations or messages; `text`: rows with text that was formatted
    beforehand; `auto`: told from the first usable row. `hsx check` prints what was found."""
    columns: dict[str, str] = {}
    """Names of fields that are not called as usual: the key is one of `id`, `input_ids`, `loss_mask`, `labels`,
    `prompt_length`, `messages`, `conversations`, `tools`, `text`; the value is the field's name in the dataset."""
    ids: Literal["column", "number"] = "column"
    """`column`: each row has an id of its own; `number`: a row's id is its place in the dataset, from 0."""
    max_tokens: Positive | None = None
    """Longest sample allowed; default: the model's context length less 8, what SGLang keeps for itself."""
    too_long: Literal["reject", "left", "right", "turns"] = "reject"
    """Longer rows: `reject`: they are bad rows; `left`, `right`: tokens are cut off at that end; `turns`: they are cut behind
    the last of the assistant's turns that ends in time. Ids and loss mask are cut together."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """`refuse`: any bad row ends the job before it starts, with a list of them all; `skip`: they are recorded as rejected."""
    zero_masks: Literal["refuse", "allow"] = "refuse"
    """Where no token of any row counts for the loss: `refuse` ends the job before it starts; `allow` goes on."""
    identical: Literal["share", "extract"] = "share"
    """Samples with identical prompts, id by id: `share`: prefilled once, their shards are hard links to one file; `extract`:
    each is prefilled and stored by itself. It counts when the job's ledger is made; a later change has no effect."""
    tokenizer_differs: Literal["refuse", "allow"] = "refuse"
    """Where transformers' AutoTokenizer, which trainers and servers use, gives other token ids than `tokenizer.json`, which
    hsx uses: `refuse` reads no text or conversation; `allow` goes on with the ids of `tokenizer.json`."""
    chat_template: str = ""
    """Path of a Jinja chat template that replaces the tokenizer's own."""
    template_args: dict[str, bool | int | float | str] = {}
    """Further variables for the chat template, such as `enable_thinking = false`."""
    thinking: Literal["template", "keep", "drop"] = "template"
    """What the assistant thought (`<think>...</think>`, or a field `reasoning_content`): `template`: as the template does, that
    may leave it out of earlier turns; `keep`: rows of which it leaves any out are bad; `drop`: it is taken out."""
    loss_on: Literal["all", "last"] = "all"
    """Which of the assistant's turns count for the loss: `all`, or the `last` one."""
    roles: dict[str, str] = {}
    """Further names of roles, and what they are for the template: `{ "narrator" = "system" }`."""
    text_markers: list[str] = []
    """For `text`: what stands before and after the assistant's text, such as `["[/INST]", "</s>"]`; the second counts
    for the loss, too. Without them every token counts."""


class Capture(Section, frozen=True, kw_only=True):
    """What is taken of each token."""

    layers: list[int]
    """The k of each h_k (the residual stream after k layers), strictly rising, from 0 (the embeddings) to N-1."""
    final: Literal["post_norm", "pre_norm"] = "post_norm"
    """`post_norm`: what the output head gets; `pre_norm`: h_N, before the final norm."""
    staging_bytes: Size = "1GiB"
    """Host memory in the server (pinned, with a GPU) in which states wait to be written to the dump directory."""
    when_full: Literal["block", "fail"] = "block"
    """When that memory is full: `block` holds the forward up until there is room, a minute at most; `fail` fails the dump."""
    convert: bool = True
    """Round a residual stream in float16 or float32 to bf16, to the nearest; off: such a server is refused."""


class Engine(Section, frozen=True, kw_only=True):
    """The server, and who owns it."""

    kind: Literal["sglang", "reference"] = "sglang"
    """`sglang`, or `reference`: the small server that the tests use."""
    ownership: Literal["spawn", "external", "systemd"] = "external"
    """`spawn`: hsx starts and stops the server; `external`: it only attaches to one that `hsx serve` started; `systemd`: the
    server is a unit of its own, which outlives hsx and which hsx restarts."""
    unit: str = ""
    """The server's unit, for `systemd`; default: `hsx-sglang@JOB.service`, JOB being the job file's name without `.toml`."""
    host: str = "127.0.0.1"
    """Address of the server's HTTP port."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 30000
    """The server's HTTP port."""
    python: str = ""
    """Python of the server's environment, for `spawn` and for `hsx install-units`; default: the one that runs hsx."""
    args: list[str] = []
    """Further arguments of the server, for `spawn` and for `hsx install-units`."""
    env: dict[str, str] = {}
    """Further environment variables of the server, for `spawn` and for `hsx install-units`."""
    start_timeout_s: Seconds = 3600.0
    """Longest time from start to the first answer: a large model loads for half an hour."""
    stop_grace_s: Seconds = 30.0
    """Time that a server of hsx's own gets to end by itself before it is killed."""


class Staging(Section, frozen=True, kw_only=True):
    """The dump directory, on a tmpfs."""

    dump_dir: str
    """Folder through which the server hands over dumps; emptied of this job's dumps as they are committed."""
    max_bytes: Size = "16GiB"
    """Bytes that dumps may take at once."""


class Root(Section, frozen=True, kw_only=True):
    """One disk that takes shards."""

    name: Name
    """Name of the root in ledger, store and metrics; the same disk keeps it for the job's whole life."""
    path: str
    """An existing folder on the disk; never made, so that an unmounted disk is noticed."""
    reserve: Size = "1GiB"
    """Bytes that stay free."""


class Pipeline(Section, frozen=True, kw_only=True):
    """How much is under way at once, and how failures are met."""

    concurrency: Positive = 32
    """Requests at the server at once."""
    max_tokens_in_flight: Positive = 131072
    """Prompt tokens at the server at once; a longer sample runs alone."""
    start_rate: Annotated[float, Meta(gt=0)] = 200.0
    """Requests started per second at most: smooths the burst after a (re)start."""
    retries: NonNegative = 2
    """Failures of one sample that are forgiven before it is quarantined."""
    allow_quarantined: Fraction = 0.0
    """Share of the samples that may be quarantined with the job still ending in exit code 0."""
    dump_deadline_s: Seconds = 30.0
    """Longest time from a 200 answer to its dump."""
    congestion_s: Seconds = 600.0
    """Longest time without a single dump because the server's queue is full; then the run ends."""
    request_slack: Annotated[float, Meta(ge=1)] = 4.0
    """A request may take this many times what `watchdog.slowest_tokens_per_s` gives for the tokens in flight."""
    commit_samples: Positive = 64
    """Most samples in one group commit."""
    commit_seconds: Seconds = 0.25
    """A group is committed at the latest when its first sample has waited this long."""
    writer_threads: Positive = 2
    """Writer threads per root."""


class Storage(Section, frozen=True, kw_only=True):
    """How shards are written, and what is done for their safety."""

    codec: Literal["none", "blosc", "zstd"] = "none"
    """Compression of the inner chunks: `blosc` (lz4, bitshuffle) or `zstd`; about a fifth less bytes for two to three times the
    processor time. Fixed at the first run."""
    chunk_tokens: Literal[8, 16, 32, 64, 128, 256] = 64
    """Tokens of an inner chunk, the least that is read and checked by itself; a shard is filled up to a multiple. Fewer
    take less room where samples are short, as `hsx plan` shows, and more processor time a GB. Fixed at the first run."""
    tokens: Literal["all", "loss"] = "all"
    """Which tokens' states are stored. `loss`: those where the loss mask is set, and `context` tokens on either side; ids and
    loss mask stay whole. All are captured and proved, whatever is stored. Fixed at the first run."""
    context: NonNegative = 0
    """With `tokens = "loss"`: how many tokens before and after one of the loss mask are stored, too. Fixed at the first run."""
    dtype: Literal["bf16", "fp8_e4m3"] = "bf16"
    """`fp8_e4m3`: about half the bytes, e4m3 values and a float32 scale for each state of a token; an error of up to 6.25% in
    each value. Readers give bf16. Fixed at the first run."""
    durability: Literal["commit", "relaxed"] = "commit"
    """`commit`: what is committed survives a power cut; `relaxed`: disks are synced now and then only, and after a power cut
    the samples committed since the last time are read again, and extracted again where they are damaged."""
    writer: Literal["hsx", "zarr"] = "hsx"
    """`hsx`: hsx's own writer; `zarr`: zarr-python, slow, for comparison. Readers find the same arrays."""
    on_missing_root: Literal["refuse", "go_on"] = "refuse"
    """When a root cannot be used at the start: end the run, or go on with the others and leave its samples as they are."""
    backup_seconds: NonNegative = 600
    """Seconds between two copies of the ledger to every root, where it has changed; 0: none."""


class Watchdog(Section, frozen=True, kw_only=True):
    """When the server counts as stalled or as not to be trusted, and how often it may be restarted."""

    grace_s: Seconds = 60.0
    """Silence of the server that is always allowed while requests are in flight."""
    slowest_tokens_per_s: Annotated[float, Meta(gt=0)] = 50.0
    """Slowest prefill rate that still counts as working; every token in flight extends the deadline by its reciprocal."""
    violations: Positive = 8
    """Token or counter violations within `violation_window_s` that void the epoch."""
    violation_window_s: Seconds = 60.0
    """Length of the window in which violations are counted."""
    canary_every: NonNegative = 500
    """Samples between two canaries: as many may have to be extracted again when one fails. 0: only at boot and at the end."""
    canary_tolerance: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    """Relative distance of one token's state that rounding may cause between two runs of the same prompt."""
    restart_budget: NonNegative = 5
    """Restarts of the server within `restart_window_s`; one more is needed: the job stops."""
    restart_window_s: Seconds = 3600.0
    """Length of the window in which restarts are counted."""
    backoff_first_s: Seconds = 2.0
    """Delay before the first restart; it doubles with each further one."""
    backoff_longest_s: Seconds = 300.0
    """Longest delay before a restart."""


class Status(Section, frozen=True, kw_only=True):
    """The HTTP status endpoint; read-only."""

    enabled: bool = True
    """Whether the endpoint is served."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback shows the status to others, unless they must know a token."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8470
    """0 takes any free port and logs it."""
    token_file: str = ""
    """File with a bearer token of 16 characters or more, without which only `/healthz` and an empty dashboard are shown.
    Without it, the systemd credential `hsx-status-token` counts, where there is one."""


class Log(Section, frozen=True, kw_only=True):
    """Where and how much is logged."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    format: Literal["auto", "json", "console"] = "auto"
    """`auto`: console on a terminal, JSON lines elsewhere."""
    samples_per_second: Annotated[float, Meta(ge=0)] = 100.0
    """Lines for committed samples a second, in the long run: the log of a million samples stays readable. 0: none."""


class Config(Section, frozen=True, kw_only=True):
    """The whole job file."""

    job: Job
    model: Model
    dataset: Dataset
    capture: Capture
    staging: Staging
    roots: Annotated[list[Root], Meta(min_length=1)]
    engine: Engine = Engine()
    pipeline: Pipeline = Pipeline()
    storage: Storage = Storage()
    watchdog: Watchdog = Watchdog()
    status: Status = Status()
    log: Log = Log()
