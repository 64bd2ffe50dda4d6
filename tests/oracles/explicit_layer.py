"""A toy Transformer layer whose inputs can be read, so that slow oracles can say what its penalties must be."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracles import explicit as slow

RATE = 0.25  # exact in float32, so that float64 oracles agree to float64 precision


class ToyAttention(nn.Module):
    """Separate projections, grouped keys, cross-attention and masks; remembers its own inputs and weights A."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.q_proj = nn.Linear(width, heads * size)
        self.k_proj = nn.Linear(width, kv_heads * size)
        self.v_proj = nn.Linear(width, kv_heads * size)
        self.out_proj = nn.Linear(heads * size, width)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        keep: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        memory = x if memory is None else memory
        self.seen = (x, memory)
        q, k, v = (
            t.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for t in (self.q_proj(x), self.k_proj(memory), self.v_proj(memory))
        )
        gqa = self.heads != self.kv_heads
        return self.out_proj(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=keep, is_causal=causal, enable_gqa=gqa
            )
            .transpose(1, 2)
            .flatten(2)
        )


class ToyLayer(nn.Module):
    """Pre-norm attention and a feed-forward, in float64, biases far from zero."""

    def __init__(
        self, width: int = 4, heads: int = 2, kv_heads: int = 2, size: int = 2, hidden: int = 3
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = ToyAttention(width, heads, kv_heads, size)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.double()
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        keep: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        x = x + self.attn(self.norm1(x), memory, keep, causal)
        self.ffn_input = self.norm2(x)
        self.hidden = self.fc1(self.ffn_input).relu()
        return x + self.fc2(self.hidden)


@dataclass
class Case:
    """A batch for the toy: lengths of the samples (the rest is padding), cross-attention, a causal mask."""

    lengths: tuple[int, ...] = (3, 3)
    cross: bool = False
    causal: bool = False
    padded: bool = False
    layer: dict[str, int] = field(default_factory=dict)

    def build(self) -> tuple[ToyLayer, dict[str, object]]:
        torch.manual_seed(0)
        layer = ToyLayer(**self.layer).train()
        layer.attn.is_cross_attention = self.cross
        batch, n, width = len(self.lengths), max(self.lengths), layer.norm1.normalized_shape[0]
        inputs: dict[str, object] = {"x": torch.randn(batch, n, width, dtype=torch.float64)}
        if self.cross:
            inputs["memory"] = torch.randn(batch, n, width, dtype=torch.float64)
        if self.padded:
            keep = torch.arange(n) < torch.tensor(self.lengths)[:, None]
            inputs["keep"] = keep[:, None, None, :]
            if self.causal:
                inputs["keep"] = keep[:, None, None, :] & torch.ones(n, n, dtype=torch.bool).tril()
        elif self.causal:
            inputs["causal"] = True
        return layer, inputs


def expected(
    layer: ToyLayer, case: Case, term: str, form: str, reduction: str, **options: object
) -> Tensor:
    """What the penalty of `term` must be after a forward of the toy, from the oracles, sample by sample."""
    sums, tokens = [], []
    for b, n in enumerate(case.lengths):
        m = max(case.lengths) if case.cross and not case.padded else n
        rows = (
            max(case.lengths) if case.cross else n
        )  # a cross-attention does not know which queries are padded
        value, count, divisor = _sample(layer, case, b, rows, m, term, form, options)
        sums.append(2 * value)
        tokens.append((count, divisor))
    half = 1.0 if reduction == "author" else 0.5
    if reduction == "sum":
        return half * sum(sums)
    if reduction == "mean":
        return half * sum(sums) / sum(count for count, _ in tokens)
    return half * sum(s / divisor for s, (_, divisor) in zip(sums, tokens, strict=True))


def _sample(
    layer: ToyLayer, case: Case, b: int, n: int, m: int, term: str, form: str, options: dict
) -> tuple:
    """One sample without its padding: the sum, how many tokens or pairs it has, and its number of tokens."""
    attn = layer.attn
    if term in ("ffn1", "ffn2"):
        x, linear = (layer.ffn_input, layer.fc1) if term == "ffn1" else (layer.hidden, layer.fc2)
        return linear_value(x[b, :n], linear.weight, form), n, n
    x, xk = attn.seen[0][b, :n], attn.seen[1][b, :m]
    if term == "value":
        return linear_value(xk, attn.v_proj.weight, form), m, m
    heads = split_heads(attn)
    if term == "attended_value":
        total = sum(
            attended_value(
                weights(attn, h, x, xk, case.causal), xk, wv, form, options.get("attended", "pre")
            )
            for h, (_, _, wv) in enumerate(heads)
        )
        return total, n, n
    restricted = case.causal and options.get("visible_only", False)
    visible = (
        torch.ones(n, m, dtype=x.dtype).tril() if restricted else torch.ones(n, m, dtype=x.dtype)
    )
    if options.get("heads") == "concat":
        heads = [(attn.q_proj.weight, attn.k_proj.weight, None)]
    shared = bool(options.get("shared_mask", False))
    total = sum(pair_value(term, form, x, xk, wq, wk, visible, shared) for wq, wk, _ in heads)
    return total, visible.sum().item(), n


def linear_value(x: Tensor, w: Tensor, form: str) -> Tensor:
    """One linear map: the paper's trace, or every mask."""
    return (
        slow.trace_linear(x, w, RATE)
        if form == "paper"
        else slow.enumerate_linear(x, w, RATE, form == "inverted")
    )


def attended_value(a: Tensor, x: Tensor, wv: Tensor, form: str, attended: str) -> Tensor:
    """One head's attended value."""
    if form == "paper":
        return slow.trace_attended(a, x, wv, RATE)
    return slow.enumerate_attended(a, x, wv, RATE, form == "inverted", attended)


def pair_value(
    term: str,
    form: str,
    x: Tensor,
    xk: Tensor,
    wq: Tensor,
    wk: Tensor,
    visible: Tensor,
    shared: bool,
) -> Tensor:
    """One head's query, key or query_key."""
    inverted = form == "inverted"
    if form == "paper":
        scores = (x @ wq.T @ (xk @ wk.T).T * visible).square().sum()
        factor = (1 - (1 - RATE) ** 2) ** 2 if term == "query_key" else RATE**2
        if term != "query_key" and visible.all():
            trace = slow.trace_query if term == "query" else slow.trace_key
            return trace(x, wq, wk, RATE, xk)
        return 0.5 * factor * scores
    if term == "query_key":
        return slow.enumerate_pairwise(x, xk, wq, wk, RATE, inverted, visible, shared)
    one = slow.enumerate_query if term == "query" else slow.enumerate_key
    return one(x, xk, wq, wk, RATE, inverted, visible)


def split_heads(attn: ToyAttention) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(Wq, Wk, Wv) of each query head."""
    q = attn.q_proj.weight.unflatten(0, (attn.heads, -1))
    k, v = (w.weight.unflatten(0, (attn.kv_heads, -1)) for w in (attn.k_proj, attn.v_proj))
    repeat = attn.heads // attn.kv_heads
    return [(q[h], k[h // repeat], v[h // repeat]) for h in range(attn.heads)]


def weights(attn: ToyAttention, h: int, x: Tensor, xk: Tensor, causal: bool) -> Tensor:
    """A of one head, with the biases in its scores."""
    g = h // (attn.heads // attn.kv_heads)
    q = attn.q_proj(x).unflatten(-1, (attn.heads, -1))[:, h]
    k = attn.k_proj(xk).unflatten(-1, (attn.kv_heads, -1))[:, g]
    s = q @ k.T / attn.size**0.5
    if causal:
        s = s.masked_fill(~torch.ones(len(x), len(xk), dtype=torch.bool).tril(), -torch.inf)
    return s.softmax(-1)
