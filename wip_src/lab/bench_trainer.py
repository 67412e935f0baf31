# %% [markdown]
# # The trainer against its peers
#
# > What a checkpoint costs beside `torch.save`, and what the training loop adds to the bare model step.
#
# Two things make people write their own loop: the fear that a framework costs speed, and the fear that a careful checkpoint costs minutes. Both are measured here, against the shortest code that does the same.

# %%
#| default_exp lab.bench_trainer

# %%
#| export
from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from scalelab.lab.bench import row, turns

# %% [markdown]
# ## Checkpoints
# Writing model and Adam state with checksums and syncs, against `torch.save` with the same syncs; and reading with every checksum compared.

# %%
#| export
def bench_trainer_checkpoint(quick: bool, data: Path | None = None) -> list[dict]:
    """Write and read a checkpoint with checksums, against torch.save and torch.load; wall seconds, since disks are waited for."""
    from scalelab.model.transformer import Decoder, ModelConfig, Tokens
    from scalelab.trainer.checkpoint import TrainState, load_tensors, save_checkpoint
    from scalelab.trainer.optim import OptimConfig, build_optimizer

    model = Decoder(ModelConfig(vocab_size=8192, d_model=256 if quick else 512, n_layers=4, n_heads=8, n_kv_heads=8, d_ff=0, max_seq_len=64))
    optimizer = build_optimizer(model, OptimConfig())
    loss, _ = model.loss(Tokens(torch.zeros((1, 8), dtype=torch.int64), torch.zeros((1, 8), dtype=torch.int64)))
    loss.backward()
    optimizer.step()
    size = 12 * sum(p.numel() for p in model.parameters())
    seconds: dict[str, list[float]] = {k: [] for k in ("ours", "torch", "read", "torch read")}
    with tempfile.TemporaryDirectory(dir=os.environ.get("SCALELAB_BENCH_DIR")) as folder:
        for k in range(3 if quick else 6):
            for name in seconds:
                begin = time.perf_counter()
                if name == "ours":
                    path = save_checkpoint(Path(folder) / "c", model, optimizer, TrainState(global_step=k))
                elif name == "torch":
                    with open(Path(folder) / "t.pt", "wb") as f:
                        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f)
                        os.fsync(f.fileno())
                elif name == "read":
                    load_tensors(path)
                else:
                    torch.load(Path(folder) / "t.pt", weights_only=True)
                seconds[name].append(time.perf_counter() - begin)
    m = {k: float(np.median(v[1:])) for k, v in seconds.items()}
    return [
        row("ours / torch.save, both synced", m["ours"] / m["torch"], "x", "torch.save + fsync", "<= 1.2", m["ours"] <= 1.2 * m["torch"]),
        row("ours with checksums / torch.load", m["read"] / m["torch read"], "x", "torch.load(weights_only=True)", "<= 1.5", m["read"] <= 1.5 * m["torch read"]),
        row("written", size / 1e6 / m["ours"], "MB/s", "", "report", True),
    ]


# %% [markdown]
# ## The loop's own weight
# What the training loop adds to the bare model step: hashing, norms, logging. Same model, same batches, in turns.

# %%
#| export
def bench_trainer_overhead(quick: bool, data: Path | None = None) -> list[dict]:
    """Tokens per second of the training loop against the bare model step on the same batches."""
    from scalelab.core.arguments import parse_config
    from scalelab.data.shards import ShardWriter
    from scalelab.distributed.parallel import World
    from scalelab.trainer.loop import prepare, train_step
    from scalelab.trainer.settings import TrainConfig

    rng, steps = np.random.default_rng(0), 4 if quick else 10
    with tempfile.TemporaryDirectory() as folder:
        with ShardWriter(Path(folder) / "s", "bench", 4096, 0) as w:
            for n in rng.integers(50, 500, 600):
                w.add(rng.integers(1, 4096, n), int(n) * 3, "text")
        words = {"data.train": f"{folder}/s", "model.n_layers": 4, "model.d_model": 256, "model.d_ff": 0, "trainer.global_batch": 8, "trainer.micro_batch": 8, "trainer.device": "cpu", "trainer.steps": 1000, "schedule.warmup_steps": 10}
        cfg, _ = parse_config(TrainConfig, [f"--{k}={v}" for k, v in words.items()], "bench")
        (Path(folder) / "run").mkdir()
        t, logs, _ = prepare(cfg, Path(folder) / "run", World(), "never", None)

        def looped():
            for _ in range(steps):
                logs.metric("step", **train_step(t))

        def bare():
            for k in range(steps):
                batch = t.stream.batch(k * 8, 8)
                t.optimizer.zero_grad(set_to_none=True)
                loss, n = t.model(batch)
                (loss / n).backward()
                t.optimizer.step()

        got = turns({"bare": bare, "loop": looped}, 3 if quick else 7)
        logs.close()
    return [row("bare step / training loop, CPU per step", got["bare"] / got["loop"], "x", "forward, backward, AdamW", ">= 0.97", got["bare"] >= 0.97 * got["loop"])]


# %%
rows = bench_trainer_overhead(quick=True)
assert len(rows) == 1 and np.isfinite(rows[0]["value"]) and 0.3 < rows[0]["value"] < 2

# %% [markdown]
# The saved results of the full runs stand in the chapter *Measurements side by side*.
