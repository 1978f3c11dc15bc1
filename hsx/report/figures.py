"""The report's figures, out of its document and the drawn states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from hsx.report.html import TIMES
from hsx.report.svg import ACCENT, BAD, FULL, LINE, MUTED, TEXT, WARN, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from hsx.report.states import DrawnStates

UNITS: Final = ((2 * 86400.0, 86400.0, "days"), (2 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From how many seconds on which unit is used, its seconds and name."""
RIDGE_BINS: Final = 80
HEAT_COLOURS: Final = LinearSegmentedColormap.from_list("norms", ["#2355b8", "#6f9df0", "#c9ced6", "#f0b35c", "#c5491f"])
"""Below the median blue, above it orange; the middle stands out neither on white nor on black."""
FLOOR: Final = 0.25
"""A heat map's scale reaches at least so many doublings from the median: noise is not to look like structure."""


def throughput(timeline: dict[str, Any], ends: list[float]) -> str:
    """Committed tokens per second over the job, and where a server ended."""
    rates, edges = rates_of(timeline)
    seconds, unit = next((size, name) for least, size, name in UNITS if edges[-1] - edges[0] >= least)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.stairs(rates, edges / seconds, fill=True, color=ACCENT, alpha=0.22)
        axes.stairs(rates, edges / seconds, color=ACCENT, linewidth=1.4)
        for number, end in enumerate(ends):
            at = (end - timeline["began"]) / seconds
            axes.axvline(at, color=BAD, linewidth=1, linestyle=(0, (3, 2)), label=None if number else "server voided")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{unit} since the job began")
        axes.set_ylabel("tokens/s")
        _thousands(axes, "y")
        axes.grid(visible=False, axis="x")
        if ends:
            figure.legend(loc="outside upper right")

    return drawing(draw, "throughput", "Committed tokens per second over the job, with restarts of the server", 2.3, width=FULL)


