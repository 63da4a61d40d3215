"""Spellings of eight patterns, as people write them, look-alikes that are none, and mutants of the patterns.

Each entry of `VARIANTS[pattern]` is a callable that returns (module, inputs), as in `LOOKALIKES` and `MUTANTS`.
"""

import math
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn

VARIANTS, LOOKALIKES, MUTANTS = defaultdict(dict), {}, {}
B, T, D, H, V = 2, 16, 64, 4, 1024
EPS = 1e-6


def variant(pattern):
    def add(function):
        VARIANTS[pattern][function.__name__] = function
        return function

    return add


def lookalike(function):
    LOOKALIKES[function.__name__] = function
    return function


def mutant(function):
    MUTANTS[function.__name__] = function
    return function


def x3():
    return torch.randn(B, T, D)


class Fn(nn.Module):
    """A function of x, and parameters by name."""

    def __init__(self, function, **shapes):
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.2 + (len(shape) == 1)))

    def forward(self, *args):
        return self.function(self, *args)


# ---- rms_norm -------------------------------------------------------------------------------------------------
@variant("rms_norm")
def rms_plain():
    return Fn(lambda s, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * s.w, w=(D,)), (x3(),)


@variant("rms_norm")
def rms_huggingface():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(D) + 0.5)

        def forward(self, hidden_states):
            dtype = hidden_states.dtype
            hidden_states = hidden_states.to(torch.float32)
            variance = hidden_states.pow(2).mean(-1, keepdim=True)
            hidden_states = hidden_states * torch.rsqrt(variance + EPS)
            return self.weight * hidden_states.to(dtype)

    return Norm(), (x3(),)


@variant("rms_norm")
def rms_divide():
    return Fn(lambda s, x: x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + EPS) * s.w, w=(D,)), (x3(),)


@variant("rms_norm")
def rms_norm_eps_outside():
    return Fn(lambda s, x: s.w * (x / (x.norm(2, dim=-1, keepdim=True) * D**-0.5 + EPS)), w=(D,)), (x3(),)


@variant("rms_norm")
def rms_normalize():
    return Fn(lambda s, x: F.normalize(x, dim=-1) * math.sqrt(D) * s.w, w=(D,)), (x3(),)


@variant("rms_norm")
def rms_sum_power():
    return Fn(lambda s, x: x * ((x * x).sum(-1, keepdim=True) / D + EPS) ** -0.5 * s.w, w=(D,)), (x3(),)


@variant("rms_norm")
def rms_helper():
    def scale(x):
        return torch.square(x).mean(-1, keepdim=True).add(EPS).rsqrt()

    return Fn(lambda s, x: s.w * scale(x) * x, w=(D,)), (x3(),)


@variant("rms_norm")
def rms_einsum():
    def f(s, x):
        power = torch.einsum("...d,...d->...", x, x).unsqueeze(-1) / D
        return x / (power + EPS).sqrt() * s.w

    return Fn(f, w=(D,)), (x3(),)


@variant("rms_norm")
def rms_gemma():
    def f(s, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
        return (y * (1.0 + s.w.float())).type_as(x)

    return Fn(f, w=(D,)), (torch.randn(B, T, D).bfloat16(),)


@variant("rms_norm")
def rms_vector_norm():
    def f(s, x):
        rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True) / math.sqrt(x.shape[-1])
        return x * torch.reciprocal(rms.clamp(min=EPS)) * s.w

    return Fn(f, w=(D,)), (x3(),)


@variant("rms_norm")
def rms_no_keepdim():
    return Fn(lambda s, x: x * (x.pow(2).mean(-1) + EPS).pow(-0.5)[..., None] * s.w, w=(D,)), (x3(),)


