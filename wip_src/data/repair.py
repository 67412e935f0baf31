# %% [markdown]
# # Damaged encodings
#
# > Text that went through the wrong decoder is put right where the repair can be proven, and flagged where it can't.
#
# A page in UTF-8 that somebody read as Latin-1, a terminal's colours, percent signs: damage of this kind has
# signatures that good text does not have. The rule of this chapter is to undo only what converts strictly, byte by
# byte, into valid text; whatever else looks damaged is counted, flagged and left to a threshold. A repair that
# guesses would one day "repair" a good poem.

# %%
#| default_exp data.repair

# %%
#| export
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from scalelab.data.recipe import DocumentStage, Outcome

# %%
#| hide
import json
from pathlib import Path
from urllib.parse import quote

import matplotlib.pyplot as plt
import numpy as np

from scalelab.core.plotting import style

style()

# %% [markdown]
# ## UTF-8 read as Latin-1
# Bytes of UTF-8 read as Latin-1 turn 天 into `å¤©`, and every one of its characters betrays it: a lead character of a
# certain range, then exactly the right number of continuation characters. Undoing is a proof and no guess, when the
# characters go back to bytes and those bytes are strictly valid UTF-8. The table below maps characters to the bytes
# they came from, for Latin-1 and for Windows-1252, which shows 27 of them as curly quotes and the like.

# %%
#| export
_CP1252 = {bytes([b]).decode("cp1252", "ignore") or chr(b): b for b in range(0x80, 0xA0)}
_TO_LATIN = {ord(char): byte for char, byte in _CP1252.items()}
_REST = f"[\x80-\xbf{''.join(_CP1252)}]"
_PAIRS = re.compile(f"(?:[\xc2-\xdf]{_REST}|[\xe0-\xef]{_REST}{{2}}|[\xf0-\xf4]{_REST}{{3}})+")
_SINGLE = re.compile("[\xc2\xc3][\x80-\x9f\xa1-\xaa\xac-\xba\xbc-\xbf]")  # nÃ©e: no language writes such a pair


def _latin_bytes(text: str) -> bytes:
    "The bytes that a Latin-1 or Windows-1252 decoder would have read this from; UnicodeEncodeError if there are none."
    return text.translate(_TO_LATIN).encode("latin-1")


def undo_latin(text: str) -> str:
    "UTF-8 that was read as Latin-1 or Windows-1252, up to three times over, put right where the bytes are valid."
    for _ in range(3):
        if not _is_latin_damage(text):  # as a whole: in GBK read as Latin-1 some lines fit by chance
            break
        lines = [_PAIRS.sub(_decode_run, line) if _is_latin_damage(line) else line for line in text.split("\n")]
        if (new := "\n".join(lines)) == text:
            break
        text = new
    return text


def _is_latin_damage(line: str) -> bool:
    "Most characters of the Latin-1 range stand in sequences, and not just one that may be French: É before a quote."
    high = len(re.findall("[\x80-\xff]", line))
    runs = _PAIRS.findall(line) if high else []
    sure = any(len(run) > 2 or _SINGLE.fullmatch(run) for run in runs)
    return sure and sum(len(re.findall("[\x80-\xff]", run)) for run in runs) >= 0.7 * high


def _decode_run(match: re.Match) -> str:
    try:
        return _latin_bytes(match[0]).decode("utf-8")
    except UnicodeDecodeError:
        return match[0]

# %%
clean = "今天天气很好，“适合”出门。"
for codec in ("latin-1", "cp1252"):
    wrong = "".join(bytes([b]).decode(codec, "ignore") or chr(b) for b in clean.encode())
    assert undo_latin(wrong) == clean and undo_latin("前面是好的 " + wrong + " end") == "前面是好的 " + clean + " end"
print(wrong)
twice = clean.encode().decode("latin-1").encode().decode("latin-1")
assert undo_latin(twice) == clean
gbk = "养乌龟的人都知道，换水不能一次全换。".encode("gbk").decode("latin-1")
assert undo_latin(gbk) == gbk  # another damage with some pairs by chance: not to be made worse
assert undo_latin("Evelyn ( nÃ©e Warner ), 30 Â° F") == "Evelyn ( née Warner ), 30 ° F"
for good in ["Où est l’été ? À «Évian», déjà…", "IRMÃ” e MANHÃ”", "naïve café", "«IRMû", clean]:
    assert undo_latin(good) == good