def rates_of(timeline: dict[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tokens per second of each slice of a timeline, and its n + 1 edges in seconds since the job began.

    The last slice ends with the last commit: it is as long as the others only by chance.
    """
    step, span = timeline["step"], max(timeline["ended"] - timeline["began"], 1e-3)
    count = int(span / step) + 1
    tokens = np.zeros(count)
    for entry in timeline["slices"]:
        tokens[min(entry["number"], count - 1)] += entry["tokens"]
    edges = np.minimum(np.arange(count + 1) * step, span)
    if count > 1 and edges[-1] - edges[-2] < step / 2:  # a sliver would have any rate
        edges, tokens = np.delete(edges, -2), np.append(tokens[:-2], tokens[-2] + tokens[-1])
    return tokens / np.maximum(np.diff(edges), 1e-3), edges


def lengths(facts: dict[str, Any]) -> str:
    """Samples by prompt length and state."""
    width, bins = facts["width"], facts["bins"]
    edges = np.arange(len(bins["committed"]) + 1) * width

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        below = np.zeros(len(edges) - 1)
        for state, colour, alpha in (("committed", ACCENT, 0.85), ("pending", MUTED, 0.45), ("quarantined", BAD, 0.9)):
            counts = np.array(bins[state], float)
            if counts.any():
                axes.bar(edges[:-1], counts, width * 0.92, below, align="edge", color=colour, alpha=alpha, label=state)
            below += counts
        for share, at in (("median", facts["p50"]), ("99 %", facts["p99"])):
            axes.axvline(at, color=TEXT, linewidth=0.9, linestyle=(0, (2, 2)))
            axes.annotate(
                share, (at, 1), xycoords=("data", "axes fraction"), xytext=(3, -8), textcoords="offset points", size=8
            )
        axes.set_xlabel("tokens of a sample")
        axes.set_ylabel("samples")
        axes.set_xlim(0, edges[-1])
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        _thousands(axes, "x")
        _thousands(axes, "y")
        axes.grid(visible=False, axis="x")
        figure.legend(loc="outside upper left", ncols=3, columnspacing=1.2, handlelength=1)

    return drawing(draw, "lengths", "Histogram of prompt lengths by state", 2.7)


def norms(drawn: DrawnStates) -> str:
    """How norms are distributed, one ridge for each state, on a logarithmic axis."""
    values = np.where(drawn.norms > 0, drawn.norms, np.nan).astype(np.float64)
    firsts = [float(np.median(drawn.first[:, at])) if len(drawn.first) else np.nan for at in range(len(drawn.names))]
    known = np.array([np.nanmin(values), np.nanmax(values), *(first for first in firsts if first > 0)], np.float64)
    low, high = np.log10(known.min()) - 0.08, np.log10(known.max()) + 0.08
    edges = np.linspace(low, high, RIDGE_BINS + 1)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for at, name in enumerate(drawn.names):
            counts, _ = np.histogram(np.log10(values[:, at][np.isfinite(values[:, at])]), edges)
            base = len(drawn.names) - 1 - at
            heights = base + 0.8 * counts / max(counts.max(), 1)
            axes.stairs(heights, 10**edges, baseline=base, fill=True, color=ACCENT, alpha=0.35)
            axes.plot([10 ** edges[0], 10 ** edges[-1]], [base, base], color=LINE, linewidth=0.8)
            axes.plot([np.nanmedian(values[:, at])] * 2, [base, base + 0.8], color=ACCENT, linewidth=1.6)
            if firsts[at] > 0:
                axes.plot(
                    firsts[at], base + 0.13, "D", color=WARN, markersize=4.5, label=None if at else "first token (median)"
                )
            axes.annotate(
                name, (0, base), xycoords=("axes fraction", "data"), xytext=(-6, 8), textcoords="offset points", ha="right"
            )
        axes.set_xscale("log")
        axes.set_xlim(10**low, 10**high)
        axes.set_ylim(-0.1, len(drawn.names))
        axes.set_yticks([])
        axes.set_xlabel("norm of a token's state, without first tokens")
        _decades(axes)
        axes.spines["left"].set_visible(False)
        if any(first > 0 for first in firsts):
            figure.legend(loc="outside upper right", handletextpad=0.2)

    height = min(1.0 + 0.55 * len(drawn.names), 14.0)
    return drawing(draw, "norms", "Distributions of norms by state", height)


def channels(drawn: DrawnStates, facts: list[dict[str, Any]]) -> str:
    """Root mean square of each channel over its state's median, largest first: outlier channels stick out at the left."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        shades = np.linspace(0.35, 1.0, len(facts))
        for at, layer in enumerate(facts):
            rms = np.sqrt(drawn.mean_square[at])
            if layer["median_rms"] > 0:
                ratios = np.sort(rms)[::-1] / layer["median_rms"]
                axes.plot(np.arange(1, len(ratios) + 1), ratios, color=ACCENT, alpha=float(shades[at]), linewidth=1.5)
                axes.annotate(
                    layer["name"], (1, ratios[0]), xytext=(-4, 0), textcoords="offset points", ha="right", va="center", size=8
                )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.axhline(1, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.set_xlim(left=0.45)
        axes.set_xlabel("channel, by rank")
        axes.set_ylabel("times the median")
        _decades(axes)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{TIMES}"))
        axes.yaxis.set_minor_formatter(NullFormatter())

    return drawing(draw, "channels", "Root mean square of each channel by rank", min(1.0 + 0.55 * len(facts), 4.0))


def heat_map(number: int, facts: dict[str, Any], names: tuple[str, ...], limit: float) -> str:
    """One sample, states by tokens, coloured by how many doublings a norm is from its state's median."""
    values = np.array(facts["columns"]).T

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        shown = axes.imshow(
            values, aspect="auto", interpolation="nearest", cmap=HEAT_COLOURS, vmin=-limit, vmax=limit,
            extent=(0, facts["shown"], len(names), 0),
        )  # fmt: skip
        axes.set_yticks(np.arange(len(names)) + 0.5, names)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        _thousands(axes, "x")
        axes.set_xlabel("stored token" if facts["stored"] < facts["tokens"] else "token")
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        bar = figure.colorbar(shown, ax=axes, pad=0.01, fraction=0.05, extend="both")
        bar.outline.set_visible(False)
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{2**value:.2g}{TIMES}"))
        bar.ax.yaxis.set_major_locator(MaxNLocator(4))

    height = min(0.75 + 0.24 * len(names), 6.0)
    return drawing(draw, f"heat-{number}", "Norms by token and state", max(height, 1.5))


def heat_limit(heats: list[dict[str, Any]]) -> float:
    """Doublings at which the scale of all heat maps ends: what 98 % of the tokens do not exceed, without the first ones."""
    rest = [np.abs(np.array(facts["columns"])[1:]).ravel() for facts in heats]
    values = np.concatenate([np.empty(0), *rest])
    return max(float(np.quantile(values, 0.98)) if len(values) else 0.0, FLOOR)


def _thousands(axes: Axes, which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _decades(axes: Axes) -> None:
    axes.xaxis.set_major_locator(LogLocator(numticks=7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
