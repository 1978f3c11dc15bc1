"""Text of others, such as ids, evidence and answers, as it may be shown: no terminal obeys it, no page hides a part of it."""

from __future__ import annotations


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with a backslash escape for each character that is not printable, directions of writing among them.

    Args:
        text: any text.
        keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
