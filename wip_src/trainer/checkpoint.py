# %% [markdown]
# # Checkpoints that can be trusted
#
# > A checkpoint is whole or absent, says of every tensor what it should hash to, and brings all that a bit-exact resume needs.
#
# A run of weeks is as safe as its last good checkpoint. The first article writes to a temporary file, renames, then moves a symbolic link, and says that a crash then never leaves a broken
# checkpoint (A-atomic); its code loads a pickle, restores three random states, and forgets the schedule and the place in the data (A-resume). This chapter keeps the idea and repairs the rest.

# %%
#| default_exp trainer.checkpoint

# %%
#| export
from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from scalelab.core.config import CheckFailed, UsageError, atomic_write, fsync_dir, human_bytes
from scalelab.core.runs import decode_numbers, encode_numbers
from scalelab.distributed.parallel import World, gather_rows, unwrap

# %%
#| hide
import subprocess
import sys
import tempfile
import time
import matplotlib.pyplot as plt
from scalelab.core.plotting import COLORS, style
from scalelab.model.transformer import Decoder, ModelConfig, Tokens
from scalelab.trainer.optim import OptimConfig, build_optimizer

# %% [markdown]
# ## What a run is, beside its weights
# If a run is stopped and goes on, what must be the same? The counters, the place in the data (one integer and the control log, see the stream chapter), the random states, and the best
# score so far. The rate is a function of the step, so it needs no entry.

# %%
#| export
@dataclass
class TrainState:
    """Where a run is.

    global_step: updates done (skipped ones included). consumed_samples, consumed_tokens: rows of the stream, and labels that counted.
    attempt: how often the run was started, from 0. skipped_steps: updates left out for a non-finite gradient.
    best_bits_per_byte, best_step: of the evaluations so far. control_log: the stream's logged decisions.
    """

    global_step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    attempt: int = 0
    skipped_steps: int = 0
    best_bits_per_byte: float = float("inf")
    best_step: int = 0
    control_log: list[dict] = field(default_factory=list)


# %%
state = TrainState(global_step=7, consumed_samples=56)
assert TrainState(**decode_numbers(json.loads(json.dumps(encode_numbers(asdict(state)), allow_nan=False)))) == state

# %% [markdown]
# ## Random states without pickle
# `torch.load` of a full state is a pickle, and a pickle is a program. Everything here is bytes and JSON: torch's generator state is a tensor of bytes, Python's and numpy's are lists of integers.

# %%
#| export
def rng_states() -> tuple[dict[str, torch.Tensor], dict]:
    "Random states of this process: tensors (torch's, one for each GPU generator too) and a JSON-ready dict (Python's, numpy's)."
    tensors = {"rng/torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"rng/cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    version, ints, gauss = random.getstate()
    name, keys, pos, has_gauss, cached = np.random.get_state()
    return tensors, {"python": [version, list(ints), gauss], "numpy": [name, keys.tolist(), int(pos), int(has_gauss), float(cached)]}


def restore_rng(tensors: dict[str, torch.Tensor], plain: dict) -> None:
    "Put the states of `rng_states` back. States of GPUs that this process has not got are left alone."
    torch.set_rng_state(tensors["rng/torch"])
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"rng/cuda{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"rng/cuda{i}"], i)
    version, ints, gauss = plain["python"]
    random.setstate((version, tuple(ints), gauss))
    name, keys, pos, has_gauss, cached = plain["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), pos, has_gauss, cached))


# %%
def draws():
    "Five numbers from each generator."
    return torch.randn(5).tolist(), [random.gauss(0, 1) for _ in range(5)], np.random.standard_normal(5).tolist()

draws()
tensors, plain = rng_states()
plain = json.loads(json.dumps(plain))  # through JSON and back, as a checkpoint does
first = draws()
draws()
restore_rng(tensors, plain)
assert draws() == first

# %% [markdown]
# ## One file a rank, one manifest
# A rank writes its tensors as safetensors: a header of JSON and raw bytes. safetensors renames atomically but neither syncs nor checks what it reads back, and one flipped byte loads
# silently. So the manifest holds, for every tensor, its size and xxh3 checksum; and since the manifest itself and the tokenizer can be damaged too, they are sealed likewise.

# %%
#| export
FORMAT = 1


def _seal(manifest: dict) -> str:
    "Checksum of a manifest as stored, its own key aside."
    import xxhash

    rest = {k: v for k, v in manifest.items() if k != "xxh3"}
    return xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True).encode())


