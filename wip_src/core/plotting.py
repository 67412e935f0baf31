# %% [markdown]
# # Plots with one look
#
# > One style for every figure of the book, with colours that survive grey printing and a font that knows Chinese.
#
# A figure is read in two seconds or not at all. This short chapter fixes the look once, and takes care of a trap of its own: matplotlib draws Chinese as empty boxes unless a font with
# those glyphs is found.

# %%
#| default_exp core.plotting

# %%
#| export
from __future__ import annotations

import functools
import io
import re

# %%
#| hide
import matplotlib.pyplot as plt
import numpy as np

# %% [markdown]
# ## Colours
# Six hues of Okabe and Ito's set, which people with the common forms of colour blindness can tell apart, a red for what failed and a grey. How do they fare without any colour at all? The luminance
# column says: some pairs come out nearly equal.

# %%
#| export
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC3311", "#CC79A7", "#E69F00", "#56B4E9", "#666666"]

# Families that carry Chinese glyphs, most common first: Debian, Windows, macOS, then what a package may bring.
CJK_FAMILIES = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Microsoft YaHei", "SimHei",
    "PingFang SC", "Hiragino Sans GB", "Heiti SC", "Noto Sans CJK JP", "AR PL UMing CN", "Droid Sans Fallback",
)

# %%
def luminance(color):
    "Relative luminance of a hex colour, 0 black to 1 white."
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return float(rgb @ [0.2126, 0.7152, 0.0722])

for color in COLORS:
    print(color, f"{luminance(color):.2f}")
assert len(set(COLORS)) == len(COLORS) and max(map(luminance, COLORS)) < 0.75  # all dark enough on white

# %% [markdown]
# ## A font with Chinese glyphs
# matplotlib falls back from one family to the next glyph by glyph, so a list is all it takes: a Latin face first, then the first Chinese family that this machine has.

# %%
#| export
@functools.cache
def cjk_font() -> str | None:
    "The first installed font family with Chinese glyphs, or None."
    from importlib import metadata

    from matplotlib import font_manager

    try:  # the same glyphs on every machine: the font that the [notebooks] and [docs] extras bring
        file = metadata.distribution("pylopdf-fonts-zh-cn").locate_file("pylopdf_fonts_zh_cn/NotoSansSC-Regular.otf")
        font_manager.fontManager.addfont(str(file))
        return "Noto Sans SC"
    except (metadata.PackageNotFoundError, OSError):
        pass
    have = {entry.name for entry in font_manager.fontManager.ttflist}
    for name in CJK_FAMILIES:
        if name in have:
            return name
    for path in font_manager.findSystemFonts():  # installed after matplotlib made its cache
        if re.search(r"(cjk|wqy|hansans|yahei|simhei|pingfang)", path, re.I):
            font_manager.fontManager.addfont(path)
    have = {entry.name for entry in font_manager.fontManager.ttflist}
    return next((name for name in CJK_FAMILIES if name in have), None)


def has_cjk_font() -> bool:
    "Can this machine draw Chinese in plots?"
    return cjk_font() is not None


# %%
#| export
def style() -> None:
    "Set the house style for all figures drawn from here on; safe to call twice. A missing glyph is an error from then on, and no empty box."
    import warnings

    import matplotlib as mpl
    from cycler import cycler

    if cjk_font():
        warnings.filterwarnings("error", message="Glyph .* missing from")
    mpl.rcParams.update({
        "figure.dpi": 96, "savefig.dpi": 96, "figure.figsize": (6.4, 3.0), "figure.constrained_layout.use": True,
        "font.family": ["DejaVu Sans", *([cjk_font()] if cjk_font() else [])], "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9,
        "axes.prop_cycle": cycler(color=COLORS), "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": "0.9", "grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.5, "legend.frameon": False,
        "legend.fontsize": 8, "svg.fonttype": "none", "svg.hashsalt": "scalelab", "axes.unicode_minus": False,
    })


# %%
style()
style()
assert plt.rcParams["axes.spines.top"] is False and plt.rcParams["font.family"][0] == "DejaVu Sans"

# %%
rng = np.random.default_rng(0)
fig, ax = plt.subplots()
for k, name in enumerate(["general", "code", "dialogue"]):
    ax.plot(3.5 + k - np.log1p(np.arange(100) / 12) * (0.5 + 0.1 * k) + 0.02 * rng.standard_normal(100), label=name)
ax.set(xlabel="step", ylabel="loss (nats per token)")
if has_cjk_font():
    ax.set_title("损失曲线：三个领域")
ax.legend()
plt.show()

# %% [markdown]
# What to see: no box where there is no information, a light grid to read values from, and a Chinese title without empty boxes. How do we *know* that there are no boxes? A missing glyph makes
# matplotlib warn, so the test below draws with warnings turned into errors; and a font without the glyph must trip it.

# %%
import warnings

def draws(text, family):
    "Does matplotlib find every glyph of `text` in these font families?"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fig = plt.figure(figsize=(1, 1))
        try:
            fig.text(0, 0.5, text, family=family)
            fig.savefig(io.BytesIO(), format="png")
            return True
        except UserWarning:
            return False
        finally:
            plt.close(fig)

assert draws("loss", ["DejaVu Sans"]) and not draws("损失", ["DejaVu Sans"])
assert not has_cjk_font() or draws("损失 loss ±", plt.rcParams["font.family"])

# %% [markdown]
# ## Figures inside a page
# A report is one file, so its figures stand inside it, as SVG whose text stays text: it can be searched, it scales, and the browser's own fonts draw the Chinese.

# %%
#| export
def figure_svg(fig) -> str:
    "The figure as an inline `<svg>` element: no XML prologue, no clock, text kept as text. Closes the figure."
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    plt.close(fig)
    text = buffer.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)


# %%
def small():
    fig, ax = plt.subplots(figsize=(2, 1))
    ax.set_title("损失")
    return fig

svg = figure_svg(small())
assert svg.startswith("<svg") and "损失" in svg and "<metadata" not in svg
assert svg == figure_svg(small())  # the same figure is the same bytes, so a report can be compared
print(f"{len(svg) / 1000:.0f} kB")

# %% [markdown]
# ## Which marks can a reader tell apart?
# The same colours as bars and as grey, side by side.

# %%
fig, axes = plt.subplots(1, 2, figsize=(6.4, 1.6), sharey=True)
for ax, shade in zip(axes, (lambda c: c, lambda c: str(luminance(c)))):
    ax.bar(range(len(COLORS)), 1, color=[shade(c) for c in COLORS])
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
axes[0].set_title("in colour")
axes[1].set_title("printed grey")
plt.show()

# %% [markdown]
# In grey several neighbours are near each other: a plot that must survive a grey print uses line styles or labels at the lines as well.
#
# ## Verdict
# | question | answer |
# |---|---|
# | does Chinese draw without empty boxes? | yes: the `[notebooks]` and `[docs]` extras bring a font; elsewhere one of the listed families must be installed (`apt-get install fonts-noto-cjk` on Debian) |
# | is the same figure the same bytes? | yes, SVG with a fixed salt and no date |
