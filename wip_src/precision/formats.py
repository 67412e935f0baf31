# %% [markdown]
# # Number formats, bit by bit
#
# > What a 16-bit or 8-bit float can hold: rounding by integer arithmetic, exact against torch, and what falls off either end.
#
# A CPU without bf16 units computes in bf16 slowly, but it can *round* to it exactly. With exact rounding in hand we can study low precision on any machine.
# Here: five formats, emulated bit by bit, and what they do to weights, activations and gradients.
#
# What the first article claims: embedding and head want bf16, blocks fp16, because the ends of the model are "sensitive to precision" (A-prec);
# accumulating in fp16 loses small gradients, fp32 keeps them (A-acc); a vocabulary of 128K raises the risk of fp16 underflow in embeddings (A-emb).

# %%
#| default_exp precision.formats

# %%
#| export
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from scalelab.core.config import UsageError, did_you_mean

# %%
#| hide
import matplotlib.pyplot as plt
import torch.nn.functional as F

from scalelab.core.plotting import style
from scalelab.model.transformer import Decoder, ModelConfig, Tokens

style()

# %% [markdown]
# ## Range and resolution
# A float is a sign, an exponent and a mantissa. Exponent bits buy range, mantissa bits buy resolution, and 16 bits have to be shared out between the two.

