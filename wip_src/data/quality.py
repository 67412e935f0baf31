# %% [markdown]
# # A few honest rules of quality
#
# > Few rules, each with a stated statistic, threshold and reason, that remove garbage and spare poems, statutes and code.
#
# Web corpora hold pages of menus, keyword spam, and Chinese that went through the wrong decoder. Rules find them
# cheaply. The second article advises to filter strictly at first (B-strict): rather remove good text than keep bad.
# The loss behind that claim needs trainings and is judged in the laboratory. Here we write our own set, put it beside
# the well-known sets of others, and measure what any verdict must start from: how much good text rules remove, and
# how much junk they miss.

# %%
#| default_exp data.quality

# %%
#| export
from __future__ import annotations

import argparse
import json
import random
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from scalelab.core.config import UsageError, atomic_write, did_you_mean
from scalelab.data.chinese import CHINESE
from scalelab.data.documents import read_documents
from scalelab.data.furniture import boilerplate, keyword_spam
from scalelab.data.limits import Language, Length, length_limits, split_over_long, tail_shares
from scalelab.data.recipe import DocumentStage, Outcome
from scalelab.data.repair import Repair, add_flags, mojibake_share, repair_rates, repair_text
from scalelab.data.rules import Rule, RuleSet, Text, Verdict, chosen, failures
from scalelab.data.rulesets import NAMED_SETS

# %%
#| hide
import pickle

import matplotlib.pyplot as plt

from scalelab.core.plotting import style
from scalelab.data.documents import stdlib_documents

style()

# %% [markdown]
# ## Too short, and too many symbols
# Length has to be counted in something that is fair to both scripts: a Chinese character and an English word each
# count as one *unit*. The shortest classical poem has 20 characters, a couplet ten; below five units there is nothing
# to learn from. Symbols are what is neither letter, digit, space nor ordinary punctuation, Chinese punctuation
# included.

# %%
#| export
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]")
_WORD = re.compile(r"[^\W\d_\u3400-\u9fff\uf900-\ufaff]+")
_SYMBOL = re.compile(r"[^\w\s，。、；：？！…—·“”‘’「」『』《》〈〉（）【】〔〕～,.;:?!'\"()\[\]/–%&-]")


def text_units(text: str) -> float:
    "Chinese characters plus words of other scripts: a length that means about the same in Chinese and English."
    return float(len(_HAN.findall(text)) + len(_WORD.findall(text)))


def symbol_share(text: str) -> float:
    "Share of symbols among the characters that are not white space."
    solid = len(text) - sum(map(len, re.findall(r"\s+", text)))
    return len(_SYMBOL.findall(text)) / max(solid, 1)

# %%
assert text_units("春眠不觉晓，处处闻啼鸟。") == 10 and text_units("To be, or not to be") == 6
assert symbol_share("“天气好！”他说。") == 0.0 and symbol_share("@#$^ab") == 4 / 6
assert symbol_share("x = {a: b*c}") > 0.3  # ordinary code: why the limit for code is another one

# %% [markdown]
# ## Repetition
# Three looks at the same fault. Repeated *lines* catch templates. A repeated *n-gram* catches "AAAA" and the endless
# `a/a/a/`; it looks at letters only, because a table ruled with dashes is no repetition. The *compressor* catches
# whatever they miss: it needs some text before its ratio means anything. How low does good text go? We look at the
# standard library.

# %%
#| export
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def repeated_lines(text: str) -> float:
    "Share of characters in lines (of 8 or more) that stood in the text before; 0 with fewer than 4 such lines."
    lines = [line for raw in text.split("\n") if len(line := raw.strip()) >= 8]
    if len(lines) < 4:
        return 0.0
    return sum((n - 1) * len(line) for line, n in Counter(lines).items()) / sum(map(len, lines))


