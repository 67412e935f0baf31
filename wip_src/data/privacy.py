# %% [markdown]
# # Personal data
#
# > Addresses, telephone and identity numbers, cards and keys become placeholders; versions, dates and floats stay.
#
# A model can recite what it was trained on, and a telephone number in its answers is a person's telephone.
# Masking is easy to do badly in both directions: too little leaks, too much ruins code, where every long number
# looks like somebody's. So every candidate has to prove itself: by a checksum, by the shape of its parts, or by
# what stands around it.

# %%
#| default_exp data.privacy

# %%
#| export
from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from scalelab.core.config import UsageError
from scalelab.data.recipe import DocumentStage, Outcome

# %%
#| hide
import pickle
import random
import time

import matplotlib.pyplot as plt

from scalelab.core.plotting import style
from scalelab.data.documents import read_documents, stdlib_documents

style()

# %% [markdown]
# ## Addresses of e-mail
# There is one `@` in an address, so we look for that and read to both sides; a pattern that begins with "any
# letter" would be tried at every letter of the corpus. In code, `a@b.mean` is a product of matrices: there the
# last part has to be a domain that people have addresses at. `example.com` and its like are reserved for examples
# and belong to nobody.

# %%
#| export
Span = tuple[int, int, str]  # start, end, kind

_DOMAIN = re.compile(r"@((?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24})(?![\w-])")
_LOCAL = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._%+-"
_COMMON = ("com org net edu gov info biz io dev name me cn hk tw jp kr in de uk fr nl it es pt ch at be se no dk fi "
           "pl cz hu gr ie ru ua us ca mx br ar au nz za il tr sg my th vn eu").split()
_COMMON_DOMAIN = re.compile(rf"\.(?:{'|'.join(_COMMON)})$", re.I)
_RESERVED = re.compile(r"(?:^|\.)(?:example|test|invalid|localhost|local)$|(?:^|\.)example\.(?:com|org|net)$", re.I)


def _emails(text: str, code: bool) -> Iterator[Span]:
    "Addresses of e-mail, those at reserved example domains left alone."
    for match in _DOMAIN.finditer(text) if "@" in text else ():
        before, domain = text[max(0, match.start() - 65) : match.start()], match[1]
        local = before[len(before.rstrip(_LOCAL)) :].lstrip(".+%-")
        if not 1 <= len(local) <= 64 or local.endswith(".") or _RESERVED.search(domain):
            continue
        if local == "git" and text[match.end() : match.end() + 1] in (":", "/"):  # git@host:owner/repository
            continue
        if not code or _COMMON_DOMAIN.search(domain) and text[match.end() : match.end() + 1] != "(":
            yield match.start() - len(local), match.end(), "EMAIL"


# %%
found = lambda text, spans: [text[a:b] for a, b, _ in spans]
line = "写信给 zhang.san+新@mail.qq.com 或 li_4@corp.co.uk，不是 @用户 或 user@example.com。"
assert found(line, _emails(line, False)) == ["li_4@corp.co.uk"], "a local part that is not ASCII is left alone"
for text, code, expected in [
    ("zhang.san@mail.qq.com。", False, ["zhang.san@mail.qq.com"]), ("loss = (a@b.mean(axis=0))", True, []),
    ("git@github.com:me/x.git", False, []), ("w@v.T", True, []), ("lodash@4.17.21", True, []),
    ("# Guido <guido@python.org>", True, ["guido@python.org"]), ("x@y.museum", False, ["x@y.museum"]),
]:
    assert found(text, _emails(text, code)) == expected, text

# %% [markdown]
# ## Numbers that mean a person
# All kinds of numbers begin with a digit and hold at least seven, so one pass finds the candidates, and the slower
# patterns look at those only. A number that goes on to the left or right (a letter, a digit, a decimal point) is
# part of something else.
#
# Identity numbers carry their own proof. The last character of a Chinese one is a check over the seventeen
# before, with weights $2^{17-i} \bmod 11$; it lets one wrong number in eleven pass, and the date inside lets far
# fewer. Cards obey Luhn's rule and begin with what their issuers were given.

