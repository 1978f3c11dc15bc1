"""Those cards of the page that need no figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hsx.core.invariants import INVARIANTS
from hsx.report.html import Html, card, code, figures, moment, number, size, table, tag

if TYPE_CHECKING:
    from collections.abc import Iterator


def roots(document: dict[str, Any]) -> Html:
    """How samples and bytes are spread, and what is free."""
    note = "Bars: what this job's shards take of the file system, and what else is on it."
    return card("Roots", *[_root(root) for root in document["roots"]], note=note, name="roots")


def _root(root: dict[str, Any]) -> Html:
    held = "samples not known" if root["samples"] is None else f"{number(root['samples'])} samples, {size(root['bytes'])}"
    free = (
        "not there"
        if root["there"] is False
        else ""
        if root["free"] is None
        else f"{size(root['free'])} free of {size(root['size'])}"
    )
    pieces: list[Html] = []
    if root["size"] and root["free"] is not None and root["there"] is not False:
        ours = min(root["bytes"] or 0, root["size"] - root["free"])
        rest = root["size"] - root["free"] - ours
        for kind, nbytes in (("ours", ours), ("used", rest)):
            pieces.append(tag("i", class_=kind, style=f"width:{100 * nbytes / root['size']:.2f}%"))
    level = "pill" if root["there"] is not False else "pill warn"
    return tag(
        "div",
        tag(
            "div",
            tag("span", tag("b", root["name"]), " ", code(root["path"])),
            tag("span", free, class_=level) if free else "",
            class_="row",
        ),
        tag("div", *pieces, class_="bar"),
        tag(
            "div",
            held,
            f", {number(root['shared'])} of them links to another sample's" if root["shared"] else "",
            class_="muted",
        ),
        class_="root",
        data_root=root["name"],
        data_samples="" if root["samples"] is None else root["samples"],
        data_bytes="" if root["bytes"] is None else root["bytes"],
        data_there={True: "yes", False: "no", None: ""}[root["there"]],
    )


def invariants(document: dict[str, Any]) -> Html:
    """What fired, and what always held; failed attempts."""
    fired, failures = document["invariants"], document["failures"]
    if fired is None:
        return card("Invariants", note="Without the ledger it is not known what fired.", name="invariants")
    rows = [(code(name), INVARIANTS[name].group if name in INVARIANTS else "-", number(count)) for name, count in fired.items()]
    quiet = [name for name in INVARIANTS if name not in fired]
    content: list[object] = [table(("invariant", "group", "violations"), rows, numbers=(2,))] if rows else []
    content.append(
        tag(
            "p",
            "Always held: ",
            *[Html(f"{'' if not at else ', '}{code(name)}") for at, name in enumerate(quiet)],
            class_="note",
        )
    )
    if failures:
        content += [
            tag("h3", "Failed attempts"),
            table(("reason", "attempts"), [(code(name), number(count)) for name, count in failures.items()], numbers=(1,)),
        ]
    return card(
        "Invariants",
        *content,
        note="Proved of every state before it is stored. What violates one is not stored, but tried again.",
        name="invariants",
    )


def trust(document: dict[str, Any]) -> Html:
    """Canaries, and what was taken back."""
    canaries, revocations = document["canaries"], document["revocations"]
    if canaries is None:
        return card(
            "Canaries and revocations", note="Without the ledger it is not known what canaries vouch for.", name="trust"
        )
    content: list[object] = [
        figures(
            [
                ("vouched", canaries["vouched"], "committed samples vouched for"),
                ("unvouched", canaries["unvouched"], "not yet"),
                ("canaries", canaries["sent"], "canary prompts sent"),
            ]
        )
    ]
    if revocations["count"]:
        rows = [
            (moment(one["at"]), code(one["invariant"]), number(one["samples"]), one["evidence"])
            for one in reversed(revocations["last"])
        ]
        content += [
            tag("h3", "Taken back, the last first"),
            table(("at (UTC)", "for", "samples", "evidence"), rows, numbers=(2,), long=(3,)),
        ]
    note = "A canary is a known prompt among the others: a sound one vouches for what the server captured before it."
    return card("Canaries and revocations", *content, note=note, name="trust")


def quarantine(document: dict[str, Any]) -> Html:
    """What is not in the store, and why."""
    facts, rejected = document["quarantine"], document["rejected"]
    if facts is None:
        return card("Quarantine", note="Without the ledger it is not known what was given up.", full=True, name="quarantine")
    note = (
        "No sample is quarantined."
        if not facts["count"]
        else ", ".join(f"{reason or '-'}: {count:,}" for reason, count in facts["by_reason"].items()) + "."
    )
    content: list[object] = []
    if facts["first"]:
        rows = [
            (
                number(row["index"]),
                code(row["id"]),
                number(row["tokens"]),
                code(row["reason"]),
                number(row["attempts"]),
                row["evidence"],
            )
            for row in facts["first"]
        ]
        content.append(table(("index", "id", "tokens", "reason", "attempts", "evidence"), rows, numbers=(0, 2, 4), long=(1, 5)))
    if facts["count"] > len(facts["first"]):
        content.append(tag("p", f"{facts['count'] - len(facts['first']):,} more: hsx quarantine list.", class_="note"))
    if rejected["count"]:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in rejected["by_reason"].items())
        content.append(
            tag(
                "p",
                f"{rejected['count']:,} rows of the dataset were rejected ({reasons}): hsx quarantine list --rejected.",
                class_="note",
            )
        )
    return card("Quarantine", *content, note=note, full=True, name="quarantine")


def job_facts(document: dict[str, Any]) -> Html:
    """What the job is, and with what it was made."""
    return card(
        "The job",
        tag("dl", *(part for name, value in _facts(document) for part in (tag("dt", name), tag("dd", value)))),
        full=True,
        name="job",
    )


def _facts(document: dict[str, Any]) -> Iterator[tuple[str, object]]:
    job = document["job"]
    store = job["store"]
    yield "job file", code(job["file"])
    yield "run", code(job["run"] or "-")
    yield "store", code(store["path"])
    if store["error"]:
        yield "cannot be read", store["error"]
    else:
        yield (
            "states",
            ", ".join(store["states"]) + f"; {store['hidden_size']:,} values each, bf16: {size(store['token_bytes'])} a token",
        )
        yield "format", f"{store['format']}, codec {store['codec']}, id {store['id']}"
        yield (
            "sealed",
            "no" if store["sealed"] is None else ", ".join(f"{key} {value}" for key, value in store["sealed"].items()),
        )
        yield "model", ", ".join(f"{key} {value}" for key, value in store["model"].items())
    yield "server", job["engine"] or "-"
    for key, value in job["fingerprint"].items():
        yield key, code(value)
