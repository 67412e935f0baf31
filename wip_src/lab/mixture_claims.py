# %% [markdown]
# # What to mix, and in which order?
#
# > Code or no code, 60/20/15/5 or equal parts, easy first or at random, noise on the inputs, fresh text first, a large or a small vocabulary: each at equal tokens or equal compute.
#
# The second article gives numbers for the mixture (B-mix), says that code improves logic and structure elsewhere (B-code), that easy-to-hard order and resampling by loss use data better (B-curr), and that 30 to 50 thousand
# tokens are enough (B-vocab); the first one adds noise to inputs (A-noise) and weights by year (A-fresh). None of these claims comes with a seed. Here they have three.

# %%
#| default_exp lab.mixture_claims

# %%
#| export
from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from scalelab.data.documents import read_documents
from scalelab.data.mixture import ControlLog
from scalelab.data.shards import Shards
from scalelab.data.tokenizer import TextTokenizer, train_tokenizer
from scalelab.lab.pools import Corpus, draw, place, size
from scalelab.lab.runner import Unit, Verdict, paired, pick, run_grid, unit_run
from scalelab.model.transformer import flops_per_token
from scalelab.trainer.evaluation import evaluate

# %%
#| hide
import matplotlib.pyplot as plt
from IPython.display import Markdown
from scalelab.core.plotting import style
from scalelab.lab.runner import forest, load_verdicts, verdict_table

# %% [markdown]
# ## B-code and B-mix: weights
# Four mixtures of the same shards, at equal tokens. Held-out text of every group says who pays for what; grade-school mathematics in English, which no arm trains on, stands in for "logic and structure".

# %%
#| export
MIXTURES = {  # general, code, dialogue, professional
    "60/20/15/5": (60, 20, 15, 5), "no code": (75, 0, 18.75, 6.25), "equal": (25, 25, 25, 25), "dialogue first": (30, 10, 55, 5),
}
GROUPS = ("general", "code", "dialogue", "professional")


def mixture(weights: Sequence[float]) -> ControlLog:
    "A control log that draws GROUPS by these weights from the first sample on; groups of weight 0 are left out."
    return ControlLog().append(from_sample=0, mixture={g: float(w) for g, w in zip(GROUPS, weights) if w > 0})


def by_group(corpus: Corpus, megabytes: float) -> Shards:
    "Shards with so much text of every group, the group as domain."
    group = {d["id"]: g for g, docs in corpus.train.items() for d in docs}
    docs = [d for g in GROUPS for d in draw(corpus.train[g], int(megabytes * 1e6), "mix")]
    return corpus.shards("by-group", docs, lambda d: group[d["id"]])


def claim_mix(corpus: Corpus, data: Path, seeds: Sequence[int], report: Callable[[str], None]) -> list[Verdict]:
    "B-code and B-mix: per-domain loss against the weights of the mixture."
    train, unit = by_group(corpus, 0.9), Unit()
    logic = draw(list(read_documents([Path(data) / "5_eval" / "en_gsm8k_test.jsonl.zst"])), 60_000)
    valid = {"groups": corpus.held_out(), "logic": corpus.shards("logic", logic, lambda d: "logic")}
    arms = {name: (lambda seed, w=w: unit_run(train, valid, unit, seed, mixture(w))) for name, w in MIXTURES.items()}
    results = run_grid(arms, seeds, corpus.work / "B-mix.jsonl", report)
    part = {n: {g: pick(r, "by_domain", "groups", g) for g in GROUPS} | {"logic": pick(r, "bits_per_byte", "logic"), "all": pick(r, "bits_per_byte", "groups")} for n, r in results.items()}
    scale = f"1.1 M parameters, {unit.steps * unit.rows * unit.seq_len:,} tokens an arm"
    code = {g: paired(part["no code"][g], part["60/20/15/5"][g]) for g in (*GROUPS, "logic")}
    others = [g for g in ("general", "dialogue", "professional", "logic") if code[g].sign]
    helped, hurt = [g for g in others if code[g].sign < 0], [g for g in others if code[g].sign > 0]
    verdicts = [Verdict(
        "B-code", "code in the mixture improves other domains", "holds" if helped and not hurt else "holds in part" if helped else "does not hold" if hurt else "open",
        f"20% code against none at equal tokens: better in {', '.join(helped) or 'no other domain'}, worse in {', '.join(hurt) or 'none'}; code itself {code['code']}",
        scale, len(seeds), {g: d.mean for g, d in code.items()}, {g: (d.low, d.high) for g, d in code.items()}, max(d.smallest for g, d in code.items() if g != "code"))]
    equal = {g: paired(part["60/20/15/5"][g], part["equal"][g]) for g in (*GROUPS, "all")}
    talk = {g: paired(part["60/20/15/5"][g], part["dialogue first"][g]) for g in (*GROUPS, "all")}
    verdicts.append(Verdict(
        "B-mix", "60/20/15/5 is a good start; emphasise what the model should be good at", "holds in part" if talk["dialogue"].sign < 0 else "open",
        f"more dialogue makes dialogue better by {talk['dialogue']} and general text worse by {talk['general']}; over all groups with equal weight, equal parts differ from 60/20/15/5 by {equal['all']}",
        scale, len(seeds), {f"equal {g}": d.mean for g, d in equal.items()} | {f"dialogue first {g}": d.mean for g, d in talk.items()},
        {f"equal {g}": (d.low, d.high) for g, d in equal.items()} | {f"dialogue first {g}": (d.low, d.high) for g, d in talk.items()}, equal["all"].smallest))
    return verdicts


