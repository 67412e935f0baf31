# %% [markdown]
# # Repeated passages
#
# > Find every passage that stands twice, keep one copy of it, and cut the others without breaking a character or joining two documents.
#
# Two documents can be different and still share a page: a licence, a quotation, a paragraph that a site prints below each article. Their Jaccard similarity is low, so the chapter on duplicates does not
# see them. Here the unit is the passage: every run of `min_chars` characters that stood before, in another document or earlier in the same one. The chapter on suffix arrays finds them; this one decides what is cut.

# %%
#| default_exp data.passages

# %%
#| export
from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scalelab.data.recipe import Passages
from scalelab.data.suffixes import Windows, equal_windows, join_documents

# %%
#| hide
import random

import matplotlib.pyplot as plt

from scalelab.core.plotting import style
from scalelab.data.documents import stdlib_documents

style()
rng = random.Random(0)

# %% [markdown]
# ## What is cut
# The earliest of equal windows stays, the others are cut, and windows that overlap make one cut. Two exceptions protect text that would vanish. A window that overlaps its own earliest copy is left: of `ababab...` one
# window survives and not two letters. And when so much of a document is cut that the rest is not worth keeping, the document goes, and what stood in it no longer counts as a kept copy.


# %%
#| export
@dataclass
class _Chosen:
    "Windows to cut, by position; `source` is where the kept copy begins."

    begin: np.ndarray
    end: np.ndarray
    source: np.ndarray

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        "(first window, last window) of each run of windows that overlap or touch."
        if len(self.begin) == 0:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        new = np.flatnonzero(np.append(True, self.begin[1:] > self.end[:-1]))
        return new, np.append(new[1:], len(self.begin)) - 1

    def kept_at(self, place: int) -> int:
        "Where the byte at `place` stands in what is kept, followed from copy to copy."
        while True:
            i = int(np.searchsorted(self.begin, place, "right")) - 1
            if i < 0 or place >= self.end[i]:
                return place
            place = int(self.source[i]) + place - int(self.begin[i])


def choose(windows: Windows, alive: np.ndarray, stay: int) -> _Chosen:
    """The windows to cut when only documents that are `alive` count: all but the earliest of each group and those
    that overlap it.

    alive: bool [m], of the document of each window. stay: a position behind every text.
    """
    if len(windows.begin) == 0:
        return _Chosen(*(np.empty(0, np.int64),) * 3)
    opens = np.flatnonzero(np.append(True, np.diff(windows.group) != 0))
    earliest = np.minimum.reduceat(np.where(alive, windows.begin, stay), opens)
    source = np.repeat(earliest, np.diff(np.append(opens, len(windows.group))))
    cut = np.flatnonzero(alive & (source + (windows.end - windows.begin) <= windows.begin))
    cut = cut[np.argsort(windows.begin[cut])]
    return _Chosen(windows.begin[cut], windows.end[cut], source[cut])


# %%
def all_windows(texts, n):
    "The same by definition: positions of every string of n characters that stands twice."
    places = {}
    for d, text in enumerate(texts):
        for i in range(len(text) - n + 1):
            places.setdefault(text[i : i + n], []).append((d, i))
    return sorted(p for p in places.values() if len(p) > 1)


def cut_by_definition(texts, n):
    "Characters (document, position) that the rule above cuts."
    gone = set()
    for places in all_windows(texts, n):
        (d0, i0) = places[0]
        for d, i in places[1:]:
            if d > d0 or i >= i0 + n:
                gone |= {(d, i + k) for k in range(n)}
    return gone


def cut_here(texts, n):
    data, begins = join_documents(texts)
    chosen = choose(windows := equal_windows(data, begins, n), np.ones(len(windows.begin), bool), len(data))
    gone = set()
    for b, e in zip(chosen.begin.tolist(), chosen.end.tolist()):
        d = int(np.searchsorted(begins, b, "right")) - 1
        raw = texts[d].encode()
        gone |= {(d, i) for i in range(len(raw[: b - begins[d]].decode()), len(raw[: e - begins[d]].decode()))}
    return gone


