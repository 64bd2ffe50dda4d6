"""Small models whose layers are built in ways that a search by name or class takes for something else."""

import torch
from torch import nn
from torch.nn import functional as F

D, H = 16, 2


class Attend(nn.Module):
    """x-transformers: attention without the layers that make q, k and v."""

    def __init__(self, flash):
        super().__init__()
        self.flash, self.attn_dropout = flash, nn.Dropout(0.0)

    def forward(self, q, k, v):
        if self.flash:
            return F.scaled_dot_product_attention(q, k, v)
        return self.attn_dropout((q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)) @ v


class Attention(nn.Module):
    def __init__(self, flash=True):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.attend = Attend(flash)
        self.to_out = nn.Linear(D, D, bias=False)

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (H, -1)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v)
        )
        return self.to_out(self.attend(q, k, v).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.ff = nn.Sequential(
            nn.Sequential(nn.Linear(D, 24), nn.GELU()), nn.Dropout(0.0), nn.Linear(24, D)
        )

    def forward(self, x):
        return self.ff(x)


class Alternating(nn.Module):
    """x-transformers: [attention, feed-forward, attention, feed-forward, ...] in one list, each with its norm."""

    def __init__(self, depth=2, flash=True):
        super().__init__()
        kinds = [Attention(flash) if i % 2 == 0 else FeedForward() for i in range(2 * depth)]
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(D), kind]) for kind in kinds)

    def forward(self, x):
        for norm, f in self.layers:
            x = x + f(norm(x))
        return x


class Paired(nn.Module):
    """vit-pytorch: [[attention, feed-forward], ...]."""

    def __init__(self, depth=2, flash=False):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([Attention(flash), FeedForward()]) for _ in range(depth)
        )

    def forward(self, x):
        for attention, feed in self.layers:
            x = attention(x) + x
            x = feed(x) + x
        return x


class MultiheadAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (H, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v)
        )
        return self.W_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Dictionary(nn.Module):
    """FT-Transformer: each layer is an nn.ModuleDict, and the model adds the residuals."""

    def __init__(self, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": MultiheadAttention(),
                    "linear0": nn.Linear(D, 24),
                    "linear1": nn.Linear(24, D),
                    "norm0": nn.LayerNorm(D),
                    "norm1": nn.LayerNorm(D),
                }
            )
            for _ in range(depth)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["attention"](layer["norm0"](x))
            x = x + layer["linear1"](F.relu(layer["linear0"](layer["norm1"](x))))
        return x


class Mixer(nn.Module):
    """What stands in the place of attention: a recurrence, with projections of its own."""

    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, mask=None):
        return self.out_proj(self.in_proj(x).cumsum(1) / 8)


class Softmax(MultiheadAttention):
    def forward(self, x, mask=None):
        q, k, v = (
            f(x).unflatten(-1, (H, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v)
        )
        mask = None if mask is None else mask[:, None, None].bool()
        return self.W_out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(-2))


class HybridLayer(nn.Module):
    def __init__(self, softmax):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        if softmax:
            self.self_attn = Softmax()
        else:
            self.mamba = Mixer()
        self.mlp = nn.Sequential(nn.Linear(D, 24), nn.GELU(), nn.Linear(24, D))

    def forward(self, x, mask=None):
        mixer = self.self_attn if hasattr(self, "self_attn") else self.mamba
        x = x + mixer(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Hybrid(nn.Module):
    """Two softmax layers of five (Jamba, Qwen3-Next)."""

    def __init__(self, kinds=(0, 0, 1, 0, 1)):
        super().__init__()
        self.layers = nn.ModuleList(HybridLayer(kind) for kind in kinds)

    def forward(self, x, attention_mask=None):
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


class HybridWithoutMask(Hybrid):
    """The same, with a mask under another name."""

    def forward(self, x, keep=None):
        for layer in self.layers:
            x = layer(x, keep)
        return x


class Experts(nn.Module):
    """A mixture of experts in a list, each token to one."""

    def __init__(self, count, hidden=24):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, hidden), nn.GELU(), nn.Linear(hidden, D))
            for _ in range(count)
        )

    def forward(self, x):
        flat = x.reshape(-1, D)
        out, chosen = torch.zeros_like(flat), torch.arange(len(flat)) % len(self.experts)
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(flat[chosen == number])
        return out.view_as(x)

    def weights(self, number):
        return self.experts[number][0].weight, self.experts[number][2].weight


class ParameterExperts(nn.Module):
    """The same with one parameter for all experts (transformers), as (experts, out, in), or transposed (gpt-oss)."""

    def __init__(self, count, hidden=24, transposed=False, sorted_first=False):
        super().__init__()
        self.transposed, self.sorted_first = transposed, sorted_first
        shapes = ((count, hidden, D), (count, D, hidden))
        up, down = (torch.randn(s) / 4 for s in shapes)
        self.gate_up_proj = nn.Parameter(up.transpose(1, 2).contiguous() if transposed else up)
        self.down_proj = nn.Parameter(down.transpose(1, 2).contiguous() if transposed else down)

    def forward(self, flat, chosen):
        out = torch.zeros_like(flat)
        for number in range(len(self.gate_up_proj)):
            (index,) = torch.where(chosen == number)
            up, down = self.gate_up_proj[number], self.down_proj[number]
            if self.transposed:
                hidden = F.gelu(flat[index] @ up) @ down
            else:
                hidden = F.linear(F.gelu(F.linear(flat[index], up)), down)
            out.index_add_(0, index, hidden)
        return out


class ParameterMixture(nn.Module):
    def __init__(self, count, transposed=False):
        super().__init__()
        self.gate, self.experts = (
            nn.Linear(D, count),
            ParameterExperts(count, transposed=transposed),
        )

    def forward(self, x):
        flat = x.reshape(-1, D)
        return self.experts(flat, torch.arange(len(flat)) % self.gate.out_features).view_as(x)

    def weights(self, number):
        up, down = self.experts.gate_up_proj[number], self.experts.down_proj[number]
        return (up.t(), down.t()) if self.experts.transposed else (up, down)


class AllAtOnce(nn.Module):
    """Llama 4: every expert gets all tokens, those that are not its own as zeros, in one product."""

    def __init__(self, count, hidden=24):
        super().__init__()
        self.count = count
        self.experts = BatchedExperts(count, hidden)

    def forward(self, x):
        flat = x.reshape(-1, D)
        own = F.one_hot(torch.arange(len(flat)) % self.count, self.count).to(x.dtype)
        given = flat.repeat(self.count, 1) * own.t().reshape(-1, 1)
        return self.experts(given).reshape(self.count, -1, D).sum(0).view_as(x)

    def weights(self, number):
        return self.experts.gate_up_proj[number].t(), self.experts.down_proj[number].t()


class BatchedExperts(nn.Module):
    def __init__(self, count, hidden):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, D, hidden) / 4)
        self.down_proj = nn.Parameter(torch.randn(count, hidden, D) / 4)

    def forward(self, x):
        x = x.view(len(self.gate_up_proj), -1, D)
        return torch.bmm(F.gelu(torch.bmm(x, self.gate_up_proj)), self.down_proj).view(-1, D)


class Sparse(nn.Module):
    """A model with a mixture of experts in each layer."""

    def __init__(self, make, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(SparseLayer(make()) for _ in range(depth))

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = layer(x, mask)
        return x


class SparseLayer(nn.Module):
    def __init__(self, mixture):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.self_attn, self.mlp = Softmax(), mixture

    def forward(self, x, mask=None):
        x = x + self.self_attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))
