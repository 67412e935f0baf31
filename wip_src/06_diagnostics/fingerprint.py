# %% [markdown]
# # Reading a run like a fingerprint
#
# > Names what went wrong in a training run, with the step, the evidence and the next command, from its log files alone.
#
# The first article keeps a table of seven shapes of the loss and their seven causes (A-7pat). This notebook puts the detectors of the last two together, asks how
# often they name the right fault, and how often they cry wolf on healthy runs: on synthetic logs, where the truth is known, and on public curves, where it has to
# be argued for.

# %%
#| default_exp diagnostics.fingerprint

# %%
#| export
from __future__ import annotations

import argparse
import csv
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scalelab.core.config import UsageError, atomic_write
from scalelab.core.runs import Run
from scalelab.diagnostics.books import (
    find_data_starvation,
    find_memory_growth,
    find_rank_divergence,
    find_rate_jumps,
    find_repeated_batches,
    find_resume_gaps,
    find_skipped_steps,
)
from scalelab.diagnostics.findings import Finding, RunLog, read_log
from scalelab.diagnostics.shapes import (
    bench_detectors,
    causal_baseline,
    find_generalisation,
    find_non_finite,
    find_periodic_loss,
    find_slow_divergence,
    find_spikes,
)

# %%
#| hide
import contextlib
import io
import math
import tempfile

import matplotlib.pyplot as plt

from scalelab.core.plotting import style
from scalelab.diagnostics.findings import log_of, synthetic_steps, write_run

style()
tmp = tempfile.TemporaryDirectory()


def with_bad_batch(n=100, at=60):
    lines = synthetic_steps(n)
    lines[at - 1]["loss"] *= 1.8
    lines[at - 1]["grad_norm"] *= 4
    return lines


# %% [markdown]
# ## All of them
# The registry is a plain dict. `diagnose` runs everything and sorts by confidence, then by step. A detector sees only the log, so a new one is a function and a line here.

# %%
#| export
DETECTORS: dict[str, Callable[[RunLog], list[Finding]]] = {
    "spikes": find_spikes,
    "slow_divergence": find_slow_divergence,
    "non_finite": find_non_finite,
    "repeated_batches": find_repeated_batches,
    "rank_divergence": find_rank_divergence,
    "resume_gap": find_resume_gaps,
    "learning_rate_jump": find_rate_jumps,
    "data_starved": find_data_starvation,
    "skipped_steps": find_skipped_steps,
    "memory": find_memory_growth,
    "generalisation": find_generalisation,
    "periodic_loss": find_periodic_loss,
}


def diagnose(run: Run | str | Path) -> list[Finding]:
    """What went wrong in a run, surest first, from its metrics.jsonl, events.jsonl and environment.json alone.

    An empty list means that no detector spoke, not that the run is good. Raises UsageError when the directory holds no step lines.
    """
    log = run if isinstance(run, RunLog) else read_log(run)
    found = [finding for detect in DETECTORS.values() for finding in detect(log)]
    return sorted(found, key=lambda f: (-f.confidence, -1 if f.step is None else f.step))


# %% [markdown]
# Each planted fault should be named by its own detector and by no other. The matrix below plants twelve faults in fifteen healthy runs each and counts what
# `diagnose` says; a clean diagonal, and the last row (nothing planted) empty, is what we want to see. These are *synthetic* curves: they test the logic, not
# whether a real cause leaves this trace.


# %%
def plant(kind, seed):
    "A log with one fault in it."
    rng, lines, more = np.random.default_rng(seed + 100), synthetic_steps(240, seed), {}
    at = int(rng.integers(60, 180))
    late = lines[at:]
    if kind == "bad_batch":
        lines[at]["loss"] *= 1.6
        lines[at]["grad_norm"] *= 4
    elif kind == "loss_spike":
        [
            x.update(loss=x["loss"] * (1.35 + 0.05 * i), grad_norm=x["grad_norm"] * 3)
            for i, x in enumerate(late[:12])
        ]
    elif kind == "divergence":
        [x.update(loss=x["loss"] * 2, grad_norm=x["grad_norm"] * 4) for x in late]
    elif kind == "slow_divergence":
        [x.update(loss=x["loss"] + 0.01 * i) for i, x in enumerate(lines[100:])]
    elif kind == "non_finite":
        [x.update(loss=math.nan, grad_norm=math.nan) for x in late]
    elif kind == "repeated_batches":
        [x.update(batch_hash=lines[i]["batch_hash"]) for i, x in enumerate(late[:at])]
    elif kind == "rank_divergence":
        more["ranks"] = [
            dict(global_step=s, rank=r, param_checksum=f"{s}{r if s > at else 0}")
            for s in range(20, 240, 20)
            for r in (0, 1)
        ]
    elif kind == "resume_gap":
        [x.update(attempt=1, consumed_samples=x["consumed_samples"] - 48) for x in late]
    elif kind == "learning_rate_jump":
        [x.update(attempt=1, lr=x["lr"] / 4) for x in late]
    elif kind == "data_starved":
        [x.update(data_seconds=x["step_seconds"] * rng.uniform(0.2, 0.6)) for x in lines]
    elif kind == "memory_growth":
        [x.update(memory_bytes=x["memory_bytes"] + 600_000 * i) for i, x in enumerate(lines)]
    elif kind == "periodic_loss":
        [x.update(loss=x["loss"] + 0.3 * ((i % 12) / 12 - 0.5)) for i, x in enumerate(lines)]
    return log_of(lines, **more)


