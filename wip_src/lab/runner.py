# %% [markdown]
# # Comparing trainings
#
# > The same short training with one thing changed, over several seeds; differences within a seed, with an interval, and a verdict that stands in a file.
#
# "Cleaning helps", "code helps", "easy first helps": a claim about training is a difference between two numbers that both wobble with the seed. Half of what one reads about small models is that wobble.
# This chapter holds the three tools that keep it apart: a unit run that always costs the same, a grid of arms and seeds that can be stopped and goes on, and a paired difference with its interval and
# the smallest effect that so many seeds could have shown.

# %%
#| default_exp lab.runner

# %%
#| export
from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scalelab.core.config import UsageError, atomic_write, progress
from scalelab.core.runs import JsonlWriter, encode_numbers, read_jsonl
from scalelab.data.mixture import ControlLog
from scalelab.data.shards import Shards, ShardWriter
from scalelab.data.stream import Batch, Stream
from scalelab.model.transformer import Decoder, ModelConfig
from scalelab.trainer.evaluation import evaluate
from scalelab.trainer.optim import OptimConfig, build_optimizer, clip_gradients, global_norm, set_rate
from scalelab.trainer.schedule import ScheduleConfig, lr_ratio

# %%
#| hide
import matplotlib.pyplot as plt
from scalelab.core.plotting import COLORS, style

# %% [markdown]
# ## The unit run
# About 1.1 million parameters and a quarter of a million tokens: under a minute on one core. What is to be compared comes in as shards, a mixture, or a function that changes each batch; everything else stays.

# %%
#| export
@dataclass
class Unit:
    """A training small enough to be repeated with several seeds.

    Args:
        steps: updates
        rows: packed rows of an update
        seq_len: tokens of a row
        vocab_size: of the tokenizer that made the shards
        d_model: width
        n_layers: blocks
        lr: peak rate; cosine to a tenth of it after a tenth of the steps
    """

    steps: int = 120
    rows: int = 8
    seq_len: int = 256
    vocab_size: int = 4096
    d_model: int = 128
    n_layers: int = 3
    lr: float = 3e-3

    def model(self) -> ModelConfig:
        "The model's configuration."
        return ModelConfig(self.vocab_size, self.d_model, self.n_layers, 4, 2, 0, self.seq_len, init_std=0.05)


def unit_run(
    train: Shards, valid: Mapping[str, Shards], unit: Unit, seed: int, control: ControlLog = ControlLog(),
    change: Callable[[Batch, int], Batch] | None = None, watch: Callable[[Decoder, Stream, int], dict | None] | None = None,
) -> dict[str, Any]:
    """Train one model and measure it: bits per byte of each held-out set, by domain, loss and gradient norm of every step.

    seed: of the weights and of the order of samples. change(batch, step) alters a batch before the model sees it.
    watch(model, stream, step) is called after every step; a dict that it returns is appended to `watched`, and its key `control`, if any, replaces the control log from there on.
    """
    torch.manual_seed(seed)
    model, schedule = Decoder(unit.model()), ScheduleConfig(warmup_steps=max(1, unit.steps // 10))
    optimizer, stream = build_optimizer(model, OptimConfig(lr=unit.lr)), Stream(train, unit.seq_len, seed, control)
    losses, norms, watched, begin = [], [], [], time.process_time()
    for step in progress(range(1, unit.steps + 1), desc="train", unit="step"):
        batch = stream.batch((step - 1) * unit.rows, unit.rows)
        loss, n = model.loss(change(batch, step) if change else batch)
        (loss / n).backward()
        norms.append(float(global_norm([p.grad for p in model.parameters()])))
        clip_gradients(model.parameters(), norms[-1], 1.0)
        set_rate(optimizer, unit.lr * lr_ratio(step, unit.steps, schedule))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach() / n))
        if watch and (seen := watch(model, stream, step)):
            stream = stream.with_control(seen.pop("control")) if "control" in seen else stream
            watched.append({"step": step, **seen})
    seconds = time.process_time() - begin
    held_out = {name: evaluate(model, shards, unit.seq_len) for name, shards in valid.items()}
    return {
        "bits_per_byte": {name: e["bits_per_byte"] for name, e in held_out.items()},
        "by_domain": {name: e["bits_per_byte_by_domain"] for name, e in held_out.items()},
        "losses": losses, "norms": norms, "watched": watched, "cpu_seconds": seconds, "tokens": unit.steps * unit.rows * unit.seq_len,
    }


# %% [markdown]
# Two runs with one seed are one run; another seed is another. A model that reads a text of one repeated sentence must predict it better than noise.

# %%
rng = np.random.default_rng(0)
tiny = Unit(steps=12, rows=4, seq_len=32, vocab_size=64, d_model=32, n_layers=1)


def shards_of(docs: list[np.ndarray], folder: str) -> Shards:
    "Shards of token arrays, one domain."
    with ShardWriter(folder, "t", 64, 0) as w:
        for ids in docs:
            w.add(ids, len(ids), "text")
    return Shards(folder)


