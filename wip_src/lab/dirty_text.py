# %% [markdown]
# # Bad text with known faults
#
# > Good text damaged on purpose, pages of nothing but furniture, and splits that keep the test out of the training.
#
# Whoever measures a filter needs bad text whose faults are known, and has to keep it away from what the filter
# learned from: not the same text, not its near-twin, not another page from the same template. The benches of the
# next chapters share what stands here.

# %%
#| default_exp lab.dirty_text

# %%
#| export
from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from urllib.parse import quote

import numpy as np
import xxhash

from scalelab.data.dedup import content_hash
from scalelab.data.documents import read_documents

# %%
#| hide
import matplotlib.pyplot as plt

from scalelab.core.plotting import style
from scalelab.data.repair import mojibake_share

style()

# %% [markdown]
# ## Sides
# A text's side is decided by a hash of the text, so that it does not depend on order, and equal texts go to one side.

# %%
#| export
def side(text: str, parts: int) -> int:
    "0 .. parts - 1, from the text alone; texts that are equal up to white space are on one side."
    return int.from_bytes(content_hash(text)[:4], "little") % parts


def read_corpus(folder: Path, *names: str) -> list[dict]:
    "Documents of `folder/name.jsonl`, in any packing, of those files that are there."
    files = [f for name in names for f in sorted(folder.glob(f"{name}.jsonl*"))]
    return list(read_documents(files)) if files else []


# %%
assert side("a  b", 7) == side("a b\n", 7) and {side(str(k), 3) for k in range(50)} == {0, 1, 2}
assert read_corpus(Path("no/such/folder"), "x") == []
assert len(read_corpus(Path("../../data_samples"), "zh_prose", "not_there")) == 40

# %% [markdown]
# ## Damage
# Wrong decoders, escapes, holes, shuffled characters, a line again and again: each a function of a text and a
# source of chance.

# %%
#| export
def _shuffled(text: str, rng: random.Random) -> str:
    return "".join(rng.sample(text, len(text)))


def _holes(text: str, rng: random.Random) -> str:
    return "".join("\ufffd" if rng.random() < 0.03 else c for c in text)


def one_line_again(text: str, rng: random.Random) -> str:
    "The beginning of the longest line, 6 to 20 times."
    return "\n".join([max(text.split("\n"), key=len)[:40]] * rng.randint(6, 20))


def _bytes(text: str, encoding: str = "utf-8") -> bytes:
    return text.encode(encoding, "replace")


DAMAGE: dict[str, Callable[[str, random.Random], str]] = {
    "utf8_as_latin1": lambda text, rng: _bytes(text).decode("latin-1"),
    "utf8_as_gbk": lambda text, rng: _bytes(text).decode("gbk", "replace"),
    "gbk_as_utf8_fffd": lambda text, rng: _bytes(text, "gbk").decode("utf-8", "replace"),
    "percent": lambda text, rng: quote(_bytes(text)),
    "fffd_sprinkle": _holes,
    "shuffled": _shuffled,
    "one_line_again": one_line_again,
}


def changed(doc: dict) -> float:
    "Share of the pairs of characters of `text` that `clean` does not have: how much of the damage can be seen."
    original = {doc["clean"][i : i + 2] for i in range(len(doc["clean"]) - 1)}
    found = [doc["text"][i : i + 2] not in original for i in range(len(doc["text"]) - 1)]
    return float(np.mean(found)) if found else 0.0


# %%
rng = random.Random(1)
verse = "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。" * 4
for kind, damage in DAMAGE.items():
    damaged = damage(verse, rng)
    print(f"{kind:17} {changed({'clean': verse, 'text': damaged}):4.0%} changed  {damaged[:24]!r}")
    assert damaged != verse
assert changed({"text": "abcd", "clean": "abcd"}) == 0 and changed({"text": "xyz", "clean": "abc"}) == 1
ascii_text = "Plain English, whatever the decoder."
assert DAMAGE["utf8_as_latin1"](ascii_text, rng) == ascii_text, "English in ASCII can't be damaged this way"

