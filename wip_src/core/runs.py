# %% [markdown]
# # The run directory
#
# > What a run leaves behind: two logs that survive a kill, read back by tools that never import the trainer.
#
# When a run misbehaves at three in the morning, all that is left of it is a folder. This chapter fixes what stands in that folder and how it is read, so that diagnosis, plots and
# exporters need nothing else. The first article asks for logs that let you find a failure in eight minutes instead of six hours; the two properties that matter are that no line is lost
# with the process, and that no torn line stops a reader.

# %%
#| default_exp core.runs

# %%
#| export
from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scalelab.core.config import UsageError, load_yaml

# %%
#| hide
import signal
import subprocess
import sys
import tempfile
import matplotlib.pyplot as plt
from scalelab.core.plotting import COLORS, style

# %% [markdown]
# ## Numbers that JSON has not
# A diverging run is just when the log matters, and just then its numbers are NaN and infinity, for which JSON has no word. Python writes a bare `NaN`, which breaks every strict reader
# (JavaScript, `jq`, most databases). Here they are the strings `"NaN"`, `"Infinity"`, `"-Infinity"`, and come back as floats.

# %%
#| export
SCHEMA = 1
_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_numbers(value):
    "`value` with every non-finite float replaced by its name, through dicts and lists; numpy and torch scalars become Python numbers."
    if isinstance(value, dict):
        return {str(k): encode_numbers(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_numbers(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def decode_numbers(value):
    "The inverse of `encode_numbers`."
    if isinstance(value, dict):
        return {k: decode_numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [decode_numbers(v) for v in value]
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 1000:  # beyond any float: damage, not a count
        return math.inf if value > 0 else -math.inf
    return _SPELLED.get(value, value) if isinstance(value, str) else value


# %%
row = {"loss": math.nan, "norms": [1.0, math.inf, -math.inf], "note": "fine", "n": 3}
text = json.dumps(encode_numbers(row), allow_nan=False)
print(text)
back = decode_numbers(json.loads(text))
assert decode_numbers(json.loads("1" + "0" * 400)) == math.inf
assert back["loss"] != back["loss"] and back["norms"] == [1.0, math.inf, -math.inf] and back["note"] == "fine"

# %% [markdown]
# ## A log that survives the kill
# The page cache belongs to the kernel: once `write` has returned, a SIGKILL of the process loses nothing; only a power cut does. A kill *inside* `write` may leave part of a line. So each line goes out in one `write` of its own, without a
# buffer in the process, and an `fsync` every few seconds bounds what a power cut may take. Opening an old log whose last line is torn starts a new line first.

# %%
#| export
class JsonlWriter:
    """Appends JSON lines to a file, one `write` call a line, so that a killed process loses no finished line.

    path: created if missing. sync_seconds: how old the newest unsynced line may get, the most that a power cut can take.
    Raises OSError (disk full); a partly written line is cut away again, so that the file stays readable.
    """

    def __init__(self, path: str | Path, sync_seconds: float = 5.0):
        self.path, self.sync_seconds, self._synced = Path(path), sync_seconds, time.monotonic()
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":  # an earlier process died in the middle of a line
            os.write(self._fd, b"\n")

    def write(self, row: dict) -> None:
        "Append one line."
        data = (json.dumps(encode_numbers(row), ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")
        start = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(28, f"only {written} of {len(data)} bytes fitted", str(self.path))
        except OSError:
            os.ftruncate(self._fd, start)
            raise
        now = time.monotonic()
        if now - self._synced > self.sync_seconds:
            os.fsync(self._fd)
            self._synced = now

    def close(self) -> None:
        "Sync and close; safe to call twice."
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


# %%
#| export
def read_jsonl(path: str | Path, bad: list[int] | None = None) -> Iterator[dict]:
    """The rows of a JSON-lines log, oldest first; a missing file has none.

    A line that does not parse (torn by a kill, damaged on disk) is passed over and its number, from 1, is put into `bad`.
    """
    path = Path(path)
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except (ValueError, UnicodeDecodeError):
                row = None
            if isinstance(row, dict):
                yield decode_numbers(row)
            elif bad is not None and line.strip():
                bad.append(number)


# %% [markdown]
# A writer is killed in full flight, four times over. Every line that each process had announced must be there, and the reader must get through.

# %%
code = """
import sys
from scalelab.core.runs import JsonlWriter
log = JsonlWriter(sys.argv[1])
for k in range(10**9):
    log.write({"kill": int(sys.argv[2]), "k": k, "pad": "x" * 300})
    print(k, flush=True)
"""
with tempfile.TemporaryDirectory() as folder:
    log, lost, total = Path(folder) / "metrics.jsonl", 0, 0
    for kill in range(4):
        child = subprocess.Popen([sys.executable, "-c", code, str(log), str(kill)], stdout=subprocess.PIPE, text=True)
        for _ in range(20 + 7 * kill):
            announced = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        child.wait()
        lost += len(set(range(announced + 1)) - {r["k"] for r in read_jsonl(log) if r["kill"] == kill})
        total = sum(1 for _ in read_jsonl(log))
    assert lost == 0 and total > 100
    JsonlWriter(log).close()  # a kill inside `write` leaves part of a line; the next writer ends it
    torn: list[int] = []
    assert sum(1 for _ in read_jsonl(log, torn)) == total and len(torn) <= 4
    with open(log, "ab") as file:
        file.write(b'{"torn": 1, "te')
    bad: list[int] = []
    assert sum(1 for _ in read_jsonl(log, bad)) == total and len(bad) == len(torn) + 1
    with JsonlWriter(log) as writer:
        writer.write({"k": -1})
    assert list(read_jsonl(log))[-1] == {"k": -1}
print("announced lines lost in 4 kills:", lost)

# %% [markdown]
# ## A step that happened twice
# A run that is killed at step 47 and resumes from the checkpoint of step 40 logs steps 41 to 47 twice. Both are true; the later one is the one that led to the model. Every line therefore
# carries an `attempt`, and a reader takes, for each step, the line of the last attempt; a step of an earlier attempt that the later one never reached again is dropped too, because
# the model that saw it is gone.

# %%
#| export
def last_attempts(rows: list[dict]) -> list[dict]:
    """Rows by step, with what a resume or a rollback undid taken out.

    When attempt `a` begins at step `s`, every row of earlier attempts with `global_step >= s` is dropped.
    Rows come in the order they were written; the result is ordered by step.
    """
    kept: list[dict] = []
    for row in rows:
        newer = kept and row.get("attempt", 0) > kept[-1].get("attempt", 0)
        if newer:
            kept = [r for r in kept if r["global_step"] < row["global_step"]]
        kept.append(row)
    return sorted(kept, key=lambda r: r["global_step"])


# %%
written = [{"attempt": 0, "global_step": s, "loss": 4.0 - 0.01 * s} for s in range(1, 48)]
written += [{"attempt": 1, "global_step": s, "loss": 4.0 - 0.01 * s} for s in range(41, 61)]
clean = last_attempts(written)
assert [r["global_step"] for r in clean] == list(range(1, 61))
assert [r["attempt"] for r in clean] == [0] * 40 + [1] * 20
assert last_attempts([]) == [] and last_attempts(written[:3]) == written[:3]

# %%
style()
fig, ax = plt.subplots(figsize=(6.4, 2.0))
for attempt in (0, 1):
    rows = [r for r in written if r["attempt"] == attempt]
    ax.plot([r["global_step"] for r in rows], [attempt] * len(rows), ".", color=COLORS[attempt], label=f"attempt {attempt}")
ax.plot([r["global_step"] for r in clean], [-1] * len(clean), ".", color=COLORS[2], label="what a reader sees")
ax.set(xlabel="global step", yticks=[], ylim=(-1.8, 2.8))
ax.legend(ncols=3, loc="upper center")
plt.show()

# %% [markdown]
# What to see: seven blue steps have no green below them that came from their own attempt; the orange ones took their place.
#
# ## The directory, read
# `Run` is the only door. It opens what is there, says clearly what is not, and imports neither torch nor the trainer.

# %%
#| export
class Run:
    """A run directory, for reading.

    path: holds `config.yaml`, `environment.json`, `metrics.jsonl`, `events.jsonl`, `checkpoints/`; a directory whose run is in its
    `train/` subfolder (the closed loop's) works too. Raises UsageError if there is no such directory or it holds no run.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise UsageError(f"{path}: no such run directory")
        if not (self.path / "metrics.jsonl").exists() and (self.path / "train" / "metrics.jsonl").exists():
            self.path = self.path / "train"
        if not (self.path / "metrics.jsonl").exists():
            raise UsageError(f"{path}: not a run directory (no metrics.jsonl in it); expected what `scalelab train --run DIR` writes")
        self.bad_lines: dict[str, list[int]] = {}

    def rows(self, name: str = "metrics.jsonl") -> list[dict]:
        "All lines of a log as written; numbers of unreadable lines go to `bad_lines[name]`."
        self.bad_lines[name] = []
        return list(read_jsonl(self.path / name, self.bad_lines[name]))

    def metrics(self, kind: str = "step") -> list[dict]:
        "Lines of one kind (step, eval, layer, rank) by step, the last attempt of each step counting."
        return last_attempts([r for r in self.rows() if r.get("kind") == kind and isinstance(r.get("global_step"), int)])

    def events(self) -> list[dict]:
        "What the run did to itself and why, in order."
        return self.rows("events.jsonl")

    @property
    def config(self) -> dict:
        "The resolved configuration."
        return load_yaml(self.path / "config.yaml") if (self.path / "config.yaml").exists() else {}

    @property
    def environment(self) -> dict:
        "Versions, hardware, commit; an empty dict if it was not recorded."
        file = self.path / "environment.json"
        try:
            return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        except ValueError as error:
            raise UsageError(f"{file}: not valid JSON ({error})") from None

    def checkpoints(self) -> list[Path]:
        "Complete-looking checkpoint folders, oldest step first (their checksums are the trainer's business)."
        folder = self.path / "checkpoints"
        return sorted(p for p in folder.glob("step-*") if (p / "manifest.json").exists()) if folder.is_dir() else []


# %%
with tempfile.TemporaryDirectory() as folder:
    run = Path(folder) / "r"
    for place, want in ((run, "no such run directory"), (Path(folder), "no metrics.jsonl")):
        try:
            Run(place)
        except UsageError as error:
            assert want in str(error)
        else:
            raise AssertionError("opened what is not there")
    run.mkdir()
    with JsonlWriter(run / "metrics.jsonl") as log:
        for r in written:
            log.write({"schema": SCHEMA, "kind": "step", **r})
        log.write({"schema": SCHEMA, "kind": "eval", "attempt": 1, "global_step": 60, "bits_per_byte": math.nan})
    opened = Run(run)
    assert len(opened.metrics()) == 60 and opened.metrics("eval")[0]["bits_per_byte"] != 0
    assert opened.events() == [] and opened.config == {} and opened.environment == {} and opened.checkpoints() == []

# %% [markdown]
# What does a kill cost in this scheme? Nothing of the log, and of the model what lies between the last checkpoint and the kill. With a checkpoint every $k$ steps and a kill at a random
# moment that is $(k-1)/2$ steps on average, and the log says which.

# %%
lost_steps = {k: sum(s % k for s in range(1, 10 * k + 1)) / (10 * k) for k in (10, 20, 50, 100)}
assert all(abs(v - (k - 1) / 2) < 1e-9 for k, v in lost_steps.items())
fig, ax = plt.subplots(figsize=(5, 2.2))
ax.plot(list(lost_steps), list(lost_steps.values()), "o-")
ax.set(xlabel="steps between checkpoints", ylabel="steps lost by a kill, mean")
plt.show()

# %% [markdown]
# What to see: a straight line. The interval is a choice between lost steps and time spent on writing, and the trainer's chapter measures the second.
#
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | structured logs make a failure locatable (first article, 2.3) | holds for what is tested here: no finished line is lost to SIGKILL | 0 announced lines lost in 4 kills |
#
# Not covered: a power cut may take up to five seconds of lines, by choice.
