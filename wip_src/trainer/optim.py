# %% [markdown]
# # The optimizer, and how far a step moves
#
# > AdamW, Muon and LAMB, decay where decay belongs, rates by role, and the length of every update.
#
# The second article takes AdamW as the default, and so do we. This chapter settles two small things about it that are often wrong: which parameters are decayed, and how to know the length
# of an update without keeping a second copy of the model. The first article watches gradient norms; with Adam the gradient's length says little about the step's, and we look at why.

# %%
#| default_exp trainer.optim

# %%
#| export
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from scalelab.core.config import UsageError, did_you_mean

# %%
#| hide
import matplotlib.pyplot as plt
import numpy as np
from scalelab.core.plotting import style

# %% [markdown]
# ## Settings
# Every field is a key on the command line (`--optim.lr 3e-4`), so each says what it does and is checked before a run begins.

# %%
#| export
KINDS = ("adamw", "muon", "lamb")


@dataclass
class OptimConfig:
    """The optimizer.

    Args:
        kind: adamw; muon (orthogonalised momentum for the matrices of the blocks, AdamW for the rest); lamb (AdamW with a trust ratio a tensor)
        lr: peak learning rate
        beta1: decay of the gradient's average
        beta2: decay of the squared gradient's average
        eps: added to the root of the squared gradient's average
        weight_decay: decoupled decay per step as a share of lr, on matrices only
        clip: largest global gradient norm, 0 turns clipping off
        embedding_scale: rate of embeddings as a multiple of lr
        head_scale: rate of an untied head as a multiple of lr
        matrix_scale: rate of the matrices of the blocks as a multiple of lr
        momentum: muon only, decay of the average of gradients
    """

    kind: Literal["adamw", "muon", "lamb"] = "adamw"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    embedding_scale: float = 1.0
    head_scale: float = 1.0
    matrix_scale: float = 1.0
    momentum: float = 0.95

    def validate(self) -> None:
        "Raises UsageError that names the key and the valid range."
        for key, low, high in (("lr", 0, math.inf), ("beta1", 0, 1), ("beta2", 0, 1), ("weight_decay", 0, math.inf), ("clip", 0, math.inf),
                               ("embedding_scale", 0, math.inf), ("head_scale", 0, math.inf), ("matrix_scale", 0, math.inf), ("momentum", 0, 1)):
            value = getattr(self, key)
            if not low <= value < high:
                raise UsageError(f"optim.{key}: {value} is outside [{low}, {high})")
        if self.kind not in KINDS:
            raise UsageError(f"optim.kind: {self.kind!r} is not one of {', '.join(KINDS)}{did_you_mean(str(self.kind), KINDS)}")
        if not self.eps > 0:
            raise UsageError(f"optim.eps: {self.eps} must be above 0")


# %%
for bad in (OptimConfig(lr=-1), OptimConfig(beta2=1.0), OptimConfig(lr=math.nan)):
    try:
        bad.validate()
    except UsageError as error:
        print(error)
    else:
        raise AssertionError(f"accepted {bad}")
OptimConfig().validate()

# %% [markdown]
# ## What is decayed
# Weight decay pulls a matrix towards zero, which a following norm makes harmless. A norm's gain pulled towards zero silences its channel. So matrices decay, vectors do not, and each group carries a
# name, since "group 1" in a log helps nobody. `fused` does the whole update in one kernel instead of a dozen small ones for each tensor.

