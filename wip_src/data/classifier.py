# %% [markdown]
# # A small classifier of text
#
# > Is this text good or bad? The weights of its runs of characters are summed and become a probability.
#
# Large models judge text well and slowly. The second article filters large corpora with a small classifier and calls
# it fast (B-cls). Ours is logistic regression over hashed character n-grams: no tokenizer, no vocabulary, one scheme
# for Chinese and English, and a file that holds one array of numbers.

# %%
#| default_exp data.classifier

# %%
#| export
from __future__ import annotations

import functools
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import xxhash

from scalelab.core.config import UsageError, atomic_write
from scalelab.data.features import LEVELS, SHAPES, Batch, buckets, gram_counts, lay_out, shape_levels
from scalelab.data.recipe import DocumentStage, Outcome
from scalelab.data.roc import fit_platt, sigmoid

# %%
#| hide
import pickle
import random
import tempfile

import matplotlib.pyplot as plt
from IPython.display import Markdown

from scalelab.core.plotting import style
from scalelab.data.documents import read_documents
from scalelab.data.features import PIECE
from scalelab.data.roc import auc, interval, roc
from scalelab.lab.runner import load_verdicts, verdict_table

style()

# %% [markdown]
# ## The model
# For a piece with $m$ n-grams at the places $h_1 \dots h_m$ the logit is
#
# $$z = b + \frac{1}{\sqrt{m}} \sum_i w_{h_i}$$
#
# and, if shapes are asked for, a weight for each class of the shape. Dividing by the root keeps the features'
# norm at about one, as in TF-IDF. Platt's two numbers turn $z$ into a probability, $p = \sigma(\alpha z +
# \beta)$; they are fitted on texts that the weights have not seen, because on those that they have seen the
# weights are too sure of themselves.
#
# A model file is a NumPy archive without pickle, with its metadata as JSON and a checksum over all of it. Loading an
# unknown file can fail, but it can't run anything.

