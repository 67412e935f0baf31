# %% [markdown]
# # What a rule is
#
# > The machinery under every set of rules: a rule as data, a text that is split into words once for all of them, and a choice of thresholds that refuses misspelt names.
#
# A rule is a number computed from a text, a threshold, and a sentence that says why the text is better left out. It
# also says where it does *not* apply: half of a program's characters are symbols by right. Whoever reads the rejects
# file must be able to disagree with a removal, so value and threshold travel with it.

# %%
#| default_exp data.rules

# %%
#| export
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scalelab.core.config import UsageError, did_you_mean

# %%
#| export
@dataclass(frozen=True)
class Rule:
    """One test of a text.

    name; reason: why a text that fails is better left out; statistic: text -> number; threshold: fails above it (below
    it if `below`); by_domain: other thresholds for some domains, None where the rule does not apply; langs: languages
    it applies to, empty for all; on.
    """

    name: str
    reason: str
    statistic: Callable[[str], float]
    threshold: float
    below: bool = False
    by_domain: Mapping[str, float | None] = field(default_factory=dict)
    langs: frozenset[str] = frozenset()
    on: bool = True

    def limit(self, domain: str | None, lang: str | None) -> float | None:
        "The threshold for this domain and language, None where the rule does not apply."
        if not self.on or self.langs and lang not in self.langs:
            return None
        return self.by_domain.get("code" if lang == "code" else domain, self.threshold)

    def fails(self, value: float, limit: float) -> bool:
        "Is the value on the wrong side of the limit? A value equal to it passes."
        return value < limit if self.below else value > limit


@dataclass(frozen=True)
class Verdict:
    "A failed rule with its evidence: the value found and the threshold it was held against."

    rule: str
    value: float
    threshold: float
    reason: str

    def __str__(self) -> str:
        return f"{self.rule} {self.value:.3g} (limit {self.threshold:.3g}): {self.reason}"

# %%
capitals = lambda text: sum(c.isupper() for c in text) / len(text)
shout = Rule("shout", "all in capitals", capitals, 0.5, by_domain={"code": None})
assert shout.limit("prose", "en") == 0.5 and shout.limit("code", "code") is None and shout.limit("web", "code") is None
assert replace(shout, on=False).limit("prose", "en") is None
assert shout.fails(capitals("BUY NOW"), 0.5) and not shout.fails(0.5, 0.5)

# %% [markdown]
# ## One split for all
# Twenty rules that each split the same text into words would split it twenty times. A `Text` is a string that
# remembers: a function marked `shared` is computed once for it, whoever asks.

# %%
#| export
class Text(str):
    """A string with a memory for what was computed about it; see `shared`.

    segment: words of Chinese are what the segmenter `rjieba` finds, not single characters.
    """

    segment: bool = False

    def __new__(cls, text: str, segment: bool = False) -> Text:
        made = super().__new__(cls, text)
        made.memo, made.segment = {}, segment
        return made


def shared(function: Callable[[str], Any]) -> Callable[[str], Any]:
    "Mark a pure function of a text: on a `Text` it is computed once, on a plain string every time."

    @functools.wraps(function)
    def remembered(text: str) -> Any:
        if not isinstance(text, Text):
            return function(text)
        if function not in text.memo:
            text.memo[function] = function(text)
        return text.memo[function]

    return remembered

# %%
asked = []
count = shared(lambda text: asked.append(text) or len(text))
text = Text("天地")
assert count(text) == count(text) == 2 and len(asked) == 1 and text == "天地" and isinstance(text + "x", str)
assert count("天地") == count("天地") and len(asked) == 3

# %% [markdown]
# ## Holding a document to the rules

# %%
#| export
def failures(document: Mapping[str, Any], rules: Mapping[str, Rule]) -> list[Verdict]:
    "The rules that a document fails, each with its value and threshold; an empty list for a good one."
    failed, text = [], Text(document["text"])
    for rule in rules.values():
        limit = rule.limit(document.get("domain"), document.get("lang"))
        if limit is not None and rule.fails(value := rule.statistic(text), limit):
            failed.append(Verdict(rule.name, float(value), float(limit), rule.reason))
    return failed

