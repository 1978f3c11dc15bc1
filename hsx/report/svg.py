"""Figures of matplotlib as SVG that stands inside a page: its colours and fonts are the page's, light or dark."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT: Final = "#1a2b01"
MUTED: Final = "#1a2b02"
LINE: Final = "#1a2b03"
ACCENT: Final = "#1a2b04"
GOOD: Final = "#1a2b05"
WARN: Final = "#1a2b06"
BAD: Final = "#1a2b07"
_VARIABLES: Final = {
    TEXT: "--text",
    MUTED: "--muted",
    LINE: "--line",
    ACCENT: "--accent",
    GOOD: "--good",
    WARN: "--warn",
    BAD: "--bad",
}
"""Colours that nothing else has, in place of the page's variables, which matplotlib cannot know."""
STYLE: Final[dict[str, Any]] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: no look for fonts, no warning that one is missing
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
WIDE: Final = 5.4
FULL: Final = 11.2
NARROW: Final = 3.5
"""Widths in inches: half of a desktop's page, all of it, a phone's."""


def drawing(draw: Callable[[Figure], None], name: str, what: str, height: float, *, width: float = WIDE) -> str:
    """HTML of one figure, drawn twice: for desktops and, narrower, for phones; the page's style shows one of them.

    Args:
        draw: draws into an empty figure.
        name: of letters and "-"; makes the identifiers within it unique to the page.
        what: what it shows, for those who do not see it.
        height: in inches.
        width: of the desktop's, in inches.
    """
    parts = []
    for kind, inches in (("desktop", width), ("phone", NARROW)):
        style: Any = {**STYLE, "svg.hashsalt": f"{name}-{kind}"}  # the stubs of some releases list every key
        with mpl.rc_context(style):
            figure = Figure(figsize=(inches, height))
            draw(figure)
            written = io.StringIO()
            figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
        parts.append(f'<div class="{kind}">{_inline(written.getvalue(), f"{name}-{kind}", what)}</div>')
    return f'<div class="figure" id="figure-{name}">{"".join(parts)}</div>'


def _inline(text: str, prefix: str, what: str) -> str:
    """The `svg` element alone, with the page's colours and fonts, and without what would meet that of other figures."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r"font: ([^;\"]*?)'DejaVu Sans'[^;\"]*", r"font: \1var(--sans)", text)
    wanted = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in wanted else "", text)
    text = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{prefix}-", text)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{what}"', 1).strip()
