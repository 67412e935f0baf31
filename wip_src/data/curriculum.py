# %% [markdown]
# # From easy to hard
#
# > A difficulty for every document, parts of equal size by difficulty, and a control log that visits them in order and reads each row once.
#
# A curriculum shows easy text first. What is easy must be a number that can be computed for every document, and the order must stay a function of the number of consumed samples, or a run can't be resumed. Both come from what is there: documents are numbered by difficulty when rows are
# packed, the numbers become groups, and the control log visits the groups.
#
# **The claim this is for** (B-curr, second article): easy-to-hard order uses data better. The lab trains with it; here we make sure that the order is what it says.

# %%
#| default_exp data.curriculum

# %%
#| export
from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from scalelab.core.config import UsageError, did_you_mean
from scalelab.data.mixture import ControlLog
from scalelab.data.packing import Plan, build_plan
from scalelab.data.shards import Shards

# %%
#| hide
import shutil
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from scalelab.core.plotting import style
from scalelab.data.documents import read_documents
from scalelab.data.mixture import SampleOrder
from scalelab.data.shards import ShardWriter
from scalelab.data.stream import Stream

style()
room = Path(tempfile.mkdtemp(prefix="curriculum-"))


def refusal(function, *args, **options):
    "The message of the UsageError that this call must raise."
    try:
        function(*args, **options)
    except UsageError as e:
        return str(e)
    raise AssertionError(f"{function.__name__} accepted {args}")


# %% [markdown]
# The project's samples as shards of bytes: two languages, code and more, a few hundred documents.

# %%
docs = sorted(read_documents(["../../data_samples/*.jsonl"]), key=lambda d: (d["domain"], d["id"]))
with ShardWriter(room / "samples", "bytes", 257, 256) as w:
    for d in docs:
        w.add(np.frombuffer(d["text"].encode(), np.uint8), len(d["text"].encode()), d["domain"])
shards = Shards(room / "samples")
print(shards)

# %% [markdown]
# ## Three measures of difficulty
# Length is the oldest. Compressibility says how much a text repeats itself. Surprise asks how rare its tokens are in the whole split, which is the perplexity of the simplest model there is; a better model's score can be handed in as a column.


# %%
#| export
def _surprise(shards: Shards) -> Callable[[np.ndarray], float]:
    counts = np.zeros(shards.vocab_size, np.int64)
    for tokens in shards.tokens:
        counts += np.bincount(tokens, minlength=shards.vocab_size)
    bits = -np.log2((counts + 1) / (counts + 1).sum())
    return lambda ids: float(bits[ids].mean())


MEASURES: dict[str, Callable[[Shards], Callable[[np.ndarray], float]]] = {
    "length": lambda shards: len,
    "compressibility": lambda shards: lambda ids: len(zlib.compress(ids.tobytes(), 6)) / (ids.nbytes or 1),
    "surprise": _surprise,
}


def difficulty(shards: Shards, measure: str | Callable[[np.ndarray], float] = "surprise") -> np.ndarray:
    """A number for each document, higher for harder [n_docs].

    measure: "length" (tokens), "compressibility" (compressed / plain size), "surprise" (mean bits of its tokens
    by their frequency in the split), or a function of a document's token ids. Raises UsageError for another name,
    or a number that is not finite.
    """
    if isinstance(measure, str) and measure not in MEASURES:
        raise UsageError(
            f"difficulty {measure!r}: expected {', '.join(MEASURES)} or a function{did_you_mean(measure, MEASURES)}"
        )
    score = MEASURES[measure](shards) if isinstance(measure, str) else measure
    scores = np.array([float(score(shards.document(i))) for i in range(shards.n_docs)])
    if not np.isfinite(scores).all():
        raise UsageError(
            f"difficulty: document {int(np.flatnonzero(~np.isfinite(scores))[0])} has "
            f"{scores[~np.isfinite(scores)][0]}, expected a finite number"
        )
    return scores