def _hash_file(path: Path) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(path.read_bytes())


def _hash_tensor(t: torch.Tensor) -> str:
    import xxhash

    return xxhash.xxh3_64(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def _write_rank(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> dict:
    "Write one rank's tensors, synced; its manifest entry."
    from safetensors.torch import save_file

    tensors = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    path = folder / f"rank-{rank:05d}.safetensors"
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except Exception as error:  # safetensors wraps a full disk in an exception of its own
        text = str(error)
        if "No space left" in text or "os error 28" in text:
            raise OSError(28, "No space left on device", str(path)) from None
        raise
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    os.chmod(path, 0o644)
    entries = {k: {"shape": list(v.shape), "dtype": str(v.dtype).removeprefix("torch."), "xxh3": _hash_tensor(v)} for k, v in tensors.items()}
    return {"bytes": path.stat().st_size, "tensors": entries}


# %%
#| export
def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    "`optim/<parameter>/<state>` for every tensor of the optimizer's state, by the parameter's name and not by its number."
    found = {}
    for name, p in unwrap(model).named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found[f"optim/{name}/{key}"] = value if torch.is_tensor(value) else torch.tensor(value)
    return found


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    "The inverse of `optimizer_tensors`, onto the devices and dtypes of the parameters."
    states: dict[str, dict] = {}
    for key, value in tensors.items():
        if key.startswith("optim/"):
            name, part = key[len("optim/"):].rsplit("/", 1)
            states.setdefault(name, {})[part] = value
    for name, p in unwrap(model).named_parameters():
        if name in states:
            optimizer.state[p] = {k: v.clone() if k == "step" else v.to(p.device, p.dtype).clone() for k, v in states[name].items()}


# %% [markdown]
# ## Writing
# The order is the whole point: all files into a folder with a temporary name, each synced; then the manifest; then the folder's entries; then the rename; then the parent folder; and only then the link `latest`
# moves, itself by a rename. A reader finds the old state or the new at every moment in between.

# %%
#| export
def move_pointer(folder: Path, name: str, target: str) -> None:
    "Make the relative symbolic link `folder/name` point at `target`, atomically."
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    if temporary.is_symlink():
        temporary.unlink()
    temporary.symlink_to(target)
    os.replace(temporary, folder / name)
    fsync_dir(folder)


def _needed_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values()) + 1_000_000


def save_checkpoint(
    root: str | Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: TrainState, world: World | None = None,
    extra: dict | None = None, tokenizer: str | Path | None = None,
) -> Path:
    """Write `root/step-NNNNNNNN` and point `latest` at it; every rank calls it, rank 0 returns after the rename.

    Rank 0 writes model and optimizer (they are the same on every rank), each rank its random states. extra: goes into the manifest (the resolved
    configuration, the data's hashes). Raises CheckFailed when the disk is full, with the older checkpoints untouched.
    """
    world, root = world or World(), Path(root)
    target, work = root / f"step-{state.global_step:08d}", root / f".step-{state.global_step:08d}.tmp"
    tensors, plain = rng_states()
    if world.is_main:
        tensors |= {f"model/{k}": v for k, v in unwrap(model).state_dict().items()} | optimizer_tensors(model, optimizer)
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
    entry, failure = None, ""
    _barrier(world)
    try:
        free = shutil.disk_usage(root).free
        if free < _needed_bytes(tensors):
            raise OSError(28, f"No space left on device ({human_bytes(_needed_bytes(tensors))} needed, {human_bytes(free)} free)", str(root))
        entry = {**_write_rank(work, world.rank, tensors), "rng": plain}
        (work / f".rank-{world.rank}.json").write_text(json.dumps(entry))
    except OSError as error:
        failure = f"{error.strerror or error}"
    ok = int(gather_rows(world, torch.tensor([0 if failure else 1])).min())
    if ok and world.is_main:
        try:
            _finish(root, work, target, unwrap(model), state, world, extra or {}, tokenizer)
        except OSError as error:
            failure = f"{error.strerror or error}"
            ok = 0
    ok = int(gather_rows(world, torch.tensor([ok])).min())
    if not ok:
        if world.is_main:
            shutil.rmtree(work, ignore_errors=True)
        last = find_checkpoints(root)
        kept = f"the last good checkpoint is {last[-1].name}" if last else "there is no earlier checkpoint"
        raise CheckFailed(f"checkpoint of step {state.global_step} in {root} could not be written: {failure or 'another rank failed'}; {kept}; free some space and run the same command again")
    return target


def _barrier(world: World) -> None:
    gather_rows(world, torch.zeros(1, dtype=torch.int64))


# %%
#| export
def _finish(root: Path, work: Path, target: Path, model, state: TrainState, world: World, extra: dict, tokenizer) -> None:
    "Manifest, model.json, tokenizer; sync; rename; pointer."
    files = {}
    for rank in range(world.world_size):
        part = work / f".rank-{rank}.json"
        files[f"rank-{rank:05d}.safetensors"] = json.loads(part.read_text())
        part.unlink()
    placements = {"model/*": "replicated, in rank 0's file", "optim/*": "replicated, in rank 0's file", "rng/*": "each rank's own"}
    manifest = {"format": FORMAT, "world_size": world.world_size, "state": asdict(state), "placements": placements, "files": files, **extra}
    if hasattr(model, "cfg"):
        atomic_write(work / "model.json", json.dumps(model.cfg.to_dict(), indent=1))
    if tokenizer:
        atomic_write(work / "tokenizer.json", Path(tokenizer).read_bytes())
    manifest["beside"] = {name: _hash_file(work / name) for name in ("model.json", "tokenizer.json") if (work / name).exists()}
    stored = json.loads(json.dumps(encode_numbers(manifest), allow_nan=False))
    atomic_write(work / "manifest.json", json.dumps({**stored, "xxh3": _seal(stored)}, ensure_ascii=False))
    if target.exists():  # the same step again, after a resume that fell back past it
        shutil.rmtree(target)
    os.replace(work, target)
    fsync_dir(root)
    move_pointer(root, "latest", target.name)


# %% [markdown]
# ## Finding, checking, loading
# Names do not prove anything: a checkpoint is good when its manifest parses, its files have the sizes it says, and every tensor has its checksum. `verify` says what is wrong in one line, and
# `newest_good` walks backwards until one holds.

# %%
#| export
def find_checkpoints(root: str | Path) -> list[Path]:
    "Checkpoint folders under `root` by step, oldest first; leftovers of killed writers (`.step-*.tmp`) are not among them."
    root = Path(root)
    return sorted(p for p in root.glob("step-*") if p.is_dir() and not p.is_symlink()) if root.is_dir() else []


def read_manifest(path: str | Path) -> dict:
    "The manifest of a checkpoint folder; UsageError if it is missing, damaged or of an unknown format."
    file = Path(path) / "manifest.json"
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        manifest = decode_numbers(stored)
    except FileNotFoundError:
        raise UsageError(f"{path}: not a checkpoint (no manifest.json); expected a folder such as RUN/checkpoints/step-00000100") from None
    except (ValueError, OSError) as error:
        raise UsageError(f"{file}: damaged ({error}); choose another checkpoint") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise UsageError(f"{file}: checkpoint format {found!r}, this scalelab reads format {FORMAT}")
    if manifest.get("xxh3") != _seal(stored):
        raise UsageError(f"{file}: damaged (differs from its checksum); choose another checkpoint")
    return manifest


def load_tensors(path: str | Path, rank: int = 0, verify: bool = True) -> dict[str, torch.Tensor]:
    "Tensors of one rank's file, each checked against the manifest; UsageError that names the tensor that differs."
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path, name = Path(path), f"rank-{rank:05d}.safetensors"
    entry = read_manifest(path)["files"].get(name)
    if entry is None:
        raise UsageError(f"{path}: holds no {name}")
    try:
        size = (path / name).stat().st_size
        if size != entry["bytes"]:
            raise UsageError(f"{path / name}: {size} bytes, the manifest says {entry['bytes']}; the file was cut or replaced")
        tensors = load_file(path / name)
    except FileNotFoundError:
        raise UsageError(f"{path / name}: missing though the manifest lists it") from None
    except SafetensorError as error:
        raise UsageError(f"{path / name}: damaged ({error})") from None
    for key, want in entry["tensors"].items() if verify else ():
        if key not in tensors or _hash_tensor(tensors[key]) != want["xxh3"]:
            raise UsageError(f"{path / name}: tensor {key} differs from its checksum; the checkpoint is damaged, use an older one")
    return tensors


def verify(path: str | Path) -> str:
    "What is wrong with a checkpoint, in one line; empty if every tensor of every rank holds."
    try:
        manifest = read_manifest(path)
        for name in manifest["files"]:
            load_tensors(path, int(name[5:10]))
        for name, want in manifest["beside"].items():
            if not (Path(path) / name).is_file() or _hash_file(Path(path) / name) != want:
                raise UsageError(f"{Path(path) / name}: missing or differs from its checksum")
    except UsageError as error:
        return str(error)
    return ""


def newest_good(root: str | Path) -> tuple[Path | None, list[str]]:
    "The newest checkpoint under `root` that verifies (None if there is none), and what was wrong with newer ones."
    bad = []
    for path in reversed(find_checkpoints(root)):
        problem = verify(path)
        if not problem:
            return path, bad
        bad.append(problem)
    return None, bad


# %% [markdown]
# Round trip: a model trained for three steps, saved, loaded into a fresh one; both go on for three more and must agree in every bit. (Dropout is on, so that the random state matters.)

# %%
CFG = ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=16, dropout=0.1)

