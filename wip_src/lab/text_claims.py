# %% [markdown]
# # Claims about reports, years and noise
#
# > Three claims that can be judged by looking at text and batches, without training a model: conflicts by cosine, weights by year, noise on the inputs.
#
# Each function returns a verdict with its figures; `scalelab claims ID --data DIR` runs it again.

# %%
#| default_exp lab.text_claims

# %%
#| export
from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import scalelab
from scalelab.core.config import UsageError
from scalelab.data.consistency import ConsistencyOptions, disagreements, judge_rule, mine_candidates, wilson
from scalelab.data.dedup import jaccard, shingles
from scalelab.data.documents import read_documents
from scalelab.data.freshness import year_of
from scalelab.data.noise import NoiseOptions, apply
from scalelab.data.semantic import HashedEmbedder, e5_embedder
from scalelab.data.stream import Batch
from scalelab.lab.runner import Verdict

# %% [markdown]
# ## Conflicting reports (A-conf)


# %%
#| export
def report_pairs() -> list[dict]:
    "The labelled pairs of reports in `data_samples/reports`; UsageError when the package was installed without them."
    file = Path(scalelab.__file__).resolve().parents[1] / "data_samples" / "reports" / "pairs.jsonl"
    if not file.is_file():
        raise UsageError(f"{file}: is missing; run this in a checkout of the project")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def pair_cosines(pairs: Sequence[dict], embed: Callable[[Sequence[str]], np.ndarray]) -> np.ndarray:
    "Cosine of both sides of each pair, float64 [n]."
    a, b = embed([p["a"] for p in pairs]), embed([p["b"] for p in pairs])
    return (a * b).sum(axis=1).astype(float)


def claim_conflict(corpus: Any, data: Path, seeds: Sequence[int], report: Callable[[str], None]) -> list[Verdict]:
    "A-conf, and what embeddings find that shared characters don't."
    pairs = report_pairs()
    conflict = [p["label"] == "conflict" for p in pairs]
    retold = np.array([p["wording"] == "far" for p in pairs])
    embedders = {"hashed": HashedEmbedder([p[s] for p in pairs for s in "ab"]), "e5": e5_embedder()}
    cosines = {name: pair_cosines(pairs, embed) for name, embed in embedders.items()}
    rules = {f"cosine_below_0.65_{name}": judge_rule(conflict, (c < 0.65).tolist()) for name, c in cosines.items()}
    rules["facts_differ"] = judge_rule(conflict, [bool(disagreements(p["a"], p["b"])) for p in pairs])
    best = {name: float(max(np.mean((c < t) == conflict) for t in np.unique(c))) for name, c in cosines.items()}
    chapters = (
        list(read_documents([data / "6_near_dup" / "same_event_classical.jsonl.zst"]))
        if (data / "6_near_dup").is_dir()
        else []
    )
    report(f"A-conf: {len(pairs)} pairs, {len(chapters)} chapters")
    first = Verdict(
        "A-conf",
        "pairs of reports of one event with an embedding cosine below 0.65 are conflicting",
        "does not hold",
        _conflict_sentence(rules, conflict),
        f"{len(pairs)} labelled pairs of reports, Chinese and English",
        1,
        {name: {k: r[k] for k in ("called", "precision", "recall")} for name, r in rules.items()}
        | {"share_conflicting": float(np.mean(conflict)), "best_accuracy_of_any_cosine_line": best}
        | {"same_event_chapters": _chapter_figures(chapters)},
        {name: {"precision": r["precision_interval"], "recall": r["recall_interval"]} for name, r in rules.items()},
        "a precision that differs from the share of conflicting pairs by 0.2",
    )
    return [first, _semantic_verdict(pairs, cosines["e5"], embedders["e5"], retold)]


