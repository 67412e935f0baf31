# %% [markdown]
# # Abusive text
#
# > Rules that see through disguises, a small classifier for what rules can't say, and the whole curve of thresholds.
#
# The first article says that rules catch about 82% of clear abuse, and that rules with a small model at a threshold
# of 0.85 bring false positives from 37% down to 6.3% (A-tox). Here are both parts; on which text the claim holds is
# measured with labelled forum posts, and with pairs of sentences made to be confused.
#
# This chapter quotes insults where a test needs one, and keeps them few. No weights come with the package: they
# would repeat the prejudices of whoever labelled the posts. What ships is the rules, and the code that trains on
# labels of your own.

# %%
#| default_exp data.toxicity

# %%
#| export
from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from scalelab.core.config import UsageError
from scalelab.data.classifier import TextClassifier, train_classifier
from scalelab.data.recipe import DocumentStage, Outcome
from scalelab.data.repair import add_flags
from scalelab.data.roc import sigmoid

# %%
#| hide
import json
import pickle
import random
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import Markdown

from scalelab.core.plotting import COLORS, style
from scalelab.data.documents import read_documents
from scalelab.data.roc import at_threshold
from scalelab.lab.runner import load_verdicts, verdict_table

style()

# %% [markdown]
# ## Words
# Some words are abuse wherever they stand; weaker ones count in numbers only. A word that also has an honest use is
# on neither list: 废物 is rubbish in every law on waste, and 禽兽 are birds and beasts in every classic.

# %%
#| export
_HAN = "\u3400-\u4dbf\u4e00-\u9fff"
_HAS_HAN = re.compile(f"[{_HAN}]")


def _any_of(words: Sequence[str]) -> str:
    """A pattern for any of the words, longest first; a Latin end must not go on in Latin letters.

    It begins with a look at the first character, which turns most positions away at once.
    """
    def bounded(word: str) -> str:
        return r"(?<![a-z])" * word[0].isascii() + re.escape(word) + r"(?![a-z])" * word[-1].isascii()

    firsts = "".join(sorted({re.escape(w[0]) for w in words}))
    return f"(?=[{firsts}])(?:{'|'.join(bounded(w) for w in sorted(set(words), key=lambda w: (-len(w), w)))})"


_STRONG_WORDS = (
    "黑鬼 尼哥 白皮猪 阿三 高丽棒子 小日本 支那 台巴子 国蝻 龟男 直男癌 下头男 绿茶婊 圣母婊 心机婊 女权癌 女权婊 直女癌 基佬 死同性恋 死gay 死变态 死娘炮 不男不女 "
    "乡巴佬 臭外地 黄皮猴子 黄猴 香蕉人 慕洋犬 洋奴 殖人 废青 鬼佬 死胖子 黑命贵 河南骗子 偷井盖 傻逼 脑残 智障 弱智 蠢货 蠢猪 人渣 败类 狗东西 狗杂种 杂种 杂碎 "
    "贱人 贱货 贱种 婊子 骚货 荡妇 臭不要脸 死全家 你妈死了 操你 你妈逼 尼嘎 滚蛋 王八蛋 丑逼 丑八怪 猪狗不如 臭婊 狗日的 犯贱 low逼 逼样 狗娘养 吃屎 喷粪").split()
_WEAK_WORDS = (
    "日本鬼子 泼妇 神经病 放屁 狗屁 舔狗 巨婴 人妖 娘炮 田园女权 不要脸 无耻 渣男 渣女 畜生 白痴 混蛋 恶心人 装逼 媚外 变态 下贱 他妈 妈的 我操 鸡巴 卧槽").split()
_ENGLISH_WORDS = (
    r"\b(?:n[i1]gg(?:er|a)s?|faggots?|trann(?:y|ies)|kikes?|wetbacks?|chinks?|retards?|dykes?|cunts?"
    r"|whores?|sluts?|bitch(?:es)?|subhumans?)\b")