def repeated_ngram(text: str, n: int = 8) -> float:
    """Share of the letters and digits that the most frequent n-gram of them (the first of several) can cover.

    Of the first 20,000 characters; 0 below 40 letters, and for an n-gram that stands there fewer than 4 times.
    """
    letters = re.sub(r"[\W_]+", "", text[:20_000])
    if len(letters) < 40:
        return 0.0
    code = np.frombuffer(letters.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    grams = np.zeros(len(code) - n + 1, np.uint64)
    for i in range(n):
        grams = (grams + code[i : i + len(grams)]) * _MULTIPLIER
    ranked = np.sort(grams)
    edges = np.flatnonzero(np.concatenate(([True], ranked[1:] != ranked[:-1], [True])))
    times = edges[1:] - edges[:-1]
    if (most := times.max()) < 4:
        return 0.0
    at = int(np.isin(grams, ranked[edges[:-1][times == most]]).argmax())  # the first place of any of them
    return letters.count(letters[at : at + n]) * n / len(letters)


def compressed_share(text: str) -> float:
    "Size after zlib over size before, first 200,000 characters; 1.0 below 500 bytes, where the ratio says little."
    raw = text[:200_000].encode("utf-8", "replace")
    return len(zlib.compress(raw, 6)) / len(raw) if len(raw) >= 500 else 1.0

# %%
assert repeated_lines("the same line\n" * 4) == 0.75 and repeated_lines("short\n" * 9) == 0.0
assert repeated_ngram("A" * 100) > 0.9 and repeated_ngram("http://x/" + "a/" * 200) > 0.9
assert repeated_ngram("-" * 500 + "标题") == 0.0 and repeated_ngram("天地玄黄宇宙洪荒" * 9) == 1.0
assert compressed_share("天地玄黄" * 300) < 0.03 and compressed_share("short") == 1.0

# %%
library = list(stdlib_documents(2_000_000))
long = [x for x in library if len(x["text"]) > 500]
ratios = {d: [compressed_share(x["text"]) for x in long if x["domain"] == d] for d in ("code", "docs")}
repeated = ("买一送一全场包邮。", "Buy cheap shoes online! ", "首页 | 新闻 | 体育 | 财经\n", "ha ha ")
junk = [compressed_share(s * 80) for s in repeated]
fig, ax = plt.subplots(figsize=(6, 2.6))
for name, values in (ratios | {"80 times the same": junk}).items():
    label = f"{name} (lowest {min(values):.2f})"
    ax.hist(values, bins=np.linspace(0, 0.7, 50), histtype="stepfilled", alpha=0.6, label=label)
ax.axvline(0.1, color="k", lw=1, ls="--")
ax.set(xlabel="size after compression over size before", ylabel="documents")
ax.legend()
plt.show()

# %% [markdown]
# Good text lies right of the dashed line at 0.1, with room to spare; even a table of constants in code compresses
# less than that. Text repeated eighty times lies far to its left. Such a gap is what makes a threshold honest.

# %% [markdown]
# ## The rules
# Thresholds come from looking at both sides: the worst value of good text in every domain that we have, and the best
# value of junk. They stand in the gap, nearer to the junk, because removing a poem costs more than keeping an
# advertisement.

# %%
#| export
RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in [
        Rule("too_short", "nothing to learn from fewer than five words or characters", text_units, 5, below=True),
        Rule("mojibake", "traces of a wrong decoder", mojibake_share, 0.02, by_domain={"code": 0.5}),
        Rule("symbol_share", "more symbols than text", symbol_share, 0.4, by_domain={"code": 0.6}),
        Rule("repeated_lines", "most lines stood there before", repeated_lines, 0.6, by_domain={"code": 0.8}),
        Rule("repeated_ngram", "one string makes up most of the text", repeated_ngram, 0.5, by_domain={"code": 0.9}),
        Rule("compressed_share", "so repetitive that a compressor leaves almost nothing", compressed_share, 0.1,
             below=True, by_domain={"code": 0.05}),
        Rule("boilerplate", "menus, notices and other furniture of a page", boilerplate, 0.5, by_domain={"code": None}),
        Rule("keyword_spam", "advertising and stuffed keywords", keyword_spam, 0.5, by_domain={"code": None}),
    ]
}


def check(document: Mapping[str, Any], rules: Mapping[str, Rule] = RULES) -> list[Verdict]:
    "The rules that a document fails, each with its value and threshold; an empty list for a good one."
    return failures(document, rules)


def apply_rules(
    document: dict[str, Any], rules: Mapping[str, Rule] = RULES, repair: bool = True
) -> tuple[dict[str, Any] | None, list[Verdict]]:
    """The document, repaired where that can be proven (then `flags` says so), or None; and the rules that it failed.

    Code is not repaired: a program may hold such characters on purpose.
    """
    if repair and "code" not in (document.get("domain"), document.get("lang")):
        text, done = repair_text(document["text"])
        if done:
            document = add_flags(document | {"text": text}, [f"repaired:{name}" for name in done])
    failed = check(document, rules)
    return (None if failed else document), failed

