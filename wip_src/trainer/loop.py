# %% [markdown]
# # The training loop, as a state machine
#
# > From a batch to an update in functions of a few lines; every decision an event; the same run on one rank or many, stopped and resumed or not.
#
# "Debuggability is productivity", says the first article, and writes its own loop (2.3, 4.3). So do we: one can read this loop from top to bottom, and everything it does to itself is in a log. The
# promises are tested here in small and by the test suite with real processes: one rank or several compute the same thing, and a killed run that resumes ends with the same bits.

# %%
#| default_exp trainer.loop

# %%
#| export
from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import random
import resource
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from scalelab.core.arguments import parse_config, run_main
from scalelab.core.config import CheckFailed, UsageError, atomic_write, dump_yaml, human_bytes, human_count, load_yaml, progress
from scalelab.core.environment import collect
from scalelab.core.runs import SCHEMA, JsonlWriter, read_jsonl
from scalelab.data.shards import Shards
from scalelab.data.stream import ControlLog, Stream
from scalelab.distributed.parallel import (
    World, agree_finite, close_world, gather_rows, gradient_weight, init_world, no_sync, param_checksum, sum_across, unwrap, wrap,
)
from scalelab.model.transformer import Decoder
from scalelab.precision.policy import POLICIES, apply_policy, autocast_for
from scalelab.trainer import inject
from scalelab.trainer.checkpoint import TrainState, find_checkpoints, move_pointer, newest_good, prune, read_manifest, resolve, restore, save_checkpoint, sweep
from scalelab.trainer.evaluation import evaluate
from scalelab.trainer.optim import build_optimizer, clip_gradients, global_norm, set_rate, update_norm
from scalelab.trainer.schedule import lr_ratio
from scalelab.trainer.settings import TrainConfig, check_resume, describe, dry_run, is_foreign, translate, validate

# %%
#| hide
import subprocess
import tempfile
import matplotlib.pyplot as plt
from scalelab.core.plotting import COLORS, style
from scalelab.core.runs import Run
from scalelab.data.shards import ShardWriter
from scalelab.model.transformer import ModelConfig

# %% [markdown]
# ## States
# A run is in one state at a time, and only some changes are allowed. Drawing them first makes it plain what can go wrong where; each change is written to `events.jsonl` with its reason.

# %%
#| export
TRANSITIONS = {
    "new": ("prepare",),
    "prepare": ("train", "finish", "failed"),
    "train": ("evaluate", "checkpoint", "stopped", "failed", "finish"),
    "evaluate": ("train", "checkpoint", "failed"),
    "checkpoint": ("train", "finish", "stopped", "failed"),
    "stopped": (),
    "finish": (),
    "failed": (),
}


class Machine:
    "The state of a run; `to(state, reason)` checks the transition and tells the listener (called with from, to, reason)."

    def __init__(self, listener=None):
        self.state, self._listener = "new", listener or (lambda *a: None)

    def to(self, state: str, reason: str) -> None:
        "Change state; RuntimeError for a transition that is not in TRANSITIONS (a defect of the loop, not of the user)."
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"transition {self.state} -> {state} ({reason}) is not allowed; from {self.state} one may go to {TRANSITIONS[self.state]}")
        before, self.state = self.state, state
        self._listener(before, state, reason)


# %%
m = Machine()
for step in ("prepare", "train", "evaluate", "checkpoint", "train", "checkpoint", "finish"):
    m.to(step, "test")
try:
    m.to("train", "after the end")
except RuntimeError as error:
    print(error)
else:
    raise AssertionError("a finished run was started again")

# %%
places = {"new": (0, 1), "prepare": (1, 1), "train": (2, 1), "evaluate": (2, 2), "checkpoint": (3, 1.5), "finish": (4, 2), "stopped": (4, 1), "failed": (3, 0)}
style()
fig, ax = plt.subplots(figsize=(6.4, 2.6))
for a, targets in TRANSITIONS.items():
    for b in targets:
        ax.annotate("", places[b], places[a], arrowprops={"arrowstyle": "->", "color": "0.6", "shrinkA": 22, "shrinkB": 22, "connectionstyle": "arc3,rad=0.12"})
for name, (x, y) in places.items():
    ax.text(x, y, name, ha="center", va="center", bbox={"boxstyle": "round", "fc": "white", "ec": COLORS[3] if name == "failed" else COLORS[0]})
ax.set(xlim=(-0.5, 4.6), ylim=(-0.4, 2.5))
ax.axis("off")
plt.show()

# %% [markdown]
# What to see: one circle (train, evaluate, checkpoint) and three ways out of it.
#
# ## One update
# All that belongs to an update stands in one object, so that the functions below can be read without looking for globals.

# %%
#| export
@dataclass
class Trainer:
    "The parts of a running training, handed to the functions of the loop."

    cfg: TrainConfig
    world: World
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    stream: Stream
    valid: Shards | None
    state: TrainState
    faults: inject.Injector
    stop: bool = False  # set by a signal


# %% [markdown]
# **The data.** The rows of update $s$ are those after `consumed_samples`; this rank gets its share. The hash of the global batch is computed from the hash of each row, so it is the same number on any number of
# ranks, and it is what tells a batch that came twice.