@variant("rms_norm")
def rms_heads():
    def f(s, x):
        q = x.view(B, T, H, D // H)
        return (q * torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS) * s.w).flatten(-2)

    return Fn(f, w=(D // H,)), (x3(),)


@variant("rms_norm")
def rms_eps_of_a_thousandth():
    return Fn(lambda s, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * s.w, w=(D,)), (x3(),)


# Written after the finders.
@variant("rms_norm")
def rms_offset():
    return Fn(lambda s, x: (1 + s.w) * (x / x.square().mean(-1, True).add(EPS).sqrt()), w=(D,)), (x3(),)


@variant("rms_norm")
def rms_flat():
    def f(s, x):
        rows = x.reshape(-1, D)
        return (rows / rows.pow(2).sum(1).div(D).add(EPS).sqrt()[:, None]).view_as(x).mul(s.w)

    return Fn(f, w=(D,)), (x3(),)


@variant("rms_norm")
def rms_in_place():
    def f(s, x):
        y = x.clone()
        return y.mul_(torch.rsqrt(torch.mean(y**2, dim=2, keepdim=True) + EPS)).mul_(s.w)

    return Fn(f, w=(D,)), (x3(),)


# ---- residual_norm --------------------------------------------------------------------------------------------
class Residual(nn.Module):
    def __init__(self, function, norm=None):
        super().__init__()
        self.norm = norm or nn.LayerNorm(D)
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.drop = nn.Dropout(0.1)
        self.w = nn.Parameter(torch.rand(D) + 0.5)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def hand_rms(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def hand_layer_norm(x):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + EPS)


def _pre(s, x):
    x = x + s.a(x)
    return x + s.b(s.norm(x))


RESIDUALS = {
    "res_pre_norm": _pre,
    "res_post_norm_dropout": lambda s, x: s.norm(s.drop(s.a(x)) + x),
    "res_functional": lambda s, x: F.layer_norm(torch.add(x, s.a(x)), (D,), s.w),
    "res_hand_rms": lambda s, x: hand_rms(x + s.a(x), s.w),
    "res_hand_layer_norm": lambda s, x: hand_layer_norm(s.a(x) + x),
    "res_in_place": lambda s, x: s.norm(s.a(x).add_(x)),
    "res_three": lambda s, x: s.norm(x + s.a(x) + s.b(x)),
    "res_scaled": lambda s, x: s.norm(torch.add(x, s.a(x), alpha=0.5)),
    "res_sum": lambda s, x: s.norm(sum([x, s.a(x)])),
    "res_float32_stream": lambda s, x: s.norm((x.float() + s.a(x).float()).to(x.dtype)),
}
for _name, _f in RESIDUALS.items():
    VARIANTS["residual_norm"][_name] = lambda f=_f: (Residual(f).eval(), (x3(),))


# ---- shared_linear --------------------------------------------------------------------------------------------
class QKV(nn.Module):
    def __init__(self, function, kv=D):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, kv, bias=False), nn.Linear(D, kv)
        self.wq, self.wk = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D, D))
        self.wh = nn.Parameter(torch.randn(D, H, D // H))
        self.list = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])
        self.seq = nn.ModuleDict({n: nn.Sequential(nn.Linear(D, D), nn.ReLU()) for n in "ab"})
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def project(x, w, b=None):
    return F.linear(x, w, b)


SHARED = {
    "shared_qkv": lambda s, x: (s.q(x), s.k(x), s.v(x)),
    "shared_gqa": lambda s, x: (s.q(x), s.k(x)[..., :16], s.v(x)[..., :16]),
    "shared_list": lambda s, x: [layer(x) for layer in s.list],
    "shared_functional": lambda s, x: (project(x, s.wq), project(x, s.wk, s.q.bias)),
    "shared_matmul": lambda s, x: (x @ s.wq, torch.matmul(x, s.wk.t())),
    "shared_einsum": lambda s, x: (torch.einsum("btd,dh->bth", x, s.wq), torch.einsum("btd,hd->bth", x, s.wk)),
    "shared_einsum_heads": lambda s, x: (torch.einsum("btd,dhe->bhte", x, s.wh), s.k(x)),
    "shared_flat": lambda s, x: (s.q(x.view(-1, D)), torch.addmm(s.v.bias, x.reshape(B * T, D), s.wk)),
    "shared_sequential": lambda s, x: s.seq["a"](x) + s.seq["b"](x),
    "shared_after_cast": lambda s, x: (s.q(x.float()), s.v(x.to(torch.float32))),
    "shared_heads_view": lambda s, x: [p(x).view(B, T, H, -1).transpose(1, 2) for p in (s.q, s.k, s.v)],
}
for _name, _f in SHARED.items():
    VARIANTS["shared_linear"][_name] = lambda f=_f: (QKV(f), (x3(),))