# %%
#| export
_CANDIDATE = re.compile(r"[0-9](?:[ \-()\u3000]{0,2}[0-9]){6,40}[Xx]?")
_ID = re.compile(r"[1-9][0-9]{5}(?:19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])[0-9]{3}[0-9Xx]")
_CARD = re.compile(r"(?:[3-6][0-9]{3}([ -]?)[0-9]{4}\1[0-9]{4}\1[0-9]{1,7}|3[47][0-9]{2}([ -]?)[0-9]{6}\2[0-9]{5})")
_ISSUER = re.compile(r"4|5[1-5]|3[47]|35|6(?:011|2|4|5)")


def id_number_valid(number: str) -> bool:
    "Does the check character of an 18-character Chinese identity number agree?"
    if len(number) != 18 or not number[:17].isdigit():
        return False
    total = sum(int(d) * (2 ** (17 - i) % 11) for i, d in enumerate(number[:17]))
    return "10X98765432"[total % 11] == number[17].upper()


def luhn_valid(digits: str) -> bool:
    "Luhn's check: every second digit from the right is doubled, the sum of all digits divides by ten."
    if not digits.isdigit() or len(set(digits)) == 1:
        return False
    doubled = (sum(divmod(2 * int(d), 10)) for d in digits[-2::-2])
    return (sum(map(int, digits[-1::-2])) + sum(doubled)) % 10 == 0


def _card_valid(text: str) -> bool:
    digits = re.sub(r"[ -]", "", text)
    usual = {"3": (14, 16), "4": (13, 16, 19)}.get(digits[0], (16, 17, 18, 19))
    amex = len(digits) == 15 and digits[:2] in ("34", "37")
    return (amex or len(digits) in usual) and bool(_ISSUER.match(digits)) and luhn_valid(digits)


# %%
def made_up_id(draw):
    "An identity number that nobody has: the area code 999999 was never given out."
    first = f"999999{draw.randint(1950, 2010)}{draw.randint(1, 12):02}{draw.randint(1, 28):02}{draw.randint(0, 999):03}"
    return next(first + c for c in "0123456789X" if id_number_valid(first + c))

draw = random.Random(0)
for _ in range(50):
    number = made_up_id(draw)
    wrong = [number[:i] + d + number[i + 1 :] for i in range(17) for d in "0123456789" if d != number[i]]
    assert not any(id_number_valid(w) for w in wrong), "every single wrong digit is noticed"
assert luhn_valid("4111111111111111") and not luhn_valid("4111111111111112") and not luhn_valid("0000000000000000")
assert _card_valid("3782 822463 10005") and _card_valid("6200 0000 0000 0005")
assert not _card_valid("1234 5678 9012 3452")

# %% [markdown]
# Telephone numbers have no check. A Chinese mobile number is eleven digits from 13 to 19, and so is $2^{34}$. In
# prose the bare eleven digits are enough; in code we want to see an international prefix, groups, or a word like
# `phone` just before.

# %%
#| export
_MOBILE = re.compile(r"(?:86[- ]?)?1[3-9][0-9](?:[0-9]{8}|([ -])[0-9]{4}\1[0-9]{4})")
_LANDLINE = re.compile(r"(?:86[- ]?)?0?(?:10|2[0-9]|[3-9][0-9]{2})\)?[- ]?[2-9][0-9]{6,7}(?:-[0-9]{1,5})?")
_NANP = re.compile(r"(?:1[ -])?[2-9][0-9]{2}(?:\) ?|[- ])[2-9][0-9]{2}-[0-9]{4}")
_CUE = re.compile(r"(?:phone|tel|mobile|call|fax|wechat|whatsapp|电话|手机|致电|热线|联系方式|微信)\W{0,6}$", re.I)