# %%
#| export
def row_hashes(ids: torch.Tensor) -> torch.Tensor:
    "xxh3 of each row of token ids [B, T], as int64 [B]."
    import xxhash

    return torch.tensor([xxhash.xxh3_64_intdigest(row.tobytes()) - 2**63 for row in ids.numpy()], dtype=torch.int64)


def read_batch(t: Trainer, step: int):
    "This rank's rows of the update, and the hash of the whole global batch (16 hex digits)."
    import xxhash

    shift = t.cfg.trainer.global_batch if t.faults.at("repeat_batch", step) else 0
    batch = t.stream.batch(t.state.consumed_samples - shift, t.cfg.trainer.global_batch, t.world.rank, t.world.world_size)
    batch = inject.on_data(t.faults, step, batch, unwrap(t.model).cfg.vocab_size)
    hashes = gather_rows(t.world, row_hashes(batch.input_ids))
    return batch, xxhash.xxh3_64(hashes.numpy().tobytes()).hexdigest()


# %% [markdown]
# **The gradient.** Micro-batches are pushed forward *and* backward one by one; the second article's text runs backward once after four forwards, which holds four graphs at once and saves nothing. The
# sum of token losses is divided by the number of valid tokens of the whole update on all ranks, known before the first forward, so that a micro-batch of 10 tokens does not weigh as much as one of 1000.

# %%
#| export
def accumulate(t: Trainer, batch) -> tuple[np.ndarray, np.ndarray, float, bool]:
    """Gradients of the global token mean of one update, left in `.grad`.

    Returns nats and labels by domain (this rank's), the number of valid tokens of all ranks, and whether any rank was asked to stop.
    """
    micro, n = t.cfg.trainer.micro_batch, len(batch)
    total, stop = sum_across(t.world, batch.n_valid, float(t.stop))
    weight = gradient_weight(t.world.world_size, total)
    domains = len(t.stream.shards.domains)
    nats, labels = np.zeros(domains), np.zeros(domains)
    policy = POLICIES[t.cfg.precision]
    for start in range(0, n, micro):
        part = batch.slice(start, start + micro).to(t.world.device)
        with no_sync(t.model, last=start + micro >= n):
            with autocast_for(policy, t.world.device):
                losses, counts = t.model(part, reduction="row")
            (losses.sum() * weight).backward()
        domain = part.domain_ids.cpu().numpy()
        np.add.at(nats, domain, losses.detach().double().cpu().numpy())
        np.add.at(labels, domain, counts.cpu().numpy())
    return nats, labels, total, stop > 0


# %% [markdown]
# **The update.** Norms first; if any rank saw a non-finite one, all skip the step together. Otherwise clip, set the rate, step.

# %%
#| export
def update(t: Trainer, step: int) -> dict:
    "Clip, check, set the rate, step. The numbers of the update for its log line; `skipped` says whether the weights moved."
    parameters = list(unwrap(t.model).parameters())
    norm = global_norm([p.grad for p in parameters])
    lr = t.cfg.optim.lr * lr_ratio(step, t.cfg.trainer.steps, t.cfg.schedule) * (100 if t.faults.at("lr_spike", step) else 1)
    set_rate(t.optimizer, lr)
    finite = agree_finite(t.world, math.isfinite(norm))
    moved, clipped = 0.0, False
    if finite:
        clipped = clip_gradients(parameters, norm, t.cfg.optim.clip)
        t.optimizer.step()
        moved = update_norm(t.optimizer)
        inject.after_update(t.faults, step, unwrap(t.model), t.world.rank == t.world.world_size - 1 and t.world.world_size > 1)
    return {"lr": lr, "grad_norm": norm, "clipped": clipped, "param_norm": global_norm(parameters), "update_norm": moved, "skipped": not finite}


def memory_bytes(device: torch.device) -> int:
    "Peak memory so far: of the process on a CPU, of the allocator on a GPU."
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# %%
#| export
def train_step(t: Trainer) -> dict:
    "One update, from reading to logging: the step line. Advances the state, also when the update was skipped."
    step, begin = t.state.global_step + 1, time.perf_counter()
    inject.before_step(t.faults, step, t.world.is_main)
    batch, digest = read_batch(t, step)
    read = time.perf_counter()
    t.optimizer.zero_grad(set_to_none=True)
    nats, labels, valid, stop = accumulate(t, batch)
    inject.on_gradients(t.faults, step, unwrap(t.model))
    numbers = update(t, step)
    sums = np.array(sum_across(t.world, *nats, *labels))
    nats, labels = sums[: len(nats)], sums[len(nats):]
    s = t.state
    s.global_step, s.consumed_samples, s.consumed_tokens = step, s.consumed_samples + t.cfg.trainer.global_batch, s.consumed_tokens + int(valid)
    s.skipped_steps += numbers["skipped"]
    t.stop = t.stop or stop
    seconds = time.perf_counter() - begin
    by_domain = {d: nats[i] / labels[i] for i, d in enumerate(t.stream.shards.domains) if labels[i]}
    return {
        "loss": nats.sum() / max(valid, 1), **numbers, "loss_by_domain": by_domain, "loss_scale": 1.0, "valid_tokens": int(valid),
        "consumed_samples": s.consumed_samples, "consumed_tokens": s.consumed_tokens, "longest_sequence": int(batch.position_ids.max()) + 1,
        "batch_hash": digest, "step_seconds": seconds, "data_seconds": read - begin, "tokens_per_second": valid / seconds,
        "memory_bytes": memory_bytes(t.world.device),
    }


