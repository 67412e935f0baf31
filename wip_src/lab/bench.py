# %% [markdown]
# # Measurements side by side
#
# > Benchmarks with targets: ours and somebody else's on the same work, in turns, in one run; ratios and not seconds.
#
# A time in seconds says more about the machine than about the program, and a machine that is shared with others changes its mind between two runs. So every measurement here takes turns, A B A B, on the same
# work, and reports the ratio of medians of CPU seconds. Each row has a target that was written down before.

# %%
#| default_exp lab.bench

# %%
#| export
from __future__ import annotations

import hashlib
import importlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from scalelab.core.config import UsageError, did_you_mean

# %%
#| hide
import tempfile
import types
import matplotlib.pyplot as plt
from scalelab.core.plotting import COLORS, style

# %% [markdown]
# ## Taking turns
# One function runs the contenders in turns and gives the median CPU seconds of each. CPU seconds of the process, all threads together: time during which another process had the core does not count.

# %%
#| export
def turns(jobs: dict[str, Callable[[], object]], rounds: int = 5, warmup: int = 1) -> dict[str, float]:
    "Median CPU seconds of each job, run in turns (A B A B ...) after `warmup` rounds that don't count."
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for k in range(warmup + rounds):
        for name, job in jobs.items():
            begin = time.process_time()
            job()
            if k >= warmup:
                seconds[name].append(time.process_time() - begin)
    return {name: float(np.median(s)) for name, s in seconds.items()}


def row(what: str, value: float, unit: str, peers: str, target: str, holds: bool) -> dict:
    "One row of a bench table."
    return {"what": what, "value": float(value), "unit": unit, "peers": peers, "target": target, "holds": bool(holds)}


# %%
def work(n):
    "A job of known relative size."
    return lambda: sum(i * i for i in range(n))

got = turns({"one": work(200_000), "three": work(600_000)}, rounds=5)
assert 2.0 < got["three"] / got["one"] < 4.5
print(f"three times the work takes about {round(got['three'] / got['one'])} times the CPU")

# %% [markdown]
# ## A peer's own environment
# Other people's toolkits want their own versions of everything. A peer is therefore installed into an environment that is thrown away, and called as a process whose CPU seconds the kernel counts.

# %%
#| export
def peer_python(*requirements: str) -> Path | None:
    """The interpreter of a virtual environment that holds `requirements`; None when they can't be installed.

    It is made once per set of requirements, below `SCALELAB_PEERS` or the user's cache folder, and may be deleted at any time.
    """
    name = hashlib.sha256(" ".join(sorted(requirements)).encode()).hexdigest()[:12]
    place = Path(os.environ.get("SCALELAB_PEERS") or Path.home() / ".cache" / "scalelab" / "peers") / name
    python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
    if (place / "complete").exists():
        return python
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    commands = [[sys.executable, "-m", "venv", str(place)]]
    if requirements:
        commands.append([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])
    for command in commands:
        if subprocess.run(command, capture_output=True).returncode:
            shutil.rmtree(place, ignore_errors=True)
            return None
    (place / "complete").touch()
    return python


def child_seconds(command: Sequence[str | Path], **variables: str) -> float:
    "CPU seconds (user and system, grandchildren included) of a command that must succeed; RuntimeError with its last words otherwise."
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | variables)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# %%
os.environ["SCALELAB_PEERS"] = peers = tempfile.mkdtemp()
assert peer_python("a-package-that-nobody-made==0.0.1 ; python_version < '3'") is not None, "a requirement that does not apply"
python = peer_python("a-package-that-nobody-made==0.0.1 ; python_version < '3'")
light, heavy = (child_seconds([python, "-c", f"sum(i * i for i in range({n}))"]) for n in (10, 8_000_000))
assert heavy > light > 0
try:
    child_seconds([python, "-c", "raise SystemExit('no luck')"])
    raise AssertionError("a failed peer passed")
except RuntimeError as error:
    assert "no luck" in str(error)
shutil.rmtree(peers)
del os.environ["SCALELAB_PEERS"]

# %% [markdown]
# ## The list
# A bench is named here as text and imported when it is asked for, so that the list costs nothing.

# %%
#| export
BENCHES: dict[str, tuple[str, str, str]] = {  # name: where, what it measures, what it needs
    "data-dedup": ("scalelab.lab.bench_dedup:bench_data_dedup", "near duplicates and shared passages: recall, precision, speed against three toolkits", "PyPI for the peers; --data with 6_near_dup"),
    "data-pipeline": ("scalelab.lab.bench_pipeline:bench_data_pipeline", "a whole cleaning run against datatrove, per core", "PyPI for the peer; --data with 1_pretrain"),
    "data-memory": ("scalelab.lab.bench_pipeline:bench_data_memory", "peak memory of a cleaning run at 1x, 4x and 16x of the text", ""),
    "data-kills": ("scalelab.lab.bench_pipeline:bench_data_kills", "a cleaning run killed at 50 random moments", ""),
    "data-encode": ("scalelab.lab.bench_stream:bench_data_encode", "encoding text against HF tokenizers, identities compared", "--data with 1_pretrain for real text"),
    "data-stream": ("scalelab.lab.bench_stream:bench_data_stream", "batches from shards against copying the bytes and against nanoGPT's way", ""),
    "data-toxicity": ("scalelab.lab.bench_quality:bench_data_toxicity", "rules and a classifier on labelled Chinese text", "--data with 3_toxicity"),
    "data-quality": ("scalelab.lab.bench_quality:bench_data_quality", "classifier and perplexity cut on dirty against clean text", "--data with 1_pretrain and 2_dirty_web"),
    "trainer-checkpoint": ("scalelab.lab.bench_trainer:bench_trainer_checkpoint", "writing and reading a checkpoint against torch.save and torch.load", ""),
    "trainer-overhead": ("scalelab.lab.bench_trainer:bench_trainer_overhead", "the training loop against the bare model step", ""),
}


