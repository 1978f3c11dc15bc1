"""The page: one HTML file that needs nothing from elsewhere and runs no script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hsx.progress_view import duration
from hsx.report import figures as drawn_as
from hsx.report.html import TIMES, Html, card, code, figures, moment, number, size, table, tag
from hsx.report.sections import invariants, job_facts, quarantine, roots, trust
from hsx.report.states import CHUNKS

if TYPE_CHECKING:
    from hsx.report.gather import Gathered
    from hsx.report.states import DrawnStates

STYLE: Final = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
PILLS: Final = {"finished": "good", "sealed": "good", "running": "note", "unfinished": "warn", "empty": "warn"}
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may load for the page: nothing."""


def page(gathered: Gathered) -> str:
    """The whole page."""
    document = gathered.document
    name = document["job"]["name"]
    cards = [
        _overview(document),
        *_throughput(document),
        *_lengths(document),
        roots(document),
        *_states(document, gathered.drawn),
        *_heat_maps(document),
        invariants(document),
        trust(document),
        quarantine(document),
        job_facts(document),
    ]
    head = [
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Html('<link rel="icon" href="data:,">'),
        tag("title", f"{name}: hsx report"),
        Html(f"<style>{STYLE}</style>"),
    ]
    body = [
        tag(
            "header",
            tag(
                "div",
                tag("h1", name),
                tag("span", document["state"], class_=f"pill {PILLS.get(document['state'], '')}", id="state"),
                class_="title",
            ),
            tag("div", f"as of {moment(document['time'])} UTC", class_="muted"),
        ),
        tag("main", tag("div", *(card for card in cards if card), class_="board")),
        tag(
            "footer",
            f"Made by hsx {document['job']['hsx']} report. The numbers, for programs, are in this file's element ",
            code("#report"),
            ".",
            class_="muted",
        ),
        Html(f'<script type="application/json" id="report">{_embedded(document)}</script>'),
    ]
    return f'<!doctype html>\n<html lang="en"><head>{"".join(head)}</head>\n<body>{"".join(body)}</body></html>\n'


def _embedded(document: dict[str, Any]) -> str:
    """The document as JSON that no text in it can break out of: "<" is written as JSON may write it."""
    return json.dumps(document, allow_nan=False).replace("<", "\\u003c")


def _overview(document: dict[str, Any]) -> Html:
    progress, lives, store = document["progress"], document["lives"], document["job"]["store"]
    values: list[tuple[str, object, str]] = []
    if progress is not None and lives is not None:
        values = [
            ("committed", progress["committed"], f"of {progress['total']:,} samples committed"),
            ("tokens", progress["tokens_committed"], f"of {progress['tokens_total']:,} tokens"),
            ("bytes", progress["bytes_committed"], "on the roots"),
            ("rate", progress["tokens_per_second"], "tokens/s while it ran"),
            ("quarantined", progress["quarantined"], "quarantined"),
            ("restarts", lives["ended"], "servers voided"),
            ("violations", sum(document["invariants"].values()), "violations"),
            ("revoked", document["revocations"]["samples"], "commits taken back"),
        ]
    elif not store["error"]:
        values = [("committed", store["visible"], f"of {store['samples']:,} samples committed")]
    listed = tag("ul", *(tag("li", found["text"], class_=found["level"]) for found in document["findings"]), class_="findings")
    return card("At a glance", figures(values), listed, full=True)


def _throughput(document: dict[str, Any]) -> list[Html]:
    timeline, lives = document["timeline"], document["lives"]
    if lives is None:
        return []
    content: list[object] = []
    note = "Nothing is committed yet."
    if timeline is not None:
        shared = document["progress"]["shared"]
        note = (
            "Reckoned from the ledger: the tokens of the samples that are committed now, by the time of their commit, in "
            f"slices of {duration(timeline['step'])}. Samples that were taken back count where they were committed again"
            + (f"; {shared:,} that share another one's shard do not count." if shared else ".")
            + (f" {timeline['undated']:,} samples have no time: their ledger was built again." if timeline["undated"] else "")
            + " Red lines are servers that were voided."
        )
        content.append(Html(drawn_as.throughput(timeline, lives["ends"])))
    if lives["last"]:
        rows = [
            (
                code(life["epoch"][:8]),
                moment(life["began"]),
                duration(life["ended"] - life["began"]) if life["ended"] is not None else "-",
                number(life["committed"]),
                number(life["requeued"]),
                code(life["reason"]) if life["reason"] else "not voided",
                life["evidence"] or "",
            )
            for life in reversed(lives["last"])
        ]
        more = lives["servers"] - len(rows)
        title = tag("h3", f"Lives of the server, the last first{f'; {more:,} earlier ones are left out' if more else ''}")
        header = ("epoch", "began (UTC)", "lasted", "committed", "requeued", "end", "evidence")
        content += [title, table(header, rows, numbers=(3, 4), long=(6,))]
    return [card("Throughput and restarts", *content, note=note, full=True, name="throughput")]


