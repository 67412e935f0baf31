# %% [markdown]
# # The ledger
#
# > Every verdict that the book has reached, from the files that the experiments wrote; and the command that runs an experiment again.
#
# A claim of the sources is done when an experiment whose outcome could have contradicted it has left a file: the verdict, the scale, the seeds, the figure with its interval, the smallest effect that could have been seen,
# the command. This chapter reads those files and nothing else.

# %%
#| default_exp lab.claims

# %%
#| export
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from scalelab.core.arguments import parse_config
from scalelab.core.config import UsageError, did_you_mean
from scalelab.core.console import JSON, answer, table
from scalelab.lab.pools import Corpus
from scalelab.lab.runner import load_verdicts, save_verdict

# %% [markdown]
# ## Experiments that train
# Named as text and imported when they are run. The minutes are those of one core with three seeds.

# %%
#| export
EXPERIMENTS: dict[str, tuple[str, str, int]] = {  # id: where, folder of the verdict in nbs/, minutes
    "A-clean": ("scalelab.lab.cleaning_claims:claim_clean", "01_data", 10),
    "A-dup-train": ("scalelab.lab.cleaning_claims:claim_dup", "01_data", 5),
    "A-dupvar": ("scalelab.lab.cleaning_claims:claim_dupvar", "01_data", 9),
    "A-q995": ("scalelab.lab.cleaning_claims:claim_q995", "01_data", 6),
    "B-strict": ("scalelab.lab.cleaning_claims:claim_strict", "01_data", 8),
    "B-mix": ("scalelab.lab.mixture_claims:claim_mix", "01_data", 11),
    "B-curr": ("scalelab.lab.mixture_claims:claim_curriculum", "01_data", 11),
    "A-fresh-train": ("scalelab.lab.mixture_claims:claim_fresh", "01_data", 5),
    "B-vocab": ("scalelab.lab.mixture_claims:claim_vocabulary", "01_data", 9),
}


def rerun(names: Sequence[str], data: Path, work: Path, out: Path, seeds: int, report: Callable[[str], None]) -> list[Path]:
    """Run experiments and write their verdicts to `out/<room>/results`; what a stopped call had finished is in `work` and is not run again.

    Raises UsageError for an unknown name or fewer than two seeds.
    """
    for name in names:
        if name not in EXPERIMENTS:
            raise UsageError(f"claims {name}: no experiment of that name{did_you_mean(name, EXPERIMENTS)}; known: {', '.join(EXPERIMENTS)}")
    if seeds < 2:
        raise UsageError(f"--seeds {seeds}: a difference needs at least 2, and 3 to say much")
    torch.set_num_threads(1)
    corpus, written = Corpus(data, work), []
    for name in names:
        where, room, _ = EXPERIMENTS[name]
        module, function = where.split(":")
        found = getattr(importlib.import_module(module), function)(corpus, data, list(range(seeds)), report)
        for verdict in found if isinstance(found, list) else [found]:
            verdict.command = f"scalelab claims {name} --data DIR --seeds {seeds}"
            (out / room / "results").mkdir(parents=True, exist_ok=True)
            written.append(save_verdict(out / room / "results", verdict))
    return written


# %%
for call in (lambda: rerun(["A-clan"], Path("."), Path("."), Path("."), 3, print), lambda: rerun(["A-clean"], Path("."), Path("."), Path("."), 1, print)):
    try:
        call()
        raise AssertionError("accepted")
    except UsageError as error:
        print(error)
for where, *_ in EXPERIMENTS.values():
    module, function = where.split(":")
    assert callable(getattr(importlib.import_module(module), function))

# %% [markdown]
# ## The command
# `scalelab claims` prints the ledger of a checkout; `scalelab claims ID --data DIR` runs an experiment.

# %%
#| export
def claims_command(argv: list[str]) -> int:
    "scalelab claims [ID...] [--data DIR]"
    flags = {"ids": {"nargs": "*", "type": str, "help": "experiments to run again; without any, the ledger is printed"}} | JSON | {
        "--nbs": {"type": str, "default": "nbs", "help": "folder of the notebooks, where the verdicts stand"}, "--data": {"type": str, "default": None, "help": "folder of texts (1_pretrain, 2_dirty_web, ...)"},
        "--work": {"type": str, "default": "runs/claims", "help": "folder for shards and unfinished grids"}, "--seeds": {"type": int, "default": 3, "help": "of every arm"}}
    _, given = parse_config(None, argv, "scalelab claims", "The claims of the sources and what experiments said.", flags)
    if given["ids"]:
        if not given["data"] or not Path(given["data"]).is_dir():
            raise UsageError(f"--data {given['data']}: give the folder of texts that the experiments train on")
        for path in rerun(given["ids"], Path(given["data"]), Path(given["work"]), Path(given["nbs"]), given["seeds"], lambda text: print(f"scalelab: {text}", file=sys.stderr, flush=True)):
            print(f"scalelab: wrote {path}", file=sys.stderr)
    verdicts = load_verdicts(given["nbs"])
    rows = [{"id": v["id"], "verdict": v["verdict"], "because": v.get("because", ""), "seeds": v["seeds"], "command": v["command"]} for v in verdicts]
    answer({"claims": verdicts}, given["json"], [table(rows)])
    return 0


# %%
verdicts = load_verdicts("..")
for v in verdicts:
    print(f"{v['id']:14} {v['verdict']:15} {v.get('because') or v['scale']}"[:150])
assert all(v["command"] and v["scale"] for v in verdicts)