# %%
assert mixture(MIXTURES["no code"]).mixtures == [(0, {"general": 75.0, "dialogue": 18.75, "professional": 6.25})]
assert all(abs(sum(w) - 100) < 1e-9 for w in MIXTURES.values())

# %% [markdown]
# ## B-curr: order
# Difficulty is the share that a compressor leaves: repetitive text is easy. In each group the documents fall into three parts of equal bytes, and the order of the parts is a control log, as it would be in a real run.
# Resampling by loss moves weight, every 20 steps, to the groups whose loss on a small held-out part is above the mean.

# %%
#| export
def difficulty(doc: dict) -> float:
    "Share of the bytes that zlib leaves: 0.1 for a table, 0.6 for dense prose."
    raw = doc["text"].encode("utf-8", "replace")
    return len(zlib.compress(raw, 6)) / max(len(raw), 1)


def thirds(docs: Sequence[dict]) -> dict[str, str]:
    "By id: easy, middle or hard, three parts of equal bytes."
    total, seen, out = size(docs), 0, {}
    for doc in sorted(docs, key=difficulty):
        out[doc["id"]] = ("easy", "middle", "hard")[min(2, 3 * seen // max(total, 1))]
        seen += size([doc])
    return out


def ordered(first: Sequence[float], last: Sequence[float], samples: int) -> ControlLog:
    "Weights of easy, middle and hard that move from `first` to `last` in three stages, equal over groups."
    log = ControlLog()
    for k in range(3):
        w = [a + (b - a) * k / 2 for a, b in zip(first, last)]
        log = log.append(from_sample=k * samples // 3, mixture={f"{g}-{part}": float(x) for g in GROUPS for part, x in zip(("easy", "middle", "hard"), w)})
    return log


def claim_curriculum(corpus: Corpus, data: Path, seeds: Sequence[int], report: Callable[[str], None]) -> Verdict:
    "B-curr: easy-to-hard, hard-to-easy and resampling by loss against uniform order at equal tokens."
    group = {d["id"]: g for g, docs in corpus.train.items() for d in docs}
    docs = [d for g in GROUPS for d in draw(corpus.train[g], 300_000, "curriculum")]
    part = {k: v for g in GROUPS for k, v in thirds([d for d in docs if group[d["id"]] == g]).items()}
    train, unit, valid = corpus.shards("curriculum", docs, lambda d: f"{group[d['id']]}-{part[d['id']]}"), Unit(), {"valid": corpus.held_out()}
    samples = unit.steps * unit.rows

    def resample(model, stream, step):
        if step % 20 or step == unit.steps:
            return None
        loss = evaluate(model, valid["valid"], unit.seq_len, max_rows=32)["loss_by_domain"]
        mean = float(np.mean(list(loss.values())))
        weights = {f"{g}-{p}": float(np.exp(loss[g] - mean)) for g in GROUPS for p in ("easy", "middle", "hard")}
        return {"control": stream.control.append(from_sample=step * unit.rows, mixture=weights), "loss": loss}

    logs = {"uniform": ordered((1, 1, 1), (1, 1, 1), samples), "easy to hard": ordered((4, 2, 1), (1, 2, 4), samples), "hard to easy": ordered((1, 2, 4), (4, 2, 1), samples)}
    arms = {name: (lambda seed, log=log: unit_run(train, valid, unit, seed, log)) for name, log in logs.items()}
    arms["by loss"] = lambda seed: unit_run(train, valid, unit, seed, ControlLog(logs["uniform"].entries[:1]), watch=resample)
    results = run_grid(arms, seeds, corpus.work / "B-curr.jsonl", report)
    bpb = {n: pick(r, "bits_per_byte", "valid") for n, r in results.items()}
    diff = {n: paired(bpb["uniform"], bpb[n]) for n in bpb if n != "uniform"}
    better = [n for n in ("easy to hard", "by loss") if diff[n].sign < 0]
    return Verdict(
        "B-curr", "easy-to-hard order and resampling by loss use data better", "holds" if len(better) == 2 else "holds in part" if better else "does not hold" if diff["easy to hard"].sign > 0 else "open",
        f"against uniform order at equal tokens: easy to hard {diff['easy to hard']}, hard to easy {diff['hard to easy']}, by loss {diff['by loss']} bits per byte",
        f"1.1 M parameters, {samples * unit.seq_len:,} tokens of a pool of 1.2 MB, {size(corpus.valid['general']) // 1000} kB held out of each of 4 groups", len(seeds),
        {n: float(np.mean(list(v.values()))) for n, v in bpb.items()}, {n: (d.low, d.high) for n, d in diff.items()}, diff["easy to hard"].smallest)


# %%
some = [{"id": str(i), "text": ("ab" * 300)[: 300 + i] if i < 20 else "".join(chr(19968 + (i * j * 7919) % 3000) for j in range(1, 110))} for i in range(60)]
part = thirds(some)
assert part["0"] == "easy" and part["59"] == "hard" and set(part.values()) == {"easy", "middle", "hard"}
log = ordered((4, 2, 1), (1, 2, 4), 960)
assert [c for c, _ in log.mixtures] == [0, 320, 640] and log.mixtures[0][1]["code-easy"] == 4 and log.mixtures[2][1]["code-easy"] == 1

# %% [markdown]
# ## B-vocab: how many tokens
# A larger vocabulary makes texts shorter and the embedding larger. At equal compute (forward and backward FLOPs) it has to pay for itself in bits per byte, which do not depend on the tokenizer.

# %%
#| export
def claim_vocabulary(corpus: Corpus, data: Path, seeds: Sequence[int], report: Callable[[str], None]) -> Verdict:
    "B-vocab: bits per byte against the size of the vocabulary at equal training FLOPs."
    base, arms, share, shown = Unit(), {}, {}, {}
    budget = base.steps * base.rows * base.seq_len * flops_per_token(base.model(), base.seq_len)
    pool = [d for g in GROUPS for d in draw(corpus.train[g], 600_000, "vocabulary")]
    for vocab in (1024, 4096, 16384):
        path = corpus.work / f"tokenizer-{vocab}.json"
        if not path.exists():
            train_tokenizer((d["text"] for docs in corpus.train.values() for d in docs), vocab).save(path)
        tokenizer = TextTokenizer.load(path)
        unit = replace(base, vocab_size=tokenizer.vocab_size)
        unit = replace(unit, steps=max(12, round(budget / (unit.rows * unit.seq_len * flops_per_token(unit.model(), unit.seq_len)))))
        train, valid = corpus.shards(f"vocab-{vocab}", pool, tokenizer=tokenizer), {"valid": corpus.held_out(tokenizer)}
        arms[str(vocab)] = lambda seed, train=train, valid=valid, unit=unit: unit_run(train, valid, unit, seed)
        share[str(vocab)] = tokenizer.vocab_size * base.d_model / (tokenizer.vocab_size * base.d_model + base.n_layers * 12 * base.d_model**2)
        shown[str(vocab)] = unit.steps * unit.rows * unit.seq_len
    results = run_grid(arms, seeds, corpus.work / "B-vocab.jsonl", report)
    bpb = {n: pick(r, "bits_per_byte", "valid") for n, r in results.items()}
    diff = {n: paired(bpb["4096"], bpb[n]) for n in ("1024", "16384")}
    verdict = "holds in part" if diff["16384"].sign >= 0 else "open"
    return Verdict(
        "B-vocab", "a moderate vocabulary covers most language at far fewer parameters", verdict,
        f"at equal compute 1,024 tokens differ from 4,096 by {diff['1024']} and 16,384 by {diff['16384']} bits per byte; the embedding is {share['1024']:.0%}, {share['4096']:.0%}, {share['16384']:.0%} of the parameters. "
        "What is right is a matter of the model's size, not of the language alone",
        f"width 128, 3 blocks; tokens seen: {', '.join(f'{k}: {v:,}' for k, v in shown.items())}", len(seeds),
        {n: float(np.mean(list(v.values()))) for n, v in bpb.items()} | {f"embedding share {n}": v for n, v in share.items()}, {n: (d.low, d.high) for n, d in diff.items()}, diff["16384"].smallest)


# %% [markdown]
# ## A-fresh: recent text first
# Statutes carry their year. Four buckets of years are drawn by their bytes, or by bytes times the article's weight 1/(2024 - year + 1); the test is statutes of the last bucket and of the others.

# %%
#| export
BUCKETS = ((0, 2010), (2011, 2016), (2017, 2019), (2020, 2023))


def bucket(doc: dict) -> str:
    "The name of the bucket of a document's year; empty for an unknown year or one outside."
    year = str(doc.get("year") or "")[:4]
    return next((f"{a}-{b}" for a, b in BUCKETS if year.isdecimal() and a <= int(year) <= b), "")


def claim_fresh(corpus: Corpus, data: Path, seeds: Sequence[int], report: Callable[[str], None]) -> Verdict:
    "A-fresh, the training half: weights by year against weights by size."
    docs = [d for d in read_documents([Path(data) / "1_pretrain" / "zh_law.jsonl.zst"]) if bucket(d) and len(d["text"]) <= 40_000]
    groups = defaultdict(list)
    for doc in sorted(docs, key=place):
        groups[bucket(doc)].append(doc)
    held = {b: draw(v, 50_000, "held", 12_000) for b, v in groups.items()}
    ids = {d["id"] for v in held.values() for d in v}
    train_docs = {b: draw([d for d in v if d["id"] not in ids], 900_000, "fresh") for b, v in groups.items()}
    train, unit = corpus.shards("fresh", [d for v in train_docs.values() for d in v], bucket), Unit()
    valid = {"years": corpus.shards("fresh-valid", [d for v in held.values() for d in v], bucket)}
    plain = {b: float(size(v)) for b, v in train_docs.items()}
    fresh = {b: float(sum(size([d]) / (2024 - int(str(d["year"])[:4]) + 1) for d in v)) for b, v in train_docs.items()}
    arms = {n: (lambda seed, w=w: unit_run(train, valid, unit, seed, ControlLog().append(from_sample=0, mixture=w))) for n, w in {"by size": plain, "by year": fresh}.items()}
    results = run_grid(arms, seeds, corpus.work / "A-fresh.jsonl", report)
    diff = {b: paired(pick(results["by size"], "by_domain", "years", b), pick(results["by year"], "by_domain", "years", b)) for b in sorted(plain)}
    new, old = sorted(plain)[-1], sorted(plain)[0]
    verdict = "holds in part" if diff[new].sign < 0 else "does not hold" if diff[new].sign > 0 else "open"
    return Verdict(
        "A-fresh-train", "weights 1/(2024 - year + 1) improve what a model knows of recent text", verdict,
        f"statutes of {new} change by {diff[new]}, of {old} by {diff[old]} bits per byte; the weight works like any other emphasis in a mixture, and its formula fails from 2025 on",
        f"1.1 M parameters, {unit.steps * unit.rows * unit.seq_len:,} tokens of Chinese statutes, {', '.join(f'{b} {v / 1e6:.2f} MB' for b, v in sorted(plain.items()))}", len(seeds),
        {b: d.mean for b, d in diff.items()}, {b: (d.low, d.high) for b, d in diff.items()}, diff[new].smallest)


# %%
assert [bucket({"year": y}) for y in (1999, 2011, "2019-05", 2023, 2031, None)] == ["0-2010", "2011-2016", "2017-2019", "2020-2023", "", ""]

# %% [markdown]
# ## What came out
# `scalelab claims ID --data DIR` ran each experiment once; this page reads the files that it wrote. A dot that is filled lies on an interval without zero.

# %%
style()
found = {v["id"]: v for v in load_verdicts("..")}
verdicts = [found[name] for name in ("B-code", "B-mix", "B-curr", "B-vocab", "A-fresh-train") if name in found]
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