# %% [markdown]
# GBK read as Latin-1 (`½ñÌì`) and UTF-8 read as GBK (`浠婂ぉ`) are undone line by line, when the whole line converts
# strictly and comes out as Chinese. That last condition matters for short lines: 联通 in GBK happens to be valid UTF-8.
# "Comes out as Chinese" means that the non-ASCII characters are mostly Han, and those mostly among the 3,755 common
# ones of GB 2312, or the 5,401 of Big5.

# %%
#| export
def _common_han(text: str) -> float:
    "Share of common Chinese characters (level 1 of GB 2312 or of Big5) and punctuation among non-ASCII characters."
    rare = [c for c in text if c > "\x7f"]
    if not rare:
        return 0.0
    marks = sum(c in "，。、；：？！“”‘’《》（）【】「」『』—…·〈〉" for c in rare)
    gb = sum(b"\xb0" <= c.encode("gb2312", "ignore")[:1] <= b"\xd7" for c in rare)
    big5 = sum(b"\xa4" <= c.encode("big5", "ignore")[:1] <= b"\xc6" for c in rare)
    return (max(gb, big5) + marks) / len(rare)


def _by_line(text: str, convert: Callable[[str], str]) -> str:
    "Apply a strict conversion to each line with non-ASCII characters, where it works and gives common Chinese."
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if line.isascii():
            continue
        try:
            new = convert(line)
        except UnicodeError:
            continue
        if _common_han(new) >= 0.7 and _common_han(new) > _common_han(line) + 0.2:
            lines[i] = new
    return "\n".join(lines)


def undo_gbk(text: str) -> str:
    "Lines of GBK read as Latin-1, and of UTF-8 read as GBK, put right where the conversion is strict."
    if len(re.findall(r"[\x80-\xff]", text)) > 0.2 * len(text):
        text = _by_line(text, lambda line: _latin_bytes(line).decode("gb18030"))
    if _gbk_share(text) > 0.3:
        text = _by_line(text, lambda line: line.encode("gb18030").decode("utf-8"))
    return text


def _gbk_share(text: str) -> float:
    "Share of the GBK bytes of non-ASCII characters that are three-byte UTF-8: few in real text, most in damaged text."
    raw = re.sub(rb"[\x00-\x7f]+", b"", re.sub("[\x00-\xff]+", "", text[:20_000]).encode("gbk", "ignore"))
    return 3 * len(re.findall(rb"[\xe2-\xef][\x80-\xbf]{2}", raw)) / len(raw) if len(raw) >= 12 else 0.0

# %%
clean = "模型的训练数据需要清洗。"
assert undo_gbk(clean.encode("gbk").decode("latin-1")) == clean
wrong = "今天天气很好".encode().decode("gbk")  # an even number of bytes: nothing was lost
print(wrong, "->", undo_gbk(wrong))
assert undo_gbk(wrong) == "今天天气很好"
for good in ["中国联通", "联通", "café naïve élève", "道可道，非常道。名可名，非常名。"]:
    assert undo_gbk(good) == good

# %% [markdown]
# Two more disguises are exact by construction: numeric entities (`&#22825;`) and percent signs (`%E5%A4%A9`), when a
# large part of a text is written in them. A handful of percent signs is just an address. In an English text hardly
# anything needs an entity, so a share would miss them: there the rule asks that the text writes no character beyond
# ASCII in any other way. Control characters, terminal colours, byte-order marks and marks of direction carry no text
# at all and are taken out; a zero-width space is, unless the text is in one of the scripts that use it.

# %%
#| export
_ENTITY = re.compile(r"&#(\d{3,7});")
_PERCENT = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
_CONTROL = re.compile("\x1b\\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069\ufeff]")
_ZERO_WIDTH_SCRIPTS = re.compile("[\u0e00-\u109f\u1780-\u17ff]")  # Thai, Lao, Tibetan, Burmese, Khmer


