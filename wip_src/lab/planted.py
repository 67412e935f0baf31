# %% [markdown]
# # Pairs whose likeness is known
#
# > Texts and twins of known Jaccard similarity, real revisions, and a yardstick that shares no code with what it measures.
#
# A search for near-duplicates can only be judged where the truth is known. This notebook makes such pairs, counts what became of them, and computes likeness once more from strings in Python sets, with none of the code
# that is measured.

# %%
#| default_exp lab.planted

# %%
#| export
from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scalelab.data.dedup import DedupResult
from scalelab.data.documents import read_documents, stdlib_documents

# %%
#| hide
import numpy as np
import matplotlib.pyplot as plt
from scalelab.core.plotting import style
from scalelab.data.dedup import find_duplicates

style()

# %% [markdown]
# ## The yardstick
# The definition, with strings in sets. Slow, and independent of hashes, sketches and sorted arrays.

# %%
#| export
def string_set(text: str) -> set[str]:
    "The character 5-grams of `text` without white space, as strings; a shorter text is one."
    plain = "".join(text.split())
    return {plain[i : i + 5] for i in range(max(len(plain) - 4, 1))} - {""}


def string_jaccard(a: str, b: str) -> float:
    "Exact Jaccard similarity by `string_set`."
    x, y = string_set(a), string_set(b)
    return len(x & y) / len(x | y) if x | y else 1.0


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    "95% interval of a share of `hits` among `n` (Wilson, 1927); (0, 1) when n is 0."
    if n == 0:
        return 0.0, 1.0
    centre, spread = hits / n + z * z / (2 * n), z * math.sqrt(hits / n * (1 - hits / n) / n + z * z / (4 * n * n))
    return (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)


# %%
assert string_jaccard("abcdef", "abc def") == 1 and string_jaccard("abcdef", "abcdeg") == 1 / 3
assert wilson(0, 0) == (0, 1) and wilson(50, 50)[1] > 0.9999 and 0.92 < wilson(50, 50)[0] < 0.94

# %% [markdown]
# ## Planting
# A text gets a twin with scattered edits (characters replaced, dropped, doubled) and one with a cut at the end. The number of edits is drawn so that $J$ spreads over 0.6 to 1; what it is, the yardstick says afterwards.

# %%
#| export
def plant(texts: Sequence[str], seed: int = 0) -> tuple[list[dict], list[tuple[int, int]]]:
    """(documents, pairs of positions): each text, and a twin of it that says almost the same.

    Twins stand anywhere among the texts. Of every four, three have scattered edits and one lost its end.
    """
    draw, docs = random.Random(seed), []
    for k, text in enumerate(texts):
        docs.append({"id": f"base{k}", "text": text})
        if k % 4 == 3:
            new = text[: int(len(text) * draw.uniform(0.75, 1.0))]
        else:
            places = draw.sample(range(len(text)), round(len(text) * draw.uniform(0.0, 0.04)))
            new = _edit(text, places, draw)
        docs.append({"id": f"twin{k}", "text": new})
    draw.shuffle(docs)
    at = {d["id"]: i for i, d in enumerate(docs)}
    return docs, [(at[f"base{k}"], at[f"twin{k}"]) for k in range(len(texts))]


def pieces(texts: Sequence[str], count: int, seed: int = 0) -> list[str]:
    "At most `count` runs of 100 to 2,000 characters, one after the other from the texts."
    draw, out = random.Random(seed), []
    for text in texts:
        at = 0
        while at + 100 <= len(text) and len(out) < count:
            size = round(100 * 20 ** draw.random())  # as many of 100 to 450 as of 450 to 2,000
            if len(text) - at >= size:
                out.append(text[at : at + size])
            at += size
    return out


def _edit(text: str, places: Sequence[int], draw: random.Random) -> str:
    "`text` with an edit at each place: another character of the text, none, or the same once more."
    new = list(text)
    for p in places:
        new[p] = draw.choice([draw.choice(text), "", new[p] * 2])
    return "".join(new)


# %%
texts = ["".join(random.Random(k).choices("abcdefghijklmnopqrstuvwxyz", k=400)) for k in range(200)]
docs, pairs = plant(texts)
planted_j = np.array([string_jaccard(docs[a]["text"], docs[b]["text"]) for a, b in pairs])
assert plant(texts) == (docs, pairs) and all(docs[a]["id"][4:] == docs[b]["id"][4:] for a, b in pairs)
cut = pieces(texts * 3, 500)
assert 100 < len(cut) <= 500 and all(100 <= len(c) <= 400 and any(c in t for t in texts) for c in cut)
print("pairs by J:", dict(zip(("below 0.8", "0.80-0.85", "0.85 and more"),
      np.histogram(planted_j, [0, 0.8, 0.85, 1.01])[0].tolist())))

# %% [markdown]
# ## Recall and precision
# A pair with $J \ge 0.8$ is missed when both sides stay. A removal is wrong when the partner that it names is gone itself, or the yardstick finds their $J$ below 0.8.

# %%
#| export
BUCKETS = {"J >= 0.85": (0.85, 1.01, 0.99), "J 0.80-0.85": (0.8, 0.85, 0.95)}  # from, below, recall asked for