# %% [markdown]
# ## Furniture
# Menus, notices and advertising, written for training only. `{w}` is a ware and `{n}` a number.

# %%
#| export
_FURNITURE = {
    "zh": (
        "当前位置：首页 > 新闻中心 > {w} > 正文", "打印本页 | 关闭窗口 | 返回顶部 | 收藏", "点赞 收藏 转发 评论({n})", "热门推荐：{w} {w} {w}",
        "声明：转载此文出于传递信息之目的，观点不代表本站立场", "买{w}请加微信，{w}代理，{w}加盟，{w}一手货源", "网页加载中，请稍候……",
        "注册 | 登录 | 忘记密码 | 帮助中心", "粤公网安备 {n}号 Copyright {n}", "浏览次数：{n} 发布时间：{n}-{n}", "客服热线 在线咨询 QQ交谈",
        "高清完整版 第{n}集 免费下载 无需会员", "特价！{w}直降{n}元，先到先得！！", "{w}图片_{w}品牌_{w}排行榜_{w}网", "上一页 1 2 3 4 5 下一页 尾页",
    ),
    "en": (
        "Home > Products > {w} > Details", "Log in or register to post comments", "Page {n} of {n} Previous Next Last",
        "We use cookies to improve your experience. Learn more OK", "Sign up for our newsletter and get {n}% off!",
        "Follow us Twitter Instagram YouTube RSS", "Best {w} deals {n}: compare {w} prices, {w} reviews, {w} coupons",
        "All trademarks belong to their respective owners.", "{n} comments Reply Report Permalink",
        "500 Internal Server Error", "Skip to main content Menu Search Close", "Related posts: {w} {w} {w}",
        "Add to cart Add to wishlist Free shipping over ${n}", "Powered by WordPress Theme by Acme",
        "Earn ${n} a day from home, no experience needed!!!",
    ),
}
_WARES = {"zh": "手机壳 茶叶 地板 空调 鞋柜 面膜 钢管".split(), "en": "phones sofas tickets lamps loans tyres pills".split()}


def furniture_page(lang: str, rng: random.Random) -> str:
    "A page of nothing but furniture, 1 to 14 lines of up to 8 different kinds."
    lines = rng.sample(_FURNITURE[lang], rng.randint(1, 8))
    ware = rng.choice(_WARES[lang])
    chosen = [rng.choice(lines).replace("{w}", ware) for _ in range(rng.randint(1, 14))]
    return "\n".join(re.sub(r"\{n\}", lambda _: str(rng.randint(1, 3000)), line) for line in chosen)


def cut_like(docs: Sequence[dict], lengths: Sequence[int], rng: random.Random) -> list[dict]:
    "A piece of each document, its length drawn from `lengths`: a judge must not win by length."
    out = []
    for doc in docs:
        n = rng.choice(lengths)
        start = rng.randint(0, max(0, len(doc["text"]) - n))
        out.append(doc | {"text": doc["text"][start : start + n]})
    return out


# %%
print(furniture_page("zh", rng).split("\n")[0], "|", furniture_page("en", rng).split("\n")[0])
assert "{" not in "".join(furniture_page(lang, rng) for lang in ("zh", "en") for _ in range(50))
assert {len(d["text"]) for d in cut_like([{"text": verse}] * 50, [10, 30], rng)} == {10, 30}

# %% [markdown]
# ## Clean text on three sides

# %%
#| export
CLEAN_FILES = (
    "zh_wiki_cmrc zh_docs_vue zh_docs_rustbook zh_book_d2l zh_law zh_classical zh_poetry zh_dialogue_crosswoz "
    "zh_dialogue_kdconv zhtw_wiki_drcd zh_instruction_belle_seed en_gutenberg en_wikitext2 en_tinyshakespeare "
    "en_instruction_seed"
).split()


