"""Precision with real processes: scales that agree across ranks, policies under DDP and FSDP2, checkpoints of a scaler, whole models compiled, casts against torch."""
from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from scalelab.core.config import UsageError
from scalelab.model.transformer import Decoder, Tokens, layout
from scalelab.precision.formats import FORMATS, round_to
from scalelab.precision.memory import memory_by_formula
from scalelab.precision.nonfinite import find_nonfinite, first_nonfinite
from scalelab.precision.policy import POLICIES, apply_policy, autocast_for, policy_of
from scalelab.precision.recompute import checkpoint_blocks
from scalelab.precision.scaler import LossScaler, make_scaler
from support import environment

SIZES = dict(vocab_size=200, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=32)
IDS = torch.randint(200, (4, 32), generator=torch.Generator().manual_seed(0))
BATCH = Tokens(IDS, IDS.roll(-1, 1))
HEAD = """
import json, sys, torch
import torch.distributed as dist
from scalelab.distributed.parallel import agree_finite, close_world, init_world, wrap
from scalelab.model.transformer import Decoder, Tokens, layout
from scalelab.precision.policy import apply_policy, autocast_for, fsdp_precision, policy_of, reduce_by
from scalelab.precision.scaler import LossScaler, make_scaler
SIZES = dict(vocab_size=200, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=32)
ids = torch.randint(200, (4, 32), generator=torch.Generator().manual_seed(0))
world = init_world("cpu", meet_s=60)
mine = ids[world.rank * 2 : world.rank * 2 + 2] if world.world_size == 2 else ids
batch, n = Tokens(mine, mine.roll(-1, 1)), ids.numel() / world.world_size
def say(value): print("SAID " + json.dumps({"rank": world.rank} | value), flush=True)
"""


def ranks(script: str, tmp_path, n: int = 2) -> list[dict]:
    "What every rank of a script said, by rank."
    file = tmp_path / "script.py"
    file.write_text(HEAD + script + "\nclose_world(world)\n", encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), str(file)], capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line.split("SAID ", 1)[1]) for line in done.stdout.splitlines() if "SAID " in line]
    return sorted(said, key=lambda s: s["rank"])


def gradient(policy="fp32", name="llama", recompute="none") -> tuple[float, torch.Tensor]:
    policy = policy_of(policy)
    model, scaler = checkpoint_blocks(apply_policy(Decoder(layout(name, **SIZES)), policy), recompute), make_scaler(policy)
    with autocast_for(policy):
        total, n = model(BATCH)
    (total / n * scaler.scale).backward()
    scaler.unscale_(model.parameters())
    return float(total.detach() / n), torch.cat([p.grad.flatten() for p in model.parameters()])


def test_every_16_and_8_bit_value_and_a_million_random_ones():
    patterns = torch.randint(-(2**31), 2**31, (1_000_000,), generator=torch.Generator().manual_seed(1)).to(torch.int32).view(torch.float32)
    for f in FORMATS.values():
        if f.dtype is None or f.name == "fp32":
            continue
        bits = 1 + f.exponent_bits + f.mantissa_bits
        every = torch.arange(2**bits).to(torch.uint8 if bits == 8 else torch.uint16).view(f.dtype).float()
        for x in (every, patterns):
            ours, theirs = round_to(x, f.name), x.to(f.dtype).float()
            assert bool(((ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())).all()), f.name


@pytest.mark.parametrize("name", ["llama", "nanogpt", "fast"])
def test_twins_err_as_their_originals(name):
    "An emulated policy's gradient is as far from fp32's as the real policy's, and not the same."
    _, exact = gradient("fp32", name)
    for policy in ("bf16", "fp16", "article"):
        real, twin = (float((gradient(p, name)[1] - exact).norm() / exact.norm()) for p in (policy, f"{policy}_emulated"))
        assert 1e-5 < real < 0.05 and 0.5 < twin / real < 1.6, (policy, real, twin)


def test_two_ranks_skip_together_and_keep_one_scale(tmp_path):
    "Rank 1 alone overflows at step 2: both skip it, both halve, weights stay equal."
    said = ranks("""
model = wrap(apply_policy(Decoder(layout("llama", **SIZES)), "fp16_emulated"), world)
optimizer, scaler, took = torch.optim.SGD(model.parameters(), lr=0.1), LossScaler(2.0**12, growth_interval=3), []
for step in range(6):
    optimizer.zero_grad()
    total, _ = model(batch)
    (total / n * scaler.scale).backward()
    if step == 2 and world.rank == 1:
        next(model.parameters()).grad[0, 0] = float("inf")
    scaler.unscale_(model.parameters())
    norm = float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
    took.append(scaler.update(agree_finite(world, norm == norm and norm < float("inf")), norm))
    if took[-1]:
        optimizer.step()
say({"took": took, "state": scaler.state_dict(), "sum": sum(float(p.double().sum()) for p in model.parameters())})
""", tmp_path)
    a, b = said
    assert a["took"] == b["took"] == [True, True, False, True, True, True]
    assert a["state"] == b["state"] and a["state"]["scale"] == 2.0**12 and a["sum"] == b["sum"] and math.isfinite(a["sum"])


