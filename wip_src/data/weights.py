# %% [markdown]
# # Weights of a mixture
#
# > How much of each domain: by size, by temperature, with a limit on repeats, in stages, or by what the run's own evaluations say.
#
# A mixture is an entry in the control log: from this sample on, these weights. The functions here make such weights and such logs from numbers that a person can check; none of them has a state, so a run that resumes needs only the log.
#
# **The claims this is for** (B-mix, B-curr, second article): 60/20/15/5 is a good start; dynamic resampling by per-domain loss uses data better. Whether they are true is measured in the lab; here it becomes possible to say exactly what was done.

# %%
#| default_exp data.weights

# %%
#| export
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from scalelab.core.config import UsageError, did_you_mean
from scalelab.data.mixture import ControlLog, SampleOrder

# %%
#| hide
import matplotlib.pyplot as plt

from scalelab.core.plotting import style

style()


def refusal(function, *args, **options):
    "The message of the UsageError that this call must raise."
    try:
        function(*args, **options)
    except UsageError as e:
        return str(e)
    raise AssertionError(f"{function.__name__} accepted {args}")


# %% [markdown]
# ## By size, and by temperature
# Weights in proportion to tokens read everything equally often: large domains drown the small. Equal weights read a small domain many times. In between lies a temperature: $p \propto n^{1/T}$, where $T = 1$ is by size and a large $T$ is equal.


# %%
#| export
def check_sizes(sizes: Mapping[str, float], what: str = "sizes") -> None:
    "Raise UsageError unless `sizes` maps names to finite numbers above 0."
    if not sizes:
        raise UsageError(f"{what}: empty, expected a number for each domain")
    for name, n in sizes.items():
        if isinstance(n, bool) or not isinstance(n, (int, float, np.number)) or not math.isfinite(n) or n <= 0:
            raise UsageError(f"{what}: {n!r} of domain {name!r} must be a number above 0")


def temperature_weights(sizes: Mapping[str, float], temperature: float = 1.0) -> dict[str, float]:
    """Weights that sum to 1: size ** (1 / temperature). 1: by size; larger: flatter; infinity: all equal.

    sizes: tokens (or rows) of each domain. Raises UsageError for a size or a temperature that is not above 0.
    """
    check_sizes(sizes)
    if not temperature > 0:
        raise UsageError(f"temperature {temperature}: expected a number above 0 (1 is by size, larger is flatter)")
    logs = np.log(np.array([float(n) for n in sizes.values()])) / temperature
    p = np.exp(logs - logs.max())
    return dict(zip(sizes, (p / p.sum()).tolist()))


# %%
tokens = {"web": 900.0, "code": 90.0, "law": 9.0, "poems": 1.0}
for t in (1, 2, 5, math.inf):
    print(f"T = {t:3}:", {d: round(w, 3) for d, w in temperature_weights(tokens, t).items()})
assert abs(temperature_weights(tokens)["web"] - 0.9) < 1e-12 and set(
    temperature_weights(tokens, math.inf).values()
) == {0.25}
half = temperature_weights(tokens, 2)
assert abs(half["web"] / half["poems"] - 30) < 1e-9 and abs(sum(half.values()) - 1) < 1e-12
assert temperature_weights({"a": 1e300, "b": 1e-300}, 0.01) == {"a": 1.0, "b": 0.0}  # no overflow
assert "above 0" in refusal(temperature_weights, tokens, 0) and "'law'" in refusal(
    temperature_weights, tokens | {"law": 0}
)

# %% [markdown]
# ## A limit on repeats
# A flat mixture reads the poems ten times before the web once. Text read more than about four times teaches little (Muennighoff et al. 2023). So each domain gets at most `max_epochs` of its rows, and what it may not take is shared out among the others by their weights; which
# may bring another to its limit, so it is done again until nobody is over.


# %%
#| export
def cap_repeats(
    weights: Mapping[str, float], sizes: Mapping[str, float], samples: float, max_epochs: float = 4.0
) -> dict[str, float]:
    """The weights (sum 1) nearest to those asked for, by which no domain is read more than `max_epochs` times.

    sizes: rows of each domain; samples: rows that the run reads. What a domain may not take goes to the others in
    proportion to their weights. Raises UsageError if all of them together do not have enough text, or for a
    domain without a size.
    """
    check_sizes(weights, "weights")
    for name in weights:
        if name not in sizes:
            raise UsageError(
                f"weights: no domain {name!r}{did_you_mean(name, sizes)}; there are {', '.join(map(repr, sizes))}"
            )
    check_sizes({d: sizes[d] for d in weights})
    limit = np.array([sizes[d] * max_epochs / samples for d in weights])
    if limit.sum() < 1:
        raise UsageError(
            f"{samples:.0f} samples need more text: {max_epochs:g} epochs of these domains are "
            f"{limit.sum() * samples:.0f} rows; "
            "raise max_epochs, add text or read fewer samples"
        )
    asked = np.array([float(w) for w in weights.values()])
    share, free = np.zeros(len(asked)), np.ones(len(asked), bool)
    while True:
        share[free] = asked[free] / asked[free].sum() * (1 - limit[~free].sum())
        over = free & (share > limit)
        if not over.any():
            return dict(zip(weights, share.tolist()))
        share[over], free[over] = limit[over], False
        if not free.any():
            return dict(zip(weights, (share / share.sum()).tolist()))