_STRONG = re.compile(rf"{_any_of(_STRONG_WORDS)}|三八(?!妇女|节|线|式|红旗|[零〇一二三四五六七八九十%])|{_ENGLISH_WORDS}")
_WEAK = re.compile(_any_of(_WEAK_WORDS) + r"|\b(?:fuck(?:ing|er)?s?|bullshit|scum|vermin|filth|idiots?|morons?)\b")


# %%
assert _STRONG.search("你这个傻逼") and not _STRONG.search("国际劳动妇女节，即三八妇女节，固体废物污染环境防治法")
assert _WEAK.search("真他妈好") and not _STRONG.search("真他妈好") and not _WEAK.search("scumble and shell")

# %% [markdown]
# ## Disguises
# Whoever wants to insult past a filter writes the word so that only people read it: full-width letters, signs or
# blanks between the characters, one character taken apart into two, initials of the pinyin, a character of the same
# sound. Undoing them gives a *skeleton* that the rules look at; the text itself is not changed.
#
# Disguises that would also change innocent text are undone only as whole words: 煞笔 has no other meaning, a lone
# `sb` may be antimony.

# %%
#| export
_APART = {  # one character written as two
    "忄艮": "恨", "讠寸": "讨", "厂犬": "厌", "女马": "妈", "犭者": "猪", "犭句": "狗", "扌丁": "打", "歹匕": "死", "女表": "婊", "贝戋": "贱",
    "氵衮": "滚", "月囟": "脑", "亚心": "恶", "土立": "垃", "土及": "圾", "氵查": "渣", "米共": "粪", "亻夭": "妖", "疒发": "废", "口马": "骂",
}
_SOUNDS = {  # the same sound, written otherwise: whole words that mean nothing else
    "傻逼": "煞笔 沙比 傻比 傻笔 傻b 啥比 撒比 煞逼 傻x", "垃圾": "辣鸡 喇圾 拉圾 垃鸡", "脑残": "脑惨 瑙残", "智障": "智帐 智杖 制杖",
    "弱智": "若智", "婊子": "裱子 碧池", "贱人": "剑人", "厌恶": "厌鄂 厌饿", "恶心": "恶芯", "讨厌": "讨咽", "黑鬼": "黑归 嘿鬼",
    "操你妈": "草泥马 草尼玛 艹你妈 曹尼玛", "他妈": "特么 踏马", "畜生": "畜牲", "去死": "去屎",
}
_SPELLED = {  # pinyin, either syllable or both
    "讨厌": "tao yan", "恶心": "e xin", "厌恶": "yan wu", "垃圾": "la ji", "傻逼": "sha bi", "脑残": "nao can",
    "贱人": "jian ren", "渣滓": "zha zi", "人渣": "ren zha", "畜生": "chu sheng", "杀死": "sha si", "去死": "qu si",
    "婊子": "biao zi", "憎恨": "zeng hen", "白痴": "bai chi", "废物": "fei wu", "弱智": "ruo zhi", "智障": "zhi zhang",
    "变态": "bian tai", "鄙视": "bi shi", "歧视": "qi shi", "黑鬼": "hei gui", "蔑视": "mie shi", "愚蠢": "yu chun",
}
_INITIALS = {"sb": "傻逼", "nc": "脑残", "nmsl": "你妈死了", "cnm": "操你妈", "nmb": "你妈逼", "tmd": "他妈的", "mlgb": "你妈逼"}
_SYLLABLES = {  # between Chinese characters
    "hen": "恨", "sha": "杀", "gun": "滚", "zhu": "猪", "gou": "狗", "si": "死", "jian": "贱"}
_TRADITIONAL = str.maketrans("媽騙豬殺賤醜雜種婦惡厭討髒廢殘腦國華強蟲亂滾說們這會個來時對沒還見難讓應該罵禍盜貓們噁",
                             "妈骗猪杀贱丑杂种妇恶厌讨脏废残脑国华强虫乱滚说们这会个来时对没还见难让应该骂祸盗猫们恶")


def _disguises() -> dict[str, str]:
    "What is written -> what is meant."
    table = dict(_APART)
    table |= {written: word for word, writings in _SOUNDS.items() for written in writings.split()}
    for word, pinyin in _SPELLED.items():
        first, second = pinyin.split()
        table |= {word[0] + second: word, first + word[1]: word, first + second: word}
    return table


