# %% [markdown]
# # Too surprising, too predictable
#
# > Damaged text costs a model of good text many bits, templates and repetition cost it few; both ends are cut.
#
# The second article says that both very high and very low perplexity mark bad text (B-ppl). Perplexity depends on the
# tokenizer; bits per byte do not, so that is our unit. The model here is the n-gram model of the chapter before; a
# trained language model can take its place, because all that is asked of a scorer is a number for a text.

# %%
#| default_exp data.perplexity

# %%
#| export
from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from scalelab.core.config import UsageError
from scalelab.data.documents import detect_language
from scalelab.data.ngrams import NgramModel
from scalelab.data.recipe import DocumentStage, Outcome

# %%
#| hide
import pickle
import random
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import Markdown

from scalelab.core.plotting import COLORS, style
from scalelab.data.documents import read_documents, stdlib_documents
from scalelab.data.ngrams import train_ngrams
from scalelab.lab.runner import load_verdicts, verdict_table

style()

# %% [markdown]
# ## What text costs
# Trained on half of the samples and of the standard library's own documentation, asked about the other half: the
# texts as they are, their characters shuffled, read with the wrong encoding, one line of them again and again.

# %%
samples = [d for name in ("zh_prose", "en_prose", "dialogue")
           for d in read_documents(f"../../data_samples/{name}.jsonl")]
library = [d for d in stdlib_documents(1_500_000) if d["domain"] == "docs" and len(d["text"]) > 300]
pool = sorted(samples + library, key=lambda d: d["id"])
random.Random(1).shuffle(pool)
model = train_ngrams((d["text"] for d in pool[::2]), bits=18)
rng = random.Random(0)
shuffle = lambda text: "".join(rng.sample(text, len(text)))
wrong_decoder = lambda text: text.encode().decode("latin-1")
repeat = lambda text: max(text.split("\n")[:5], key=len)[:60] * 12
kinds = {"clean": str, "shuffled": shuffle, "UTF-8 as Latin-1": wrong_decoder, "one line, 12 times": repeat}
cost = defaultdict(list)
for doc in pool[1::2]:
    for kind, change in kinds.items():
        if (doc["lang"], kind) != ("en", "UTF-8 as Latin-1"):
            text = change(doc["text"][:1500])
            cost[doc["lang"], kind].append(model.both(text))
cost = {key: np.array(values) for key, values in cost.items()}
for (lang, kind), values in sorted(cost.items()):
    alone, cached = np.median(values, axis=0)
    print(f"{lang} {kind:20} bits per byte {alone:5.2f}, with the cache {cached:5.2f} (medians of {len(values)})")

# %%
fig, axes = plt.subplots(1, 2, figsize=(6.6, 2.6), sharey=True)
for ax, lang in zip(axes, ("zh", "en")):
    for color, kind in zip(COLORS, kinds):
        if (lang, kind) in cost:
            ax.plot(*cost[lang, kind].T, ".", color=color, label=kind)
    ax.set(xlabel="bits per byte", title={"zh": "Chinese", "en": "English"}[lang], xscale="log", yscale="log")
axes[0].set_ylabel("with the cache")
axes[0].legend(fontsize=7)
plt.show()
middle = {kind: np.median(cost["en", kind], axis=0) for kind in kinds if ("en", kind) in cost}
assert middle["shuffled"][0] > 2 * middle["clean"][0] and middle["one line, 12 times"][1] < 0.5 * middle["clean"][1]

# %% [markdown]
# What to see: damage lies to the right of clean text, repetition below it, in both languages, but at different
# numbers: a Chinese character is three bytes. A single limit for both languages would cut one of them wrongly.
#
# ## Limits from clean text
# So the limits come from quantiles, by language, of clean text that the model was not trained on. A language of which
# fewer than fifty texts were seen has no quantiles of its own; the quantiles over all texts stand in.

# %%
#| export
Scorer = Callable[[str], float]  # text -> bits per byte
Quantiles = dict[str, list[float]]  # language -> quantiles of clean text
_GRID = np.linspace(0, 1, 201)


def quantiles_of(scorer: Scorer, docs: Iterable[Mapping[str, Any]], least: int = 50) -> Quantiles:
    """201 quantiles of the bits per byte of clean documents, by language; "" holds those of all together.

    Raises UsageError for fewer than `least` documents.
    """
    scores: dict[str, list[float]] = defaultdict(list)
    for doc in docs:
        score = scorer(doc["text"])
        scores[""].append(score)
        scores[doc.get("lang") or detect_language(doc["text"], doc.get("domain"))].append(score)
    if len(scores[""]) < least:
        raise UsageError(f"quantiles of clean text: {len(scores[''])} documents, expected at least {least}")
    return {
        lang: [round(float(q), 4) for q in np.quantile(values, _GRID)]
        for lang, values in sorted(scores.items()) if len(values) >= least
    }