# %%
#| export
def parameter_groups(model: nn.Module, cfg: OptimConfig) -> list[dict]:
    """Named groups of parameters by role, each with its rule, its decay and `lr_scale`, the multiple of the rate that it is trained with.

    embedding, head, matrices (of two or more dimensions, in blocks) and vectors (gains, biases, single scales: never decayed). With all scales 1
    and the same rule, embedding, head and matrices are one group, `decay`, and the vectors are `no_decay`.
    """
    role = {id(p): getattr(m, "role", "block") for m in model.modules() for p in m.parameters(recurse=False)}
    found: dict[str, list] = {"embedding": [], "head": [], "matrices": [], "no_decay": []}
    for p in model.parameters():
        if p.requires_grad:
            kind = role.get(id(p), "block")
            found["no_decay" if p.ndim < 2 else kind if kind in ("embedding", "head") else "matrices"].append(p)
    scale = {"embedding": cfg.embedding_scale, "head": cfg.head_scale, "matrices": cfg.matrix_scale, "no_decay": 1.0}
    rule = {name: "adamw" if cfg.kind == "muon" and name != "matrices" else cfg.kind for name in found}
    if len(set(scale.values())) == 1 and cfg.kind != "muon":
        order = {id(p): i for i, p in enumerate(model.parameters())}
        found = {"decay": sorted(found["embedding"] + found["head"] + found["matrices"], key=lambda p: order[id(p)]), "no_decay": found["no_decay"]}
        scale, rule = dict.fromkeys(found, 1.0), dict.fromkeys(found, cfg.kind)
    return [{"params": params, "weight_decay": 0.0 if name == "no_decay" else cfg.weight_decay, "name": name, "rule": rule[name], "lr_scale": scale[name]} for name, params in found.items() if params]


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    "Give every group its rate: `lr` times its `lr_scale`."
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)

# %% [markdown]
# ## Muon: a step whose every direction counts
# The gradient of a matrix has a few large singular values and many small ones, and so has Adam's step. Muon (Jordan et al., 2024) replaces the momentum by the nearest matrix whose singular values are all one: every direction
# moves alike. A few Newton-Schulz iterations come close enough, with matrix products only. torch's own `Muon` does them in bf16, which a CPU emulates some thirty times too slowly, so we do them in the
# weights' own format, all matrices of one shape in one batched product. The step is then scaled by $0.2\sqrt{\max(m, n)}$ (Liu et al., 2025), which gives it the length that AdamW's would have, and both can share a rate.

