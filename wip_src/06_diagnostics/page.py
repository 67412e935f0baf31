# %% [markdown]
# # What a page is made of
#
# > Escaped text, numbers as people write them, charts as hand-written SVG, a style sheet, and the shell that makes one self-contained HTML file of them.
#
# Whoever gets a run handed over wants one file that opens anywhere: on a laptop without network, in a mail, on paper. So a page of ours has no script, no font and no picture from elsewhere; charts are SVG written by hand, and a
# content security policy in its head forbids everything that is not in the file. Dark or light follows the reader's system.
#
# This chapter makes the parts: text, numbers, charts, tables, the style sheet, the frame around them, and a judge that reads a finished page and says what in it could load or run something. The next chapter turns what a run left behind
# into sections, the one after it puts the page together.

# %%
#| default_exp diagnostics.page

# %%
#| export
from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser

import numpy as np

from scalelab.core.config import human_count

# %%
#| hide
import xml.dom.minidom

from IPython.display import SVG, display

# %% [markdown]
# ## Text, and why all of it is escaped
# The page shows *documents*: web pages, code, junk. A document that holds `<script>` must come out as the characters it consists of. Every string passes through
# `text`, control characters become visible, and lone surrogates (which no file can hold) are replaced.

# %%
#| export
def text(value) -> str:
    "`value` as HTML text: markup escaped, control characters shown as pictures (U+2400 on), surrogates replaced."
    plain = str(value).encode("utf-8", "replace").decode("utf-8")
    plain = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", lambda m: chr(0x2400 + ord(m[0])), plain)
    return html.escape(plain, quote=True)

# %%
assert text("<script>alert('x')</script>") == "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;"
assert text("a\x00b\ud800") == "a␀b?" and text("训练") == "训练"

# %% [markdown]
# Numbers are for reading, not for computing on: three digits that mean something, thousands in groups, and a dash where there is none. A NaN in a table is information, the word "nan" in the middle of a sentence is a bug.

# %%
#| export
def figure(value, digits: int = 3) -> str:
    "A number as people write it: 1,204; 0.0123; 2.1e-7; a dash for None or NaN, ∞."
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {True: "yes", False: "no", None: "–"}.get(value, text(value))
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    shown = re.sub(r"e([+-])0", r"e\1", f"{value:.{digits}g}")
    if "e" in shown or abs(value) < 1:
        return shown
    return f"{value:.{max(0, digits - len(str(int(abs(value)))))}f}"


def duration(seconds: float) -> str:
    "0.42 s, 12.3 s, 3 min 20 s, 2 h 05 min."
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"

# %%
shown = [figure(v) for v in (1204, 0.01234, 2.1e-7, 2.345, 12.345, 123456.7, None, math.nan, math.inf, True, "<b>")]
print(*shown, sep="   ")
assert shown == ["1,204", "0.0123", "2.1e-7", "2.35", "12.3", "123,457", "–", "–", "∞", "yes", "&lt;b&gt;"]
assert [duration(s) for s in (0.42, 12.34, 200, 7500)] == ["0.42 s", "12.3 s", "3 min 20 s", "2 h 05 min"]

# %% [markdown]
# ## Charts by hand
# A chart is axes, ticks at round numbers, and paths. Written out, that is less code than persuading a plotting library to follow two colour themes: colours are CSS
# classes (`s0`, `s1`, …), so the page's theme decides them.
#
# Ticks stand at round numbers, whatever the range:

# %%
#| export
def ticks(low: float, high: float, count: int = 5) -> list[float]:
    "About `count` round numbers (1, 2, 2.5 or 5 times a power of ten) within [low, high]."
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]

# %%
assert ticks(0, 10) == [0, 2, 4, 6, 8, 10] and ticks(3.1, 8.3) == [4, 6, 8] and ticks(2, 2) == [2]

# %% [markdown]
# A run of a million steps can't be a path of a million points. Taking every thousandth would drop most spikes, and spikes are what people look for; an average would flatten them. So of each stretch the lowest and the highest point stay.