# %%
#| export
_DISGUISES = _disguises()
_INSERTED = re.compile(rf"(?<=[{_HAN}])[*+~^_|#@$%&=./\\ -]{{1,2}}(?=[{_HAN}])")
_SPACED = re.compile(rf"(?<![^\s，。！？])(?:[{_HAN}] ){{1,12}}[{_HAN}](?![^\s，。！？])")


_DISGUISED = re.compile(_any_of(list(_DISGUISES)))
_ABBREVIATED = re.compile(rf"(?<![a-z0-9._/-])(?:{'|'.join(_INITIALS)})(?![a-z0-9._/-])")
_SYLLABLE = re.compile(rf"(?<=[{_HAN}])(?:{'|'.join(_SYLLABLES)})(?=[{_HAN}])")


def skeleton(text: str) -> str:
    "The text as the rules see it: one width, lower case, simplified, disguises undone."
    text = unicodedata.normalize("NFKC", text).lower()
    if not _HAS_HAN.search(text):
        return text
    text = _SPACED.sub(lambda m: m[0].replace(" ", ""), text.translate(_TRADITIONAL))
    joined = _INSERTED.sub("", text)
    text = joined if _STRONG.search(joined) and not _STRONG.search(text) else text
    text = _DISGUISED.sub(lambda m: _DISGUISES[m[0]], text)
    text = _ABBREVIATED.sub(lambda m: _INITIALS[m[0]], text)
    return _SYLLABLE.sub(lambda m: _SYLLABLES[m[0]], text)


# %%
for disguised, plain in {
    "傻*逼": "傻逼", "傻 逼": "傻逼", "ＳＢ吧": "傻逼吧", "我忄艮他们": "我恨他们", "讨yan的天气": "讨厌的天气", "辣鸡": "垃圾",
    "腦殘": "脑残", "我hen他": "我恨他", "nao残": "脑残",
}.items():
    assert skeleton(disguised) == plain, (disguised, skeleton(disguised))
for innocent in ["sbin/init 里的 sb.length", "天地玄黄，宇宙洪荒。", "a hen and a zebra", "他——她的朋友——来了", "北京 2 日电",
                 "使用 <b> 标签", "写作 a/b 或者 甲/乙", "尼玛县在西藏", "木屑和渣子"]:
    assert skeleton(innocent) == unicodedata.normalize("NFKC", innocent).lower(), (innocent, skeleton(innocent))

# %% [markdown]
# ## Sentences
# Most abuse is abuse by what is said of whom. "Dirty" is no insult, and "they are dirty", said of a people, is
# one. So there are shapes of sentences in which a *group of people* meets hatred, contempt, a threat or a closed
# door.

# %%
#| export
_PLACES = ("河南 河北 山东 山西 东北 上海 北京 天津 重庆 广东 广西 福建 四川 湖南 湖北 江西 安徽 浙江 江苏 陕西 甘肃 新疆 西藏 内蒙 海南 云南 贵州 台湾 香港 南方 "
           "北方 农村 乡下 外地 本地 日本 韩国 印度 美国 英国 法国 德国 俄罗斯 越南 泰国 菲律宾 非洲 欧洲 亚洲 巴基斯坦 中东 阿拉伯 犹太 外国 白种 黑种 黄种 吉普赛").split()
_PEOPLE = ("女人 女性 女的 女生 女权 男人 男性 男的 男生 黑人 白人 黑哥 老外 穆斯林 回族 维吾尔族 藏族 少数民族 移民 难民 同性恋 双性恋 跨性别 变性人 残疾人 残障人士 "
           "女司机 大妈 剩女 胖子 农民工 民工 基督徒 佛教徒").split()
_GROUP = rf"(?:{_any_of(_PLACES)}(?:人|佬|女|男|妹)|{_any_of(_PEOPLE)})(?:们|者)?"
_HATE = _any_of("恨透 恨死 恨 讨厌 厌恶 憎恶 憎恨 痛恨 鄙视 蔑视 藐视 唾弃 受不了 看不起 瞧不起 嫌弃 反感 恶心".split())
_THING = _any_of(
    "骗子 小偷 强盗 罪犯 恐怖分子 垃圾 渣滓 人渣 败类 废物 寄生虫 蟑螂 害虫 虫子 老鼠 猪 狗 猴子 猩猩 畜生 禽兽 病毒 瘟疫 毒瘤 祸害 累赘 妓女 怪物 魔鬼".split())