# %%
#| export
def _checksum(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    state = xxhash.xxh3_128(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(arrays):
        state.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}".encode())
        state.update(np.ascontiguousarray(arrays[name]).data)
    return state.hexdigest()


def save_model(path: str | Path, kind: str, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    "Write arrays and JSON-able metadata to an .npz file, atomically, with a checksum over everything."
    meta = meta | {"kind": kind, "format": 1}
    meta = json.loads(json.dumps(meta))  # what will be read is what is hashed
    header = json.dumps(meta | {"checksum": _checksum(meta, arrays)}, sort_keys=True).encode()
    buffer = BytesIO()
    np.savez_compressed(buffer, header=np.frombuffer(header, np.uint8), **arrays)
    atomic_write(path, buffer.getvalue())


def load_model(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    "(metadata, arrays) of a file that `save_model` wrote; UsageError for any other, a damaged one, another kind."
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(arrays.pop("header").tobytes())
        stated = meta.pop("checksum")
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file; expected a {kind} model") from error
    except (OSError, ValueError, KeyError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"{path}: can't be read as a {kind} model ({error}); train it again") from error
    if stated != _checksum(meta, arrays):
        raise UsageError(f"{path}: the checksum does not match, the file is damaged; copy it again or train again")
    if meta.get("kind") != kind or meta.get("format") != 1:
        found = f"{meta.get('kind')} (format {meta.get('format')})"
        raise UsageError(f"{path}: holds a model of kind {found}, expected {kind} (format 1)")
    return meta, arrays


# %%
def refused(call, *words):
    "The message of the UsageError that `call` raises; it holds `words`."
    try:
        call()
    except UsageError as error:
        assert all(w in str(error) for w in words), str(error)
        return str(error)
    raise AssertionError("accepted")

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "m.npz"
    save_model(file, "test", {"made_of": "天"}, {"a": np.arange(5000.0)})
    meta, arrays = load_model(file, "test")
    assert meta["made_of"] == "天" and (arrays["a"] == np.arange(5000)).all()
    first = file.read_bytes()
    save_model(file, "test", {"made_of": "天"}, {"a": np.arange(5000.0)})
    assert file.read_bytes() == first, "the same model is the same file"
    refused(lambda: load_model(file, "classifier"), "kind test")
    for k in range(0, len(first), len(first) // 40):  # one bit at forty places: harmless (a zip's dates) or refused
        file.write_bytes(first[:k] + bytes([first[k] ^ 1]) + first[k + 1 :])
        try:
            assert (load_model(file, "test")[1]["a"] == np.arange(5000)).all()
        except UsageError as error:
            assert "m.npz" in str(error)
    file.write_bytes(first[: len(first) // 2])
    refused(lambda: load_model(file, "test"), "can't be read")
    np.savez(file, header=np.array([{}], dtype=object))
    refused(lambda: load_model(file, "test"), "can't be read")
    refused(lambda: load_model(Path(folder) / "none.npz", "test"), "no such file")

# %%
#| export
def _piece_logits(batch: Batch, weights: np.ndarray, orders: Sequence[int]) -> np.ndarray:
    "Sum of weights over n-grams and shapes of each piece, without the bias, float64 [pieces]."
    bits = len(weights).bit_length() - 1
    total = np.zeros(len(batch.code), np.float32)
    for place, crossing in buckets(batch, orders, bits):
        value = weights[place]
        value[crossing] = 0
        total[: len(value)] += value
    logits = np.add.reduceat(total.astype(np.float64), batch.starts) / np.sqrt(gram_counts(batch, orders))
    if len(weights) > 2**bits:
        logits += weights[_shape_places(batch, bits)].sum(axis=1, dtype=np.float64)
    return logits


def _shape_places(batch: Batch, bits: int) -> np.ndarray:
    "Places of the shape's weights, behind those of the n-grams, int64 [pieces, 5]."
    return 2**bits + np.arange(len(SHAPES)) * LEVELS + shape_levels(batch)


# %%
#| hide
_ones = _piece_logits(lay_out(["天地", "x"], False), np.ones(2**16, np.float32), (1, 2))
assert np.allclose(_ones, [7**0.5, 5**0.5])
assert np.allclose(_piece_logits(lay_out(["天地"], False), np.ones(2**16 + 40, np.float32), (1, 2)), 7**0.5 + 5)

# %%
#| export
@dataclass
class TextClassifier:
    """Logistic regression over hashed character n-grams.

    weights: float32 [2**bits], 40 more with shapes; bias; platt: (slope, offset) of the calibration;
    orders: lengths of the n-grams; fold: ignore case and width; meta: what it was trained on.
    """

    weights: np.ndarray
    bias: float = 0.0
    platt: tuple[float, float] = (1.0, 0.0)
    orders: tuple[int, ...] = (1, 2, 3, 4)
    fold: bool = False
    meta: dict[str, Any] = field(default_factory=dict)

    def logits(self, texts: Sequence[str], batch_chars: int = 200_000) -> np.ndarray:
        "Uncalibrated logit float64 [n] of each text; memory grows with `batch_chars` and the longest text only."
        out, first, size = [], 0, 0
        for i, text in enumerate(texts):
            size += len(text)
            if size >= batch_chars or i + 1 == len(texts):
                batch = lay_out(texts[first : i + 1], self.fold)
                piece = _piece_logits(batch, self.weights, self.orders) * batch.lengths
                out.append(np.bincount(batch.owner, piece) / np.bincount(batch.owner, batch.lengths) + self.bias)
                first, size = i + 1, 0
        return np.concatenate(out) if out else np.empty(0)

    def score(self, texts: str | Sequence[str]) -> float | np.ndarray:
        "Probability of the label 1, calibrated: a float for one text, float64 [n] for several."
        p = sigmoid(self.platt[0] * self.logits([texts] if isinstance(texts, str) else texts) + self.platt[1])
        return float(p[0]) if isinstance(texts, str) else p

    def save(self, path: str | Path) -> None:
        "Write an .npz file with a checksum."
        meta = {"bias": self.bias, "platt": list(self.platt), "orders": list(self.orders), "fold": self.fold}
        save_model(path, "classifier", meta | {"meta": self.meta}, {"weights": self.weights})

    @classmethod
    def load(cls, path: str | Path) -> TextClassifier:
        "Read what `save` wrote; UsageError for anything else."
        meta, arrays = load_model(path, "classifier")
        orders = tuple(meta["orders"])
        return cls(arrays["weights"], meta["bias"], tuple(meta["platt"]), orders, meta["fold"], meta["meta"])


# %%
draw = np.random.default_rng(0)
BITS = 16
toy = TextClassifier(draw.normal(size=2**BITS).astype(np.float32), bias=0.3)

def slow_logit(model, text):
    "The formula, one n-gram at a time."
    padded = f"\n{text}\n"
    grams = [padded[i : i + n] for n in model.orders for i in range(len(padded) - n + 1)]
    place = [int(list(buckets(Batch(np.array([ord(c) for c in g], np.uint32), np.zeros(1, np.int64),
             np.array([len(g)]), np.zeros(1, np.int64)), [len(g)], BITS))[0][0][0]) for g in grams]
    return model.bias + model.weights[place].astype(float).sum() / len(grams) ** 0.5

texts = ["天地玄黄", "", "a", "hello, world", "\ud800 lone"]
assert np.allclose(toy.logits(texts), [slow_logit(toy, t) for t in texts], atol=1e-5)
assert np.allclose(toy.logits(texts, batch_chars=1), toy.logits(texts)) and len(toy.logits([])) == 0
assert toy.score("天地") == toy.score(["x", "天地"])[1]
long = "落霞与孤鹜齐飞。" * 3000
assert abs(toy.score(long) - toy.score(long[: PIECE - 2])) < 0.05, "length alone changes nothing"

# %% [markdown]
# ## Training
# Three ingredients, all old and cheap. *Naive Bayes scaling* (Wang and Manning, 2012): a feature starts with the
# log-ratio of how often it stands in the two classes, so that common but meaningless n-grams are quiet from the
# start. *AdaGrad*: every weight has its own rate, and rare features keep a large one. *L2*: weights are pulled
# towards zero. The scaling is folded into the weights at the end, so scoring pays nothing for it.

# %%
#| export
@dataclass
class _Examples:
    "Features of all pieces: place [features], first [pieces + 1], label, weight and scale (of n-grams) [pieces]."

    place: np.ndarray
    first: np.ndarray
    label: np.ndarray
    weight: np.ndarray
    scale: np.ndarray


def _examples(
    texts: Sequence[str], labels: np.ndarray, orders: Sequence[int], bits: int, fold: bool, shapes: bool = False
) -> _Examples:
    batch = lay_out(texts, fold)
    piece_of = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    places, pieces = [], []
    for place, crossing in buckets(batch, orders, bits):
        places.append(np.delete(place, crossing).astype(np.int32))
        pieces.append(np.delete(piece_of[: len(place)], crossing))
    counts = gram_counts(batch, orders)
    if shapes:
        places.append(_shape_places(batch, bits).ravel().astype(np.int32))
        pieces.append(np.repeat(np.arange(len(counts)), len(SHAPES)))
    order = np.argsort(np.concatenate(pieces), kind="stable")
    first = np.concatenate([[0], np.cumsum(counts + shapes * len(SHAPES))])
    return _Examples(
        np.concatenate(places)[order], first, labels[batch.owner].astype(np.float64),
        1 / np.bincount(batch.owner)[batch.owner], 1 / np.sqrt(counts),
    )


def _log_ratio(e: _Examples, size: int) -> np.ndarray:
    "Naive Bayes: log of the frequency of each feature in class 1 over that in class 0, float64 [size]."
    counts = np.diff(e.first)
    one = np.bincount(e.place, np.repeat(e.label * e.weight, counts), size) + 1
    zero = np.bincount(e.place, np.repeat((1 - e.label) * e.weight, counts), size) + 1
    return np.log(one / one.sum()) - np.log(zero / zero.sum())


# %%
e = _examples(["ab", "b"], np.array([1, 0]), (1, 2), 16, False)
assert np.diff(e.first).tolist() == [7, 5] and e.label.tolist() == [1, 0] and np.allclose(e.scale, [7**-0.5, 5**-0.5])
ratio = _log_ratio(e, 2**16)
shaped = _examples(["ab", "b"], np.array([1, 0]), (1, 2), 16, False, shapes=True)
assert np.diff(shaped.first).tolist() == [12, 10] and (shaped.place >= 2**16).sum() == 10
only_in_one, in_both = ratio[e.place[1]], ratio[e.place[2]]  # the letters a and b; every count begins at one
assert abs(only_in_one - np.log(2)) < 1e-3 and abs(in_both) < 1e-3

# %%
#| export
def _adagrad(e: _Examples, ratio: np.ndarray, epochs: int, rate: float, l2: float, seed: int, batch: int = 64):
    "(weights float64 with the scaling folded in, bias) after `epochs` passes over shuffled batches."
    draw, w, seen = np.random.default_rng(seed), np.zeros(len(ratio)), np.full(len(ratio), 1e-8)
    bias, seen_bias, counts, shapes_from = 0.0, 1e-8, np.diff(e.first), 1 << (len(ratio).bit_length() - 1)
    for _ in range(epochs):
        order = draw.permutation(len(counts))
        for some in np.array_split(order, max(1, len(order) // batch)):
            within = np.repeat(np.arange(len(some)), counts[some])
            position = np.arange(counts[some].sum()) + np.repeat(
                e.first[some] - np.cumsum(counts[some]) + counts[some], counts[some])
            place = e.place[position]
            x = ratio[place] * np.where(place < shapes_from, e.scale[some][within], 1)
            error = (sigmoid(np.bincount(within, w[place] * x, len(some)) + bias) - e.label[some]) * e.weight[some]
            touched, back = np.unique(place, return_inverse=True)
            gradient = np.bincount(back, error[within] * x) / len(some) + l2 * w[touched]
            seen[touched] += gradient**2
            w[touched] -= rate * gradient / np.sqrt(seen[touched])
            seen_bias += error.mean() ** 2
            bias -= rate * error.mean() / seen_bias**0.5
    return w * ratio, float(bias)


# %%
weights, bias = _adagrad(_examples(["ab", "b"] * 40, np.array([1, 0] * 40), (1, 2), 16, False), ratio, 20, 0.1, 0.0, 0)
assert abs(weights[e.place[1]]) > 5 * abs(weights[e.place[2]]) and weights[e.place[1]] > 0, "a means 1, b means nothing"

# %%
#| export
def train_classifier(
    texts: Sequence[str], labels: Sequence[int], tune: tuple[Sequence[str], Sequence[int]] | None = None, *,
    bits: int = 20, orders: tuple[int, ...] = (1, 2, 3, 4), fold: bool = False, shapes: bool = False, epochs: int = 6,
    rate: float = 0.1, l2: float = 1e-5, seed: int = 0, meta: dict[str, Any] | None = None,
) -> TextClassifier:
    """Train on `texts` with `labels` 0 and 1; calibrate on `tune`, or on a tenth of the texts that is set aside.

    orders: lengths of the n-grams; fold: ignore case and width; shapes: look at the shape of the page too.
    Deterministic for a seed. Memory is about 25 bytes an n-gram; texts are features once, not once per epoch.
    Raises UsageError when a class is missing.
    """
    y = np.asarray(labels, np.int64)
    if len(texts) != len(y) or set(np.unique(y)) != {0, 1}:
        found = f"{len(texts)} texts, {len(y)} labels, of them " + (", ".join(map(str, np.unique(y)[:5])) or "none")
        raise UsageError(f"training: {found}; expected one label 0 or 1 for each text, and both of them")
    if tune is None:
        aside = np.zeros(len(y), bool)
        for label in (0, 1):  # the same share of both
            members = np.random.default_rng([seed, label]).permutation(np.flatnonzero(y == label))
            aside[members[: max(1, len(members) // 10)]] = len(members) > 1
        tune = [t for t, a in zip(texts, aside) if a], y[aside]
        texts, y = [t for t, a in zip(texts, aside) if not a], y[~aside]
    e = _examples(texts, y, orders, bits, fold, shapes)
    ratio = _log_ratio(e, 2**bits + shapes * len(SHAPES) * LEVELS)
    weights, bias = _adagrad(e, ratio, epochs, rate, l2, seed)
    model = TextClassifier(weights.astype(np.float32), bias, (1.0, 0.0), tuple(orders), fold)
    held, labels = model.logits(list(tune[0])), np.asarray(tune[1], np.int64)
    if len(set(labels.tolist())) == 2:
        model.platt = fit_platt(held, labels)
    model.meta = {"trained_on": len(y), "calibrated_on": len(labels), "share_of_ones": float(y.mean()), "seed": seed}
    model.meta |= meta or {}
    return model


# %% [markdown]
# A small trial. Paragraphs of good prose from the samples, and the same paragraphs with their characters shuffled: no
# single character gives the difference away, only runs can. Whole documents go to one side, so that no paragraph's
# twin is tested.

# %%
docs = [d for name in ("zh_prose", "en_prose", "legal", "dialogue")
        for d in read_documents(f"../../data_samples/{name}.jsonl")]
rng = random.Random(0)

def shuffled(text):
    letters = list(text)
    rng.shuffle(letters)
    return "".join(letters)

part = {"train": ([], []), "test": ([], [])}
for k, doc in enumerate(docs):
    side = part["test" if k % 3 == 0 else "train"]
    for paragraph in filter(lambda p: len(p) > 30, doc["text"].split("\n")):
        side[0].extend((paragraph, shuffled(paragraph)))
        side[1].extend((0, 1))
model = train_classifier(*part["train"], bits=18)
again = train_classifier(*part["train"], bits=18)
scores, truth = model.score(part["test"][0]), np.array(part["test"][1])
assert (model.weights == again.weights).all() and model.platt == again.platt, "trained twice, the same to the last bit"
print(f"{len(part['train'][0])} paragraphs trained on, {len(truth)} tested,"
      f" {((scores > 0.5) == truth).mean():.1%} right at 0.5")
assert ((scores > 0.5) == truth).mean() > 0.9
refused(lambda: train_classifier(["a", "b"], [1, 1]), "expected one label")
lines = ["\n".join([shuffled("天地玄黄宇宙洪荒")] * 6) for _ in range(60)] + [shuffled("天地玄黄宇宙洪荒" * 6) for _ in range(60)]
by_shape = train_classifier(lines, [1] * 60 + [0] * 60, bits=14, shapes=True)
new_lines = ["全新的一行文字", "远处有座灯塔", "雨下了整晚呢", "猫在屋顶睡觉", "明早出海捕鱼", "带上干粮和水"]
assert len(by_shape.weights) == 2**14 + 40
once, again = by_shape.score(["\n".join(new_lines), "\n".join(new_lines[:1] * 6)])
assert again > once, "lines never seen, but repeated"
with tempfile.TemporaryDirectory() as folder:
    model.save(Path(folder) / "shuffled.npz")
    loaded = TextClassifier.load(Path(folder) / "shuffled.npz")
    assert (loaded.score(part["test"][0]) == scores).all() and loaded.meta == model.meta

# %% [markdown]
# ## How good is it?
# The chapter before this one has the means: the area under the ROC curve, and its interval from resampled texts.

# %%
low, high = interval(auc, scores, truth, draws=300)
print(f"AUC on shuffled paragraphs {auc(scores, truth):.3f}, 95% interval {low:.3f} to {high:.3f}")

# %%
curve = roc(scores, truth)
fig, (left, right) = plt.subplots(1, 2, figsize=(7, 2.5))
left.plot(curve.fpr, curve.recall)
left.set(xlabel="false positive rate", ylabel="recall", title="ROC", xlim=(-0.02, 1), ylim=(0, 1.02))
edges = np.quantile(scores, np.linspace(0, 1, 7))
which = np.clip(np.searchsorted(edges, scores, "right") - 1, 0, 5)
right.plot([0, 1], [0, 1], color="0.6", lw=0.8)
right.plot([scores[which == w].mean() for w in range(6)], [truth[which == w].mean() for w in range(6)], "o-")
right.set(xlabel="mean probability given", ylabel="share that is shuffled", title="Calibration")
plt.show()

# %% [markdown]
# What to see: on the left, how little recall is paid for few false positives. On the right, whether a probability
# may be taken at its word: points on the diagonal mean that of the texts given 0.9, nine in ten are what they
# were called.
#
# ## The stage
# In a recipe the model is a file. Its probability is written into the document, where deduplication with `keep: best`
# finds it.

# %%
#| export
@functools.lru_cache(maxsize=4)
def _loaded(path: str) -> TextClassifier:
    return TextClassifier.load(path)


@dataclass
class Classifier(DocumentStage):
    """Judge a document by a trained text classifier.

    Args:
        model: file that `TextClassifier.save` wrote
        threshold: probability at which a document is removed
        remove: side of the threshold that is removed: below (the model knows good text) or above (it knows bad text)
        column: column that the probability is written to; empty for none
    """

    name: ClassVar[str] = "classifier"
    model: str = ""
    threshold: float = 0.5
    remove: str = "below"
    column: str = "quality"

    def __post_init__(self):
        if not self.model:
            raise UsageError("stages.classifier.model: a file is needed; train_classifier(...).save(FILE) makes one")
        if self.remove not in ("below", "above"):
            raise UsageError(f"stages.classifier.remove: {self.remove!r} is neither below nor above")
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"stages.classifier.threshold: {self.threshold} is outside 0 to 1")
        _loaded(self.model)  # a missing or damaged file is found before the first document

    def apply(self, doc: dict) -> Outcome:
        "The document with its probability, or None with `classifier_below` or `classifier_above`."
        p = _loaded(self.model).score(doc["text"])
        values = {"classifier": p}
        if p < self.threshold if self.remove == "below" else p > self.threshold:
            note = f"probability {p:.3f}, limit {self.threshold:g}"
            return Outcome(None, f"classifier_{self.remove}", note, values)
        return Outcome(doc | {self.column: round(p, 4)} if self.column else doc, values=values)


# %%
with tempfile.TemporaryDirectory() as folder:
    file = str(Path(folder) / "shuffled.npz")
    model.save(file)
    stage = pickle.loads(pickle.dumps(Classifier(file, remove="above", column="damage")))
    longest = 2 * int(np.argmax([len(t) for t in part["test"][0][::2]]))
    good, bad = part["test"][0][longest : longest + 2]
    kept, gone = stage.apply({"text": good}), stage.apply({"text": bad})
    assert kept.document["damage"] < 0.5 and gone.reason == "classifier_above" and "limit 0.5" in gone.note
    assert Classifier(file, column="").apply({"text": bad}).document == {"text": bad}
    refused(lambda: Classifier(file, threshold=2), "outside 0 to 1")
    refused(lambda: Classifier(file, remove="both"), "neither below")
refused(lambda: Classifier(), "a file is needed")
refused(lambda: Classifier("no/such.npz"), "no such file")

# %% [markdown]
# ## Verdict
# `scalelab bench data-quality` trains this classifier and measures it on dirty against clean text; what it found:

# %%
#| echo: false
Markdown(verdict_table([v for v in load_verdicts("..") if v["id"] == "B-cls"]))

# %% [markdown]
# What this does not cover: words are not weighted by meaning, so a fluent lie scores as good text; and a model knows
# only the kinds of bad text that it was shown.
