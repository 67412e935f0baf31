# %% [markdown]
# # Page furniture and advertising
#
# > Which share of a text is menus, notices and keyword spam: two statistics for the rules, from general phrases of Chinese and English.
#
# What an extraction leaves of a web page is often its frame: menus, cookie notices, licence numbers, "next article",
# and advertising. It comes as short pieces, and an article that ends with "all rights reserved" holds little of it.

# %%
#| default_exp data.furniture

# %%
#| export
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from scalelab.data.rules import shared

# %%
#| hide
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from scalelab.core.plotting import style
from scalelab.data.documents import read_documents, stdlib_documents

style()

# %% [markdown]
# ## Phrases, and pieces of text
# The text is cut into pieces at line ends and exclamation marks, each piece is looked at alone, and what counts is
# the *share of characters* in pieces of furniture or advertising. An article that ends with "all rights reserved"
# keeps its share small. The phrases are general ones of both languages; any fixed list is the weak point of such a
# rule, and the figures below say how weak.

# %%
#| export
_FURNITURE_ZH = re.compile("|".join([
    r"首页|关于我们|联系(?:我们|方式)|网站(?:地图|导航)|友情链接|广告(?:服务|合作)|版权所有|ICP[备证]|公网安备",
    r"侵权.{0,8}(?:联系|删除)|未经.{0,6}转载|禁止.{0,4}转载|转载请注明|本站.{0,10}(?:来源|转载|整理)[于自]",
    r"登录后|请先?登录|立即(?:注册|登录)|免费注册|忘记密码|用户登录|(?:加载|查看|阅读|了解)更多|展开(?:全文|阅读)",
    r"点击(?:加载|查看|展开|下载)|浏览器(?:不支持|版本)|刷新(?:本页|页面|重试)|启用 ?JavaScript|责任编辑|分享到",
    r"转发到|上一[篇页条]|下一[篇页条]|扫(?:码|一扫|描)|(?:关注|微信)公众号|返回(?:顶部|首页)|收藏本[站页]|设为首页",
    r"相关(?:阅读|推荐|文章)|热门(?:推荐|文章)|猜你喜欢|(?:全部|暂无|发表)评论|我的订单|购物车|点赞|收藏|转发|朋友圈",
    r"新浪微博|QQ(?:好友|空间)|复制链接|下载 ?(?:APP|客户端)|打开(?:APP|客户端)|换一换|举报|不感兴趣",
    r"新人.{0,4}优惠",
]))
_FURNITURE_EN = re.compile("|".join([
    r"all rights reserved|terms of (?:use|service)|privacy (?:policy|notice)|terms \||\| *privacy|site ?map",
    r"cookies?\b|we value your privacy|our partners|personali[sz]ed (?:ads|content)|(?:accept|reject) all\b",
    r"manage preferences|you consent to|save and close|always active|subscribe (?:to|now|here)|sign (?:in|up)\b",
    r"log ?in\b|my account|leave a (?:comment|reply)|posted (?:in|by|on)\b|share (?:on|this)|pin it|follow us",
    r"(?:read|load) more|click here|skip to (?:main )?content|back to top|(?:enable|requires?) javascript",
    r"javascript is (?:disabled|required)|40[34] (?:not found|forbidden)|page not found|you m(?:ay|ight) also like",
    r"related (?:posts|articles)|powered by|add to cart|home *[|>»]|contact us|about us",
]))
_SPAM_ZH = re.compile("|".join([
    r"限时|秒杀|[原现特]价|全国包邮|仅剩|最后[0-9]+[件天]|免费(?:领取|试用|观看|下载|咨询)|加(?:微信|V信|QQ)|微信号",
    r"在线观看|高清(?:无码|视频)?|日[赚入][0-9]*|轻松赚|兼职|博彩|开户送|澳门|棋牌|贷款|信用卡套现|代开发票|办证|哪家好",
    r'多少钱|厂家(?:直销)?|批发|价格|报价|排名优化|回复[“"].{1,12}[”"]|领取资料|点击购买',
    r"立即(?:购买|抢购|下单|拨打)|祖传秘方|包治|减肥茶",
]))
_SPAM_EN = re.compile("|".join([
    r"buy (?:cheap|now|online)|cheap \w+|discount|(?:best|lowest) price|free (?:shipping|trial|download)",
    r"only \$ ?\d+|was \$ ?\d+|(?:act|order) now|limited (?:time|offer)|casino|viagra|jackpot|make money|earn \$",
    r"work from home|lorem ipsum",
]))
# a word of every English phrase above: pieces without any are not searched, which makes the rule four times as fast
_HINTS = frozenset("""
    rights terms privacy sitemap site cookie cookies partners personalised personalized accept reject preferences
    consent close active subscribe sign log login account comment reply posted share pin follow read load click
    skip top javascript found forbidden like related powered cart home contact about buy cheap discount price
    shipping trial download only was now limited casino viagra jackpot money earn work lorem
""".split())
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]")
_PIECE = re.compile(r"[\n！!。]+|(?<=[a-z\]])\. +")