# ---- attention ------------------------------------------------------------------------------------------------
def heads():
    return tuple(torch.randn(B, H, T, D // H) for _ in range(3))


def causal():
    return torch.ones(T, T, dtype=torch.bool).triu(1)


def stable_softmax(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def per_head(s, q, k, v):
    return torch.stack([F.softmax(q[:, i] @ k[:, i].mT / 4.0, -1) @ v[:, i] for i in range(H)], 1)


def bloom(s, q, k, v):
    q, k, v = (t.reshape(B * H, T, -1) for t in (q, k, v))
    scores = torch.baddbmm(torch.zeros(B * H, T, T), q, k.transpose(1, 2), beta=1.0, alpha=0.25)
    return torch.bmm(F.softmax(scores, dim=-1), v).view(B, H, T, -1)


def grouped(s, q, k, v):
    k, v = (t[:, :2].repeat_interleave(2, dim=1) for t in (k, v))
    return torch.softmax(q @ k.transpose(2, 3) * 0.25, dim=-1) @ v


def upcast(s, q, k, v):
    w = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(16)
    w = w.masked_fill(causal(), torch.finfo(w.dtype).min)
    w = F.softmax(w, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(w, 0.0, s.training), v)


ATTENTION = {
    "att_plain": lambda s, q, k, v: torch.softmax(q @ k.transpose(-1, -2) / 4.0, -1) @ v,
    "att_scaled_q": lambda s, q, k, v: ((q * 0.25) @ k.mT).softmax(-1) @ v,
    "att_masked_fill": lambda s, q, k, v: (q @ k.mT * 0.25).masked_fill(causal(), -1e9).softmax(-1) @ v,
    "att_additive": lambda s, q, k, v: F.softmax(q @ k.mT + torch.zeros(T, T).masked_fill(causal(), -1e9), -1) @ v,
    "att_dropout": lambda s, q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.1, True) @ v,
    "att_einsum": lambda s, q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).mul(0.25).softmax(-1), v
    ),
    "att_bloom": bloom,
    "att_by_hand": lambda s, q, k, v: stable_softmax(q @ k.mT * 0.25) @ v,
    "att_exp_normalised_late": lambda s, q, k, v: ((e := (q @ k.mT * 0.25).exp()) @ v) / e.sum(-1, keepdim=True),
    "att_upcast": upcast,
    "att_grouped": grouped,
    "att_per_head": per_head,
    "att_transposed": lambda s, q, k, v: (k @ q.mT * 0.25).softmax(-2).mT @ v,
}
for _name, _f in ATTENTION.items():
    VARIANTS["attention"][_name] = lambda f=_f: (Fn(f).eval(), heads())


# Written after the finders.
def bias_of_distance(s, q, k, v):
    distance = (torch.arange(T) - torch.arange(T)[:, None]).abs()
    return (q @ k.mT * 0.25 - 0.3 * distance).softmax(-1) @ v


def log_space(s, q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q * 0.25, k)
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v


def window(s, q, k, v):
    keep = (torch.arange(T) - torch.arange(T)[:, None]).abs() < 4
    return torch.where(keep, q @ k.mT * 0.25, torch.tensor(-1e9)).softmax(-1) @ v


def values_on_the_left(s, q, k, v):
    k, v = k[:, :, :12], v[:, :, :12]
    return (v.mT @ (q @ k.mT * 0.25).softmax(-1).mT).mT


