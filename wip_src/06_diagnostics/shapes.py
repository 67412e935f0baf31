# %% [markdown]
# # Shapes of trouble
#
# > Faults that show in the shape of a curve: spikes, divergence, overfitting, leakage, a beat; each step judged by earlier steps only.
#
# How odd must a step be before somebody is called at three in the morning? Here a causal baseline says what each step should have been, and what happens *after*
# an odd step gives the fault its name. The first article claims that a wavelet over the last 1000 steps finds faults early (A-wave); at the end it gets a trial
# against simpler detectors.

# %%
#| default_exp diagnostics.shapes

# %%
#| export
from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from scalelab.core.config import UsageError
from scalelab.diagnostics.findings import Finding, RunLog, batch_of, confidence, number, sample_range

# %%
#| hide
import json
from pathlib import Path

import matplotlib.pyplot as plt

from scalelab.core.plotting import COLORS, style
from scalelab.diagnostics.findings import log_of, synthetic_steps

style()

# %% [markdown]
# ## How odd is one step?
# The obvious rule, "more than six standard deviations above the mean of the last 128 steps", fails twice. Early on the loss falls so steeply that the mean is
# far too high and real spikes hide below it; and one spike inflates the standard deviation so much that the next one is invisible. The repair has three parts,
# each of them *causal*, that is, computed from earlier steps only:
#
# - **detrended**: the medians of the older and the newer half of the last 32 steps give a line, and the line is drawn on to the next step;
# - **robust**: the scale is the median size of the *recent prediction errors*, so a curve that the line predicts badly is judged mildly;
# - **one-sided**: the prediction is never below the median of the last five steps, so that a steep descent that slows down is no alarm.


# %%
#| export
def _forecast(past: np.ndarray) -> np.ndarray:
    "The next value after each row of `past` [..., window]: a line through the medians of its halves, not below the median of the last five."
    width = past.shape[-1]
    half = width // 2
    older, newer = np.median(past[..., :half], -1), np.median(past[..., -half:], -1)
    ahead = newer + (newer - older) / (width - half) * (half + 1) / 2
    return np.maximum(ahead, np.median(past[..., -5:], -1))


def causal_baseline(
    x: np.ndarray, window: int = 32, history: int = 8, floor: float = 0.005
) -> tuple[np.ndarray, np.ndarray]:
    """What each point should have been, and how sure that is, from the points before it.

    x: series [n]; non-finite points are replaced by their predecessor. Returns (baseline [n], scale [n]) in units of x; scale is 1.4826 times the median
    absolute prediction error of the last `window` points, widened by 1 + 4/k while only k errors are known, at least `floor` times the baseline.
    NaN for the first 2 * history points, which can't be judged.
    """
    x, n = _filled(x), len(x)
    base, scale = np.full(n, np.nan), np.full(n, np.nan)
    for i in range(history, min(window, n)):
        base[i] = _forecast(x[:i])
    if n > window:
        base[window:] = _forecast(sliding_window_view(x, window)[:-1])
    error = np.abs(x - base)
    for i in range(2 * history, min(window + history, n)):
        scale[i] = np.median(error[history:i]) * (1 + 4 / (i - history))
    if n > window + history:
        scale[window + history :] = np.median(sliding_window_view(error[history:], window)[:-1], -1)
    return base, np.maximum(1.4826 * scale, np.maximum(floor * np.abs(base), 1e-12))


def _filled(x: np.ndarray) -> np.ndarray:
    "Non-finite points take the value of the point before; leading ones the first finite value, or 0."
    x = np.asarray(x, dtype=np.float64)
    good = np.isfinite(x)
    if not good.any():
        return np.zeros_like(x)
    index = np.maximum.accumulate(np.where(good, np.arange(len(x)), -1))
    return np.where(index >= 0, x[np.maximum(index, 0)], x[good][0])


# %% [markdown]
# Three properties are worth a test each: the future has no say, a straight line is predicted exactly, and one enormous point barely moves what comes after it.

