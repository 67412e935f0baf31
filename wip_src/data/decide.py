# %% [markdown]
# # Decisions over all documents
#
# > Who stays of documents that say the same: exact and near duplicates decided on columns of numbers, with the text of a document fetched only to verify.
#
# The first article removes near-duplicates by MinHash and an index in memory. Here the hashes lie on disk, one column a band, and what is in memory grows with the number of documents and not with their length.

# %%
#| default_exp data.decide

# %%
#| export
from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalelab.core.config import UsageError
from scalelab.data.known import StoredIndex
from scalelab.data.passes import Corpus
from scalelab.data.recipe import DocumentStage, Exact, Near, Outcome

# %%
#| hide
import tempfile

import matplotlib.pyplot as plt

from scalelab.core.plotting import COLORS, style
from scalelab.data.documents import stdlib_documents
from scalelab.data.parts import PartWriter, Plan, Source, commit
from scalelab.data.sketch import Signer

room = tempfile.TemporaryDirectory()
sources, kept = [Source(0, "lib.jsonl", "lib.jsonl", "lib")], [*stdlib_documents(400_000)]

# %% [markdown]
# ## Who comes first
# Of two documents that say the same, one stays. Which, is a matter of taste: the longest (blanks don't count), the first, the newest, or the best by a column `quality` that the input or a classifier wrote. Every policy
# ends in the order of the corpus, so that the same corpus gives the same choice.

# %%
#| export
def preference(corpus: Corpus, where: np.ndarray, keep: str) -> np.ndarray:
    "The positions `where` (rising) in the order in which they claim a place, int64."
    keys = [] if keep == "first" else [-corpus.column("solid")[where].astype(np.int64)]
    if keep == "newest":
        keys.append(-corpus.column("year")[where].astype(np.int32))
    if keep == "best":
        keys.append(-corpus.column("quality")[where])
    return where[np.lexsort(keys)] if keys else where


def exact_twins(corpus: Corpus, where: np.ndarray, keep: str) -> np.ndarray:
    """For each document of `where` the position of its preferred twin, or -1 where it is that twin itself; int64.

    Twins have the same 128 bits of their normalised text. Memory: 48 bytes a document while it sorts.
    """
    order = preference(corpus, where, keep)
    high, low = corpus.column("hash")[order].T
    by = np.lexsort((low, high))  # stable: within equal hashes the order of preference
    new = np.ones(len(by), bool)
    new[1:] = (high[by][1:] != high[by][:-1]) | (low[by][1:] != low[by][:-1])
    head = np.maximum.accumulate(np.where(new, np.arange(len(by)), 0))
    of = np.full(corpus.n, -1, np.int64)
    of[order[by]] = np.where(new, -1, order[by[head]])
    return of[where]


# %%
twins = [{"id": "a", "text": "one  text", "year": 2001}, {"id": "b", "text": "two"},
    {"id": "c", "text": "one text\n", "year": 2020}, {"id": "d", "text": "one text", "quality": 0.9}]
Path(room.name, "twins").mkdir()
writer = PartWriter(Plan(f"{room.name}/twins"), "p")
for row, doc in enumerate(twins):
    writer.keep(doc, sources[0], row)
commit(writer)
small, everyone = Corpus(f"{room.name}/twins"), np.arange(4)
for keep, winner in (("first", 0), ("longest", 0), ("newest", 2), ("best", 3)):
    expected = [-1 if i in (1, winner) else winner for i in range(4)]
    assert exact_twins(small, everyone, keep).tolist() == expected, keep
assert exact_twins(small, np.array([1, 2, 3]), "first").tolist() == [-1, -1, 2], "who is dead is nobody's twin"

# %% [markdown]
# ## Decisions
# A stage over the whole corpus leaves a short table: which document goes, because of which other one, and how alike they are. It is written once; a run that was killed later does not decide again.

# %%
#| export
BUDGET = 12 << 20  # bytes of sets of runs, and of pairs, that a near stage holds
DECISION = np.dtype([("doc", "<i8"), ("of", "<i8"), ("jaccard", "<f4")])


def decide(corpus: Corpus, alive: np.ndarray, stage: Exact | Near, signer: Any, file: Path) -> np.ndarray:
    """The documents that an exact or near stage removes, as DECISION rows in the order of the corpus; also written to
    `file`.

    alive: bool [n], who is left so far. signer: the one that made the bands. A file that is there is read.
    """
    if file.exists():
        return np.load(file)
    where = np.flatnonzero(alive)
    if isinstance(stage, Exact):
        of = exact_twins(corpus, where, stage.keep)
        alike = np.ones(len(where), np.float32)
    else:
        from scalelab.data.index import near_duplicates

        rank = np.searchsorted(where, preference(corpus, where, stage.keep))
        found = near_duplicates(
            lambda b: corpus.words("bands", b)[where], len(where), rank, lambda i: corpus.fetch(int(where[i])),
            stage.threshold, signer, scratch=file.parent, budget=BUDGET)
        of, alike = np.where(found.of >= 0, where[found.of], -1), found.jaccard
    gone = np.flatnonzero(of >= 0)
    rows = np.empty(len(gone), DECISION)
    rows["doc"], rows["of"], rows["jaccard"] = where[gone], of[gone], alike[gone]
    temporary = file.with_name(f".{file.name}.tmp.npy")
    np.save(temporary, rows)
    os.replace(temporary, file)
    return rows