# %%
capped = cap_repeats(temperature_weights(tokens, math.inf), tokens, samples=1_000, max_epochs=4)
print({d: f"{w:.3f} ({w * 1_000 / tokens[d]:.1f} epochs)" for d, w in capped.items()})
assert abs(sum(capped.values()) - 1) < 1e-12 and all(w * 1_000 <= 4 * tokens[d] + 1e-9 for d, w in capped.items())
assert np.allclose(list(capped.values()), [0.6, 0.36, 0.036, 0.004])  # the web takes what is left
assert np.allclose(list(cap_repeats({"web": 3, "code": 1}, tokens, 100).values()), [0.75, 0.25])  # nothing to cap
for asked in np.random.default_rng(0).dirichlet(np.ones(4), 200):
    got = cap_repeats(dict(zip(tokens, asked)), tokens, 2_000, 3)
    free = [d for d in tokens if got[d] * 2_000 < 3 * tokens[d] * (1 - 1e-9)]
    kept = [got[d] / w for d, w in zip(tokens, asked) if d in free]
    assert abs(sum(got.values()) - 1) < 1e-9 and np.ptp(kept or [0]) < 1e-9  # the uncapped keep their proportions
assert "3 epochs" in refusal(cap_repeats, tokens, tokens, 10_000, 3) and "'web'" in refusal(
    cap_repeats, {"wed": 1}, tokens, 1
)

# %% [markdown]
# ## Stages
# Mid-run the mixture may change: general text first, the good and the rare at the end. A schedule is a list of stages, each with its first sample and its weights; it becomes entries of the control log, and the order of samples does the rest.


# %%
#| export
def schedule(stages: Sequence[tuple[int, Mapping[str, float]]], log: ControlLog = ControlLog()) -> ControlLog:
    """The log with one mixture entry for each stage (from_sample, weights), after the entries that it has.

    Weights of 0 leave a domain out. Raises UsageError if a stage begins before the one above, or for bad weights.
    """
    for from_sample, weights in stages:
        log = log.append(from_sample=int(from_sample), mixture={d: float(w) for d, w in weights.items() if w})
    return log


def blend(
    start: Mapping[str, float], end: Mapping[str, float], from_sample: int, to_sample: int, steps: int = 8
) -> list[tuple[int, dict[str, float]]]:
    "Stages that lead from one mixture to another in `steps` equal jumps, the last of which is `end` at `to_sample`."
    names = [*start, *(d for d in end if d not in start)]
    at = np.linspace(from_sample, to_sample, steps + 1).round().astype(int)[1:]
    mixed = [
        {d: start.get(d, 0.0) * (1 - k / steps) + end.get(d, 0.0) * k / steps for d in names}
        for k in range(1, steps + 1)
    ]
    return list(zip(at.tolist(), mixed))


# %% [markdown]
# Is anything lost or read twice when a mixture changes? Four domains, a change to other weights, a slow blend into a third mixture, a skipped stretch in between; and a run that is resumed at every 97th sample with nothing but the log. Within each domain every row must come
# once before any comes again, and the shares must be those of the stages.

# %%
sizes = {"web": 5_000, "code": 900, "law": 300, "poems": 41}
first, last = temperature_weights(sizes), temperature_weights(sizes, 3)
log = schedule([(0, first), (2_000, last), *blend(last, {"code": 1, "law": 1}, 4_000, 8_000)]).append(
    from_sample=9_000, skip=500
)
order = SampleOrder(np.cumsum([0, *sizes.values()]), list(sizes), seed=2, control=log)
rows = order.rows(0, 9_000)
pieces = [
    SampleOrder(order.start, list(sizes), 2, ControlLog.from_json(log.to_json())).rows(c, min(97, 9_000 - c))
    for c in range(0, 9_000, 97)
]
assert (np.concatenate(pieces) == rows).all()
domain = np.searchsorted(order.start, rows, side="right") - 1
for d, size in enumerate(sizes.values()):
    mine = rows[domain == d]
    epochs = np.split(mine, range(size, len(mine), size))
    assert all(len(np.unique(e)) == len(e) for e in epochs), "a row came twice before all were read"
share = np.bincount(domain[2_000:3_024], minlength=4) / 1_024
assert np.abs(share - list(last.values())).max() < 1 / 1_024 + 1e-9
assert set(domain[8_000:]) == {1, 2}  # the blend has arrived: code and law only
assert "not before" in refusal(schedule, [(5, first), (4, last)])

# %%
fig, ax = plt.subplots(figsize=(5.6, 2.1))
ends = np.arange(256, 9_001, 512)
for d, name in enumerate(sizes):
    ax.plot(ends, [(domain[e - 256 : e] == d).mean() for e in ends], label=name, lw=1)