# %%
#| export
def _pieces(text: str) -> Iterator[str]:
    "The text in short pieces: sentences and lines, long ones cut at spaces and commas into about 150 characters."
    for piece in _PIECE.split(text):
        piece = piece.strip()
        if len(piece) <= 200:
            yield piece
            continue
        part = ""
        for word in re.split(r"(?<=[\s，,；;])", piece):
            part += word
            if len(part) >= 150:
                yield part.strip()
                part = ""
        yield part.strip()

# %% [markdown]
# Stuffing alone proves nothing ("what's your favourite food, what's your favourite film" is a fair exercise), and
# neither does one phrase in a long sentence. A piece counts as advertising when it holds two different phrases, or
# one in a dozen words; stuffed pieces count when the text holds such a phrase anywhere.

# %%
#| export
def _is_stuffed(han: str, words: list[str]) -> bool:
    "Does one word or pair of characters take up much of a piece? 净水器净水器净水器; shoes shoes shoes."
    pairs = [han[i : i + 2] for i in range(len(han) - 1)]
    if len(pairs) >= 5 and len(set(pairs)) <= len(pairs) - 2:
        times = Counter(pairs).most_common(1)[0][1]
        if times >= 3 and 2 * times >= (0.2 if times >= 5 else 0.3) * len(han):
            return True
    long = [word for word in words if len(word) >= 4]
    if len(long) < 4 or len(set(long)) == len(long):
        return False
    return Counter(long).most_common(1)[0][1] >= max(3, 0.25 * len(long))


def _piece_kind(piece: str) -> str:
    '"spam", "furniture", "stuffed" or "" for an ordinary piece.'
    han, words = "".join(_HAN.findall(piece)), re.findall(r"[a-z]+", low := piece.lower())
    spam, furniture = set(), 0
    if len(han) >= 2:
        spam.update(_SPAM_ZH.findall(piece))
        furniture += len(_FURNITURE_ZH.findall(piece))
    if not _HINTS.isdisjoint(words):
        spam.update(_SPAM_EN.findall(low))
        furniture += len(_FURNITURE_EN.findall(low))
    size = len(han) + len(words)
    if len(spam) >= 2 + size // 40:
        return "spam"
    if furniture and size <= 16 * furniture:
        return "furniture"
    if spam and size <= 12:
        return "spam"
    return "stuffed" if _is_stuffed(han, words) else ""


def _has_phrase(text: str) -> bool:
    "Does any phrase stand anywhere? Without one no piece can count, and most good documents have none."
    if _HAN.search(text) and (_FURNITURE_ZH.search(text) or _SPAM_ZH.search(text)):
        return True
    low = text.lower()
    if _HINTS.isdisjoint(re.findall(r"[a-z]+", low)):
        return False
    return _FURNITURE_EN.search(low) is not None or _SPAM_EN.search(low) is not None