# %%
Path(room.name, "near").mkdir()
writer = PartWriter(Plan(f"{room.name}/near", signer=Signer(0.8)), "p")
for row, doc in enumerate([*kept[:30], kept[4] | {"id": "copy", "text": kept[4]["text"] + " And one more sentence."},
        kept[9] | {"id": "twin"}]):
    writer.keep(doc, sources[0], row)
commit(writer)
near, alive = Corpus(f"{room.name}/near"), np.ones(32, bool)
rows = decide(near, alive, Exact(), None, Path(room.name, "exact.npy"))
assert rows["doc"].tolist() == [31] and rows["of"].tolist() == [9]
alive[rows["doc"]] = False
rows = decide(near, alive, Near(), Signer(0.8), Path(room.name, "near.npy"))
assert rows["doc"].tolist() == [4] and rows["of"].tolist() == [30], "the longer one stays"
assert 0.95 < rows["jaccard"][0] < 1
assert np.array_equal(rows, decide(near, alive, Near(), None, Path(room.name, "near.npy")))
assert decide(near, alive, Near(keep="first"), Signer(0.8), Path(room.name, "first.npy"))["doc"].tolist() == [30]

# %% [markdown]
# ## Known from before
# A corpus grows by instalments. What is near to a document of an earlier one is found in a stored index (see its chapter), by each worker for itself: the index is a map of files and is shared by all of them.

# %%
#| export
@functools.lru_cache(maxsize=2)
def _index(folder: str, mark: str) -> StoredIndex:
    return StoredIndex(folder, verify=False)


@dataclass
class Known(DocumentStage):
    """Removes what is an exact or near duplicate of a document in a stored index.

    Args:
        folder: of the index
        mark: names, sizes and times of its files; found by itself
    """

    folder: str
    mark: str = ""

    def __post_init__(self):
        if not Path(self.folder).is_dir() or not any(Path(self.folder).iterdir()):
            raise UsageError(
                f"stages.near.known: {self.folder} holds no index of earlier documents; make one first, or leave the "
                "option out")
        StoredIndex(self.folder)  # checked once, here
        files = sorted(p for p in Path(self.folder).rglob("*") if p.is_file())
        self.mark = " ".join(f"{p.relative_to(self.folder)}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in files)

    def apply(self, doc: dict[str, Any]) -> Outcome:
        "The document, or None with the old document that it repeats."
        # under another id: ids of two corpora may agree by chance, and the index takes equal ones for one document
        for found in _index(self.folder, self.mark).query([{"id": "\0", "text": doc["text"]}]):
            return Outcome(None, "known_duplicate",
                f"of {found.of} in {self.folder}, {found.kind}, Jaccard {found.jaccard:.3f}")
        return Outcome(doc)


# %%
StoredIndex(f"{room.name}/index", Signer(0.8)).add(kept[:10])
stage = Known(f"{room.name}/index")
outcome = stage.apply(kept[4] | {"id": "new", "text": kept[4]["text"] + " And more."})
print(outcome.note.replace(room.name, ""))
assert outcome.document is None and kept[4]["id"] in outcome.note and stage.apply(kept[20]).document == kept[20]
before = stage.mark
StoredIndex(f"{room.name}/index").add(kept[20:21])
assert Known(f"{room.name}/index").mark != before and Known(f"{room.name}/index").apply(kept[20]).document is None
try:
    Known("nowhere")
except UsageError as error:
    assert "nowhere" in str(error)
else:
    raise AssertionError("an index that is not there")

# %% [markdown]
# ## What the columns weigh
# The memory of a decision follows the number of documents and not their length: what exact duplicates take at the peak of their sort, measured by the allocator, for documents of four lengths.

# %%
import tracemalloc  # noqa: E402

style()
peaks = {}
for length in (200, 800, 3200, 12800):
    folder = Path(room.name, f"of-{length}")
    folder.mkdir()
    writer = PartWriter(Plan(str(folder)), "p")
    for row in range(400):
        writer.keep({"id": str(row), "text": f"{row} " + "x" * length}, sources[0], row)
    commit(writer)
    flat = Corpus(folder)
    tracemalloc.start()
    exact_twins(flat, np.arange(flat.n), "longest")
    peaks[length] = tracemalloc.get_traced_memory()[1] / flat.n
    tracemalloc.stop()
figure, axes = plt.subplots(figsize=(6, 2.2))
axes.plot([*peaks], [*peaks.values()], "o-", color=COLORS[0])
axes.set(xlabel="characters a document", ylabel="peak bytes a document", xscale="log", ylim=(0, None))
plt.show()
assert max(peaks.values()) < 1.1 * min(peaks.values())
room.cleanup()

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | deciding needs memory for documents, not for text | holds | in this notebook: the peak of exact deduplication is the same for documents of 200 and of 12,800 characters |
#
# Not covered: decisions are made by one process; beyond a billion documents the columns are to be split by hash among machines.
