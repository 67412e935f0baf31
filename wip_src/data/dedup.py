# %% [markdown]
# # Duplicates, exact and near
#
# > Find documents that say again what another one says, remove them, and none without a true partner.
#
# Text that is in the corpus twice is trained on twice, and when its twin sits in the validation set, the validation loss reads memory and calls it skill. The first
# article says that near-duplicates inflate validation scores and that MinHash LSH finds them (A-dup). How texts are sketched, found and judged stands in the notebooks
# before this one; here it is decided what stays, and measured how much LSH misses and how often it is wrong.

# %%
#| default_exp data.dedup

# %%
#| export
from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from scalelab.core.config import UsageError, did_you_mean
from scalelab.data.candidates import SetCache
from scalelab.data.index import cluster_labels, near_duplicates
from scalelab.data.sketch import Signer, jaccard, shingles

# %%
#| export
_all_ = ["jaccard", "shingles"]  # defined in scalelab.data.sketch, importable from here too

# %%
#| hide
import json
import random
from itertools import combinations
from pathlib import Path

import matplotlib.pyplot as plt
from scalelab.core.plotting import style
from scalelab.data.documents import read_documents, stdlib_documents

style()

# %% [markdown]
# ## The same text
# Two files can differ in bytes and be one text to every reader: `é` is one code point or two, a line ends in one way or another, a paragraph was re-wrapped. We
# compare texts after Unicode composition (NFC) and with every run of white space made one blank. (In Python code that forgets the depth of indentation, and two
# programs that differ in nothing else are one to us.) A 128-bit hash stands for the text: among a billion documents the chance that any two collide is about $10^{-21}$.

# %%
#| export
def content_hash(text: str) -> bytes:
    "16 bytes (xxh3_128) that are equal for texts equal after NFC and after white space is collapsed and trimmed."
    plain = " ".join(unicodedata.normalize("NFC", text).split())
    return xxhash.xxh3_128_digest(plain.encode("utf-8", "surrogatepass"))


# %%
assert content_hash("Caf\u00e9  au\r\nlait") == content_hash(" Cafe\u0301 au lait\n")
assert content_hash("天下大事") != content_hash("天下大势") and content_hash("") == content_hash("\u3000\n")
assert len(content_hash("\ud800 a lone surrogate must not stop the run")) == 16

# %% [markdown]
# ## Sketches, made once
# Removal and splitting both need the sketches of the same texts. They are made once and handed on: 512 bytes a document, whatever its length.

# %%
#| export
@dataclass
class Sketches:
    """Sketch values of a list of texts: uint32 [n, num_perm], made with `seed`.

    The share of equal values of two texts estimates their Jaccard similarity.
    """

    values: np.ndarray
    seed: int = 1

    def signer(self, threshold: float, recall: float) -> Signer:
        "The signer that cuts these values into bands for `threshold` and `recall`."
        return Signer(threshold, recall, self.values.shape[1], self.seed)

    def columns(self, threshold: float, recall: float) -> Callable[[int], np.ndarray]:
        "Band hashes by band, uint64 [n] each."
        hashes = self.signer(threshold, recall).band_hashes(self.values)
        return lambda b: hashes[:, b]


def sketch(texts: Sequence[str], num_perm: int = 128, seed: int = 1) -> Sketches:
    "Sketches of `texts`, for `find_duplicates` and `near_clusters`."
    return Sketches(Signer(num_perm=num_perm, seed=seed).bins(texts), seed)


# %%
story = "北冥有鱼，其名为鲲。鲲之大，不知其几千里也；化而为鸟，其名为鹏。鹏之背，不知其几千里也；怒而飞，其翼若垂天之云。"
rng = random.Random(0)
letters = "".join(chr(0x4E00 + k) for k in range(400)) + "abcdefghij" * 20
two = sketch([story, story.replace("垂天", "遮天"), ""])
assert two.values.shape == (3, 128) and (two.values[2] == 0xFFFFFFFF).all()
assert (two.columns(0.8, 0.999)(3) == Signer().sign_batch([story, story.replace("垂天", "遮天"), ""])[:, 3]).all()
print(f"true J {jaccard(shingles(story), shingles(story.replace('垂天', '遮天'))):.3f},"
      f" estimated {(two.values[0] == two.values[1]).mean():.3f}")

