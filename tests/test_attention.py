"""Every kind of attention in a whole decoder: against the dense oracle, packed and alone, trained, cached, exported, refused."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from scalelab.core.config import UsageError
from scalelab.data.shards import ShardWriter
from scalelab.model import attention, transformer
from scalelab.model.attention import KINDS, Mask, dense_attention, dense_mask, flex_attention, gathered_blocks
from scalelab.model.generate import generate
from scalelab.model.hf import load_hf, save_hf
from scalelab.model.linear_attention import FEATURES, linear_attention, linear_by_formula, linear_features
from scalelab.model.transformer import Decoder, KVCache, ModelConfig, Tokens
from scalelab.trainer.checkpoint import load_tensors, resolve

from support import TINY, TRAINER, options, run, steps

SHAPE = ModelConfig(vocab_size=80, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=192)
SPARSE = {
    "window": {"window": 17}, "window of one": {"attention": "window", "window": 1}, "window as long as the row": {"attention": "window", "window": 192},
    "window_global": {"window": 11, "global_tokens": 4}, "bigbird": {"window": 9, "global_tokens": 2, "random_blocks": 2, "attention_block": 8},
}
ALL = SPARSE | {"linear": {}, "performer": {"features": 24}, "causal": {}}


def shape(name: str) -> ModelConfig:
    return replace(SHAPE, **{"attention": name} | ALL[name])


def batch(length: int, packed: bool, rows: int = 2, seed: int = 0) -> Tokens:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(80, (rows, length + 1), generator=g)
    if not packed:
        return Tokens(ids[:, :-1], ids[:, 1:])
    docs = (torch.rand(rows, length, generator=g) < 0.05).cumsum(1)
    place = torch.arange(length)
    start = attention.document_starts(docs)
    return Tokens(ids[:, :-1], ids[:, 1:], place - start, docs)


def loss_and_gradients(model: Decoder, rows: Tokens) -> list[torch.Tensor]:
    model.zero_grad()
    loss, n = model(rows)
    (loss / n).backward()
    return [loss.detach() / n, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SPARSE)
def test_decoder_equals_the_dense_oracle(name, packed, monkeypatch):
    "Loss and the gradient of every weight, gathered blocks against a dense mask, lengths that no block divides."
    model = Decoder(shape(name), seed=1)
    for length in (1, 31, 128, 150, 192):
        rows = batch(length, packed, seed=length)
        ours = loss_and_gradients(model, rows)
        with monkeypatch.context() as m:
            m.setattr(transformer, "plan_attention", lambda mask, n, docs, device: dense_mask(mask, n, docs, device))
            theirs = loss_and_gradients(model, rows)
        assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs)) < 1e-5


@pytest.mark.parametrize("kind", KINDS[1:])
def test_every_seed_and_block_size_against_the_formula(kind):
    "Random shapes: what a few chosen cases may miss."
    rng = np.random.default_rng(7)
    for _ in range(40):
        length, window, g = int(rng.integers(1, 200)), int(rng.integers(1, 80)), int(rng.integers(0, 9))
        mask = Mask(kind, window, g, int(rng.integers(0, 4)), int(rng.choice([4, 8, 16])), int(rng.integers(100)))
        docs = torch.from_numpy((rng.random((2, length)) < rng.choice([0.0, 0.02, 0.2])).cumsum(1))
        q, k, v = torch.from_numpy(rng.normal(size=(3, 2, 2, length, 8)))
        plan = gathered_blocks(mask, length, docs, block=int(rng.choice([16, 32, 128])))
        torch.testing.assert_close(plan(q, k, v), dense_attention(q, k, v, mask, docs), atol=1e-12, rtol=0, msg=str((mask, length)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_flex_rule_is_the_same_mask(kind):
    mask, (q, k, v) = Mask(kind, 20, 3, 2, 16), torch.randn(3, 2, 2, 150, 16, generator=torch.Generator().manual_seed(0))
    docs = batch(150, True).document_ids
    for ids in (None, docs):
        with torch.no_grad():
            assert (flex_attention(mask, 150, ids)(q, k, v) - dense_attention(q, k, v, mask, ids)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", FEATURES)
def test_linear_equals_the_quadratic_form(kind):
    for length, chunk in ((1, 64), (63, 64), (64, 64), (200, 64), (200, 7)):
        for packed in (False, True):
            rows = batch(length, packed, seed=length)
            leaves = [[x.clone().requires_grad_() for x in torch.randn(3, 2, 2, length, 8, generator=torch.Generator().manual_seed(1))] for _ in "ab"]
            results = []
            for way, (q, k, v) in zip((linear_by_formula, lambda *a: linear_attention(*a, chunk=chunk)[0]), leaves):
                y = way(linear_features(q, kind, query=True), linear_features(k, kind), v, rows.document_ids)
                results.append([y.detach(), *torch.autograd.grad(y.square().sum(), (q, k, v))])
            assert max(float((a - b).abs().max() / a.abs().max().clamp_min(1)) for a, b in zip(*results)) < 1e-5


@pytest.mark.parametrize("name", ALL)
def test_the_future_and_other_documents_change_nothing(name):
    model, rows = Decoder(shape(name), seed=2).double(), batch(150, True, rows=1)
    with torch.no_grad():
        before = model.logits(model.hidden(rows))
        for place in (1, 40, 64, 100, 149):
            ids = rows.input_ids.clone()
            ids[0, place] = (ids[0, place] + 1) % 80
            moved = (model.logits(model.hidden(replace(rows, input_ids=ids))) != before).any(-1)[0]
            same = rows.document_ids[0] == rows.document_ids[0, place]
            assert moved[place] and not moved[~same].any() and not moved[:place].any(), (name, place)


@pytest.mark.parametrize("name", ALL)
def test_the_cache_changes_nothing(name):
    "Pieces of any size give the logits of the full pass to 1e-5; a windowed cache stays small; greedy text is equal."
    model = Decoder(shape(name), seed=3)
    ids = batch(150, False).input_ids
    with torch.no_grad():
        whole = model.logits(model.hidden(ids))
        for pieces in (1, 7, 150, [40] + [1] * 60 + [50]):
            cache = KVCache(model.cfg, 2)
            parts = torch.cat([model.logits(model.hidden(part, cache)) for part in ids.split(pieces, 1)], 1)
            assert (parts - whole).abs().max() < 1e-5, pieces
            full = KVCache(replace(SHAPE), 2).nbytes
            assert cache.nbytes < full / 5 if name in ("window", "window_global", "window of one") else cache.nbytes <= full
    text = ids[0, :20].tolist()
    made = generate(model, text, 30, greedy=True)
    with torch.no_grad():
        for token in made:
            assert int(model.logits(model.hidden(torch.tensor([text])))[0, -1].argmax()) == token
            text.append(token)


def test_memory_grows_with_the_length_and_no_faster():
    def kept(mask, length):
        plan, seen = gathered_blocks(mask, length), {}
        leaves = [torch.zeros(1, 2, length, 16, requires_grad=True) for _ in "qkv"]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) and t, lambda t: t):
            plan(*leaves)
        return sum(seen.values())

    for mask in (Mask("window", 128), Mask("window_global", 128, 16), Mask("bigbird", 128, 16, 2, 64)):
        small, large = kept(mask, 1024), kept(mask, 8192)
        assert large < 8.5 * small, mask


def test_dropout_and_checkpointing_go_with_every_kind():
    for name in ALL:
        model, rows = Decoder(replace(shape(name), dropout=0.1), seed=4), batch(100, True)
        results = []
        for again in (False, True):
            model.activation_checkpointing = again
            torch.manual_seed(0)
            results.append(loss_and_gradients(model, rows))
        assert all(torch.equal(a, b) for a, b in zip(*results)), name


def test_a_training_run_with_a_window(tmp_path):
    "The trainer takes the keys, its checkpoint loads, the loss falls, and the export is a Mistral."
    with ShardWriter(tmp_path / "train", "bytes", 257, 256) as w:
        for n in range(60):
            w.add((n + 3 * np.arange(100)) % 251, 100, "text")
    words = TINY | {"data.train": tmp_path / "train", "model.attention": "window", "model.window": 16, "trainer.checkpoint_every": 20}
    run([*TRAINER, *options(words | {"run_dir": tmp_path / "run"})]).ok()
    losses = [s["loss"] for s in steps(tmp_path / "run").values()]
    assert losses[-1] < losses[0] - 0.3
    assert any(k.endswith("blocks.0.attention.q.weight") for k in load_tensors(resolve(tmp_path / "run", "latest")))
    run([*TRAINER, *options(words | {"model.window": 65, "run_dir": tmp_path / "b"})]).refused("model.window", "nearest valid: 64")


def test_export_and_return(tmp_path):
    model = Decoder(shape("window"), seed=5)
    back, _ = load_hf(save_hf(tmp_path / "m", model))
    assert back.cfg == model.cfg and all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters()))
    for name in ("window_global", "bigbird", "linear", "performer"):
        with pytest.raises(UsageError, match="full causal attention and a window alone can be exported"):
            save_hf(tmp_path / name, Decoder(shape(name)))
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize(("values", "words"), [
    ({"attention": "windw"}, "did you mean 'window'"), ({"attention": "window"}, "usual: 192"), ({"attention": "window", "window": 193}, "nearest valid: 192"),
    ({"window": 8}, "without effect"), ({"attention": "window", "window": True}, "whole number"), ({"attention": "linear", "global_tokens": 2}, "without effect"),
    ({"attention": "bigbird", "window": 8, "random_blocks": 1, "attention_block": 0}, "attention_block"), ({"attention": "window_global", "window": 8}, "nearest valid: 1"),
])
def test_refused_at_configuration_time(values, words):
    with pytest.raises(UsageError, match=words):
        ModelConfig.from_dict(SHAPE.to_dict() | values)


def test_old_configurations_mean_causal():
    old = {k: v for k, v in SHAPE.to_dict().items() if k not in ("attention", "window", "global_tokens", "random_blocks", "attention_block", "features")}
    assert ModelConfig.from_dict(old) == SHAPE