# %%
#| export
@dataclass(frozen=True)
class Format:
    """A binary floating-point format of at most 32 bits.

    exponent_bits, mantissa_bits: widths (the leading one is not stored). max: largest finite value.
    overflow: what becomes of larger ones, "inf", or "max" where the format has no infinity. dtype: torch's type,
    None if it has none.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    overflow: str
    dtype: torch.dtype | None

    @property
    def min_exponent(self) -> int:
        "Exponent of the smallest normal number."
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def min_normal(self) -> float:
        "Smallest number with full resolution."
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        "Smallest number above zero; half of it and less round to zero."
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def eps(self) -> float:
        "Distance from 1 to the next number; a rounding errs by at most half of it, relatively."
        return 2.0**-self.mantissa_bits

# %% [markdown]
# tf32 is what NVIDIA's matrix units make of fp32: the range of fp32 with the mantissa of fp16. The 8-bit e4m3 gives up infinity to reach 448 instead of 240.

# %%
#| export
def _ieee_max(exponent_bits: int, mantissa_bits: int) -> float:
    return (2 - 2.0**-mantissa_bits) * 2.0 ** (2 ** (exponent_bits - 1) - 1)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp32", 8, 23, _ieee_max(8, 23), "inf", torch.float32),
        Format("tf32", 8, 10, _ieee_max(8, 10), "inf", None),
        Format("bf16", 8, 7, _ieee_max(8, 7), "inf", torch.bfloat16),
        Format("fp16", 5, 10, _ieee_max(5, 10), "inf", torch.float16),
        Format("fp8_e5m2", 5, 2, _ieee_max(5, 2), "inf", torch.float8_e5m2),
        Format("fp8_e4m3", 4, 3, 448.0, "max", torch.float8_e4m3fn),
    )
}


def format_of(name: str) -> Format:
    "The format called `name`; an unknown one raises UsageError with the nearest that exists."
    if name not in FORMATS:
        raise UsageError(
            f"number format {name!r} is unknown, expected one of {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}"
        )
    return FORMATS[name]

# %%
print(f"{'format':9} {'bits':>4} {'largest':>10} {'min normal':>11} {'min subnormal':>14} {'eps':>9}")
for f in FORMATS.values():
    bits = f"{1 + f.exponent_bits + f.mantissa_bits}"
    print(f"{f.name:9} {bits:>4} {f.max:10.3g} {f.min_normal:11.3g} {f.min_subnormal:14.3g} {f.eps:9.3g}")

# %% [markdown]
# torch knows the same numbers from its own source, so they are checked against `torch.finfo`. An unknown name is answered with the nearest.

# %%
for f in FORMATS.values():
    if f.dtype:
        info = torch.finfo(f.dtype)
        assert (f.max, f.min_normal, f.eps) == (info.max, info.smallest_normal, info.eps), f.name
try:
    format_of("fp8_e4m4")
except UsageError as e:
    assert "did you mean 'fp8_e4m3'" in str(e)
else:
    raise AssertionError("fp8_e4m4 was accepted")

# %% [markdown]
# One line per format, from its smallest to its largest number, at the height of its resolution:

# %%
fig, ax = plt.subplots(figsize=(6.8, 3))
for f in list(FORMATS.values())[1:]:
    normal = np.arange(f.min_exponent, int(np.log2(f.max)) + 1)
    sub = np.arange(f.min_exponent - f.mantissa_bits, f.min_exponent)
    x = np.concatenate([sub, normal])
    y = np.concatenate([f.min_subnormal / 2.0**sub, np.full(len(normal), f.eps)])
    ax.plot(x, y, label=f.name, lw=4 if f.name == "tf32" else 1.5)
ax.set(yscale="log", xlabel="exponent of the number (powers of two)", ylabel="relative spacing", xlim=(-140, 165))
ax.legend(loc="upper right")
plt.show()

# %% [markdown]
# Lower is finer, wider is safer. fp16 (on top of the wide line of tf32) lies below bf16 by a factor of eight, but lives in a strip of 40 powers of two, and climbs at its left end, where subnormal numbers lose one bit after the other. **fp16 has the resolution, bf16 the range**: the article's table has it the other way round.

# %% [markdown]
# ## Rounding with integers
# An fp32 number's bits, read as an integer, grow with the number. Dropping the last $k$ bits and rounding up or down is therefore integer arithmetic, and a carry out of the mantissa lands
# in the exponent, where it belongs. Ties go to the even neighbour: add half minus one, plus the last bit that stays.

# %%
#| export
def _round_even(value: torch.Tensor, k: torch.Tensor | int) -> torch.Tensor:
    "value / 2**k for non-negative int64, rounded to nearest, ties to even; k >= 1."
    half = 1 << (k - 1) if isinstance(k, int) else torch.ones_like(k) << (k - 1)
    return (value + half - 1 + ((value >> k) & 1)) >> k

# %%
eighths = torch.arange(0, 33)
assert torch.equal(_round_even(eighths, 3), (eighths / 8).round().long())  # torch rounds ties to even too
assert _round_even(torch.tensor([4, 12, 20]), 3).tolist() == [0, 2, 2]

# %% [markdown]
# Three places need care. Below the smallest normal number the steps stop shrinking, so more bits go the smaller the number is. Above the largest, IEEE says infinity, decided *after*
# rounding: 65519 is still 65504 in fp16, 65520 is not. e4m3 has no infinity; its standard allows NaN or the largest number, and torch 2.13 takes the latter, even for an infinite input. And NaN must stay NaN, though its bits look like a very large number.

# %%
#| export
@torch.no_grad()
def round_to(x: torch.Tensor, name: str) -> torch.Tensor:
    """Values of `x` rounded to the format `name` (nearest, ties to even), returned in fp32, same shape and device.

    x: fp32, or a narrower float, which fp32 holds exactly; fp64 would round twice and raises TypeError.
    Exact in subnormals, at overflow (torch's rule: infinity, or the largest number for e4m3) and for signed zeros;
    NaN gives NaN without its payload.
    Not differentiable. tf32 too rounds to nearest even, as no hardware promises to.
    """
    f = format_of(name)
    if not x.is_floating_point() or x.dtype == torch.float64:
        raise TypeError(f"round_to wants fp32 or a narrower float, got {x.dtype}")
    x = x.to(torch.float32)
    if name == "fp32":
        return x.clone()
    bits = x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    sign, mag = bits & 0x80000000, bits & 0x7FFFFFFF
    drop = 23 - f.mantissa_bits
    out = _round_even(mag, drop) << drop
    if f.exponent_bits < 8:  # with 8 exponent bits the subnormals are those of fp32
        out = torch.where(mag >> 23 < 127 + f.min_exponent, _subnormal_bits(mag, f), out)
    top = int(np.float32(f.max).view(np.int32))
    out = torch.where(out > top, 0x7F800000 if f.overflow == "inf" else top, out)
    out = torch.where(mag > 0x7F800000, 0x7FC00000, out) | sign
    return (out - ((out >> 31) << 32)).to(torch.int32).view(torch.float32)  # back to signed 32 bits


def _subnormal_bits(mag: torch.Tensor, f: Format) -> torch.Tensor:
    "fp32 bits of |x| rounded to a multiple of the smallest subnormal, for |x| below the smallest normal."
    exponent = (mag >> 23) - 127
    drop = (23 - f.mantissa_bits + f.min_exponent - exponent).clamp(1, 25)  # 25 bits gone: nothing is left
    steps = _round_even((mag & 0x7FFFFF) | 0x800000, drop)
    return (steps.to(torch.float32) * f.min_subnormal).view(torch.int32).to(torch.int64)

# %% [markdown]
# The hard cases first, one by one, each with its known answer.

# %%
def one(x, name):
    return round_to(torch.tensor([x]), name).item()

assert one(65519.0, "fp16") == 65504 and one(65520.0, "fp16") == float("inf")  # overflow after rounding
assert one(1 + 2**-11, "fp16") == 1 and one(1 + 3 * 2**-11, "fp16") == 1 + 2**-9  # ties to even, down and up
assert one(2.0**-25, "fp16") == 0 and one(2.0**-25 * 1.001, "fp16") == 2.0**-24  # half of the smallest subnormal
assert one(3e38 * 1.13, "bf16") == one(3.39e38, "bf16") < one(3.4e38, "bf16") == float("inf")
assert one(1e9, "fp8_e4m3") == one(float("inf"), "fp8_e4m3") == 448 and one(-1e9, "fp8_e4m3") == -448  # saturates
assert one(float("inf"), "fp8_e5m2") == float("inf") and np.isnan(one(float("nan"), "bf16"))
assert np.signbit(one(-1e-30, "fp16")) and one(-1e-30, "fp16") == 0  # minus zero survives
assert one(1 + 2**-11, "tf32") == 1 and one(1e-40, "tf32") > 0 and one(1e-10, "tf32") != 0

# %% [markdown]
# ### Every value, and a million more
# Each of the 65,536 bit patterns of fp16 and bf16 and of the 256 of either fp8 must come back as itself. Then a million random fp32 bit patterns, which hold every kind of number, NaNs included, must agree with torch's casts in every bit. Then the places where errors live: every midpoint between neighbours, and the fp32 numbers just beside it.

# %%
def same(a, b):
    "Equal bits, any NaN equal to any NaN."
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())

def every_value(f):
    bits = 1 + f.exponent_bits + f.mantissa_bits
    raw = torch.arange(2**bits).to(torch.uint8 if bits == 8 else torch.uint16)
    return raw.view(f.dtype).to(torch.float32)

typed = [f for f in FORMATS.values() if f.dtype and f.name != "fp32"]
for f in typed:
    assert same(round_to(every_value(f), f.name), every_value(f)), f.name
print("identity on all values:", {f.name: len(every_value(f)) for f in typed})

# %%
generator = torch.Generator().manual_seed(0)
patterns = torch.randint(-2**31, 2**31, (1_000_000,), generator=generator).to(torch.int32).view(torch.float32)
for f in typed:
    assert same(round_to(patterns, f.name), patterns.to(f.dtype).to(torch.float32)), f.name
print(f"{len(patterns):,} random patterns agree with torch, of which {int(patterns.isnan().sum()):,} are NaN")

# %%
for f in typed:
    v = every_value(f)
    v = v[v.isfinite()].unique()
    middle = ((v[1:].double() + v[:-1].double()) / 2).float()
    probes = torch.cat([middle, middle.nextafter(torch.tensor(1e38)), middle.nextafter(torch.tensor(-1e38))])
    assert same(round_to(probes, f.name), probes.to(f.dtype).to(torch.float32)), f.name

# %% [markdown]
# tf32 has no torch type. Inside fp16's normal range it has the very same numbers, and outside it must behave like scaled fp16: rounding commutes with powers of two.

# %%
x = torch.randn(100_000, generator=generator)
x = x[x.abs() > FORMATS["fp16"].min_normal]
assert same(round_to(x, "tf32"), x.half().float())
assert same(round_to(x * 2.0**60, "tf32"), x.half().float() * 2.0**60)
for wrong in (torch.zeros(2, dtype=torch.float64), torch.arange(3)):
    try:
        round_to(wrong, "bf16")
    except TypeError as e:
        assert str(wrong.dtype) in str(e)
    else:
        raise AssertionError(f"{wrong.dtype} was accepted")

# %% [markdown]
# ## The whole of fp8
# Eight bits can be shown complete. Each mark is a positive number of the format.

# %%
fig, ax = plt.subplots(figsize=(6.8, 1.8))
for row, name in enumerate(["fp8_e5m2", "fp8_e4m3"]):
    v = every_value(FORMATS[name])
    v = v[v.isfinite() & (v > 0)].unique()
    ax.plot(v, np.full(len(v), row), "|", ms=14, label=f"{name}: {len(v)} numbers")
ax.set_xscale("log", base=2)
ax.set(yticks=[0, 1], yticklabels=["e5m2", "e4m3"], ylim=(-0.6, 1.6), xlabel="value")
plt.show()

# %% [markdown]
# Four steps per doubling against eight, 32 doublings against 18. The gaps at the left end are the subnormals: there, neighbours lie a factor of two apart.

# %% [markdown]
# ## Where do a model's numbers lie?
# Counting exponents answers it. A histogram over powers of two can be laid over the range of any format.

# %%
#| export
@dataclass(frozen=True)
class ExponentHistogram:
    """How many numbers of a tensor lie in [2**e, 2**(e+1)), for each exponent e that occurs.

    exponents, counts: int64 arrays, ascending and without gaps. zeros, nonfinite: what has no exponent.
    """

    exponents: np.ndarray
    counts: np.ndarray
    zeros: int
    nonfinite: int

    @property
    def total(self) -> int:
        "All elements of the tensor."
        return int(self.counts.sum()) + self.zeros + self.nonfinite


@torch.no_grad()
def exponent_histogram(x: torch.Tensor) -> ExponentHistogram:
    "Count the binary exponents of the absolute values of `x` (any float dtype, any shape)."
    x = x.reshape(-1) if x.dtype == torch.float64 else x.reshape(-1).to(torch.float32)
    finite = x.isfinite()
    values = x[finite & (x != 0)].double()  # fp32 subnormals are normal in fp64
    zeros, nonfinite = int((x == 0).sum()), int((~finite).sum())
    if not len(values):
        return ExponentHistogram(np.zeros(0, np.int64), np.zeros(0, np.int64), zeros, nonfinite)
    e = (torch.frexp(values).exponent - 1).to(torch.int64)  # frexp puts the mantissa in [0.5, 1)
    low = int(e.min())
    counts = torch.bincount(e - low).cpu().numpy()
    return ExponentHistogram(np.arange(low, low + len(counts)), counts, zeros, nonfinite)

# %%
h = exponent_histogram(torch.tensor([0.0, 1.0, 1.999, -2.0, 0.25, 1e-45, float("nan"), float("inf")]))
assert (h.zeros, h.nonfinite, h.total) == (1, 2, 8)
found = {int(e): int(c) for e, c in zip(h.exponents, h.counts) if c}
assert found == {-149: 1, -2: 1, 0: 2, 1: 1}
assert exponent_histogram(torch.zeros(3)).zeros == 3 and exponent_histogram(torch.zeros(0)).total == 0

# %% [markdown]
# And the share that a format loses: non-zero numbers that become zero, those that keep fewer bits than promised, and those that overflow.

# %%
#| export
@torch.no_grad()
def range_shares(x: torch.Tensor, name: str) -> dict[str, float]:
    """Shares of the finite non-zero elements of `x` that fall outside what the format holds well.

    underflow: become zero; subnormal: stay, with fewer bits; overflow: lie beyond the largest number, after
    rounding. All 0.0 for an empty tensor.
    """
    f, x = format_of(name), x.reshape(-1)
    x = x[x.isfinite() & (x != 0)]
    y, n = round_to(x, name).abs(), max(1, len(x))
    edge = f.max + f.eps * 2.0 ** (np.floor(np.log2(f.max)) - 1)  # half a step beyond the largest
    return {
        "underflow": int((y == 0).sum()) / n,
        "subnormal": int(((y > 0) & (y < f.min_normal)).sum()) / n,
        "overflow": int((y.isinf() | (x.abs() > edge)).sum()) / n,
    }


def underflow_share(x: torch.Tensor, name: str) -> float:
    "Share of the finite non-zero elements of `x` that become zero in the format `name`."
    return range_shares(x, name)["underflow"]

# %%
x = torch.tensor([0.0, 1.0, 2.0**-26, 2.0**-20, 1e6, float("nan")])
assert range_shares(x, "fp16") == {"underflow": 0.25, "subnormal": 0.25, "overflow": 0.25}
assert range_shares(x, "fp8_e4m3")["overflow"] == 0.25
assert range_shares(x, "bf16") == {"underflow": 0.0, "subnormal": 0.0, "overflow": 0.0}
assert underflow_share(torch.zeros(4), "fp16") == 0.0

# %% [markdown]
# Now a real model, if a small one: bytes of an English and a Chinese text, two blocks, forty steps of AdamW. Then we look at its weights, hidden states, gradients and the size of the last update.

# %%
TEXT = ("A model that is trained in low precision makes a small error at each step, and most of them cancel. "
        "The ones that do not are those that always point the same way: a gradient that became zero stays zero. "
        "低精度训练的每一步都有很小的误差，大部分会互相抵消。不会抵消的，是总朝同一个方向的误差：变成零的梯度永远是零。"
        "词表越大，每个词的概率越小，输出层的梯度也越小；这时动态范围比尾数的位数更重要。")
data = torch.tensor(list(TEXT.encode()))
T = 64
ids = torch.stack([data[i:i + T] for i in range(0, len(data) - T - 1, 40)])
labels = torch.stack([data[i + 1:i + T + 1] for i in range(0, len(data) - T - 1, 40)])

# %%
model = Decoder(ModelConfig(vocab_size=256, d_model=64, n_layers=2, n_heads=4, n_kv_heads=4, d_ff=192, max_seq_len=T))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(40):
    optimizer.zero_grad()
    total, n_valid = model(Tokens(ids, labels))
    (total / n_valid).backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    losses.append(float(total.detach() / n_valid))
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats a byte")
assert losses[-1] < 0.7 * losses[0]

# %%
with torch.no_grad():
    hidden = model.hidden(Tokens(ids))
flat = lambda ts: torch.cat([t.detach().flatten() for t in ts])
kinds = {"weights": flat(model.parameters()), "last hidden states": flat([hidden]),
         "gradients": flat(p.grad for p in model.parameters()),
         "updates": flat(p - b for p, b in zip(model.parameters(), before))}
fig, ax = plt.subplots(figsize=(6.8, 3))
for label, x in kinds.items():
    h = exponent_histogram(x)
    ax.plot(h.exponents, h.counts / h.total * 100, label=label)
for name, color, y in [("fp16", "0.85", 0), ("fp8_e4m3", "0.7", 0)]:
    f = FORMATS[name]
    ax.axvspan(np.log2(f.min_normal), np.log2(f.max), color=color, zorder=0, label=f"{name}, full resolution")
ax.set(xlabel="exponent (powers of two)", ylabel="share of the elements (%)", xlim=(-32, 18))
ax.legend()
plt.show()

# %%
shown = ("bf16", "fp16", "fp8_e5m2", "fp8_e4m3")
table = ["share that becomes zero / keeps fewer bits", " " * 20 + "".join(f"{name:>17}" for name in shown)]
grads = kinds["gradients"]
for label, x in (kinds | {"gradients x 65536": grads * 65536}).items():
    shares = [range_shares(x, name) for name in shown]
    table.append(f"{label:20}" + "".join(f"{s['underflow']:8.3%} /{s['subnormal']:7.2%}" for s in shares))
print("\n".join(table))
plain, scaled = range_shares(grads, "fp16"), range_shares(grads * 65536, "fp16")
assert underflow_share(grads, "bf16") == 0 and scaled["overflow"] == 0
assert scaled["underflow"] <= plain["underflow"] and scaled["subnormal"] < plain["subnormal"] / 10

# %% [markdown]
# Weights and activations sit comfortably inside fp16. The gradients of this small model hardly become zero in it, but a good part of them already lies in the subnormals, where fp16 is coarser than bf16; larger models and batches push
them further left. That is all a loss scale is for: multiplied by 65536 they move sixteen powers of two to the right. Neither fp8 holds gradients or updates without a scale.

# %% [markdown]
# ## Does a large vocabulary underflow? (A-emb)
# The gradient of a row of the head is the mean over tokens of (probability - target) times the hidden state. With $V$ tokens the probabilities are about $1/V$, so
# almost every row sees tiny numbers. We take a head as it is at the start of training and let $V$ grow.

# %%
def head_gradient(V, tokens=256, d=32, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, d, generator=g)
    head = (0.02 * torch.randn(V, d, generator=g)).requires_grad_()
    target = (V ** torch.rand(tokens, generator=g)).long() - 1  # few common, many rare tokens
    F.cross_entropy(hidden @ head.T, target).backward()
    return head.grad


rows = []
for V in (256, 4096, 32_000, 128_000):
    grad = head_gradient(V)
    rows.append(
        (
            V,
            underflow_share(grad, "fp16"),
            range_shares(grad, "fp16")["subnormal"],
            underflow_share(grad * 65536, "fp16"),
            underflow_share(grad, "bf16"),
        )
    )
line = "V {:7,}  fp16: zero {:6.2%}, subnormal {:6.2%}; scaled by 65536: zero {:.2%}; bf16: zero {:.2%}"
print("\n".join(line.format(*row) for row in rows))
assert (
    [r[1] for r in rows] == sorted(r[1] for r in rows)
    and rows[-1][1] > 0.02
    and rows[-1][3] < 1e-3
    and rows[-1][4] == 0
)

# %% [markdown]
# So the second half of A-emb is right for the *unscaled* gradient of the head, and a loss scale removes it. The input embedding is another matter: the rows of the tokens that occur get gradients, all others get exact zeros, whatever $V$ is.

# %% [markdown]
# ## Does the head need bf16? (A-prec)
# "Precision-sensitive, therefore bf16" can be tried directly: round the logits, and compare cross-entropies. Logits with a spread of 3 nats, as a trained model has.

# %%
logits = 3 * torch.randn(512, 4096, generator=generator)
target = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
exact = F.cross_entropy(logits.double(), target, reduction="none")
change = {name: (F.cross_entropy(round_to(logits, name).double(), target, reduction="none") - exact).abs().mean()
          for name in ("tf32", "fp16", "bf16", "fp8_e4m3")}
print("mean change of a token's cross-entropy, in nats:", {name: f"{e:.1e}" for name, e in change.items()})
assert 5 < change["bf16"] / change["fp16"] < 12

# %% [markdown]
# bf16 is about eight times *coarser*, as its three missing bits say. The article's other reason, "small probabilities become zero in fp16", is true of probabilities and not of logits, and autocast computes the softmax in fp32.

# %%
p = logits.softmax(-1)
print(f"probabilities that become zero: fp16 {underflow_share(p, 'fp16'):.2%}, bf16 {underflow_share(p, 'bf16'):.2%}")
assert underflow_share(p, "fp16") > 0 == underflow_share(p, "bf16")

# %% [markdown]
# ## Adding up in fp16 (A-acc)
# A buffer loses small gradients in two ways. An addend below half the smallest subnormal is zero before it arrives: *underflow*. An addend below half a step of what is already there doesn't move it: *swamping*.
# The first is a matter of range, the second of resolution. We add a thousand micro-batch gradients, at two sizes, in emulated buffers.

# %%
def accumulated(size, name, n=1000, width=2000, seed=0):
    "Relative error, after each addition, of a buffer kept in `name`; true gradient `size`, noise of four times that."
    g = torch.Generator().manual_seed(seed)
    buffer, exact, errors = torch.zeros(width), torch.zeros(width, dtype=torch.float64), []
    for _ in range(n):
        grad = size * (1 + 4 * torch.randn(width, generator=g))
        buffer = round_to(buffer + round_to(grad, name), name)
        exact += grad.double()
        errors.append(float((buffer - exact).norm() / exact.norm()))
    return errors

sizes, names = (1e-3, 2e-9), ("fp32", "fp16", "bf16")
error = {(s, name): accumulated(s, name) for s in sizes for name in names}

# %%
fig, axes = plt.subplots(1, 2, figsize=(6.8, 2.8), sharey=True)
for ax, s in zip(axes, sizes):
    for name in names:
        ax.plot(np.arange(1, 1001), np.maximum(error[s, name], 1e-8), label=name)
    ax.set(xscale="log", yscale="log", xlabel="micro-batches added", title=f"gradients of about {s:g}")
axes[0].set_ylabel("relative error of the sum")
axes[0].legend()
plt.show()
for s in sizes:
    print(f"after 1000 additions, gradients of {s:g}: " + ", ".join(f"{n} {error[s, n][-1]:.1e}" for n in names))

# %%
last = {k: e[-1] for k, e in error.items()}
assert last[1e-3, "fp32"] < 1e-5 < last[1e-3, "fp16"] < last[1e-3, "bf16"]  # swamping: resolution decides
assert last[2e-9, "bf16"] < last[2e-9, "fp16"] and last[2e-9, "fp16"] > 0.1  # underflow: range decides

# %% [markdown]
# At ordinary sizes fp16 beats bf16, at tiny ones it is nearly blind; a loss scale would move the right picture onto the left one. fp32 is four orders of magnitude better than either, at any size, and costs two bytes a parameter.
#
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-prec: head and embedding in bf16 because they are sensitive to precision, blocks in fp16 | does not hold, as to the reason | bf16 has the range (max 3.4e38), fp16 the resolution (eps 2^-10 against 2^-7); logits rounded to bf16 cost 8 to 9x the cross-entropy error of fp16 (512 tokens, 1 seed); but probabilities kept in fp16 do lose 6% of a 4096-token vocabulary to zero. Speed (1.8x), oscillation (-63%), top-k (+12%): open, they need training runs and a GPU |
# | A-acc: accumulating in fp16 loses small gradients, fp32 keeps them | holds | 1000 micro-batches, 2000 elements, 1 seed, relative error: gradients of 1e-3 fp32 4.5e-7, fp16 3.7e-3, bf16 2.9e-2; of 2e-9 fp16 0.99, bf16 3.0e-2. fp16 fails by underflow, bf16 by swamping |
# | A-emb: a 128K vocabulary raises fp16 underflow | holds in part | head gradient at initialisation, unscaled: 0.00% of the entries at V = 256, 1.2% at 32,000, 5.0% at 128,000, and 95% more lose bits; scaled by 65536, or in bf16, it is gone; the input embedding does not depend on V. "Chinese is more violent": open, needs runs on both languages |
#
# What this does not cover: accumulation *inside* a matrix product (hardware keeps fp32 there), tf32's rounding on a real GPU, flush-to-zero modes, saturating or stochastic rounding, per-tensor scales of fp8 training, block formats; training in emulated formats is an experiment of its own.
