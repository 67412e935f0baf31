# %% [markdown]
# # Abuse, measured
#
# > Rules, a classifier and both on labelled Chinese posts: every threshold, a promise, and hard controls apart.
#
# The first article says that rules catch about 82% of clear abuse, and that rules with a small model at a
# threshold of 0.85 bring false positives from 37% down to 6.3% (A-tox). The posts here are COLD's, about race,
# region and gender, with labels for offence; HateCheck's sentences come in pairs that differ in a word or two.

# %%
#| default_exp lab.bench_toxicity

# %%
#| export
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalelab.data.classifier import TextClassifier
from scalelab.data.dedup import content_hash, near_clusters
from scalelab.data.roc import at_threshold, auc, interval, roc, safe_threshold
from scalelab.data.toxicity import rule_score, segments, skeleton, toxicity_scores, train_toxicity
from scalelab.lab.bench import row
from scalelab.lab.dirty_text import read_corpus, side
from scalelab.lab.runner import Verdict

# %%
#| hide
import json
import random
import tempfile

import matplotlib.pyplot as plt

from scalelab.core.plotting import COLORS, style
from scalelab.data.documents import write_documents

style()

# %% [markdown]
# ## Three sides
# The corpus comes with splits. Where its test split is at hand, that is the test; otherwise a quarter of the dev
# split is set aside. A fifth of what is left of dev chooses thresholds. Then whatever is nearly the same as a
# post of the other sides leaves the test: forum posts are copied, and a copy is no test.

# %%
#| export
@dataclass
class Posts:
    "Labelled texts on three sides, and how many left the test because their twin was on another side."

    train: list[dict]
    tune: list[dict]
    test: list[dict]
    exact_twins: int = 0
    near_twins: int = 0

    @staticmethod
    def columns(docs: Sequence[dict]) -> tuple[list[str], np.ndarray]:
        "(texts, labels int64)."
        return [d["text"] for d in docs], np.array([d["label"] for d in docs], np.int64)


def split_posts(docs: Sequence[dict], near: bool = True) -> Posts:
    "Sides by the corpus's own splits; near: twins with Jaccard similarity of 0.5 and more are looked for too."
    own = [d for d in docs if d["split"] == "test"]
    dev = [d for d in docs if d["split"] == "dev"]
    test = own or [d for d in dev if side(d["text"], 4) == 0]
    rest = [d for d in dev if own or side(d["text"], 4) != 0]
    tune = [d for d in rest if side(f"tune {d['text']}", 5) == 0]
    train = [d for d in docs if d["split"] not in ("dev", "test")]
    train += [d for d in rest if side(f"tune {d['text']}", 5) != 0]
    posts, known = Posts(train, tune, test), {content_hash(skeleton(d["text"])) for d in train + tune}
    posts.test = [d for d in test if content_hash(skeleton(d["text"])) not in known]
    posts.exact_twins = len(test) - len(posts.test)
    if near:
        n = len(train) + len(tune)
        cluster = near_clusters(train + tune + posts.test)
        others = set(cluster[:n].tolist())
        kept = [d for d, c in zip(posts.test, cluster[n:].tolist()) if c not in others]
        posts.near_twins, posts.test = len(posts.test) - len(kept), kept
    return posts


# %%
made = [{"id": str(k), "text": f"第{k}个帖子说的是{k * 7}号门口的猫", "label": k % 2, "split": ("dev", "train")[k % 3 == 0]}
        for k in range(300)]
posts = split_posts(made, near=False)
assert len(posts.train) + len(posts.tune) + len(posts.test) == 300 and 20 < len(posts.test) < 80
posts = split_posts([*made, made[0] | {"id": "twin", "split": "test"}], near=False)
assert posts.exact_twins == 1 and posts.test == [] and len(posts.train) + len(posts.tune) == 300
near = [made[1] | {"split": "test"}, made[1] | {"id": "near", "text": made[1]["text"] + "啊", "split": "train"}]
assert split_posts(near).near_twins == 1

