# %% [markdown]
# # N-grams of evaluation sets
#
# > Words and Chinese characters as tokens that ignore case, width and punctuation; n-grams of test items as an index that names the item.
#
# The usual check for contamination (Brown et al., 2020) looks for 13 consecutive words of a test item in the training text. It was made for English; Chinese has no words to count without a segmenter, and many Chinese items are
# shorter than 13 words. Here a token is a word or a Chinese character, with a length of its own for each.

# %%
#| default_exp data.evalgrams

# %%
#| export
from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from scalelab.data.winnowing import window_hashes

# %% [markdown]
# ## Words and characters
# Case, width, punctuation and line breaks differ from copy to copy, so they don't count: `Ｆｏｏ, bar!` and `foo BAR` are the same two tokens. Every Chinese character (and kana) is a token of its own. Positions in the original text are kept, so
# that what is found can be shown and cut.

# %%
#| export
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_TOKEN = re.compile(rf"[{_CJK}]|(?:[^\W_{_CJK}][\u0300-\u036f]*)+")


@functools.lru_cache(maxsize=1 << 16)
def _code(word: str) -> int:
    return xxhash.xxh3_64_intdigest(unicodedata.normalize("NFKC", word).casefold().encode("utf-8", "surrogatepass"))


@dataclass
class Tokens:
    """Tokens of a text: `codes` uint64 [n] (equal for words that are equal but for case and width), `begin`, `end`
    int64 [n] in characters, `cjk` bool [n].
    """

    codes: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    cjk: np.ndarray

    @classmethod
    def of(cls, text: str) -> Tokens:
        "The tokens of a text."
        found = [(m.group(), *m.span()) for m in _TOKEN.finditer(text)]
        spans = np.array([s[1:] for s in found], np.int64).reshape(-1, 2)
        single = np.array([len(w) == 1 and w >= "\u3040" and _CJK_SIGN(w) is not None for w, _, _ in found], bool)
        return cls(np.array([_code(w) for w, _, _ in found], np.uint64), spans[:, 0], spans[:, 1], single)

    def __len__(self) -> int:
        return len(self.codes)


_CJK_SIGN = re.compile(rf"[{_CJK}]").match


# %%
a, b = Tokens.of("Ｆｏｏ, bar!\n１２ cafe\u0301"), Tokens.of("foo BAR 12 — café")
assert (a.codes == b.codes).all() and len(a) == 4 and not a.cjk.any()
mixed = Tokens.of("GPT在2020年")
assert mixed.cjk.tolist() == [False, True, False, True] and len(Tokens.of("，。!")) == 0
assert "GPT在2020年"[mixed.begin[2] : mixed.end[2]] == "2020"

# %% [markdown]
# ## Which n-grams
# A run of 13 tokens counts when at most half of it is Chinese, a run of 26 when more than half is. An item that is shorter is compared as a whole, as long as it has 8 words or 16 characters: shorter ones would match by chance, so they
# are counted as untestable instead.

# %%
#| export
LEAST_WORDS, LEAST_CHARS = 8, 16


def gram_starts(tokens: Tokens, n: int, chinese: bool) -> np.ndarray:
    "Positions of the n-grams of one kind: more than half Chinese characters, or at most half."
    if len(tokens) < n:
        return np.empty(0, np.int64)
    sums = np.append(0, np.cumsum(tokens.cjk))
    return np.flatnonzero(((sums[n:] - sums[:-n]) * 2 > n) == chinese)


def item_grams(tokens: Tokens, n_words: int, n_chars: int) -> list[tuple[int, bool, np.ndarray]]:
    """(n, Chinese or not, positions) of an item's n-grams; the whole item when it is shorter; [] when it is too short
    to be tested.
    """
    found = [(n, chinese, gram_starts(tokens, n, chinese)) for n, chinese in ((n_words, False), (n_chars, True))]
    found = [f for f in found if len(f[2])]
    chinese = int(tokens.cjk.sum()) * 2 > len(tokens)
    if not found and len(tokens) >= (min(LEAST_CHARS, n_chars) if chinese else min(LEAST_WORDS, n_words)):
        found = [(len(tokens), chinese, np.zeros(1, np.int64))]
    return found


# %%
sentence = "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?"
poem = "床前明月光，疑是地上霜。举头望明月，低头思故乡。"
describe = lambda text: [(n, chinese, len(starts)) for n, chinese, starts in item_grams(Tokens.of(text), 13, 26)]
assert describe(sentence) == [(13, False, 10)] and describe(poem) == [(20, True, 1)]
assert (
    describe(poem * 2) == [(26, True, 15)]
    and describe("too short to test") == []
    and describe("那人打开水龙头。") == []
)

# %% [markdown]
# ## The index
# An n-gram of an evaluation set is a 64-bit hash; a hit is compared word by word before it counts. N-grams that stand in more than ten items are the set's own phrases (*Read the passage and answer*), not a trace of an item, and are left out.


# %%
#| export
@dataclass
class Match:
    """An evaluation item whose n-grams stand in a document: how many of them, the characters [start, end) of the
    document that they cover, the n-grams the item has.
    """

    item: str
    grams: int
    spans: list[tuple[int, int]]
    of: int