def run_bench(name: str, quick: bool = False, data: str | Path | None = None) -> list[dict]:
    """Rows of a bench by its name.

    data: folder of labelled texts, for the benches that use one. A bench whose peer or data is missing gives a row that does not hold and says so.
    Raises UsageError for an unknown name or a folder that is not there.
    """
    if name not in BENCHES:
        raise UsageError(f"bench {name}: unknown{did_you_mean(name, BENCHES)}; known: {', '.join(BENCHES)}")
    if data is not None and not Path(data).is_dir():
        raise UsageError(f"--data {data}: no such folder; {name} needs {BENCHES[name][2] or 'none'}")
    module, function = BENCHES[name][0].split(":")
    try:
        return getattr(importlib.import_module(module), function)(quick, Path(data) if data else None)
    except ImportError as error:
        return [row(name, float("nan"), "", f"{error.name} is not installed", "needs its peer", False)]


# %% [markdown]
# A missing peer must not pass for a win:

# %%
def lonely(quick, data):
    "A bench whose peer is not installed."
    import a_library_that_does_not_exist  # noqa: F401

sys.modules["lonely_bench"] = types.SimpleNamespace(lonely=lonely, fine=lambda quick, data: [row("quick", quick, "", "", "1", quick)])
BENCHES |= {"lonely": ("lonely_bench:lonely", "", ""), "fine": ("lonely_bench:fine", "", "")}
bad = run_bench("lonely")
assert not bad[0]["holds"] and "a_library_that_does_not_exist is not installed" in bad[0]["peers"]
assert run_bench("fine", quick=True)[0]["holds"] and not run_bench("fine")[0]["holds"]
del BENCHES["lonely"], BENCHES["fine"]
for call in (lambda: run_bench("data-steam"), lambda: run_bench("data-stream", data="no/such/folder")):
    try:
        call()
        raise AssertionError("accepted")
    except UsageError as error:
        print(error)

# %% [markdown]
# ## Saved results
# `scalelab bench NAME --out results/NAME.json` was run for each name on two cores; the ratios here are read from those files.

# %%
import json
saved = {p.stem.removeprefix("bench-"): json.loads(p.read_text(encoding="utf-8")) for p in sorted(Path("results").glob("bench-*.json"))}
for name, found in saved.items():
    for r in found["rows"]:
        print(f"{'holds' if r['holds'] else 'MISSED':7} {name:20} {r['what']}: {r['value']:.2f} {r['unit']} (target {r['target']})")

# %%
style()
ratios = [(f"{n}: {r['what'].split(',')[0]}", r["value"]) for n, f in saved.items() for r in f["rows"] if r["unit"] == "x"]
if ratios:
    fig, ax = plt.subplots(figsize=(6.6, 2.2))
    ax.barh([a for a, _ in ratios][::-1], [b for _, b in ratios][::-1], color=COLORS[0])
    ax.axvline(1, color="k", lw=0.8)
    ax.set(xscale="log", xlabel="ratio")
    ax.grid(axis="y")
    plt.show()

# %% [markdown]
# What to see: which side of the line a bar should be on stands in its row (some ratios want to be large, some small). A target that is missed stays in the table.
#
# ## What turns are for
# Why not simply measure A five times, then B five times? A machine that slows down in between would decide the comparison. Simulated: a drift of 30% over the run, two equal jobs.

# %%
rng = np.random.default_rng(0)
drift = np.linspace(1.0, 1.3, 10)
noise = lambda: rng.normal(1, 0.02, 10)
blocks = [np.median((drift * noise())[5:]) / np.median((drift * noise())[:5]) for _ in range(500)]
taken = [np.median((drift * noise())[1::2]) / np.median((drift * noise())[::2]) for _ in range(500)]
fig, ax = plt.subplots(figsize=(5.4, 2.0))
ax.hist(blocks, bins=30, alpha=0.7, label="A five times, then B")
ax.hist(taken, bins=30, alpha=0.7, label="in turns")
ax.axvline(1, color="k", lw=0.8)
ax.set(xlabel="measured ratio of two equal jobs", yticks=[])
ax.legend()
plt.show()
assert abs(np.median(taken) - 1) < 0.06 < abs(np.median(blocks) - 1)

# %% [markdown]
# What to see: in turns the answer is close to one; block by block it is wrong by the drift, however often one repeats.
#
# ## Verdict
# | question | answer |
# |---|---|
# | are the comparisons fair on a noisy machine? | as far as turns and CPU seconds make them; the two checkpoint rows are wall time, since a disk is waited for |
# | which targets are missed? | those marked MISSED in the table above |
