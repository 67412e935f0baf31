# %% [markdown]
# # What did this run on?
#
# > A record of versions, hardware and code, taken at the start of every run, so that a difference can be traced to its cause.
#
# "It worked last month" is answered by comparing two records: which library, which processor, which commit, and what stood uncommitted in the checkout. The first article locks all of
# it; this chapter records it, which is the part that costs nothing.

# %%
#| default_exp core.environment

# %%
#| export
from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

# %%
#| hide
import json
import tempfile
import matplotlib.pyplot as plt
from scalelab.core.plotting import style

# %% [markdown]
# ## Versions
# Which packages can change a result? Those that compute or that cut text into tokens. A missing one is recorded as missing, since "not installed" explains differences too.

# %%
#| export
PACKAGES = ("scalelab", "torch", "numpy", "tokenizers", "safetensors", "pyarrow", "datasketch", "pandas", "zstandard", "xxhash", "transformers")


def versions() -> dict[str, str | None]:
    "Installed version of each package that can change a result; None where it is absent."
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


# %%
have = versions()
assert have["python"].startswith("3.") and have["torch"] and set(PACKAGES) < set(have)

# %% [markdown]
# ## Hardware
# The number of cores that a process may *use* is not the number that the machine has: containers and `taskset` see to that. Threads change the order of additions and so the last bits of a
# sum, which makes the thread count part of the result.

# %%
#| export
def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def hardware() -> dict:
    "Processor, usable cores, memory in bytes, GPUs and the thread settings that torch runs with."
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = []
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        gpus.append({"name": props.name, "memory_bytes": props.total_memory, "capability": f"{props.major}.{props.minor}"})
    return {
        "machine": platform.machine(), "system": f"{platform.system()} {platform.release()}", "cpu": _cpu_model(), "cores": os.cpu_count(),
        "usable_cores": usable, "memory_bytes": memory, "torch_threads": torch.get_num_threads(), "gpus": gpus,
        "cuda": torch.version.cuda, "blas": "mkl" if torch.backends.mkl.is_available() else "other",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


# %%
box = hardware()
assert 1 <= box["usable_cores"] <= box["cores"] and box["memory_bytes"] > 2**28 and isinstance(box["gpus"], list)

# %% [markdown]
# ## The code, exactly
# A commit names the code only if nothing was changed since. So the diff of a dirty checkout goes into the record too (cut at a stated size, because somebody will commit a corpus one day).

# %%
#| export
def _git(*words: str, cwd: Path) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=cwd, capture_output=True, text=True, timeout=10, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def git_state(folder: str | Path | None = None, diff_limit: int = 200_000) -> dict:
    """Commit, dirtiness and the diff against it of the checkout that holds `folder` (default: this package's own).

    All None outside a checkout. The diff is cut at `diff_limit` characters; `diff_cut` says whether it was.
    """
    if folder is None:
        import scalelab

        folder = Path(scalelab.__file__).resolve().parent
    commit = _git("rev-parse", "HEAD", cwd=folder)
    if commit is None:
        return {"commit": None, "dirty": None, "diff": None, "diff_cut": False}
    diff = _git("diff", "HEAD", "--", ".", ":(exclude)*.ipynb", cwd=Path((_git("rev-parse", "--show-toplevel", cwd=folder) or ".").strip())) or ""
    status = _git("status", "--porcelain", cwd=folder) or ""
    return {"commit": commit.strip(), "dirty": bool(status.strip()), "diff": diff[:diff_limit], "diff_cut": len(diff) > diff_limit}


# %%
with tempfile.TemporaryDirectory() as folder:
    assert git_state(folder) == {"commit": None, "dirty": None, "diff": None, "diff_cut": False}
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True, capture_output=True)
    git("init", "-q")
    Path(folder, "f.py").write_text("lr = 1\n")
    git("add", "."); git("commit", "-qm", "one")
    state = git_state(folder)
    assert len(state["commit"]) == 40 and state["dirty"] is False and state["diff"] == ""
    Path(folder, "f.py").write_text("lr = 10\n")
    state = git_state(folder)
    assert state["dirty"] and "+lr = 10" in state["diff"]
    assert git_state(folder, diff_limit=5)["diff_cut"]
print(state["diff"].splitlines()[-2:])

# %% [markdown]
# ## The record
# One call, one JSON object. The environment variables are a named few, never all of them: a log is no place for keys and passwords.

# %%
#| export
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "WORLD_SIZE")


def collect(**extra) -> dict:
    """The environment of this process as a JSON-ready dict: versions, hardware, git state, named variables, argv.

    extra: further entries, such as the hashes of data and tokenizer. The keys above can't be replaced.
    """
    record = {
        "versions": versions(), "hardware": hardware(), "git": git_state(), "argv": sys.argv,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    clash = sorted(set(record) & set(extra))
    if clash:
        raise ValueError(f"environment keys {clash} are taken")
    return record | extra


# %%
os.environ["SECRET_KEY_FOR_TEST"] = "hunter2"
record = collect(data_hash="abc")
text = json.dumps(record)
assert "hunter2" not in text and record["data_hash"] == "abc"
try:
    collect(git="mine")
except ValueError as error:
    print(error)
else:
    raise AssertionError("a reserved key was replaced")

# %% [markdown]
# ## Why the thread count is in the record
# Floating-point addition is not associative. Summing the same hundred thousand numbers in another grouping, which is all that another thread count does, moves the last bits:

# %%
import numpy as np
x = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
exact = float(np.sum(x.astype(np.float64)))
def grouped(n):
    "Sum as `n` threads would: each its part, then the parts."
    total = np.float32(0)
    for part in np.array_split(x, n):
        total += np.float32(np.cumsum(part)[-1])  # cumsum adds one by one, as a single thread does
    return float(total)

groups = [1, 2, 4, 8, 16, 32, 64]
errors = [abs(grouped(n) - exact) for n in groups]
assert len({grouped(n) for n in groups}) == len(groups)
style()
fig, ax = plt.subplots(figsize=(5, 2.2))
ax.loglog(groups, errors, "o-", base=2)
ax.set(xlabel="groups (threads)", ylabel="error of the sum", xticks=groups, xticklabels=groups)
plt.show()

# %% [markdown]
# What to see: every grouping gives another sum, and the error follows no order. "Bit-identical" is a promise for the same thread count; the trainer makes that promise and
# records what it depends on.
#
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-det: a locked environment gives the same result across machines | open here: this chapter records what must be equal; the trainer's chapter tests one machine | - |
# | Python must be 3.10 because of 3.11's GIL (A-sys) | not tested here; the record names the version | - |