def _is_phone(text: str, start: int, end: int, code: bool) -> bool:
    "Has the candidate text[start:end] the shape of a telephone number, or what is needed around it?"
    word, digits = text[start:end], re.sub(r"[^0-9]", "", text[start:end])
    before = text[max(0, start - 24) : start]
    plus, cued = before.endswith("+"), bool(_CUE.search(before.rstrip("+(（ ")))
    if len(set(digits)) <= 2:
        return False
    if plus and digits[0] != "0" and (cued or not code or re.search(r"[ -]", word)):
        return 8 <= len(digits) <= 15
    if _MOBILE.fullmatch(word):
        return cued or not code or len(word) > len(digits)
    if _LANDLINE.fullmatch(word):
        area_apart = word[0] == "0" and bool(re.match(r"0[0-9]{2,3}[)\- ]", word))
        return cued and len(word) > 8 or area_apart and not code
    return bool(_NANP.fullmatch(word)) and (cued or not code or before.endswith("("))


# %%
def phone(word, before="", code=False):
    return _is_phone(before + word, len(before), len(before + word), code)

assert phone("13812345678") and not phone("13812345678", code=True) and phone("13812345678", "tel: ", code=True)
assert phone("010-62771234") and phone("44 20 7946 0958", "+") and phone("8 800 555 35 35", "+")
assert not phone("000000120", "+") and not phone("11111111111")
assert not phone("2024-05-17") and phone("415) 555-2671", "(")

# %%
#| export
def _numbers(text: str, code: bool) -> Iterator[Span]:
    "Identity, card and telephone numbers."
    for match in _CANDIDATE.finditer(text):
        start, end = match.span()
        if _goes_on(text, start, end):
            continue
        yield from _judge(text, start, end, code)


def _goes_on(text: str, start: int, end: int) -> bool:
    "Is the number part of something longer: a word, a decimal, a path, an identifier?"
    left, right = text[max(0, start - 2) : start], text[end : end + 2]
    if left and left[-1].isascii() and (left[-1].isalnum() or left[-1] in "_.#$/"):
        return True
    if len(left) == 2 and left[-1] in "-:" and left[0].isalnum() and left[0].isascii():
        return True
    word_follows = right[:1].isascii() and (right[:1].isalnum() or right[:1] == "_")
    return word_follows or right[:1] in tuple("./:-") and right[1:].isalnum() and right[1:].isascii()


def _judge(text: str, start: int, end: int, code: bool) -> Iterator[Span]:
    "A candidate as a whole, or, where blanks join several numbers, each of them."
    word = text[start:end]
    if _ID.fullmatch(word) and id_number_valid(word):
        yield start, end, "ID"
    elif _CARD.fullmatch(word) and _card_valid(word):
        yield start, end, "CARD"
    elif _is_phone(text, start, end, code):
        opened = text[start - 1 : start] in ("(", "+", "（") and start > 0
        yield start - opened, end, "PHONE"
    elif re.search(r"[ \u3000]", word):
        for part in re.finditer(r"[^ \u3000]+", word):
            if sum(c.isdigit() for c in part[0]) >= 7:
                yield from _judge(text, start + part.start(), start + part.end(), code)


# %%
def kinds(text, code=False):
    return [(text[a:b], kind) for a, b, kind in _numbers(text, code)]