# %% [markdown]
# ## Looking at the tensors once
# The article's minimum closed loop records shape, dtype and range of what flows. One pass over the first step is enough to see a wrong dtype or a wild range, and costs nothing afterwards.

# %%
#| export
def describe_tensor(stage: str, name: str, x: torch.Tensor) -> dict:
    "One row of the census: stage, name, shape, dtype, min, mean, max, finite."
    y = x.detach().double()
    empty = y.numel() == 0
    return {
        "stage": stage, "name": name, "shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch."), "min": None if empty else float(y.min()),
        "mean": None if empty else float(y.mean()), "max": None if empty else float(y.max()), "finite": bool(torch.isfinite(y).all()),
    }


def census(t: Trainer, batch) -> list[dict]:
    "Shapes, dtypes and ranges of a batch, of every module's output in a forward pass, and of gradients and optimizer states."
    model, rows, hooks = unwrap(t.model), [], []
    for name in ("input_ids", "labels", "position_ids", "document_ids", "domain_ids", "sample_ids"):
        rows.append(describe_tensor("batch", name, getattr(batch, name)))
    for name, module in model.named_modules():
        if name:
            def keep(_, __, out, name=name):
                if torch.is_tensor(out):
                    rows.append(describe_tensor("forward", name, out))
            hooks.append(module.register_forward_hook(keep))
    part = batch.slice(0, min(2, len(batch))).to(t.world.device)
    with torch.no_grad():
        hidden = model.hidden(part)
        rows.append(describe_tensor("forward", "logits", model.logits(hidden)))
    for hook in hooks:
        hook.remove()
    for name, p in model.named_parameters():
        rows.append(describe_tensor("parameter", name, p))
        if p.grad is not None:
            rows.append(describe_tensor("gradient", name, p.grad))
        for key, value in t.optimizer.state.get(p, {}).items():
            if torch.is_tensor(value) and value.numel() > 1:
                rows.append(describe_tensor("optimizer", f"{name} {key}", value))
    return rows


# %% [markdown]
# ## Before the first step
# Preparation is where most runs should fail if they must: wrong shards, a tokenizer that does not match, a folder that another process is using.

# %%
#| export
def find_tokenizer(cfg: TrainConfig) -> Path | None:
    "The tokenizer of the training shards: the one given, else `tokenizer.json` beside them (DIR/shards/train -> DIR/tokenizer.json)."
    if cfg.data.tokenizer:
        if not Path(cfg.data.tokenizer).is_file():
            raise UsageError(f"data.tokenizer: {cfg.data.tokenizer} is no file")
        return Path(cfg.data.tokenizer)
    for folder in (Path(cfg.data.train), Path(cfg.data.train).parent, Path(cfg.data.train).parent.parent):
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    return None


def open_data(cfg: TrainConfig) -> tuple[Shards, Shards | None, Path | None]:
    "Training and validation shards, checked against each other and against the tokenizer file."
    import xxhash

    if not cfg.data.train:
        raise UsageError("data.train: no shards given; make some with `scalelab data tokenize INPUT --out DIR` and pass --data.train DIR/shards/train")
    train = Shards(cfg.data.train, verify=cfg.data.verify)
    valid = Shards(cfg.data.valid, verify=cfg.data.verify) if cfg.data.valid else None
    if valid is not None:
        valid.check_tokenizer(train.tokenizer_hash)
    tokenizer = find_tokenizer(cfg)
    if tokenizer:
        train.check_tokenizer(xxhash.xxh3_128_hexdigest(tokenizer.read_bytes()))
    if cfg.model.vocab_size and cfg.model.vocab_size < train.vocab_size:
        raise UsageError(f"model.vocab_size: {cfg.model.vocab_size} is smaller than the tokenizer's {train.vocab_size}; nearest valid: {train.vocab_size}")
    return train, valid, tokenizer