# %%
x = log_of(synthetic_steps(300)).array("loss")
base, scale = causal_baseline(x)
changed = x.copy()
changed[200:] += 5
assert np.array_equal(
    causal_baseline(changed)[0][:201], base[:201], equal_nan=True
)  # point 200 is judged by 0..199
line = np.linspace(9, 3, 100)
assert np.nanmax(np.abs(causal_baseline(line)[0] - line)[:16]) < 0.3 and np.all(
    causal_baseline(line)[0][16:] >= line[16:] - 1e-9
)
spiked = x.copy()
spiked[150] = 100
assert np.nanmax(np.abs(causal_baseline(spiked)[0] - base)[151:]) < 3 * np.nanmedian(scale)
assert np.isnan(scale[:16]).all() and np.isfinite(scale[16:]).all()
assert np.isfinite(causal_baseline([math.nan] * 30 + [1.0] * 30)[1][16:]).all()


# %%
def naive_z(x, window=128):
    "Deviations from the mean of the last 128 points: the rule everybody writes first."
    past = [x[max(0, i - window) : i] for i in range(len(x))]
    return np.array([(v - p.mean()) / (p.std() + 1e-9) if len(p) >= 16 else np.nan for v, p in zip(x, past)])


x = log_of(synthetic_steps(120, seed=3)).array("loss")
x[45] += 2.0
x[60] += 1.0
base, scale = causal_baseline(x)
fig, (top, bottom) = plt.subplots(2, 1, figsize=(5.2, 3.0), sharex=True)
top.plot(x, lw=1, label="loss")
top.plot(base, "--", lw=1.2, label="what earlier steps foretell")
top.fill_between(range(120), base - 6 * scale, base + 6 * scale, alpha=0.15, lw=0)
top.set(ylabel="loss (nats/token)")
top.legend()
bottom.plot((x - base) / scale, label="detrended, robust")
bottom.plot(naive_z(x), ls="--", label="mean and deviation of 128")
bottom.axhline(6, color="0.4", lw=0.8)
bottom.set(xlabel="step", ylabel="z-score")
bottom.legend()
plt.show()

# %% [markdown]
# Two bad batches, at steps 45 and 60. The robust score stands at both; the naive one passes six for neither, because the descent fills its window. A straight
# line through the early steps also keeps the band wide there: a detector that is honest about a steep descent is blind to small faults in it.

# %%
z, zn = (x - base) / scale, naive_z(x)
print(
    f"robust z at the two faults {z[45]:.1f} and {z[60]:.1f}, elsewhere at most {np.nanmax(np.delete(z, [45, 60])):.1f};  naive {zn[45]:.1f} and {zn[60]:.1f}"
)
assert z[45] > 6 and z[60] > 6 and np.nanmax(np.delete(z, [45, 60])) < 6 and zn[60] < 6

# %% [markdown]
# ## Spikes, and how they end
# A high point is only a beginning. What follows tells the causes apart: a **bad batch** is worst at its own step and gone at the next, because the loss is
# measured on the bad data itself; a **loss spike** (an optimizer that stepped too far) keeps rising and comes back; a **divergence** does not come back. So each
# excursion above the baseline is followed to its end before it gets a name.

# %%
#| export
Z_LOSS = 6.0  # loss, when the gradient norm agrees
Z_GRAD = 4.0  # gradient norm (of its logarithm) that counts as agreement
Z_ALONE = 15.0  # loss, when nothing agrees: measured on public curves below
PATIENCE = 64  # steps an excursion may take to come back


@dataclass
class Excursion:
    """A stretch of steps above the causal baseline: indices `start`..`end` (exclusive; len(x) if it never came back), z at the start, the level before, the peak."""

    start: int
    end: int
    z: float
    level: float
    peak: int
    recovered: bool


def excursions(x: np.ndarray, threshold: float = Z_LOSS) -> list[Excursion]:
    """Where `x` [n] leaves its causal baseline upwards by `threshold` scales.

    An excursion ends when two points in a row are within a quarter of its first excess (or three scales, if larger); steps inside it raise no second alarm.
    """
    x = _filled(x)
    base, scale = causal_baseline(x)
    z = np.nan_to_num((x - base) / scale, nan=-1.0)
    found, free_from = [], 0
    for i in np.flatnonzero(z > threshold).tolist():
        if i < free_from:
            continue
        line = base[i] + max(0.25 * (x[i] - base[i]), 3 * scale[i])
        below = x[i + 1 :] <= line
        back = np.flatnonzero(below[:-1] & below[1:]) if len(below) > 1 else np.flatnonzero(below)
        end = i + 1 + int(back[0]) if len(back) else len(x)
        found.append(
            Excursion(i, end, float(z[i]), float(base[i]), i + int(np.argmax(x[i:end])), bool(len(back)))
        )
        free_from = end
    return found