# %%
#| export
def thin(x: Sequence[float], y: Sequence[float], limit: int = 1200) -> tuple[np.ndarray, np.ndarray]:
    "At most `limit` points that keep every peak: the lowest and the highest of each stretch, in order."
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(x) <= limit:
        return x, y
    keep = set()
    for part in np.array_split(np.arange(len(x)), limit // 2):
        values = y[part]
        if np.isfinite(values).any():
            keep |= {int(part[np.nanargmin(values)]), int(part[np.nanargmax(values)])}
        else:
            keep.add(int(part[0]))
    index = sorted(keep)
    return x[index], y[index]

# %%
y = np.zeros(100_000)
y[54_321] = 9
y[77_777] = np.nan
tx, ty = thin(np.arange(100_000), y)
assert len(tx) <= 1200 and ty.max() == 9 and tx[ty.argmax()] == 54_321  # no spike is lost by thinning

# %% [markdown]
# ### Where a point lands
# The frame knows the range of the data and the size of the picture, and turns one into the other. Pixels are rounded to a tenth: finer would only be bytes. On a logarithmic axis zeros are drawn at its foot, because a difference of exactly zero is the best news that a
# comparison can bring and must not vanish.

# %%
#| export
@dataclass
class Frame:
    "The rectangle of a chart and the range of the data in it: x0..x1 across, low..high up (powers of ten if `log`); sizes in pixels."

    width: int
    height: int
    x0: float
    x1: float
    low: float
    high: float
    log: bool = False
    left: int = 58
    top: int = 18

    @property
    def right(self) -> int:
        "Pixel of the right end of the axes."
        return self.width - 14

    @property
    def bottom(self) -> int:
        "Pixel of the lower end of the axes."
        return self.height - 38

    def px(self, x: float) -> float:
        "Horizontal pixel of a data point."
        return round(self.left + (x - self.x0) / (self.x1 - self.x0) * (self.right - self.left), 1)

    def py(self, y: float) -> float:
        "Vertical pixel of a data point, kept inside the axes."
        v = (math.log10(y) if y > 0 else self.low) if self.log else y
        share = min(max((v - self.low) / (self.high - self.low), 0.0), 1.0)
        return round(self.bottom - share * (self.bottom - self.top), 1)

# %%
f = Frame(1040, 260, x0=0, x1=10, low=0, high=4)
assert (f.px(0), f.px(10), f.py(0), f.py(4)) == (f.left, f.right, f.bottom, f.top) and f.py(99) == f.top
f = Frame(1040, 260, 0, 2, low=-10, high=-4, log=True)
assert f.py(0.0) == f.bottom and f.py(1e-9) > f.py(1e-5) == round(f.bottom - 5 / 6 * (f.bottom - f.top), 1)

# %% [markdown]
# The frame around given series has a little air above and below, holds the dashed levels too, and stands on whole powers of ten when it is logarithmic. Series without a single finite point get a frame as well: a run whose loss was NaN from the start still has a page.

# %%
#| export
def around(series: list[dict], levels: Sequence[tuple[float, str]] = (), width: int = 1040, height: int = 260, log: bool = False, zero: bool = False) -> Frame:
    "The frame that holds all finite points of `series` (dicts with x and y) and the `levels`; with `zero` it stands on zero."
    xs = np.concatenate([np.asarray(s["x"], float) for s in series])
    ys = np.concatenate([np.asarray(s["y"], float) for s in series] + [np.array([v for v, _ in levels], float)])
    good = ys[np.isfinite(ys) & ((ys > 0) | (not log))]
    low, high = (float(good.min()), float(good.max())) if len(good) else (0.0, 1.0)
    if log and len(good):
        low, high = math.floor(math.log10(low)) - 0.3, math.ceil(math.log10(max(high, low * 10)))
    elif log:
        low, high = -1.3, 0.0
    else:
        pad = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
        low, high = (0.0 if zero else low - pad), high + pad
    x0, x1 = (float(xs.min()), float(xs.max())) if len(xs) else (0.0, 1.0)
    return Frame(width, height, x0, x1 if x1 > x0 else x0 + 1, low, high, log)

# %%
f = around([{"x": [1, 5], "y": [2.0, math.nan]}], levels=[(4.0, "goal")])
assert (f.x0, f.x1) == (1, 5) and f.low < 2 and f.high > 4
f = around([{"x": [0, 1], "y": [0.0, 3e-7]}], log=True)
assert f.low == -7.3 and f.high == -5
for log in (False, True):  # nothing finite, nothing above zero, nothing at all: still a frame
    for s in ([math.nan, math.nan], [0.0, 0.0], []):
        f = around([{"x": range(len(s)), "y": s}], log=log)
        assert f.high > f.low and f.x1 > f.x0

# %% [markdown]
# A NaN must break the line, and not turn up as the word "nan" in the path, which makes browsers drop the rest of it.

# %%
#| export
def stroke(frame: Frame, x: Sequence[float], y: Sequence[float]) -> str:
    "SVG path data of a line; a new stroke after every gap."
    parts, pen = [], "M"
    for a, b in zip(*thin(x, y)):
        if math.isfinite(b):
            parts.append(f"{pen}{frame.px(a)} {frame.py(b)}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)

# %%
y = np.array([3, 2, math.nan, 2, math.inf, 1])
path = stroke(around([{"x": range(6), "y": y}]), np.arange(6.0), y)
print(path)
assert path.count("M") == 3 and "nan" not in path and "inf" not in path

# %% [markdown]
# ### Axes, marks, tooltips
# Around the lines stand the grid and its labels; a logarithmic axis is labelled with powers of ten, a long one with every second.

# %%
#| export
def grid(frame: Frame, x_label: str = "step", y_label: str = "") -> str:
    "Grid, tick labels and axis names, as SVG."
    f, raised = frame, str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    if f.log:
        span = range(math.ceil(f.low), math.floor(f.high) + 1)
        rows = [(10.0**k, "10" + str(k).translate(raised)) for k in span if len(span) < 8 or k % 2 == 0]
    else:
        rows = [(v, human_count(v) if abs(v) >= 10_000 else f"{v:g}") for v in ticks(f.low, f.high, 4)]
    out = [
        f'<line class="g" x1="{f.left}" x2="{f.right}" y1="{f.py(v)}" y2="{f.py(v)}"/>'
        f'<text class="k" x="{f.left - 8}" y="{f.py(v) + 4}" text-anchor="end">{label}</text>'
        for v, label in rows
    ]
    out += [
        f'<text class="k" x="{f.px(v)}" y="{f.bottom + 17}" text-anchor="middle">{v:g}</text>'
        for v in ticks(f.x0, f.x1, 8 if f.width > 700 else 5)
        if v == int(v) or f.x1 - f.x0 < 5
    ]
    out.append(f'<line class="ax" x1="{f.left}" x2="{f.right}" y1="{f.bottom}" y2="{f.bottom}"/>')
    out.append(f'<text class="k" x="{f.right}" y="{f.height - 5}" text-anchor="end">{text(x_label)}</text>')
    out.append(f'<text class="k" x="{f.left}" y="{f.top - 7}">{text(y_label)}</text>')
    return "".join(out)

# %%
drawn = grid(Frame(520, 190, 0, 100, low=-8, high=-4, log=True), "step", "loss <nats>")
assert "10⁻⁸" in drawn and ">100<" in drawn and "loss &lt;nats&gt;" in drawn
assert "10⁻⁷" not in grid(Frame(520, 190, 0, 1, low=-16, high=-4, log=True)) and ">0.5<" in grid(Frame(520, 190, 0, 1, 0, 1))

# %% [markdown]
# Marks are vertical lines with a name (a resume, a fault), levels dashed horizontal ones (a tolerance, a baseline). Without a script there is still a tooltip: invisible columns, each with a `<title>` that the browser shows.

# %%
#| export
def guides(frame: Frame, lead: dict, marks: Sequence[tuple[float, str]] = (), levels: Sequence[tuple[float, str]] = (), x_label: str = "step") -> str:
    "Levels, marks, and invisible columns whose tooltips tell the values of the series `lead`, as SVG."
    f, out = frame, []
    for v, label in levels:
        out.append(
            f'<line class="lv" x1="{f.left}" x2="{f.right}" y1="{f.py(v)}" y2="{f.py(v)}"/>'
            f'<text class="lt" x="{f.right - 4}" y="{f.py(v) - 5}" text-anchor="end">{text(label)}</text>'
        )
    for x, label in marks:
        end = f.px(x) > 0.8 * f.width
        out.append(
            f'<line class="mk" x1="{f.px(x)}" x2="{f.px(x)}" y1="{f.top}" y2="{f.bottom}"/>'
            f'<text class="mt" x="{f.px(x) + (-5 if end else 5)}" y="{f.top + 10}" text-anchor="{"end" if end else "start"}">{text(label)}</text>'
        )
    x, y = thin(lead["x"], lead["y"], 160)
    wide = (f.right - f.left) / max(len(x), 1)
    out += [
        f'<rect class="h" x="{f.px(a) - wide / 2:.1f}" y="{f.top}" width="{wide:.1f}" height="{f.bottom - f.top}">'
        f"<title>{text(x_label)} {a:g}: {text(lead['name'])} {figure(float(b), 4)}</title></rect>"
        for a, b in zip(x, y)
    ]
    return "".join(out)

# %%
drawn = guides(Frame(520, 190, 0, 100, 0, 4), {"name": "a & b", "x": [0, 100], "y": [1.0, 2.0]}, [(3, "<resume>"), (99, "late")], [(2.5, "unigram")])
assert "&lt;resume&gt;" in drawn and 'text-anchor="end">late' in drawn and ">unigram<" in drawn  # a late mark is labelled to its left
assert drawn.count("<title>") == 2 and "a &amp; b" in drawn

# %% [markdown]
# All together. A series is a dict with a name, x, y, a colour from 0 to 5, and a kind: a plain line, a *faint* one behind others, or dots.

# %%
#| export
def chart(
    series: list[dict], *, width: int = 1040, height: int = 260, x_label: str = "step", y_label: str = "", log: bool = False,
    marks: Sequence[tuple[float, str]] = (), levels: Sequence[tuple[float, str]] = (), zero: bool = False,
) -> str:
    """A line chart: an `<svg>` in a `<div>` that scrolls on narrow screens.

    series: dicts with name, x, y, colour (0..5), and kind: "line", "faint" (thin, pale) or "dots". Points that are not finite interrupt a line; on a
    logarithmic axis zeros are drawn at its foot. marks: (x, label) vertical lines; levels: (y, label) dashed horizontal ones. Sizes in pixels.
    """
    f, out = around(series, levels, width, height, log, zero), []
    for s in series:
        x, y, c = np.asarray(s["x"], float), np.asarray(s["y"], float), f"s{s.get('colour', 0)}"
        if s.get("kind") == "dots":
            out.append(f'<path class="l thin {c}" d="{stroke(f, x, y)}"/>')
            out += [
                f'<circle class="d {c}" cx="{f.px(a)}" cy="{f.py(b)}" r="4"><title>{text(s["name"])}, {text(x_label)} {a:g}: {figure(float(b), 4)}</title></circle>'
                for a, b in zip(x, y) if math.isfinite(b)
            ]
        else:
            out.append(f'<path class="l {"faint" if s.get("kind") == "faint" else ""} {c}" d="{stroke(f, x, y)}"/>')
    label, wide = text(", ".join(s["name"] for s in series)), "wide" if width > 700 else ""
    return (
        f'<div class="chart"><svg class="{wide}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f"{grid(f, x_label, y_label)}{guides(f, series[0], marks, levels, x_label)}{''.join(out)}</svg></div>"
    )


def legend(series: list[dict]) -> str:
    "Coloured names, for charts with more than one series."
    names = "".join(f'<span><i class="b{s.get("colour", 0)}"></i>{text(s["name"])}</span>' for s in series)
    return f'<div class="legend">{names}</div>'

# %%
c = chart([{"name": "loss & more", "x": range(6), "y": y}], marks=[(3, "<resume>")], levels=[(2.5, "unigram")])
xml.dom.minidom.parseString(c)  # well-formed, says Python's own parser
assert "nan" not in c and "<resume>" not in c and c.count('class="wide"') == 1
assert legend([{"name": "<a>", "colour": 3}]) == '<div class="legend"><span><i class="b3"></i>&lt;a&gt;</span></div>'
assert "<circle" in chart([{"name": "held out", "x": [1, 2], "y": [3.0, 4.0], "kind": "dots"}])

# %% [markdown]
# ## The style sheet
# One sheet for the whole page, in three parts. First the themes and the type: colours are variables, and the dark theme only changes variables. The font list ends with Chinese faces of the common systems, since the corpus is partly Chinese.

# %%
#| export
_TYPE = """
:root{--bg:#f5f6f8;--card:#fff;--ink:#171b21;--soft:#5a6472;--line:#e4e7ec;--wash:#f1f3f6;--accent:#1f5fae;--ok:#13795b;--okw:#e3f4ed;--bad:#b42318;--badw:#fdeceb;
--warn:#9a6700;--c0:#2563ae;--c1:#d9600a;--c2:#12866a;--c3:#8b5cc7;--c4:#c2417c;--c5:#8a94a3;--shadow:0 1px 2px rgba(20,28,40,.05),0 6px 20px rgba(20,28,40,.045)}
@media (prefers-color-scheme:dark){:root{--bg:#0e1116;--card:#161b22;--ink:#e7ebf0;--soft:#9aa5b3;--line:#29303a;--wash:#1c222b;--accent:#74b1f7;--ok:#4cc79a;--okw:#12302a;
--bad:#ff8a7e;--badw:#3a1a1a;--warn:#e0b252;--c0:#6aabf2;--c1:#f5934a;--c2:#46c5a0;--c3:#b794ea;--c4:#ee7fb0;--c5:#7f8a99;--shadow:none}}
*{box-sizing:border-box}html{-webkit-text-size-adjust:100%;color-scheme:light dark}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"Noto Sans","PingFang SC","Hiragino Sans GB",
"Microsoft YaHei","Noto Sans CJK SC","Noto Sans SC","Source Han Sans SC",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1140px;margin:0 auto;padding:40px 24px 64px}
code,pre,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono","Noto Sans Mono CJK SC","Noto Sans CJK SC",monospace;font-size:.88em}
header{margin-bottom:22px}.eyebrow{color:var(--soft);font-size:12.5px;letter-spacing:.09em;text-transform:uppercase}
h1{font-size:34px;line-height:1.15;letter-spacing:-.02em;margin:4px 0 8px;font-weight:680;overflow-wrap:anywhere}
h2{font-size:18px;letter-spacing:-.01em;margin:0 0 2px;font-weight:640}h3{font-size:13px;margin:0 0 6px;font-weight:600;color:var(--soft)}
.lead{color:var(--soft);margin:0 0 16px;max-width:78ch}
.badge{display:inline-block;padding:3px 11px;border-radius:99px;font-size:13px;font-weight:600}.badge.ok{background:var(--okw);color:var(--ok)}.badge.bad{background:var(--badw);color:var(--bad)}
.badge.off{background:var(--wash);color:var(--soft)}
"""

# %% [markdown]
# Then what the sections look like: cards, tiles, the strip of times, the charts and their colours.

# %%
#| export
_CARDS = """section{background:var(--card);border:1px solid var(--line);border-radius:14px;padding:22px 24px;margin:16px 0;box-shadow:var(--shadow);break-inside:avoid-page}
.kpis{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:18px 0 16px}
.kpi{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:13px 16px;box-shadow:var(--shadow)}
.kpi b{display:block;font-size:23px;line-height:1.25;font-weight:660;letter-spacing:-.015em}.kpi span{display:block;color:var(--soft);font-size:12.5px;line-height:1.4;margin-top:2px}
.time{display:flex;gap:2px;height:9px;border-radius:6px;overflow:hidden;margin:2px 0 14px}.time i{background:var(--ok);opacity:.78;min-width:2px}.time i:nth-child(even){opacity:.5}.time i.bad{background:var(--bad);opacity:1}
.stages{display:grid;grid-template-columns:repeat(auto-fill,minmax(330px,1fr));gap:0 28px}
.stage{display:grid;grid-template-columns:22px 96px 1fr auto;gap:4px;align-items:baseline;padding:7px 0;border-top:1px solid var(--line)}
.stage .n{font-weight:600}.stage .s{color:var(--soft);font-size:13px}.stage .t{color:var(--soft);font-size:13px;text-align:right;padding-left:8px;white-space:nowrap}
.dot{font-weight:700;color:var(--ok)}.dot.bad{color:var(--bad)}.dot.off{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:14px}.grid2{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:20px 28px}
.chart{overflow-x:auto}svg{display:block;width:100%;height:auto}svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:var(--soft)}
.g{stroke:var(--line)}.ax{stroke:var(--soft);opacity:.5}.l{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.faint{stroke-width:1;opacity:.5}.thin{stroke-width:1.2;opacity:.7}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}.s4{stroke:var(--c4)}.s5{stroke:var(--c5)}
.d{stroke:var(--card);stroke-width:1.5}.d.s0{fill:var(--c0)}.d.s1{fill:var(--c1)}.d.s2{fill:var(--c2)}.d.s3{fill:var(--c3)}.d.s4{fill:var(--c4)}.d.s5{fill:var(--c5)}
.h{fill:transparent}.h:hover{fill:var(--soft);opacity:.12}.mk{stroke:var(--bad);stroke-dasharray:2 3;opacity:.8}svg .mt{fill:var(--bad);font-size:11px}.lv{stroke:var(--soft);stroke-dasharray:5 4;opacity:.75}svg .lt{font-size:11px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--soft);margin:0 0 8px}.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.b0{background:var(--c0)}.b1{background:var(--c1)}.b2{background:var(--c2)}.b3{background:var(--c3)}.b4{background:var(--c4)}.b5{background:var(--c5)}
"""

# %% [markdown]
# And the smaller things: bars, folded details, tables, findings, samples, and what changes on a narrow screen and on paper.

# %%
#| export
_ROWS = """.row{display:grid;grid-template-columns:170px 1fr 92px;gap:12px;align-items:center;padding:3px 0}.row .v{text-align:right}
.bar{height:13px;border-radius:4px;background:var(--wash);overflow:hidden}.bar i{display:block;height:100%;border-radius:4px;min-width:1px}
.row.sub .bar{height:8px;background:none;width:46%}.row.sub .bar i{opacity:.8}.row.sub{font-size:13.5px;color:var(--soft)}
details>summary{cursor:pointer;list-style:none}details>summary::-webkit-details-marker{display:none}
details.rule>summary .nm::before,details.more>summary::before{content:"▸";display:inline-block;width:1.15em;color:var(--soft)}details.rule[open]>summary .nm::before,details.more[open]>summary::before{content:"▾"}
summary:hover{color:var(--accent)}summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px;border-radius:4px}
.ex{margin:4px 0 10px 20px;display:grid;gap:6px}.ex div{background:var(--wash);border-radius:8px;padding:7px 11px;font-size:13px;white-space:pre-wrap;overflow-wrap:anywhere;max-height:120px;overflow:auto}
.ex small{display:block;color:var(--soft)}
.bpb{display:grid;grid-template-columns:150px 1fr;gap:4px 14px;align-items:center;padding:9px 0;border-top:1px solid var(--line)}.bpb small{color:var(--soft)}
.bpb .bars{display:grid;gap:3px}.bpb .one{display:grid;grid-template-columns:1fr 48px;gap:10px;align-items:center;font-size:13px}.bpb .one .bar{height:10px}
.bpb .best{font-weight:650}
table{border-collapse:collapse;width:100%;font-size:13.5px}th{text-align:left;font-weight:600;color:var(--soft);font-size:12.5px;padding:5px 10px 5px 0;border-bottom:1px solid var(--line)}
.unit{color:var(--soft)}td{padding:5px 10px 5px 0;border-bottom:1px solid var(--line);vertical-align:middle}td.r,th.r{text-align:right}.census table{table-layout:fixed;min-width:760px}.census td.mono{overflow-wrap:anywhere}.census details{margin:8px 0}tr:last-child td{border-bottom:0}.scroll{overflow-x:auto}
.range{position:relative;height:9px;background:var(--wash);border-radius:5px;min-width:130px}.range i{position:absolute;top:0;bottom:0;background:var(--c0);opacity:.55;border-radius:5px;min-width:2px}
.range b{position:absolute;top:-2px;bottom:-2px;width:2px;background:var(--ink)}.range u{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);opacity:.7}
.find{border:1px solid var(--line);border-left:4px solid var(--bad);border-radius:10px;padding:13px 16px;margin:10px 0}.find .top{display:flex;gap:12px;align-items:baseline;flex-wrap:wrap}
.next{font-size:14px}.next code{background:var(--wash);padding:1px 5px;border-radius:5px}.next b{color:var(--accent);margin-right:4px}.find .kind{font-weight:660;font-size:16px}.meter{display:inline-block;width:90px;height:7px;border-radius:4px;background:var(--wash);vertical-align:2px;overflow:hidden}.meter i{display:block;height:100%;background:var(--bad)}
.chips{display:flex;flex-wrap:wrap;gap:6px;margin:9px 0}.chips span{background:var(--wash);border-radius:7px;padding:2px 9px;font-size:12.5px;overflow-wrap:anywhere}.chips em{font-style:normal;color:var(--soft);margin-right:5px}
.sample{background:var(--wash);border-radius:11px;padding:13px 16px;display:flex;flex-direction:column}.sample pre,.sample p{margin:0 0 10px;white-space:pre-wrap;overflow-wrap:anywhere}.sample .p{color:var(--accent);font-weight:620}
.sample small{color:var(--soft);margin-top:auto}.sample pre{font-size:12.5px;line-height:1.5}
.kv{display:grid;grid-template-columns:minmax(120px,max-content) 1fr;gap:3px 18px;font-size:13.5px}.kv dt{color:var(--soft)}.kv dd{margin:0;overflow-wrap:anywhere}
pre.long{background:var(--wash);border-radius:8px;padding:10px 12px;max-height:340px;overflow:auto;font-size:12px}
footer{color:var(--soft);font-size:13px;margin-top:22px}footer ul{margin:4px 0;padding-left:18px}.up{color:var(--ok)}.down{color:var(--bad)}
@media (max-width:760px){main{padding:22px 14px}.grid2{grid-template-columns:1fr}.row{grid-template-columns:116px 1fr 66px}.bpb{grid-template-columns:1fr}h1{font-size:26px}svg.wide{min-width:640px}.row.sub .bar{width:auto}section{padding:16px}}
@media print{body{background:#fff}section,.kpi{box-shadow:none}main{max-width:none;padding:0}}
"""

CSS = _TYPE + _CARDS + _ROWS

# %% [markdown]
# Every opening brace has its partner, every variable that is used is defined in both themes or in the light one, and nothing is fetched: no `url(`, no `@import`.

# %%
assert CSS.count("{") == CSS.count("}") and "url(" not in CSS and "@import" not in CSS and "</" not in CSS
used, defined = set(re.findall(r"var\((--\w+)\)", CSS)), set(re.findall(r"(--\w+):", CSS))
assert used <= defined, used - defined
print(f"{len(CSS) / 1000:.1f} kB of style, {len(defined)} colours and shadows")

# %% [markdown]
# How does a chart look with it? For a picture outside the page, the rules that belong to charts are put into the SVG itself.

# %%
#| export
def standalone(drawn: str) -> str:
    "The first SVG in `drawn` as a document of its own, with the rules of the sheet that it needs, for files and notebooks."
    svg = re.search(r"<svg.*?</svg>", drawn, re.S)[0].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    rules = CSS.split("\n")
    sheet = rules[1:5] + [rule for rule in rules if rule.startswith((".chart{", ".g{", ".s0{", ".d{", ".h{"))]
    return svg.replace("><", "><style>" + "\n".join(sheet) + "</style><", 1)

# %%
alone = xml.dom.minidom.parseString(standalone(c)).documentElement
assert alone.namespaceURI == "http://www.w3.org/2000/svg" and alone.firstChild.tagName == "style" and "--c0:" in standalone(c)

# %%
rng = np.random.default_rng(0)
x = np.arange(1, 301)
loss = (2.2 + 6 * np.exp(-x / 60)) * (1 + 0.03 * rng.standard_t(5, 300))
loss[199:203] = math.nan
smooth = np.convolve(np.nan_to_num(loss, nan=2.4), np.ones(9) / 9, "same")
smooth[:5] = smooth[-5:] = math.nan
held = {"name": "held-out loss", "x": x[24::25], "y": smooth[24::25] * 1.04, "kind": "dots", "colour": 1}
drawn = chart([{"name": "every step", "x": x, "y": loss, "kind": "faint"}, {"name": "averaged", "x": x, "y": smooth}, held],
              y_label="loss (nats per token)", marks=[(150, "resume")], levels=[(6.0, "unigram")])
display(SVG(standalone(drawn)))

# %% [markdown]
# What to see: an invented loss, pale, behind its average; the gap near step 200 where four losses were NaN; dots where held-out text was read; the resume as a mark and a baseline as a level. On the page, hovering tells the values.

# %%
differ = np.abs(1e-8 * 1.08 ** np.arange(60) * rng.normal(1, 0.5, 60))
differ[:3] = 0
drawn = chart([{"name": "fp32", "x": range(60), "y": differ}], height=200, y_label="difference of the losses (nats per token)", log=True, levels=[(1e-5, "tolerance")])
display(SVG(standalone(drawn)))

# %% [markdown]
# What to see: the same on a logarithmic axis. The first three differences are exactly zero and lie at the foot of the picture instead of vanishing.
#
# ## Rows and lists
# A row with a bar is the cheapest chart there is. Dicts become definition lists, nested ones with dotted names, and long texts fold.

# %%
#| export
def bar_row(name: str, share: float, value: str, colour: str, title: str, extra: str = "") -> str:
    "A name (HTML), a bar that fills `share` of its track (0..1), a value."
    return (
        f'<div class="row {extra}" title="{text(title)}"><span>{name}</span><span class="bar"><i class="{colour}" style="width:{100 * share:.2f}%"></i></span>'
        f'<span class="v">{text(value)}</span></div>'
    )


def _flat(values: dict, prefix: str = "") -> list[tuple[str, object]]:
    out = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        out += _flat(value, name + ".") if isinstance(value, dict) and value else [(name, value)]
    return out


def plain(value) -> str:
    "Any JSON value as HTML text: strings escaped, numbers as figures, the rest as JSON."
    if isinstance(value, str):
        return text(value)
    return figure(value) if isinstance(value, (int, float, type(None))) else text(json.dumps(value, ensure_ascii=False))


def key_values(values: dict) -> str:
    "A definition list of a dict; nested dicts become dotted keys, long texts fold."
    out = []
    for key, value in _flat(values):
        shown = plain(value)
        if isinstance(value, str) and (len(value) > 300 or "\n" in value):
            shown = f'<details class="more"><summary>{len(value.splitlines()):,} lines</summary><pre class="long">{text(value[:100_000])}</pre></details>'
        out.append(f"<dt>{text(key)}</dt><dd>{shown}</dd>")
    return f'<dl class="kv">{"".join(out)}</dl>'


def badge(says: str, kind: str) -> str:
    "A small label; kind: ok, bad or off."
    return f'<span class="badge {kind}">{text(says)}</span>'

# %%
assert 'width:70.00%' in bar_row("quality", 0.7, "7", "b0", 'seven "of" ten') and "&quot;of&quot;" in bar_row("", 0, "", "b0", '"of"')
kv = key_values({"a": {"b": 1, "c": {}}, "<k>": "x\ny", "list": [1, "<"], "none": None})
assert "<dt>a.b</dt><dd>1</dd>" in kv and "<dt>a.c</dt><dd>{}</dd>" in kv and "&lt;k&gt;" in kv and "2 lines" in kv
assert "[1, &quot;&lt;&quot;]" in kv and "<dd>–</dd>" in kv and badge("<ok>", "ok") == '<span class="badge ok">&lt;ok&gt;</span>'

# %% [markdown]
# ## The shell
# What stands around the body: the encoding, the policy (nothing may be loaded, styles may stand in the file), the title, the sheet.

# %%
#| export
def shell(title: str, body: str) -> str:
    "A whole HTML file around `body` (HTML): head with policy and style sheet; `title` is plain text."
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><meta name="color-scheme" content="light dark"><title>{text(title)}</title>'
        f"<style>{CSS}</style></head><body><main>{body}</main></body></html>\n"
    )

# %%
page = shell("a <b>", f"<h1>{text('a <b>')}</h1>" + c)
assert page.count("<b>") == 0 and page.index("Content-Security-Policy") < page.index("<style>")

# %% [markdown]
# ## A judge
# Is a page one file, does it parse, and can a document do anything in it? The parser below keeps a stack of open tags and collects everything that could load or run. It is exported, because the pages of the next chapters are held against it, too.

# %%
#| export
class _Judge(HTMLParser):
    "Balanced tags, no scripts, no event handlers, nothing fetched from elsewhere; `wrong` has what is not so."

    def __init__(self, page: str):
        super().__init__()
        self.stack, self.wrong = [], []
        self.feed(page)
        self.wrong += [f"unclosed <{t}>" for t in self.stack]

    def handle_starttag(self, tag, attrs):
        "What a tag could load or run."
        if tag in ("script", "iframe", "object", "link", "img", "base", "form", "image", "use"):
            self.wrong.append(f"<{tag}>")
        loads = ("src", "href", "srcset", "action")
        self.wrong += [f"{k}={v}" for k, v in attrs if k.startswith("on") or k in loads or "url(" in (v or "")]
        if tag not in ("meta", "br"):
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        "A tag that closes itself leaves the stack as it was."
        self.handle_starttag(tag, attrs)
        if self.stack and self.stack[-1] == tag:
            self.stack.pop()

    def handle_endtag(self, tag):
        "A closing tag must close the last one opened."
        if not self.stack or self.stack.pop() != tag:
            self.wrong.append(f"misplaced </{tag}>")


def faults(page: str) -> list[str]:
    "What in a page is not self-contained or not well-formed: scripts, handlers, links, unbalanced tags. [] is good."
    return _Judge(page).wrong

# %%
assert faults(page) == []
for bad, what in [("<script>x</script>", "<script>"), ("<p onclick=1>x</p>", "onclick=1"), ('<a href="http://x">y</a>', "href=http://x"), ("<div><p></div>", "misplaced </div>"),
                  ("<div>", "unclosed <div>"), ('<i style="background:url(x)"></i>', "style=background:url(x)")]:
    assert what in faults(bad), bad  # the judge can say no

# %% [markdown]
# ## Verdict
# | question | answer | measured |
# |---|---|---|
# | can a document of the corpus run in the page? | no | text is escaped everywhere, a policy in the head forbids scripts, and the judge finds none |
# | does it need a network? | no | nothing is fetched: no links, fonts, pictures or scripts |
# | does a NaN spoil a chart? | no | it breaks the line; charts without any finite point still have axes |
# | does thinning hide a spike? | no | one raised point of 100,000 is still there among 1,200 |
#
# Not here: curves of several runs in one picture, and zooming. The look in a browser is checked in the tests of the site.