for c, _ in log.mixtures:
    ax.axvline(c, color="k", lw=0.4, ls=":")
ax.set(xlabel="consumed samples", ylabel="share of the last 256")
ax.legend(fontsize=7)
plt.show()

# %% [markdown]
# What to see: the shares follow the stages (dotted), and jump only where the log says so.
#
# ## By the run's own losses
# DoReMi (Xie et al. 2023) raises the weight of domains in which a model is behind a reference, by group DRO's multiplicative rule: $w_d \leftarrow w_d \, e^{\eta (\ell_d - r_d)^+}$, made to sum to one and mixed with a little of the uniform, so that no domain dies. The losses are the
# evaluations that the run makes anyway, the reference a small model's. Two bounds keep one noisy evaluation from moving the mixture far: the step's factor, and the distance from the weights at the start.


# %%
#| export
def reweight(
    weights: Mapping[str, float],
    losses: Mapping[str, float],
    reference: Mapping[str, float],
    rate: float = 1.0,
    uniform: float = 0.05,
    largest_step: float = 1.5,
    base: Mapping[str, float] | None = None,
    largest_ratio: float = 4.0,
) -> dict[str, float]:
    """New weights (sum 1) from each domain's loss and the loss that it could have (bits per byte or nats), a pure
    function.

    rate: eta of the multiplicative rule; uniform: share of equal weights mixed in; largest_step: no domain grows
    by more than this factor against another in one update; base: weights from which none may differ by more than
    largest_ratio, up or down, before the sum is made one. A domain without a finite loss or reference keeps its
    weight but for the sum. Raises UsageError for weights or bounds that are none. (Xie et al. 2023; Sagawa et al.
    2020.)
    """
    check_sizes(weights, "weights")
    if rate < 0 or not 0 <= uniform <= 1 or largest_step < 1 or largest_ratio < 1:
        raise UsageError(
            f"reweight: rate {rate}, uniform {uniform}, largest_step {largest_step}, largest_ratio {largest_ratio}: "
            "expected "
            "rate >= 0, uniform in 0..1, the other two >= 1"
        )
    excess = np.array([losses.get(d, math.nan) - reference.get(d, math.nan) for d in weights])
    grow = np.exp(np.minimum(rate * np.maximum(np.where(np.isfinite(excess), excess, 0), 0), math.log(largest_step)))
    old = np.array([float(w) for w in weights.values()])
    new = old / old.sum() * grow
    new = (1 - uniform) * new / new.sum() + uniform / len(new)
    if base is not None:
        start = np.array([float(base[d]) for d in weights]) / sum(float(base[d]) for d in weights)
        new = np.clip(new, start / largest_ratio, start * largest_ratio)
    return dict(zip(weights, (new / new.sum()).tolist()))


# %%
w = {"web": 0.6, "code": 0.3, "law": 0.1}
same = reweight(w, {"web": 1.0, "code": 1.0, "law": 1.0}, {"web": 1.2, "code": 1.0, "law": 1.1}, uniform=0)
assert all(abs(same[d] - w[d]) < 1e-12 for d in w)  # ahead of the reference everywhere: nothing to catch up
step = reweight(w, {"web": 1.0, "code": 1.3, "law": 9.0}, {"web": 1.0, "code": 1.0, "law": 1.0}, uniform=0)
assert (
    abs(step["code"] / step["web"] - 0.5 * math.exp(0.3)) < 1e-12 and abs(step["law"] / step["web"] - 1.5 / 6) < 1e-12
)  # the second was bounded
assert abs(sum(step.values()) - 1) < 1e-12 and reweight(w, {}, {}, uniform=1) == dict.fromkeys(w, 1 / 3)
assert reweight(w, {"law": math.nan}, {"law": 1.0}, uniform=0)["law"] == reweight(w, {}, {}, uniform=0)["law"]
assert "expected rate >= 0" in refusal(reweight, w, {}, {}, rate=-1)

# %% [markdown]
# Two hundred updates against losses that never fall: without bounds the worst domain would take everything; with them it stops at four times its start.

# %%
behind, history = {"web": 1.0, "code": 1.1, "law": 1.4}, [w]
for _ in range(200):
    history.append(reweight(history[-1], behind, dict.fromkeys(w, 1.0), base=w))
free = w
for _ in range(200):
    free = reweight(free, behind, dict.fromkeys(w, 1.0), uniform=0)
print(
    "unbounded:",
    {d: round(x, 3) for d, x in free.items()},
    "| bounded:",
    {d: round(x, 3) for d, x in history[-1].items()},
)
assert (
    free["law"] > 0.99
    and history[-1]["law"] <= 0.4 / (0.4 + w["web"] / 4 + w["code"] / 4) + 1e-9
    and min(history[-1].values()) > 0.05
)

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | a mixture can change in mid-run without loss or repetition | holds | 9,000 samples of four domains through ten changes: within each domain every row once before any twice, and the same rows when resumed 93 times |
# | B-mix, B-curr: which weights are good | open here | the lab trains with them |
#
# What this chapter does not cover: estimating the reference losses, and the noise of an evaluation.