number = made_up_id(draw)
assert kinds(f"身份证号{number}，") == [(number, "ID")] and kinds(number[:-1] + ("1" if number[-1] != "1" else "2")) == []
assert kinds("打13800138000或139-1234-5678") == [("13800138000", "PHONE"), ("139-1234-5678", "PHONE")]
assert kinds("13812345678 13912345678") == [("13812345678", "PHONE"), ("13912345678", "PHONE")]
assert kinds("010-62771234、(021) 58881234") == [("010-62771234", "PHONE"), ("(021) 58881234", "PHONE")]
assert kinds("call (415) 555-2671 or +44 20 7946 0958") == [("(415) 555-2671", "PHONE"), ("+44 20 7946 0958", "PHONE")]
assert kinds("卡号 4111 1111 1111 1111。") == [("4111 1111 1111 1111", "CARD")]
assert kinds("n = 17179869184", code=True) == []
assert kinds("phone = '13812345678'", code=True) == [("13812345678", "PHONE")]
for innocent in ["3.14159265358979", "2024-05-17 12:30:00", "1.2.3-20240517", "20240517123000", "v13812345678",
                 "#13812345678", "0x13812345678", "1712345678901", "ISBN 978-7-111-12345-6", "13812345678.5",
                 "1e13812345678", "2019-2020-2021", "订单 2024051700012345678901", "0.13812345678", "00000000000",
                 "abc_13812345678", "1990-01-01 1991-02-02"]:
    assert kinds(innocent) == [], (innocent, kinds(innocent))
    assert kinds(innocent, code=True) == []

# %% [markdown]
# ## Keys
# Most services give their keys a prefix, so that they can be found when they leak; a search for a fixed string costs
# almost nothing. A key without a prefix is recognised by the name that it is assigned to and by its entropy: at least
# 3.5 bits a character, with letters and digits both.

# %%
#| export
_PREFIXED = {f"gh{kind}_": rf"gh{kind}_[A-Za-z0-9]{{36,255}}" for kind in "pousr"} | {
    "AKIA": r"AKIA[0-9A-Z]{16}(?![0-9A-Za-z])", "ASIA": r"ASIA[0-9A-Z]{16}(?![0-9A-Za-z])",
    "LTAI": r"LTAI[0-9A-Za-z]{12,26}(?![0-9A-Za-z])", "AIza": r"AIza[0-9A-Za-z_\-]{35}",
    "github_pat_": r"github_pat_[A-Za-z0-9_]{22,255}", "glpat-": r"glpat-[\w-]{20,64}",
    "sk-": r"sk-(?=[\w-]{0,40}[0-9])(?:[a-z]+-)*[A-Za-z0-9_]{20,200}", "sk_live_": r"sk_live_[0-9A-Za-z]{16,99}",
    "xox": r"xox[abprs]-[0-9A-Za-z-]{10,250}", "hf_": r"hf_[A-Za-z0-9]{30,60}(?![0-9A-Za-z_])",
    "eyJ": r"eyJ[\w-]{8,2000}\.eyJ[\w-]{8,4000}\.[\w-]{8,2000}",
}
_PREFIXED = {prefix: re.compile(r"(?<![0-9A-Za-z_-])" + pattern) for prefix, pattern in _PREFIXED.items()}
_NAMES = "key Key KEY secret Secret SECRET token Token TOKEN passw Passw PASSW 密钥 口令".split()
_ASSIGNED = re.compile(
    r"[\w-]{0,24}[\"'\]]{0,2}\s{0,3}(?::=|=>|[:=：])\s{0,3}[\"'`]?([A-Za-z0-9+/=_\-]{20,200})(?![A-Za-z0-9+/=_\-.(])")


def _entropy(text: str) -> float:
    "Bits per character of the distribution of its characters."
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


def _keys(text: str, code: bool) -> Iterator[Span]:
    "Keys of known services, private key blocks, and random tokens assigned to something called a key."
    for prefix, pattern in _PREFIXED.items():
        if prefix in text:
            yield from ((*match.span(), "KEY") for match in pattern.finditer(text))
    at = text.find("-----BEGIN ")
    while at >= 0:
        head = text[at : at + 60].split("\n")[0]
        end = text.find("-----END ", at, at + 20_000) if "PRIVATE KEY-----" in head else -1
        if end >= 0:
            yield at, text.find("-----", end + 9, end + 60) + 5 or end + 9, "KEY"
        at = text.find("-----BEGIN ", max(end, at + 11))
    for name in _NAMES:
        at = text.find(name)
        while at >= 0:
            match = _ASSIGNED.match(text, at + len(name))
            if match and _is_random(match[1]):
                yield *match.span(1), "KEY"
            at = text.find(name, at + len(name))


