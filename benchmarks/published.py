"""The papers' own formulations, as patches of any plain model: what the benchmarks compare ours with.

Each follows the published algorithm step by step, with the n x n matrix of scores (or the d x d matrices of the traces)
that it writes down. Nothing here is meant to be fast, nor to be used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen.studies.bench.subject import Attention, Formulation, Subject, attention_as, unfused


def drop_key(rate: float = 0.1) -> Attention:
    """Algorithm 1 of DropKey (arXiv 2208.02646): a mask of ones and zeros times -1e12 is added to the scores."""
    return unfused(scores=lambda s: s + torch.bernoulli(torch.ones_like(s) * rate) * -1e12)


def drop_attention(rate: float = 0.1) -> Attention:
    """DropAttention (arXiv 1907.11065): weights are dropped after the softmax, each row divided by what is left."""

    def drop(a: Tensor) -> Tensor:
        kept = a * torch.bernoulli(torch.full_like(a, 1 - rate))
        return kept / kept.sum(-1, keepdim=True).clamp(min=1e-12)

    return unfused(weights=drop)


def hard_masking(rate: float = 0.2, top: float = 0.1) -> Attention:
    """Hard Attention Masking (arXiv 2504.12088): each row's k largest scores times Bernoulli(1 - p)."""

    def mask(s: Tensor) -> Tensor:
        index = s.topk(max(1, round(top * s.shape[-1])), dim=-1).indices
        kept = torch.bernoulli(torch.full(index.shape, 1 - rate, device=s.device)).to(s.dtype)
        return s * torch.ones_like(s).scatter(-1, index, kept)

    return unfused(scores=mask)


def blurred_attention(width: int = 5, sigma: float = 1.0) -> Attention:
    """Blurred Attention Smoothing (arXiv 2504.12088): each row of scores convolved with a Gaussian along the keys."""
    t = torch.arange(width, dtype=torch.float32) - width // 2
    gaussian = torch.exp(-t.square() / (2 * sigma**2))
    gaussian = (gaussian / gaussian.sum()).view(1, 1, -1)

    def blur(s: Tensor) -> Tensor:
        rows = s.reshape(-1, 1, s.shape[-1])
        return F.conv1d(rows, gaussian.to(rows), padding=width // 2).view_as(s)

    return unfused(scores=blur)


def trace_penalties(model: nn.Module, terms: str, p: float = 0.2) -> Callable[[], Tensor]:
    """Explicit Dropout's J_q and J_v (arXiv 2604.20505) with X^T X, Wq^T Wk and Wv^T Wv built and multiplied.

    As in the authors' public code one full Wq^T Wk stands for all heads. Returns what collects the penalties of the
    forward just done.
    """
    kept: list[Tensor] = []

    def see(attention: Any, args: tuple[Tensor, ...], output: Any) -> None:
        x = args[0]
        wq, wk, wv = attention.qkv.weight.chunk(3)
        gram = x.mT @ x  # X^T X: (B, d, d)
        if "q" in terms:  # 1/2 Tr(B Wq^T Wk X^T X Wk^T Wq), B = p^2 X^T X
            c = wq.mT @ wk
            kept.append(0.5 * torch.diagonal(p**2 * gram @ c @ gram @ c.mT, dim1=-2, dim2=-1).sum())
        if "v" in terms:  # 1/2 Tr(B Wv^T Wv)
            kept.append(0.5 * torch.diagonal(p**2 * gram @ (wv.mT @ wv), dim1=-2, dim2=-1).sum())

    attentions = fused_attentions(model)
    if not attentions:
        raise ValueError(
            "written for attention with one fused qkv map, which this model does not have"
        )
    for module in attentions.values():
        module.register_forward_hook(see)

    def collect() -> Tensor:
        total = torch.stack(kept).sum()
        kept.clear()
        return total

    return collect


def fused_attentions(model: nn.Module) -> dict[str, Any]:
    """The attention modules with one fused `qkv` map, a `proj` map and a number of heads (ours, timm's)."""
    return {
        name: m
        for name, m in model.named_modules()
        if isinstance(getattr(m, "qkv", None), nn.Linear)
        and isinstance(getattr(m, "proj", None), nn.Linear)
        and heads_of(m)
    }


def heads_of(module: Any) -> int:
    """How many heads an attention module has; 0 where it does not say."""
    return next((int(getattr(module, n)) for n in ("heads", "num_heads") if hasattr(module, n)), 0)


def gray_svd(images: Tensor, patch: tuple[int, int], eps: float = 0.7) -> Tensor:
    """SVD Token Graying (arXiv 2505.01996, section 5): the SVD of each image's matrix of patches."""
    from dampen.functional.grid import patchify, unpatchify

    u, s, vh = torch.linalg.svd(patchify(images, patch), full_matrices=False)
    top = s.amax(-1, keepdim=True)
    return unpatchify(
        u * ((s / top) ** eps * top).unsqueeze(-2) @ vh, patch, (images.shape[-2], images.shape[-1])
    )


# --- steps: subject -> something to time ----------------------------------------------------------


def with_attention(function: Attention, passes: int = 1) -> Callable[[Subject], Callable[[], None]]:
    """A step whose attention is `function`; with two passes their divergence, in both directions, is added."""

    def build(subject: Subject) -> Callable[[], None]:
        model = subject.copy()

        def losses() -> Tensor:
            with attention_as(function):
                outputs = [model(*subject.inputs) for _ in range(passes)]
            loss = torch.stack([subject.loss(o) for o in outputs]).mean()
            return loss if passes == 1 else loss + _symmetric_divergence(*outputs)

        return subject.step(losses)

    return build


def _symmetric_divergence(first: Tensor, second: Tensor) -> Tensor:
    p, q = (o.float().flatten(0, -2).log_softmax(-1) for o in (first, second))
    there = F.kl_div(p, q, reduction="batchmean", log_target=True)
    return 0.5 * (there + F.kl_div(q, p, reduction="batchmean", log_target=True))


def with_traces(terms: str) -> Callable[[Subject], Callable[[], None]]:
    """A step with Explicit Dropout's traces."""

    def build(subject: Subject) -> Callable[[], None]:
        model = subject.copy()
        penalty = trace_penalties(model, terms)
        return subject.step(lambda: subject.loss(model(*subject.inputs)) + 1e-3 * penalty())

    return build


def with_svd(subject: Subject) -> Callable[[], None]:
    """A step whose images are grayed by one SVD each."""
    from dampen.methods.token_graying import find_patch_size

    model = subject.copy()
    patch = find_patch_size(model)
    return subject.step(lambda: subject.loss(model(gray_svd(subject.inputs[0], patch))))


PAPERS = {
    "DropKey, algorithm 1": Formulation("drop_key", with_attention(drop_key()), drop_key()),
    "DropAttention, after the softmax": Formulation(
        "drop_attention", with_attention(drop_attention()), drop_attention()
    ),
    "Hard Attention Masking, top-k of the scores": Formulation(
        "hard_masking", with_attention(hard_masking()), hard_masking()
    ),
    "Blurred Attention Smoothing, convolved scores": Formulation(
        "blurred_attention", with_attention(blurred_attention()), blurred_attention()
    ),
    "Explicit Dropout, trace of values": Formulation("explicit_dropout", with_traces("v")),
    "Explicit Dropout, traces of queries and values": Formulation(
        "explicit_dropout all terms", with_traces("qv")
    ),
    "R-Drop, two whole passes": Formulation("r_drop", with_attention(drop_key(), passes=2)),
    "Token Graying, an SVD per image": Formulation("token_graying svd", with_svd),
}
"""By name, what the papers published and the variant of ours that does the same."""