@dataclass
class Clean:
    "Good text on three sides; what a dirty corpus was made from can be kept off all of them."

    train: list[dict]
    tune: list[dict]
    test: list[dict]

    @classmethod
    def read(cls, data: Path, banned: Iterable[str], most: int) -> Clean:
        "At most `most` documents of each of CLEAN_FILES in `data/1_pretrain`, their first 20,000 characters."
        sides, banned = ([], [], []), set(banned)
        for name in CLEAN_FILES:
            docs = read_corpus(data / "1_pretrain", name)
            docs.sort(key=lambda d: xxhash.xxh3_64_intdigest(d["id"].encode()))
            lang = "en" if name.startswith("en") else "zh"
            for doc in [d for d in docs if d["id"] not in banned and len(d["text"]) >= 40][:most]:
                sides[(0, 0, 0, 1, 2)[side(doc["text"], 5)]].append(doc | {"lang": lang, "text": doc["text"][:20_000]})
        return cls(*sides)


# %%
nothing = Clean.read(Path("no/such/folder"), [], 5)
assert (nothing.train, nothing.tune, nothing.test) == ([], [], [])

# %% [markdown]
# ## Templates split
# Spam is made from few lines with blanks filled in. To train on half of the *pages* would show all of the lines.
# So lines are grouped by what they have in common, the groups are dealt to two sides, and the pages of each side
# keep only their own lines.

# %%
#| export
def line_groups(lines: Iterable[str], alike: float = 0.25) -> dict[str, int]:
    "Group of each line: lines are joined when their sets of character pairs overlap by `alike` (digits are all 0)."
    distinct = sorted({re.sub(r"\d+", "0", line) for line in lines})
    sets = [{t[i : i + 2] for i in range(len(t) - 1)} for t in distinct]
    group = list(range(len(distinct)))
    for i, j in combinations(range(len(distinct)), 2):
        if group[i] != group[j] and len(sets[i] & sets[j]) >= alike * len(sets[i] | sets[j]) > 0:
            low, high = sorted((group[i], group[j]))
            group = [low if g == high else g for g in group]
    return dict(zip(distinct, group))


def split_templates(docs: Sequence[dict]) -> tuple[list[dict], list[dict]]:
    "The pages twice, each time with the lines of one half of the templates only; empty pages are left out."
    groups = line_groups(line for doc in docs for line in doc["text"].split("\n"))
    shuffled = sorted(set(groups.values()), key=lambda g: xxhash.xxh3_64_intdigest(str(g).encode()))
    half = {group: k % 2 for k, group in enumerate(shuffled)}
    halves = ([], [])
    for doc in docs:
        for k in (0, 1):
            own = [line for line in doc["text"].split("\n") if half[groups[re.sub(r"\d+", "0", line)]] == k]
            if any(own):
                halves[k].append(doc | {"text": "\n".join(own)})
    return halves


# %%
assert len(set(line_groups(["买茶叶请加微信，茶叶代理", "买地板请加微信，地板代理", "网页加载中"]).values())) == 2
halves = split_templates([{"text": furniture_page("zh", rng)} for _ in range(60)])
seen = [{re.sub(r"\d+", "0", line) for d in half for line in d["text"].split("\n")} for half in halves]
assert not seen[0] & seen[1] and min(map(len, seen)) > 5
print(f"{len(seen[0])} and {len(seen[1])} different lines on the two sides, none on both")

# %% [markdown]
# ## The furniture of real pages
# Real HTML pages have menus and footers of their own. A block of text is furniture when it stands in an element that
# says so (`nav`, `footer`, a class called menu) or when most of its letters are links; it is main text when it is a
# paragraph of 80 characters with few links. What is in between is not judged.

# %%
#| export
_BREAKS = frozenset((
    "p div li td th tr table ul ol h1 h2 h3 h4 h5 dt dd section article nav footer header aside br form body").split())