# %%
#| export
def orthogonalise(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest (semi-)orthogonal matrices of a batch [k, m, n], approximately: singular values between 0.7 and 1.2.

    Quintic Newton-Schulz iteration (Jordan et al., 2024), in fp32 or fp64. A matrix of zeros stays one.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    y = x.transpose(-2, -1) if tall else x
    y = y / y.flatten(1).norm(dim=1)[:, None, None].clamp_min(1e-12)
    for _ in range(steps):
        gram = y @ y.transpose(-2, -1)
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.transpose(-2, -1) if tall else y

# %%
g = torch.Generator().manual_seed(0)
x = torch.randn(3, 40, 24, generator=g, dtype=torch.float64) @ torch.diag(torch.logspace(0, -1, 24, dtype=torch.float64))
before, after = torch.linalg.svdvals(x), torch.linalg.svdvals(orthogonalise(x))
print(f"singular values before {before.min():.2f} to {before.max():.2f}, after {after.min():.2f} to {after.max():.2f}")
assert 0.5 < after.min() and after.max() < 1.3 and before.max() / before.min() > 10
u, _, vh = torch.linalg.svd(x, full_matrices=False)
assert (orthogonalise(x) * (u @ vh)).sum() / (24 * 3) > 0.8  # and the directions are those of the polar factor
torch.testing.assert_close(orthogonalise(x[:1]), orthogonalise(x)[:1])  # batching changes nothing
assert not orthogonalise(torch.zeros(1, 4, 4)).any()

# %%
#| export
class MixedOptimizer(torch.optim.Optimizer):
    """Groups with rules of their own: `adamw` (fused), `muon`, `lamb` (You et al., 2020).

    State by parameter, as the checkpoint saves it: step, exp_avg, exp_avg_sq for adamw and lamb, momentum_buffer for muon.
    `moved` holds, after a step, the squared length of the update by group name (tensors), for the rules whose step can't be recomputed.
    """

    def __init__(self, groups: list[dict], cfg: OptimConfig):
        super().__init__(groups, {"lr": cfg.lr, "betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps, "momentum": cfg.momentum, "weight_decay": 0.0, "rule": "adamw", "lr_scale": 1.0})
        self.moved: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure=None):
        "One update of every parameter that has a gradient."
        loss = closure() if closure else None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                {"adamw": self._adamw, "muon": self._muon, "lamb": self._lamb}[group["rule"]](group, params)
        return loss

    def _moments(self, params: list) -> list[dict]:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"step": torch.zeros((), dtype=torch.float32), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return [self.state[p] for p in params]

    def _adamw(self, group: dict, params: list) -> None:
        from torch.optim.adamw import adamw

        states, (b1, b2) = self._moments(params), group["betas"]
        for s, p in zip(states, params):
            s["step"] = s["step"].to(p.device)  # the fused kernel wants it there
        adamw(params, [p.grad for p in params], [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states],
              fused=True, amsgrad=False, beta1=b1, beta2=b2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False)

    def _muon(self, group: dict, params: list) -> None:
        by_shape: dict[tuple, list] = {}
        for p in params:
            by_shape.setdefault((p.shape, p.dtype, p.device), []).append(p)
        lengths, beta = [], group["momentum"]
        for ((m, n), _, _), same in by_shape.items():
            for p in same:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - beta)
            ahead = torch.stack([p.grad.lerp(self.state[p]["momentum_buffer"], beta) for p in same])  # Nesterov
            update = orthogonalise(ahead) * (0.2 * math.sqrt(max(m, n)) * group["lr"])
            for p, u in zip(same, update):
                u = u + p * (group["lr"] * group["weight_decay"])
                p.sub_(u)
                lengths.append(u.double().square().sum())
        self.moved[group["name"]] = torch.stack(lengths).sum()

    def _lamb(self, group: dict, params: list) -> None:
        lengths, (b1, b2) = [], group["betas"]
        for p, s in zip(params, self._moments(params)):
            s["step"] += 1
            t = float(s["step"])
            s["exp_avg"].lerp_(p.grad, 1 - b1)
            s["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
            u = (s["exp_avg"] / (1 - b1**t)) / ((s["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"]) + group["weight_decay"] * p
            length, size = p.norm(), u.norm()
            u = u * (group["lr"] * torch.where((length > 0) & (size > 0), length / size.clamp_min(1e-30), torch.ones_like(size)))
            p.sub_(u)
            lengths.append(u.double().square().sum())
        self.moved[group["name"]] = torch.stack(lengths).sum()

# %%
#| export
def build_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.Optimizer:
    "Fused AdamW when every group follows it, else a MixedOptimizer; see `parameter_groups`."
    cfg.validate()
    groups = parameter_groups(model, cfg)
    if cfg.kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)
    else:
        optimizer = MixedOptimizer(groups, cfg)
    set_rate(optimizer, cfg.lr)
    return optimizer


# %%
from scalelab.model.transformer import Decoder, ModelConfig, Tokens

model = Decoder(ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=16))
optimizer = build_optimizer(model, OptimConfig())
table = {g["name"]: sum(p.numel() for p in g["params"]) for g in optimizer.param_groups}
print(table)
assert sum(table.values()) == sum(p.numel() for p in model.parameters())
assert table["no_decay"] == sum(p.numel() for n, p in model.named_parameters() if "norm" in n)

# %% [markdown]
# Fused or not, it must be Kingma and Ba's rule with decoupled decay (Loshchilov and Hutter). The reference below is written from the formula, in double precision:

# %%
def reference_adamw(p, grads, cfg, decay):
    "AdamW by its formula: `p` after the given gradients."
    m = v = torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m, v = cfg.beta1 * m + (1 - cfg.beta1) * g, cfg.beta2 * v + (1 - cfg.beta2) * g * g
        step = (m / (1 - cfg.beta1**t)) / ((v / (1 - cfg.beta2**t)).sqrt() + cfg.eps)
        p = p * (1 - cfg.lr * decay) - cfg.lr * step
    return p

cfg = OptimConfig(lr=0.01)
torch.manual_seed(0)
layer = nn.Linear(5, 7, bias=True).double()
start = {n: p.detach().clone() for n, p in layer.named_parameters()}
opt = build_optimizer(layer, cfg)
history = [{n: torch.randn_like(p) for n, p in layer.named_parameters()} for _ in range(5)]
for grads in history:
    for n, p in layer.named_parameters():
        p.grad = grads[n].clone()
    opt.step()
for n, p in layer.named_parameters():
    want = reference_adamw(start[n], [g[n] for g in history], cfg, cfg.weight_decay if p.ndim == 2 else 0.0)
    torch.testing.assert_close(p.detach(), want, rtol=1e-12, atol=1e-12)

# %% [markdown]
# The other rules against their formulas: AdamW inside a mixture must be torch's to the last bit, and LAMB the one that is written down.

# %%
def trained(kind, steps=4, **settings):
    "Parameters of a tiny model after some steps, and its optimizer."
    m = Decoder(ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=16, tie_embeddings=False), seed=1)
    opt = build_optimizer(m, OptimConfig(kind=kind, lr=0.01, **settings)) if kind != "mixed adamw" else MixedOptimizer(parameter_groups(m, OptimConfig(lr=0.01)), OptimConfig(lr=0.01))
    for s in range(steps):
        ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(s))
        loss, n = m.loss(Tokens(ids, ids.roll(-1, 1)))
        opt.zero_grad()
        (loss / n).backward()
        opt.step()
    return {n: p.detach() for n, p in m.named_parameters()}, opt