@dataclass
class Score:
    "Pairs (found, all) by bucket of true J, and removals (right, all)."

    recall: dict[str, tuple[int, int]]
    right: int
    removed: int


def score(docs: Sequence[dict], pairs: Sequence[tuple[int, int]], result: DedupResult) -> Score:
    "What became of the pairs (positions in `docs`), and whether each removal has a true partner that stays."
    kept, text = set(result.keep), {d["id"]: d["text"] for d in docs}
    similarity = [string_jaccard(docs[a]["text"], docs[b]["text"]) for a, b in pairs]
    found = [docs[a]["id"] not in kept or docs[b]["id"] not in kept for a, b in pairs]
    recall = {}
    for name, (low, high, _) in BUCKETS.items():
        inside = [hit for hit, j in zip(found, similarity) if low <= j < high]
        recall[name] = sum(inside), len(inside)
    right = sum(d.of in kept and string_jaccard(text[d.id], text[d.of]) >= 0.8 for d in result.removed)
    return Score(recall, right, len(result.removed))


# %%
result = find_duplicates(docs)
good = score(docs, pairs, result)
print(good)
assert good.right == good.removed and all(a == b > 10 for a, b in good.recall.values())
blind = score(docs, pairs, DedupResult([d["id"] for d in docs], [], []))
assert all(a == 0 for a, _ in blind.recall.values()), "who removes nothing finds nothing"
lies = [type(d)(d.id, result.keep[0], d.kind, d.jaccard) for d in result.removed]
wrong = DedupResult(result.keep, result.rows, lies)
assert score(docs, pairs, wrong).right < 3, "a partner that says something else is no partner"

# %% [markdown]
# ## The texts
# With a folder of labelled corpora: Chinese and English documents of several kinds, and a set of real revisions with their pairs. Without it: Python's own texts for English, random sentences for Chinese, and the rows that need the rest do not hold.

# %%
#| export
def corpus_texts(data: Path | None, language: str, limit: int) -> list[str]:
    "Texts of one language ('zh', 'en') of 200 to 20,000 characters, `limit` bytes in all, in turns from the files."
    if data and (files := sorted((data / "1_pretrain").glob(f"{language}_*"))):
        shares = [(d["text"] for d in read_documents([f]) if 200 <= len(d["text"]) <= 20_000) for f in files]
        turns = (t for several in itertools.zip_longest(*shares) for t in several if t)
    elif language == "en":
        turns = (d["text"][:20_000] for d in stdlib_documents(3 * limit) if len(d["text"]) >= 200)
    else:
        draw = random.Random(7)
        words = ["".join(chr(draw.randrange(0x4E00, 0x5A00)) for _ in range(draw.randrange(1, 4))) for _ in range(5000)]
        turns = ("".join(draw.choices(words, k=draw.randrange(100, 1500))) for _ in itertools.count())
    out, size = [], 0
    for text in turns:
        out.append(text)
        size += len(text.encode("utf-8", "surrogatepass"))
        if size >= limit:
            break
    return out


def revisions(data: Path | None) -> tuple[list[dict], list[tuple[int, int]], list[str]]:
    "(documents, pairs of positions, relation of each pair) of the labelled set; empty without it."
    folder = data / "6_near_dup" if data else None
    if not folder or not folder.is_dir():
        return [], [], []
    docs = list(read_documents(sorted(folder.glob("docs*"))))
    at = {d["id"]: i for i, d in enumerate(docs)}
    rows = [r for r in read_documents(sorted(folder.glob("pairs*"))) if r["a"] in at and r["b"] in at]
    return docs, [(at[r["a"]], at[r["b"]]) for r in rows], [r["relation"] for r in rows]


# %%
zh, en = corpus_texts(None, "zh", 100_000), corpus_texts(None, "en", 100_000)
assert zh == corpus_texts(None, "zh", 100_000) and min(map(len, zh)) >= 100 and max(map(len, en)) <= 20_000
assert 100_000 <= sum(len(t.encode()) for t in zh) < 120_000 and revisions(None) == ([], [], [])

# %% [markdown]
# ## What scattered edits do

# %%
base = "".join(random.Random(1).choices(zh[0], k=2000))
shares = np.linspace(0, 0.1, 21)
draw = random.Random(2)
left = [string_jaccard(base, _edit(base, draw.sample(range(2000), round(2000 * s)), draw)) for s in shares]
fig, ax = plt.subplots(figsize=(5, 2.4))
ax.plot(shares, left, "o", label="measured")
ax.plot(shares, (kept := (1 - shares) ** 5) / (2 - kept), label="if edits were independent")
ax.axhline(0.8, color="k", lw=0.8)
ax.set(xlabel="share of characters edited", ylabel="Jaccard similarity of 5-grams")
ax.legend()
plt.show()
assert left[0] == 1 and 0.7 < left[5] < 0.85

# %% [markdown]
# What to see: an edit in 45 characters is enough to leave the threshold of 0.8. Recall stated by the share of edits would say little; it is stated by $J$.
#
# ## Verdict
# | question | verdict | measured |
# |---|---|---|
# | can the score fail? | holds | who removes nothing finds nothing; a removal with a false partner is counted as wrong |
