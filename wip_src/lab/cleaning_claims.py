# %% [markdown]
# # Does cleaning help?
#
# > Raw, deduplicated, filtered and leaking training sets at equal tokens: what each does to text that was held out.
#
# The first article says that 200 GB of cleaned text beat 1 TB of raw text (A-clean), that duplicates inflate validation scores and harm training (A-dup), that imprecise deduplication shows in the variance of the
# gradient (A-dupvar), and that cutting each domain at its 99.5% length loses nothing of value (A-q995). Each is tried here with unit runs of some 250,000 tokens: small enough to be repeated, too small to speak for a
# model of billions. The experiments take minutes and are run by a command; this page shows what they found.

# %%
#| default_exp lab.cleaning_claims

# %%
#| export
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from scalelab.data.classifier import train_classifier
from scalelab.data.dedup import find_duplicates
from scalelab.data.documents import read_documents
from scalelab.data.quality import apply_rules
from scalelab.data.stream import Stream
from scalelab.lab.pools import Corpus, draw, place, size
from scalelab.lab.runner import Unit, Verdict, paired, pick, run_grid, unit_run
from scalelab.model.transformer import Decoder

# %%
#| hide
import matplotlib.pyplot as plt
from IPython.display import Markdown
from scalelab.core.plotting import style
from scalelab.lab.runner import forest, load_verdicts, verdict_table

# %% [markdown]
# ## Raw text, made from known parts
# A crawl with known truth: half good text, a fifth copies of it (half of them with a line added), the rest garbled, templated and advertising pages. What cleaning removes can then be counted, and the arms train on
# what the product's own stages leave.

# %%
#| export
def copies(docs: Sequence[dict], n_bytes: int, salt: str = "copy") -> list[dict]:
    "Copies of `docs` that fill `n_bytes`, with new ids; every other one gets a line that the original has not."
    out, total, k = [], 0, 0
    while total < n_bytes:
        for doc in docs:
            line = f"\n{salt} {k}" if k % 2 else ""
            out.append(doc | {"id": f"{doc['id']}-{salt}-{k}", "text": doc["text"] + line})
            total, k = total + size([doc]), k + 1
            if total >= n_bytes:
                break
    return out


def dirty_documents(data: Path) -> list[dict]:
    "Garbled, templated and raw HTML pages of `data/2_dirty_web`."
    files = [Path(data) / "2_dirty_web" / f"{name}.jsonl.zst" for name in ("mojibake", "boilerplate_spam", "html_pages")]
    return list(read_documents(files))


def raw_crawl(corpus: Corpus, dirty: Sequence[dict], megabytes: float) -> list[dict]:
    "A pool of that size: half good, a fifth copies, three tenths dirty, in the order of draws."
    good = corpus.mixed(megabytes * 0.5)
    repeated = copies(draw(good, int(megabytes * 0.1e6), "repeated"), int(megabytes * 0.2e6))
    return sorted([*good, *repeated, *draw(dirty, int(megabytes * 0.3e6))], key=place)


def cleaned(docs: Sequence[dict]) -> list[dict]:
    "What the house rules and the removal of duplicates leave."
    kept = [done for doc in docs if (done := apply_rules(doc)[0]) is not None]
    return [kept[i] for i in find_duplicates(kept).rows]


# %%
some = [{"id": f"g{i}", "text": f"A sentence of its own, number {i}, which nobody else has written so far. " * 3} for i in range(40)]
twice = copies(some[:4], 2000)
assert size(twice) >= 2000 and len({d["id"] for d in twice}) == len(twice) and twice[0]["text"] == some[0]["text"] != twice[1]["text"]
assert {d["id"] for d in cleaned([*some, *twice])} <= {d["id"] for d in [*some, *twice]} and len(cleaned([*some[:4], *twice])) <= 4