plain, mixed = trained("adamw")[0], trained("mixed adamw")[0]
assert all(torch.equal(plain[n], mixed[n]) for n in plain)
muon, opt = trained("muon")
print({g["name"]: (g["rule"], sum(p.numel() for p in g["params"])) for g in opt.param_groups})
assert [g["rule"] for g in opt.param_groups] == ["adamw", "adamw", "muon", "adamw"]
assert {g["name"]: g["lr"] for g in trained("adamw", embedding_scale=3.0)[1].param_groups}["embedding"] == 0.03

layer = nn.Linear(5, 7, bias=False).double()
w, grad = layer.weight.detach().clone(), torch.randn(7, 5, dtype=torch.float64, generator=g)
layer.weight.grad = grad.clone()
build_optimizer(layer, OptimConfig(kind="lamb", lr=0.01)).step()
u = grad / (grad.abs() + 1e-8) + 0.1 * w
torch.testing.assert_close(layer.weight.detach(), w - 0.01 * (w.norm() / u.norm()) * u)

# %% [markdown]
# ## Norms
# The global norm is the root of the summed squares over all tensors, accumulated in double precision so that it is the same number however the tensors are grouped.

# %%
#| export
@torch.no_grad()
def global_norm(tensors) -> float:
    "Euclidean norm over all elements of all tensors; 0.0 for none; non-finite if any element is."
    tensors = [t for t in tensors if t is not None]
    if not tensors:
        return 0.0
    norms = torch.stack([n.double() for n in torch._foreach_norm(tensors)])
    return float(norms.square().sum().sqrt())


@torch.no_grad()
def clip_gradients(parameters, norm: float, limit: float) -> bool:
    "Scale all gradients by limit / norm if norm > limit > 0; True if it did. `norm` is what `global_norm` gave."
    if not limit or not norm > limit:
        return False
    grads = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_mul_(grads, limit / norm)
    return True


# %%
xs = [torch.tensor([3.0]), torch.tensor([[4.0, 0.0]]), None]
assert global_norm(xs) == 5.0 and global_norm([]) == 0.0 and math.isnan(global_norm([torch.tensor([math.nan])]))
w = nn.Parameter(torch.zeros(2))
w.grad = torch.tensor([30.0, 40.0])
assert clip_gradients([w], global_norm([w.grad]), 1.0) and abs(global_norm([w.grad]) - 1) < 1e-6
assert not clip_gradients([w], 1.0, 0.0) and not clip_gradients([w], 0.5, 1.0)

# %% [markdown]
# ## How far did the step go?
# The plain way is to copy the model before the step and subtract: one more model in memory. But everything that made the step is still in the optimizer, so the update can be computed again, one tensor
# at a time, from $m$, $v$ and the decay:
# $$\Delta p = -\eta\,\frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)}+\epsilon} - \eta\lambda\,p_{\text{old}},\qquad p_{\text{old}} = \frac{p_{\text{new}} + \eta\,(\ldots)}{1-\eta\lambda}.$$