# %%
#| export
@contextlib.contextmanager
def run_lock(run: Path, world: World):
    "Hold RUN/.lock while training, so that two processes can't write to one run; released by the kernel when the process dies."
    if not world.is_main:
        yield
        return
    made = [p for p in (run, *run.parents) if not p.exists()]
    run.mkdir(parents=True, exist_ok=True)
    with open(run / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{run}: another process is training into this run; stop it, or give another --run") from None
        try:
            yield
        except UsageError:  # refused before anything was written: the folders that the lock needed go again
            if made and os.listdir(run) == [".lock"]:
                os.unlink(run / ".lock")
                for folder in made:
                    folder.rmdir()
            raise


def seed_all(seed: int, rank: int) -> None:
    "Seed every generator. Ranks differ, so that their dropout differs; weights are drawn from a generator of their own."
    torch.manual_seed(seed * 1_000_003 + rank)
    np.random.seed((seed * 1_000_003 + rank) % 2**32)
    random.seed(seed * 1_000_003 + rank)


# %%
#| export
def choose_start(run: Path, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from (None: a new run), and what was wrong with newer ones.

    resume: auto takes the newest that verifies; never refuses a folder that holds a run; anything else is a checkpoint folder.
    """
    root = run / "checkpoints"
    if resume == "never":
        if find_checkpoints(root) or (run / "metrics.jsonl").exists():
            raise UsageError(f"{run}: holds a run already and --resume never was given; choose another --run, or --resume auto to go on")
        return None, []
    if resume != "auto":
        path = resolve(resume, "latest")
        read_manifest(path)
        return path, []
    good, bad = newest_good(root)
    if bad and good is None:
        raise UsageError(f"{root}: none of the {len(bad)} checkpoints verifies ({bad[0]}); restore one from a copy, or start a new --run")
    return good, bad


def start_model(cfg: TrainConfig, world: World, shards: Shards, init_from: str | None) -> Decoder:
    "A fresh model, or one from a HF directory, in the policy's precision on this rank's device."
    if init_from:
        from scalelab.model.hf import load_hf

        model, _ = load_hf(init_from)
        if model.cfg.vocab_size < shards.vocab_size:
            raise UsageError(f"--init_from {init_from}: its vocabulary has {model.cfg.vocab_size} tokens, the shards' tokenizer {shards.vocab_size}; tokenize with its own tokenizer")
    else:
        model = Decoder(replace(cfg.model, vocab_size=cfg.model.vocab_size or shards.vocab_size), seed=cfg.trainer.seed)
    model.activation_checkpointing = cfg.activation_checkpointing
    return apply_policy(model, POLICIES[cfg.precision], world.device)


# %% [markdown]
# ## The run
# Everything comes together: prepare, then the circle, then the end. The logger writes on rank 0 only; lines of both logs carry attempt and step.

# %%
#| export
class Logs:
    "metrics.jsonl and events.jsonl of rank 0; on other ranks a thing that writes nothing."

    def __init__(self, run: Path, world: World, state: TrainState):
        self.state, self._files = state, []
        if world.is_main:
            self._files = [JsonlWriter(run / "metrics.jsonl"), JsonlWriter(run / "events.jsonl")]

    def _write(self, which: int, row: dict) -> None:
        if self._files:
            self._files[which].write({"schema": SCHEMA, **row, "attempt": self.state.attempt, "global_step": self.state.global_step, "time": time.time()})

    def metric(self, kind: str, **numbers) -> None:
        "A line of metrics.jsonl."
        self._write(0, {"kind": kind, **numbers})

    def event(self, event: str, reason: str = "", **evidence) -> None:
        "A line of events.jsonl."
        self._write(1, {"event": event, "reason": reason, **evidence})

    def close(self) -> None:
        "Sync and close both."
        for file in self._files:
            file.close()


def next_attempt(run: Path) -> int:
    "Number of this start of the run: one more than the last in its logs."
    return 1 + max((r.get("attempt", 0) for name in ("metrics.jsonl", "events.jsonl") for r in read_jsonl(run / name)), default=-1)


# %%
#| export
def prepare(cfg: TrainConfig, run: Path, world: World, resume: str, init_from: str | None) -> tuple[Trainer, Logs, Path | None]:
    "Everything before the first step: data, model, optimizer, state (fresh or restored), logs."
    train, valid, tokenizer = open_data(cfg)
    checkpoint, damaged = choose_start(run, resume)
    seed_all(cfg.trainer.seed, world.rank)
    model = start_model(cfg, world, train, None if checkpoint else init_from)
    cfg = replace(cfg, model=replace(model.cfg))
    optimizer = build_optimizer(model, cfg.optim)
    state, changed = TrainState(), []
    if checkpoint:
        state, manifest = restore(checkpoint, model, optimizer, world, verify=False)
        changed = check_resume(manifest["config"], cfg.to_dict(), str(checkpoint))
        if manifest["data_checksum"] != train.checksum:
            raise UsageError(f"{checkpoint}: was trained on other shards than {cfg.data.train} (index checksum {manifest['data_checksum']} against {train.checksum}); give the same shards, or a new --run")
    state.attempt = next_attempt(run) if world.is_main else 0
    stream = Stream(train, cfg.data.seq_len, cfg.data.seed, ControlLog.from_json(state.control_log), cfg.data.packing)
    stream.check_batch(cfg.trainer.global_batch, world.world_size)
    if world.is_main:
        sweep(run / "checkpoints")
        atomic_write(run / "config.yaml", dump_yaml(cfg.to_dict()))
        atomic_write(run / "environment.json", json.dumps(collect(
            data={"train": train.checksum, "valid": valid.checksum if valid else None}, tokenizer_hash=train.tokenizer_hash, world_size=world.world_size), indent=1))
    logs = Logs(run, world, state)
    for problem in damaged:
        logs.event("damaged", problem)
        if world.is_main:
            print(f"scalelab: {problem}; going on from {checkpoint.name}", file=sys.stderr)
    logs.event("resume" if checkpoint else "start", f"from {checkpoint.name}" if checkpoint else "new run", changed_keys=changed, world_size=world.world_size, pid=os.getpid())
    return Trainer(cfg, world, wrap(model, world, cfg.parallel), optimizer, stream, valid, state, inject.Injector.parse(cfg.inject)), logs, tokenizer


# %%
#| export
def evaluate_now(t: Trainer, logs: Logs, whole: bool) -> None:
    "Evaluate on the fixed rows (or all), log it, remember the best."
    begin = time.perf_counter()
    result = evaluate(t.model, t.valid, t.cfg.data.seq_len, t.cfg.trainer.micro_batch, t.world, 0 if whole else t.cfg.trainer.eval_rows,
                      autocast=autocast_for(POLICIES[t.cfg.precision], t.world.device))
    logs.metric("eval", **result, eval_seconds=time.perf_counter() - begin)
    if not whole and result["bits_per_byte"] < t.state.best_bits_per_byte:
        t.state.best_bits_per_byte, t.state.best_step = result["bits_per_byte"], t.state.global_step


def checkpoint_now(t: Trainer, logs: Logs, run: Path, tokenizer: Path | None) -> None:
    "Write a checkpoint, move the pointers, remove old ones."
    begin, root = time.perf_counter(), run / "checkpoints"
    extra = {"config": t.cfg.to_dict(), "data_checksum": t.stream.shards.checksum, "tokenizer_hash": t.stream.shards.tokenizer_hash}
    path = save_checkpoint(root, t.model, t.optimizer, t.state, t.world, extra, tokenizer)
    if t.world.is_main:
        if t.state.best_step == t.state.global_step:
            move_pointer(root, "best", path.name)
        removed = prune(root, t.cfg.trainer.keep_last)
        logs.event("checkpoint", path.name, seconds=time.perf_counter() - begin, bytes=sum(f.stat().st_size for f in path.iterdir()), removed=removed)


def rank_lines(t: Trainer, logs: Logs, loss: float) -> None:
    "A line for every rank with its parameter checksum: ranks that drifted apart show here and nowhere else."
    digest = param_checksum(t.model)
    halves = torch.tensor([[int(digest[:8], 16), int(digest[8:], 16)]])
    for rank, (high, low) in enumerate(gather_rows(t.world, halves).tolist()):
        logs.metric("rank", rank=rank, param_checksum=f"{high:08x}{low:08x}", loss=loss)


# %%
#| export
def run_steps(t: Trainer, logs: Logs, run: Path, machine: Machine, tokenizer: Path | None) -> None:
    "The circle: steps with evaluations and checkpoints between them, until the end, a stop, or a failure."
    c, end = t.cfg.trainer, min(t.cfg.trainer.stop_at or t.cfg.trainer.steps, t.cfg.trainer.steps)
    in_a_row, saved = 0, t.state.global_step if find_checkpoints(run / "checkpoints") else -1
    with progress(total=end, desc="train", unit="step") as bar:
        bar.update(t.state.global_step)
        while t.state.global_step < end and not t.stop:
            for name in t.faults.names(t.state.global_step + 1):
                logs.event("inject", name, at_step=t.state.global_step + 1)
            line = train_step(t)
            logs.metric("step", **line)
            bar.set_postfix_str(f"loss {line['loss']:.3f}, {human_count(line['tokens_per_second'])} tok/s", refresh=False)
            bar.update(1)
            step = t.state.global_step
            in_a_row = in_a_row + 1 if line["skipped"] else 0
            if line["skipped"]:
                logs.event("skip", "non-finite gradient", at_step=step, grad_norm=line["grad_norm"], loss=line["loss"], batch_hash=line["batch_hash"])
            if in_a_row >= c.max_skips:
                machine.to("failed", f"{in_a_row} steps in a row with a non-finite gradient")
                raise CheckFailed(f"step {step}: {in_a_row} steps in a row had a non-finite gradient (trainer.max_skips {c.max_skips}); the last good checkpoint is kept; look at `scalelab diagnose {run}`")
            if c.census and step == 1 and t.world.is_main:
                atomic_write(run / "census.json", json.dumps(census(t, read_batch(replace_world(t), 1)[0])))
            if c.rank_every and step % c.rank_every == 0:
                rank_lines(t, logs, line["loss"])
            if t.valid is not None and c.eval_every and step % c.eval_every == 0:
                machine.to("evaluate", f"every {c.eval_every} steps")
                evaluate_now(t, logs, whole=False)
                machine.to("train", "evaluated")
            if step % c.checkpoint_every == 0:
                machine.to("checkpoint", f"every {c.checkpoint_every} steps")
                checkpoint_now(t, logs, run, tokenizer)
                saved = step
                machine.to("train", "checkpoint written")
    if saved != t.state.global_step:
        machine.to("checkpoint", "signal" if t.stop else "the end")
        checkpoint_now(t, logs, run, tokenizer)


def replace_world(t: Trainer) -> Trainer:
    "The same trainer seen as rank 0 of one, at the start of the data: for looking, not for training."
    return replace(t, world=replace(t.world, rank=0, world_size=1), state=TrainState(control_log=t.state.control_log), faults=inject.Injector())


# %%
#| export
def fit(cfg: TrainConfig, run: str | Path, resume: str = "auto", init_from: str | None = None, world: World | None = None) -> dict:
    """Train: the run directory is written, the last numbers are returned. Every rank calls it.

    resume: auto, never, or a checkpoint folder. init_from: HF directory with the first weights (new runs only).
    Raises UsageError (nothing was started), CheckFailed (the run failed; its last good checkpoint is kept), KeyboardInterrupt
    (stopped by a signal, the state is saved).
    """
    run, world = Path(run), world or World()
    validate(cfg, world.world_size)
    if cfg.trainer.threads:
        torch.set_num_threads(cfg.trainer.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with run_lock(run, world):
        t, logs, tokenizer = prepare(cfg, run, world, resume, init_from)
        machine = Machine(lambda a, b, why: logs.event("state", why, before=a, after=b))
        old = _catch_signals(t)
        try:
            machine.to("prepare", "data, model and state are ready")
            done = t.state.global_step >= cfg.trainer.steps
            machine.to("finish" if done else "train", "already complete" if done else "first step" if not t.state.global_step else "resumed")
            if not done:
                run_steps(t, logs, run, machine, tokenizer)
                if t.stop:
                    machine.to("stopped", "signal; the state is saved")
                    raise KeyboardInterrupt
                if t.valid is not None and t.state.global_step >= cfg.trainer.steps:
                    evaluate_now(t, logs, whole=True)
                machine.to("finish", f"step {t.state.global_step}")
            return {"global_step": t.state.global_step, "consumed_tokens": t.state.consumed_tokens, "run": str(run)}
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            logs.close()


def _catch_signals(t: Trainer) -> dict:
    "Ctrl-C and SIGTERM ask the loop to stop after the step; a second one stops at once. The old handlers."
    def ask(number, frame):
        if t.stop:
            raise KeyboardInterrupt
        t.stop = True

    try:
        return {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's business
        return {}


# %% [markdown]
# ## A run to look at
# Bytes as tokens, two domains, a small model. The notebook's runs use a few dozen steps; the figures they make are the ones that a real run makes.

# %%
TMP = tempfile.TemporaryDirectory()
HERE = Path(TMP.name)
rng = np.random.default_rng(0)

def document(kind):
    "A short text of one domain."
    if kind == "counting":
        a = int(rng.integers(100, 800))
        return " ".join(str(a + i) for i in range(int(rng.integers(10, 60))))
    return " ".join(rng.choice(["lo", "mi", "ka", "tu", "sen", "far", "bel", "ont"], size=int(rng.integers(20, 80))))

for split, n in (("train", 200), ("valid", 20)):
    with ShardWriter(HERE / split, "bytes", 257, 256) as w:
        for i in range(n):
            for kind in ("counting", "words"):
                raw = document(kind).encode()
                w.add(np.frombuffer(raw, np.uint8).astype(np.uint32), len(raw), kind)

def config(**changes):
    "The notebook's configuration; keys with double underscores for dots."
    words = {"data.train": HERE / "train", "data.valid": HERE / "valid", "data.seq_len": 64, "model.d_model": 48, "model.n_layers": 2, "model.d_ff": 96, "model.max_seq_len": 64,
             "trainer.steps": 40, "trainer.global_batch": 12, "trainer.micro_batch": 4, "trainer.eval_every": 10, "trainer.eval_rows": 16, "trainer.checkpoint_every": 10,
             "trainer.device": "cpu", "trainer.threads": 1, "optim.lr": 3e-3, "schedule.warmup_steps": 5}
    words |= {k.replace("__", "."): v for k, v in changes.items()}
    return parse_config(TrainConfig, [f"--{k}={v}" for k, v in words.items()], "train")[0]

fit(config(), HERE / "a")
run = Run(HERE / "a")
steps = run.metrics()
print(len(steps), "steps; keys of a step line:", ", ".join(sorted(steps[0])))

# %%
assert [s["global_step"] for s in steps] == list(range(1, 41)) and [s["consumed_samples"] for s in steps] == list(range(12, 492, 12))
assert abs(steps[0]["loss"] - math.log(257)) < 0.1  # knows nothing at first
assert steps[-1]["loss"] < steps[0]["loss"] - 1 and all(s["lr"] > 0 for s in steps)
assert [e["after"] for e in run.events() if e["event"] == "state"][-1] == "finish"
assert len({s["batch_hash"] for s in steps}) == 40

# %%
evals = run.metrics("eval")
fig, axes = plt.subplots(1, 3, figsize=(7, 2.2))
axes[0].plot([s["global_step"] for s in steps], [s["loss"] for s in steps], label="training")
axes[0].plot([e["global_step"] for e in evals], [e["loss"] for e in evals], "o", label="held out")
axes[0].set(xlabel="step", ylabel="loss (nats per token)")
axes[0].legend()
axes[1].plot([s["global_step"] for s in steps], [s["lr"] for s in steps])
axes[1].set(xlabel="step", ylabel="learning rate")
axes[2].plot([s["global_step"] for s in steps], [s["update_norm"] / s["param_norm"] for s in steps])
axes[2].set(xlabel="step", ylabel="update / weights", yscale="log")
plt.show()

# %% [markdown]
# What to see: the loss starts at $\ln 257 = 5.55$, as it must for a model that knows nothing; the ratio of update to weights follows the rate, from three parts in a hundred at its peak to two in a thousand at the end of this run.
#
# ## Stopped and resumed is the same run
# The same configuration, but stopped after step 23 by a request and gone on with in a second call. Weights, optimizer and losses must have the same bits.

# %%
from scalelab.trainer.checkpoint import load_tensors

def same_end(a, b):
    "Are all tensors of the latest checkpoints of two runs bit-identical?"
    x, y = (load_tensors(resolve(r, "latest")) for r in (a, b))
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)

fit(config(trainer__stop_at=23), HERE / "b")
assert not same_end(HERE / "a", HERE / "b")
fit(config(), HERE / "b")
assert same_end(HERE / "a", HERE / "b")
assert [s["loss"] for s in Run(HERE / "b").metrics()] == [s["loss"] for s in steps]

# %% [markdown]
# A stop was polite. SIGKILL is not: the process dies at the start of step 27, with its last checkpoint at step 20, and is started again.

# %%
words = [f"--{k}={v}" for k, v in {"data.train": HERE / "train", "data.valid": HERE / "valid"}.items()]
(HERE / "c.yaml").write_text(dump_yaml(config().to_dict()))
command = [sys.executable, "-m", "scalelab.trainer.loop", "--config", str(HERE / "c.yaml"), "--run", str(HERE / "c")]
first = subprocess.run([*command, "--inject", "kill@27"], capture_output=True)
assert first.returncode == -signal.SIGKILL, first.stderr[-500:]
second = subprocess.run(command, capture_output=True)
assert second.returncode == 0, second.stderr[-500:]
assert same_end(HERE / "a", HERE / "c")
killed = Run(HERE / "c")
print([(e["event"], e["reason"]) for e in killed.events() if e["event"] in ("start", "resume")], "attempts in the log:", sorted({r["attempt"] for r in killed.rows()}))

# %% [markdown]
# ## Accumulation and the weight of a token
# Other micro-batches, the same update: the gradient is a sum over tokens, so its pieces may be cut anywhere. In double precision the losses agree to the last digits; with each micro-batch's own mean (the usual
# defect) they would not.

# %%
curves = {}
for micro in (12, 4, 1):
    fit(config(precision="fp64", trainer__micro_batch=micro, trainer__steps=12, trainer__stop_at=12, trainer__checkpoint_every=12, trainer__eval_every=0, data__packing="best_fit"), HERE / f"m{micro}")
    curves[micro] = np.array([s["loss"] for s in Run(HERE / f"m{micro}").metrics()])
worst = {m: float(np.abs(c - curves[12]).max()) for m, c in curves.items()}
assert max(worst.values()) < 1e-9
print("micro-batches of 4 rows and of 1 agree with one of 12 rows to 1e-9")

# %% [markdown]
# ## A poisoned gradient is skipped, and said
# A NaN at step 5: the update is left out on all ranks, the weights stay finite, the log says which batch.

# %%
fit(config(inject="nan_gradient@5", trainer__steps=10, trainer__checkpoint_every=10, trainer__eval_every=0), HERE / "n")
line = Run(HERE / "n").metrics()[4]
event = next(e for e in Run(HERE / "n").events() if e["event"] == "skip")
assert line["skipped"] and line["update_norm"] == 0 and line["grad_norm"] != line["grad_norm"] and event["batch_hash"] == line["batch_hash"]
assert all(torch.isfinite(v).all() for v in load_tensors(resolve(HERE / "n", "latest")).values() if v.is_floating_point())
try:
    fit(config(inject=",".join(f"nan_gradient@{s}" for s in range(3, 9)), trainer__max_skips=3), HERE / "n3")
except CheckFailed as error:
    print(str(error).replace(str(HERE), "…"))
else:
    raise AssertionError("a run that only skips went on")

# %% [markdown]
# ## Refusals
# What can't work is refused before anything is written: other shards on resume, a frozen key, a folder in use, a tokenizer of another vocabulary, a corpus smaller than one batch.

# %%
def refusal(**kw):
    "The error of a fit, shortened; fails if there is none."
    resume, place = kw.pop("resume", "auto"), kw.pop("place", "a")
    try:
        fit(config(**kw), HERE / place, resume)
    except UsageError as error:
        return str(error).replace(str(HERE), "…")
    raise AssertionError(f"accepted {kw}")

for kw in ({"optim__lr": 0.1}, {"data__train": HERE / "valid", "trainer__global_batch": 12}, {"resume": "never"}, {"data__train": HERE / "nowhere", "place": "x"},
           {"model__vocab_size": 100, "place": "x"}, {"trainer__global_batch": 4000, "place": "x"}):
    print("-", refusal(**kw)[:150])
assert not (HERE / "x" / "metrics.jsonl").exists()

# %% [markdown]
# ## The command
# `python -m scalelab.trainer.loop`, `torchrun … -m scalelab.trainer.loop` and `scalelab train` are one program. torchrun has a trap: it takes our `--run` for an abbreviation of its own `--run-path` and refuses it, though the word
# stands behind the module's name. So write `torchrun … -m scalelab.trainer.loop -- --run DIR`, or use the other name of the key, `--run_dir`.

# %%
#| export
FLAGS = {
    "--run": {"type": str, "default": None, "help": "run directory; made if missing, gone on with if it holds a run; under torchrun write --run_dir, since torchrun takes --run for its own --run-path"},
    "--resume": {"type": str, "default": "auto", "help": "auto: newest checkpoint that verifies; never: a new run only; or a checkpoint folder"},
    "--init_from": {"type": str, "default": None, "help": "HF directory (Llama layout) whose weights a new run starts from"},
    "--dry_run": {"action": "store_true", "help": "print parameters, tokens and memory per rank, and stop"},
    "--json": {"action": "store_true", "help": "print one JSON object on stdout"},
}


def _translated(tree: dict, where: str) -> dict:
    if not is_foreign(tree):
        return tree
    ours, notes = translate(tree, where)
    for note in notes:
        print(f"scalelab: {where}: {note}", file=sys.stderr)
    claimed = dry_run(parse_config(TrainConfig, [f"--{k}={v}" for k, v in _flat(ours).items()], where)[0])["parameters"]
    print(f"scalelab: {where}: {ours['model']['n_layers']} layers of {ours['model']['d_model']} are {human_count(claimed)} parameters", end="", file=sys.stderr)
    print(" (about 1.3 B, not the 3 B that the article calls it)" if 1.2e9 < claimed < 1.5e9 else "", file=sys.stderr)
    return ours


def _flat(tree: dict) -> dict:
    from scalelab.core.arguments import flatten

    return flatten(tree)


def train_command(argv: list[str], prog: str = "scalelab train") -> int:
    "Parse, then train or print the dry run. Raises UsageError and CheckFailed; see run_main."
    argv = ["--run" + w[len("--run_dir"):] if w == "--run_dir" or w.startswith("--run_dir=") else w for w in argv]  # torchrun refuses --run
    cfg, flags = parse_config(TrainConfig, argv, prog, "Train a decoder on shards. Under torchrun every rank runs this.", FLAGS, _translated)
    if flags["dry_run"]:
        plan = dry_run(cfg)
        print(json.dumps(plan) if flags["json"] else "\n".join(describe(plan)))
        return 0
    if not flags["run"]:
        raise UsageError("--run DIR is missing: the folder that the run is written to")
    validate(cfg, int(os.environ.get("WORLD_SIZE", 1)))
    world = init_world(cfg.trainer.device, cfg.parallel.timeout_s)
    try:
        result = fit(cfg, flags["run"], flags["resume"], flags["init_from"], world)
        if world.is_main:
            print(json.dumps(result) if flags["json"] else f"{flags['run']}: step {result['global_step']}, {human_count(result['consumed_tokens'])} tokens")
        return 0
    finally:
        close_world(world)


def main(argv: list[str] | None = None) -> int:
    "Entry of `python -m scalelab.trainer.loop`; the exit code."
    argv = sys.argv[1:] if argv is None else argv
    return run_main(lambda: train_command(argv, "scalelab.trainer.loop"), debug="--debug" in argv)


# %%
def shell(*words):
    "Exit code, stdout and stderr of the command."
    done = subprocess.run([sys.executable, "-m", "scalelab.trainer.loop", *words], capture_output=True, text=True)
    return done.returncode, done.stdout.strip(), done.stderr.strip()

code, out, err = shell("--config", "gpu24", "--dry_run")
assert code == 0 and "parameters" in out
print(out)
code, out, err = shell("--config", "loop", "--run_dir", str(HERE / "r"))
assert code == 2 and "data.train" in err  # --run_dir was understood: the next thing missing is the data
code, out, err = shell("--config", "loop", "--model.n_layer", "3")
assert code == 2 and "did you mean 'model.n_layers'" in err and not out
print(err)

# %%
#| export
#| eval: false
if __name__ == "__main__":
    raise SystemExit(main())

# %% [markdown]
# ## Where the time goes
# The loop's own work (logging, norms, hashing) beside the model's. A reader of metrics can see it in any run: the data wait is a share of the step.

# %%
share = [s["data_seconds"] / s["step_seconds"] for s in steps[5:]]
assert np.median(share) < 0.2  # a share, not a time: shards in the page cache against a model this small
print("the data wait is below a fifth of a step")

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-resume: after a resume the run is the same | holds with everything in the state | bit-identical after a polite stop and after SIGKILL |
# | B-accum: 4 micro-batches equal one large batch | holds if backward runs on each and losses are weighted by tokens | losses equal to 1e-9 in fp64 for micro-batches of 12, 4 and 1 rows |
# | B-accum, the text: backward once after 4 forwards | does not hold: it holds four graphs at once | counted in the parallel chapter (4.0 times as much held); the loop runs backward on each |
# | A-feed: data must arrive at 1.2 times the rate of consumption | open: the loop logs what is needed to see it, a knee was not looked for | data wait below a fifth of a step here |
#
# Not covered yet: FSDP, asynchronous checkpoints, rollback, monitors, exporters, more evaluations.

# %%
#| hide
TMP.cleanup()