# %% [markdown]
# ## Which one stays
# The order of preference decides who claims a place first. White space must not win one, an unknown year is older than any, and an unknown quality worse than any; ties go to the longer text, then to the earlier one.

# %%
#| export
KEEP_POLICIES = ("longest", "first", "newest", "best")


def preference(docs: Sequence[dict], keep: str) -> list[int]:
    """Positions in the order in which documents claim a place.

    keep: "longest" (characters other than white space), "first" (input order), "newest" (`year`, then longest) or
    "best" (`quality`, a number, then longest). Raises UsageError for another word.
    """
    if keep not in KEEP_POLICIES:
        hint = did_you_mean(keep, KEEP_POLICIES)
        raise UsageError(f"dedup keep={keep!r}: expected one of {', '.join(KEEP_POLICIES)}{hint}")
    if keep == "first":
        return list(range(len(docs)))
    rank = [0.0] * len(docs)
    if keep != "longest":
        rank = [_number(d.get("year" if keep == "newest" else "quality")) for d in docs]
    length = [len("".join(d["text"].split())) for d in docs]
    return sorted(range(len(docs)), key=lambda i: (-rank[i], -length[i], i))


def _number(value) -> float:
    "The value as a number; minus infinity for what is none."
    try:
        number = float(value)
    except (TypeError, ValueError):
        return -math.inf
    return -math.inf if math.isnan(number) else number


# %%
born = [{"id": "a", "text": "x" * 9, "year": 2019, "quality": 0.5}, {"id": "b", "text": "x" * 12, "year": "unknown"}]
born += [{"id": "c", "text": "x" * 5 + " " * 99, "year": "2024", "quality": float("nan")}]
assert [preference(born, k) for k in KEEP_POLICIES] == [[1, 0, 2], [0, 1, 2], [2, 0, 1], [0, 1, 2]]
try:
    preference(born, "longst")
except UsageError as error:
    print(error)

# %% [markdown]
# Then the rule of the notebook on the index: a document goes if one *that stays* has exact $J \ge$ threshold with it, the most preferred partner first. Whatever is removed has a partner in the output, and no two documents that
# stay are that alike (but for the few pairs that meet in no band).

# %%
#| export
@dataclass(frozen=True)
class Duplicate:
    "`id` was removed because `of`, which is kept, says the same; `kind` is exact or near, `jaccard` is exact."

    id: str
    of: str
    kind: str
    jaccard: float


@dataclass
class DedupResult:
    """What `find_duplicates` decided. `rows` are the kept positions in input order, `keep` their ids.

    `pairs` lists the near pairs decided by (id, id of a kept document, jaccard); `candidates` counts the pairs judged.
    """

    keep: list[str]
    rows: list[int]
    removed: list[Duplicate]
    pairs: list[tuple[str, str, float]] = field(default_factory=list)
    candidates: int = 0

    def clusters(self) -> dict[str, list[str]]:
        "For each kept document that has any: the ids removed in its favour."
        out: dict[str, list[str]] = {}
        for d in self.removed:
            out.setdefault(d.of, []).append(d.id)
        return out


