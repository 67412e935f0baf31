# %% [markdown]
# # Keeping the examination out of the lessons
#
# > Find documents that hold pieces of evaluation sets, show the words that gave them away, and remove, cut or flag them.
#
# A model that has read the test answers from memory, and its score says nothing. The chapter on n-grams finds the items whose words stand in a document; this one decides what happens to it, and measures how well the check works.

# %%
#| default_exp data.decontaminate

# %%
#| export
from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from scalelab.core.config import UsageError, did_you_mean
from scalelab.data.documents import Rejects, read_documents
from scalelab.data.evalgrams import EvalIndex, Match, Tokens
from scalelab.data.passages import remove_spans
from scalelab.data.recipe import DocumentStage, Outcome

# %%
#| hide
import json
import pickle
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from scalelab.core.plotting import style
from scalelab.data.documents import stdlib_documents

style()

# %% [markdown]
# ## The stage
# What to do is a matter of taste: `remove` the document, `cut` the sentences that match, or `flag` it and decide later. The evidence is the text that matched and the item that it belongs to.


# %%
#| export
@functools.lru_cache(maxsize=4)
def _index_of(sets: tuple[str, ...], n_words: int, n_chars: int, common: int, fields: tuple[str, ...]) -> EvalIndex:
    rejects = Rejects()
    index = EvalIndex(read_documents(list(sets), rejects), n_words, n_chars, common, fields)
    if not index.items:
        raise UsageError(
            f"stages.decontaminate.sets: no items in "
            f"{', '.join(sets)}{'; ' + rejects.warnings[0] if rejects.warnings else ''}"
        )
    return index


# %%
#| export
def evidence(text: str, matches: Sequence[Match]) -> str:
    "One line: the item that matches most, how much of it, and the words."
    shown = " ".join(text[slice(*matches[0].spans[0])].split())
    more = f"; and {len(matches) - 1} more items" if len(matches) > 1 else ""
    return f"{matches[0].item}: {matches[0].grams} n-grams, {shown[:80]!r}{more}"


# %%
said = evidence("so it goes on", [Match("x", 3, [(3, 8)], 4), Match("y", 1, [(0, 2)], 1)])
assert said == "x: 3 n-grams, 'it go'; and 1 more items"


# %%
#| export
@dataclass
class Decontaminate(DocumentStage):
    """Documents that hold n-grams of evaluation sets.

    Args:
        sets: files, folders or globs of evaluation sets (JSONL, Parquet, CSV)
        fields: columns of a set that are compared, separated by commas
        n_words: consecutive words that must agree
        n_chars: consecutive characters that must agree where most are Chinese
        min_matches: n-grams of one item that must stand in a document (all of them when it has fewer)
        common: n-grams of more items than this are phrases of the set and don't count
        action: remove the document, cut the lines or sentences that match, or flag the document
        min_left: after cutting, a document with fewer characters is removed
    """

    name: ClassVar[str] = "decontaminate"
    sets: list[str] = field(default_factory=list)
    fields: str = "text"
    n_words: int = 13
    n_chars: int = 26
    min_matches: int = 1
    common: int = 10
    action: str = "remove"
    min_left: int = 50

    def __post_init__(self):
        actions = ("remove", "cut", "flag")
        if not self.sets or not all(isinstance(s, str) for s in self.sets) or isinstance(self.sets, str):
            raise UsageError(
                f"stages.decontaminate.sets: expected a list of files, found {self.sets!r}; name the evaluation "
                f"sets to keep out"
            )
        if self.action not in actions:
            raise UsageError(
                f"stages.decontaminate.action: {self.action!r} is not one of "
                f"{', '.join(actions)}{did_you_mean(self.action, actions)}"
            )
        if self.n_words < 3 or self.n_chars < 6 or self.min_matches < 1 or self.common < 1 or self.min_left < 0:
            raise UsageError(
                "stages.decontaminate: n_words must be at least 3, n_chars 6, min_matches and common 1, min_left 0"
            )

    @property
    def index(self) -> EvalIndex:
        "The n-grams of the sets, read once in a process."
        columns = tuple(f.strip() for f in self.fields.split(","))
        return _index_of(tuple(self.sets), self.n_words, self.n_chars, self.common, columns)

    def apply(self, doc: dict[str, Any]) -> Outcome:
        "Remove, cut or flag a document that holds evaluation text."
        text = doc["text"]
        matches = [m for m in self.index.matches(Tokens.of(text)) if m.grams >= min(self.min_matches, m.of)]
        values = {"contaminated_chars": float(sum(b - a for m in matches for a, b in m.spans))}
        if not matches:
            return Outcome(doc, values=values)
        note = evidence(text, matches)
        if self.action == "flag":
            return Outcome(
                doc | {"flags": [*doc.get("flags", []), *(f"evaluation:{m.item}" for m in matches)]},
                note=note,
                values=values,
            )
        if self.action == "cut":
            left, _ = remove_spans(text, sentence_spans(text, [s for m in matches for s in m.spans]))
            if len("".join(left.split())) >= self.min_left:
                return Outcome(doc | {"text": left}, note=note, values=values)
        return Outcome(None, "evaluation_text", note, values)


# %%
#| export
_END = re.compile(r"[.!?](?=\s)|[。！？\n]")