def fresh(seed=0):
    "A small model and its optimizer."
    model = Decoder(CFG, seed=seed)
    return model, build_optimizer(model, OptimConfig())

def steps(model, optimizer, first, n):
    "n updates on tokens that depend on the step alone; the losses."
    losses = []
    for s in range(first, first + n):
        ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(s))
        loss, valid = model.loss(Tokens(ids, ids.roll(-1, 1)))
        optimizer.zero_grad()
        (loss / valid).backward()
        optimizer.step()
        losses.append(float(loss))
    return losses

# %%
#| export
def restore(path: str | Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, world: World | None = None, verify: bool = True) -> tuple[TrainState, dict]:
    """Load weights, and with an optimizer its state and this rank's random states; the TrainState and the manifest.

    Raises UsageError for a damaged checkpoint or one of another model (the first name or shape that differs). A rank that the
    checkpoint has no random state for (more ranks than then) keeps its own.
    """
    world = world or World()
    manifest = read_manifest(path)
    tensors = load_tensors(path, 0, verify)
    weights = {k[len("model/"):]: v for k, v in tensors.items() if k.startswith("model/")}
    target = unwrap(model).state_dict()
    for name in sorted(set(weights) | set(target)):
        ours, theirs = target.get(name), weights.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            raise UsageError(f"{path}: holds another model: {name} is {None if theirs is None else list(theirs.shape)} in the checkpoint and {None if ours is None else list(ours.shape)} in the configuration")
    unwrap(model).load_state_dict(weights)
    if optimizer is not None:
        load_optimizer(model, optimizer, tensors)
        own = f"rank-{world.rank:05d}.safetensors"
        if own in manifest["files"]:
            mine = tensors if world.rank == 0 else load_tensors(path, world.rank, verify)
            restore_rng(mine, manifest["files"][own]["rng"])
    return TrainState(**manifest["state"]), manifest