def undo_escapes(text: str) -> str:
    "Numeric entities and percent escapes decoded, if a fifth of the text is written in them, or all that is not ASCII."
    written = sum(len(m[0]) for m in _ENTITY.finditer(text)) if "&#" in text else 0
    if written and (written > 0.2 * len(text) or text.isascii() and "<" not in text.replace("<unk>", "")):
        text = _ENTITY.sub(_decode_entity, text)
    if text.count("%") > 0.06 * len(text) and sum(len(m) for m in _PERCENT.findall(text)) > 0.2 * len(text):
        text = _PERCENT.sub(_decode_percent, text)
    return text


def _decode_entity(match: re.Match) -> str:
    code = int(match[1])
    return chr(code) if 160 <= code < 0x110000 and not 0xD800 <= code < 0xE000 else match[0]


def _decode_percent(match: re.Match) -> str:
    raw = bytes.fromhex(match[0].replace("%", ""))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return match[0]


def drop_controls(text: str) -> str:
    "Without control characters, terminal colours, marks of direction and byte order, and needless zero-width spaces."
    if text.isascii() and text.isprintable():
        return text
    text = _CONTROL.sub("", text)
    return text.replace("\u200b", "") if "\u200b" in text and not _ZERO_WIDTH_SCRIPTS.search(text) else text

# %%
#| export
def repair_text(text: str) -> tuple[str, list[str]]:
    """Undo damage that can be undone exactly; returns the text and what was done, in order.

    "escapes", "latin" and "gbk" are strict conversions of bytes, checked to be valid; "controls" hold no text.
    """
    done = []
    steps = {"escapes": undo_escapes, "latin": undo_latin, "gbk": undo_gbk, "controls": drop_controls}
    for name, undo in steps.items():
        if (new := undo(text)) != text:
            text = new
            done.append(name)
    return text, done

# %%
clean = "天气 fine"
assert repair_text("".join(f"&#{ord(c)};" if c > "\x7f" else c for c in clean)) == (clean, ["escapes"])
assert repair_text(quote("天气预报")) == ("天气预报", ["escapes"])
assert repair_text("1926 &#8211; 1994, caf&#233;") == ("1926 – 1994, café", ["escapes"])
for same in (
    "see https://x.org/%E5%A4%A9 for a long explanation of it", "<p>&#8211; is how HTML writes it</p>",
    "– is what a browser shows for &#8211;, a short name of it",
):
    assert repair_text(same) == (same, [])
assert repair_text("red \x1b[31mtext\x08") == ("red text", ["controls"]) and repair_text("&#1114112;" * 9)[1] == []
assert repair_text("a tab\tand\r\nlines stay\f") == ("a tab\tand\r\nlines stay\f", [])
assert repair_text("零\u200b宽\ufeff") == ("零宽", ["controls"]) and repair_text("ภาษา\u200bไทย")[1] == []

# %% [markdown]
# ## What can't be repaired is counted
# The signs: replacement characters, 锟斤拷 (what replacement characters turn into when they are read as GBK), control
# characters of Latin-1, lead-and-continuation pairs that did not convert, a lone `¨` (half of a GBK character), 鈥
# (half of a dash; the rare character is a part of a loom), and Chinese whose GBK bytes look like UTF-8. Any sign is a
# reason to flag; only their share is a reason to remove, and one replacement character is forgiven there: the reader
# itself puts it where half an emoji stood.

# %%
#| export
_MARKS = re.compile("[\ufffd\x80-\x9f\u9225\u951f]|\u65a4\u62f7|\xa8(?=[A-Z0-9])")


def mojibake_marks(text: str) -> int:
    "Number of characters that are traces of a wrong decoder; 0 for a text that shows none."
    if text.isascii():
        return 0
    marks = sum(map(len, _MARKS.findall(text)))
    pairs = sum(len(run) for run in _PAIRS.findall(text) if len(run) > 2 or _SINGLE.fullmatch(run))
    return max(marks + pairs, round(len(text) * share) if (share := _gbk_share(text)) > 0.65 else 0)


def mojibake_share(text: str) -> float:
    "Share of characters that are traces of a wrong decoder, one replacement character forgiven."
    marks = mojibake_marks(text)
    return min(1.0, (marks - (marks > 0 and "\ufffd" in text)) / len(text)) if marks else 0.0