_VOID = frozenset("br img meta link input hr area base col embed source wbr".split())
_NAMED = re.compile(r"\b(?:nav|menu|footer|sidebar|breadcrumb|toc|share|related|social|banner)", re.I)

# %%
assert _NAMED.search("side-menu") and _NAMED.search("nav") and not _NAMED.search("unavailable")

# %%
#| export
class _Blocks(HTMLParser):
    "Blocks of text of a page: (text, share of it in links, inside furniture, inside a paragraph)."

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.stack, self.blocks, self.words, self.linked = [], [], [], 0

    def finish(self) -> None:
        "End the block at hand."
        if text := " ".join("".join(self.words).split()):
            inside = any(furniture for _, furniture in self.stack)
            self.blocks.append((text, self.linked / len(text), inside, any(tag == "p" for tag, _ in self.stack)))
        self.words, self.linked = [], 0

    def handle_starttag(self, tag, attrs):
        if tag in _BREAKS:
            self.finish()
        if tag not in _VOID:
            named = " ".join(str(v) for k, v in attrs if k in ("class", "id", "role"))
            self.stack.append((tag, tag in ("nav", "footer") or bool(_NAMED.search(named))))

    def handle_endtag(self, tag):
        if tag in _BREAKS:
            self.finish()
        if any(tag == t for t, _ in self.stack):
            while self.stack.pop()[0] != tag:
                pass

    def handle_data(self, data):
        if not any(t in ("script", "style", "head", "noscript") for t, _ in self.stack):
            self.words.append(data)
            self.linked += len(data.strip()) if any(t == "a" for t, _ in self.stack) else 0


def page_parts(html: str) -> tuple[str, str]:
    "(main text, furniture) of a page, blocks joined by line ends; what is neither is left out."
    parser = _Blocks()
    parser.feed(html)
    parser.close()
    parser.finish()
    main = [t for t, links, inside, in_p in parser.blocks if in_p and not inside and links < 0.2 and len(t) >= 80]
    return "\n".join(main), "\n".join(t for t, links, inside, _ in parser.blocks if inside or links > 0.6)


# %%
page = f"""<html><head><title>x</title><style>p{{}}</style></head><body>
<nav><a href=a>Home</a> <a href=b>News</a></nav><div class=side-menu>Login</div>
<p>{'A sentence of the article itself. ' * 5}</p><p>short</p>
<div><a href=c>Read more about this</a></div><footer>Copyright</footer></body></html>"""
main, rest = page_parts(page)
assert main.startswith("A sentence") and rest.split("\n") == ["Home News", "Login", "Read more about this", "Copyright"]
assert page_parts("<p><div></p>text</b></nav>") == ("", "")

# %% [markdown]
# How loud is each kind of damage? The share of characters that a rule for mojibake marks, on forty documents of
# prose:

# %%
prose = [d["text"] for d in read_corpus(Path("../../data_samples"), "zh_prose")]
marks = {kind: [mojibake_share(damage(t, random.Random(k))) for k, t in enumerate(prose)]
         for kind, damage in DAMAGE.items()}
fig, ax = plt.subplots(figsize=(5.4, 2.2))
ax.boxplot(list(marks.values()), orientation="horizontal", widths=0.6)
ax.set_yticks(range(1, len(marks) + 1), marks, fontsize=8)
ax.set(xlabel="share of characters that show traces of a wrong decoder")
plt.show()
assert np.median(marks["utf8_as_latin1"]) > 0.9 and max(marks["shuffled"]) == 0

# %% [markdown]
# What to see: wrong decoders leave marks that a rule can count. Shuffled text, escapes and repeated lines leave
# none, and these are what a classifier and a language model are for.
#
# ## Verdict
# | question | answer |
# |---|---|
# | is nothing of the test trained on? | holds: sides by a hash of the text, templates by what lines share |