# %%
x = log_of(synthetic_steps(200)).array("loss")
x[100] += 3
x[140:150] += np.linspace(1, 3, 10)
x[180:] += 2.0
a, b, c = excursions(x)
assert (a.start, a.end, a.peak, a.recovered) == (100, 101, 100, True)  # one step
assert (b.start, b.peak, b.end, b.recovered) == (140, 149, 150, True)  # worst at its end, then back
assert (c.start, c.end, c.recovered) == (180, 200, False)  # never back

# %%
#| export
_ADVICE = {
    "bad_batch": "read the documents of these samples (`Stream(...).batch({first}, {count})` of scalelab.data.stream, on the run's "
    "shards and seed); if they are junk, clean them out (`scalelab data clean`), or skip {count} samples from sample {first} in the "
    "control log and resume from the checkpoint before step {step} (`scalelab train --resume CHECKPOINT`)",
    "loss_spike": "it came back by itself; compare grad_norm and update_norm around step {step} in `scalelab report {run}`. If it repeats, lower the peak rate or lengthen the warm-up",
    "divergence": "stop, and resume from the last checkpoint before step {step} with a lower rate: `scalelab train --resume CHECKPOINT`; `scalelab report {run}` shows what moved first",
}


def find_spikes(log: RunLog) -> list[Finding]:
    """bad_batch, loss_spike and divergence: excursions of the loss above its causal baseline, named by how they end.

    An excursion speaks when the loss has z > 15, or z > 6 while the logarithm of the gradient norm has z > 4 at the same step.
    """
    loss = log.array("loss")
    grad = np.log(np.maximum(log.array("grad_norm"), 1e-12))
    base, scale = causal_baseline(grad, floor=0.0)
    z_grad = (
        (grad - base) / np.maximum(scale, 0.05) if np.isfinite(grad).any() else np.full(len(loss), np.nan)
    )
    out = []
    for e in excursions(loss):
        zg = float(z_grad[e.start])
        agrees = zg > Z_GRAD
        if not agrees and e.z <= Z_ALONE:
            continue
        sure = confidence(e.z, Z_LOSS if agrees else Z_ALONE)
        sure = 1 - (1 - sure) * (1 - confidence(zg, Z_GRAD)) if agrees else sure
        kind = _course(e, loss)
        step = int(log.global_step[e.start])
        evidence = {
            "loss": loss[e.start],
            "expected_loss": e.level,
            "robust_z": e.z,
            "steps_above": e.end - e.start,
            "recovered": e.recovered,
        }
        if math.isfinite(zg):
            evidence |= {
                "grad_norm": log.steps[e.start].get("grad_norm"),
                "expected_grad_norm": math.exp(base[e.start]),
                "grad_robust_z": zg,
            }
        evidence |= batch_of(log, e.start)
        first, last = sample_range(log, e.start) or ("FIRST", "LAST")
        count = last - first if isinstance(first, int) else "COUNT"
        out.append(
            Finding(
                kind,
                step,
                sure,
                evidence,
                _ADVICE[kind].format(step=step, run=log.name, first=first, count=count),
            )
        )
    return out


def _course(e: Excursion, loss: np.ndarray) -> str:
    "The name of an excursion: gone at the next step, back later, or lasting."
    if e.start + 1 >= len(loss) or (
        e.peak == e.start and loss[e.start + 1] <= e.level + 0.5 * (loss[e.start] - e.level)
    ):
        return "bad_batch"
    if e.end - e.start > PATIENCE or (not e.recovered and len(loss) - e.start >= 16):
        return "divergence"
    return "loss_spike"


# %% [markdown]
# The fault that the closed loop plants: one batch of noise at step 60. The healthy run beside it must stay silent, and so must runs of 40 steps that are nothing
# but descent.


# %%
def with_bad_batch(n=100, at=60, seed=0, size=1.8, grad=4.0):
    lines = synthetic_steps(n, seed)
    lines[at - 1]["loss"] *= size
    lines[at - 1]["grad_norm"] *= grad
    return lines


lines = with_bad_batch()
[found] = find_spikes(log_of(lines))
print(json.dumps(found.to_dict(), indent=1))
assert (found.kind, found.step) == ("bad_batch", 60) and found.confidence > 0.8
assert found.evidence["batch_hash"] == lines[59]["batch_hash"] and found.evidence["samples"] == [
    59 * 16,
    60 * 16,
]

