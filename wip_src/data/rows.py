# %% [markdown]
# # Rows as batches
#
# > What the model reads: tokens, labels, and where documents begin, copied from memory maps in one pass.
#
# A plan says what each row holds; this chapter fills a batch with rows. It is done for every step of every run, so it should cost little more than copying the bytes, and everything that not every training needs is made only when somebody asks.

# %%
#| default_exp data.rows

# %%
#| export
from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import numpy as np
import torch

from scalelab.data.packing import Layout
from scalelab.data.shards import Shards, WindowReader

# %%
#| hide
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from scalelab.data.packing import MODES, build_plan
from scalelab.data.shards import ShardWriter

room = Path(tempfile.mkdtemp(prefix="stream-"))


def make_corpus(name, n_docs=600, seed=0, domains=("prose", "code", "dialogue"), shard_tokens=9_000, mean=60):
    "Write documents of random ids under room/name and open them."
    rng = np.random.default_rng(seed)
    share = np.array([0.6, 0.3, 0.1])[: len(domains)]
    with ShardWriter(room / name, "h", 257, 256, shard_tokens=shard_tokens) as w:
        for i in range(n_docs):
            n = 1 + int(rng.exponential(mean))
            w.add(rng.integers(0, 256, n), n, rng.choice(domains, p=share / share.sum()), source=f"site {i % 4}")
    return Shards(room / name)


# %% [markdown]
# ## The batch
# What the model gets. `labels` are the next tokens, -100 where nothing is counted. `document_ids` number the documents inside a row, so that attention can keep them apart, and `position_ids` restart in each.
# Padding is a document of its own.