# %%
for name, rule in RULES.items():
    side, code = "below" if rule.below else "above", rule.by_domain.get("code", rule.threshold)
    print(f"{name:17} {side} {rule.threshold:<5} code: {code!s:5} {rule.reason}")

# %%
web = lambda text, **more: {"id": "x", "text": text, "domain": "web", "lang": "zh"} | more
assert [v.rule for v in check(web("好"))] == ["too_short"]
assert check(web("白日依山尽，黄河入海流。欲穷千里目，更上一层楼。", domain="poetry")) == []
assert [v.rule for v in check(web("A" * 20_000))] == ["too_short", "repeated_ngram", "compressed_share"]
formula = "{[<>]}" * 3 + " x = y ** 2 + z ** 2; a = b * c; d = e"
assert check(web(formula, lang="code", domain="code")) == []
kept, failed = apply_rules(web("今天天气很好，适合出门散步。".encode().decode("latin-1")))
assert kept["text"].startswith("今天") and kept["flags"] == ["repaired:latin"] and failed == []
kept, failed = apply_rules(web("今天天气很好，适合出门散步。".encode("gbk").decode("utf-8", "replace")))
assert kept is None
print(*failed, sep="\n")

# %% [markdown]
# Not one source file and not one help topic of the standard library should be lost:

# %%
lost = [(d["id"], str(v)) for d in library for v in check(d)]
assert lost == [], lost
size = sum(len(d["text"]) for d in library) / 1e6
print(f"documents removed from {size:.1f} million characters of Python's own text: {len(lost)}")

# %% [markdown]
# ## Choosing
# `QualityConfig` is the choice of a run that uses our rules alone.

# %%
#| export
@dataclass
class QualityConfig:
    """What a run changes in RULES; raises UsageError for an unknown rule or an impossible number.

    Args:
        thresholds: new thresholds by rule name, for every domain to which the rule applies
        off: rules not to use
        repair: undo provable encoding damage first
        quantile: of document length by domain, beyond which a document is long
    """

    thresholds: dict[str, float] = field(default_factory=dict)
    off: list[str] = field(default_factory=list)
    repair: bool = True
    quantile: float = 0.995

    def __post_init__(self):
        self.rules()
        if not 0.5 <= self.quantile <= 1:
            raise UsageError(f"quality.quantile: {self.quantile} is outside 0.5 to 1; 1 cuts nothing")

    def rules(self) -> dict[str, Rule]:
        "The rules as configured."
        return chosen(RULES, self.thresholds, self.off)

# %%
strict = QualityConfig(thresholds={"too_short": 50}, off=["boilerplate"]).rules()
assert strict["too_short"].threshold == 50 and not strict["boilerplate"].on and RULES["too_short"].threshold == 5
nan = float("nan")
wrongs = [{"off": ["boilerplat"]}, {"thresholds": {"too_short": nan}}, {"quantile": 95}]
for wrong in wrongs:
    try:
        QualityConfig(**wrong)
    except UsageError as error:
        print(str(error)[:100])
    else:
        raise AssertionError(f"{wrong} was accepted")

# %% [markdown]
# ## The stage
# In a recipe the same choice is a stage, `rules`, that also takes the sets of others by name. It stops at the first
# rule that a document fails; the rules of a set stand in an order from cheap to dear.

# %%
#| export
OURS = RuleSet("scalelab", "this project", RULES)
RULE_SETS: dict[str, RuleSet] = {each.name: each for each in (OURS, *NAMED_SETS.values(), CHINESE)}