def _is_random(token: str) -> bool:
    "Letters and digits mixed, spread widely, and no words joined by signs."
    digits = sum(c.isdigit() for c in token)
    longest_word = max(map(len, re.findall(r"[a-z]+|[A-Z]+", token)), default=0)
    return digits >= 3 and longest_word <= 9 and digits < len(token) and _entropy(token) >= 3.5


# %%
secret = lambda n, seed: "".join(random.Random(seed).choices("abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNP23456789", k=n))
pem = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabcd\n-----END RSA PRIVATE KEY-----"
for text, expected in {
    "AKIA" + "Q7" * 8: 1, f"ghp_{secret(36, 1)}": 1, f"sk-proj-{secret(40, 2)}": 1, f"x {pem} y": 1,
    f"api_key = '{secret(32, 3)}'": 1, "sk-learn-classification-problem-and-more": 0, "KEYWORDS = {'a'}": 0,
    "key = sorted_by_the_last_modified_date": 0, "token: str = default_tokenizer_name_v2": 0,
    "-----BEGIN CERTIFICATE-----\nMIIE\n-----END CERTIFICATE-----": 0, f"sha256 = {secret(64, 4)}": 0,
}.items():
    assert len(list(_keys(text, False))) == expected, text
assert found(f"x {pem} y", _keys(f"x {pem} y", False)) == [pem]

# %% [markdown]
# ## Addresses of machines
# An option, off by default: `1.2.3.4` is an address and a version. An address counts when it is one that the
# Internet routes, and when no word before it says "version".

# %%
#| export
_IPV4 = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w]|\.[0-9])")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{1,4}:){2,7}(?::?[0-9A-Fa-f]{1,4}){1,6}(?![\w:])")
_VERSION = re.compile(r"(?:version|release|ver|v|版本|[=<>~^])\W{0,3}$", re.I)


def _addresses(text: str, code: bool) -> Iterator[Span]:
    "IP addresses of the public Internet."
    for pattern in (_IPV4, _IPV6):
        for match in pattern.finditer(text):
            try:
                public = ipaddress.ip_address(match[0]).is_global
            except ValueError:
                continue
            if public and not _VERSION.search(text[max(0, match.start() - 12) : match.start()]):
                yield *match.span(), "IP"


# %%
for text, expected in {"from 8.8.8.8:53": ["8.8.8.8"], "127.0.0.1 192.168.1.1 0.0.0.0": [], "version 1.2.3.4": [],
                       "pkg==4.1.2.3": [], "999.1.1.1": [], "12:30:45": [],
                       "2001:4860:4860:0:0:0:0:8888": ["2001:4860:4860:0:0:0:0:8888"],
                       "1.2.3.4.5": [], "fe80:0:0:0:0:0:0:1": []}.items():
    assert found(text, _addresses(text, False)) == expected, text

# %% [markdown]
# ## Masking
# Where two findings overlap, the one that begins first stays, and of two that begin together the longer.
# Full-width digits are read like the usual ones.

# %%
#| export
_FINDERS: dict[str, Callable[[str, bool], Iterator[Span]]] = {
    "key": _keys, "email": _emails, "number": _numbers, "ip": _addresses,
}
_WIDE = {0xFF10 + i: 0x30 + i for i in range(10)} | {0xFF20: 0x40, 0xFF0D: 0x2D, 0xFF0E: 0x2E, 0xFF0B: 0x2B}
_WIDE_DIGITS = re.compile("[\uff10-\uff19]{3}")
KINDS = ("email", "phone", "id", "card", "key", "ip")


