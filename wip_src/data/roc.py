# %% [markdown]
# # How good is a judge?
#
# > The whole curve of thresholds, its area, the rates at one threshold, and intervals for all of them.
#
# A judge gives a score and somebody has to choose a threshold. Which one is right depends on what a mistake costs, so
# a single accuracy helps nobody. These few functions serve every classifier of the data chapter.

# %%
#| default_exp data.roc

# %%
#| export
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# %%
#| hide
import matplotlib.pyplot as plt

from scalelab.core.plotting import style

style()
draw = np.random.default_rng(0)

# %% [markdown]
# ## The curve
# One number for one threshold says little. The ROC curve holds all thresholds: which share of the bad is caught
# (recall), at the price of which share of the good (false positives). Its area is the chance that a bad text scores
# higher than a good one, so that half is a coin and one is perfect.

# %%
#| export
@dataclass
class Roc:
    "Thresholds (falling; a text is caught at `score >= threshold`) with false positive rate and recall at each."

    threshold: np.ndarray
    fpr: np.ndarray
    recall: np.ndarray


def roc(scores: np.ndarray, labels: np.ndarray) -> Roc:
    "The whole curve, from the point where nothing is caught; texts with equal scores are caught together."
    scores, labels = np.asarray(scores, np.float64), np.asarray(labels)
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # the last of each run of equal scores
    ones = np.cumsum(labels[order] == 1)[last]
    zeros = last + 1 - ones
    divide = lambda part: np.append(0.0, part / max(part[-1], 1))
    return Roc(np.append(np.inf, scores[order][last]), divide(zeros), divide(ones))


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    "Area under the ROC curve; equal scores count half. NaN when a class is missing."
    labels = np.asarray(labels)
    if labels.min(initial=1) == labels.max(initial=0) or len(labels) == 0:
        return float("nan")
    curve = roc(scores, labels)
    return float(np.sum(np.diff(curve.fpr) * (curve.recall[1:] + curve.recall[:-1]) / 2))


def at_threshold(scores: np.ndarray, labels: np.ndarray, threshold: float) -> dict[str, float]:
    "precision, recall, fpr and the counts behind them at `score >= threshold`; NaN where nothing was counted."
    caught, bad = np.asarray(scores) >= threshold, np.asarray(labels) == 1
    hit, false = int((caught & bad).sum()), int((caught & ~bad).sum())
    share = lambda part, whole: part / whole if whole else float("nan")
    rates = {"precision": share(hit, hit + false), "recall": share(hit, bad.sum()), "fpr": share(false, (~bad).sum())}
    return rates | {"caught": hit, "false": false, "bad": int(bad.sum()), "good": int((~bad).sum())}


def threshold_at_fpr(scores: np.ndarray, labels: np.ndarray, limit: float) -> float:
    "The lowest threshold whose false positive rate on these texts is at most `limit`: the best recall there is."
    curve = roc(scores, labels)
    return float(curve.threshold[np.flatnonzero(curve.fpr <= limit)[-1]])


# %%
assert auc(np.array([3, 2, 1, 0]), np.array([1, 1, 0, 0])) == 1.0 and auc(np.zeros(9), np.arange(9) % 2) == 0.5
assert np.isnan(auc(np.zeros(3), np.ones(3)))
s, y = np.round(draw.normal(size=300), 1), draw.integers(0, 2, 300)
pairs = (s[y == 1][:, None] > s[y == 0]) + 0.5 * (s[y == 1][:, None] == s[y == 0])
assert abs(auc(s, y) - pairs.mean()) < 1e-12, "the definition, pair by pair"
limit = threshold_at_fpr(s, y, 0.1)
assert at_threshold(s, y, limit)["fpr"] <= 0.1 < at_threshold(s, y, limit - 0.1)["fpr"]
assert at_threshold(np.array([1.0, 0.0]), np.array([1, 0]), 0.5)["precision"] == 1.0
assert np.isnan(at_threshold(np.array([0.0]), np.array([0]), 0.5)["precision"])