# %% [markdown]
# ## A-clean: a fifth, cleaned
# Four arms at equal tokens: the raw crawl; the same without duplicates; cleaned; and a fifth of the raw crawl's bytes, cleaned, which the model then sees several times.

# %%
#| export
def claim_clean(corpus: Corpus, data: Path, seeds: Sequence[int], report: Callable[[str], None]) -> Verdict:
    "A-clean: cleaned text against raw text at equal tokens."
    raw = raw_crawl(corpus, dirty_documents(data), 2.0)
    clean = cleaned(raw)
    pools = {"raw": raw, "deduplicated": [raw[i] for i in find_duplicates(raw).rows], "cleaned": clean, "cleaned fifth": draw(clean, size(raw) // 5, "fifth")}
    valid, unit = {"clean": corpus.held_out()}, Unit()
    arms = {name: (lambda seed, name=name, docs=docs: unit_run(corpus.shards(f"clean-{name}", docs), valid, unit, seed)) for name, docs in pools.items()}
    results = run_grid(arms, seeds, corpus.work / "A-clean.jsonl", report)
    bpb = {name: pick(r, "bits_per_byte", "clean") for name, r in results.items()}
    gain = {name: paired(bpb["raw"], bpb[name]) for name in pools if name != "raw"}
    verdict = "holds" if gain["cleaned fifth"].sign < 0 else "holds in part" if gain["cleaned"].sign < 0 else "open"
    return Verdict(
        "A-clean", "a fifth of the text, cleaned, trains a better model than all of it raw", verdict,
        f"cleaned {gain['cleaned']}, cleaned fifth {gain['cleaned fifth']}, deduplicated only {gain['deduplicated']} bits per byte against raw",
        f"1.1 M parameters, {unit.steps * unit.rows * unit.seq_len:,} tokens an arm; pools of {', '.join(f'{k} {size(v) / 1e6:.2f} MB' for k, v in pools.items())}", len(seeds),
        {name: float(np.mean(list(v.values()))) for name, v in bpb.items()}, {name: (g.low, g.high) for name, g in gain.items()}, gain["cleaned"].smallest)


# %% [markdown]
# ## A-dup: what a leak does
# Near copies of half of the held-out documents get into the training pool. The other half tells what the model really learned.

# %%
#| export
def claim_dup(corpus: Corpus, data: Path, seeds: Sequence[int], report: Callable[[str], None]) -> Verdict:
    "A-dup, the training half: near copies of held-out documents in the training pool."
    held = sorted((d for docs in corpus.valid.values() for d in docs), key=place)
    leaked, fresh = held[::2], held[1::2]
    pool = corpus.mixed(1.0)
    valid, unit = {"leaked": corpus.shards("dup-leaked", leaked), "fresh": corpus.shards("dup-fresh", fresh)}, Unit()
    with_leak = [*draw(pool, int(1e6) - size(leaked)), *(d | {"id": d["id"] + "-leak", "text": d["text"] + "\nread more"} for d in leaked)]
    arms = {name: (lambda seed, name=name, docs=docs: unit_run(corpus.shards(f"dup-{name}", docs), valid, unit, seed)) for name, docs in {"separate": pool, "leaking": with_leak}.items()}
    results = run_grid(arms, seeds, corpus.work / "A-dup.jsonl", report)
    diff = {part: paired(pick(results["separate"], "bits_per_byte", part), pick(results["leaking"], "bits_per_byte", part)) for part in valid}
    gap = {name: {s: r["bits_per_byte"]["leaked"] - r["bits_per_byte"]["fresh"] for s, r in by_seed.items()} for name, by_seed in results.items()}
    diff["inflation"] = paired(gap["separate"], gap["leaking"])  # one model, two halves: the luck of the training drops out
    verdict = "holds" if diff["inflation"].sign < 0 and diff["fresh"].sign > 0 else "holds in part" if diff["inflation"].sign < 0 else "open"
    return Verdict(
        "A-dup-train", "near-duplicates of held-out text inflate validation scores and harm training", verdict,
        f"against the fresh half the leaked half looks better by {diff['inflation']} bits per byte (scores are inflated); the fresh half changes by {diff['fresh']}, which is the harm",
        f"1.1 M parameters, {unit.steps * unit.rows * unit.seq_len:,} tokens; {len(leaked)} of {len(held)} held-out documents have a near copy in a pool of 1 MB", len(seeds),
        {part: d.mean for part, d in diff.items()}, {part: (d.low, d.high) for part, d in diff.items()}, diff["fresh"].smallest)


# %% [markdown]
# ## A-dupvar: duplicates and the gradient's variance
# The gradient of one batch is that of the text plus noise. The noise scale is the variance over batches, summed over parameters, over the squared length of the mean. Pools of equal size with 0, 10 and 30% of their bytes in copies.

# %%
#| export
def gradient_noise(model: Decoder, stream: Stream, start: int, rows: int, batches: int = 8) -> dict[str, float]:
    """Trace of the gradient's covariance over `batches` batches and the squared norm of their mean (McCandlish et al. 2018).

    `rows` rows a batch, from sample `start`; the model's own gradients are left empty.
    """
    grads = []
    for k in range(batches):
        model.zero_grad(set_to_none=True)
        loss, n = model.loss(stream.batch(start + k * rows, rows))
        (loss / n).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.zero_grad(set_to_none=True)
    stack = torch.stack(grads)
    variance = float(stack.var(dim=0).sum())
    return {"variance": variance, "signal": max(float(stack.mean(dim=0).square().sum()) - variance / batches, 0.0)}


def claim_dupvar(corpus: Corpus, data: Path, seeds: Sequence[int], report: Callable[[str], None]) -> Verdict:
    "A-dupvar: the share of copies in the pool against the variance of the gradient."
    unit, pools = Unit(), {}
    for share in (0, 10, 30):
        unique = corpus.mixed(1.0 - share / 100)
        pools[f"{share}%"] = [*unique, *copies(draw(unique, 50_000, "few"), int(share * 1e4))]

    def watch(model, stream, step):
        return gradient_noise(model, stream, unit.steps * unit.rows, unit.rows) if step in (unit.steps // 2, unit.steps) else None

    arms = {name: (lambda seed, name=name, docs=docs: unit_run(corpus.shards(f"dupvar-{name[:-1]}", docs), {"valid": corpus.held_out()}, unit, seed, watch=watch)) for name, docs in pools.items()}
    results = run_grid(arms, seeds, corpus.work / "A-dupvar.jsonl", report)
    noise = {name: {s: float(np.log(r["watched"][-1]["variance"])) for s, r in by_seed.items()} for name, by_seed in results.items()}
    bpb = {name: pick(r, "bits_per_byte", "valid") for name, r in results.items()}
    change = {name: paired(noise["0%"], noise[name]) for name in ("10%", "30%")}
    harm = {name: paired(bpb["0%"], bpb[name]) for name in ("10%", "30%")}
    verdict = "holds" if change["30%"].sign > 0 else "does not hold" if change["30%"].sign < 0 else "open"
    return Verdict(
        "A-dupvar", "duplicates left in the text show directly in the variance of the gradient", verdict,
        f"log variance changes by {change['30%']} at 30% copies; held-out bits per byte by {harm['30%']}",
        f"1.1 M parameters, {unit.steps * unit.rows * unit.seq_len:,} tokens, variance over 8 batches after the last step", len(seeds),
        {f"log variance {n}": d.mean for n, d in change.items()} | {f"bits per byte {n}": d.mean for n, d in harm.items()},
        {f"log variance {n}": (d.low, d.high) for n, d in change.items()} | {f"bits per byte {n}": (d.low, d.high) for n, d in harm.items()}, change["30%"].smallest)


# %% [markdown]
# ## A-q995: cut or chunk
# Cutting every document at its domain's 99.5% length throws the ends of the longest away. How much text is that, and does a model that never saw the ends read ends worse?

# %%
#| export
def long_tails(docs: Sequence[dict], quantile: float = 0.995) -> tuple[dict[str, int], dict[str, float]]:
    "By domain: the length quantile in characters, and the share of the text that lies beyond it."
    lengths = defaultdict(list)
    for doc in docs:
        lengths[str(doc.get("domain"))].append(len(doc["text"]))
    limits = {d: int(np.quantile(v, quantile)) for d, v in lengths.items()}
    lost = {d: sum(max(0, n - limits[d]) for n in v) / sum(v) for d, v in lengths.items()}
    return limits, lost


def claim_q995(corpus: Corpus, data: Path, seeds: Sequence[int], report: Callable[[str], None]) -> Verdict:
    "A-q995: truncating at each domain's 99.5% length against keeping everything."
    files = sorted(p for p in (Path(data) / "1_pretrain").glob("*.zst") if not p.name.startswith("NC_"))
    docs = list(read_documents(files))
    limits, lost = long_tails(docs)
    long = [d for d in docs if len(d["text"]) > limits[str(d.get("domain"))] and d.get("domain") in ("law", "classical", "docs", "manual")]
    tails = [d | {"text": d["text"][limits[str(d["domain"])]:][:6000]} for d in sorted(long, key=place)]
    half = len(tails) // 2
    kept_ids = {d["id"] for d in tails[:half]}
    whole = [d for d in sorted(long, key=place) if d["id"] not in kept_ids]
    whole = draw(whole, 1_500_000, longest=10**6)
    base = corpus.mixed(0.6)
    cut = [d | {"text": d["text"][: limits[str(d["domain"])]]} for d in whole]
    unit, valid = Unit(), {"ends": corpus.shards("q995-ends", tails[:half]), "valid": corpus.held_out()}
    arms = {name: (lambda seed, name=name, pool=pool: unit_run(corpus.shards(f"q995-{name}", [*base, *pool]), valid, unit, seed)) for name, pool in {"chunked": whole, "truncated": cut}.items()}
    results = run_grid(arms, seeds, corpus.work / "A-q995.jsonl", report)
    diff = {part: paired(pick(results["chunked"], "bits_per_byte", part), pick(results["truncated"], "bits_per_byte", part)) for part in valid}
    total = sum(len(d["text"]) for d in docs)
    share = sum(max(0, len(d["text"]) - limits[str(d.get("domain"))]) for d in docs) / total
    worst = max(lost, key=lost.get)
    verdict = "does not hold" if share > 0.01 else "holds"
    return Verdict(
        "A-q995", "cutting each domain at its 99.5% length keeps the value of the long tail", verdict,
        f"the cut throws away {share:.1%} of all text, {lost[worst]:.1%} of {worst}; chunking keeps it all and packing has no stalls; on ends never seen, truncated training differs by {diff['ends']} bits per byte",
        f"{len(docs):,} documents, {total / 1e6:.0f} M characters; trained: 1.1 M parameters, {unit.steps * unit.rows * unit.seq_len:,} tokens, {len(whole)} long documents in the pool, {half} for the test", len(seeds),
        {"share lost": share, "ends, truncated - chunked": diff["ends"].mean, "valid, truncated - chunked": diff["valid"].mean} | {f"lost {d}": v for d, v in sorted(lost.items())},
        {"ends, truncated - chunked": (diff["ends"].low, diff["ends"].high), "valid, truncated - chunked": (diff["valid"].low, diff["valid"].high)}, diff["ends"].smallest)


# %% [markdown]
# ## B-strict: how strict?
# A classifier ranks the deduplicated crawl; it was trained on other good text and on the other half of the dirty pages. Mild keeps 80% of the bytes, strict 40%: by then good text goes too. Which one is better at equal tokens?

# %%
#| export
def claim_strict(corpus: Corpus, data: Path, seeds: Sequence[int], report: Callable[[str], None]) -> Verdict:
    "B-strict: no filter, a mild and a strict one, by the score of a quality classifier."
    dirty = sorted(dirty_documents(data), key=place)
    raw = raw_crawl(corpus, dirty[::2], 2.0)
    raw = [raw[i] for i in find_duplicates(raw).rows]
    bad, known = {d["id"] for d in dirty}, {d["id"].split("-copy")[0] for d in raw}
    good = [d["text"][:4000] for docs in corpus.train.values() for d in docs if d["id"] not in known]
    junk = [d["text"][:4000] for d in dirty[1::2]]
    judge = train_classifier([*good, *junk], [1] * len(good) + [0] * len(junk))
    ranked = [doc for _, doc in sorted(zip(judge.score([d["text"][:4000] for d in raw]), raw), key=lambda pair: (-pair[0], place(pair[1])))]
    total, pools, made = size(raw), {}, {}
    for name, share in (("all", 1.0), ("mild", 0.8), ("strict", 0.4)):
        kept, filled = [], 0
        for doc in ranked:
            if filled < share * total:
                kept.append(doc)
                filled += size([doc])
        pools[name] = kept
        made[name] = size(d for d in kept if d["id"] in bad) / size(kept)
    unit, valid = Unit(), {"clean": corpus.held_out()}
    arms = {name: (lambda seed, name=name, docs=docs: unit_run(corpus.shards(f"strict-{name}", docs), valid, unit, seed)) for name, docs in pools.items()}
    results = run_grid(arms, seeds, corpus.work / "B-strict.jsonl", report)
    bpb = {name: pick(r, "bits_per_byte", "clean") for name, r in results.items()}
    mild, strict, between = paired(bpb["all"], bpb["mild"]), paired(bpb["all"], bpb["strict"]), paired(bpb["mild"], bpb["strict"])
    verdict = "holds" if between.sign < 0 else "does not hold" if between.sign > 0 else "open"
    return Verdict(
        "B-strict", "filter strictly at first: rather remove good text than keep bad", verdict,
        f"strict against mild {between}; mild against no filter {mild}, strict against none {strict} bits per byte; dirty text is {made['all']:.0%}, {made['mild']:.0%} and {made['strict']:.0%} of the three pools",
        f"1.1 M parameters, {unit.steps * unit.rows * unit.seq_len:,} tokens an arm; pools of {', '.join(f'{size(p) / 1e6:.2f} MB' for p in pools.values())}", len(seeds),
        {name: float(np.mean(list(v.values()))) for name, v in bpb.items()} | {f"dirty share, {n}": v for n, v in made.items()},
        {"mild - all": (mild.low, mild.high), "strict - all": (strict.low, strict.high), "strict - mild": (between.low, between.high)}, between.smallest)


# %%
limits, lost = long_tails([{"domain": "a", "text": "x" * n} for n in range(1, 1001)])
assert limits == {"a": 995} and abs(lost["a"] - (5 * 6 / 2) / 500500) < 1e-4

# %% [markdown]
# ## What came out
# `scalelab claims ID --data DIR` ran each experiment once; this page reads the files that it wrote. A dot that is filled lies on an interval without zero.

# %%
style()
found = {v["id"]: v for v in load_verdicts("..")}
verdicts = [found[name] for name in ("A-clean", "A-dup-train", "A-dupvar", "A-q995", "B-strict") if name in found]
for v in verdicts:
    print(f"{v['id']:14} {v['verdict']:14} smallest effect that would have been seen: {v['smallest_effect']}")

# %%
if verdicts:
    forest(verdicts, "difference in bits per byte, 95% interval; left of zero is better")
    plt.show()

# %% [markdown]
# ## Verdict

# %%
#| echo: false
Markdown(verdict_table(verdicts))
