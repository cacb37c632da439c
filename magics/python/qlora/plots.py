"""Charts as matplotlib figures, from the descriptions that the C side makes. pyplot and rcParams are not touched."""
import io
import warnings

INK, QUIET, GRID, LINE = "#1f2933", "#66727f", "#e7eaee", "#aab3bd"


def _text(text):
    """A name as it is: not read as TeX, nor left out of a legend for its underscore."""
    text = text.replace("$", r"\$")
    return " " + text if text.startswith("_") else text


def _numbers(values):
    return [float("nan") if v is None else v for v in values]


def _series(ax, s):
    x, y, colour, kind = _numbers(s["x"]), _numbers(s["y"]), s["colour"], s["kind"]
    if kind == "faint":
        ax.plot(x, y, color=colour, alpha=0.28, linewidth=0.9, solid_joinstyle="round")
    elif kind == "wide":
        ax.plot(x, y, color=colour, alpha=0.35, linewidth=4.5, solid_joinstyle="round", solid_capstyle="round", label=_text(s["name"]))
    elif kind == "dots":
        ax.plot(x, y, "o", markersize=5, markerfacecolor="white", markeredgecolor=colour, markeredgewidth=1.4, label=_text(s["name"]))
    elif kind == "cross":
        ax.plot(x, y, "x", markersize=6, markeredgecolor=colour, markeredgewidth=1.4, label=_text(s["name"]))
    elif kind == "stack":
        ax.fill_between(x, _numbers(s["low"]), y, color=colour, linewidth=0, label=_text(s["label"]))
    else:
        lone = sum(v == v for v in y) == 1
        ax.plot(x, y, marker="o" if lone else None, markersize=4, color=colour, linewidth=1.6,
                solid_joinstyle="round", solid_capstyle="round", label=_text(s["name"]))


def draw_panel(ax, panel, xlabel=None, title=None, xlim=None, legend="top"):
    """One panel on an Axes, in the house's style; everything is set on this Axes alone."""
    from matplotlib.ticker import MaxNLocator
    for s in panel["series"]:
        _series(ax, s)
    if panel.get("zero"):
        ax.axhline(0, color=LINE, linewidth=0.8, zorder=0.5)
    if panel.get("floor"):
        top = panel.get("ymax") or 1.06 * max((v for s in panel["series"] for v in s["y"] if v is not None), default=1)
        ax.set_ylim(0, top or 1)
    if xlim and xlim[0] < xlim[1]:
        pad = 0.01 * (xlim[1] - xlim[0])
        ax.set_xlim(xlim[0] - pad, xlim[1] + pad)
    ax.grid(True, axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(LINE)
    ax.tick_params(colors=QUIET, labelsize=8.5, length=0, pad=5)
    if panel.get("flat"):
        ax.set_yticks([0], ["0"])
    else:
        ax.yaxis.set_major_locator(MaxNLocator(5 if panel.get("weight", 1) >= 1 else 3))
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=xlabel == "step"))
    ax.set_ylabel(_text(panel["ylabel"]), color=QUIET, fontsize=8.5)
    if xlabel:
        ax.set_xlabel(_text(xlabel), color=QUIET, fontsize=8.5)
    if title:
        ax.set_title(_text(title), loc="left", color=INK, fontsize=10, fontweight="bold", pad=10)
    named = {}
    for handle, label in zip(*ax.get_legend_handles_labels()):
        named.setdefault(label, handle)
    if title and named and legend == "right":
        ax.legend(list(named.values())[::-1], list(named)[::-1], loc="upper left", bbox_to_anchor=(1.01, 1.04), frameon=False, fontsize=8.5,
                  labelcolor=INK, handlelength=0.8, handleheight=0.8, borderaxespad=0)
    elif title and named:
        ax.legend(named.values(), named.keys(), loc="lower right", bbox_to_anchor=(1.0, 1.0), ncol=min(len(named), 5), frameon=False,
                  fontsize=8.5, labelcolor=INK, handlelength=1.4, columnspacing=1.4, borderaxespad=0.2)
    if panel.get("text"):
        ax.text(0.995, 0.93, _text(panel["text"]), transform=ax.transAxes, ha="right", va="top", color=INK, fontsize=8.5,
                bbox={"facecolor": ax.get_facecolor(), "edgecolor": "none", "pad": 1.5})   # no line of the grid through the words


def _xlim(chart):
    xs = [x for p in chart["panels"] for s in p["series"] for x in s["x"] if x is not None]
    xs += [chart[k] for k in ("xmin", "xmax") if k in chart]
    return (min(xs), max(xs)) if xs else None


def figure(chart, dpi=160):
    """A new Figure with its own canvas, and its Axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    fig = Figure(figsize=(chart["width"] / 100, chart["height"] / 100), dpi=dpi, facecolor="white", layout="constrained")
    FigureCanvasAgg(fig)
    panels = chart["panels"]
    axes = fig.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [p["weight"] for p in panels]})[:, 0]
    draw(chart, list(axes))
    return fig, list(axes)


def draw(chart, axes):
    panels, xlim = chart["panels"], _xlim(chart)
    for i, (ax, panel) in enumerate(zip(axes, panels)):
        draw_panel(ax, panel, chart["xlabel"] if i == len(panels) - 1 else None, chart["title"] if i == 0 else None, xlim,
                   chart.get("legend", "top"))


def png(chart):
    """The chart as PNG bytes; None where matplotlib is not there."""
    try:
        fig, _ = figure(chart)
    except ImportError:
        return None
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")   # a name may hold what the font does not
        fig.savefig(out, format="png")
    return out.getvalue()