def test_policies_under_ddp_and_fsdp2_agree_with_one_process(tmp_path):
    "The same gradient from two ranks: to fp32 accuracy for emulated policies, to the format's for a real one and for a narrow reduction."
    said = ranks("""
from torch.distributed.fsdp import fully_shard
out = {}
for name in ("fp32", "bf16", "article", "article_emulated"):
    model = wrap(apply_policy(Decoder(layout("llama", **SIZES)), name), world)
    with autocast_for(name):
        total, _ = model(batch)
    (total / n).backward()
    out["ddp " + name] = torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()
    model = apply_policy(Decoder(layout("llama", **SIZES)), name)
    for block in model.blocks:
        fully_shard(block, mp_policy=fsdp_precision(name, "block", "norm"))
    fully_shard(model, mp_policy=fsdp_precision(name, "embedding", "head", "norm"))
    with autocast_for(name):
        total, _ = model(batch)
    (total / n).backward()
    out["fsdp2 " + name] = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]).tolist()
narrow = policy_of({"name": "narrow", "base": "fp32", "reduction": "bf16"})
model = reduce_by(wrap(apply_policy(Decoder(layout("llama", **SIZES)), narrow), world), narrow)
total, _ = model(batch)
(total / n).backward()
out["reduction"] = torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()
if world.is_main:
    say({"gradients": out})
""", tmp_path)
    found = {k: torch.tensor(v) for k, v in said[0]["gradients"].items()}
    for name in ("fp32", "bf16", "article", "article_emulated"):
        policy = name if name != "article" else policy_of({"name": "plain", "base": "article", "scale": 1.0})
        _, one = gradient(policy if name != "article_emulated" else policy_of({"name": "plain", "base": name, "scale": 1.0}))
        limit = {"fp32": 1e-5, "article_emulated": 0.02, "bf16": 0.02, "article": 0.02}[name]
        for kind in ("ddp", "fsdp2"):
            assert float((found[f"{kind} {name}"] - one).norm() / one.norm()) < limit, (kind, name)
    off = float((found["reduction"] - found["ddp fp32"]).norm() / found["ddp fp32"].norm())
    assert 1e-4 < off < 2**-7  # rounded once to bf16


def test_a_checkpointed_scaler_goes_on_where_it_was():
    a = LossScaler(growth_interval=4)
    for step in range(9):
        a.update(step != 5)
    b = LossScaler()
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    for step in range(20):
        a.update(step % 7 != 3), b.update(step % 7 != 3)
    assert a == b


@pytest.mark.parametrize("policy", ["bf16", "article", "fp16_emulated", "fp8_emulated"])
def test_blocks_compile_to_one_graph_with_the_same_numbers(policy):
    "fullgraph=True fails on any graph break; the gradient is that of the eager block."
    torch._dynamo.reset()
    model = apply_policy(Decoder(layout("fast", **SIZES)), policy)
    block, x = model.blocks[0], torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0))
    grads = []
    for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        with autocast_for(policy):
            run(x, None, None, None, x).float().square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in block.parameters()]))
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 1e-2


def test_recomputed_gradients_are_equal_under_policies():
    for policy in ("bf16", "article"):
        plain = gradient(policy)[1]
        assert all(torch.equal(gradient(policy, recompute=r)[1], plain) for r in ("full", "selective"))


def test_first_bad_step_is_named():
    model = apply_policy(Decoder(layout("llama", **SIZES)), "fp16_emulated")
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[3, 5] = float("inf")
    assert first_nonfinite(model).module == "blocks.1.mlp.down"
    found = find_nonfinite(model, lambda: model(BATCH)[0] / 128)
    assert (found.kind, found.module, found.role) == ("output", "blocks.1.mlp.down", "block")


@pytest.mark.parametrize("wrong, words", [
    ("bf61", "did you mean 'bf16'"), ({"name": "x", "haed": "fp32"}, "did you mean 'head'"), ({"name": "x", "block": "fp16"}, "set scaler: overflow"),
    ({"name": "x", "norm": "fp8"}, "precision.norm"), ({"name": "x", "base": "bf16", "optimizer": "bf16"}, "nearest valid: fp32"), ({"name": "x", "scaler": "overfow"}, "did you mean 'overflow'"),
])
def test_wrong_policies_are_refused_by_name(wrong, words):
    with pytest.raises(UsageError, match=words.replace("'", ".")):
        policy_of(wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_fp8_without_a_gpu_is_refused_before_anything_is_built():
    with pytest.raises(UsageError, match="fp8_emulated to study it"):
        apply_policy(Decoder(layout("llama", **SIZES)), "fp8", "cpu")


def test_all_named_policies_are_valid_and_estimated():
    cfg = layout("llama", **SIZES)
    for name, policy in POLICIES.items():
        assert policy_of(name) == policy and policy_of({"base": name, "name": name}) == policy
        assert memory_by_formula(cfg, 2, 32, name).total > 0
    assert replace(POLICIES["bf16"], name="fp32", block="fp32", head="fp32") == POLICIES["fp32"]