# %% [markdown]
# ## Four judges
# *Confirmed* is the article's order of things: the rules suspect, by any finding, and the classifier has to
# agree. The threshold for the promise about false positives is chosen on the tune side, with room for chance.

# %%
#| export
JUDGES = ("rules", "classifier", "rules + classifier", "rules, confirmed")
PROMISE = 0.063


def judge(texts: Sequence[str], model: TextClassifier) -> dict[str, np.ndarray]:
    "Scores of each of JUDGES, float64 [n]."
    rules, alone = toxicity_scores(texts), model.score(list(texts))
    confirmed = np.where(rules > 0, alone, 0.0)
    return dict(zip(JUDGES, (rules, alone, toxicity_scores(texts, model), confirmed)))


def _point(scores: np.ndarray, labels: np.ndarray, threshold: float, draws: int) -> dict:
    "Rates at a threshold, with bootstrap intervals of recall and false positives."
    rates = at_threshold(scores, labels, threshold)
    found = {k: rates[k] for k in ("precision", "recall", "fpr")} | {"threshold": float(threshold)}
    for name in ("recall", "fpr"):
        rate = lambda s, y, name=name: at_threshold(s, y, threshold)[name]
        found[f"{name}_interval"] = list(interval(rate, scores, labels, draws=draws))
    return found


def _thin(scores: np.ndarray, labels: np.ndarray, points: int = 60) -> dict:
    "The ROC curve at some sixty places."
    curve = roc(scores, labels)
    keep = np.unique(np.searchsorted(curve.fpr, np.linspace(0, 1, points) ** 2, "right") - 1)
    return {"fpr": np.round(curve.fpr[keep], 4).tolist(), "recall": np.round(curve.recall[keep], 4).tolist()}


# %%
s, y = np.random.default_rng(0).normal(size=400), np.arange(400) % 2
point = _point(s + y, y, 0.5, draws=50)
assert point["recall_interval"][0] <= point["recall"] <= point["recall_interval"][1]
thin = _thin(s + y, y)
assert 20 < len(thin["fpr"]) <= 60 and thin["fpr"] == sorted(thin["fpr"]) and thin["recall"][-1] == 1

# %% [markdown]
# ## Controls apart
# The harmless sentences of HateCheck, by kind: those that name a group kindly, deny hate, quote it, speak against it.
# And text that nobody would call abuse: an encyclopedia, law, classics.

# %%
#| export
def _controls(data: Path, model: TextClassifier, limits: dict[str, float]) -> dict:
    "Share of HateCheck's sentences called abuse, by language and kind: by the rules at 0.5, by the others at `limits`."
    found = {}
    for name, file in (("zh", "zh_hatecheck_mandarin"), ("en", "en_hatecheck")):
        groups = defaultdict(list)
        for doc in read_corpus(data / "3_toxicity", file):
            groups[doc["functionality"]].append(doc)
            groups["all harmless" if doc["label"] == 0 else "all hateful"].append(doc)
        for kind, docs in sorted(groups.items()):
            scores = judge([d["text"] for d in docs], model)
            shares = {j: float((scores[j] >= (0.5 if j == "rules" else limits[j])).mean()) for j in JUDGES}
            found[f"{name} {kind}"] = {"sentences": len(docs), "label": docs[0]["label"]} | shares
    return found


CLEAN = "zh_wiki_cmrc zh_law zh_classical zh_book_d2l zh_dialogue_crosswoz en_gutenberg".split()


def _clean_text(data: Path, model: TextClassifier, limit: float, most: int) -> dict:
    "Share of segments of good text called abuse: by the rules at 0.5, by rules + classifier at `limit`."
    found = {}
    for name in CLEAN:
        docs = read_corpus(data / "1_pretrain", name)[:most]
        if parts := [s for d in docs for s in segments(d["text"][:3000])]:
            both = float((toxicity_scores(parts, model) >= limit).mean())
            rules = float(np.mean([rule_score(s) >= 0.5 for s in parts]))
            found[name] = {"segments": len(parts), "rules": rules, "rules + classifier": both}
    return found