# %%
false_alarms = sum(
    bool(find_spikes(log_of(synthetic_steps(n, seed, noise))))
    for n in (40, 100, 400)
    for seed in range(40)
    for noise in (0.01, 0.03)
)
hits = [
    any(f.kind == "bad_batch" and f.step == 60 for f in find_spikes(log_of(with_bad_batch(seed=s, size=1.5))))
    for s in range(40)
]
print(
    f"healthy synthetic runs with an alarm: {false_alarms} of 240; planted bad batches found and named: {sum(hits)} of 40"
)
assert false_alarms <= 2 and sum(hits) >= 38

# %%
lines = synthetic_steps(200)
for line in lines[150:]:
    line["loss"] += 3.0
    line["grad_norm"] *= 3
assert [(f.kind, f.step) for f in find_spikes(log_of(lines))] == [("divergence", 151)]
lines = synthetic_steps(200)
for i, line in enumerate(lines[150:162]):
    line["loss"] += 1.5 + 0.2 * i
    line["grad_norm"] *= 3
assert [(f.kind, f.step) for f in find_spikes(log_of(lines))] == [("loss_spike", 151)]

# %% [markdown]
# ## A climb without a jump
# A run can go wrong so slowly that no step is odd. Then the question is about levels: is the median of the latest stretch clearly above the best stretch
# before it, and has it been so for long? Eight per cent is the margin; a mixture that changes on purpose moves the loss by less.