# %%
#| export
def find_duplicates(
    docs: Sequence[dict], threshold: float = 0.8, keep: str = "longest", seed: int = 1,
    sketches: Sketches | None = None, signer: Signer | None = None,
) -> DedupResult:
    """Exact and near duplicates among `docs` (dicts with `id` and `text`), every near pair verified by exact Jaccard.

    keep: which of a group stays, see `preference`. The same decision as `near_duplicates`, for a corpus in memory.
    sketches: of the texts, when they are there already. signer: other settings of the bands; it wins over the rest.
    A pair at the threshold escapes with probability below 0.001 (LSH); none is removed without a kept partner.
    Raises UsageError for an unknown policy or a threshold outside (0, 1].
    """
    sketches = None if signer else sketches
    signer = signer or (sketches.signer(threshold, 0.999) if sketches else Signer(threshold, seed=seed))
    order = preference(docs, keep)
    first: dict[bytes, int] = {}
    twin = {i: first.setdefault(content_hash(docs[i]["text"]), i) for i in order}  # its exact twin, or itself
    roots = list(first.values())
    texts = [docs[i]["text"] for i in roots]
    signed = signer.band_hashes(sketches.values[roots]) if sketches else signer.sign_batch(texts)
    n, text = len(roots), texts.__getitem__
    found = near_duplicates(lambda b: signed[:, b], n, np.arange(n), text, signer.threshold, signer)
    near = {roots[k]: (roots[found.of[k]], float(found.jaccard[k])) for k in np.flatnonzero(found.of >= 0)}
    pairs = [(docs[i]["id"], docs[j]["id"], s) for i, (j, s) in near.items()]
    result = DedupResult([], [], [], pairs, found.candidates)
    for i, doc in enumerate(docs):
        root = twin[i]
        if root in near:  # a twin of a near duplicate goes the same way: its partner must be a document that stays
            j, similarity = near[root]
            result.removed.append(Duplicate(doc["id"], docs[j]["id"], "near", similarity))
        elif root != i:
            result.removed.append(Duplicate(doc["id"], docs[root]["id"], "exact", 1.0))
        else:
            result.rows.append(i)
    result.keep = [docs[i]["id"] for i in result.rows]
    return result


# %%
docs = [{"id": "whole", "text": story + "鹏之徙于南冥也"}, {"id": "copy", "text": "  " + story}, {"id": "base", "text": story}]
docs += [{"id": "edit", "text": story.replace("北冥有鱼", "北海有鱼")}, {"id": "other", "text": "水击三千里，抟扶摇而上者九万里"}]
docs += [{"id": "empty", "text": ""}, {"id": "blank", "text": " "}]
result = find_duplicates(docs)
for d in result.removed:
    print(f"{d.id:6} is {d.kind:5} of {d.of:6} J = {d.jaccard:.2f}")
assert result.keep == ["whole", "other", "empty"] and {d.of for d in result.removed} == {"whole", "empty"}
assert find_duplicates(docs, keep="first", threshold=0.95).keep == ["whole", "copy", "edit", "other", "empty"]
assert find_duplicates([]).keep == []

# %% [markdown]
# `copy` is an exact copy of `base`, and `base` gives way to `whole`; the record names `whole`, since a partner that is itself gone would prove nothing.
#
# ## The chain, and the proof by brute force
# A text drifts sentence by sentence through twelve revisions. Joined into one group it would leave one document; the greedy pass keeps several, each unlike the others. Brute force over all pairs then checks both promises.

# %%
pool = ["".join(rng.choices(letters, k=60)) for _ in range(60)]
chain = [{"id": f"rev{k:02}", "text": "".join(pool[k : k + 20])} for k in range(12)]
result = find_duplicates(chain, keep="first")
print("kept:", result.keep)

def brute_force(docs, result, threshold=0.8):
    "Promise 1: no two kept documents are alike. Promise 2: each removed one has a kept partner as stated."
    sets = {d["id"]: shingles(d["text"]) for d in docs}
    worst = max((jaccard(sets[a], sets[b]) for a, b in combinations(result.keep, 2)), default=0.0)
    assert worst < threshold, f"two kept documents have J = {worst:.3f}"
    for d in result.removed:
        assert d.of in result.keep and d.jaccard == jaccard(sets[d.id], sets[d.of]) >= threshold
    return worst

assert brute_force(chain, result) < 0.8 and 1 < len(result.keep) < 12
assert jaccard(shingles(chain[0]["text"]), shingles(chain[11]["text"])) < 0.4