def sentence_spans(text: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    "Spans widened to whole sentences (or lines), sorted and apart."
    ends = np.array([0, *(m.end() for m in _END.finditer(text)), len(text)])
    wide = sorted(
        (int(ends[np.searchsorted(ends, a, "right") - 1]), int(ends[np.searchsorted(ends, b, "left")]))
        for a, b in spans
    )
    out: list[tuple[int, int]] = []
    for a, b in wide:
        if out and a <= out[-1][1]:
            out[-1] = out[-1][0], max(b, out[-1][1])
        else:
            out.append((a, b))
    return out


# %%
assert [("ab. cd ef! gh")[a:b] for a, b in sentence_spans("ab. cd ef! gh", [(5, 7)])] == [" cd ef!"]
assert sentence_spans("一。二三。四", [(3, 4)]) == [(2, 5)] and sentence_spans("abc", [(0, 3)]) == [(0, 3)]

sentence = "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?"
poem = "床前明月光，疑是地上霜。举头望明月，低头思故乡。"
exam = [
    {"id": "robe", "text": sentence},
    {"id": "poem", "text": poem},
    {"id": "short", "text": "那人打开水龙头。"},
    {
        "id": "sheep",
        "text": "丢失第一只羊的牧人没有修补羊圈，第二天早上又发现少了一只羊，于是他赶快堵上窟窿，从此羊再也没有丢失过。",
    },
]
folder = tempfile.TemporaryDirectory()
file = Path(folder.name) / "exam.jsonl"
file.write_text("\n".join(json.dumps(e, ensure_ascii=False) for e in exam), encoding="utf-8")
lesson = {
    "id": "x",
    "text": "A page of the answers. "
    + sentence
    + " Then something else that is a sentence of its own and stays in the text.",
    "flags": ["old"],
}
for action in ("remove", "cut", "flag"):
    stage = pickle.loads(pickle.dumps(Decontaminate([str(file)], action=action, min_left=20)))
    out = stage.apply(lesson)
    print(f"{action}: {out.reason or out.document['text']!r}, {out.note}"[:200])
    assert out.note.startswith("robe: 10 n-grams") and stage.apply({"id": "y", "text": "Nothing of it."}).document
    assert (out.document is None) == (action == "remove")
assert out.document["flags"] == ["old", "evaluation:robe"] and lesson["flags"] == ["old"]
assert Decontaminate([str(file)], action="cut", min_left=500).apply(lesson).reason == "evaluation_text"
assert Decontaminate([str(file)], min_matches=99).apply(lesson).document is None, "all that it has"


# %%
def refused(options, *words):
    try:
        Decontaminate(**options).index
    except UsageError as error:
        assert all(w in str(error) for w in words), str(error)
        return str(error)
    raise AssertionError("accepted")


print(refused({}, "sets", "list of files"))
print(refused({"sets": [str(file)], "action": "flagg"}, "did you mean 'flag'"))
refused({"sets": str(file)}, "expected a list")
refused({"sets": [str(file)], "n_words": 1}, "n_words")

# %% [markdown]
# ## How much must agree?
# The length of the n-gram trades misses against false alarms. Items of 40 words are planted with one word in $k$ changed; the project's sample texts, which have nothing to do with them, show what matches by chance.

# %%
library = [d["text"] for d in stdlib_documents(600_000) if d["domain"] == "docs"]
items = [
    {"id": f"{i}/{k}", "text": " ".join(t.split()[40 * k : 40 * k + 40])}
    for i, t in enumerate(library[:30])
    for k in range(5)
]
items = [i for i in items if len(i["text"].split()) == 40]
samples = [d["text"] for d in read_documents(["../../data_samples/*.jsonl"])]


def changed(text, every):
    words = text.split()
    for i in range(every // 2, len(words), every):
        words[i] = "changed"
    return " ".join(words)


found, accused, rates = {}, {}, [40, 20, 15, 10, 6]
for n in (3, 5, 8, 13, 20):
    index = EvalIndex(items, n_words=n)
    found[n] = [
        np.mean([any(m.item == i["id"] for m in index.matches(Tokens.of(changed(i["text"], every)))) for i in items])
        for every in rates
    ]
    accused[n] = np.mean([bool(index.matches(Tokens.of(t))) for t in samples])
    print(
        f"{n:2} words: {found[n][0]:.0%} of the items found with one word changed, {found[n][-1]:.0%} with one in "
        f"six; {accused[n]:.1%} of the sample texts accused"
    )
fig, ax = plt.subplots(figsize=(5.5, 2.8))
for n, values in found.items():
    ax.plot([100 / r for r in rates], values, "o-", label=f"{n} words")
ax.set(xlabel="words changed (%)", ylabel="items found", ylim=(-0.05, 1.05))
ax.legend(title="n-gram of")
plt.show()
assert found[13][0] > 0.95 and found[13][-1] < 0.2 and found[5][-1] > 0.95 and accused[13] == 0

# %% [markdown]
# With 13 words one change in ten words hides most items. That is the known weakness of the method: it finds copies and not paraphrases. Shorter n-grams find more and accuse more.
#
# On real evaluation sets and real text:

# %%
real = json.loads(Path("../10_lab/results/bench-data-passages.json").read_text())["rows"]
for r in real:
    if "evaluation" in r["what"]:
        print(f"{r['what']}: {r['value']:.4g} {r['unit']} ({r['peers']})")
folder.cleanup()

# %% [markdown]
# ## Verdict
# | question | verdict | measured |
# |---|---|---|
# | verbatim copies of items are found | holds, where an item is long enough to be tested | the table above; items below 8 words or 16 characters are counted as untestable |
# | clean text is left alone | holds in part | none of the sample texts; what is accused on real text quotes the same sources as the sets, so `flag` it and look |
# | paraphrases are found | does not hold | one changed word in six hides most items |
#
# What this does not cover: translations of items, and traditional against simplified characters.