# %%
scores = {m: difficulty(shards, m) for m in MEASURES}
assert (scores["length"] == shards.lengths).all() and (difficulty(shards, len) == shards.lengths).all()
text = shards.document(3)
freq = np.bincount(shards.tokens[0], minlength=257) + 1
assert abs(scores["surprise"][3] + np.log2(freq / freq.sum())[text].mean()) < 1e-12
assert "did you mean 'length'" in refusal(difficulty, shards, "lenght") and "document 0 has nan" in refusal(
    difficulty, shards, lambda ids: np.nan
)
for name, s in scores.items():
    easy, hard = (
        shards.document(int(i)).tobytes()[:60]
        if shards.dtype.itemsize == 1
        else bytes(shards.document(int(i))[:60].astype(np.uint8))
        for i in (s.argmin(), s.argmax())
    )
    print(f"{name:16} easiest {easy.decode(errors='replace')!r}\n{'':16} hardest {hard.decode(errors='replace')!r}")

# %% [markdown]
# ## Parts of equal size
# Sorting all documents would make each batch one kind of text: the shortest are all poems. So documents are dealt into a few parts, within each domain, each with the same number of tokens as far as whole documents allow (one long book may fill a part): so nearly every part has all domains, in about their old proportions.


# %%
#| export
def parts_by_difficulty(shards: Shards, scores: Sequence[float], parts: int = 4) -> np.ndarray:
    """Number of the part of each document [n_docs], 0 the easiest: within each domain, parts of equal tokens.

    Documents of equal score stay in their order. A domain with fewer documents than parts leaves some empty.
    Raises UsageError unless there is one finite score for each document and 1 to 256 parts.
    """
    scores = np.asarray(scores, float)
    if scores.shape != (shards.n_docs,) or not np.isfinite(scores).all():
        raise UsageError(f"{shards.directory}: expected a finite score for each of its {shards.n_docs} documents")
    if not 1 <= parts <= 256:
        raise UsageError(f"a curriculum of {parts} parts: expected 1 to 256")
    domain, tokens, part = shards.docs["domain"].astype(np.int64), shards.lengths + 1, np.zeros(shards.n_docs, np.int64)
    for d in range(len(shards.domains)):
        mine = np.flatnonzero(domain == d)
        order = mine[np.argsort(scores[mine], kind="stable")]
        middle = np.cumsum(tokens[order]) - tokens[order] / 2
        part[order] = np.minimum(middle * parts / tokens[order].sum(), parts - 1).astype(np.int64)
    return part


# %%
part = parts_by_difficulty(shards, scores["surprise"], 4)
size = np.array(
    [
        [shards.lengths[(shards.docs["domain"] == d) & (part == p)].sum() for p in range(4)]
        for d in range(len(shards.domains))
    ]
)
for name, row in zip(shards.domains, size):
    print(f"{name:14}", row)
for d in range(len(shards.domains)):
    mine = shards.docs["domain"] == d
    for p in range(3):
        assert scores["surprise"][mine & (part == p)].max(initial=-1) <= scores["surprise"][mine & (part > p)].min(
            initial=99
        )
    longest = shards.lengths[mine].max()
    assert (np.abs(size[d] - size[d].mean()) <= longest + 4).all()  # as equal as whole documents allow
assert "each of its" in refusal(parts_by_difficulty, shards, [1.0]) and "0 parts" in refusal(
    parts_by_difficulty, shards, scores["length"], 0
)

# %% [markdown]
# ## An order that visits them
# Part *k* is the stage from sample $s_k$ to $s_{k+1}$, as long as the part has rows. Only easy text for a quarter of a run would forget the hard, so a share `uniform` of each stage is drawn from all parts alike. Then each part gives $(1-u)$ of its rows in its own stage and $u$ of them spread over all: together exactly
# its number of rows, so one pass of the curriculum is one epoch.