kinds = [
    "bad_batch",
    "loss_spike",
    "divergence",
    "slow_divergence",
    "non_finite",
    "repeated_batches",
    "rank_divergence",
    "resume_gap",
    "learning_rate_jump",
    "data_starved",
    "memory_growth",
    "periodic_loss",
]
said = {
    k: Counter(f for s in range(15) for f in {x.kind for x in diagnose(plant(k, s))})
    for k in [*kinds, "nothing"]
}

# %%
matrix = np.array([[said[k][g] / 15 for g in kinds] for k in [*kinds, "nothing"]])
fig, ax = plt.subplots(figsize=(4.6, 3.1))
ax.imshow(matrix, cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
ax.grid(False)
for (i, j), v in np.ndenumerate(matrix):
    if v:
        ax.text(j, i, f"{15 * v:.0f}", ha="center", va="center", fontsize=5.5)
ax.set_xticks(range(len(kinds)), kinds, rotation=40, ha="right", fontsize=8)
ax.set_yticks(range(len(kinds) + 1), [*kinds, "nothing"], fontsize=7)
ax.set(xlabel="named by diagnose (of 15 runs)", ylabel="planted")
plt.show()

# %%
diagonal = matrix[:12].diagonal()
others = matrix.copy()
np.fill_diagonal(others[:12], 0)
print(
    f"named rightly: {diagonal.mean():.1%} (worst: {kinds[int(diagonal.argmin())]} {diagonal.min():.0%});  wrong names per run: {others.sum(1).mean():.3f};  alarms on healthy runs: {matrix[12].sum():.2f} per run"
)
assert diagonal.min() >= 0.8 and matrix[12].sum() < 0.1 and others.sum(1).mean() < 0.15

# %% [markdown]
# How much of this could the loss have told? We count the faults whose planted log has the very loss curve of the healthy one.

# %%
healthy_loss = [log_of(synthetic_steps(240, s)).array("loss") for s in range(15)]
silent = [k for k in kinds if all(np.array_equal(plant(k, s).array("loss"), healthy_loss[s], equal_nan=True) for s in range(15))]
print(f"{len(silent)} of {len(kinds)} leave the loss as it was: {', '.join(silent)}")
assert len(silent) == 6 and "bad_batch" not in silent

# %% [markdown]
# ## From disk, by name
# What `scalelab diagnose RUN` prints comes from here. The run below resumed badly *and* met a bad batch; both are found, from the files alone.

# %%
run = with_bad_batch(100, 60)[:80] + [
    line | {"attempt": 1, "lr": line["lr"] / 5} for line in synthetic_steps(100)[80:]
]
found = diagnose(
    write_run(f"{tmp.name}/two-faults", run, [{"event": "resume", "global_step": 80, "attempt": 1}])
)
for f in found:
    print(f"{f.kind:20} step {f.step:<4} confidence {f.confidence:.2f}  {f.advice[:80]}...")
assert {(f.kind, f.step) for f in found} == {("bad_batch", 60), ("learning_rate_jump", 81)}
assert (
    diagnose(write_run(f"{tmp.name}/short", synthetic_steps(40))) == []
)  # forty steps of steep descent, nothing to say

# %% [markdown]
# ## Real curves
# Synthetic noise is tame. So the detectors are also run over public training curves: record runs of a speed-run repository (loss at every step), AlgoPerf logs
# (loss and gradient norm every 100 steps), lines quoted in the BigScience chronicles. The benchmark reads a folder of CSV files (`step,loss[,grad_norm]`), drops
# byte-identical copies, and treats file names that hold `spike` as faulty, `healthy` and `mn_` (the record runs) as healthy.
#
# None of these curves is in the repository, so the figures below are **not reproducible from this repository alone**: a reader must fetch the logs and turn them
# into CSV. They are the record logs of `KellerJordan/modded-nanogpt` (`mn_*.csv`), the training logs of the AlgoPerf competition in
# `mlcommons/submissions_algorithms` (`algoperf_*.csv`), and the log lines of runs tr8 and tr11 (and tr1) quoted in the chronicles of `bigscience-workshop/bigscience`.
#
# **A caution about the labels.** The AlgoPerf files were *chosen* by a z-score, which flatters any z-score detector; the record runs were not.


# %%
#| export
def read_curves(folder: str | Path) -> dict[str, dict[str, np.ndarray]]:
    "name -> columns (step, loss, perhaps grad_norm) of every CSV in `folder`, without `.eval.csv` files and byte-identical copies."
    files = sorted(p for p in Path(folder).glob("*.csv") if not p.name.endswith(".eval.csv"))
    if not files:
        raise UsageError(
            f"{folder}: no CSV files; expected training curves with the columns step, loss, perhaps grad_norm"
        )
    curves, seen = {}, set()
    for path in files:
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).hexdigest()
        rows = [r for r in csv.DictReader(raw.decode("utf-8").splitlines()) if r.get("loss")]
        if digest in seen or not rows:
            continue
        seen.add(digest)
        names = [k for k in ("step", "loss", "grad_norm") if any(r.get(k) for r in rows)]
        curves[path.stem] = {k: np.array([float(r.get(k) or "nan") for r in rows]) for k in names}
    return curves