# %% [markdown]
# ## An index to ask
# Sometimes the question is not what to remove but who is like this one: across a split, say, or beside a text in an editor. The same bands in a dictionary answer it.

# %%
#| export
class NearIndex:
    """Texts by their bands, in memory, that answers with verified neighbours.

    .add(i) puts text i in; .partners(i) yields (j, exact jaccard) for indexed texts with J >= threshold.
    .candidates and .verified count the pairs that shared a band and those that passed.
    """

    def __init__(self, texts: Sequence[str], sketches: Sketches, threshold: float, recall: float = 0.999):
        self.threshold, self.candidates, self.verified = threshold, 0, 0
        self._bands = sketches.signer(threshold, recall).band_hashes(sketches.values).tolist()
        self._sets = SetCache(texts.__getitem__, len(texts))
        self._members: list[dict[int, list[int]]] = [{} for _ in range(sketches.signer(threshold, recall).bands)]

    def add(self, i: int) -> None:
        "Put text i into the index."
        for members, value in zip(self._members, self._bands[i]):
            if value:  # a text without a shingle is like nothing, not like every other such text
                members.setdefault(value, []).append(i)

    def proposals(self, i: int) -> list[int]:
        "Indexed texts that share a band with text i, sorted, itself left out, before any judgement."
        met = (members.get(value, ()) for members, value in zip(self._members, self._bands[i]))
        return sorted(set().union(*met) - {i})

    def partners(self, i: int) -> Iterator[tuple[int, float]]:
        "Yield (j, exact J) of indexed texts with J >= threshold to text i."
        found = self.proposals(i)
        self.candidates += len(found)
        for j in found:
            if (similarity := self._sets.alike(i, j, self.threshold)) >= self.threshold:
                self.verified += 1
                yield j, similarity


# %%
texts = [story, story + "鹏之徙于南冥也", story.replace("垂天", "遮天"), "另一段话，与前面毫无关系。", "", ""]
index = NearIndex(texts, sketch(texts), threshold=0.8)
for i in range(len(texts)):
    index.add(i)
for i in (0, 3, 4):
    print(i, [(j, round(s, 3)) for j, s in index.partners(i)])
assert dict(index.partners(0)) == {j: jaccard(shingles(texts[0]), shingles(texts[j])) for j in (1, 2)}

# %% [markdown]
# ## Is verification worth it?
# Real text instead of random letters: Python's own sources, each with a revision that lost up to half of its lines. For every candidate that the index proposes we compute the true $J$, and compare
# three ways to decide: take what LSH says, take the sketch's estimate, compare the sets.