_BAD = _any_of((
    "恶心 讨厌 可恨 可憎 恶毒 肮脏 脏 贱 蠢 愚蠢 懒 臭 丑 丑陋 邪恶 低劣 低贱 卑鄙 卑贱 下贱 野蛮 没素质 素质低 素质差 "
    "没文化 没教养 没救 没用 一无是处 一文不值 有病 变态 虚伪 猥琐 反胃 作呕 劣等 低等 下等").split())
_KILL = _any_of("杀死 杀光 杀了 打死 弄死 烧死 砍死 捅死 掐死 枪毙 枪杀 毒死 谋杀 处决 消灭 灭绝 清除 干掉 吊死 屠杀 毒打 痛打 暴打 强奸".split())
_DOOMED = _any_of("该死 去死 死光 死绝 死吧 被杀 被消灭 被灭绝 被枪毙 被打死 被处决 被驱逐 被阉 被清除 灭绝 不得好死".split())
_LINK = _any_of("都是 全是 就是 真是 简直是 不过是 只是 是一群 如同 就像 都 真 太 最 很 令人 让人 使人 让我 这么 那么 极度".split())
_GROUP_EN = (r"\b(?:women|men|gays?|gay people|lesbians|trans (?:people|women)|blacks?|black people|whites|immigrants"
             r"|muslims?|jews?|disabled people|refugees|foreigners|asians)\b")
_THING_EN = ("(?:disgusting|filth|scum|trash|animals|pigs|rats|parasites|killed|shot|exterminated|inferior|evil)")
_CLAUSE = "[^，。！？,.!?]"
_SHAPES = {
    "hatred": rf"{_HATE}(?:了|死|透|所有|那些|这些|这帮|那帮|这群|那群|任何|一切|的|像你这样的|每一个|每个){{0,3}}{_GROUP}"
              rf"|{_GROUP}{_CLAUSE}{{0,10}}[，。]?{_CLAUSE}{{0,4}}{_HATE}[他她它]们",
    "contempt": rf"{_GROUP}{_CLAUSE}{{0,5}}?{_LINK}(?:一群|一帮|些|很|他妈|极其|非常|令人|让人|的){{0,2}}(?:{_BAD}|{_THING})"
                rf"|{_GROUP}是(?:社会的|人中的)?{_THING}|操(?:他妈|你妈)的?{_GROUP}"
                rf"|对{_CLAUSE}{{0,8}}{_GROUP}{_CLAUSE}{{0,3}}没有?(?:任何|一点|丝毫)?(?:同情|尊重|好感)",
    "threat": rf"{_KILL}{_CLAUSE}{{0,4}}{_GROUP}|{_GROUP}{_CLAUSE}{{0,6}}{_DOOMED}",
    "exclusion": rf"滚[出回]|(?:赶出|赶走|驱逐){_CLAUSE}{{0,4}}{_GROUP}"
                 rf"|{_GROUP}{_CLAUSE}{{0,6}}(?:不配|没资格|没有资格|低人一等|不是人|不算人|没有人权|没有立足之地)",
    "english": rf"\b(?:hate|despise|loathe|detest|kill|exterminate|murder|rape)\b[^.!?]{{0,12}}?{_GROUP_EN}"
               rf"|{_GROUP_EN}[^.!?]{{0,12}}?\b(?:are|is|should be)\b[^.!?]{{0,12}}?\b{_THING_EN}\b",
}
_SHAPES = {name: re.compile(pattern) for name, pattern in _SHAPES.items()}
_SUSPECT = re.compile("|".join([_HATE, _BAD, _THING, _KILL, _DOOMED, _any_of(
    "歧视 素质 骗 偷 种族 地域黑 仇 辱 骂 滚 喷 婊 傻 渣 穷 崇洋 舔 倒贴 奴 殖民 优越感 毒 艾滋 杀 丑化 黑人问号".split())]))