# %%
#| export
@dataclass
class Rules(DocumentStage):
    """Rules of quality, by named sets.

    Args:
        set: scalelab, gopher, c4, fineweb or chinese, or a list of them, applied in that order
        thresholds: other thresholds by rule name
        off: rules not to use
        off_domains: domains for which a rule is off, e.g. {gopher_short_doc: [poetry]}
        segment: count words of Chinese with a segmenter (rjieba) where a set counts words, instead of characters
    """

    name: ClassVar[str] = "rules"
    set: str | list[str] = "scalelab"
    thresholds: dict[str, float] = field(default_factory=dict)
    off: list[str] = field(default_factory=list)
    off_domains: dict[str, list[str]] = field(default_factory=dict)
    segment: bool = False

    def __post_init__(self):
        self.sets()

    def sets(self) -> list[RuleSet]:
        "The sets as configured; UsageError for an unknown set or rule, or an impossible threshold."
        names = self.set if isinstance(self.set, (list, tuple)) else [self.set]
        for name in names or [""]:
            if name not in RULE_SETS:
                known = f"{did_you_mean(str(name), RULE_SETS)}; sets are {', '.join(RULE_SETS)}"
                raise UsageError(f"stages.rules.set: there is no set {name!r}{known}")
        every = {rule.name: rule for name in names for rule in RULE_SETS[name].rules.values()}
        made = chosen(every, self.thresholds, self.off, self.off_domains, "stages.rules")
        return [replace(RULE_SETS[name], rules={rule: made[rule] for rule in RULE_SETS[name].rules}) for name in names]

    def apply(self, doc: dict) -> Outcome:
        "The document, perhaps edited, or None with the name of the first rule that it fails."
        if "_sets" not in self.__dict__:
            self._sets = self.sets()
        domain, lang, text, values = doc.get("domain"), doc.get("lang"), Text(doc["text"], self.segment), {}
        for chosen_set in self._sets:
            for rule in chosen_set.rules.values():
                if (limit := rule.limit(domain, lang)) is None:
                    continue
                values[rule.name] = value = float(rule.statistic(text))
                if rule.fails(value, limit):
                    return Outcome(None, rule.name, f"{value:.4g}, limit {limit:.4g}: {rule.reason}", values)
            if chosen_set.edit and lang != "code" and (new := chosen_set.edit(text)) != text:
                text = Text(new, self.segment)
                doc = add_flags(doc | {"text": new}, [f"edited:{chosen_set.name}"])
        return Outcome(doc, values=values)

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key != "_sets"}

# %%
stage = Rules(thresholds={"too_short": 8}, off_domains={"too_short": ["poetry"]})
assert stage.apply(web("今天天气很好。")).reason == "too_short" and stage.apply(web("今天天气很好。")).document is None
assert stage.apply(web("今天天气很好。", domain="poetry")).document and "too_short" in stage.apply(web("好")).values
assert pickle.loads(pickle.dumps(stage)) == stage
print(stage.apply(web("好")).note)
wrongs = [{"set": "gofer"}, {"set": []}, {"set": 3}, {"off": ["too_shrt"]}]
for wrong in [*wrongs, {"set": "c4", "thresholds": {"too_short": 5}}]:
    try:
        Rules(**wrong)
    except UsageError as error:
        print(str(error)[:100])
    else:
        raise AssertionError(f"{wrong} was accepted")

# %% [markdown]
# ## How much good text is lost, how much junk is missed?
# The samples that come with the project hold planted junk with the truth in a file, and texts that only look like
# junk: a sine table, a haiku, a page of verse without punctuation, questions and answers about a library. All of the
# first must be found, all of the second must stay. Damaged text may also be found by repairing it exactly.

# %%
samples = Path("../../data_samples")
truth = json.loads((samples / "truth.json").read_text(encoding="utf-8"))
sample = {d["id"]: d for d in read_documents(sorted(samples.glob("*.jsonl")))}
planted = {entry["id"]: entry for entry in truth["junk"]}
for id, entry in planted.items():
    kept, failed = apply_rules(sample[id])
    assert kept is None or kept["text"] == entry["clean"], (id, entry["kind"])
    print(f"{entry['kind']:12}", kept["flags"][0] if kept else f"{failed[0].rule} {failed[0].value:.2f}")

# %%
for id, document in sample.items():
    if id not in planted:
        kept, failed = apply_rules(document)
        assert kept is document, (id, failed)
print(f"{len(planted)} pieces of junk found or repaired, {len(sample) - len(planted)} good documents kept,"
      f" {len(truth['good_but_suspicious'])} suspicious ones among them")

# %% [markdown]
# Samples written by the people who write the rules prove little. The next function measures on anything; its numbers
# below come from corpora that are not part of the project: statutes, classical and modern prose, poems, manuals,
# dialogues, encyclopedia, code (up to 300 documents of each of 18 files), and made junk, menus and spam from
# templates and text that really went through fourteen kinds of damage.