# %%
by_length = quantiles_of(lambda text: float(len(text)), [{"text": "天" * k, "lang": "zh"} for k in range(101)])
assert by_length["zh"][100] == by_length[""][100] == 50 and len(by_length["zh"]) == 201
assert set(quantiles_of(len, [{"text": "x", "lang": "en"}] * 60 + [{"text": "天", "lang": "zh"}] * 9)) == {"", "en"}

# %%
#| export
def calibrate(model: NgramModel, docs: Sequence[Mapping[str, Any]], least: int = 50) -> None:
    """Store in the model the quantiles of clean documents that it was not trained on.

    By side: "high" holds bits without the cache, "low" those with it.
    """
    model.quantiles = {"high": quantiles_of(model, docs, least), "low": quantiles_of(model.with_cache, docs, least)}


def limit_of(quantiles: Quantiles, lang: str, share: float) -> float:
    "Bits per byte below which `share` of the clean text of a language lies; of all texts where it is unknown."
    return float(np.interp(share, _GRID, quantiles.get(lang) or quantiles[""]))


def strangeness(scores: tuple[float, float], quantiles: dict[str, Quantiles], lang: str, side: str = "both") -> float:
    """How far (bits without, bits with the cache) lie outside: 0 is the clean median, 1 the edge of the middle 90%.

    side: "high" looks at the first, above its median; "low" at the second, below; "both" at the worse of the two.
    """
    high, middle = limit_of(quantiles["high"], lang, 0.95), limit_of(quantiles["high"], lang, 0.5)
    above = (scores[0] - middle) / max(high - middle, 1e-6)
    low, middle = limit_of(quantiles["low"], lang, 0.05), limit_of(quantiles["low"], lang, 0.5)
    below = (middle - scores[1]) / max(middle - low, 1e-6)
    return float({"both": max(above, below), "high": above, "low": below}[side])


# %%
clean = [d | {"text": d["text"][:1500]} for d in pool[1::2]]
calibrate(model, clean, least=20)
assert set(model.quantiles["high"]) >= {"", "en", "zh"} and len(model.quantiles["low"]["zh"]) == 201
low, high = limit_of(model.quantiles["low"], "en", 0.01), limit_of(model.quantiles["high"], "en", 0.99)
inside = np.mean((cost["en", "clean"][:, 1] >= low) & (cost["en", "clean"][:, 0] <= high))
print(f"English: {low:.2f} to {high:.2f} bits per byte; {inside:.0%} of clean text is inside")
assert 0.9 < inside < 1 and limit_of(model.quantiles["low"], "xx", 0.01) == limit_of(model.quantiles["low"], "", 0.01)
grids = {"high": {"": list(np.linspace(1, 3, 201))}, "low": {"": list(np.linspace(0, 2, 201))}}
for scores, side, expected in [((2, 1), "both", 0), ((2.9, 1), "both", 1), ((2, 0.1), "both", 1), ((2.9, 1), "low", 0),
                               ((2, 0.1), "high", 0)]:
    assert abs(strangeness(scores, grids, "zh", side) - expected) < 1e-9, (scores, side)

# %% [markdown]
# ## A trained model as the judge
# A language model from a later chapter scores texts through the same door. Nothing of it is imported here: it
# comes as two functions, one that encodes a text and one that gives the loss of a row of tokens.

# %%
#| export
def token_scorer(encode: Callable[[str], Sequence[int]], nats: Callable[[Sequence[int]], float]) -> Scorer:
    """A `Scorer` from a language model: `encode` text to token ids, `nats` = summed loss of predicting all of them.

    The text that is scored ends with its last whole token, so `nats` sees what `encode` made of it.
    """
    def bits_per_byte(text: str) -> float:
        size = len(text.encode("utf-8", "surrogatepass"))
        return float(nats(encode(text))) / math.log(2) / size if size else 0.0

    return bits_per_byte


# %%
uniform = token_scorer(lambda text: list(text.encode()), lambda ids: len(ids) * math.log(256))
assert abs(uniform("天地 abc") - 8.0) < 1e-12 and uniform("") == 0.0, "guessing among 256 bytes costs eight bits each"

# %% [markdown]
# ## The stage

# %%
#| export
@functools.lru_cache(maxsize=2)
def _loaded(path: str) -> NgramModel:
    return NgramModel.load(path)


def _quantiles(stage: Perplexity) -> dict[str, Quantiles]:
    return _loaded(stage.model).quantiles if stage.model and stage.scorer is None else {}


def _limits(stage: Perplexity, lang: str) -> tuple[float, float]:
    "(low, high) in bits per byte: as given, or the quantiles of clean text of the language."
    known, low, high = _quantiles(stage), stage.low, stage.high
    if not low:
        low = limit_of(known["low"], lang, stage.low_quantile) if stage.low_quantile > 0 else 0.0
    if not high:
        high = limit_of(known["high"], lang, stage.high_quantile) if stage.high_quantile < 1 else math.inf
    return low, high