def differential(s, q, k, v):
    w = (q @ k.mT * 0.25).softmax(-1).unflatten(1, (2, -1))
    return (w[:, 0] - 0.3 * w[:, 1]) @ v[:, : H // 2]


def packed_heads(s, q, k, v):
    q, k, v = (t.transpose(1, 2).reshape(B, T, D) for t in (q, k, v))
    q, k, v = (t.view(B, T, H, -1).permute(0, 2, 1, 3).contiguous().view(B * H, T, -1) for t in (q, k, v))
    return torch.bmm(F.softmax(torch.bmm(q, k.permute(0, 2, 1)) / 4, -1), v)


for _name, _f in {
    "att_bias": bias_of_distance,
    "att_log": log_space,
    "att_window": window,
    "att_bmm": packed_heads,
    "att_left": values_on_the_left,
    "att_differential": differential,
}.items():
    VARIANTS["attention"][_name] = lambda f=_f: (Fn(f).eval(), heads())


# ---- gated_mlp ------------------------------------------------------------------------------------------------
class Gated(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 96, bias=False), nn.Linear(D, 96, bias=False), nn.Linear(96, D)
        self.both, self.act = nn.Linear(D, 192), nn.SiLU()
        self.renamed = nn.ModuleDict({"first": nn.Sequential(nn.Linear(D, 96), nn.GELU()), "third": nn.Linear(D, 96)})
        self.w1, self.w2 = nn.Parameter(torch.randn(D, 96) * 0.1), nn.Parameter(torch.randn(D, 96) * 0.1)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def swish(x, beta=1.0):
    return x * torch.sigmoid(beta * x)


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def chunked(s, x):
    a, b = s.both(x).chunk(2, dim=-1)
    return s.down(F.silu(b) * a)


def split(s, x):
    h = s.both(x)
    return s.down(h[..., :96] * F.gelu(h[..., 96:], approximate="tanh"))


GATED = {
    "gated_llama": lambda s, x: s.down(s.act(s.gate(x)) * s.up(x)),
    "gated_functional": lambda s, x: F.linear(F.silu(x @ s.w1) * (x @ s.w2), s.down.weight),
    "gated_by_hand": lambda s, x: s.down(swish(s.gate(x)) * s.up(x)),
    "gated_chunk": chunked,
    "gated_slice": split,
    "gated_renamed": lambda s, x: s.down(s.renamed["third"](x) * s.renamed["first"](x)),
    "gated_glu": lambda s, x: s.down(F.glu(s.both(x))),
    "gated_tanh_by_hand": lambda s, x: s.down(tanh_gelu(s.gate(x)) * s.up(x)),
    "gated_reglu": lambda s, x: s.down(s.gate(x).clamp(min=0) * s.up(x)),
    "gated_einsum": lambda s, x: s.down(
        torch.einsum("btd,df->btf", x, s.w1).sigmoid() * torch.einsum("btd,df->btf", x, s.w1) * (x @ s.w2)
    ),
    "gated_in_place": lambda s, x: s.down(F.silu(s.gate(x), inplace=False).mul_(s.up(x))),
}
for _name, _f in GATED.items():
    VARIANTS["gated_mlp"][_name] = lambda f=_f: (Gated(f), (x3(),))


# ---- bias_act -------------------------------------------------------------------------------------------------
class Act(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.up, self.bare = nn.Linear(D, 96), nn.Linear(D, 96, bias=False)
        self.b, self.seq = nn.Parameter(torch.randn(96)), nn.Sequential(nn.Linear(D, 96), nn.Mish())
        self.conv = nn.Conv1d(D, 96, 1)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


BIAS_ACT = {
    "act_module": lambda s, x: F.gelu(s.up(x)),
    "act_sequential": lambda s, x: s.seq(x),
    "act_matmul": lambda s, x: torch.relu(x @ s.bare.weight.t() + s.b),
    "act_separate_bias": lambda s, x: F.silu(s.bare(x).add(s.b)),
    "act_quick_gelu": lambda s, x: swish(s.up(x), 1.702),
    "act_tanh_by_hand": lambda s, x: tanh_gelu(s.up(x)),
    "act_erf_by_hand": lambda s, x: (h := s.up(x)) * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0))),
    "act_clamp": lambda s, x: s.up(x).clamp(min=0),
    "act_squared_relu": lambda s, x: F.relu(s.up(x)).square(),
    "act_where": lambda s, x: torch.where((h := s.up(x)) > 0, h, 0.01 * h),
    "act_addmm": lambda s, x: torch.addmm(s.b, x.view(-1, D), s.bare.weight.t()).tanh(),
}
# Written after the finders.
BIAS_ACT["act_of_a_part"] = lambda s, x: F.gelu(s.bare(x).split([32, 64], -1)[1] + s.b[32:])
for _name, _f in BIAS_ACT.items():
    VARIANTS["bias_act"][_name] = lambda f=_f: (Act(f), (x3(),))


# ---- rotary ---------------------------------------------------------------------------------------------------
def angles(dim, table="half"):
    a = torch.outer(torch.arange(T).float(), 10000 ** (-torch.arange(0, dim, 2).float() / dim))
    return torch.cat((a, a), -1) if table == "half" else a


def rotate_half(x):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def interleaved(q):
    a, x1, x2 = angles(16, ""), q[..., ::2], q[..., 1::2]
    return torch.stack((x1 * a.cos() - x2 * a.sin(), x1 * a.sin() + x2 * a.cos()), -1).flatten(-2)


def complex_rotary(q):
    z = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(z * torch.polar(torch.ones(T, 8), angles(16, ""))).flatten(3).type_as(q)