# %%
examples = {"hatred": "我真的讨厌那些外地人", "contempt": "他说的男人都是垃圾", "threat": "外国人都该死", "exclusion": "你们滚出去",
            "english": "I hate immigrants"}
for name, sentence in examples.items():
    assert [n for n, shape in _SHAPES.items() if shape.search(skeleton(sentence))] == [name], sentence
for sentence in ["我讨厌冬天", "女人和男人都来了", "杀死细菌", "外地人在本地办理登记", "Jews and Muslims live here", "狗是人类的朋友"]:
    assert not any(shape.search(skeleton(sentence)) for shape in _SHAPES.values()), sentence

# %% [markdown]
# ## Who says it, and does he mean it
# "I don't hate women", "whoever says 'I hate women' is a fool": the words are there and the abuse is not. A finding
# is excused when a negation stands right before it, or when it stands in quotation marks, or when the sentence goes
# on to condemn it.

# %%
#| export
_NEGATED = re.compile(
    r"(?:不|没有?|别|从未|从不|绝不|并非|不是|不要|不该|不应该?|反对|拒绝|停止|禁止|never|not|n't|don't)"
    r"\s{0,2}(?:会|要|再|应|能|真的|有人|any)?\s{0,2}$")
_CONDEMNED = re.compile(
    "偏激|偏见|可耻|可悲|不尊重|种族主义|歧视性|刻板印象|仇恨言论|令人遗憾|谴责|不应该被|不对的|是错|更可恨"
    "|racist|sexist|bigot|unacceptable|hateful|wrong to")
_QUOTES = re.compile("[“\"「『‘][^“”\"「」『』‘’]{0,60}[”\"」』’]")
_WEIGHTS = {"strong": 0.8, "weak": 0.3, "hatred": 0.7, "contempt": 0.7, "threat": 0.8, "exclusion": 0.5, "english": 0.7,
            "suspect": 0.15}


@dataclass(frozen=True)
class Hit:
    "A rule that found something: its name, what it found in the skeleton, and why it is excused (empty: it counts)."

    rule: str
    found: str
    excuse: str = ""


def rule_hits(text: str) -> list[Hit]:
    "All findings of the rules in a text, excused ones included."
    plain = skeleton(text)
    quotes = [m.span() for m in _QUOTES.finditer(plain)]
    condemned, chinese = bool(_CONDEMNED.search(plain)), bool(_HAS_HAN.search(plain))
    hits = []
    for rule, pattern in {"strong": _STRONG, "weak": _WEAK, "suspect": _SUSPECT, **_SHAPES}.items():
        if rule in _SHAPES and chinese == (rule == "english"):
            continue
        for match in pattern.finditer(plain):
            excuse = ""
            if condemned:
                excuse = "condemned"
            elif any(a < match.start() < b for a, b in quotes):
                excuse = "quoted"
            elif rule in _SHAPES and _NEGATED.search(plain[max(0, match.start() - 8) : match.start()]):
                excuse = "negated"
            hits.append(Hit(rule, match[0], excuse))
    return hits


def rule_score(text: str) -> float:
    "0 to 1: one minus the product of (1 - weight) over different findings, excused ones left out; suspects count once."
    distinct = {(h.rule, "" if h.rule == "suspect" else h.found) for h in rule_hits(text) if not h.excuse}
    return 1 - float(np.prod([1 - _WEIGHTS[rule] for rule, _ in sorted(distinct)])) if distinct else 0.0


# %%
for text, expected in {
    "那些外地人都是骗子": ["contempt"], "我真的讨yan女人": ["hatred"], "让我说清楚：我不恨女人。": [], "谁说“外国人都该死”，谁就是傻瓜": [],
    "说女人都很蠢是偏见": [], "你这煞笔": ["strong"], "今天天气真好": [], "I hate immigrants": ["english"], "I never hate women": [],
}.items():
    hits = rule_hits(text)
    assert [h.rule for h in hits if not h.excuse and h.rule != "suspect"] == expected, (text, hits)
