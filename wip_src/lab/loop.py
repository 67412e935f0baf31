# %% [markdown]
# # The closed loop
#
# > Raw text to a trained, diagnosed, compressed, exported model in one command, with a table of what held and a page to look at.
#
# This is the command behind `make demo`. It walks the eleven stages of the chapter before, in order, on one folder; a stage that fails is reported and what depends on it is left out; a second call goes on where the
# first one stopped. Source A's claim (A-loop) is that such a walk, five minutes long, stops most structural faults before a cluster is booked.

# %%
#| default_exp lab.loop

# %%
#| export
from __future__ import annotations

import json
import resource
import shutil
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from scalelab.core.config import CheckFailed, UsageError, atomic_write
from scalelab.lab.stages import STAGES, Loop, Skipped

# %%
#| hide
import tempfile
import matplotlib.pyplot as plt
import pandas as pd
from scalelab.core.plotting import COLORS, style

# %% [markdown]
# ## One folder, one job
# A folder that was made by another job (other data, another recipe) must not be mixed with this one. The settings that decide the products are written first; the same settings go on, others start anew, and a folder
# that the loop did not make is not touched.

# %%
#| export
MARK = "loop.json"
PRODUCTS = ("data", "train", "train-2ranks", "train-fp64", "train-fp64-2ranks", "train-killed", "train-fault", "compressed", "export")


def _job(loop: Loop) -> dict:
    from scalelab.data.documents import find_files
    from scalelab.lab.stages import loop_inputs

    files = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in find_files(loop_inputs(loop)[0])] if loop.data else "samples and standard library"
    return {"data": json.loads(json.dumps(files)), "limit_mb": loop.limit_mb, "vocab_size": loop.vocab_size, "steps": loop.steps, "recipe": loop.recipe}


def open_folder(loop: Loop) -> str:
    "Make or take over the loop's folder; `new`, `again` (same job) or `changed` (old products removed). UsageError if it holds something else."
    mark, job = loop.run / MARK, _job(loop)
    if loop.run.exists() and not loop.run.is_dir():
        raise UsageError(f"--run {loop.run}: is a file; give a folder")
    if loop.run.exists() and any(loop.run.iterdir()) and not mark.exists():
        raise UsageError(f"--run {loop.run}: holds files that the loop did not make; give an empty or a new folder")
    try:
        old = json.loads(mark.read_text(encoding="utf-8")) if mark.exists() else None
    except ValueError:
        old = {}
    if old is not None and old != job:
        for name in PRODUCTS:
            shutil.rmtree(loop.run / name, ignore_errors=True)
    loop.run.mkdir(parents=True, exist_ok=True)
    atomic_write(mark, json.dumps(job, indent=1))
    return "new" if old is None else "again" if old == job else "changed"


# %%
with tempfile.TemporaryDirectory() as folder:
    run = Path(folder) / "r"
    assert open_folder(Loop(run)) == "new" and open_folder(Loop(run)) == "again"
    (run / "train").mkdir()
    assert open_folder(Loop(run, steps=50)) == "changed" and not (run / "train").exists()
    other = Path(folder) / "mine"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    try:
        open_folder(Loop(other))
    except UsageError as error:
        print(str(error).replace(folder, "…"))
    else:
        raise AssertionError("took over somebody's folder")
    assert (other / "thesis.tex").exists()

# %% [markdown]
# ## Running the stages
# A stage that raises `CheckFailed` or `UsageError` has failed with a reason. Any other exception is a defect, of ours or of a library, and fails the stage with its last line; the traceback goes to a file. What
# depends on a failed stage is not run: a report full of follow-up errors hides the first one.

# %%
#| export
NEEDS = {
    "clean": ("read",), "tokenize": ("clean",), "split, shard, stream": ("tokenize",), "train": ("split, shard, stream",), "evaluate": ("train",), "kill and resume": ("train",),
    "diagnose": ("train",), "compress": ("train",), "export": ("train",), "generate": ("train",),
}


def run_stages(loop: Loop, stages=STAGES, say=lambda text: None) -> list[dict]:
    "Run the stages in order; rows of name, ok (None: not run), seconds, summary, detail. Only KeyboardInterrupt comes through."
    rows: list[dict] = []
    state: dict[str, bool | None] = {}
    for name, stage in stages:
        begin, detail = time.perf_counter(), None
        blocked = [n for n in NEEDS.get(name, ()) if state.get(n) is not True and n in state]
        if blocked:
            ok, summary = None, f"not run: {blocked[0]} failed"
        else:
            say(f"{name} …")
            try:
                summary, detail = stage(loop)
                ok = True
            except Skipped as reason:
                ok, summary = None, str(reason)
            except (CheckFailed, UsageError) as error:
                ok, summary = False, str(error)
            except Exception as error:  # a defect in one stage must not hide what the others found
                ok, summary = False, f"{type(error).__name__}: {error}"
                (loop.run / "errors.txt").open("a").write(traceback.format_exc())
        state[name] = ok
        rows.append({"name": name, "ok": ok, "seconds": time.perf_counter() - begin, "summary": summary, "detail": detail})
        say(f"{name}: {'ok' if ok else 'FAILED' if ok is False else 'not run'} in {rows[-1]['seconds']:.1f} s: {summary}")
    return rows


# %%
def good(loop):
    "A stage that holds."
    return "fine", {"n": 1}

def bad(loop):
    "A stage that does not."
    raise CheckFailed("the two curves differ")

def broken(loop):
    "A stage with a defect."
    return 1 / 0