# %%
def equal(a, b):
    "Are two models and optimizers bit-identical?"
    mine, yours = (m.state_dict() | optimizer_tensors(m, o) for m, o in (a, b))
    return mine.keys() == yours.keys() and all(torch.equal(mine[k], yours[k]) for k in mine)

with tempfile.TemporaryDirectory() as folder:
    root = Path(folder) / "checkpoints"
    torch.manual_seed(0)
    a = fresh()
    steps(*a, 0, 3)
    path = save_checkpoint(root, *a, TrainState(global_step=3))
    went_on = steps(*a, 3, 3)
    torch.manual_seed(12345)  # a resumed process has other random numbers until it is told
    b = fresh(seed=9)
    state, _ = restore(path, *b)
    assert steps(*b, state.global_step, 3) == went_on and equal(a, b)
    assert (root / "latest").resolve() == path.resolve() and sorted(os.listdir(root)) == ["latest", "step-00000003"]
    print("files:", sorted(p.name for p in path.iterdir()))

# %% [markdown]
# What if one of the parts is forgotten? The first article's resume restores weights, optimizer and random states. Here each part is left out in turn, and the loss of the next steps compared.

# %%
def resumed_without(part, root, path):
    "Losses after a resume that forgets one part."
    torch.manual_seed(12345)
    model, optimizer = fresh(seed=9)
    state, manifest = restore(path, model, None if part == "optimizer" else optimizer)
    if part == "random state":
        torch.manual_seed(777)
    elif part == "optimizer":
        restore_rng(load_tensors(path), manifest["files"]["rank-00000.safetensors"]["rng"])
    return steps(model, optimizer, 0 if part == "place in the data" else state.global_step, 12)