assert 0 == rule_score("今天天气真好") < rule_score("他骗了我") < 0.5 < rule_score("你这煞笔") < rule_score("你这煞笔，人渣")

# %% [markdown]
# So there are two ways to use the rules. *Clear abuse* is a score of 0.5 and more. *Suspicion* is any score above
# zero: a list of words that catches much and is often wrong, fit only to choose what a better judge should look
# at.
#
# What do the rules do to text that nobody would call abuse? All prose, dialogues, contracts and code of the samples:

# %%
innocent = [d for name in ("zh_prose", "en_prose", "legal", "dialogue", "code")
            for d in read_documents(f"../../data_samples/{name}.jsonl")]
marked = [(d["id"], h) for d in innocent for h in rule_hits(d["text"]) if not h.excuse and h.rule != "suspect"]
print(f"{len(innocent)} documents, {sum(len(d['text']) for d in innocent)} characters, findings: {marked}")
assert len(marked) <= 1

# %% [markdown]
# ## The classifier, and both together
# The classifier is the one of *A small classifier of text*, on folded text and runs of one to three characters.
# Its logit $z$ and the rules' score $r$ meet in a logistic regression with three numbers, $p = \sigma(\alpha z +
# \beta r + \gamma)$, fitted on posts that the classifier has not seen. The three travel in the model's metadata.

# %%
#| export
def _fit_mixture(logits: np.ndarray, rules: np.ndarray, labels: np.ndarray, steps: int = 50) -> list[float]:
    "Weights of (logit, rule score, 1) by Newton's method, a little ridge; the rules' weight is not negative."
    x, theta = np.stack([logits, rules, np.ones_like(logits)], axis=1), np.array([1.0, 0.0, 0.0])
    for _ in range(steps):
        p = sigmoid(x @ theta)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.diag([1e-6, 1.0, 1e-6])
        theta = theta - np.clip(np.linalg.solve(hessian, x.T @ (p - labels) + theta * [0, 1.0, 0]), -1, 1)
    return [float(theta[0]), max(0.0, float(theta[1])), float(theta[2])]


def train_toxicity(
    texts: Sequence[str], labels: Sequence[int], tune: tuple[Sequence[str], Sequence[int]], seed: int = 0
) -> TextClassifier:
    """A classifier of abuse (label 1) whose metadata hold how it is mixed with the rules, both fitted on `tune`.

    Deterministic for a seed. Raises UsageError when a class is missing.
    """
    model = train_classifier(texts, labels, tune, orders=(1, 2, 3), fold=True, seed=seed)
    rules = np.array([rule_score(t) for t in tune[0]])
    model.meta["with_rules"] = _fit_mixture(model.logits(list(tune[0])), rules, np.asarray(tune[1], np.float64))
    return model


def toxicity_scores(texts: Sequence[str], model: TextClassifier | None = None, rules: bool = True) -> np.ndarray:
    "Probability of abuse, float64 [n]: of the rules, the model, or both; without a model the rules' score."
    if not rules and model is None:
        raise UsageError("toxicity: neither rules nor a model; switch one on")
    if model is None:
        return np.array([rule_score(t) for t in texts])
    if not rules or "with_rules" not in model.meta:
        return model.score(list(texts))
    a, b, c = model.meta["with_rules"]
    return sigmoid(a * model.logits(list(texts)) + b * np.array([rule_score(t) for t in texts]) + c)


# %%
draw = random.Random(0)
groups, places = ["外地人", "男人", "老外", "女司机", "外国人"], ["车站", "菜市场", "学校", "河边"]
def post():
    "An invented forum post with its label; half of the abuse is of a kind that no rule here knows."
    who, where = draw.choice(groups), draw.choice(places)
    return draw.choice([(f"{where}的{who}都是骗子", 1), (f"{where}来的{who}又在添乱，真晦气", 1), (f"昨天在{where}帮一个{who}指路", 0),
                        (f"{where}旁边住着几家{who}，常来往", 0)])
posts, kinds = zip(*(post() for _ in range(300)))
model = train_toxicity(posts[:200], kinds[:200], (posts[200:], kinds[200:]))
held, truth = posts[200:], np.array(kinds[200:])
judges = {"rules": toxicity_scores(held), "classifier": toxicity_scores(held, model, rules=False),
          "both": toxicity_scores(held, model)}