# %%
#| export
class EvalIndex:
    """The n-grams of evaluation sets.

    items: documents with `id` and the texts named by `fields`. common: n-grams of more items than this are phrases of
        the set and don't count.
    .items ids, .untestable ids of items that are too short, .phrases number of n-grams left out.
    """

    def __init__(
        self,
        items: Iterable[dict[str, Any]],
        n_words: int = 13,
        n_chars: int = 26,
        common: int = 10,
        fields: Sequence[str] = ("text",),
    ):
        self.items, self.untestable, self.tokens, self.total = [], [], [], []
        self.phrases, self.grams, self._rows = 0, {}, {}
        for item in items:
            tested = sum(self._add(Tokens.of(str(item[f])), n_words, n_chars) for f in fields if item.get(f))
            self.items.append(str(item["id"]))
            self.total.append(tested)
            self.untestable += [] if tested else [self.items[-1]]
        for key, found in self._rows.items():
            self._store(key, np.concatenate(found, axis=1), common)
        del self._rows

    def _add(self, tokens: Tokens, n_words: int, n_chars: int) -> int:
        "Take in one text of the item that comes next; the number of its n-grams."
        found = item_grams(tokens, n_words, n_chars)
        for n, chinese, starts in found:
            owner = np.full(len(starts), len(self.tokens))
            hashes = window_hashes(tokens.codes, n)[starts].view(np.int64)
            self._rows.setdefault((n, chinese), []).append(np.stack([hashes, owner, starts]))
        self.tokens.append((len(self.items), tokens.codes))
        return sum(len(starts) for _, _, starts in found)

    def _store(self, key: tuple[int, bool], rows: np.ndarray, common: int) -> None:
        hashes, owner, start = rows[0].view(np.uint64), rows[1], rows[2]
        order = np.lexsort((start, owner, hashes))
        hashes, owner, start = hashes[order], owner[order], start[order]
        item = np.array([i for i, _ in self.tokens])[owner]
        first = np.append(True, (np.diff(hashes) != 0) | (np.diff(item) != 0))  # an item counts once for a hash
        _, group, count = np.unique(hashes, return_inverse=True, return_counts=True)
        items = np.bincount(group, weights=first)[group]
        self.phrases += int((np.unique(group[items > common])).size)
        stay = items <= common
        self.grams[key] = hashes[stay], owner[stay], start[stay]

    def matches(self, tokens: Tokens) -> list[Match]:
        "Items of which n-grams stand in a text, the one with most first."
        found: dict[int, list[tuple[int, int]]] = {}
        for (n, chinese), (hashes, owner, start) in self.grams.items():
            starts = gram_starts(tokens, n, chinese)
            mine = window_hashes(tokens.codes, n)[starts]
            low, high = np.searchsorted(hashes, mine, "left"), np.searchsorted(hashes, mine, "right")
            for i in np.flatnonzero(high > low).tolist():
                at = int(starts[i])
                for k in range(low[i], high[i]):
                    item, codes = self.tokens[owner[k]]
                    if (codes[start[k] : start[k] + n] == tokens.codes[at : at + n]).all():
                        found.setdefault(item, []).append((at, at + n))
        out = [
            Match(self.items[i], len(set(r)), _spans(sorted(set(r)), tokens), self.total[i]) for i, r in found.items()
        ]
        return sorted(out, key=lambda m: (-m.grams, m.item))


# %%
#| export
def _spans(runs: Sequence[tuple[int, int]], tokens: Tokens) -> list[tuple[int, int]]:
    "Runs of tokens, sorted, as spans of characters; those that overlap are one."
    spans: list[tuple[int, int]] = []
    for a, b in runs:
        begin, end = int(tokens.begin[a]), int(tokens.end[b - 1])
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
    return spans


# %%
exam = [
    {"id": "robe", "text": sentence},
    {"id": "poem", "text": poem},
    {"id": "short", "text": "那人打开水龙头。"},
    {
        "id": "sheep",
        "text": "丢失第一只羊的牧人没有修补羊圈，第二天早上又发现少了一只羊，于是他赶快堵上窟窿，从此羊再也没有丢失过。",
    },
]
index = EvalIndex(exam)
assert index.untestable == ["short"] and index.total[:3] == [10, 1, 0] and index.total[3] > 10
text = "从前读过：" + poem.replace("，", " ") + " and then HALF THAT much white fibre"
(match,) = index.matches(Tokens.of(text))
assert (
    (match.item, match.grams, match.of) == ("poem", 1, 1)
    and text[slice(*match.spans[0])].startswith("床前")
    and text[slice(*match.spans[0])].endswith("故乡")
)
assert index.matches(Tokens.of("床前明月光，我在想别的事情")) == [] and index.matches(Tokens.of("")) == []
template = [
    {
        "id": str(i),
        "text": "Read the passage below and answer the question that follows it as well as you can: " + chr(97 + i) * 3,
    }
    for i in range(12)
]
assert EvalIndex(template).matches(Tokens.of(template[0]["text"][:80])) == [] and EvalIndex(
    template, common=12
).matches(Tokens.of(template[0]["text"]))

# %% [markdown]
# ## Verdict
# | question | verdict | measured |
# |---|---|---|
# | case, width, punctuation and line breaks hide nothing | holds | the asserts above; the next chapter measures real sets |
# | items that are too short to be told from chance are counted | holds | `untestable` |
#
# What this does not cover: words that are spelt differently, traditional against simplified characters.