def curve_log(curve: dict[str, np.ndarray], name: str = "RUN") -> RunLog:
    "A `RunLog` of a bare curve, so that the detectors can read it."
    keys = [k for k in curve if k != "step"]
    lines = [
        {"global_step": int(s), **{k: float(curve[k][i]) for k in keys}} for i, s in enumerate(curve["step"])
    ]
    return RunLog(lines, attempts=lines, name=name)


# %% [markdown]
# One more thing has to be known before alarms on healthy runs may be called false. The record runs read the same corpus in the same order. When runs with
# different models raise an alarm at the *same step*, the odd thing is the batch, and the detector was right. So an alarm counts as shared when another curve has
# it at the same step, give or take one (among a hundred alarms in 20,000 steps, chance alone would share about one).


# %%
#| export
def _shared(alarms: dict[str, set[int]]) -> set[int]:
    "Steps at which two curves or more have an alarm, give or take one step."
    where = Counter(s + d for steps in alarms.values() for s in steps for d in (-1, 0, 1))
    return {s for s, n in where.items() if n >= 2}


def alarm_sweep(
    curves: dict[str, dict[str, np.ndarray]], thresholds: tuple[float, ...] = (6, 8, 10, 12, 15, 20)
) -> list[dict]:
    "For each threshold of the loss alone: alarms on `curves`, those that no other curve shares, both per 100,000 points, and the steps alarmed most often."
    scores = {}
    for name, curve in curves.items():
        base, scale = causal_baseline(curve["loss"])
        scores[name] = np.nan_to_num((curve["loss"] - base) / scale, nan=-1.0)
    points, rows = sum(map(len, scores.values())), []
    for line in thresholds:
        alarms = {k: {int(s) for s in curves[k]["step"][z > line]} for k, z in scores.items()}
        shared = _shared(alarms)
        every = [s for steps in alarms.values() for s in steps]
        rows.append(
            {
                "z": line,
                "alarms": len(every),
                "per_100k": round(1e5 * len(every) / points, 2),
                "not_shared_per_100k": round(1e5 * sum(s not in shared for s in every) / points, 2),
                "most_often": [list(x) for x in Counter(every).most_common(3)],
            }
        )
    return rows


# %%
#| export
def bench_curves(curves: dict[str, dict[str, np.ndarray]]) -> dict:
    """Alarms of `diagnose` on public curves: per 100,000 steps on healthy ones (all, and those that no other curve shares), and faulty curves found."""
    healthy = {k: c for k, c in curves.items() if "healthy" in k or k.startswith("mn_")}
    spiky = {k: c for k, c in curves.items() if "spike" in k}
    points = sum(len(c["loss"]) for c in healthy.values())
    alarms = {k: [(f.kind, f.step) for f in diagnose(curve_log(c, k))] for k, c in healthy.items()}
    shared = _shared({k: {step for _, step in rows} for k, rows in alarms.items()})
    kinds, alone = Counter(), Counter()
    for rows in alarms.values():
        for kind, step in rows:
            kinds[kind] += 1
            alone[kind] += step not in shared
    found = {
        k: bool({"bad_batch", "loss_spike", "divergence"} & {f.kind for f in diagnose(curve_log(c, k))})
        for k, c in spiky.items()
    }
    return {
        "healthy_curves": len(healthy),
        "healthy_points": points,
        "alarms": dict(sorted(kinds.items())),
        "alarms_not_shared": dict(sorted(alone.items())),
        "alarms_per_100k": round(1e5 * sum(kinds.values()) / points, 2),
        "not_shared_per_100k": round(1e5 * sum(alone.values()) / points, 2),
        "curves_without_alarm": sum(not rows for rows in alarms.values()),
        "sweep": alarm_sweep(healthy),
        "spike_curves": len(spiky),
        "spike_curves_found": sum(found.values()),
        "missed": sorted(k for k, ok in found.items() if not ok),
    }


