"""Pieces of HTML. Text is escaped unless it is `Html`, so that what comes from datasets and servers can only be text."""

from __future__ import annotations

import html
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from hsx.core.amounts import in_words
from hsx.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TIMES: Final = "\N{MULTIPLICATION SIGN}"
LONGEST: Final = 600
"""Characters of a text that somebody else has written: evidence may be of any length."""


class Html(str):
    """Markup that is ready for the page."""

    __slots__ = ()


def text(value: object) -> Html:
    """A value as markup: `Html` as it is, everything else escaped; control characters are made visible."""
    if isinstance(value, Html):
        return value
    words = str(value)
    if len(words) > LONGEST:
        words = f"{words[:LONGEST]} ... ({len(words) - LONGEST:,} more characters)"
    return Html(html.escape(printable(words, keep="")))


def tag(name: str, *content: object, **attributes: object) -> Html:
    """An element; an attribute `class_` is `class`, and "_" within other names is "-"."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{given}>{''.join(map(text, content))}</{name}>")


def code(value: object) -> Html:
    """A name, as it is written in files and logs."""
    return tag("code", value)


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[int] = (), long: Sequence[int] = ()
) -> Html:
    """A table that scrolls sideways where it is too wide.

    Args:
        header: of the columns.
        rows: their cells.
        numbers: columns that are set to the right.
        long: columns whose text may be broken anywhere.
    """

    def kind(at: int) -> dict[str, object]:
        return {"class_": "number"} if at in numbers else {"class_": "text"} if at in long else {}

    head = tag("tr", *(tag("th", name, **kind(at)) for at, name in enumerate(header)))
    body = [tag("tr", *(tag("td", cell, **kind(at)) for at, cell in enumerate(row))) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")


def card(title: str, *content: object, note: str = "", full: bool = False, name: str = "") -> Html:
    """A card of the page."""
    says = [tag("p", note, class_="note")] if note else []
    return tag(
        "section",
        tag("h2", title),
        *says,
        *content,
        class_="card full" if full else "card",
        id=name or title.lower().replace(" ", "-"),
    )


def figures(values: Iterable[tuple[str, Any, str]]) -> Html:
    """Numbers with what they are: (name for programs, number, what it is); those named `bytes` are in the unit that fits."""
    cells = (
        tag(
            "div",
            tag(
                "b",
                size(value) if field == "bytes" else number(value),
                data_field=field,
                data_value="" if value is None else value,
            ),
            tag("span", what),
        )
        for field, value, what in values
    )
    return tag("div", *cells, class_="numbers")


def number(value: object) -> str:
    """Whole numbers with commas, others with four digits, "-" for None; text as it is."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 10_000
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def size(nbytes: int | None) -> str:
    """Bytes in the unit that fits: `1.92 TB`; "-" for None."""
    return "-" if nbytes is None else in_words(nbytes)


def moment(seconds: float | None) -> str:
    """Unix seconds as UTC; "-" for None."""
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