for trial in range(60):
    letters = rng.choice(["ab", "天地ab", "é🙂a"])
    texts = ["".join(rng.choices(letters, k=rng.randrange(0, 40))) for _ in range(rng.randrange(1, 8))]
    n = rng.randrange(2, 7)
    assert cut_here(texts, n) == cut_by_definition(texts, n)
assert len(cut_here(["ab" * 50], 10)) == 100 - 10, "one window stays"

# %% [markdown]
# ## Where a knife may go
# A code point is not yet a character: `e` + U+0301 is one letter, a family emoji is five code points and two joiners, `\r\n` is one line end. A cut that would begin or end inside such a group is shortened to its edge.


# %%
#| export
def inside_character(text: str, i: int) -> bool:
    """Do text[i - 1] and text[i] belong to one character as a reader counts? (combining marks, joiners, modifiers,
    flags, Hangul, CRLF)
    """
    if not 0 < i < len(text):
        return False
    before, here = text[i - 1], text[i]
    if here < "\u0300":
        return before == "\r" and here == "\n"
    flag = "\U0001f1e6" <= here <= "\U0001f1ff" and "\U0001f1e6" <= before <= "\U0001f1ff"
    jamo = "\u1160" <= here <= "\u11ff" and ("\u1100" <= before <= "\u11ff" or "\uac00" <= before <= "\ud7a3")
    joined = "\u200d" in (before, here) or "\U0001f3fb" <= here <= "\U0001f3ff" or "\U000e0020" <= here <= "\U000e007f"
    return flag or jamo or joined or unicodedata.category(here)[0] == "M"