# %%
lossy = "今天天气".encode("gbk").decode("utf-8", "replace")
shown = {"good": "今天天气很好。", "lossy": lossy, "twice lost": "锟斤拷锟斤拷", "half an emoji": "bad \ufffd tail"}
print({name: round(mojibake_share(text), 2) for name, text in shown.items()})
assert mojibake_share("今天天气很好。") == mojibake_share("bad \ufffd tail") == 0.0 and mojibake_share("锟斤拷锟斤拷") > 0.5
assert mojibake_marks("bad \ufffd tail") == 1 == mojibake_marks("1926 ¨C 1994")
assert mojibake_marks("Zoë, naïve, ¨") == 0
assert mojibake_share("“锟斤拷”是怎样产生的？UTF-8 的替换字符被当作 GBK 读，就成了这三个字。程序员都见过它。") < 0.1  # talking about it is not it
assert mojibake_marks("左掖梨花\n閑灑階邊草，輕隨箔外風。\n黃鶯弄不足，銜入未央宮。") == 0  # a third of its GBK bytes look like UTF-8, by chance

# %% [markdown]
# ## The stage
# A repaired document says so in its `flags`, and so does a damaged one. Code is left alone: a program may hold such
# characters on purpose. Full-width letters are a spelling, common in statutes, and not damage; whoever wants one
# spelling in the corpus asks for it.

# %%
#| export
_FULLWIDTH = {0xFF01 + i: 0x21 + i for i in range(94)}
_FULLWIDTH_IN_CHINESE = {wide: plain for wide, plain in _FULLWIDTH.items() if chr(plain) not in "!(),:;?"}
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff]")


def undo_fullwidth(text: str) -> str:
    "Full-width letters, digits and signs in their usual form; the wide punctuation of Chinese stays in Chinese."
    return text.translate(_FULLWIDTH_IN_CHINESE if _HAN.search(text) else _FULLWIDTH)


def add_flags(doc: dict, flags: list[str]) -> dict:
    "A copy of the document with these words added to its list `flags`; the document itself when there are none."
    if not flags:
        return doc
    known = doc.get("flags")
    known = known if isinstance(known, list) else []
    return doc | {"flags": [*known, *(f for f in flags if f not in known)]}


@dataclass
class Repair(DocumentStage):
    """Undo provable damage of the encoding; flag what can't be undone. Nothing is removed.

    Args:
        fullwidth: also write full-width letters and digits (ＡＢ１２) in their usual form
    """

    name: ClassVar[str] = "repair"
    fullwidth: bool = False

    def apply(self, doc: dict) -> Outcome:
        "The document with `repaired:...` and `damaged` among its flags where they apply."
        if "code" in (doc.get("domain"), doc.get("lang")):
            return Outcome(doc)
        text, done = repair_text(doc["text"])
        if self.fullwidth and (new := undo_fullwidth(text)) != text:
            text, done = new, [*done, "fullwidth"]
        marks = mojibake_marks(text)
        flags = [f"repaired:{name}" for name in done] + (["damaged"] if marks else [])
        changed = doc if text == doc["text"] else doc | {"text": text}
        return Outcome(add_flags(changed, flags), values={"damaged_share": marks / max(len(text), 1)})

# %%
wrong = {"id": "1", "text": "今天天气".encode().decode("latin-1"), "lang": "zh", "flags": ["old"]}
assert Repair().apply(wrong).document == wrong | {"text": "今天天气", "flags": ["old", "repaired:latin"]}
assert Repair().apply({"text": "bad \ufffd tail"}).document["flags"] == ["damaged"]
good = {"text": "第１条　ＡＢ，好"}
assert Repair().apply(good).document is good
assert Repair(fullwidth=True).apply(good).document["text"] == "第1条　AB，好"
assert undo_fullwidth("Ｈｅｌｌｏ，ｗｏｒｌｄ") == "Hello,world"
assert Repair().apply({"text": "x = '\ufffd'", "domain": "code"}).document == {"text": "x = '\ufffd'", "domain": "code"}