def gptj(q):
    a = angles(16, "").repeat_interleave(2, dim=-1)
    turned = torch.stack((-q[..., 1::2], q[..., ::2]), dim=-1).reshape(q.shape)
    return q * a.cos() + turned * a.sin()


def halves(q):
    a, (x1, x2) = angles(16, ""), q.chunk(2, dim=-1)
    return torch.cat((x1 * a.cos() - x2 * a.sin(), x2 * a.cos() + x1 * a.sin()), dim=-1)


def partial(q):
    a = angles(8)
    rotated, rest = q[..., :8], q[..., 8:]
    return torch.cat((rotated * a.cos() + rotate_half(rotated) * a.sin(), rest), -1)


def rolled(q):
    a, sign = angles(16), torch.cat((-torch.ones(8), torch.ones(8)))
    return q * a.cos() + torch.roll(q, 8, -1) * sign * a.sin()


def pairs(q):
    a = angles(16, "")
    turn = torch.stack((torch.stack((a.cos(), -a.sin()), -1), torch.stack((a.sin(), a.cos()), -1)), -2)
    return torch.einsum("tpij,bhtpj->bhtpi", turn, q.unflatten(-1, (-1, 2))).flatten(-2)


def upcast_rotary(q):
    a = angles(16)
    return (q.float() * a.cos() + rotate_half(q.float()) * a.sin()).to(q.dtype)


def written(q):
    a, out = angles(16, ""), torch.empty_like(q)
    out[..., :8] = q[..., :8] * a.cos() - q[..., 8:] * a.sin()
    out[..., 8:] = q[..., 8:] * a.cos() + q[..., :8] * a.sin()
    return out


ROTARY = {
    "rot_huggingface": lambda q: q * angles(16).cos() + rotate_half(q) * angles(16).sin(),
    "rot_interleaved": interleaved,
    "rot_complex": complex_rotary,
    "rot_gptj": gptj,
    "rot_halves": halves,
    "rot_partial": partial,
    "rot_roll": rolled,
    "rot_matrix": pairs,
    "rot_upcast": upcast_rotary,
    "rot_written": written,
}
for _name, _f in ROTARY.items():
    VARIANTS["rotary"][_name] = lambda f=_f: (Fn(lambda s, q, f=f: f(q)), (torch.randn(B, H, T, 16),))


# ---- loss -----------------------------------------------------------------------------------------------------
class Head(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.head, self.function = nn.Linear(D, V, bias=False), function

    def forward(self, x, labels):
        return self.function(self, x, labels)


def shifted(s, x, y):
    logits = s.head(x).float()
    return F.cross_entropy(logits[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1))


def capped(s, x, y):
    return F.cross_entropy((30 * torch.tanh(s.head(x) / 30)).flatten(0, 1), y.flatten(), ignore_index=0)


LOSS = {
    "loss_flat": lambda s, x, y: F.cross_entropy(s.head(x).view(-1, V), y.view(-1)),
    "loss_module": lambda s, x, y: nn.CrossEntropyLoss()(s.head(x).transpose(1, 2), y),
    "loss_nll": lambda s, x, y: F.nll_loss(F.log_softmax(s.head(x), -1).flatten(0, 1), y.flatten()),
    "loss_gather": lambda s, x, y: -s.head(x).log_softmax(-1).gather(-1, y[..., None]).mean(),
    "loss_logsumexp": lambda s, x, y: ((z := s.head(x)).logsumexp(-1) - z.gather(-1, y[..., None])[..., 0]).mean(),
    "loss_shifted_float": shifted,
    "loss_softcap": capped,
    "loss_smoothing": lambda s, x, y: F.cross_entropy(s.head(x).view(-1, V), y.view(-1), label_smoothing=0.1),
    "loss_one_hot": lambda s, x, y: -(F.one_hot(y, V) * torch.log_softmax(x @ s.head.weight.T, -1)).sum(-1).mean(),
    "loss_log_of_softmax": lambda s, x, y: F.nll_loss(torch.log(F.softmax(s.head(x), -1)).view(-1, V), y.view(-1)),
}
for _name, _f in LOSS.items():
    VARIANTS["loss"][_name] = lambda f=_f: (Head(f), (x3(), torch.randint(1, V, (B, T))))


# ---- what looks alike and is none -----------------------------------------------------------------------------
@lookalike
def l2_normalised():  # a cosine, no RMSNorm
    return Fn(lambda s, x: F.normalize(x, dim=-1) * s.w, w=(D,)), (x3(),)


@lookalike
def standardised_over_batch():
    return Fn(lambda s, x: (x - x.mean(0)) / (x.std(0) + EPS)), (x3(),)


@lookalike
def scaled_by_max():
    return Fn(lambda s, x: x / x.abs().amax(-1, keepdim=True)), (x3(),)


@lookalike
def squeeze_excite():  # one linear alone, and its input
    return Fn(lambda s, x: x * torch.sigmoid(x @ s.w), w=(D, D)), (x3(),)


@lookalike
def linears_in_a_row():
    return nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)), (x3(),)