# %%
corpus = [d for d in stdlib_documents(limit_bytes=1_500_000) if 300 < len(d["text"]) < 40_000]
revised = []
for k, d in enumerate(corpus):
    lines = d["text"].splitlines()
    lost = set(rng.sample(range(len(lines)), len(lines) * (k % 25) // 50))
    text = "\n".join(line for n, line in enumerate(lines) if n not in lost)
    revised.append(d | {"id": d["id"] + "#revised", "text": text})
both = corpus + revised
values = sketch([d["text"] for d in both])
index = NearIndex([d["text"] for d in both], values, threshold=0.8)
rows = []
for i in range(len(both)):
    for j in index.proposals(i):
        estimate = (values.values[i] == values.values[j]).mean()
        rows.append((estimate, jaccard(shingles(both[i]["text"]), shingles(both[j]["text"]))))
    index.add(i)
estimate, exact = np.array(rows).T
true = exact >= 0.8
print(f"{len(both)} documents, {len(rows)} candidates, {true.sum()} with J >= 0.8")
print(f"LSH alone:       precision {true.mean():.2f}; recall: all, since only its candidates are counted")
print(f"estimate >= 0.8: precision {true[estimate >= 0.8].mean():.2f}, recall {(estimate >= 0.8)[true].mean():.2f}:"
      f" {(estimate < 0.8)[true].sum()} of {true.sum()} true pairs lost")
print("exact:           right by definition, of the candidates: it is the yardstick")

# %%
margin = 4.5 * (0.8 * 0.2 / 128) ** 0.5  # standard deviations of the estimate at the threshold
planted_j = np.array([jaccard(shingles(a["text"]), shingles(b["text"])) for a, b in zip(corpus, revised)])
result = find_duplicates(both, sketches=values)
gone = {d.id for d in result.removed}
found = np.array([b["id"] in gone or a["id"] in gone for a, b in zip(corpus, revised)])
assert found[planted_j >= 0.8].all() and true.mean() < 0.95 and (np.abs(estimate - exact) < margin).mean() > 0.99
brute_force(both, result)

fig, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8))
bins = np.linspace(0, 1, 41)
left.hist([exact[true], exact[~true]], bins, stacked=True, label=["verified", "rejected"])
left.set(xlabel="true Jaccard similarity", ylabel="candidate pairs", title="What LSH proposes")
left.legend()
right.plot(exact, estimate, ".", ms=3)
right.plot([0, 1], [0, 1], "k", lw=0.8)
right.fill_between([0, 1], [-margin, 1 - margin], [margin, 1 + margin], color="0.9", zorder=0)
right.set(xlabel="true Jaccard similarity", ylabel="estimated by the sketch", xlim=(0, 1), ylim=(0, 1))
plt.show()

# %% [markdown]
# The orange part, more than half of all candidates, would have been deleted without cause. On the right, what deciding by the estimate means: the dots scatter to both sides of the line, so at 0.8 it is a coin toss. The grey band is our margin; a candidate is
# dismissed unseen only below it.
#
# ## The samples, where the truth is written down
# The project's sample texts hold copies (with other line ends and blanks), rewritten versions, and hard negatives: texts on the same subject in the same form that are *not* the same. Nothing below knows which is which.

# %%
samples = list(read_documents(["../../data_samples/*.jsonl"]))
truth = json.loads(Path("../../data_samples/truth.json").read_text(encoding="utf-8"))
result = find_duplicates(samples)
by_id = {d["id"]: d for d in samples}
partner = {d.id: d for d in result.removed}

def outcome(pair):
    "The record of the pair, whichever of the two went; None if both stayed or neither names the other."
    sides = (pair["id"], pair["of"]), (pair["of"], pair["id"])
    here = [partner[a] for a, b in sides if a in partner and partner[a].of == b]
    return here[0] if len(here) == 1 else None

for kind in ("exact", "near"):
    planted = truth[f"{kind}_duplicates"]
    records = [outcome(p) for p in planted]
    assert all(r and r.kind == kind for r in records), f"a planted {kind} duplicate was missed"
    if kind == "near":
        assert all(abs(r.jaccard - p["jaccard"]) < 1e-4 for r, p in zip(records, planted))
    print(f"{kind}: {len(records)} planted, {sum(r is not None for r in records)} found,"
          f" lowest J {min(r.jaccard for r in records):.3f}")

# %% [markdown]
# All found with the partner they were made from, and the similarities agree to the last digit with those in the truth file, which other code computed. Now the other half of the question: was anything removed that should have stayed?

# %%
planted = {x for kind in ("exact", "near") for p in truth[f"{kind}_duplicates"] for x in (p["id"], p["of"])}
junk = {j["id"] for j in truth["junk"]}
innocent = [d for d in result.removed if d.id not in planted | junk]
assert not innocent, innocent
assert all(p["id"] in result.keep and p["of"] in result.keep for p in truth["hard_negatives"])
assert set(truth["good_but_suspicious"]) <= set(result.keep)
worst = brute_force(samples, result)
print(f"{len(samples)} documents, {len(result.removed)} removed, {len(innocent)} without cause")
print(f"the most alike pair that stays has J = {worst:.2f}")