def find_personal(text: str, wanted: tuple[str, ...] = KINDS[:5], code: bool = False) -> list[Span]:
    """(start, end, kind) of the personal data in a text, in order and without overlaps; kind is in capitals.

    code: the text is a program, where bare numbers and `a@b.c` need more proof.
    """
    if not text.isascii() and _WIDE_DIGITS.search(text):
        text = text.translate(_WIDE)  # one character for one: positions stay
    finders = {"number" if kind in ("phone", "id", "card") else kind for kind in wanted}
    found = (span for name, find in _FINDERS.items() if name in finders for span in find(text, code))
    spans = [span for span in found if span[2].lower() in wanted]
    kept: list[Span] = []
    for span in sorted(spans, key=lambda s: (s[0], -s[1])):
        if not kept or span[0] >= kept[-1][1]:
            kept.append(span)
    return kept


def mask_personal(text: str, wanted: tuple[str, ...] = KINDS[:5], code: bool = False) -> tuple[str, Counter[str]]:
    "(text with <EMAIL>, <PHONE>, <ID>, <CARD>, <KEY>, <IP> in place of what was found, how many of each)."
    counts: Counter[str] = Counter()
    while spans := find_personal(text, wanted, code):  # a placeholder can bare what its neighbour had hidden
        parts, at = [], 0
        for start, end, kind in spans:
            parts += [text[at:start], f"<{kind}>"]
            counts[kind.lower()] += 1
            at = end
        text = "".join([*parts, text[at:]])
    return text, counts


# %%
letter = f"王芳，手机１３８０１３８０００１，邮箱 wang.fang@mail.qq.com，身份证{number}，卡 6200 0000 0000 0005。2024-05-17 v1.2.3"
masked, counts = mask_personal(letter)
print(masked)
assert masked == "王芳，手机<PHONE>，邮箱 <EMAIL>，身份证<ID>，卡 <CARD>。2024-05-17 v1.2.3"
assert counts == {"phone": 1, "email": 1, "id": 1, "card": 1} and mask_personal(masked) == (masked, Counter())
assert mask_personal(letter, ("email",))[0] == letter.replace("wang.fang@mail.qq.com", "<EMAIL>")
assert mask_personal("8.8.8.8", ("ip",))[0] == "<IP>" and mask_personal("8.8.8.8")[0] == "8.8.8.8"

# %% [markdown]
# Masking twice must be masking once. Pieces of everything above, joined at random in five thousand ways:

# %%
pieces = [number, "13812345678", "010-62771234", "a.b@qq.com", "@", ".", "-", " ", "+86", "(", ")", "<", ">", "8.8.8.8",
          "key=", secret(24, 5), "4111111111111111", "x", "天", "，", "<PHONE>", "1", "２", "://", "_", "\n",
          "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"]
for _ in range(5_000):
    text = "".join(draw.choices(pieces, k=draw.randint(2, 8)))
    for code in (False, True):
        once, _ = mask_personal(text, KINDS, code)
        assert mask_personal(once, KINDS, code) == (once, Counter()), text

# %% [markdown]
# ## What it does to good text
# The Python standard library has thousands of long numbers, versions, dates and floats, and the addresses of its
# authors. Everything that is masked there, by kind:

# %%
library = list(stdlib_documents(3_000_000))
taken = Counter()
shown = {}
for doc in library:
    for start, end, kind in find_personal(doc["text"], KINDS[:5], doc["domain"] == "code"):
        taken[doc["domain"], kind] += 1
        if kind != "EMAIL":
            shown[doc["text"][max(0, start - 30) : end + 12].replace("\n", " ")] = kind
size = sum(len(d["text"]) for d in library)
print(f"{size / 1e6:.1f} million characters: {dict(taken)}")
assert set(shown) == set(), "something other than an address of e-mail was masked"

# %% [markdown]
# The e-mail addresses are those of real people and belong masked.
#
# ## A text made to be slow
# Patterns with nested repetition can take exponential time on a text that was made for it, and somebody's page is
# always made for it. A hundred thousand characters of each kind of malice, then twice as many: the time may
# double, and must not grow fourfold.