# %%
#| export
def curriculum_log(
    plan: Plan, uniform: float = 0.2, from_sample: int = 0, samples: int | None = None, log: ControlLog = ControlLog()
) -> ControlLog:
    """Entries that visit the parts of a plan (groups named domain/number) in order of their numbers, then
    everything alike.

    uniform: share of each stage drawn from all parts by size, 0 (only the part's own) to 1 (no curriculum).
    samples: length of the curriculum (default: one epoch, in which each row comes once, to within 1 in 1,024).
    Raises UsageError for a plan without groups or a share outside 0 to 1.
    """
    if not plan.groups:
        raise UsageError(
            "curriculum: the packing plan has no groups; make it with build_plan(..., numbers=parts_by_difficulty(...))"
        )
    if not 0 <= uniform <= 1:
        raise UsageError(f"curriculum: uniform is {uniform}, expected a share from 0 to 1")
    rows, number = np.diff(plan.domain_start), np.array([int(g.rsplit("/", 1)[1]) for g in plan.groups])
    samples, at = plan.n_rows if samples is None else samples, 0.0
    for k in np.unique(number):
        mine = number == k
        weight = uniform * rows / rows.sum() + (1 - uniform) * np.where(mine, rows / rows[mine].sum(), 0)
        start = from_sample + round(at)
        if start < from_sample + samples:
            log = log.append(
                from_sample=start, mixture={g: float(w) for g, w in zip(plan.groups, weight) if w >= 1 / 1024}
            )
        at += samples * rows[mine].sum() / rows.sum()
    return log.append(
        from_sample=from_sample + samples,
        mixture={g: float(n) for g, n in zip(plan.groups, rows) if n * 1024 >= rows.sum()},
    )


# %%
plan = build_plan(shards, 16, "concat", part)
log = curriculum_log(plan, uniform=0.2)
assert (
    [e["from_sample"] for e in log.entries][0] == 0
    and log.entries[-1]["from_sample"] == plan.n_rows
    and len(log.entries) == 5
)
assert "no groups" in refusal(curriculum_log, build_plan(shards, 16)) and "1.5" in refusal(curriculum_log, plan, 1.5)

# %% [markdown]
# What does a run read? One epoch of it: the parts in their order, almost every row once, and the same rows when the run is resumed with nothing but the log.

# %%
stream = Stream(shards, 16, seed=3, control=log, plan=plan)
rows = stream.rows(0, plan.n_rows)
again = [
    Stream(shards, 16, seed=3, control=ControlLog.from_json(log.to_json()), plan=plan).rows(
        c, min(700, plan.n_rows - c)
    )
    for c in range(0, plan.n_rows, 700)
]
assert (np.concatenate(again) == rows).all()
seen = len(np.unique(rows)) / plan.n_rows
names = np.array([int(g.rsplit("/", 1)[1]) for g in plan.groups])
of = names[np.searchsorted(plan.domain_start, rows, side="right") - 1]
mean = [of[i : i + plan.n_rows // 8].mean().round(2) for i in range(0, plan.n_rows - 7, plan.n_rows // 8)]
print(
    f"rows of the split read in one epoch of samples: {seen:.1%}; mean part by eighths of the run:",
    [float(m) for m in mean],
)
assert seen > 0.97 and mean[0] < 0.6 and mean[-1] > 2.4
strict = SampleOrder(plan.domain_start, plan.groups, 3, curriculum_log(plan, uniform=0)).rows(0, plan.n_rows)
assert (np.diff(names[np.searchsorted(plan.domain_start, strict, side="right") - 1]) >= 0).all()  # nothing but in order

# %%
fig, ax = plt.subplots(figsize=(5.6, 2.1))
step = plan.n_rows // 24
at = np.arange(step, plan.n_rows + 1, step)
for p in range(4):
    ax.plot(at, [(of[e - step : e] == p).mean() for e in at], lw=1, label=f"part {p}")
ax.set(xlabel="consumed samples", ylabel="share of the last samples")
ax.legend(fontsize=7)
plt.show()

# %%
#| hide
shutil.rmtree(room)

# %% [markdown]
# What to see: each part has its stage, and a fifth of every stage is mixed from all.
#
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | B-curr: easy-to-hard uses data better | open here | the order is exact, resumable and one epoch long; whether it helps is measured in the lab at equal tokens |
#
# What this chapter does not cover: a score from a trained model (any column of numbers will do), and difficulties that change while the model learns.