with tempfile.TemporaryDirectory() as folder:
    regular = shards_of([np.arange(1, 41) for _ in range(40)], f"{folder}/a")
    noise = shards_of([rng.integers(1, 64, 40) for _ in range(40)], f"{folder}/b")
    first, again, other = (unit_run(regular, {"regular": regular, "noise": noise}, tiny, seed) for seed in (0, 0, 1))
    assert first["losses"] == again["losses"] != other["losses"] and first["bits_per_byte"] == again["bits_per_byte"]
    assert first["bits_per_byte"]["regular"] < first["bits_per_byte"]["noise"]
    seen = []
    unit_run(regular, {}, tiny, 0, change=lambda batch, step: seen.append(step) or batch)
    assert seen == list(range(1, 13))

# %% [markdown]
# ## Arms and seeds
# Every result is written as soon as it exists, so that an evening's grid survives a closed lid: what stands in the file is not run again.

# %%
#| export
def run_grid(arms: Mapping[str, Callable[[int], dict]], seeds: Sequence[int], log: str | Path, report: Callable[[str], None] = lambda text: None) -> dict[str, dict[int, dict]]:
    """Results by arm and seed: `arms[name](seed)` is called for each pair that `log` (JSON lines) does not hold yet.

    Seeds are the outer loop, so that a grid that is stopped has whole comparisons.
    """
    results: dict[str, dict[int, dict]] = {name: {} for name in arms}
    for row in read_jsonl(log):
        if row.get("arm") in results:
            results[row["arm"]][int(row["seed"])] = row["result"]
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    with JsonlWriter(log) as writer:
        for seed in seeds:
            for name, arm in arms.items():
                if seed not in results[name]:
                    report(f"{Path(log).stem}: {name}, seed {seed}")
                    results[name][seed] = arm(seed)
                    writer.write({"arm": name, "seed": seed, "result": results[name][seed]})
    return results


# %%
calls = []
arms = {name: (lambda seed, name=name: calls.append((name, seed)) or {"loss": seed + (name == "b")}) for name in "ab"}
with tempfile.TemporaryDirectory() as folder:
    run_grid(arms, [0], Path(folder) / "g.jsonl")
    got = run_grid(arms, [0, 1], Path(folder) / "g.jsonl")
assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1)] and got["b"][1] == {"loss": 2}

# %% [markdown]
# ## A difference and its interval
# With the same seed two arms share their weights at the start and most of their luck, so the difference is taken within the seed. Three differences give a mean and a t interval with two degrees of
# freedom, which is wide (4.3 standard errors): honest, and a reason for four seeds. The *smallest effect* is the half-width of that interval: anything below it could not have been told from nothing.

# %%
#| export
_T975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086]


@dataclass(frozen=True)
class Difference:
    "Mean of paired differences, its 95% interval, and the number of pairs; `smallest` is the least effect that would have been told from zero."

    mean: float
    low: float
    high: float
    n: int

    @property
    def smallest(self) -> float:
        "Half-width of the interval."
        return (self.high - self.low) / 2

    @property
    def sign(self) -> int:
        "+1 or -1 when the interval leaves out zero, else 0."
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}], {self.n} seeds"


def paired(base: Mapping[int, float], arm: Mapping[int, float]) -> Difference:
    """arm - base over the seeds that both have, with a t interval (95%).

    Raises ValueError for fewer than two common seeds.
    """
    seeds = sorted(set(base) & set(arm))
    if len(seeds) < 2:
        raise ValueError(f"{len(seeds)} common seeds; a difference needs at least 2")
    d = np.array([arm[s] - base[s] for s in seeds], float)
    half = _T975[min(len(d) - 2, len(_T975) - 1)] * d.std(ddof=1) / math.sqrt(len(d))
    return Difference(float(d.mean()), float(d.mean() - half), float(d.mean() + half), len(d))


def pick(results: Mapping[int, Mapping], *keys: str) -> dict[int, float]:
    "One number of each seed's result: `pick(results['raw'], 'bits_per_byte', 'clean')`."
    out = {}
    for seed, value in results.items():
        for key in keys:
            value = value[key]
        out[seed] = float(value)
    return out


# %%
rng = np.random.default_rng(1)
luck = rng.normal(0, 1, 4000)
covered = told = 0
for k in range(0, 3000, 3):  # seeds share their luck; the arm is 0.3 worse with a noise of 0.1 of its own
    base = dict(enumerate(luck[k : k + 3]))
    d = paired(base, {s: v + 0.3 + rng.normal(0, 0.1) for s, v in base.items()})
    covered += d.low <= 0.3 <= d.high
    told += d.sign > 0
print(f"95% intervals that hold the truth: {covered / 10:.1f}% of 1,000; a difference of three standard deviations is seen with 3 seeds in {told / 10:.0f}%")
assert 93 < covered / 10 < 97
assert paired({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.5, 7: 9.0}) == Difference(-0.5, -0.5, -0.5, 2)

# %%
style()
fig, ax = plt.subplots(figsize=(5.6, 2.2))
n = np.arange(2, 13)
ax.plot(n, [_T975[k - 2] / math.sqrt(k) for k in n], "o-", color=COLORS[0])
ax.set(xlabel="seeds", ylabel="smallest effect,\nin standard deviations", yscale="log")
plt.show()

