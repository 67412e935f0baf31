# %% [markdown]
# # Rules for Chinese
#
# > What the English rules can't see in Chinese, and a set that can: thresholds from a published Chinese corpus where there is one, our own where there is none.
#
# Gopher's words are three to ten letters long and two of them are *the* and *of*; C4's sentences end in a full stop
# of one byte. Held to them, every good Chinese text falls. The ideas behind the rules carry over, the numbers don't.

# %%
#| default_exp data.chinese

# %%
#| export
from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from scalelab.data.rules import Rule, RuleSet, named
from scalelab.data.rulesets import C4, FINEWEB, GOPHER, HAN_CLASS, TERMINAL, share_of_lines

# %%
#| hide
import matplotlib.pyplot as plt

from scalelab.core.plotting import style
from scalelab.data.documents import read_documents
from scalelab.data.rules import Text, failures

style()

# %% [markdown]
# ## What English rules do to Chinese
# The samples of this project hold eighty or so Chinese texts that nobody would call bad. Which rules let them pass,
# with a character for a word, and with a segmenter's words?

# %%
samples = read_documents(["../../data_samples/*.jsonl"])
every = [d for d in samples if d["lang"] == "zh" and not d["id"].startswith("planted")]
good = [d for d in every if len(d["text"]) >= 150]
english = GOPHER.rules | C4.rules | FINEWEB.rules
shares = {}
for segment in (False, True):
    texts = [Text(d["text"], segment) for d in good]
    for rule in english.values():
        shares[segment, rule.name] = np.mean([rule.fails(rule.statistic(t), rule.threshold) for t in texts])
names = [name for name in english if shares[False, name] + shares[True, name] > 0.02]
fig, ax = plt.subplots(figsize=(6.4, 0.3 * len(names) + 1))
for shift, segment in ((0.2, False), (-0.2, True)):
    label = "segmenter's words" if segment else "characters as words"
    ax.barh(np.arange(len(names))[::-1] + shift, [shares[segment, n] for n in names], 0.4, label=label)
ax.set_yticks(np.arange(len(names))[::-1], names)
ax.set(xlabel=f"share of {len(good)} good Chinese texts that the rule removes")
ax.grid(False, axis="y")
ax.legend()
plt.show()
fatal = ("gopher_short_words", "gopher_stop_words", "c4_sentences")
assert min(shares[segment, name] for segment in (False, True) for name in fatal) > 0.9

# %% [markdown]
# Segmentation does not help: a Chinese word has fewer than two characters in the mean. What carries over as it stands
# are the rules on repetition and on lines, short lines apart: thirty characters are a full sentence of Chinese.
#
# ## The set
# Four thresholds come from the released preprocessing of ChineseWebText (Chen et al., 2023): more than 200
# characters, ten a line in the mean, 30% Han, and at most half of the 13-grams repeated. It also drops every page
# with a traditional character, which we leave out, and counts words of a list of 1,500; ours is a short one of the
# trades that spam lives by. The rest carries Gopher's and FineWeb's ideas over to a script without spaces: marks at
# line ends (counting 。！？”…), common function words (of modern *and* classical Chinese), stretches without any mark,
# and one character stuttered. Their thresholds are our own, set on the good text that we have.

# %%
#| export
_HAN = re.compile(f"[{HAN_CLASS}]")
_MARK_RUN = re.compile(r"[^\s，。、；：？！…—·“”‘’「」『』《》〈〉（）【】〔〕,.;:?!'\"()\[\]|/-]+")
_STUTTER = re.compile(r"([^\W\d_])\1{4,}")
_FUNCTION_WORDS = tuple("的了是在和有不这我们之也而以其於于为為者何人")
_ZH_ENDS = (*TERMINAL, "”", "」", "』", "’", "；", "：", "）", ";", ":", '"', ")")
_TRADES = re.compile("|".join((
    "六合彩|时时彩|北京赛车|百家乐|老虎机|博彩|赌场|赌博|棋牌|彩票计划|真人娱乐|澳门新?葡京",
    "私服|外挂|刷单|代开发票|代孕|办证|假证|迷药|援交|一夜情|成人用品|丰胸|壮阳|早泄|增高药",
    "裸聊|无码|情色|色情|激情视频|性爱|套现|高利贷|网赚|日赚|月入过万|加微信|加[Qq]{2}|减肥药",
)))


def han_share(text: str) -> float:
    "Han characters as a share of all characters."
    return len(_HAN.findall(text)) / max(len(text), 1)


def mean_line_length(text: str) -> float:
    "Characters per line."
    return len(text) / (text.count("\n") + 1)