# %%
rng = np.random.default_rng(0)
few = {
    f"mn_{i}": {"step": np.arange(300), "loss": log_of(synthetic_steps(300, i)).array("loss")}
    for i in range(4)
}
for c in few.values():
    c["loss"][200] += 4  # the same odd batch in every run
few["spike_0"] = {"step": np.arange(300), "loss": log_of(synthetic_steps(300, 9)).array("loss")}
few["spike_0"]["loss"][250] += 3
b = bench_curves(few)
assert (
    b["alarms"] == {"bad_batch": 4}
    and b["alarms_not_shared"] == {"bad_batch": 0}
    and b["spike_curves_found"] == 1
)

# %% [markdown]
# Both benchmarks run from the command line, on a folder of the curves named above; the results are kept beside this notebook and shown below.


# %%
#| export
def main(argv: list[str] | None = None) -> int:
    "`python -m scalelab.diagnostics.fingerprint RUN` prints findings; with `--curves DIR [--out DIR]` it runs the two benchmarks on public curves."
    parser = argparse.ArgumentParser(prog="scalelab.diagnostics.fingerprint", description=main.__doc__)
    parser.add_argument("run", nargs="?", help="a run directory")
    parser.add_argument("--curves", help="folder of training curves (CSV: step, loss, perhaps grad_norm)")
    parser.add_argument("--out", help="folder for curves.json and detectors.json")
    args = parser.parse_args(argv)
    if bool(args.run) == bool(args.curves):
        parser.error("give a run directory or --curves DIR")
    if args.run:
        found = diagnose(args.run)
        print(json.dumps([f.to_dict() for f in found], indent=1, ensure_ascii=False))
        return int(bool(found))
    curves = read_curves(args.curves)
    command = "python -m scalelab.diagnostics.fingerprint --curves DIR"
    for name, result in (("curves", bench_curves(curves)), ("detectors", bench_detectors(curves))):
        text = json.dumps({"command": command, **result}, indent=1, ensure_ascii=False) + "\n"
        print(text, end="")
        if args.out:
            Path(args.out).mkdir(parents=True, exist_ok=True)
            atomic_write(Path(args.out) / f"{name}.json", text)
    return 0


# %%
#| export
#| eval: false
if __name__ == "__main__":
    import sys

    try:
        sys.exit(main())
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(2)

# %%
with contextlib.redirect_stdout(io.StringIO()) as text:
    assert main([f"{tmp.name}/two-faults"]) == 1 and main([f"{tmp.name}/short"]) == 0
assert '"bad_batch"' in text.getvalue()

# %% [markdown]
# What did the public curves say?

# %%
real = json.loads(Path("results/curves.json").read_text())
print(
    f"{real['healthy_curves']} healthy curves, {real['healthy_points']:,} points; alarms of the loss alone:"
)
for row in real["sweep"]:
    print(
        f"z > {row['z']:<3} {row['per_100k']:6.1f} per 100,000 points, {row['not_shared_per_100k']:6.1f} shared by no other run; most often (step, runs): {row['most_often']}"
    )
print(
    f"diagnose: {real['alarms_per_100k']} per 100,000, {real['not_shared_per_100k']} not shared; curves with a spike found: {real['spike_curves_found']} of {real['spike_curves']}"
)

# %% [markdown]
# Steps 947 and 919 are alarmed in run after run, with different models and optimizers. (Eight later runs count from zero and have them at 946 and 918.) There
# *is* an odd batch in that corpus, and the record holders trained through it. To call it a false alarm would be wrong, and to demand silence on "healthy" curves
# would train a detector to look away. The sweep is also where `Z_ALONE = 15` comes from: with nothing to agree with it, the loss has to be very odd before
# anybody is called. That all spiked curves are found is no merit: they were picked by a z-score.

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-7pat: seven loss patterns have seven causes | open; as a way to diagnose, not so | 12 planted faults are told apart in 180 of 180 synthetic logs and 15 healthy ones stay silent, but by hashes, checksums, rates and sample counts beside the loss; six of the twelve (repeated_batches, rank_divergence, resume_gap, learning_rate_jump, data_starved, memory_growth) were planted without touching the loss at all |
#
# Open: the causes themselves, injected into real trainings with three seeds, and a confusion matrix on held-out runs: a synthetic fault tests the logic of a
# detector and not whether the cause leaves that trace. Twelve kinds in clean logs with one fault each is also easier than life, where faults come together.

# %%
#| hide
tmp.cleanup()