# %%
#| export
@dataclass
class Batch:
    """Rows for the model; all int64. B rows of T tokens.

    input_ids, labels (-100: not counted), position_ids (restart in each document), document_ids (0, 1, ... inside
    a row) [B, T]; domain_ids, sample_ids (row of the plan) [B]. Labels may share memory with input_ids: replace a
    field, don't write into it.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor
    domain_ids: torch.Tensor
    sample_ids: torch.Tensor

    @property
    def n_valid(self) -> int:
        "Number of labels that count."
        return int((self.labels != -100).sum())

    def _map(self, f) -> Batch:
        return Batch(**{x.name: f(getattr(self, x.name)) for x in fields(self)})

    def to(self, device, non_blocking: bool = False) -> Batch:
        "The batch on `device`."
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def slice(self, start: int, stop: int) -> Batch:
        "Rows start .. stop - 1 (views): a micro-batch."
        return self._map(lambda t: t[start:stop])

    def __len__(self) -> int:
        return len(self.input_ids)


# %%
small = Batch(*(torch.arange(12).reshape(4, 3) for _ in range(4)), torch.arange(4), torch.arange(4))
small.labels = torch.where(small.labels > 9, -100, small.labels)
assert len(small) == 4 and small.n_valid == 10
assert small.slice(1, 3).input_ids.tolist() == [[3, 4, 5], [6, 7, 8]]
assert small.to("cpu").sample_ids.tolist() == [0, 1, 2, 3] and small.slice(3, 4).n_valid == 1

# %% [markdown]
# Where documents begin needs no table: a piece begins one, and so does each `EOT`. From those places alone follow both the positions and the numbers of the documents, for a whole batch at once.

# %%
#| export
_ramp = functools.lru_cache(maxsize=8)(np.arange)


def number_documents(begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    "(position_ids, document_ids) [B, T] from a mask of the places where documents begin; each row begins with one."
    n, t = begins.shape
    first = begins.ravel().nonzero()[0]
    length = np.empty_like(first)
    np.subtract(first[1:], first[:-1], out=length[:-1])
    length[-1] = n * t - first[-1]
    in_row = _ramp(len(first)) - np.searchsorted(first, _ramp(0, n * t, t))[first // t]
    positions = np.repeat(first, length)
    np.subtract(_ramp(n * t), positions, out=positions)
    return positions.reshape(n, t), np.repeat(in_row, length).reshape(n, t)


# %%
mask = np.array([[1, 0, 0, 1], [1, 1, 0, 0]], bool)
positions, documents = number_documents(mask)
assert positions.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2]] and documents.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1]]

# %% [markdown]
# Not every training asks for them, and working them out costs more than the tokens themselves. So they are made when somebody looks: the class below stands for a batch of which only tokens and labels are there yet.


# %%
#| export
class _RowBatch(Batch):
    "A Batch of rows; what tells documents and domains apart is worked out when it is first asked for."

    @classmethod
    def of(cls, rows: np.ndarray, reader: RowReader, tokens: np.ndarray, labels: np.ndarray, begins) -> _RowBatch:
        "tokens, labels: int64 [B, T]. begins() gives the mask of the places where documents begin."
        batch = cls.__new__(cls)
        batch.input_ids, batch.labels = torch.from_numpy(tokens), torch.from_numpy(labels)
        batch._rows, batch._reader, batch._begins = rows, reader, begins
        return batch

    @functools.cached_property
    def _numbered(self) -> tuple[np.ndarray, np.ndarray]:
        return number_documents(self._begins())

    @functools.cached_property
    def position_ids(self) -> torch.Tensor:
        if not self._reader.reset_positions:
            return torch.arange(self.input_ids.shape[1]).expand(self.input_ids.shape)
        return torch.from_numpy(self._numbered[0])

    @functools.cached_property
    def document_ids(self) -> torch.Tensor:
        if not self._reader.isolate:
            return torch.zeros(1, dtype=torch.int64).expand(self.input_ids.shape)
        return torch.from_numpy(self._numbered[1])

    @functools.cached_property
    def domain_ids(self) -> torch.Tensor:
        return torch.from_numpy(self._reader.plan.domains_of(self._rows))

    @functools.cached_property
    def sample_ids(self) -> torch.Tensor:
        return torch.from_numpy(np.array(self._rows, np.int64))


# %% [markdown]
# Filling it: rows that are one window of a file each (nearly all, when documents are laid end to end) are read at once and widened to int64 in one pass, and labels are the same memory one token further. Other rows are put together piece by piece.


# %%
#| export
class RowReader:
    """Rows of a plan (or of what has its seq_len, starts_of and domains_of) as batches, in the order given.

    isolate: number the documents of a row; else all of it is document 0. reset_positions: begin at 0 in each document;
    else positions run through the row.
    """

    def __init__(self, shards: Shards, plan: Layout, isolate: bool = True, reset_positions: bool = True):
        self.shards, self.plan, self.isolate, self.reset_positions = shards, plan, isolate, reset_positions
        self._windows = WindowReader(shards, plan.seq_len + 1)

    def read(self, rows: np.ndarray) -> Batch:
        "The rows as a Batch."
        starts = self.plan.starts_of(rows)
        if len(rows) == 0 or min(starts.tolist()) < 0:
            return self._assemble(np.asarray(rows, np.int64))
        narrow = self._windows.read(starts)
        wide = narrow.astype(np.int64)

        def begins() -> np.ndarray:
            mask = (narrow == self.shards.eot_id)[:, :-1]
            mask[:, 0] = True
            return mask

        return _RowBatch.of(rows, self, wide[:, :-1], wide[:, 1:], begins)

    def _assemble(self, rows: np.ndarray) -> Batch:
        "Rows of several pieces, or with padding: EOT as the token, -100 as the label, and a document of its own."
        n, t, plan = len(rows), self.plan.seq_len, self.plan
        tokens, labels = np.full((n, t), self.shards.eot_id, np.int64), np.full((n, t), -100, np.int64)
        begin, end, mask = plan.row_start[rows].tolist(), plan.row_start[rows + 1].tolist(), np.zeros((n, t), bool)
        for i in range(n):
            at, pieces = 0, slice(begin[i], end[i])
            for start, m in zip(plan.piece_start[pieces].tolist(), plan.piece_length[pieces].tolist()):
                window = self.shards.window(start, m + 1)
                tokens[i, at : at + m], labels[i, at : at + m] = window[:-1], window[1:]
                mask[i, at : at + m] = window[:-1] == self.shards.eot_id
                mask[i, at] = True
                at += m
            mask[i, at : at + 1] = True
        return _RowBatch.of(rows, self, tokens, labels, lambda: mask)


# %% [markdown]
# A row with two documents and a tail of padding, in full. The texts are *abcd*, *xy* and *z*, the `EOT` is `.`:

# %%
with ShardWriter(room / "abc", "h", 257, ord("."), shard_tokens=100) as w:
    for text in ("abcd", "xy", "z"):
        w.add(list(text.encode()), len(text), "letters")
abc = Shards(room / "abc")
batch = RowReader(abc, build_plan(abc, 6)).read(np.arange(2))
show = lambda ids: " ".join("·" if i < 0 else chr(i) for i in ids)
for row in range(2):
    print(f"row {row} inputs  ", show(batch.input_ids[row].tolist()))
    print("      labels  ", show(batch.labels[row].tolist()))
    print("      position", *batch.position_ids[row].tolist())
    print("      document", *batch.document_ids[row].tolist())
assert show(batch.labels[0].tolist()) == "a b c d . x" and show(batch.labels[1].tolist()) == "y . z . · ·"
assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 2, 2]]
assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 0, 1, 0, 1]] and batch.n_valid == 10

# %% [markdown]
# The `d` at the end of *abcd* has the label `.`: the text ends. The second row begins inside *xy*, at position 0 of a document 0. Labels with a `·` are not counted.
#
# Quick ways want a slow one to be held against: the same rows by a loop that a reader can check, on a corpus of three domains over several shards, in all modes and for any choice of rows.


# %%
def slowly(shards, plan, row):
    "Tokens, labels, positions and documents of one row, one token after the other."
    out = []
    for p in range(plan.row_start[row], plan.row_start[row + 1]):
        for k in range(plan.piece_length[p]):
            token, label = shards.window(int(plan.piece_start[p]) + k, 2).tolist()
            new = k == 0 or token == shards.eot_id
            document = out[-1][3] + new if out else 0
            out.append((token, label, 0 if new else out[-1][2] + 1, document))
    padding = plan.seq_len - len(out)
    return out + [(shards.eot_id, -100, k, out[-1][3] + 1) for k in range(padding)]


shards = make_corpus("three")
rng = np.random.default_rng(1)
for mode, t in [(m, t) for m in MODES for t in (16, 64)]:
    plan = build_plan(shards, t, mode)
    reader = RowReader(shards, plan)
    whole = np.flatnonzero(plan.window >= 0)
    for rows in (rng.permutation(plan.n_rows)[:60], whole[:20], whole[-3:]):
        got = reader.read(rows)
        parts = (got.input_ids, got.labels, got.position_ids, got.document_ids)
        want = np.array([slowly(shards, plan, r) for r in rows]).reshape(len(rows), t, 4)
        assert all((part.numpy() == want[:, :, k]).all() for k, part in enumerate(parts))
        assert got.sample_ids.tolist() == rows.tolist() and all(part.dtype == torch.int64 for part in parts)
        assert all(plan.domain_start[d] <= r < plan.domain_start[d + 1] for d, r in zip(got.domain_ids.tolist(), rows))

# %% [markdown]
# And nothing may be lost or counted twice: every document token and every closing `EOT` is a label exactly once, predicted from the token before it.

# %%
want = []
for i in range(shards.n_docs):
    with_ends = [256, *shards.document(i).tolist(), 256]
    want += zip(with_ends[:-1], with_ends[1:])
for mode in MODES:
    plan = build_plan(shards, 64, mode)
    all_rows = RowReader(shards, plan).read(np.arange(plan.n_rows))
    counted = all_rows.labels != -100
    assert sorted(zip(all_rows.input_ids[counted].tolist(), all_rows.labels[counted].tolist())) == sorted(want)
    assert (counted.sum(1).numpy() == plan.n_valid).all()
edited = replace(all_rows, labels=torch.zeros_like(all_rows.labels))  # a lazy batch is a batch
assert edited.n_valid == edited.labels.numel() and torch.equal(edited.position_ids, all_rows.position_ids)
bare = RowReader(shards, plan, isolate=False, reset_positions=False).read(np.arange(3))
assert bare.document_ids.sum() == 0 and (bare.position_ids == torch.arange(64)).all()

# %%
#| hide
shutil.rmtree(room)

# %% [markdown]
# ## Verdict
# | question | answer |
# |---|---|
# | do the quick ways give what the slow one gives? | yes: tokens, labels, positions and documents equal those of a loop over single tokens, for all three packings and two lengths, over shard borders |
# | is a label lost or counted twice? | no: over all rows the (token, label) pairs are those of the documents |
#
# What a batch costs is measured at the end of the next chapter.