# %%
#| export
def removal_rates(
    documents: Iterable[dict[str, Any]], rules: Mapping[str, Rule] = RULES, key: str = "domain"
) -> dict[str, dict[str, Any]]:
    """What the rules do to documents, by the value of column `key`: n, removed, repaired, exact, intact, rules.

    exact: repaired to the very text in column `clean`; intact: equal to it from the start. `rules` counts removals; a
    document that fails two rules counts under both.
    """
    groups: dict[str, dict[str, Any]] = {}
    for document in documents:
        empty = dict.fromkeys(("n", "removed", "repaired", "exact", "intact"), 0) | {"rules": Counter()}
        row = groups.setdefault(str(document.get(key)), empty)
        kept, failed = apply_rules(document, rules)
        row["n"] += 1
        row["intact"] += document.get("clean") == document["text"]
        row["removed"] += kept is None
        row["repaired"] += kept is not None and kept["text"] != document["text"]
        row["exact"] += kept is not None and document["text"] != kept["text"] == document.get("clean")
        row["rules"].update(verdict.rule for verdict in failed)
    return {name: groups[name] | {"rules": dict(groups[name]["rules"])} for name in sorted(groups)}

# %%
damaged = web("天气预报说有雨".encode().decode("latin-1"), clean="天气预报说有雨")
rates = removal_rates([web("好"), web("今天天气很好，适合出门散步。"), damaged])
assert rates == {"web": {"n": 3, "removed": 1, "repaired": 1, "exact": 1, "intact": 0, "rules": {"too_short": 1}}}
good = [d for id, d in sample.items() if id not in planted]
assert sum(row["removed"] + row["repaired"] for row in removal_rates(good).values()) == 0

# %% [markdown]
# ## All sets side by side
# What would each set remove from text that is good by construction? The table counts documents by domain and by the
# rule that comes first.

# %%
#| export
def set_rates(
    documents: Iterable[dict[str, Any]], sets: Iterable[str] = tuple(RULE_SETS), key: str = "domain"
) -> dict[str, dict[str, dict[str, Any]]]:
    """What each named set removes: {set: {value of column `key`: {"n", "removed", "rules": removals by first rule}}}.

    Documents are judged by one set at a time, and counted under the first rule of it that they fail.
    """
    stages = {name: Rules(set=name) for name in sets}
    groups: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in stages}
    for document in documents:
        for name, stage in stages.items():
            row = groups[name].setdefault(str(document.get(key)), {"n": 0, "removed": 0, "rules": Counter()})
            reason = stage.apply(document).reason
            row["n"] += 1
            row["removed"] += bool(reason)
            row["rules"].update([reason] if reason else [])
    return {name: {value: rows[value] | {"rules": dict(sorted(rows[value]["rules"].items()))} for value in sorted(rows)}
            for name, rows in groups.items()}

