# %% [markdown]
# # What a diagnosis is made of
#
# > Findings with evidence, and the logs of a run laid out for those who look for them.
#
# Diagnosis reads three small files, `metrics.jsonl`, `events.jsonl` and `environment.json`, and never loads the trainer, the model or the data: a run that died
# on another machine can be diagnosed from a copy of its logs. This notebook defines what goes in (a `RunLog`) and what comes out (a `Finding`). The next ones
# look for faults in the shape of curves and in the books that a run keeps, and put both together.

# %%
#| default_exp diagnostics.findings

# %%
#| export
from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from scalelab.core.config import UsageError
from scalelab.core.runs import Run, encode_numbers

# %%
#| hide
import tempfile

# %% [markdown]
# ## What a finding is
# An alarm at three in the morning is worth what it lets you do next. So a finding has a `kind` from a fixed list, the step where it began, a confidence, the
# numbers that support it, and one sentence of advice that names a command.
#
# **Confidence** has one formula throughout. A detector measures a strength $s$ (a robust z-score, a share, a ratio) and has a threshold $t$ at which it speaks;
# the confidence is $s / (s + t)$: one half at the threshold, 0.75 at three times the threshold, and 1 only for facts that need no statistics, like a NaN or two
# ranks whose parameters differ. Independent pieces of evidence combine as $1 - (1-c_1)(1-c_2)$. It orders findings; it is not a calibrated probability.


# %%
#| export
@dataclass
class Finding:
    """One fault that the logs of a run give away.

    kind: name of the fault, a key of `DETECTORS` or one of the kinds its detector may give; step: global step where it begins (None: the whole run);
    confidence: 0.5 at the detector's threshold, towards 1 far above it, 1 for facts; evidence: numbers, small enough to print; advice: what to do next.
    """

    kind: str
    step: int | None
    confidence: float
    evidence: dict = field(default_factory=dict)
    advice: str = ""

    def to_dict(self) -> dict:
        "A JSON-ready dict: floats rounded to 6 digits, non-finite ones as strings, numpy scalars as plain numbers."
        return _rounded(encode_numbers(asdict(self)))


def _rounded(value):
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def confidence(strength: float, threshold: float) -> float:
    "strength / (strength + threshold), 0.5 where the detector begins to speak; an infinite strength is certain."
    return 1.0 if math.isinf(strength) else strength / (strength + threshold)


# %%
assert confidence(12, 12) == 0.5 and confidence(36, 12) == 0.75 and confidence(math.inf, 12) == 1.0
f = Finding("non_finite", 7, 1.0, {"loss": float("nan"), "z": np.float64(1 / 3), "ok": np.bool_(True)})
assert f.to_dict()["evidence"] == {"loss": "NaN", "z": 0.333333, "ok": True}
json.dumps(f.to_dict(), allow_nan=False)  # strict JSON

# %% [markdown]
# ## The log, laid out
# After a resume the same step may stand in the log twice, once from each attempt. The last attempt is what the run *is*; the earlier one is a witness, because
# the two should agree. `RunLog` keeps both, and offers every quantity as an array with NaN where a line lacks it.


# %%
#| export
@dataclass
class RunLog:
    """Everything the detectors may look at, in order of global step.

    steps: step lines, the last attempt of each step only; attempts: step lines of all attempts, as written; evals, ranks: eval and rank lines;
    events: what the run did to itself; environment: versions and hashes; name: what advice calls the run.
    """

    steps: list[dict]
    evals: list[dict] = field(default_factory=list)
    ranks: list[dict] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)
    environment: dict = field(default_factory=dict)
    attempts: list[dict] = field(default_factory=list)
    name: str = "RUN"

    def array(self, key: str) -> np.ndarray:
        "The values of `key` over `steps` [steps], float64; NaN where absent."
        return np.array([number(line.get(key)) for line in self.steps], dtype=np.float64)

    @property
    def global_step(self) -> np.ndarray:
        "Step numbers [steps], int64."
        return np.array([line["global_step"] for line in self.steps], dtype=np.int64)


def number(value) -> float:
    "The value as a float, NaN if it is no number."
    return float(value) if isinstance(value, (int, float)) else math.nan


# %%
#| export
def read_log(run: Run | str | Path) -> RunLog:
    "The log of a run directory. Raises UsageError when there is no `metrics.jsonl` with a step line in it."
    run = run if isinstance(run, Run) else Run(run)
    log = RunLog(
        *(run.metrics(kind) for kind in ("step", "eval", "rank")),
        run.events(),
        run.environment,
        name=run.path.name,
    )
    log.attempts = [
        line for line in run.rows() if line.get("kind") == "step" and isinstance(line.get("global_step"), int)
    ]
    if not log.steps:
        raise UsageError(
            f"{run.path / 'metrics.jsonl'}: no step line in it; the run ended before its first step, see events.jsonl"
        )
    return log


# %% [markdown]
# For tests we need runs whose truth we know. `synthetic_steps` draws one: it starts at $\ln V$, falls steeply and then slowly, has a few per cent of noise that is
# *not* Gaussian (real batches have a heavy upper tail), and a gradient norm that shrinks on the way while the learning rate warms up. Everything a step line
# carries is there.