@lookalike
def stock_attention():
    return Fn(lambda s, q, k, v: F.scaled_dot_product_attention(q, k, v)).eval(), heads()


@lookalike
def linear_attention():
    return Fn(lambda s, q, k, v: (F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ v)).eval(), heads()


@lookalike
def pooled_by_softmax():  # weights over positions, no product of queries and keys
    return Fn(lambda s, x: (torch.softmax(x @ s.w, 1) * x).sum(1), w=(D, 1)), (x3(),)


@lookalike
def learned_scale_and_shift():
    return Fn(lambda s, x: x * s.a + s.b, a=(D,), b=(D,)), (x3(),)


@lookalike
def swapped_halves():  # keeps the length of each pair, and rotates nothing
    return Fn(lambda s, x: torch.cat((x[..., D // 2 :], x[..., : D // 2]), -1)), (x3(),)


@lookalike
def classifier():  # few classes: nothing to gain
    return Fn(lambda s, x, y: F.cross_entropy(x.mean(1) @ s.w, y), w=(D, 10)), (x3(), torch.randint(0, 10, (B,)))


@lookalike
def residual_alone():
    return Residual(lambda s, x: x + s.a(x)).eval(), (x3(),)


# Norms with one thing wrong.
@mutant
def offset_of_two():
    return Fn(lambda s, x: x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (2 + s.w)), w=(D,)), (x3(),)


@mutant
def norm_over_time():
    return Fn(lambda s, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS) * s.w, w=(D,)), (x3(),)


@mutant
def norm_by_the_mean_of_sizes():
    return Fn(lambda s, x: x / x.abs().mean(-1, keepdim=True) * s.w, w=(D,)), (x3(),)


@mutant
def norm_of_half_a_row():
    return Fn(lambda s, x: x * torch.rsqrt(x[..., : D // 2].pow(2).mean(-1, keepdim=True) + EPS) * s.w, w=(D,)), (x3(),)


@mutant
def rotation_that_grows():
    return Fn(lambda s, q: q * (1.05 * angles(16).cos()) + rotate_half(q) * (1.05 * angles(16).sin())), (
        torch.randn(B, H, T, 16),
    )


@mutant
def eps_of_a_tenth():
    return Fn(lambda s, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1) * s.w, w=(D,)), (x3(),)


@mutant
def eps_of_a_tenth_in_16_bits():  # where rounding hides it in rows of an ordinary size
    def f(s, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)

    return Fn(f), (torch.randn(B, T, D).bfloat16(),)


@mutant
def layer_norm_with_a_large_eps():
    def f(s, x):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.var(-1, keepdim=True, unbiased=False) + 0.5).sqrt()

    return Fn(f), (x3(),)


@mutant
def attention_with_a_cap():
    return Fn(lambda s, q, k, v: (20 * torch.tanh(q @ k.mT * 0.25 / 20)).softmax(-1) @ v).eval(), heads()


@mutant
def attention_with_a_cap_that_small_keys_do_not_reach():
    def f(s, q, k, v):
        return (50 * torch.tanh(q @ (k * 1e-3).mT / 50)).softmax(-1) @ v

    return Fn(f).eval(), heads()


@mutant
def attention_with_squared_weights():
    return Fn(lambda s, q, k, v: (q @ k.mT * 0.25).softmax(-1).square() @ v).eval(), heads()


@mutant
def attention_over_queries():
    return Fn(lambda s, q, k, v: (q @ k.mT * 0.25).softmax(-2) @ v).eval(), heads()


@mutant
def rotation_that_shears():
    return Fn(lambda s, q: q * angles(16).cos() + rotate_half(q).abs() * angles(16).sin()), (torch.randn(B, H, T, 16),)


@mutant
def gate_of_another_slope():
    return Gated(lambda s, x: s.down(swish(s.gate(x), 1.2) * s.up(x))), (x3(),)