with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    a = fresh()
    steps(*a, 0, 40)
    path = save_checkpoint(folder, *a, TrainState(global_step=40))
    truth = np.array(steps(*a, 40, 12))
    lost = {p: np.array(resumed_without(p, folder, path)) for p in ("nothing", "random state", "place in the data", "optimizer")}
assert np.array_equal(lost["nothing"], truth) and all(not np.array_equal(v, truth) for k, v in lost.items() if k != "nothing")
style()
fig, ax = plt.subplots(figsize=(6, 2.4))
for k, line in (("random state", "-"), ("place in the data", "--"), ("optimizer", ":")):
    ax.plot(range(41, 53), (lost[k] - truth) / 64, line, marker=".", label=f"without the {k}")
ax.axhline(0, color="k", lw=0.8)
ax.set(xlabel="step", ylabel="loss minus true loss\n(nats per token)")
ax.legend()
plt.show()

# %% [markdown]
# What to see: only the black line is a resume. The random state makes small differences (dropout). Without its place in the data the run meets old batches again, which it knows already, and looks *better* than the truth; without
# the optimizer's state it is off for as long as the averages take to fill. None of these would raise an error.
#
# ## Damage is named
# One flipped byte, a shortened file, a missing manifest, a half-written newer checkpoint: each must be noticed, and the older good one found.

# %%
def damaged(how):
    "What verify says of the newest checkpoint after the damage, and which one newest_good finds."
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "ckpt"
        model, optimizer = fresh()
        steps(model, optimizer, 0, 1)
        for s in (1, 2):
            path = save_checkpoint(root, model, optimizer, TrainState(global_step=s))
        file = path / "rank-00000.safetensors"
        if how == "flipped byte":
            data = bytearray(file.read_bytes())
            data[-1000] ^= 1
            file.write_bytes(data)
        elif how == "cut file":
            file.write_bytes(file.read_bytes()[:-100])
        elif how == "no manifest":
            (path / "manifest.json").unlink()
        elif how == "torn manifest":
            (path / "manifest.json").write_text('{"format": 1, "st')
        elif how == "changed counter":
            text = (path / "manifest.json").read_text()
            (path / "manifest.json").write_text(text.replace('"consumed_samples": 0', '"consumed_samples": 1'))
        elif how == "other format":
            (path / "manifest.json").write_text('{"format": 99}')
        good, bad = newest_good(root)
        return verify(path).replace(str(root), "…"), good.name, len(bad)