# %%
#| export
def synthetic_steps(
    n: int = 200, seed: int = 0, noise: float = 0.02, batch: int = 16, attempt: int = 0, vocab: int = 4096
) -> list[dict]:
    """Step lines of an invented run in which nothing went wrong, for tests and examples [n dicts].

    The loss starts at ln(vocab) nats and falls to about 2.2, with Student-t noise (a share `noise` of the loss); the rate warms up for 10 steps, then a cosine.
    """
    rng = np.random.default_rng(seed)
    step = np.arange(1, n + 1)
    truth = 2.2 + (math.log(vocab) - 2.2) * (0.7 * np.exp(-step / 12) + 0.3 * np.exp(-step / 150))
    loss = truth * (1 + noise * rng.standard_t(6, n))
    grad = (0.6 + 4 * np.exp(-step / 8)) * np.exp(0.12 * rng.standard_normal(n))
    rate = 3e-3 * np.minimum(step / 10, 0.5 * (1 + np.cos(np.pi * step / n)))
    memory = 4e8 + 2e6 * np.cumsum(
        rng.random(n) < 0.1 * np.exp(-step / 20)
    )  # an allocator that fragments and settles
    seconds = 0.2 * rng.uniform(0.95, 1.2, n)
    columns = {
        "global_step": step,
        "loss": loss,
        "grad_norm": grad,
        "lr": rate,
        "consumed_samples": step * batch,
        "consumed_tokens": step * batch * 256,
        "longest_sequence": rng.integers(180, 257, n),
        "step_seconds": seconds,
        "data_seconds": 0.001 * rng.uniform(0.5, 2, n),
        "memory_bytes": memory.astype(int),
        "tokens_per_second": batch * 256 / seconds,
    }
    same = {"schema": 1, "kind": "step", "attempt": attempt, "valid_tokens": batch * 256, "skipped": False}
    hashes = [hashlib.md5(f"{seed}-{s}".encode()).hexdigest()[:16] for s in step]
    return [same | {k: v[i].item() for k, v in columns.items()} | {"batch_hash": hashes[i]} for i in range(n)]


def write_run(
    folder: str | Path, lines: list[dict], events: list[dict] = (), environment: dict | None = None
) -> Path:
    "A run directory with these metrics and events, as a trainer leaves it; returns its path."
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("metrics.jsonl", lines), ("events.jsonl", events)):
        (folder / name).write_text(
            "".join(json.dumps(encode_numbers(row), ensure_ascii=False) + "\n" for row in rows),
            encoding="utf-8",
        )
    (folder / "environment.json").write_text(json.dumps(environment or {}), encoding="utf-8")
    return folder


def log_of(lines: list[dict], **more) -> RunLog:
    "A `RunLog` of step lines that were never on disk; further keywords are its other fields."
    return RunLog(steps=lines, attempts=more.pop("attempts", lines), **more)


# %%
lines = synthetic_steps(100)
assert abs(lines[0]["loss"] / np.log(4096) - 1) < 0.15 and lines[-1]["loss"] < 4
assert lines == synthetic_steps(100) and len({line["batch_hash"] for line in lines}) == 100
assert synthetic_steps(60)[:20] != synthetic_steps(60, seed=1)[:20]

# %%
tmp = tempfile.TemporaryDirectory()
first, second = synthetic_steps(60), synthetic_steps(80, attempt=1)[40:]
log = read_log(
    write_run(f"{tmp.name}/resumed", first + second, [{"event": "resume", "global_step": 40, "attempt": 1}])
)
assert len(log.steps) == 80 and len(log.attempts) == 100
assert [line["attempt"] for line in log.steps] == [0] * 40 + [1] * 40  # the last attempt of a step counts
assert np.isnan(log.array("no_such_key")).all() and log.array("loss").shape == (80,)

# %%
for bad in ("nowhere", "empty"):
    if bad == "empty":
        write_run(f"{tmp.name}/empty", [])
    try:
        read_log(f"{tmp.name}/{bad}")
    except UsageError as e:
        assert "no such run directory" in str(e) or "no step line" in str(e)
    else:
        raise AssertionError("a directory without steps was accepted")

# %% [markdown]
# A bad batch is worth finding only if its documents can be found, so the finding carries the batch hash and the range of samples. With the seed and the control
# log, the order of samples is a pure function of that range.


# %%
#| export
def sample_range(log: RunLog, index: int) -> list[int] | None:
    """[first, last + 1) of the samples that step line `index` consumed, or None when the log can't tell.

    `consumed_samples` counts the samples taken up to and including its step, unless the run's first line says 0: then it counts those before it.
    """
    consumed = log.array("consumed_samples")
    before_it = log.steps[0].get("consumed_samples") == 0
    low, high = (index, index + 1) if before_it else (index - 1, index)
    if 0 <= low and high < len(consumed) and np.isfinite(consumed[[low, high]]).all():
        return [int(consumed[low]), int(consumed[high])]
    return None


def batch_of(log: RunLog, index: int) -> dict:
    "How to find the batch of step line `index` again."
    line = log.steps[index]
    found = {
        "batch_hash": line.get("batch_hash"),
        "samples": sample_range(log, index),
        "longest_sequence": line.get("longest_sequence"),
    }
    domains = line.get("loss_by_domain")
    if domains:
        found["worst_domain"] = max(
            domains, key=lambda d: number(domains[d]) if math.isfinite(number(domains[d])) else math.inf
        )
    return {k: v for k, v in found.items() if v is not None}


# %%
log = log_of(synthetic_steps(20))
assert sample_range(log, 5) == [80, 96] and sample_range(log, 0) is None
for line in log.steps:
    line["consumed_samples"] -= 16  # the other convention
assert sample_range(log, 5) == [80, 96] and sample_range(log, 19) is None

# %% [markdown]
# ## What this does not cover
# The words of the advice are the detectors'. Whether a finding is *true* can only be judged against runs whose faults are known; that is tried in the notebook on fingerprints.
#
# | claim | verdict | measured |
# |---|---|---|
# | a diagnosis needs the logs alone | taken as a rule | `scalelab.diagnostics` imports `scalelab.core` and numpy, nothing else of the house |

# %%
#| hide
tmp.cleanup()
