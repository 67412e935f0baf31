"""The two recipes as a user meets them, the claim that one is faster, shapes of equal cost, and what is refused before it is built."""
from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch

import support
from scalelab.core.config import UsageError
from scalelab.lab.ablation import INGREDIENTS, ablate, arms
from scalelab.lab.bench_gpu import bench_gpu
from scalelab.lab.recipes import Trainer, changed, recipe, step_costs, time_to_loss, training_text
from scalelab.model.shape import cost_ratio, depth_ladder, mlp_arms, tying_arms
from scalelab.model.transformer import Decoder, ModelConfig, parameters_by_formula
from support import options

SMALL = {"model.d_model": 64, "model.n_layers": 2, "model.n_heads": 2, "model.n_kv_heads": 2, "data.seq_len": 64, "trainer.global_batch": 8}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    "Shards of the standard library's text: train and valid."
    torch.set_num_threads(1)
    return training_text(None, tmp_path_factory.mktemp("text"), 1.0, 512)


@pytest.mark.parametrize("name", ["nanogpt", "fast"])
def test_a_recipe_trains_by_the_command(name, call, shards, tmp_path):
    "`scalelab train --config model/NAME` with fewer steps: it runs to its end, loses loss, and stands in the folder with the recipe's own keys."
    words = {"run": tmp_path / "run", "data.train": shards / "train", "data.valid": shards / "valid", "trainer.steps": 30, "schedule.warmup_steps": 8,
             "trainer.device": "cpu", "trainer.threads": 1, "trainer.eval_rows": 8, "data.seq_len": 64} | ({"schedule.decay_steps": 15} if name == "fast" else {})
    call("train", "--config", f"model/{name}", *options(words)).ok()
    steps = support.steps(tmp_path / "run")
    assert len(steps) == 30 and sum(steps[k]["loss"] for k in range(26, 31)) / 5 < steps[1]["loss"] - 0.3
    manifest = json.loads((support.last_checkpoint(tmp_path / "run") / "manifest.json").read_text())
    assert "muon" in json.dumps(manifest) or name == "nanogpt"


def test_the_lab_trains_as_the_command_does(call, shards, tmp_path):
    "Losses of the lab's lean loop are those of the real loop, for both recipes."
    from scalelab.data.shards import Shards

    for name in ("nanogpt", "fast"):
        keys = {"trainer.steps": 6, "schedule.warmup_steps": 2, "data.seq_len": 64, "trainer.global_batch": 4} | ({"schedule.decay_steps": 3} if name == "fast" else {})
        out = tmp_path / name
        call("train", "--config", f"model/{name}", *options({"run": out, "data.train": shards / "train", "trainer.device": "cpu", "trainer.threads": 1, "trainer.micro_batch": 4} | keys)).ok()
        lean = Trainer(changed(recipe(name), keys), Shards(shards / "train"), seed=0)
        losses = [lean.step() for _ in range(6)]
        real = [r["loss"] for _, r in sorted(support.steps(out).items())]
        assert max(abs(a - b) for a, b in zip(losses, real)) < 1e-4, (name, losses, real)


def test_fast_is_faster_on_other_text(text, tmp_path):
    "On text that the recipes were not chosen on, at another width and row: at half the CPU seconds `fast` ends below `nanogpt`."
    train, valid = text
    nano, fast = (changed(recipe(name), SMALL | {"trainer.steps": n, "schedule.warmup_steps": 4} | ({"schedule.decay_steps": 20} if name == "fast" else {})) for name, n in (("nanogpt", 80), ("fast", 40)))
    found = time_to_loss(nano, fast, train, valid, [0], tmp_path / "log.jsonl", fractions=(0.5,))
    assert found["bits_per_byte"]["fast 0.5"][0] < found["bits_per_byte"]["nanogpt"][0]
    assert 0.3 < found["share"]["fast 0.5"] < 0.7
    before = (tmp_path / "log.jsonl").read_bytes()
    again = time_to_loss(nano, fast, train, valid, [0], tmp_path / "log.jsonl", fractions=(0.5,))
    assert (tmp_path / "log.jsonl").read_bytes() == before and again["bits_per_byte"] == found["bits_per_byte"]


def test_an_ablation_goes_on_where_it_stopped(text, tmp_path):
    "Two arms, two seeds; a second call with a third seed keeps costs and runs of the first; arms get steps in the inverse of their cost."
    train, valid = text
    tiny = SMALL | {"model.d_model": 32, "model.n_heads": 1, "model.n_kv_heads": 1, "trainer.steps": 8, "schedule.warmup_steps": 2, "schedule.decay_steps": 4}
    configs = {name: changed(arms("remove")[name], tiny) for name in ("base", "Muon")}
    first = ablate(configs, train, valid, [0, 1], tmp_path / "a.jsonl", 8)
    rows = (tmp_path / "a.jsonl").read_text().splitlines()
    third = ablate(configs, train, valid, [0, 1, 2], tmp_path / "a.jsonl", 8)
    assert (tmp_path / "a.jsonl").read_text().splitlines()[:4] == rows and len(rows) == 4
    assert third["step_seconds"] == first["step_seconds"] and third["bits_per_byte"]["base"][:2] == first["bits_per_byte"]["base"]
    mean, low, high = third["difference"]["Muon"]
    assert low <= mean <= high and third["steps"]["base"] == 8
    assert abs(third["steps"]["Muon"] - 8 * first["step_seconds"]["base"] / first["step_seconds"]["Muon"]) <= 0.51