# %%
invented = train_toxicity(["外地人都是骗子", "昨天在河边散步"] * 20, [1, 0] * 20, (["外地人都是骗子", "昨天在河边散步"] * 5, [1, 0] * 5))
assert _controls(Path("no/such/folder"), invented, {}) == {} == _clean_text(Path("no/such/folder"), invented, 0.5, 1)

# %%
#| export
def toxicity_report(data: Path, quick: bool = False) -> dict | None:
    "Everything measured about abuse, JSON-able; None without the posts. Trains on train, tunes on tune, tests once."
    docs = read_corpus(data / "3_toxicity", "zh_cold")
    if not docs:
        return None
    draws, posts = 100 if quick else 1000, split_posts(docs, near=not quick)
    model = train_toxicity(*Posts.columns(posts.train), Posts.columns(posts.tune))
    (tune, tune_labels), (test, labels) = Posts.columns(posts.tune), Posts.columns(posts.test)
    tuned, scores = judge(tune, model), judge(test, model)
    limits = {name: safe_threshold(tuned[name], tune_labels, PROMISE) for name in JUDGES}
    sizes = {"train": len(posts.train), "tune": len(posts.tune), "test": len(posts.test)}
    twins = {"exact_twins": posts.exact_twins, "near_twins": posts.near_twins, "near_looked_for": int(not quick)}
    own = int(any(d["split"] == "test" for d in docs))
    report = {"posts": sizes | twins | {"own_test_split": own}, "points": {}, "roc": {}, "auc": {}, "auc_interval": {}}
    for name in JUDGES:
        marks = {"0.5": 0.5, "0.85": 0.85, "tuned": limits[name]} | ({"any": 1e-9} if name == "rules" else {})
        report["points"][name] = {m: _point(scores[name], labels, t, draws) for m, t in marks.items()}
        report["roc"][name] = _thin(scores[name], labels)
        report["auc"][name] = auc(scores[name], labels)
        report["auc_interval"][name] = list(interval(auc, scores[name], labels, draws=draws // 5))
    report["controls"] = _controls(data, model, limits)
    report["clean_text"] = _clean_text(data, model, limits["rules + classifier"], 20 if quick else 100)
    return report


# %% [markdown]
# A miniature of the corpus, invented, goes through the whole of it:

# %%
draw = random.Random(0)
who, where = ["外地人", "男人", "老外", "女司机", "外国人"], ["车站", "菜市场", "学校", "河边", "桥头"]
templates = [("{b}的{a}都是骗子，{n}次了", 1), ("{b}来的{a}又在添乱，真晦气，{n}", 1), ("昨天在{b}帮一个{a}指路，走了{n}米", 0),
             ("{b}旁边住着{n}家{a}，常来往", 0)]
def post(k):
    "An invented post; its label is what the template says."
    template, label = draw.choice(templates)
    text = template.format(a=draw.choice(who), b=draw.choice(where), n=k)
    return {"id": str(k), "text": text, "label": label, "split": draw.choice(["dev", "train_sample"])}

with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "3_toxicity").mkdir()
    write_documents(Path(folder) / "3_toxicity" / "zh_cold.jsonl.zst", [post(k) for k in range(600)])
    miniature = toxicity_report(Path(folder), quick=True)
    assert toxicity_report(Path(folder) / "3_toxicity") is None
assert miniature["auc"]["rules + classifier"] > 0.99 > miniature["auc"]["rules"]
assert miniature["points"]["rules"]["any"]["recall"] > miniature["points"]["rules"]["0.85"]["recall"]

# %% [markdown]
# ## Rows
# Nothing is left out: an operating point that misses is a row that misses.

# %%
#| export
def _point_rows(report: dict) -> list[dict]:
    "False positives of every judge at every threshold, and the areas."
    rows, words = [], {"any": "any finding", "tuned": "tuned"}
    for name, points in report["points"].items():
        for mark, p in points.items():
            note = f"recall {100 * p['recall']:.1f}%, precision {100 * p['precision']:.1f}%"
            what = f"false positives, {name}, {words.get(mark, mark)}"
            rows.append(row(what, 100 * p["fpr"], "%", note, "report", True))
        low, high = report["auc_interval"][name]
        note = f"95% interval {low:.3f} to {high:.3f}"
        rows.append(row(f"AUC, {name}", report["auc"][name], "", note, "report", True))
    return rows


def toxicity_rows(report: dict) -> list[dict]:
    "The report as rows of a bench table."
    n, both = report["posts"], report["points"]["rules + classifier"]["tuned"]
    where = f"{n['test']} posts, " + ("the corpus's test split" if n["own_test_split"] else "a quarter of dev")
    what, keeps = "false positives, rules + classifier, threshold tuned", both["fpr"] <= PROMISE
    rows = [row(what, 100 * both["fpr"], "%", where, "<= 6.3", keeps),
            row("recall there", 100 * both["recall"], "%", f"threshold {both['threshold']:.3f}", "report", True)]
    rows += _point_rows(report)
    for name, c in report["controls"].items():
        if " all " in name:
            note = f"rules {100 * c['rules']:.1f}%, classifier {100 * c['classifier']:.1f}% of {c['sentences']}"
            what = f"called abuse, {name} (HateCheck, apart)"
            rows.append(row(what, 100 * c["rules + classifier"], "%", note, "report", True))
    for name, c in report["clean_text"].items():
        note = f"rules alone {100 * c['rules']:.2f}% of {c['segments']} segments"
        rows.append(row(f"called abuse, {name}", 100 * c["rules + classifier"], "%", note, "report", True))
    twins = "exact and near" if n["near_looked_for"] else "exact only (quick)"
    left = n["exact_twins"] + n["near_twins"]
    return [*rows, row("test posts left out, twins of train or tune", left, "posts", twins, "report", True)]


def bench_data_toxicity(quick: bool, data: Path | None = None) -> list[dict]:
    "Rules and a classifier on labelled Chinese posts: false positives and recall by threshold, controls apart."
    report = toxicity_report(data, quick) if data else None
    if report is None:
        return [row("toxicity", float("nan"), "", "3_toxicity/zh_cold is not there", "needs --data", False)]
    return toxicity_rows(report)


bench_data_toxicity.needs = "--data with 3_toxicity"

# %%
rows = toxicity_rows(miniature)
assert rows[0]["holds"] and rows[1]["value"] > 95 and len(rows) > 15
assert not bench_data_toxicity(True, None)[0]["holds"]

# %% [markdown]
# ## The claim
# What decides: A-tox holds if the rules find four fifths of the abuse and the classifier at 0.85 brings their
# false positives from above 6.3% to below it. One half of that is "in part".

# %%
#| export
def _because(report: dict) -> str:
    "What was seen, in one sentence."
    p = report["points"]
    rules, confirmed, both = p["rules"], p["rules, confirmed"]["0.85"], p["rules + classifier"]["tuned"]
    hateful = report["controls"].get("zh all hateful", {}).get("rules", float("nan"))
    return (
        f"rules find {rules['any']['recall']:.0%} of offensive posts at {rules['any']['fpr']:.0%} false positives when "
        f"any suspicion counts, {rules['0.5']['recall']:.0%} at {rules['0.5']['fpr']:.1%} when only clear abuse does "
        f"({hateful:.0%} of HateCheck's hateful sentences); a classifier that must confirm a suspicion at 0.85 brings "
        f"false positives to {confirmed['fpr']:.1%} and recall to {confirmed['recall']:.0%}; rules + classifier, asked "
        f"for less than 6.3%, find {both['recall']:.0%} at {both['fpr']:.1%}")


def toxicity_verdict(report: dict) -> Verdict:
    "A-tox from the report."
    p, n = report["points"], report["posts"]
    suspected, confirmed = p["rules"]["any"], p["rules, confirmed"]["0.85"]
    halves = suspected["recall"] >= 0.8, confirmed["fpr"] <= PROMISE < suspected["fpr"]
    named = {"rules, any finding": suspected, "rules, clear abuse": p["rules"]["0.5"],
             "rules, confirmed at 0.85": confirmed, "both at 0.85": p["rules + classifier"]["0.85"],
             "both, tuned": p["rules + classifier"]["tuned"]}
    bounds = {f"{k}: recall": v["recall_interval"] for k, v in named.items()}
    bounds |= {f"{k}: false positives": v["fpr_interval"] for k, v in named.items()}
    scale = f"{n['test']} test posts, {n['train']} trained on, {n['tune']} tuned on"
    if not n["own_test_split"]:
        scale += "; the corpus's test split was not at hand, a quarter of dev is the test"
    return Verdict(
        "A-tox", "rules catch 82% of clear abuse; rules + small model at 0.85 cut false positives from 37% to 6.3%",
        "holds" if all(halves) else "holds in part" if any(halves) else "does not hold", _because(report), scale, 1,
        report, bounds, "3 points of recall, 1.7 points of false positives")


def claim_toxicity(corpus: object, data: Path, seeds: Sequence[int], report: Callable[[str], None]) -> list[Verdict]:
    "A-tox. The only chance in it is which texts there are, and the intervals say what that does; one seed is used."
    report("abuse: training on labelled posts")
    found = toxicity_report(data)
    return [toxicity_verdict(found)] if found else []


# %%
assert toxicity_verdict(miniature).verdict in ("holds", "holds in part", "does not hold")
assert claim_toxicity(None, Path("no/such/folder"), [0], print) == []

# %% [markdown]
# ## What was found
# `scalelab claims A-tox --data DIR` wrote the report, `scalelab bench data-toxicity --data DIR` the rows.

# %%
verdict = json.loads(Path("../01_data/results/A-tox.json").read_text(encoding="utf-8"))
saved = verdict["estimate"]
rows = json.loads(Path("results/bench-data-toxicity.json").read_text(encoding="utf-8"))["rows"]
assert toxicity_verdict(saved).verdict == verdict["verdict"]
for r in rows[:2]:
    print(f"{r['what']}: {r['value']:.1f} {r['unit']} (target {r['target']}; {r['peers']})")
kinds = {k: c for k, c in saved["controls"].items() if c["label"] == 0 and " all " not in k and k.startswith("zh")}
fig, ax = plt.subplots(figsize=(6, 2.8))
for k, name in enumerate(("rules", "classifier", "rules + classifier")):
    shares = [100 * c[name] for c in kinds.values()]
    ax.barh(np.arange(len(kinds)) + 0.25 * (k - 1), shares, 0.25, color=COLORS[k], label=name)
ax.set_yticks(range(len(kinds)), [k[3:-3] for k in kinds], fontsize=8)
ax.set(xlabel="harmless sentences called abuse, %")
ax.legend(fontsize=7)
plt.show()

# %% [markdown]
# What to see: kind and neutral sentences about a group (`ident`) pass. Sentences that quote, deny or answer abuse
# (`counter`, `negate`) do not: a judge that counts characters can't tell who is speaking.
#
# ## Verdict
# | question | answer |
# |---|---|
# | at most 6.3% false positives? | holds on posts like those it learned from; the figures are printed above |
# | does it hold anywhere else? | does not hold for sentences that speak about abuse, nor for English |
#
# What this does not cover: the labels of the training and dev posts were made with a model's help and are wrong in
# places. HateCheck's sentences were read while the rules were written, so the rules' figures there are not blind.