# %%
evil = {"digits": "1", "digits and dashes": "1-", "at signs": "@", "addresses without end": "a.", "halves": "a@a.",
        "begin": "-----BEGIN PRIVATE KEY-----", "keys": "key=", "key tokens": "key=aA1bB2", "blanks": "1 ",
        "dots": "1.", "parentheses": "1(", "hex": "a:1:", "prefixes": "sk-", "tokens": "eyJabcdefgh.", "wide": "１"}
growth = {}
for name, unit in evil.items():
    seconds = []
    for n in (100_000, 200_000):
        text = unit * (n // len(unit))
        best = []
        for _ in range(2):
            begin = time.process_time()
            mask_personal(text, KINDS)
            best.append(time.process_time() - begin)
        seconds.append(min(best))
    growth[name] = seconds[1] / max(seconds[0], 0.01)
assert max(growth.values()) < 3.5, growth
print(f"{len(evil)} kinds of malice, none of them grows faster than linearly")

# %%
counts_by_kind = Counter()
for name in ("zh_prose", "en_prose", "dialogue", "legal", "code"):
    for doc in read_documents(f"../../data_samples/{name}.jsonl"):
        for _, _, kind in find_personal(doc["text"], KINDS, doc["domain"] == "code"):
            counts_by_kind[name, kind] += 1
fig, ax = plt.subplots(figsize=(5.6, 2))
labels = [f"library {domain}: {kind}" for domain, kind in taken]
labels += [f"samples {name}: {kind}" for name, kind in counts_by_kind]
ax.barh(labels, [*taken.values(), *counts_by_kind.values()])
ax.set(xlabel="spans masked")
plt.show()

# %% [markdown]
# What to see: almost all that is masked in the library are addresses of authors; the samples, whose people are
# invented, hold next to nothing.
#
# ## The stage

# %%
#| export
@dataclass
class Privacy(DocumentStage):
    """Replace personal data by placeholders: <EMAIL>, <PHONE>, <ID>, <CARD>, <KEY>, <IP>. Nothing is removed.

    Args:
        email: addresses of e-mail
        phone: telephone numbers, Chinese and international
        id: Chinese identity numbers, by their checksum
        card: payment cards, by issuer and Luhn's rule
        key: keys of services, private keys, random tokens assigned to something called a key
        ip: public IP addresses
    """

    name: ClassVar[str] = "privacy"
    email: bool = True
    phone: bool = True
    id: bool = True
    card: bool = True
    key: bool = True
    ip: bool = False

    def __post_init__(self):
        if not any(getattr(self, kind) for kind in KINDS):
            kinds = ", ".join(KINDS)
            raise UsageError(f"stages.privacy: all kinds are off; switch one on ({kinds}) or leave the stage out")

    def apply(self, doc: dict[str, Any]) -> Outcome:
        "The document with placeholders; values count them by kind."
        wanted = tuple(kind for kind in KINDS if getattr(self, kind))
        text, counts = mask_personal(doc["text"], wanted, "code" in (doc.get("domain"), doc.get("lang")))
        values = {f"masked_{kind}": float(counts[kind]) for kind in wanted}
        return Outcome(doc | {"text": text} if counts else doc, values=values)


# %%
stage = pickle.loads(pickle.dumps(Privacy(card=False)))
outcome = stage.apply({"text": letter, "id": "7"})
assert outcome.document["text"].count("<") == 3 and outcome.document["id"] == "7"
assert outcome.values["masked_phone"] == 1 and "masked_card" not in outcome.values
clean = {"text": "nothing here"}
assert stage.apply(clean).document is clean
try:
    Privacy(*[False] * 6)
    raise AssertionError("accepted")
except UsageError as error:
    print(error)

# %% [markdown]
# ## Verdict
# | question | answer |
# |---|---|
# | does masking spoil code? | holds: in the standard library nothing is masked but addresses of e-mail |
# | is it safe against text made to be slow? | holds: fifteen kinds, time linear in length |
#
# What this does not cover: names and postal addresses of people, identity numbers of fifteen digits (given out
# until 1999, no checksum) and other countries' identity numbers, service numbers such as 400 lines, which belong
# to companies.