def repeated_13grams(text: str) -> float:
    "Share of the 13-grams of characters (lower case, without white space) that occur more than once."
    plain = "".join(text.lower().split())
    code = np.frombuffer(plain.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    if len(code) < 14:
        return 0.0
    grams = np.zeros(len(code) - 12, np.uint64)
    for i in range(13):
        grams = (grams + code[i : i + len(grams)]) * np.uint64(0x9E3779B97F4A7C15)
    times = np.unique(grams, return_counts=True)[1]
    return float(times[times > 1].sum() / len(grams))


def unbroken(text: str) -> float:
    "Han characters in stretches of more than 60 characters without a mark or a space, as a share of all Han."
    runs = [len(_HAN.findall(run)) for run in _MARK_RUN.findall(text) if len(run) > 60]
    return sum(runs) / max(len(_HAN.findall(text)), 1) if runs else 0.0


def stuttered(text: str) -> float:
    "Share of characters in runs of five or more equal letters (哈哈哈哈哈)."
    return sum(len(match[0]) for match in _STUTTER.finditer(text)) / max(len(text), 1)

# %%
#| export
def trade_words(text: str) -> float:
    "Different words of the spamming trades per line."
    return len(set(_TRADES.findall(text))) / (text.count("\n") + 1)

# %%
assert han_share("天a地 ") == 0.5 and mean_line_length("天地\n玄黄") == 2.5
assert repeated_13grams("天地玄黄宇宙洪荒日月盈昃辰宿" * 4) == 1.0 and repeated_13grams("天地玄黄") == 0.0
assert unbroken("天" * 80 + "，地") == 80 / 81 and unbroken("天地玄黄，" * 30) == 0.0
assert stuttered("哈哈哈哈哈好") == 5 / 6 and stuttered("-----") == 0.0 == stuttered("11111")
assert trade_words("六合彩私服\n正文") == 1.0 and trade_words("天气很好") == 0.0

# %%
#| export
_ZH = frozenset({"zh", "zh-Hans", "zh-Hant", "lzh"})


def _zh(name: str, reason: str, statistic: Callable[[str], float], threshold: float, below: bool = False) -> Rule:
    return Rule(name, reason, statistic, threshold, below, langs=_ZH)


CHINESE = RuleSet("chinese", "Chen et al. 2023, arXiv:2311.01149 (first four); the others: this project", named(
    _zh("zh_short", "at most 200 characters", lambda text: float(len(text)), 201, below=True),
    _zh("zh_line_length", "lines of fewer than ten characters in the mean", mean_line_length, 10, below=True),
    _zh("zh_han_share", "less than three tenths Han", han_share, 0.3, below=True),
    _zh("zh_repeated_13grams", "half of the text stands there twice", repeated_13grams, 0.5),
    _zh("zh_terminal_lines", "few lines end in a mark",
        lambda text: share_of_lines(text, lambda line: line.rstrip().endswith(_ZH_ENDS)), 0.12, below=True),
    _zh("zh_function_words", "not two of the commonest function words",
        lambda text: float(sum(word in text for word in _FUNCTION_WORDS)), 2, below=True),
    _zh("zh_unbroken", "long stretches without any mark", unbroken, 0.5),
    _zh("zh_stuttered", "one character over and over", stuttered, 0.1),
    _zh("zh_trade_words", "words of the spamming trades in every other line", trade_words, 0.5),
))

# %%
zh = lambda text: [v.rule for v in failures({"text": text, "lang": "zh"}, CHINESE.rules)]
news = "昨天下午，这里下了一场大雨，街上的人都跑到屋檐下面去了。雨停以后，我们又走了出来，天边有一道彩虹。"
seasons = "\n".join(f"{season}天的时候，{news}" for season in "春夏秋冬")
assert zh(news) == ["zh_short"] and zh(seasons) == ["zh_repeated_13grams"]
assert zh("六合彩 私服 代孕 办证 " * 30)[-1] == "zh_trade_words" and zh("啊" * 300)[-1] == "zh_stuttered"
assert failures({"text": "x", "lang": "en"}, CHINESE.rules) == []

# %% [markdown]
# ## On the samples
# Each rule by itself on the good Chinese samples of any length: a set for the web is too strict for poems, which is
# what domains are for.

# %%
by_domain = {}
for doc in every:
    row = by_domain.setdefault(doc["domain"], {"texts": 0, "removed": 0, "by": {}})
    found = failures(doc, CHINESE.rules)
    row["texts"] += 1
    row["removed"] += bool(found)
    for verdict in found:
        row["by"][verdict.rule] = row["by"].get(verdict.rule, 0) + 1
for domain, row in sorted(by_domain.items()):
    print(f"{domain:10} {row['removed']:3} of {row['texts']:3} removed", row["by"])

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | the well-known rules clean a Chinese web | does not hold | C4's sentence rule and Gopher's rules on word length and stop words remove nearly every good Chinese text (asserted), with characters for words and with a segmenter's words alike |
#
# What this does not cover: a comparison of these thresholds on a real Chinese crawl with labels, and the list of
# 1,500 words that the published pipeline counts.