def _problem(s: Perplexity) -> str:
    "What is wrong with the options, empty if nothing is."
    if not 0 <= s.low_quantile < s.high_quantile <= 1:
        return f": low_quantile {s.low_quantile} and high_quantile {s.high_quantile} must rise within 0 to 1"
    if s.low < 0 or s.high < 0 or 0 < s.high <= s.low:
        return f": low {s.low} and high {s.high} must rise, and not be negative"
    if s.min_chars < 0 or s.max_chars < 1:
        return f": min_chars {s.min_chars} and max_chars {s.max_chars} must be positive"
    if not s.model and s.scorer is None:
        return ".model: a model file is needed; train_ngrams(...).save(FILE) makes one"
    if not (s.low and s.high) and not _quantiles(s):
        return ": no quantiles of clean text are stored with the model; give low and high"
    return ""


# %% [markdown]
# The options are checked as a whole, when the recipe is read: the tests below the stage try wrong ones.

# %%
#| export
@dataclass
class Perplexity(DocumentStage):
    """Remove text that is too surprising or too predictable for a model of good text.

    Args:
        model: file that `NgramModel.save` wrote, with the quantiles of clean text inside
        low_quantile: what costs less than this share of clean text of its language is removed; 0 removes none
        high_quantile: what costs more than this share is removed; 1 removes none
        low: removes below so many bits per byte, instead of the quantile; 0 uses the quantile
        high: removes above so many bits per byte, instead of the quantile; 0 uses the quantile
        min_chars: shorter texts are not judged
        max_chars: of a longer text only the beginning is scored
        scorer: another judge than the file, a function from text to bits per byte; not for recipes
    """

    name: ClassVar[str] = "perplexity"
    model: str = ""
    low_quantile: float = 0.005
    high_quantile: float = 0.995
    low: float = 0.0
    high: float = 0.0
    min_chars: int = 60
    max_chars: int = 20_000
    scorer: Scorer | None = None

    def __post_init__(self):
        if problem := _problem(self):
            raise UsageError(f"stages.perplexity{problem}")

    def apply(self, doc: dict) -> Outcome:
        "The document, or None with `perplexity_low` or `perplexity_high`."
        text = doc["text"][: self.max_chars]
        if len(text) < self.min_chars:
            return Outcome(doc)
        judge = self.scorer or _loaded(self.model)
        surprise, predictable = judge.both(text) if isinstance(judge, NgramModel) else (judge(text),) * 2
        lang = doc.get("lang") or detect_language(text, doc.get("domain"))
        low, high = _limits(self, lang)
        values = {"bits_per_byte": surprise, "bits_per_byte_cached": predictable}
        if low <= predictable and surprise <= high:
            return Outcome(doc, values=values)
        side, score, limit = ("high", surprise, high) if surprise > high else ("low", predictable, low)
        return Outcome(None, f"perplexity_{side}", f"{score:.2f} bits per byte, limit {limit:.2f} for {lang}", values)


# %%
with tempfile.TemporaryDirectory() as folder:
    file = str(Path(folder) / "m.npz")
    model.save(file)
    stage = pickle.loads(pickle.dumps(Perplexity(file, 0.02, 0.98)))
    kept = [stage.apply(d) for d in clean]
    assert np.mean([o.document is not None for o in kept]) > 0.9
    chinese = next(d["text"] for d in clean if d["lang"] == "zh")
    gone = {k: stage.apply({"text": change(chinese), "lang": "zh"}) for k, change in kinds.items() if k != "clean"}
    for kind, outcome in gone.items():
        print(f"{kind:20} {outcome.reason:16} {outcome.note}")
    assert gone["shuffled"].reason == gone["UTF-8 as Latin-1"].reason == "perplexity_high"
    assert gone["one line, 12 times"].reason == "perplexity_low"
    assert Perplexity(file, 0.0, 1.0).apply({"text": shuffle(chinese)}).document, "both sides off"
assert Perplexity(scorer=uniform, low=1, high=7).apply({"text": "x" * 100}).reason == "perplexity_high"
assert Perplexity(scorer=uniform, low=1, high=7).apply({"text": "short"}).document
for wrong in ({}, {"model": "no/such.npz"}, {"scorer": uniform}, {"scorer": uniform, "low": 3, "high": 2}):
    try:
        Perplexity(**wrong)
        raise AssertionError("accepted")
    except UsageError as error:
        assert "\n" not in str(error)

# %% [markdown]
# ## Verdict
# `scalelab bench data-quality` trains this model on clean text and holds it against a labelled mixture of clean,
# garbled and templated text:

# %%
#| echo: false
Markdown(verdict_table([v for v in load_verdicts("..") if v["id"] == "B-ppl"]))

# %% [markdown]
# What this does not cover: fluent advertising costs no more than good prose, and a genre that the clean text
# lacks looks strange without being bad. The stage's histogram shows how much of each domain lies behind the
# limits; look before cutting.