# %% [markdown]
# ## How much is put right?
# *Exact* means the very characters of the original; *silent* is what counts against us: still damaged, and not
# flagged.

# %%
#| export
_OUTCOMES = ("n", "intact", "false", "suspected", "exact", "flagged", "silent")


def repair_rates(
    documents: Iterable[dict[str, Any]], key: str = "kind", stage: Repair | None = None
) -> dict[str, dict[str, int]]:
    """What a `Repair` stage does to documents, by the value of column `key`.

    The column `clean` holds the undamaged text; without it the text itself is taken for good.
    n: documents. Never damaged: intact or false (changed), and how many are suspected (flagged). Damaged: exact (put
    right to the last character), flagged (not put right, but flagged), silent (neither).
    """
    groups: dict[str, Counter[str]] = {}
    for document in documents:
        before, clean = document["text"], document.get("clean", document["text"])
        after = (stage or Repair()).apply(document).document
        row = groups.setdefault(str(document.get(key)), Counter(dict.fromkeys(_OUTCOMES, 0)))
        row["n"] += 1
        if before == clean:
            row["intact" if after["text"] == clean else "false"] += 1
            row["suspected"] += "damaged" in after.get("flags", [])
        elif after["text"] == clean:
            row["exact"] += 1
        else:
            row["flagged" if "damaged" in after.get("flags", []) else "silent"] += 1
    return {name: dict(groups[name]) for name in sorted(groups)}

# %%
latin = lambda text: text.encode().decode("latin-1")
made = [("天气很好", latin("天气很好")), ("天气很好", "天气很好"), ("天气", "天�"), ("天气", "天汽")]
counted = repair_rates({"text": text, "clean": clean, "kind": "k"} for clean, text in made)
assert counted == {"k": {"n": 4, "intact": 1, "false": 0, "suspected": 0, "exact": 1, "flagged": 1, "silent": 1}}

# %% [markdown]
# The saved counts come from texts that really went through fourteen kinds of damage, with the original beside them,
# and from the good documents of eleven domains. They were made by the command of the chapter on quality rules; the
# texts are not part of the project.

# %%
saved = json.loads(Path("results/quality.json").read_text(encoding="utf-8"))
kinds = {name.split(":")[-1]: row for name, row in saved["repair"]["damaged"].items()}
good = saved["repair"]["good"]
hit = {name: row["n"] - row["intact"] - row["false"] for name, row in kinds.items()}
order = sorted(kinds, key=lambda k: kinds[k]["exact"] / hit[k])
fig, ax = plt.subplots(figsize=(6.4, 3.4))
left = np.zeros(len(order))
for label in ("exact", "flagged", "silent"):
    width = np.array([kinds[k][label] / hit[k] for k in order])
    ax.barh(order, width, left=left, label={"exact": "repaired exactly", "silent": "neither"}.get(label, label))
    left += width
ax.set(xlabel="share of damaged documents", xlim=(0, 1))
ax.grid(False, axis="y")
ax.legend(loc="upper center", bbox_to_anchor=(0.4, 1.14), ncol=3)
plt.show()
total = {k: sum(row[k] for row in kinds.values()) for k in ("exact", "flagged", "silent")}
print(f"{sum(hit.values())} damaged: {total}")
n, changed, flagged = (sum(row[k] for row in good.values()) for k in ("n", "false", "suspected"))
print(f"{n:,} good documents: {changed} changed, {flagged} flagged as damaged")
print("with `fullwidth`:", saved["repair"]["fullwidth"])

# %% [markdown]
# What is red is missed: full-width letters, on purpose, and most of them are put right by the option; every other
# kind is put right or flagged. The good documents that are changed lose byte-order marks and zero-width spaces that
# somebody's editor left in them, and one is a manual page about terminals that meant its control characters.
#
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | damage to encodings can be undone without a guess | holds where the bytes survived | of 323 damaged texts 167 put right to the last character, 131 flagged, 25 neither (all of them full-width letters); of 25,181 good documents 7 changed, invisible characters only |
#
# What this does not cover: damage in scripts other than Latin and Chinese, Big5 read as GBK (undone by nobody without
# a guess), and text that was translated or transliterated wrongly, which leaves no trace in its bytes.