# %%
#| export
def find_slow_divergence(log: RunLog, margin: float = 0.08) -> list[Finding]:
    """slow_divergence: the loss ended above its own best stretch by more than `margin` of it and six standard errors, without a jump that explains it.

    Stretches are medians of max(16, n / 20) steps; the last two must both be above. Jumps are `find_spikes`' business: if it saw a divergence, this stays silent.
    """
    loss = _filled(log.array("loss"))
    width = max(16, len(loss) // 20)
    if len(loss) < 4 * width or not np.isfinite(log.array("loss")).any():
        return []
    medians = np.median(sliding_window_view(loss, width), -1)
    best = int(np.argmin(medians))
    base, scale = causal_baseline(loss)
    line = medians[best] + max(
        margin * abs(medians[best]), 6 * 1.25 * float(np.nanmedian(scale)) / math.sqrt(width)
    )
    if not (medians[-1] > line and medians[-1 - width] > line and best < len(medians) - 2 * width):
        return []
    if any(f.kind == "divergence" for f in find_spikes(log)):
        return []
    first = best + int(np.flatnonzero(medians[best:] <= line)[-1]) + 1  # from here on every stretch is above
    rise = float(medians[-1] / medians[best] - 1)
    step = int(log.global_step[first])
    evidence = {
        "best_loss": medians[best],
        "best_at_step": int(log.global_step[best + width - 1]),
        "last_loss": medians[-1],
        "rise": rise,
    }
    advice = f"resume from the checkpoint near step {evidence['best_at_step']} with a lower rate (`scalelab train --resume CHECKPOINT`); `scalelab report {log.name}` shows rate and norms beside the loss"
    return [Finding("slow_divergence", step, confidence(rise, margin), evidence, advice)]


# %%
lines = synthetic_steps(600)
for i, line in enumerate(lines[300:]):
    line["loss"] *= 1 + 0.3 * i / 300
[f] = find_slow_divergence(log_of(lines))
assert 300 < f.step < 520 and 200 < f.evidence["best_at_step"] < 420, f
assert not any(
    find_slow_divergence(log_of(synthetic_steps(n, s, 0.03))) for n in (40, 100, 600) for s in range(20)
)

# %% [markdown]
# ## Numbers that aren't numbers
# A NaN needs no statistics. Two things do need care: a step that the loss scaler *skipped* because of an infinity under a loss scale is the scaler doing its work, and after the
# first NaN all later ones are its children. So the first other one is reported, with the last healthy numbers before it. The first article would repair
# the batch with `nan_to_num`; token ids are integers and can't be NaN, so the place to look is where the first infinite number was made.


# %%
#| export
def find_non_finite(log: RunLog) -> list[Finding]:
    """non_finite: the first step whose loss or norms are NaN or infinite.

    A skipped step with a finite loss is passed over when a loss scale other than 1 is in use: that is the scaler at work.
    """
    keys = ("loss", "grad_norm", "param_norm", "update_norm")
    bad = [
        [k for k in keys if isinstance(line.get(k), float) and not math.isfinite(line[k])]
        for line in log.steps
    ]
    loss = log.array("loss")
    scaler = [
        line.get("skipped") and line.get("loss_scale", 1.0) != 1.0 and math.isfinite(value)
        for line, value in zip(log.steps, loss)
    ]
    at = next((i for i, names in enumerate(bad) if names and not scaler[i]), None)
    if at is None:
        return []
    step = int(log.global_step[at])
    before = log.steps[at - 1] if at else {}
    evidence = {
        "quantities": bad[at],
        "steps_affected": sum(map(bool, bad[at:])),
        "lasts_to_the_end": bool(bad[-1]),
        "update_skipped": bool(log.steps[at].get("skipped")),
        "loss_before": before.get("loss"),
        "grad_norm_before": before.get("grad_norm"),
        "lr": log.steps[at].get("lr"),
    } | batch_of(log, at)
    if at and np.isfinite(loss[at]) and "grad_norm" in bad[at]:
        where = "the loss was finite and the gradient was not: overflow in the backward pass"
    else:
        where = "the forward pass already gave it: parameters were broken by the step before, or an activation overflowed"
    if log.steps[at].get("skipped"):
        where += "; the update was skipped, the parameters are unharmed, and if it stays at this step nothing needs doing; if not"
    advice = f"{where}; resume from the checkpoint before step {step} (`scalelab train --resume CHECKPOINT`), with `--precision fp32` for a few steps to see whether it is a matter of range"
    return [Finding("non_finite", step, 1.0, evidence, advice)]


# %%
lines = synthetic_steps(50)
for line in lines[29:]:
    line["loss"] = line["grad_norm"] = float("nan")
[f] = find_non_finite(log_of(lines))
assert (
    (f.step, f.confidence) == (30, 1.0)
    and f.evidence["steps_affected"] == 21
    and f.evidence["lasts_to_the_end"]
)
assert f.evidence["loss_before"] == lines[28]["loss"] and f.evidence["samples"] == [29 * 16, 30 * 16]
lines = synthetic_steps(50)
lines[3] |= {"grad_norm": float("inf"), "skipped": True, "loss_scale": 65536.0}  # a loss scaler at work
assert find_non_finite(log_of(lines)) == [] == find_non_finite(log_of(synthetic_steps(50)))
lines[3]["loss_scale"] = 1.0  # no scaler: the guard against bad gradients had to act
[f] = find_non_finite(log_of(lines))
assert f.step == 4 and f.evidence["update_skipped"] and "unharmed" in f.advice

# %% [markdown]
# ## Held-out text against training text
# Two findings need both losses. A held-out loss that turns upwards while the training loss goes on falling is **overfitting**. A held-out loss clearly *below*
# the training loss is too good to be true: text leaked across the split. (The article has it the other way round and expects a worse metric. Which of the two real
# leakage shows is not measured here.)


# %%
#| export
def find_generalisation(log: RunLog) -> list[Finding]:
    """overfitting: the last three evaluations are all more than 2% above the best, the last over 3%, and the training loss fell meanwhile.
    eval_leakage: the last two evaluations are at least 15% below the lowest of the five training losses before them; a hint, as the mixtures may differ."""
    points = [(line["global_step"], number(line.get("loss"))) for line in log.evals]
    points = [(s, v) for s, v in points if math.isfinite(v)]
    steps, loss, out = log.global_step, _filled(log.array("loss")), []
    values = np.array([v for _, v in points])
    if len(values) >= 4:
        best = int(np.argmin(values[:-1]))
        rise = float(values[-1] / values[best] - 1)
        then, now = (
            float(np.median(loss[max(0, k - 8) : k + 1]))
            for k in (np.searchsorted(steps, points[best][0]), len(steps) - 1)
        )
        if (
            best <= len(values) - 4
            and (values[-3:] > 1.02 * values[best]).all()
            and rise > 0.03
            and now < then
        ):
            evidence = {
                "best_loss": values[best],
                "best_at_step": points[best][0],
                "last_loss": values[-1],
                "rise": rise,
                "train_loss_then": then,
                "train_loss_now": now,
            }
            advice = f"the best model is the one of step {points[best][0]} (checkpoints/best); fewer epochs, more data or dropout: `scalelab data tokenize` with more documents"
            out.append(Finding("overfitting", points[best][0], confidence(rise, 0.03), evidence, advice))
    if len(values) >= 2:
        lowest = [
            float(np.min(loss[max(0, k - 5) : k + 1]))
            for k in (min(int(np.searchsorted(steps, s)), len(loss) - 1) for s, _ in points[-2:])
        ]
        gaps = [1 - v / t for v, t in zip(values[-2:], lowest)]
        if min(gaps) > 0.15:
            evidence = {"eval_loss": values[-1], "lowest_recent_train_loss": lowest[-1], "gap": gaps[-1]}
            advice = "held-out text is easier than training text: check the split for near-duplicates (`scalelab data inspect` on both), and that both have the same mixture of domains"
            out.append(Finding("eval_leakage", points[-1][0], confidence(min(gaps), 0.15), evidence, advice))
    return out


# %%
train = synthetic_steps(400)


def evals(curve):
    return [dict(kind="eval", global_step=s, loss=float(curve(s))) for s in range(50, 401, 50)]


truth = {
    line["global_step"]: 2.2
    + 6.1 * (0.7 * np.exp(-line["global_step"] / 12) + 0.3 * np.exp(-line["global_step"] / 150))
    for line in train
}
assert find_generalisation(log_of(train, evals=evals(lambda s: truth[s] * 1.02))) == []
[f] = find_generalisation(log_of(train, evals=evals(lambda s: truth[s] * 1.02 + 0.004 * max(0, s - 150))))
assert f.kind == "overfitting" and 100 <= f.step <= 250
[f] = find_generalisation(log_of(train, evals=evals(lambda s: truth[s] * 0.75)))
assert f.kind == "eval_leakage" and f.step == 400
assert (
    find_generalisation(
        log_of(
            synthetic_steps(40),
            evals=[dict(kind="eval", global_step=s, loss=truth[s]) for s in (10, 20, 30, 40)],
        )
    )
    == []
)  # steep, and sound

# %% [markdown]
# ## A loss with a beat
# The article reads a sawtooth as a clip value that is too small; data sorted in cycles would draw one as well. Which of the two it is in real trainings has not been
# measured here. Whatever the cause, a period is visible in the autocorrelation of the detrended loss.


# %%
#| export
def find_periodic_loss(log: RunLog, window: int = 1024) -> list[Finding]:
    """periodic_loss: the detrended loss of the last `window` steps repeats with a period of 4 steps or more.

    The autocorrelation at the period must exceed 0.4 and six standard errors 1/sqrt(n), be a local peak, and be clearly higher than at half the period.
    """
    loss = _filled(log.array("loss"))[-window:]
    if len(loss) < 128:
        return []
    base, scale = causal_baseline(loss)
    x = np.clip((loss - base) / scale, -4, 4)[32:]
    x = x - x.mean()
    n = len(x)
    power = np.abs(np.fft.rfft(x, 2 * n)) ** 2
    r = np.fft.irfft(power)[: n // 3]
    r = r / max(r[0], 1e-12)
    line = max(0.4, 6 / math.sqrt(n))
    peaks = [
        k
        for k in range(4, len(r) - 1)
        if r[k] > line and r[k] >= r[k - 1] and r[k] >= r[k + 1] and r[k // 2] < 0.7 * r[k]
    ]
    if not peaks:
        return []
    period = next(k for k in peaks if r[k] > 0.8 * max(r[j] for j in peaks))
    evidence = {
        "period_in_steps": period,
        "autocorrelation": r[period],
        "samples_per_period": period * float(np.nanmedian(np.diff(log.array("consumed_samples")))),
    }
    advice = "data in a cyclic order is the usual cause: check that the order of samples is shuffled across shards and domains (`scalelab data inspect`); gradient clipping is the less likely one"
    return [
        Finding(
            "periodic_loss",
            int(log.global_step[-len(loss)]),
            confidence(float(r[period]), line),
            evidence,
            advice,
        )
    ]


# %%
saw = [
    line | {"loss": line["loss"] + 0.25 * ((i % 16) / 16 - 0.5)}
    for i, line in enumerate(synthetic_steps(400))
]
[f] = find_periodic_loss(log_of(saw))
assert f.evidence["period_in_steps"] == 16, f
assert not any(
    find_periodic_loss(log_of(synthetic_steps(n, s, 0.03))) for n in (40, 200, 1000) for s in range(20)
)

# %% [markdown]
# ## Wavelets against simpler detectors
# The claim is about wavelets, so they get a fair trial: four detectors, all causal, read healthy record curves into which we plant known faults by multiplying
# the loss. Every detector gets the threshold that fires on at most one in 20,000 points of *other* healthy curves (every second file), so that none can buy
# detections with false alarms. Asked is how many faults raise an alarm within 64 steps, and how late.


# %%
#| export
def detector_scores(x: np.ndarray, window: int = 128) -> dict[str, np.ndarray]:
    """Upward scores [n] of four causal detectors: mean and deviation, robust z, one-sided CUSUM of the clipped robust z, Haar difference over 16 steps.

    Haar is the undecimated wavelet coefficient: mean of the last 16 points minus mean of the 16 before, over the robust scale of earlier coefficients.
    """
    n = len(x)
    total, square = np.cumsum(np.r_[0.0, x]), np.cumsum(np.r_[0.0, (x - x[0]) ** 2])
    low = np.maximum(np.arange(n) - window, 0)
    count = np.maximum(np.arange(n) - low, 1)
    mean = (total[np.arange(n)] - total[low]) / count
    var = (square[np.arange(n)] - square[low]) / count - (mean - x[0]) ** 2
    base, scale = causal_baseline(x)
    robust = np.nan_to_num((x - base) / scale)
    cusum, level = np.zeros(n), 0.0
    for i, z in enumerate(np.clip(robust, -4, 4)):
        level = max(0.0, level + z - 0.5)
        cusum[i] = level
    haar = np.zeros(n)
    k = 16
    haar[2 * k - 1 :] = (total[2 * k :] - 2 * total[k:-k] + total[: -2 * k]) / k
    width = 256
    spread = np.full(n, np.inf)
    if n > width + 2 * k:
        spread[width + 2 * k :] = 1.4826 * np.median(
            np.abs(sliding_window_view(haar[2 * k :], width)[:-1]), -1
        )
    return {
        "mean + deviation": np.where(np.arange(n) >= 32, (x - mean) / np.sqrt(np.maximum(var, 1e-12)), 0),
        "robust z": robust,
        "CUSUM": cusum,
        "causal Haar": haar / np.maximum(spread, 1e-9),
    }


# %%
x = log_of(synthetic_steps(800)).array("loss")
scores, cut = detector_scores(x), detector_scores(x[:600])
assert all(np.allclose(scores[k][:600], cut[k]) for k in scores)  # causal: the future changes nothing
y = x.copy()
y[600] += 2
y[700:] *= 1.2
s = detector_scores(y)
assert s["robust z"][600] > 12 and s["causal Haar"][700:732].max() > 2 * s["causal Haar"][650:700].max()

# %%
#| export
FAULTS = {
    "one step, +50%": (1, 1.5),
    "one step, +25%": (1, 1.25),
    "ten steps, +15%": (10, 1.15),
    "lasting, +15%": (None, 1.15),
    "lasting, +6%": (None, 1.06),
}


def _found(delays: list[int | None]) -> dict:
    "Share of faults found, and the median delay in steps of those."
    late = [v for v in delays if v is not None]
    return {"found": round(len(late) / len(delays), 3), "median_delay": int(np.median(late)) if late else None}


def bench_detectors(
    curves: dict[str, dict[str, np.ndarray]],
    per_curve: int = 6,
    within: int = 64,
    rate: float = 1 / 20000,
    seed: int = 0,
) -> dict:
    """Share of planted faults that each detector finds within `within` steps, and its median delay, at one false-alarm rate fixed on other curves.

    Healthy curves of 1500 points or more, sorted by name: even ones set thresholds (the level that `rate` of their points pass), odd ones receive faults.
    """
    names = sorted(k for k, c in curves.items() if k.startswith("mn_") and len(c["loss"]) >= 1500)
    if len(names) < 2:
        raise UsageError(
            "at least two healthy curves (mn_*.csv) of 1500 points are needed: one sets thresholds, one is tested"
        )
    calm = [detector_scores(curves[k]["loss"]) for k in names[::2]]
    line = {d: float(np.quantile(np.concatenate([c[d][300:] for c in calm]), 1 - rate)) for d in calm[0]}
    rng, rows, tested = np.random.default_rng(seed), defaultdict(list), 0
    for name in names[1::2]:
        loss = curves[name]["loss"]
        tested += len(loss)
        for fault, (length, factor) in FAULTS.items():
            for at in rng.integers(400, len(loss) - within, per_curve):
                low = max(0, at - 400)  # the longest memory of any detector
                part = loss[low : at + within].copy()
                part[at - low : None if length is None else at - low + length] *= factor
                for detector, score in detector_scores(part).items():
                    late = np.flatnonzero(score[at - low :] > line[detector])
                    rows[fault, detector].append(int(late[0]) if len(late) else None)
    table = {f: {d: _found(rows[f, d]) for d in line} for f in FAULTS}
    return {
        "curves_for_thresholds": len(names[::2]),
        "curves_tested": len(names[1::2]),
        "faults_each": len(rows[next(iter(rows))]),
        "within_steps": within,
        "false_alarm_rate": rate,
        "thresholds": {d: round(v, 2) for d, v in line.items()},
        "table": table,
    }


# %%
long = {
    f"mn_{i}": {"step": np.arange(1600), "loss": log_of(synthetic_steps(1600, i)).array("loss")}
    for i in range(4)
}
b = bench_detectors(long, per_curve=3)
assert b["table"]["one step, +50%"]["robust z"] == {"found": 1.0, "median_delay": 0}
assert b["curves_tested"] == 2 and b["faults_each"] == 6

# %% [markdown]
# The trial on 35 public record runs is kept beside this notebook (`python -m scalelab.diagnostics.fingerprint --curves DIR`, where DIR holds the curves as CSV). The
# runs are the published record logs of `KellerJordan/modded-nanogpt`, which a reader must fetch: it is not reproducible from this repository alone.

# %%
trial = json.loads(Path("results/detectors.json").read_text())
names, faults = list(trial["thresholds"]), list(trial["table"])
fig, ax = plt.subplots(figsize=(6.4, 2.8))
for k, name in enumerate(names):
    found = [trial["table"][f][name]["found"] for f in faults]
    ax.bar(np.arange(len(faults)) + 0.2 * k - 0.3, found, 0.19, label=name)
ax.set_xticks(range(len(faults)), faults)
ax.set(xlabel="planted fault (share of the loss)", ylabel="share found in 64 steps", ylim=(0, 1.25))
ax.legend(ncols=4)
plt.show()

# %% [markdown]
# No detector wins. One bad step is seen by those that look at single points and by no other; a lasting shift by those that add up, CUSUM within 2 or 3 steps and the
# causal wavelet a few steps later but a little more often; and 6% is beyond all of them at this false-alarm rate within 64 steps. A wavelet is a good detector of
# lasting changes and a poor one of bad batches, and a cumulative sum of five lines comes close to it. Among those that look at
# single points the naive rule (mean and deviation) is not the worse one here: it finds 55% of the single steps of +50%, the robust z that we ship 45%, and at +25% both
# find nothing. What speaks for the robust score is the descent, in the first picture, where the naive rule fails.

# %%
t = trial["table"]
for f in faults:
    print(
        f"{f:18}"
        + "".join(
            f"{name}: {t[f][name]['found']:4.0%} after {str(t[f][name]['median_delay']):5}" for name in names
        )
    )
assert t["lasting, +15%"]["causal Haar"]["found"] > t["lasting, +15%"]["robust z"]["found"] + 0.3
assert t["one step, +50%"]["robust z"]["found"] > t["one step, +50%"]["causal Haar"]["found"] + 0.3

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-wave: wavelets over the last 1000 steps detect faults early | holds in part | at one false alarm in 20,000 points of public curves the causal Haar coefficient finds 91% of lasting rises of 15% (CUSUM 82%, six steps earlier) and 2% of single bad batches of +50%. There the naive mean-and-deviation rule finds 55% and the robust z that is shipped 45%; of single steps of +25% both find 0%. Not reproducible from this repository alone: the curves must be fetched |
#
# Open for A-wave: gradual drifts, other wavelets and scales, rises of 6% and less over more than 64 steps, real faults instead of planted factors. Not covered:
# the first 16 steps, where there is nothing to compare with, and watching a run while it goes.