# %% [markdown]
# ## Splitting by cluster
# A validation document must not have its twin in the training set, and after deduplication "twin" has to mean something looser: texts with $J$ of 0.6 share sentences that a model can
# learn by heart. So documents that are linked by $J \ge 0.5$, through any number of steps, form a cluster, and a cluster goes to one side. Here a chain *should* be joined. The bands are chosen for 85%
# recall at 0.5, which makes the chance that a pair at 0.8 is missed $5 \cdot 10^{-8}$.

# %%
#| export
def near_clusters(
    docs: Sequence[dict], threshold: float = 0.5, recall: float = 0.85, seed: int = 1, sketches: Sketches | None = None
) -> np.ndarray:
    """Cluster label int64 [n] of each document: the position of the first member of its cluster.

    Documents joined by verified pairs with J >= threshold, directly or through others, share a label.
    In a split that keeps clusters whole, a pair with J >= 0.8 lies across with a chance of 5e-8 (32 bands of 4).
    """
    texts = [d["text"] for d in docs]
    sketches = sketches or sketch(texts, seed=seed)
    signer = sketches.signer(threshold, recall)
    return cluster_labels(sketches.columns(threshold, recall), len(texts), texts.__getitem__, threshold, signer)


# %%
labels = near_clusters(chain + docs)
assert len(set(labels[:12].tolist())) == 1, "a chain is one cluster"
assert near_clusters([]).shape == (0,)
assert labels[12] == labels[13] == labels[15] != labels[16]

# %% [markdown]
# The promise that matters is about the split: over the samples and the sources with their revisions, cut at random by cluster, no pair with $J \ge 0.8$ may lie across. Brute force over all pairs says so; a split that ignores clusters
# is the control that must fail.

# %%
pool = samples + both
labels = near_clusters(pool)
sets = [shingles(d["text"]) for d in pool]
alike = [(i, j) for i, j in combinations(range(len(pool)), 2)
         if 0.8 <= len(sets[i]) / max(len(sets[j]), 1) <= 1.25 and jaccard(sets[i], sets[j]) >= 0.8]
crossing = []
for seed in range(20):
    draw = np.random.default_rng(seed)
    valid = np.isin(labels, draw.choice(np.unique(labels), len(np.unique(labels)) // 10))
    naive = draw.random(len(pool)) < 0.1
    crossing.append([sum(v[i] != v[j] for i, j in alike) for v in (valid, naive)])
by_cluster, by_document = np.mean(crossing, axis=0)
print(f"{len(alike)} pairs with J >= 0.8; across a 10% split"
      f" by document: {by_document:.1f} on average, by cluster: {by_cluster:.1f}")
assert by_cluster == 0 and by_document > 0

# %%
size = np.bincount(np.unique(labels, return_inverse=True)[1])
fig, ax = plt.subplots(figsize=(5, 2.6))
ax.bar_label(ax.bar(*np.unique(size, return_counts=True)))
ax.set(xlabel="documents in the cluster", ylabel="clusters", xticks=range(1, size.max() + 1))
plt.show()
assert size.max() < len(pool) / 10, "one cluster holds a tenth of the corpus: the threshold is too loose"

# %% [markdown]
# Most documents stand alone, the revisions make pairs, and no cluster is large. That last assertion guards against the danger of chains: with a threshold too low, one giant cluster would leave nothing to split.
#
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-dup, first half: MinHash LSH finds near-duplicates | holds, with verification and bands chosen for recall | all pairs with J >= 0.8 found (revised sources, planted samples); LSH alone is right in less than half of its proposals, deciding by the sketch's estimate loses one true pair in fourteen (4 of 57) |
# | A-dup, first half, with a library's default bands | holds in part | one pair in six above the threshold is missed (the notebook on sketches) |
# | A-dup, second half: duplicates inflate validation and harm training | open | needs trainings with several seeds; the split by cluster is what prevents it here |
#
# What this does not cover: passages repeated inside otherwise different documents (an excerpt in a long text has a low $J$), and translations or paraphrases, which share no 5-grams.