# %%
found = failures({"text": "BUY NOW", "domain": "web"}, {"shout": shout})
assert [v.rule for v in found] == ["shout"] and str(found[0]) == "shout 0.857 (limit 0.5): all in capitals"
assert failures({"text": "BUY NOW", "domain": "code"}, {"shout": shout}) == []

# %% [markdown]
# ## Sets, and choosing from them
# Rules that belong together have a name and a source. A set may also edit the text: C4's is as much a filter of lines
# as of documents. A recipe can move a threshold, switch a rule off, or switch it off for a domain. A misspelt rule
# name is refused, because a rule that silently stays on (or off) is found months later.

# %%
#| export
@dataclass(frozen=True)
class RuleSet:
    """Rules under one name.

    source: where rules and thresholds come from; edit: what the set does to the text of a document that passes
    (None: nothing); the rules see the text before it.
    """

    name: str
    source: str
    rules: Mapping[str, Rule]
    edit: Callable[[Text], str] | None = None


def named(*rules: Rule) -> dict[str, Rule]:
    "Rules by name, in the order given."
    return {rule.name: rule for rule in rules}

# %%
#| export
def chosen(
    rules: Mapping[str, Rule], thresholds: Mapping[str, float], off: Iterable[str],
    off_domains: Mapping[str, Iterable[str]] | None = None, where: str = "quality",
) -> dict[str, Rule]:
    """The rules with other thresholds, some of them off, some off for some domains.

    A new threshold holds in every domain to which the rule applies. Raises UsageError, which begins with `where`, for
    an unknown rule or a threshold that is no number from 0 upwards.
    """
    off_domains = off_domains or {}
    shapes = {"thresholds": (thresholds, Mapping, "{rule: number}"), "off": (off, (list, tuple), "[rule, ...]"),
              "off_domains": (off_domains, Mapping, "{rule: [domain, ...]}")}
    for key, (value, kind, shape) in shapes.items():
        if not isinstance(value, kind):
            raise UsageError(f"{where}.{key}: {value!r} is not of the form {shape}")
    for key, names in (("thresholds", thresholds), ("off", off), ("off_domains", off_domains)):
        for name in names:
            if name not in rules:
                known = f"{did_you_mean(str(name), rules)}; rules are {', '.join(rules)}"
                raise UsageError(f"{where}.{key}: there is no rule {name!r}{known}")
    made = {name: replace(rule, on=False) if name in off else rule for name, rule in rules.items()}
    for name, value in thresholds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise UsageError(f"{where}.thresholds.{name}: {value!r} is no number from 0 upwards")
        kept = {domain: None for domain, limit in made[name].by_domain.items() if limit is None}
        made[name] = replace(made[name], threshold=float(value), by_domain=kept)
    for name, domains in off_domains.items():
        if not isinstance(domains, (list, tuple)):
            raise UsageError(f"{where}.off_domains.{name}: {domains!r} is no list of domains; write [{domains}]")
        made[name] = replace(made[name], by_domain={**made[name].by_domain, **{str(d): None for d in domains}})
    return made

# %%
assert named(shout) == {"shout": shout}
stricter = chosen({"shout": shout}, {"shout": 0.2}, [], {"shout": ["poster"]})["shout"]
assert stricter.limit("web", "en") == 0.2 and stricter.limit("poster", "en") is None is stricter.limit("code", "en")
assert not chosen({"shout": shout}, {}, ["shout"])["shout"].on and shout.on
wrongs = [({"shuot": 1}, []), ({}, ["shot"]), ({"shout": float("nan")}, []), ({"shout": True}, []), ([1], [])]
for wrong in [*wrongs, ({}, "shout"), ({}, [], {"shout": "poster"})]:
    try:
        chosen({"shout": shout}, *wrong)
        raise AssertionError(f"{wrong} was accepted")
    except UsageError as error:
        print(error)

# %% [markdown]
# ## Verdict
# A rule is data: it can be listed, moved and switched off by name, and says why it exists. It claims nothing that
# could be measured; the sets do, each in its chapter.