# %%
#| export
@shared
def _junk_pieces(text: str) -> tuple[float, float]:
    "Shares of the characters in pieces of page furniture and in pieces of advertising, of the first 20,000 characters."
    sizes: Counter[str] = Counter()
    if not _has_phrase(text[:20_000]):
        return 0.0, 0.0
    for piece in _pieces(text[:20_000]):
        sizes["all"] += len(piece)
        if 2 <= len(piece) <= 400:  # a longer one has neither spaces nor commas: no sentence of either kind
            sizes[_piece_kind(piece)] += len(piece)
    if sizes["stuffed"]:
        sure = sizes["spam"] or sizes["furniture"] or _SPAM_ZH.search(text) or _SPAM_EN.search(text.lower())
        sizes["spam"] += sizes["stuffed"] if sure else 0
    return sizes["furniture"] / max(sizes["all"], 1), sizes["spam"] / max(sizes["all"], 1)

# %% [markdown]
# A page may be half menu and half advertising; both rules therefore look at the sum, and the larger part gives the
# name.

# %%
#| export
def boilerplate(text: str) -> float:
    "Share of page furniture and advertising together, 0 when there is more advertising than furniture."
    furniture, spam = _junk_pieces(text)
    return furniture + spam if furniture >= spam else 0.0


def keyword_spam(text: str) -> float:
    "Share of page furniture and advertising together, 0 when there is more furniture than advertising."
    furniture, spam = _junk_pieces(text)
    return furniture + spam if spam > furniture else 0.0

# %%
page = "网站首页 | 关于我们 | 联系我们 | 友情链接\n请登录后查看\n沪ICP备00000000号 版权所有\n"
assert boilerplate(page) == 1.0 and keyword_spam(page) == 0.0
assert boilerplate("Home | About us | Contact us\nAccept all cookies\nPrivacy policy") == 1.0
assert keyword_spam("热水器热水器热水器哪家好，热水器批发价格\n限时特价，免费咨询！") == 1.0
assert keyword_spam("cheap boots boots boots best price") == 1.0
article = "双方签订合同后，卖方应在三十日内交付货物，价格以附件为准。买方登录系统确认收货，逾期视为验收合格。"
assert boilerplate(article) == keyword_spam(article) == 0.0 == boilerplate("A plain sentence about a river.")
assert boilerplate(article * 5 + "\n版权所有，未经许可不得转载。") < 0.1

# %% [markdown]
# ## How far apart are good text and junk?
# The samples that come with the project hold planted junk, with the truth in a file, and good texts that look a
# little like it.

# %%
samples = Path("../../data_samples")
truth = json.loads((samples / "truth.json").read_text(encoding="utf-8"))
junk = {entry["id"]: entry["kind"] for entry in truth["junk"]}
share = lambda doc: sum(_junk_pieces(doc["text"]))
found = {"good": [], "menus and spam": []}
for doc in read_documents(sorted(samples.glob("*.jsonl"))):
    kind = junk.get(doc["id"], "good")
    if kind in ("good", "boilerplate", "keyword_spam", "menu", "spam"):
        found["good" if kind == "good" else "menus and spam"].append(share(doc))
found["Python's documents"] = [share(d) for d in stdlib_documents(1_000_000) if d["domain"] == "docs"]
fig, ax = plt.subplots(figsize=(6, 2.4))
for place, (name, values) in enumerate(found.items()):
    ax.plot(values, np.full(len(values), place) + np.linspace(-0.2, 0.2, len(values)), "o", ms=3, alpha=0.6)
    print(f"{name:20} {len(values):4} texts, {min(values):.2f} to {max(values):.2f}")
ax.axvline(0.5, color="k", lw=1, ls="--")
ax.set_yticks(range(len(found)), list(found))
ax.set(xlabel="share of characters in pieces of furniture and advertising", xlim=(-0.03, 1.03))
plt.show()
assert max(found["good"] + found["Python's documents"]) < 0.5 < min(found["menus and spam"])

# %% [markdown]
# The dashed line is the threshold of the rules that use this share. The gap is wide because these texts were written
# to be one thing or the other; a shop's page with half an article on it would stand in the middle.
#
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | page furniture and advertising are found by general phrases | holds in part | all planted pages and no good one beyond the threshold; the phrases are a fixed list, and the page of a shop that avoids them passes |
#
# What this does not cover: other languages than Chinese and English, and templates that no list knows: those show by
# being in many documents, which is the chapter on templates.