def remove_spans(text: str, spans: Sequence[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
    """`text` without `spans` (sorted, apart), each first shortened to whole characters; the new text, and the spans
    as they were cut (start == end: not at all).

    Where two pieces would run into each other, a line break stands between them: they were no sentence before.
    """
    done, pieces, at = [], [], 0
    for start, end in spans:
        while start < end and inside_character(text, start):
            start += 1
        while end > start and inside_character(text, end):
            end -= 1
        done.append((start, end))
        if start < end:
            pieces.append(text[at:start])
            at = end
    kept = ""
    for piece in [*pieces, text[at:]]:
        touches = kept and piece and not (kept[-1].isspace() or piece[0].isspace())
        kept += ("\n" if touches else "") + piece
    return kept, done


# %%
assert remove_spans("0123456789", [(2, 4), (7, 9)]) == ("01\n456\n9", [(2, 4), (7, 9)])
assert (
    remove_spans("a b", [(0, 2)])[0] == "b"
    and remove_spans("ab", [])[0] == "ab"
    and remove_spans("ab", [(0, 2)])[0] == ""
)
for text, mid in {"e\u0301x": 1, "a\r\nb": 2, "👨\u200d👩\u200d👧": 3, "👍🏽": 1, "🇨🇳": 1, "\u1100\u1161": 1}.items():
    assert inside_character(text, mid), text
    assert remove_spans(text, [(0, mid)])[1][0][1] < mid
assert not inside_character("天地", 1) and not inside_character("ab", 0) and not inside_character("\n\r", 1)

# %% [markdown]
# ## A block of documents
# An account says for each document what was cut and which document holds the copy that stays. When the earliest copy was itself cut as part of a longer run, the account follows it to the text that is really there.


# %%
#| export
@dataclass(frozen=True)
class Cut:
    "Characters [start, end) of a document's text that stand in the document `of` too."

    start: int
    end: int
    of: str


@dataclass
class Account:
    """What was cut from one document.

    removed: so little was left that the document went; left: characters that are not blank, after the cuts.
    """

    id: str
    cuts: list[Cut] = field(default_factory=list)
    removed: bool = False
    left: int = 0

    @property
    def note(self) -> str:
        "One line for a person."
        first, total = self.cuts[0], sum(c.end - c.start for c in self.cuts)
        more = f" and {len(self.cuts) - 1} more" if len(self.cuts) > 1 else ""
        return f"{total} characters stand elsewhere: [{first.start}, {first.end}) in {first.of}{more}"


@dataclass(frozen=True)
class _Span:
    "Bytes to cut; `of` holds the copy; `homes` are the documents of this block that the cut rests on."

    begin: int
    end: int
    of: str
    homes: frozenset[int] = frozenset()


# %%
#| export
class _Block:
    "A block of documents, joined; `outside` are the cuts that earlier blocks ask for, by document."

    def __init__(self, ids: Sequence[str], texts: Sequence[str], min_chars: int, outside: Mapping[int, Sequence[Cut]]):
        self.ids, self.texts = ids, texts
        self.data, self.begins = join_documents(texts)
        self.windows = equal_windows(self.data, self.begins, min_chars)
        self.home = np.searchsorted(self.begins, self.windows.begin, "right") - 1
        self.outside = []
        for d, cuts in outside.items():
            starts = self.begins[d] + np.flatnonzero((self.data[self.begins[d] : self.begins[d + 1]] & 0xC0) != 0x80)
            self.outside += [_Span(int(starts[c.start]), int(starts[c.end]), c.of) for c in cuts]

    def spans(self, alive: np.ndarray) -> dict[int, list[_Span]]:
        "What to cut of each document when only those that are `alive` count as earlier ones."
        chosen = choose(self.windows, alive[self.home], len(self.data))
        home = np.searchsorted(self.begins, chosen.source, "right") - 1
        found = list(self.outside)
        for a, z in zip(*chosen.runs()):
            holder = int(np.searchsorted(self.begins, chosen.kept_at(int(chosen.begin[a])), "right")) - 1
            found.append(
                _Span(
                    int(chosen.begin[a]),
                    int(chosen.end[z]),
                    self.ids[holder],
                    frozenset([holder, *home[a : z + 1].tolist()]),
                )
            )
        spans: dict[int, list[_Span]] = {}
        for span in sorted(found, key=lambda s: (s.begin, s.end)):
            here = spans.setdefault(int(np.searchsorted(self.begins, span.begin, "right")) - 1, [])
            if here and span.begin <= here[-1].end:
                span = _Span(here[-1].begin, max(span.end, here[-1].end), here[-1].of, here[-1].homes | span.homes)
                here.pop()
            here.append(span)
        return spans

    def cut(self, d: int, spans: Sequence[_Span]) -> tuple[str, Account]:
        "Document d without its spans, and the account."
        raw, base = self.data[self.begins[d] : self.begins[d + 1] - 1], int(self.begins[d])
        before = np.append(0, np.cumsum((raw & 0xC0) != 0x80))  # characters before each byte
        wanted = [(int(before[s.begin - base]), int(before[s.end - base])) for s in spans]
        text, done = remove_spans(self.texts[d], wanted)
        cuts = [Cut(start, end, span.of) for (start, end), span in zip(done, spans) if start < end]
        return text, Account(self.ids[d], cuts, left=len("".join(text.split())))


# %% [markdown]
# The documents that fall are found in rounds. One whose cuts rest on documents that stay is certainly too short; one that lost its text to a document that falls itself is looked at again.


# %%
#| export
def cut_passages(
    docs: Sequence[dict[str, Any]],
    options: Passages = Passages(),
    order: Sequence[int] | None = None,
    outside: Mapping[int, Sequence[Cut]] | None = None,
) -> tuple[list[dict[str, Any]], list[Account]]:
    """Cut every passage of `options.min_chars` characters that stands earlier, in the same document or another one.

    docs: with `id` and `text`; they are not changed, those with cuts are copies. order: positions by preference
        (default: as they come); a copy in a preferred document stays.
    outside: by position, what stands in earlier blocks, as `PassageCutter` of `scalelab.data.anchors` finds them.
    Returns the documents that stay, in the order given, and one account for each that lost text. Every passage that
    is cut stands in a document that stays.
    """
    order = list(range(len(docs))) if order is None else [int(i) for i in order]
    rank = {i: d for d, i in enumerate(order)}
    known = {rank[i]: cuts for i, cuts in (outside or {}).items()}
    block = _Block([str(docs[i]["id"]) for i in order], [docs[i]["text"] for i in order], options.min_chars, known)
    alive, fallen = np.ones(len(order), bool), {}
    while True:
        spans = block.spans(alive)
        done = {d: block.cut(d, s) for d, s in spans.items() if alive[d]}
        done = {d: (text, account) for d, (text, account) in done.items() if account.cuts}
        short = {d for d, (_, account) in done.items() if account.left < options.min_left}
        if not short:
            break
        for d in short:
            if not any(span.homes & (short - {d}) for span in spans[d]):
                alive[d], fallen[d] = False, done[d][1]
                fallen[d].removed = True
    texts = {order[d]: text for d, (text, _) in done.items()}
    accounts = {d: account for d, (_, account) in done.items()} | fallen
    stay = sorted(order[d] for d in np.flatnonzero(alive))
    return [docs[i] | {"text": texts[i]} if i in texts else docs[i] for i in stay], [
        accounts[d] for d in sorted(accounts)
    ]


# %%
def doc(name, text):
    return {"id": name, "text": text, "licence": "CC0"}


page = "北冥有鱼，其名为鲲。鲲之大，不知其几千里也；化而为鸟，其名为鹏。"
docs = [doc("a", f"第一篇。{page}完。"), doc("b", f"another one: {page} and its own ending"), doc("c", f"{page}呵")]
kept, accounts = cut_passages(docs, Passages(min_chars=20, min_left=5))
for account in accounts:
    print(account.id, "removed:" if account.removed else "cut:", account.note)
assert [d["id"] for d in kept] == ["a", "b"] and kept[0] is docs[0] and kept[1]["licence"] == "CC0"
assert kept[1]["text"] == "another one:  and its own ending" and docs[1]["text"].count(page) == 1
kept, _ = cut_passages(docs, Passages(20, 5), order=[1, 0, 2])
assert [d["id"] for d in kept] == ["a", "b"] and page in kept[1]["text"] and kept[0]["text"] == "第一篇。\n完。"
assert cut_passages([], Passages()) == ([], []) and cut_passages([doc("a", "")], Passages())[1] == []

# %% [markdown]
# The danger with removals: B is a copy of A's page plus a page of its own that C repeats. If B fell for being short, C's copy must stay.

# %%
own = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往"
docs = [doc("a", page), doc("b", page + own), doc("c", own + "，秋收冬藏闰余成岁律吕调阳")]
kept, accounts = cut_passages(docs, Passages(min_chars=15, min_left=30))
assert [d["id"] for d in kept] == ["a", "c"] and kept[1]["text"] == docs[2]["text"]
assert [(a.id, a.removed, a.left) for a in accounts] == [("b", True, 20)]
kept, accounts = cut_passages(docs, Passages(min_chars=15, min_left=13))
assert [d["id"] for d in kept] == ["a", "b", "c"] and kept[1]["text"] == own and kept[2]["text"].startswith("，秋")

# %% [markdown]
# For random corpora the promise is checked as stated. Documents are made of sentences that share no letters by chance, some with emoji of four bytes; afterwards every sentence of a document that stays stands in the corpus
# exactly once, every copy that an account names is in a document that stays (or in the one that fell itself), and no text gained anything but line breaks.


# %%
def check_promise(sentences, docs, options):
    kept, accounts = cut_passages(docs, options)
    old, new = {d["id"]: d["text"] for d in docs}, {d["id"]: d["text"] for d in kept}
    for account in accounts:
        text, edges = old[account.id], [0, *(x for c in account.cuts for x in (c.start, c.end)), len(old[account.id])]
        rest = "".join(text[a:b] for a, b in zip(edges[::2], edges[1::2]))
        assert account.left == len(rest) and account.removed == (account.left < options.min_left)
        assert account.removed or new[account.id].replace("\n", "") == rest
        assert all(c.of in new or c.of == account.id for c in account.cuts)
    assert set(old) - set(new) == {a.id for a in accounts if a.removed}
    for sentence in sentences:
        if any(sentence in old[name] for name in new):
            assert sum(text.count(sentence) for text in new.values()) == 1
    return sum(len(a.cuts) for a in accounts), sum(a.removed for a in accounts)


cuts = np.zeros(2, int)
for trial in range(150):
    signs = iter(rng.sample([chr(c) for c in (*range(0x4E00, 0x9000), *range(0x1F300, 0x1F3FB))], 400))
    sentences = ["".join(next(signs) for _ in range(rng.randrange(10, 30))) for _ in range(9)]
    docs = [doc(str(i), "".join(rng.choices(sentences, k=rng.randrange(0, 6)))) for i in range(8)]
    cuts += check_promise(sentences, docs, Passages(min_chars=10, min_left=rng.choice([0, 20, 40])))
print(f"{cuts[0]} cuts and {cuts[1]} documents removed in 150 corpora, nothing lost")
assert cuts.min() > 100

# %% [markdown]
# ## What repeats in a real corpus
# The sources and help texts of Python's standard library were written by many hands, and yet:

# %%
library = list(stdlib_documents(1_500_000))
size = sum(len(d["text"]) for d in library)
lengths, share = [30, 50, 100, 200, 400], {}
for n in lengths:
    kept, accounts = cut_passages(library, Passages(min_chars=n, min_left=0))
    domain = {d["id"]: d["domain"] for d in library}
    for name in sorted(set(domain.values())):
        cut = sum(c.end - c.start for a in accounts if domain[a.id] == name for c in a.cuts)
        share.setdefault(name, []).append(cut / sum(len(d["text"]) for d in library if d["domain"] == name))
    if n == 200:
        longest = max(accounts, key=lambda a: max(c.end - c.start for c in a.cuts))
        print(
            f"at 200 characters {len(accounts)} of {len(library)} documents lose something; the longest in "
            f"{longest.id}: {longest.note}"
        )

# %%
fig, ax = plt.subplots(figsize=(5.5, 2.8))
for name, values in share.items():
    ax.plot(lengths, [100 * v for v in values], "o-", label=name)
ax.set(
    xscale="log",
    xticks=lengths,
    xticklabels=lengths,
    xlabel="shortest passage that counts (characters)",
    ylabel="share of the text that is cut (%)",
)
ax.minorticks_off()
ax.legend()
plt.show()

# %% [markdown]
# The curves say where to put the threshold: at 30 characters idioms of the language are cut out of programs, which then no longer run in the reader's head; from 200 on what goes are licences, tables and copied functions. The recipe's default
# is 200.
#
# Passages that stand in different blocks are found through anchors in an index on disk, in the chapter on anchors.
#
# ## Verdict
# | question | verdict | measured |
# |---|---|---|
# | every repeated window found | holds | what is cut equals the definition on 60 random corpora; planted passages of 50 characters in Chinese, English and code: see the bench `data-dedup` |
# | nothing is lost with a removal | holds | on 150 random corpora every sentence of a document that stays is there exactly once, and every cut names a document that stays |
# | no broken character, no joined documents | holds | by construction, and checked |
#
# What this does not cover: passages with a changed word in the middle count as two shorter ones, and one below `min_chars` on both sides of the change is not found.