for how in ("flipped byte", "cut file", "no manifest", "torn manifest", "changed counter", "other format"):
    problem, found, n = damaged(how)
    assert problem and found == "step-00000001" and n == 1, how
    print(f"{how}: {problem}")

# %% [markdown]
# A checkpoint of another model is refused with the first name that differs:

# %%
with tempfile.TemporaryDirectory() as folder:
    path = save_checkpoint(folder, *fresh(), TrainState(global_step=1))
    other = Decoder(ModelConfig(vocab_size=64, d_model=48, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=16))
    try:
        restore(path, other)
    except UsageError as error:
        print(str(error).replace(folder, "…"))
        assert "holds another model" in str(error)
    else:
        raise AssertionError("loaded a foreign model")

# %% [markdown]
# ## Killed in the middle of a write
# A process does nothing but write checkpoints of rising step numbers; it is killed at moments it can't know. After each kill the newest checkpoint must verify, and must not be older than
# the last one that the process had announced.

# %%
code = """
import sys
from scalelab.trainer.checkpoint import TrainState, find_checkpoints, save_checkpoint
from scalelab.model.transformer import Decoder, ModelConfig
from scalelab.trainer.optim import OptimConfig, build_optimizer
model = Decoder(ModelConfig(vocab_size=512, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=256, max_seq_len=16))
optimizer = build_optimizer(model, OptimConfig())
start = len(find_checkpoints(sys.argv[1]))
for s in range(start + 1, 10**6):
    save_checkpoint(sys.argv[1], model, optimizer, TrainState(global_step=s))
    print(s, flush=True)
"""
with tempfile.TemporaryDirectory() as folder:
    rng = np.random.default_rng(0)
    for kill in range(3):
        child = subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True)
        announced = int(child.stdout.readline())
        time.sleep(float(rng.uniform(0, 0.1)))
        child.kill()
        announced = max([announced, *map(int, child.stdout.read().split())])
        good, bad = newest_good(folder)
        assert not bad and int(good.name[5:]) >= announced, (good, announced, bad)
        assert not verify(Path(folder) / "latest")
print("kills that left a damaged newest checkpoint: 0 of 3")

# %% [markdown]
# ## Housekeeping
# Checkpoints are kept by two rules: the last few, and the best. Leftovers of a killed writer are swept at the next start.

# %%
#| export
def prune(root: str | Path, keep_last: int) -> list[str]:
    "Remove all but the newest `keep_last` checkpoints and those that `latest` or `best` point at; the names removed."
    root = Path(root)
    safe = {os.path.basename(os.readlink(root / name)) for name in ("latest", "best") if (root / name).is_symlink()}
    old = [p for p in find_checkpoints(root)[: -keep_last or None] if p.name not in safe] if keep_last > 0 else []
    for path in old:
        shutil.rmtree(path)
    return [p.name for p in old]


def sweep(root: str | Path) -> list[str]:
    "Remove what killed writers left behind; the names removed."
    left = [p for p in Path(root).glob(".*.tmp")] if Path(root).is_dir() else []
    for path in left:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return [p.name for p in left]


# %%
with tempfile.TemporaryDirectory() as folder:
    model, optimizer = fresh()
    for s in range(1, 6):
        save_checkpoint(folder, model, optimizer, TrainState(global_step=s))
        if s == 2:
            move_pointer(Path(folder), "best", "step-00000002")
    (Path(folder) / ".step-00000006.tmp").mkdir()
    assert prune(folder, 2) == ["step-00000001", "step-00000003"]
    assert [p.name for p in find_checkpoints(folder)] == ["step-00000002", "step-00000004", "step-00000005"]
    assert sweep(folder) == [".step-00000006.tmp"] and prune(folder, 0) == []

# %% [markdown]
# ## Which checkpoint does a name mean?
# Commands take `RUN` or a checkpoint. A run means its best checkpoint, or with `--at` the latest or a step.