# %%
#| export
def interval(
    statistic: Callable[..., float], *arrays: np.ndarray, draws: int = 1000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    "Bootstrap interval of `statistic(*arrays)`: the rows of all arrays are drawn together, with replacement."
    arrays = tuple(np.asarray(a) for a in arrays)
    draw, n = np.random.default_rng(seed), len(arrays[0])
    found = [statistic(*(a[index] for a in arrays)) for index in (draw.integers(0, n, n) for _ in range(draws))]
    low, high = np.nanquantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


# %%
low, high = interval(np.mean, draw.normal(size=400), draws=400)
assert -0.2 < low < high < 0.2 and 0.12 < high - low < 0.28, "about four standard errors wide"

# %% [markdown]
# ## Scores that are probabilities
# A raw score says which of two texts is worse. Platt's two numbers, slope and offset, turn it into a probability,
# $p = \sigma(\alpha z + \beta)$, fitted on texts that the judge was not trained on.

# %%
#| export
def sigmoid(z: np.ndarray) -> np.ndarray:
    "1 / (1 + exp(-z)), without overflow."
    return 0.5 * (1 + np.tanh(0.5 * np.asarray(z, np.float64)))


def fit_platt(logits: np.ndarray, labels: np.ndarray, steps: int = 50) -> tuple[float, float]:
    "Platt's (slope, offset) by Newton's method, with his smoothed targets; the slope is kept positive."
    n1 = labels.sum()
    target = np.where(labels == 1, (n1 + 1) / (n1 + 2), 1 / (len(labels) - n1 + 2))
    x, theta = np.stack([logits, np.ones_like(logits)], axis=1), np.array([1.0, 0.0])
    for _ in range(steps):
        p = sigmoid(x @ theta)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + 1e-6 * np.eye(2)
        step = np.linalg.solve(hessian, x.T @ (p - target))
        theta = theta - np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-9:
            break
    return (float(theta[0]), float(theta[1])) if theta[0] > 0 else (1.0, 0.0)


# %%
z = draw.normal(size=20_000)
true_labels = (draw.random(20_000) < sigmoid(2.5 * z - 0.7)).astype(int)
slope, offset = fit_platt(z, true_labels)
print(f"slope {slope:.2f} (true 2.50), offset {offset:.2f} (true -0.70)")
assert abs(slope - 2.5) < 0.1 and abs(offset + 0.7) < 0.1
assert fit_platt(-z, true_labels) == (1.0, 0.0), "a model that points the wrong way is not turned around"

# %% [markdown]
# ## A promise about the next sample
# A threshold chosen to have 5% false positives on one sample has more than that on the next, every other time. A
# promise needs room: the upper end of Wilson's interval has to keep it.

# %%
#| export
def wilson_upper(share: float, n: int, z: float = 1.645) -> float:
    "Upper end of Wilson's one-sided interval for a share of n, 95% confidence by default."
    middle = share + z * z / (2 * n)
    return (middle + z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5) / (1 + z * z / n)


def safe_threshold(scores: np.ndarray, labels: np.ndarray, promise: float) -> float:
    "The lowest threshold whose false positive rate is below `promise` with 95% confidence."
    n = int((np.asarray(labels) == 0).sum())
    allowed = max(k for k in range(n + 1) if k == 0 or wilson_upper(k / n, n) <= promise)
    return threshold_at_fpr(scores, labels, allowed / n)


# %%
assert abs(wilson_upper(0.05, 500) - 0.0686) < 1e-3 and wilson_upper(0.05, 50_000) < 0.052
def sample(n):
    "Scores of n texts, half of them bad."
    labels = np.arange(n) % 2
    return draw.normal(size=n) + 1.5 * labels, labels

rates = {"as it is": [], "with room": []}
for _ in range(300):
    (s, y), (s_next, y_next) = sample(1000), sample(1000)
    for name, threshold in {"as it is": threshold_at_fpr(s, y, 0.05), "with room": safe_threshold(s, y, 0.05)}.items():
        rates[name].append(at_threshold(s_next, y_next, threshold)["fpr"])
kept = {name: np.mean(np.array(r) <= 0.05) for name, r in rates.items()}
print({name: f"promise of 5% kept in {share:.0%} of next samples" for name, share in kept.items()})
assert kept["with room"] > 0.8 > 0.65 > kept["as it is"]

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(7, 2.4))
s, y = sample(2000)
curve = roc(s, y)
left.plot(curve.fpr, curve.recall)
left.set(xlabel="false positive rate", ylabel="recall", title=f"ROC, area {auc(s, y):.2f}", xlim=(-0.02, 1))
for name, r in rates.items():
    right.hist(100 * np.array(r), bins=25, alpha=0.7, label=name)
right.axvline(5, color="k", lw=0.8)
right.set(xlabel="false positives in the next sample, %", yticks=[])
right.legend(fontsize=8)
plt.show()

# %% [markdown]
# What to see: on the right, about half of the plain thresholds break their promise of 5% on the next thousand texts,
# and few of those with room do. The room costs recall; it shrinks as the sample to choose on grows.
#
# ## Verdict
# | question | answer |
# |---|---|
# | is the area the definition's? | holds: equal to counting all pairs, ties included |
# | can a threshold keep a promise? | holds with room: see the shares printed above |