# %%
#| export
def _conflict_sentence(rules: dict[str, dict], conflict: Sequence[bool]) -> str:
    h, e, f = (rules[k] for k in ("cosine_below_0.65_hashed", "cosine_below_0.65_e5", "facts_differ"))
    return (
        f"below 0.65 in character TF-IDF lie {h['called']} pairs, {h['precision']:.0%} of them conflicting, where "
        f"{np.mean(conflict):.0%} of all pairs are; with multilingual-e5-small {e['called']} pairs lie below 0.65; "
        f"differing numbers, dates and names find {f['recall']:.0%} of the conflicts at {f['precision']:.0%} precision"
    )


def _chapter_figures(chapters: Sequence[dict]) -> dict[str, Any]:
    """Histories on the same events: how many pairs of one event lie below 0.65, and how many candidates come out for
    a person.
    """
    if not chapters:
        return {"chapters": 0}
    texts = [d["text"] for d in chapters]
    vectors = HashedEmbedder(texts)(texts)
    pairs = [(i, j) for i in range(len(chapters)) for j in range(i) if chapters[i]["event"] == chapters[j]["event"]]
    cosine = [float(vectors[i] @ vectors[j]) for i, j in pairs]
    found = mine_candidates(chapters, ConsistencyOptions(min_cosine=0.1))
    event = {str(d["id"]): d["event"] for d in chapters}
    return {
        "chapters": len(chapters),
        "pairs_of_one_event": len(pairs),
        "of_these_below_0.65": float(np.mean(np.array(cosine) < 0.65)),
        "candidates": len(found),
        "candidates_of_one_event": float(np.mean([event[c.a] == event[c.b] for c in found])) if found else float("nan"),
    }