def _lengths(document: dict[str, Any]) -> list[Html]:
    facts = document["lengths"]
    if not facts["samples"]:
        return [card("Prompt lengths", note="There are no samples.", name="lengths")]
    values = [
        (key, facts[key], what)
        for key, what in (("p50", "median"), ("p90", "90 % up to"), ("p99", "99 % up to"), ("longest", "longest"))
    ]
    return [
        card(
            "Prompt lengths",
            Html(drawn_as.lengths(facts)),
            figures(values),
            note=f"All {facts['samples']:,} samples of the job, whatever their state, in bins of {facts['width']:,} tokens.",
            name="lengths",
        )
    ]


def _states(document: dict[str, Any], drawn: DrawnStates | None) -> list[Html]:
    facts = document["states"]
    if facts is None or drawn is None:
        return [
            card("Hidden states", note="The store cannot be read, so nothing is said of its states.", full=True, name="states")
        ]
    cards = []
    if facts["layers"] and (drawn.norms > 0).any():
        cards = [_norms(facts, drawn), _channels(facts, drawn)]
    draw = (
        f"{facts['read']:,} of {facts['asked']:,} samples asked for were read, drawn by chance with seed {facts['seed']} out "
        f"of {document['job']['store']['visible']:,} committed ones, with its first inner chunk and up to {CHUNKS - 1} more: "
        f"{facts['rows']:,} tokens besides the first ones, {size(facts['bytes'])}. Every chunk's checksum was compared. "
        f"Reading them takes at most about {size(facts['memory_bound'])} of memory, however long the samples are."
    )
    failed = [(one["index"], code(one["id"]), code(one["kind"]), one["message"]) for one in facts["unreadable"]]
    shown = table(("index", "id", "error", "expected and found"), failed[:50], long=(1, 3)) if failed else ""
    more = f" The first 50 of {len(failed):,} that could not be read:" if len(failed) > 50 else ""
    return [card("What was read", shown, note=draw + more, full=True, name="states"), *cards]


def _norms(facts: dict[str, Any], drawn: DrawnStates) -> Html:
    rows = [
        (
            code(layer["name"]),
            *(number(layer["norm"][key]) for key in ("p1", "p50", "p99")),
            number(layer["largest"]),
            number(layer["first"]),
        )
        for layer in facts["layers"]
    ]
    header = ("state", "1 %", "median", "99 %", "largest", "first token")
    return card(
        "Norms by state",
        Html(drawn_as.norms(drawn)),
        table(header, rows, numbers=(1, 2, 3, 4, 5)),
        note="Euclidean norm of each token's state. First tokens, which are attention sinks, stand apart: the diamond.",
        name="norms",
    )


def _channels(facts: dict[str, Any], drawn: DrawnStates) -> Html:
    rows = []
    for layer in facts["layers"]:
        named = ", ".join(
            f"{one['channel']} ({one['ratio']:.3g}{TIMES}, to {number(one['largest'])})"
            for one in layer["channels"]
            if one["ratio"] is not None
        )
        rows.append((code(layer["name"]), number(layer["outliers"]), named))
    return card(
        "Outlier channels",
        Html(drawn_as.channels(drawn, facts["layers"])),
        table(
            ("state", f"from 10{TIMES}", "largest channels (over the median, up to which value)"), rows, numbers=(1,), long=(2,)
        ),
        note="Root mean square of each channel over that of its state's median channel, without first tokens.",
        name="channels",
    )


def _heat_maps(document: dict[str, Any]) -> list[Html]:
    facts = document["states"]
    if facts is None or not facts["heats"]:
        return []
    names, limit = tuple(document["job"]["store"]["states"]), drawn_as.heat_limit(facts["heats"])
    content: list[object] = []
    for place, heat in enumerate(facts["heats"]):
        fewer = heat["stored"] < heat["tokens"]
        kept = f", of which {heat['stored']:,} are stored" if fewer else ""
        cut = f", of which the first {heat['shown']:,} are shown" if heat["shown"] < heat["stored"] else ""
        each = (
            f"; each column is the token farthest from the median of {heat['tokens_per_column']}"
            if heat["tokens_per_column"] > 1
            else ""
        )
        first = ", ".join(
            f"{name} {norm / middle if middle else 0:.3g}{TIMES}"
            for name, norm, middle in zip(names, heat["first"], heat["medians"], strict=True)
        )
        content.append(
            tag(
                "div",
                tag("h3", "Sample ", number(heat["index"]), " ", code(heat["id"])),
                tag(
                    "p",
                    f"{heat['tokens']:,} tokens{kept}{cut}{each}. First {'stored ' if fewer else ''}token: {first}.",
                    class_="note",
                ),
                Html(drawn_as.heat_map(place, heat, names, limit)),
            )
        )
    note = (
        "Norm of each token's state over the median of that state in the sample. The first token, an attention sink, is left "
        "out of the median and of the scale, which ends where 98 % of the other tokens do; what is beyond has its end's colour."
    )
    return [card("Samples, token by layer", tag("div", *content, class_="board"), note=note, full=True, name="heat-maps")]