for name, scores in judges.items():
    print(f"{name:10} recall at 0.5: {at_threshold(scores, truth, 0.5)['recall']:.2f}")
assert at_threshold(judges["both"], truth, 0.5)["recall"] > 0.95
assert len(model.meta["with_rules"]) == 3 and model.meta["with_rules"][1] >= 0

# %% [markdown]
# ## The stage
# A novel with one curse is not abuse, and a thread in which every third post is one is. So a document is cut at
# the ends of sentences into segments of about the length of a post, each segment is judged, and the share of
# abusive ones decides.

# %%
#| export
_SENTENCE = re.compile(r"[^。！？!?\n]*(?:[。！？!?\n]+|$)")


def segments(text: str, size: int = 120) -> list[str]:
    "Runs of whole sentences of up to `size` characters; a longer sentence is cut. Joined, they are the text."
    out, current = [], ""
    for sentence in _SENTENCE.findall(text):
        for start in range(0, len(sentence), size):
            part = sentence[start : start + size]
            if current and len(current) + len(part) > size:
                out.append(current)
                current = ""
            current += part
    return [*out, current] if current else out


# %%
for text in ["", "一句。两句！三句", "没有句号" * 100, "a\n\nb? " * 50]:
    assert "".join(segments(text)) == text and all(len(s) <= 120 for s in segments(text))

# %%
#| export
_loaded = functools.lru_cache(maxsize=4)(TextClassifier.load)


@dataclass
class Toxicity(DocumentStage):
    """Remove or flag abusive documents.

    Args:
        rules: use the rules
        model: file of a classifier from `train_toxicity`; empty for the rules alone
        threshold: probability from which a segment of about 120 characters counts as abuse
        share: a document is abusive when more than this share of its segments is
        action: remove, or flag ("toxic" among the document's flags)
    """

    name: ClassVar[str] = "toxicity"
    rules: bool = True
    model: str = ""
    threshold: float = 0.85
    share: float = 0.1
    action: str = "remove"

    def __post_init__(self):
        if not self.rules and not self.model:
            raise UsageError("stages.toxicity: rules are off and no model is given; one of them is needed")
        if self.action not in ("remove", "flag"):
            raise UsageError(f"stages.toxicity.action: {self.action!r} is neither remove nor flag")
        if not 0 < self.threshold <= 1 or not 0 <= self.share < 1:
            raise UsageError(f"stages.toxicity: threshold {self.threshold} must be above 0, share {self.share} below 1")
        if self.model:
            _loaded(self.model)

    def apply(self, doc: dict[str, Any]) -> Outcome:
        "The document, flagged or not, or None with `toxic`."
        parts = segments(doc["text"]) or [""]
        scores = toxicity_scores(parts, _loaded(self.model) if self.model else None, self.rules)
        share, worst = float((scores >= self.threshold).mean()), int(scores.argmax())
        values = {"toxic_share": share, "toxic_max": float(scores[worst])}
        if share <= self.share:
            return Outcome(doc, values=values)
        if self.action == "flag":
            return Outcome(add_flags(doc, ["toxic"]), values=values)
        shown = " ".join(parts[worst].split())[:60]
        return Outcome(None, "toxic", f"{share:.0%} of {len(parts)} segments, {scores[worst]:.2f}: {shown}", values)


# %%
with tempfile.TemporaryDirectory() as folder:
    file = str(Path(folder) / "m.npz")
    model.save(file)
    stage = pickle.loads(pickle.dumps(Toxicity(model=file, threshold=0.5)))
    bad = next(p for p, k in zip(posts, kinds) if k)
    assert stage.apply({"text": bad}).reason == "toxic" and stage.apply({"text": "昨天在河边帮一个老外指路"}).document
