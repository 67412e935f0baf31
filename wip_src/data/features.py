# %% [markdown]
# # What a classifier looks at
#
# > Runs of one to four characters, hashed to places in a table, and the shape of the page; thousands of texts at once.
#
# A judge of text needs numbers. Words would need a segmenter for Chinese and a list for each language; runs of
# characters need neither. Everything here is arithmetic on arrays of code points, because the judge has to keep up
# with a crawl.

# %%
#| default_exp data.features

# %%
#| export
from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# %%
#| hide
import matplotlib.pyplot as plt

from scalelab.core.plotting import style
from scalelab.data.documents import read_documents

style()

# %% [markdown]
# ## Texts as numbers
# The texts of a batch are laid end to end as one array of code points, so that numpy works on thousands of texts at
# once. A text longer than 4,096 characters is judged in pieces; each is an example of its own, and the text's score
# is their mean, weighted by length. Otherwise a long text would be judged more surely than a short one just because
# it has more to count.

# %%
#| export
PIECE = 4096


@dataclass
class Batch:
    "Pieces of texts end to end: code [m] uint32, starts and lengths [pieces], owner [pieces] = index of the text."

    code: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    owner: np.ndarray


def lay_out(texts: Sequence[str], fold: bool) -> Batch:
    raw, lengths, owner = [], [], []
    for i, text in enumerate(texts):
        if fold:
            text = unicodedata.normalize("NFKC", text).lower()
        raw.append(f"\n{text}\n".encode("utf-32-le", "surrogatepass"))
        n = len(raw[-1]) // 4
        pieces = -(-n // PIECE)
        lengths += [PIECE] * (pieces - 1) + [n - PIECE * (pieces - 1)]
        owner += [i] * pieces
    size = np.array(lengths, np.int64)
    code = np.frombuffer(b"".join(raw), np.uint32)
    return Batch(code, np.cumsum(size) - size, size, np.array(owner, np.int64))


# %%
batch = lay_out(["天地", "x" * 5000, ""], fold=False)
assert batch.lengths.tolist() == [4, 4096, 906, 2] and batch.owner.tolist() == [0, 1, 1, 2]
assert batch.code[:4].tolist() == [10, ord("天"), ord("地"), 10]
assert (lay_out(["ＡＢ１"], True).code == lay_out(["ab1"], False).code).all()

# %% [markdown]
# An n-gram's number is a polynomial in its code points, taken modulo $2^{32}$; mixed once more, its upper bits
# are the place in the table. The number of a run of four is made from that of three with one addition and one
# multiplication, for all positions at once. Runs that would reach from one text into the next are struck out.

# %%
#| export
_PRIME = np.uint32(0x9E3779B1)


def buckets(batch: Batch, orders: Sequence[int], bits: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    "For each n-gram order: (place in the table of the n-gram at each position, positions struck out)."
    value = np.zeros(len(batch.code), np.uint32)
    ends = batch.starts + batch.lengths
    for n in range(1, max(orders) + 1):
        if len(batch.code) < n:
            return
        value = (value[: len(batch.code) - n + 1] + batch.code[n - 1 :]) * _PRIME
        if n not in orders:
            continue
        place = value ^ (value >> np.uint32(15))
        place *= np.uint32(0x85EBCA77 + 2 * n)  # odd, another one for each order
        place >>= np.uint32(32 - bits)
        crossing = np.maximum(ends[:, None] - np.arange(1, n), 0).ravel()
        yield place, crossing[crossing < len(place)]


def gram_counts(batch: Batch, orders: Sequence[int]) -> np.ndarray:
    "Number of n-grams of each piece."
    return np.maximum(batch.lengths[:, None] - np.array(orders) + 1, 0).sum(axis=1)


# %%
def by_hand(text, orders):
    "The same from strings: each n-gram laid out alone."
    padded = f"\n{text}\n"
    return [padded[i : i + n] for n in orders for i in range(len(padded) - n + 1)]

two = lay_out(["天地玄黄", "ab"], False)
for n, (place, crossing) in zip((1, 2, 3), buckets(two, (1, 2, 3), 20)):
    kept = np.delete(place, crossing)
    assert len(kept) == len(by_hand("天地玄黄", [n])) + len(by_hand("ab", [n]))
    assert len(set(kept.tolist())) == len(set(by_hand("天地玄黄", [n]) + by_hand("ab", [n])))
assert gram_counts(two, (1, 2, 3)).tolist() == [15, 9]

# %% [markdown]
# ## What n-grams can't see
# A page of menus has short lines and hardly a full stop, and says things twice. None of this shows in which
# n-grams there are. So a piece also has a *shape*: five shares, each put into one of eight classes, and each
# class is one more feature. Segments (what stands between line ends and full stops) are compared by a hash of
# their characters and places.

# %%
#| export
LEVELS = 8
SHAPES = ("repeated", "punctuation", "digits", "line_ends", "signs")
_STOPS = np.array([ord(c) for c in "\n。！？!?.;；"], np.uint32)
_PUNCTUATION = np.array([ord(c) for c in "，。！？；：、,.!?;:"], np.uint32)
_SIGNS = np.array([ord(c) for c in "|>•·…_/\\#@$%&*+=<[]{}~^©®→»«↑↓"], np.uint32)


def _levels(share: np.ndarray) -> np.ndarray:
    "Class 0 .. 7 of shares: 0 for none, then by powers of two up to one half and more."
    with np.errstate(divide="ignore"):
        return np.where(share > 0, np.clip(np.floor(np.log2(share)) + LEVELS, 1, LEVELS - 1), 0).astype(np.int64)


def _repeated(batch: Batch) -> np.ndarray:
    "Share of each piece's characters in segments of 5 or more that stood before in the piece, float64 [pieces]."
    begins = np.zeros(len(batch.code), bool)
    begins[1:] = np.isin(batch.code[:-1], _STOPS)
    begins[batch.starts] = True
    first = np.flatnonzero(begins)
    length = np.diff(np.append(first, len(batch.code)))
    within = (np.arange(len(batch.code)) - np.repeat(first, length)).astype(np.uint64)
    mixed = (batch.code.astype(np.uint64) + (within << np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    piece = np.searchsorted(batch.starts, first, "right") - 1
    value = np.add.reduceat(mixed, first) ^ (piece.astype(np.uint64) * np.uint64(0x94D049BB133111EB))
    again = np.ones(len(first), bool)
    again[np.unique(value, return_index=True)[1]] = False
    return np.bincount(piece, length * (again & (length >= 5)), len(batch.starts)) / batch.lengths


def shape_levels(batch: Batch) -> np.ndarray:
    "Class of each of SHAPES for each piece, int64 [pieces, 5]."
    code, digits = batch.code, (batch.code >= 48) & (batch.code <= 57)
    marks = [np.isin(code, _PUNCTUATION), digits, code == 10, np.isin(code, _SIGNS)]
    shares = [np.add.reduceat(mark.astype(np.int64), batch.starts) / batch.lengths for mark in marks]
    return np.stack([_levels(share) for share in [_repeated(batch), *shares]], axis=1)


# %%
batch = lay_out(["首页 | 登录\n首页 | 登录\n首页 | 登录", "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。", "x = 12"], False)
shapes = dict(zip(SHAPES, shape_levels(batch).T.tolist()))
assert shapes["repeated"] == [7, 0, 0] and shapes["digits"][2] > shapes["digits"][0] == 0
assert shapes["punctuation"][1] > shapes["punctuation"][0] == 0
assert _levels(np.array([0, 1e-9, 0.3, 1])).tolist() == [0, 1, 6, 7]

# %% [markdown]
# ## What shapes look like
# Over the samples: real prose, dialogue and code, and a page of menus made up for the purpose. Darker is a larger
# share.

# %%
menu = "首页 | 新闻 | 登录\n上一页 1 2 3 下一页\n首页 | 新闻 | 登录\n版权所有 © 2024\n" * 3
rows = {"menus": [menu]} | {
    name: [d["text"][:3000] for d in read_documents(f"../../data_samples/{name}.jsonl")]
    for name in ("zh_prose", "en_prose", "dialogue", "code")}
levels = np.array([shape_levels(lay_out(texts, False)).mean(axis=0) for texts in rows.values()])
fig, ax = plt.subplots(figsize=(5, 2.2))
ax.imshow(levels, cmap="Blues", vmin=0, vmax=LEVELS - 1, aspect="auto")
ax.set_xticks(range(len(SHAPES)), SHAPES, fontsize=8)
ax.set_yticks(range(len(rows)), rows, fontsize=8)
ax.grid(False)
plt.show()
assert levels[0, 0] > 2 * levels[1, 0] and levels[0, 1] < levels[1, 1], "menus repeat, and do without full stops"

# %% [markdown]
# What to see: the row of the menus has the darkest first cell (repeated) and a pale second one (punctuation); prose
# is the reverse, and code has a shape of its own, which is why a classifier must be shown code before it judges any.
#
# ## Verdict
# | question | answer |
# |---|---|
# | are the vectorised n-grams the n-grams? | holds: as many, and as many different ones, as strings cut by hand give |
# | does length leak? | holds: shares and means only, and a long text is cut into pieces of 4,096 characters |