# %%
#| export
def main(argv: list[str] | None = None) -> int:
    "Measure rules and repairs on good, junk and damaged files; writes the numbers, never the texts, as JSON."
    parser = argparse.ArgumentParser(prog="python -m scalelab.data.quality", description=main.__doc__)
    parser.add_argument("--good", nargs="*", default=[], help="files of good text")
    parser.add_argument("--junk", nargs="*", default=[], help="files of junk with a column `kind`")
    parser.add_argument("--damaged", nargs="*", default=[], help="files of damaged text, columns `kind` and `clean`")
    parser.add_argument("--per_file", type=int, default=300, help="good documents drawn from each file for the rules")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--out", required=True, help="JSON file to write")
    args = parser.parse_args(argv)
    drawn, lengths, good = [], [], {}
    for path in args.good:
        texts = [{k: d.get(k) for k in ("id", "text", "domain", "lang")} for d in read_documents(path)]
        lengths += [{"domain": d["domain"], "text": range(len(d["text"]))} for d in texts]
        drawn += random.Random(args.seed).sample(texts, min(args.per_file, len(texts)))
        for kind, row in repair_rates((d for d in texts if d["lang"] != "code"), "domain").items():
            good[kind] = {k: good.get(kind, {}).get(k, 0) + n for k, n in row.items()}
    damaged = [d for path in args.damaged for d in read_documents(path)]
    wide = [d for d in damaged if d["kind"].endswith("fullwidth")]
    junk = [d for path in (*args.junk, *args.damaged) for d in read_documents(path)]
    made = {
        "good": removal_rates(drawn), "tails": tail_shares(lengths), "junk": removal_rates(junk, key="kind"),
        "sets": set_rates(drawn), "sets_junk": set_rates((d for d in junk if "clean" not in d), key="lang"),
        "repair": {"damaged": repair_rates(damaged), "good": good, "fullwidth": repair_rates(wide, stage=Repair(True))}}
    atomic_write(args.out, json.dumps(made, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    return 0

# %%
made = set_rates([web("好"), web("昨天下午，这里下了一场大雨，街上的人都跑到屋檐下面去了。" * 40)])
assert made["scalelab"]["web"] == {"n": 2, "removed": 2, "rules": {"compressed_share": 1, "too_short": 1}}
assert made["chinese"]["web"]["rules"] == {"zh_repeated_13grams": 1, "zh_short": 1}
assert made["gopher"]["web"]["removed"] == 2

# %%
#| export
#| eval: false
if __name__ == "__main__":
    sys.exit(main())

# %% [markdown]
# The saved numbers were made with `python -m scalelab.data.quality --good GOOD/*.jsonl.zst --junk
# boilerplate_spam.jsonl.zst --damaged mojibake.jsonl.zst --per_file 300 --seed 0 --out
# nbs/01_data/results/quality.json`. They are **not reproducible from this repository alone**: `GOOD` is a folder of
# open data sets that a reader must fetch and write as JSONL (chinese-poetry, the classical texts of NiuTrans,
# LawRefBook's statutes, CMRC 2018, the Chinese translations of Vue's documentation, of the Rust book and of "Dive
# into Deep Learning", manpages-zh, KdConv, CrossWOZ, Project Gutenberg, Tiny Shakespeare, WikiText-2, seed tasks of
# Self-Instruct and BELLE, and sources from Debian packages). The junk was made from such texts (mojibake) and from
# templates (advertising). Our own rules were tuned on these very texts; the others had never met them.

# %%
saved = json.loads(Path("results/quality.json").read_text(encoding="utf-8"))
domains = sorted(saved["good"], key=lambda d: -saved["sets"]["gopher"][d]["removed"] / saved["good"][d]["n"])
sets = list(RULE_SETS)
print(f"{'share removed of':24}" + "".join(f"{name:>10}" for name in sets))
for d in domains:
    shares = [saved["sets"][s][d]["removed"] / saved["sets"][s][d]["n"] for s in sets]
    print(f"{d:14} {saved['good'][d]['n']:5} good" + "".join(f"{share:10.0%}" for share in shares))

# %% [markdown]
# Every number is good text lost. (Code is not judged by the sets of others, which were made for pages; the Chinese
# set does not judge English.) Poems, dialogues and instructions fall to lengths that were meant for web pages,
# manuals to their lists, and Chinese falls to English rules altogether: Gopher's set leaves no Chinese document at
# all.

# %%
for name in sets:
    n, removed = (sum(row[k] for row in saved["sets"][name].values()) for k in ("n", "removed"))
    junk = {lang: f"{row['removed']} of {row['n']}" for lang, row in saved["sets_junk"][name].items()}
    first = sum((Counter(row["rules"]) for row in saved["sets"][name].values()), Counter()).most_common(3)
    print(f"{name:9} removes {removed / n:6.1%} of {n:,} good documents, junk pages {junk}; most by {first}")
damage = {k.split(":")[-1]: row for k, row in saved["junk"].items() if k not in ("boilerplate", "mojibake:fullwidth")}
counts = {k: sum(row[k] for row in damage.values()) for k in ("n", "intact", "removed", "repaired", "exact")}
print(f"our rules and repairs on {len(damage)} kinds of damage to the encoding: {counts}")

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | B-strict, rather remove good text than keep bad | open: needs trainings | the price is known: the well-known sets remove between a third and nearly all of good text that is not an English web article (table above); our rules remove none of 4,190 documents that they were tuned on, and no bound holds for fresh text |
#
# What this does not cover: our rules were written while looking at these corpora, so their figures are those of a
# first look and fresh web text will do worse, most of all for advertising, whose phrases no list exhausts.
# Well-formed nonsense, machine translation and lies pass every rule. HTML has to be taken off before.