# %% [markdown]
# What to see: two seeds show nothing that is below nine standard deviations, three show 2.5, five 1.2. From there on a seed costs more than it gives.
#
# ## Verdicts
# A verdict is a file, so that the tables of the book are made from it and nobody retypes a figure.

# %%
#| export
VERDICTS = ("holds", "holds in part", "does not hold", "open", "not testable here")


@dataclass
class Verdict:
    """What an experiment says about a claim.

    Args:
        id: of the claim in the ledger
        claim: the claim, in our words
        verdict: one of VERDICTS
        because: one sentence: what was seen, and what is right instead
        scale: size of the experiment: parameters, tokens, texts
        seeds: how many
        estimate: measured figures by name
        interval: 95% intervals by the same names
        smallest_effect: what so many seeds or texts could have shown
        command: reruns it
        commit: of the code that ran
    """

    id: str
    claim: str
    verdict: str
    because: str
    scale: str
    seeds: int
    estimate: dict[str, Any]
    interval: dict[str, Any] = field(default_factory=dict)
    smallest_effect: Any = ""
    command: str = ""
    commit: str = ""

    def __post_init__(self):
        if self.verdict not in VERDICTS:
            raise ValueError(f"{self.id}: verdict {self.verdict!r} is not one of {', '.join(VERDICTS)}")


def current_commit() -> str:
    "Short hash of the checked-out commit; empty outside of a repository."
    try:
        return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def save_verdict(folder: str | Path, verdict: Verdict) -> Path:
    "Write `folder/ID.json`; figures are rounded to four digits after the point."
    def rounded(value):
        if isinstance(value, dict):
            return {k: rounded(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [rounded(v) for v in value]
        return round(value, 4) if isinstance(value, float) else value

    content = asdict(verdict) | {"commit": verdict.commit or current_commit()}
    path = Path(folder) / f"{verdict.id}.json"
    atomic_write(path, json.dumps(encode_numbers(rounded(content)), ensure_ascii=False, indent=1) + "\n")
    return path


def load_verdicts(root: str | Path) -> list[dict]:
    "The verdict files below `root` (nbs/ of a checkout), by id; UsageError if there are none."
    found = []
    for path in sorted(Path(root).rglob("results/*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(row, dict) and {"id", "verdict", "command"} <= set(row):
            found.append(row | {"file": path.relative_to(root).as_posix()})
    if not found:
        raise UsageError(f"{root}: no verdict files (results/*.json) below it; give the nbs folder of a checkout")
    return sorted(found, key=lambda row: row["id"])


# %%
#| export
def verdict_table(verdicts: Sequence[dict]) -> str:
    "Verdicts as rows of a Markdown table: claim, verdict, what was measured, at which scale."
    def plain(text: str) -> str:
        return str(text).replace("|", "/").replace("\n", " ")

    rows = [f"| {v['id']}: {plain(v.get('claim', ''))} | {v['verdict']} | {plain(v.get('because', ''))} ({plain(v['scale'])}; {v['seeds']} seeds) |" for v in verdicts]
    return "\n".join(["| claim | verdict | measured |", "|---|---|---|", *rows])


def forest(verdicts: Sequence[dict], unit: str):
    "A matplotlib figure with every interval of the verdicts, one line each; intervals that leave out zero are filled."
    import matplotlib.pyplot as plt

    from scalelab.core.plotting import COLORS

    lines = [(f"{v['id']}: {name}", low, high) for v in verdicts for name, (low, high) in v.get("interval", {}).items()]
    fig, ax = plt.subplots(figsize=(6.4, 0.6 + 0.2 * len(lines)))
    for y, (_, low, high) in enumerate(reversed(lines)):
        sure = low > 0 or high < 0
        ax.plot([low, high], [y, y], color=COLORS[0], lw=1.5)
        ax.plot([(low + high) / 2], [y], "o", ms=5, color=COLORS[0], mfc=COLORS[0] if sure else "white")
    ax.axvline(0, color="0.4", lw=0.8)
    ax.set_yticks(range(len(lines)), [name for name, *_ in reversed(lines)], fontsize=7)
    ax.set(xlabel=unit)
    return fig


# %%
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "results").mkdir()
    save_verdict(f"{folder}/results", Verdict("B-x", "x helps", "open", "not run", "1 M parameters", 3, {"bpb": 1.23456789}, {"bpb": (1.0, float("inf"))}, commit="abc"))
    (row,) = load_verdicts(folder)
    assert row["estimate"] == {"bpb": 1.2346} and row["interval"] == {"bpb": [1.0, "Infinity"]} and row["file"] == "results/B-x.json"
    assert verdict_table([row]).splitlines()[2] == "| B-x: x helps | open | not run (1 M parameters; 3 seeds) |"
    try:
        Verdict("B-x", "", "maybe", "", "", 0, {})
        raise AssertionError("an unknown verdict passed")
    except ValueError as error:
        print(error)

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | three seeds are enough to compare two trainings (house rule) | holds in part | for effects above 2.5 standard deviations of the paired difference; below, the file says what could not have been seen |