rules_only = Toxicity(threshold=0.5)
novel = {"text": "他走进院子，看见一树梨花。" * 100 + "“你这个蠢货！”她喊道。"}
assert rules_only.apply(novel).document is novel, "one curse in a long text"
assert rules_only.apply({"text": "你这个蠢货！"}).reason == "toxic"
assert Toxicity(threshold=0.5, action="flag").apply({"text": "你这个蠢货！"}).document["flags"] == ["toxic"]
for wrong in ({"rules": False}, {"action": "delete"}, {"threshold": 0}, {"model": "no/such.npz"}):
    try:
        Toxicity(**wrong)
        raise AssertionError("accepted")
    except UsageError as error:
        assert "\n" not in str(error)

# %% [markdown]
# ## On labelled posts
# The measurements are of a public corpus of Chinese forum posts about race, region and gender (COLD, 12,431
# posts; its test split was not at hand, so a quarter of its dev split was kept for the test) and of HateCheck's
# sentences, in which a hateful and a harmless sentence differ in a word or two. `scalelab bench data-toxicity`
# makes the figures; they are read from its file.

# %%
saved = json.loads(Path("results/A-tox.json").read_text(encoding="utf-8"))["estimate"]
fig, ax = plt.subplots(figsize=(4.4, 2.6))
for color, (name, curve) in zip(COLORS, saved["roc"].items()):
    ax.plot(curve["fpr"], curve["recall"], color=color, label=name)
    for mark, t in (("o", "0.5"), ("s", "0.85")):
        point = saved["points"][name][t]
        ax.plot(point["fpr"], point["recall"], mark, color=color, ms=5)
ax.axvline(0.063, color="0.5", lw=0.8, ls=":")
ax.set(xlabel="share of harmless posts called abuse", ylabel="share of abuse found", xlim=(-0.01, 0.5), ylim=(0, 1))
ax.legend(fontsize=8, loc="lower right")
plt.show()

# %% [markdown]
# What to see: dots are thresholds of 0.5, squares of 0.85; the dotted line is 6.3% false positives. The rules'
# curve is short steps: a few scores, most posts at zero. The classifier knows the forum; adding the rules moves
# its curve little.

# %%
posts = saved["posts"]
print(f"{posts['train']} posts trained on, {posts['tune']} for thresholds, {posts['test']} in the test;"
      f" {posts['exact_twins']} exact and {posts['near_twins']} near twins left the test")
print(f"{'recall / false positives':26}{'0.5':>16}{'0.85':>16}{'tuned':>16}")
for name, points in saved["points"].items():
    at = (points[t] for t in ("0.5", "0.85", "tuned"))
    print(f"{name:26}" + "".join(f"{p['recall']:9.1%}/{p['fpr']:6.1%}" for p in at))
any_finding = saved["points"]["rules"]["any"]
print(f"rules, any finding: {any_finding['recall']:.1%}/{any_finding['fpr']:.1%}")

# %%
print("HateCheck: called abuse by rules / classifier / both (rules at 0.5, the others as tuned)")
for name, c in saved["controls"].items():
    if c["label"] == 0 or " all " in name:
        print(f"  {name:28}{c['rules']:8.1%}{c['classifier']:8.1%}{c['rules + classifier']:8.1%}   of {c['sentences']}")
clean_text = {name: f"{v['rules + classifier']:.1%}" for name, v in saved["clean_text"].items()}
print("segments of clean text called abuse:", clean_text)
assert all(v["rules"] < 0.002 for v in saved["clean_text"].values()), "the rules leave clean text alone"

# %% [markdown]
# *Tuned* is the threshold that promises at most 6.3% false positives, chosen on the tune side with 95%
# confidence. The hard controls say what such a judge has not learned: who is speaking. Kind sentences about a
# group pass, but those that deny abuse, quote it or speak against it are called abuse in a third to three fifths
# of all cases; articles of law that name crimes look bad to it too, and English is beyond a classifier of Chinese
# posts. A filter like this takes the answers to abuse along with the abuse: look at what it removes before it
# removes it.
#
# ## Verdict

# %%
#| echo: false
Markdown(verdict_table([v for v in load_verdicts("..") if v["id"] == "A-tox"]))

# %% [markdown]
# What this does not cover: languages beside Chinese and a little English, irony, images of text, and abuse that
# can only be seen from the conversation around it.