# %%
#| export
def _semantic_verdict(pairs: Sequence[dict], cosine: np.ndarray, embed: Callable, retold: np.ndarray) -> Verdict:
    "Paraphrases: recall of the model and of shared characters at one false pair in a hundred."
    overlap = np.array([jaccard(shingles(p["a"]), shingles(p["b"])) for p in pairs])
    a, b = embed([p["a"] for p in pairs]), embed([p["b"] for p in pairs])
    texts = {p["a"][:12]: i for i, p in enumerate(pairs)}  # the same event comes with several labels
    other = [
        float(a[i] @ b[j])
        for i in range(len(pairs))
        for j in range(len(pairs))
        if texts[pairs[i]["a"][:12]] != texts[pairs[j]["a"][:12]] and pairs[i]["lang"] == pairs[j]["lang"]
    ]
    line = float(np.sort(other)[int(0.99 * len(other))])
    found, by_characters = float(np.mean(cosine[retold] >= line)), float(np.mean(overlap[retold] >= 0.8))
    return Verdict(
        "semantic",
        "an embedding model finds retold text that shared characters miss",
        "holds in part",
        f"at a line that one unrelated pair in 100 passes ({line:.3f}) multilingual-e5-small finds {found:.0%} of "
        f"the retold pairs, 5-gram Jaccard >= 0.8 finds {by_characters:.0%}",
        f"{len(pairs)} pairs of reports, {len(other)} unrelated pairs",
        1,
        {
            "line": line,
            "retold_found": found,
            "retold_found_by_jaccard": by_characters,
            "e5_pairs": cosine.tolist(),
            "e5_unrelated": sorted(other)[:: max(1, len(other) // 200)],
        },
    )


# %%
pairs = report_pairs()
assert len(pairs) == 44 and {p["label"] for p in pairs} == {"agree", "conflict"}
assert pair_cosines(pairs[:3], HashedEmbedder()).shape == (3,)

# %% [markdown]
# ## Weights by year (A-fresh, the formula)


# %%
#| export
def read_years(docs: Sequence[dict]) -> dict[str, Any]:
    "Of documents with a recorded year: how many have one in their text, and how often it is the same."
    known = [
        (year_of({"text": d["text"]})[0], y) for d in docs if (y := year_of({"year": d.get("year")})[0]) is not None
    ]
    found = [got == y for got, y in known if got is not None]
    share = len(found) / max(1, len(known))
    right = sum(found) / max(1, len(found))
    return {
        "n": len(found),
        "known": len(known),
        "found": share,
        "precision": right,
        "interval": wilson(sum(found), len(found)),
    }


# %%
#| export
def claim_fresh_formula(corpus: Any, data: Path, seeds: Sequence[int], report: Callable[[str], None]) -> Verdict:
    "A-fresh, the formula: later years, documents without a year, and years that are read from the text."
    files = sorted((data / "1_pretrain").glob("*.jsonl.zst"))
    total = known = 0
    extraction: dict[str, dict[str, Any]] = {}
    for file in files:
        docs = list(read_documents([file]))
        years = read_years(docs)
        total, known = total + len(docs), known + years["known"]
        if years["n"] >= 20:
            extraction[file.name.split(".")[0]] = years
    report(f"A-fresh: {total} documents")
    unknown = 1 - known / max(1, total)
    named = "; ".join(
        f"in {k} it is found in {v['found']:.0%} of the texts and right in {v['precision']:.0%}"
        for k, v in extraction.items()
    )
    return Verdict(
        "A-fresh",
        "documents can be weighted by 1/(2024 - year + 1)",
        "does not hold",
        f"the formula divides by zero for 2025 and is negative after it, and {unknown:.0%} of {total:,} documents "
        f"have no year; read from the text itself: {named or 'nowhere'}",
        f"{total:,} documents of {len(files)} sources",
        1,
        {
            "documents": total,
            "share_without_year": unknown,
            "weight_2026": 1 / (2024 - 2026 + 1),
            "extraction": extraction,
        },
        {"share_without_year": wilson(total - known, total)},
        "none: counts",
    )


# %% [markdown]
# ## Noise on the inputs (A-noise, the leak)


# %%
#| export
def claim_noise_inputs(corpus: Any, data: Path, seeds: Sequence[int], report: Callable[[str], None]) -> Verdict:
    "A-noise, the inputs: positions whose label is given away by a swap, on real text as bytes."
    texts = [d["text"] for d in read_documents([data / "1_pretrain" / "zh_wiki_cmrc.jsonl.zst"])][:400]
    stream = np.frombuffer("\n".join(texts).encode(), np.uint8).astype(np.int64)
    rows = len(stream) // 513
    tokens = stream[: rows * 513].reshape(rows, 513)
    zero = np.zeros((rows, 512), np.int64)
    shares, counts = {}, None
    for name, swap, free in (("clean", 0.0, False), ("article", 0.15, False), ("leak_free", 0.15, True)):
        found = []
        for seed in seeds:
            batch = Batch(tokens[:, :-1], tokens[:, 1:], zero, zero, zero[:, 0], np.arange(rows))
            noisy, counts = apply(batch, NoiseOptions(samples=1, swap=swap, leak_free=free, mask_id=0, seed=seed))
            counted = noisy.labels != -100
            found.append(float((noisy.input_ids == noisy.labels)[counted].mean()))
        shares[name] = float(np.mean(found))
    report(f"A-noise: {rows} rows of 512 bytes")
    return Verdict(
        "A-noise",
        "masking 3%, swapping 15% and 1% homophones on the inputs of 5% of the samples, labels unchanged, adds "
        "robustness",
        "open",
        f"as input noise for a causal model the swaps give answers away: the input of a position is its own label "
        f"at {shares['article']:.1%} of the positions of a noisy sample, {shares['clean']:.1%} in clean text; "
        f"not counting those positions brings it to {shares['leak_free']:.1%}. Whether what remains adds "
        f"robustness needs a training",
        f"{rows:,} rows of 512 bytes of Chinese text",
        len(seeds),
        shares,
        {},
        "differences between seeds are below 0.1 points",
    )


# %%
assert claim_fresh_formula.__doc__ and claim_noise_inputs.__doc__

# %% [markdown]
# ## Verdict
# The verdicts are files beside the chapters that they belong to:

# %%
folder = Path("../01_data/results")
for name in ("A-conf", "semantic", "A-fresh", "A-noise"):
    v = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    print(f"{name}: {v['verdict']}. {v['because']}\n")