with tempfile.TemporaryDirectory() as folder:
    toy = Loop(Path(folder))
    rows = run_stages(toy, [("read", good), ("clean", bad), ("tokenize", good), ("train", broken)])
    assert [r["ok"] for r in rows] == [True, False, None, False] and "clean failed" in rows[2]["summary"]
    assert "ZeroDivisionError" in rows[3]["summary"] and "ZeroDivisionError" in (toy.run / "errors.txt").read_text()

# %% [markdown]
# ## The table and the page
# At the end stand a table for the eye, `stages.json` for programs, and `report.html`.

# %%
#| export
def stage_table(rows: list[dict]):
    "The stage table, for rich's console."
    from rich.table import Table

    table = Table(title="closed loop", title_justify="left")
    for column, options in (("stage", {}), ("", {}), ("seconds", {"justify": "right"}), ("what it showed", {"overflow": "fold"})):
        table.add_column(column, **options)
    for r in rows:
        mark = "[green]pass[/]" if r["ok"] else "[red]FAIL[/]" if r["ok"] is False else "[yellow]skip[/]"
        table.add_row(r["name"], mark, f"{r['seconds']:.1f}", r["summary"].replace("[", r"\["))
    return table


def peak_memory() -> int:
    "Largest resident memory of this process and of any process it has waited for, in bytes."
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * max(resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def run_loop(loop: Loop, say=lambda text: None) -> dict:
    """The closed loop: all stages, `stages.json`, `report.html`. Returns {"ok", "stages", "seconds", "peak_bytes", "report"}.

    Raises UsageError if the folder can't be used. `ok` is False if any stage failed.
    """
    from scalelab.diagnostics.report import write_report

    begin, how = time.perf_counter(), open_folder(loop)
    if how != "new":
        say(f"{loop.run}: {'going on' if how == 'again' else 'other settings than last time, starting anew'}")
    rows = run_stages(loop, STAGES, say)
    loop.write("stages.json", rows)
    result = {"ok": all(r["ok"] is not False for r in rows), "seconds": time.perf_counter() - begin, "peak_bytes": peak_memory()}
    atomic_write(loop.run / "result.json", json.dumps(result))
    return result | {"stages": rows, "report": str(write_report(loop.run)), "settings": {k: v for k, v in asdict(loop).items() if k in ("steps", "recipe", "limit_mb", "vocab_size")}}


# %%
import io
from rich.console import Console
console = Console(file=io.StringIO(), width=100, force_jupyter=False)
console.print(stage_table([{"name": "train", "ok": True, "seconds": 31.0, "summary": "loss 8.3 -> 5.4"}, {"name": "export", "ok": None, "seconds": 0.0, "summary": "skipped: install scalelab[deploy]"}]))
text = console.file.getvalue()
print(text)
assert "scalelab[deploy]" in text and "pass" in text and "skip" in text

# %% [markdown]
# ## A run of it
# The whole loop takes minutes, so it is not run in this notebook. `make demo` was run in an empty clone on a machine with two cores, its `runs/loop/stages.json` copied to `results/` beside this notebook, and here it is:

# %%
rows = json.loads(Path("results/loop_stages.json").read_text(encoding="utf-8"))
for r in rows:
    print(f"{'pass' if r['ok'] else 'skip' if r['ok'] is None else 'FAIL'}  {r['seconds']:6.1f} s  {r['name']}: {r['summary']}")

# %%
style()
fig, ax = plt.subplots(figsize=(6.4, 2.6))
start = 0.0
for k, r in enumerate(rows):
    ax.barh(len(rows) - k, r["seconds"], left=start, color=COLORS[0] if r["ok"] else COLORS[3])
    start += r["seconds"]
ax.set(yticks=range(len(rows), 0, -1), yticklabels=[r["name"] for r in rows], xlabel="seconds since the start")
plt.show()
trains = sum(r["seconds"] for r in rows if r["name"] in ("train", "kill and resume", "diagnose"))
print(f"{start:.0f} s in all, {trains / start:.0%} of them in the stages that train")

# %% [markdown]
# What to see: three stages train (one and two ranks in two precisions; a run killed and resumed; a run with a planted fault), and they are most of the time. Reading, cleaning and tokenizing are short here because the corpus is.

# %%
assert all(r["ok"] is not False for r in rows) and [r["name"] for r in rows] == [n for n, _ in STAGES]
assert rows[2]["seconds"] > 0.1  # a run from an empty folder: nothing was taken over from an earlier one

# %% [markdown]
# ## What it found, in one picture
# Bits per byte by domain from the same run. `xz -9` is a hard opponent for a model of 1.1 million parameters that trained for a minute.

# %%
found = json.loads(Path("results/loop_evaluation.json").read_text(encoding="utf-8"))
table = pd.DataFrame(found["domains"]).T[["bytes", "model", "xz", "unigram"]]
fig, ax = plt.subplots(figsize=(6.4, 2.4))
table[["model", "xz", "unigram"]].plot.bar(ax=ax, color=COLORS[:3], width=0.75)
ax.set(ylabel="bits per byte")
ax.tick_params(axis="x", rotation=20)
plt.show()
print(table.assign(bytes=table.bytes.astype(int), lead_of_xz=table.model - table.xz).round(2).to_string())

# %% [markdown]
# What to see: byte frequencies are beaten everywhere. Against `xz` it depends on how much held-out text there is: the model wins where the domain is small, since a compressor starts from nothing, and loses on code and documentation, where there is
# enough of it to repeat itself.
#
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-loop: a closed loop of 100 steps on one device, all stages, with tensors recorded, takes five minutes | holds in part: on an idle machine | 120 steps and eleven stages in the time printed above; on a machine that others use, up to six minutes were seen |
# | A-loop: it stops 80% of structural faults | open | needs a list of faults that was not made by us; each stage stops the fault that its own chapter plants |
