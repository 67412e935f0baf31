"""The GPU check: `pytest tests/test_gpu.py` on any machine with a GPU. Without one it skips, whatever SCALELAB_REQUIRE_ALL says."""
from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from scalelab.data.shards import ShardWriter
from scalelab.trainer.checkpoint import load_tensors, resolve

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    "Random but learnable byte documents."
    folder, rng = tmp_path_factory.mktemp("gpu"), np.random.default_rng(0)
    for split, n in (("train", 300), ("valid", 20)):
        with ShardWriter(folder / split, "bytes", 257, 256) as w:
            for _ in range(n):
                start = int(rng.integers(0, 200))
                w.add((start + 3 * np.arange(int(rng.integers(20, 200)))) % 251, 100, "text")
    return folder


def train(shards, run, *words, ranks=1):
    "Steps of a run of `scalelab train`."
    base = [f"--run_dir={run}", f"--data.train={shards}/train", f"--data.valid={shards}/valid", "--data.seq_len=64", "--model.max_seq_len=64", "--model.d_model=64",
            "--model.n_layers=2", "--model.d_ff=128", "--trainer.steps=20", "--trainer.global_batch=8", "--trainer.micro_batch=2", "--schedule.warmup_steps=4",
            "--trainer.eval_every=10", "--trainer.eval_rows=8", "--trainer.checkpoint_every=10"]
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([sys.executable, *launcher, "-m", "scalelab.trainer.loop", *base, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r for r in rows if r["kind"] == "step"]


def test_gpu_agrees_with_cpu(shards, tmp_path):
    "The same run on both devices: fp32 losses of the first steps to 1e-3 (other summation orders, TF32 off), fp64 to 1e-8."
    for precision, tolerance, n in (("fp32", 1e-3, 10), ("fp64", 1e-8, 20)):
        runs = {d: train(shards, tmp_path / f"{d}-{precision}", f"--trainer.device={d}", f"--precision={precision}") for d in ("cpu", "cuda")}
        worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(runs["cpu"][:n], runs["cuda"][:n]))
        assert worst < tolerance, (precision, worst)
        assert [r["batch_hash"] for r in runs["cpu"]] == [r["batch_hash"] for r in runs["cuda"]]


def test_bf16_learns_and_reports_memory(shards, tmp_path):
    "bf16 autocast with fp32 master weights: stays near fp32, and the memory column is the allocator's."
    wide, narrow = (train(shards, tmp_path / p, "--trainer.device=cuda", f"--precision={p}") for p in ("fp32", "bf16"))
    assert abs(wide[-1]["loss"] - narrow[-1]["loss"]) < 0.1 and narrow[-1]["loss"] < narrow[0]["loss"] - 0.3
    assert 0 < narrow[-1]["memory_bytes"] < torch.cuda.get_device_properties(0).total_memory


def test_resume_on_gpu_is_bit_identical(shards, tmp_path):
    "Stopped at step 13 and gone on with, against undisturbed."
    words = ("--trainer.device=cuda", "--precision=bf16", "--model.dropout=0.1")
    train(shards, tmp_path / "a", *words)
    train(shards, tmp_path / "b", *words, "--trainer.stop_at=13")
    train(shards, tmp_path / "b", *words)
    a, b = (load_tensors(resolve(tmp_path / r, "latest")) for r in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_agree_with_one(shards, tmp_path):
    "nccl: the same batches, losses to 1e-8 in fp64."
    one = train(shards, tmp_path / "1", "--precision=fp64")
    two = train(shards, tmp_path / "2", "--precision=fp64", ranks=2)
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(one, two)) < 1e-8