# %%
#| export
def resolve(place: str | Path, at: str = "best") -> Path:
    """The checkpoint folder that a run directory or a checkpoint path means.

    place: a checkpoint folder, a run directory (or the closed loop's, whose run is in `train/`). at: best, latest, or a step number;
    `best` falls back to `latest` when no evaluation has named one. Raises UsageError that lists the steps there are.
    """
    place = Path(place)
    if (place / "manifest.json").exists():
        return place
    if not place.exists():
        raise UsageError(f"{place}: no such run or checkpoint")
    for root in (place / "checkpoints", place / "train" / "checkpoints"):
        found = find_checkpoints(root)
        if not found:
            continue
        steps = [int(p.name[5:]) for p in found]
        if at in ("best", "latest"):
            for name in (at, "latest"):
                if (root / name).exists():
                    return (root / name).resolve()
            return found[-1]
        if at.isdecimal() and int(at) in steps:
            return found[steps.index(int(at))]
        raise UsageError(f"--at {at}: {place} has checkpoints of steps {', '.join(map(str, steps))}, or best, latest")
    raise UsageError(f"{place}: no checkpoint in it; expected a run directory with checkpoints/, or a checkpoint folder")


@contextmanager
def quiet_model(path: str | Path) -> Iterator:
    "The model of a checkpoint in evaluation mode, from its own model.json, without gradients."
    from scalelab.model.transformer import Decoder, ModelConfig

    path = Path(path)
    try:
        cfg = ModelConfig.from_dict(json.loads((path / "model.json").read_text()))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path / 'model.json'}: can't be read ({error}); is {path} a scalelab checkpoint?") from None
    model = Decoder(cfg)
    restore(path, model)
    with torch.no_grad():
        yield model.eval()


# %%
with tempfile.TemporaryDirectory() as folder:
    root = Path(folder) / "run" / "checkpoints"
    for s in (1, 2):
        save_checkpoint(root, *fresh(), TrainState(global_step=s))
    move_pointer(root, "best", "step-00000001")
    assert resolve(root.parent).name == "step-00000001" and resolve(root.parent, "latest").name == "step-00000002" == resolve(root / "step-00000002").name
    for place, at, want in ((root.parent, "7", "steps 1, 2"), (Path(folder) / "none", "best", "no such run"), (Path(folder), "best", "no checkpoint in it")):
        try:
            resolve(place, at)
        except UsageError as error:
            assert want in str(error)
        else:
            raise AssertionError(f"resolved {place} at {at}")
    with quiet_model(resolve(root.parent)) as model:
        assert not model.training and torch.equal(model.embedding.weight, fresh()[0].embedding.weight)

# %% [markdown]
# ## What is in it?
# AdamW keeps two numbers for every weight, so two thirds of a checkpoint are the optimizer's. The article's plan of saving optimizer states every 100 steps "below 50 MB" can't hold for a 7B model: they
# would be 56 GB, and without the weights they could not resume anything.

# %%
sizes = {"weights": 4 * 7e9, "optimizer": 8 * 7e9, "the article's budget": 50e6}
fig, ax = plt.subplots(figsize=(5, 1.7))
ax.barh(list(sizes), list(sizes.values()), color=COLORS[:3])
ax.set(xscale="log", xlabel="bytes in fp32, 7B parameters")
ax.grid(axis="y")
plt.show()
params = sum(t.numel() for t in fresh()[0].parameters())
model, optimizer = fresh()
steps(model, optimizer, 0, 1)
per = sum(t.numel() * 4 for k, t in optimizer_tensors(model, optimizer).items() if not k.endswith("step")) / params
assert per == 8.0
print(f"optimizer bytes per parameter: {per}")

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-atomic: temporary file, rename, link, and a crash never leaves a broken checkpoint | holds in part: for kills | 0 damaged after 3 kills here, more in the test suite; a power cut, against which the fsyncs stand, is not tested |
# | A-resume: weights, optimizer, counters and random states make the resumed run the same | does not hold: the place in the data (and a scheduler's counter, see the schedule chapter) is missing from the article's code | each part left out changes the next losses; with all, bit-identical |
# | A-tier: optimizer states below 50 MB every 100 steps | does not hold at 7B | 8.00 bytes a parameter, 56 GB |
#
# Not covered yet: sharded states (FSDP), asynchronous writing, power cuts, object stores.