# %%
#| export
@torch.no_grad()
def update_norm(optimizer: torch.optim.Optimizer) -> float:
    """Length of the step that `optimizer` took last, without a copy of the model: recomputed from m, v, the rate and the decay.

    Exact up to rounding. Tensors without state (no gradient yet) count as unmoved. One temporary of the size of the largest tensor.
    Groups with other rules than adamw have noted their length in `optimizer.moved`.
    """
    squares = []
    for group in optimizer.param_groups:
        (b1, b2), lr, decay = group["betas"], float(group["lr"]), group["lr"] * group["weight_decay"]
        if group.get("rule", "adamw") != "adamw":
            squares.append(optimizer.moved.get(group["name"], torch.zeros((), dtype=torch.float64)))
        if lr == 0 or group.get("rule", "adamw") != "adamw":
            continue
        for p in group["params"]:
            state = optimizer.state.get(p)
            if not state or p.grad is None:
                continue
            t = float(state["step"])
            step = state["exp_avg"] / ((state["exp_avg_sq"] / (1 - b2**t)).sqrt_().add_(group["eps"])).mul_((1 - b1**t) / lr)
            if decay:
                step = step.add_((p + step) * (decay / (1 - decay)))
            squares.append(torch.linalg.vector_norm(step).double() ** 2)
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


# %%
def one_step(model, optimizer, seed):
    "One step on random tokens; the update's length measured by copying."
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(seed))
    loss, n = model.loss(Tokens(ids, ids.roll(-1, 1)))
    optimizer.zero_grad()
    (loss / n).backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    return global_norm([p.detach() - b for p, b in zip(model.parameters(), before)])

pairs = [(one_step(model, optimizer, s), update_norm(optimizer)) for s in range(5)]
print(" ".join(f"{a:.5f}/{b:.5f}" for a, b in pairs))
assert all(abs(a - b) < 1e-3 * a for a, b in pairs)
for kind in ("muon", "lamb"):
    other = build_optimizer(model, OptimConfig(kind=kind))
    pairs = [(one_step(model, other, s), update_norm(other)) for s in range(3)]
    assert all(abs(a - b) < 1e-3 * a for a, b in pairs), (kind, pairs)

# %% [markdown]
# ## Does a large gradient mean a large step?
# The first article has a rule on the ratio of parameter norm to gradient norm. Before using it, scale the gradients of a run by a hundred and look at what the optimizer does.

# %%
def lengths(scale, steps=30):
    "Gradient norms and update norms of a run whose loss is multiplied by `scale`."
    m = Decoder(ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=16), seed=1)
    opt = build_optimizer(m, OptimConfig(clip=0.0))
    grads, updates = [], []
    for s in range(steps):
        ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(s))
        loss, n = m.loss(Tokens(ids, ids.roll(-1, 1)))
        opt.zero_grad()
        (scale * loss / n).backward()
        opt.step()
        grads.append(global_norm([p.grad for p in m.parameters()]))
        updates.append(update_norm(opt))
    return grads, updates

style()
fig, axes = plt.subplots(1, 2, figsize=(6.4, 2.5))
for scale, line in ((0.01, ":"), (1, "-"), (100, "--")):
    grads, updates = lengths(scale)
    axes[0].semilogy(grads, line, label=f"loss x {scale:g}")
    axes[1].plot(updates, line)
axes[0].set(xlabel="step", ylabel="gradient norm")
axes[1].set(xlabel="step", ylabel="update norm", ylim=(0, None))
axes[0].legend()
plt.show()

# %% [markdown]
# What to see: four orders of magnitude between the gradients on the left, one line on the right. AdamW divides by the gradient's own size, so its step is the rate times a number near one
# for each weight. A ratio of norms of parameters and *gradients* can't tell whether a step was too small; the ratio of *update* to weight can, and that is what a step line logs.

# %%
small, large = lengths(0.01)[1], lengths(100)[1]
assert max(abs(a / b - 1) for a, b in zip(small, large)) < 0.02

# %% [markdown]
# ## Verdict
# | claim | verdict | measured |
# |---|---|---|
# | A-mon, second rule: a ratio of parameter norm to gradient norm below 0.3 means too weak an update, raise the rate | does not hold with AdamW | gradients scaled by 10,000 change the update's length by less than 2% |
#
# Which of the rules trains better is a question for the laboratory; here they are what their papers say.