def test_costs_are_told_apart(text):
    "Twice the rows cost about twice, measured in turns."
    one = changed(recipe("nanogpt"), SMALL)
    cost = step_costs({"8": one, "16": changed(one, {"trainer.global_batch": 16}), "8 again": one}, text[0], rounds=7)
    assert 1.4 < cost["16"] / cost["8"] < 2.8 and 0.7 < cost["8 again"] / cost["8"] < 1.4, cost


def test_every_arm_of_the_ablation_can_be_trained(text):
    "Five updates of each: no ingredient makes a model that can't be built, and no two arms compute the same."
    train = text[0]
    for direction in ("remove", "add"):
        seen = set()  # the last of five losses; with zero init the first two do not depend on much
        for name, cfg in arms(direction).items():
            run = Trainer(changed(cfg, SMALL | {"trainer.steps": 6, "schedule.warmup_steps": 1, "schedule.decay_steps": 5 if cfg.schedule.kind == "wsd" else 0}), train)
            seen.add([round(run.step(), 6) for _ in range(5)][-1])
        assert len(seen) == len(INGREDIENTS) + 1, (direction, len(seen))


def test_equal_cost_over_random_shapes():
    "Ladders and MLPs of equal cost for a hundred random models, against counting the real parameters of some of them."
    draw = random.Random(0)
    for k in range(100):
        head = draw.choice([16, 32, 64])
        heads = draw.randint(1, 12)
        cfg = ModelConfig(draw.choice([512, 4096, 50257]), head * heads, draw.randint(1, 24), heads, heads, 0, 512, mlp=draw.choice(["swiglu", "gelu", "relu2"]), positions=draw.choice(["rope", "learned"]))
        for depth, shape in depth_ladder(cfg, (1, cfg.n_layers, 2 * cfg.n_layers), 512).items():
            near = [cost_ratio(s, cfg, 512) for s in (shape,)]
            assert shape.n_layers == depth and shape.head_dim == head and (shape == cfg or depth != cfg.n_layers)
            assert abs(math.log(near[0])) < 0.7 or shape.n_heads == 1
        mlps = mlp_arms(cfg)
        sizes = [parameters_by_formula(c)["mlp"] for c in mlps.values()]
        assert max(sizes) - min(sizes) <= 3 * cfg.n_layers * cfg.d_model
        if k % 20 == 0 and cfg.vocab_size == 512:
            for shape in (*mlps.values(), *tying_arms(cfg).values()):
                assert sum(p.numel() for p in Decoder(shape).parameters()) == parameters_by_formula(shape)["total"]


@pytest.mark.parametrize("key, value, words", [
    ("model.n_heads", 5, ("model.n_heads", "nearest valid: 4")),
    ("model.n_kv_heads", 3, ("model.n_kv_heads", "nearest valid")),
    ("model.d_ff", -1, ("model.d_ff", "nearest valid: 0")),
    ("model.vocab_size", 300, ("model.vocab_size", "smaller than the tokenizer's 600")),
    ("model.mlp", "relu3", ("mlp", "relu2")),
    ("optim.kind", "muno", ("kind", "muon")),
    ("data.seq_len", 512, ("data.seq_len", "max_seq_len 256")),
])
def test_impossible_recipes_are_refused(key, value, words, call, shards, tmp_path):
    "One line, exit code 2, nothing written."
    base = {"run": tmp_path / "run", "data.train": shards / "train", "trainer.device": "cpu", key: value}
    call("train", "--config", "model/fast", *options(base)).refused(*words)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_unknown_recipes_and_directions():
    with pytest.raises(UsageError, match="did you mean 'fast'"):
        recipe("fats")
    with pytest.raises(UsageError, match="remove, add"):
        arms("swap")
    with pytest.raises(UsageError, match=r"model\.n_heads"):
        changed(recipe("fast"), {"model.n_heads": 7})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_gpu_bench_says_that_there_is_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELAB_BENCH_DIR", str(tmp_path))
    (only,) = bench_gpu(False, None)
    assert only["peers"].startswith("skipped: torch sees no GPU") and not only["holds"] and not list(tmp_path.iterdir())


def test_recipes_are_in_the_package():
    "The files that a wheel would hold, by the patterns of pyproject.toml."
    import tomllib

    patterns = tomllib.loads((support.ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["scalelab"]
    shipped = {p.relative_to(support.ROOT / "scalelab").as_posix() for pattern in patterns for p in (support.ROOT / "scalelab").glob(pattern)}
    assert {"recipes/model/fast.yaml", "recipes/model/nanogpt.yaml"} <= shipped and Path(sys.executable).exists()
