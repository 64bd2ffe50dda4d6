"""A regularizer of one's own, in one file: it is checked, and compared like dampen's own.

python examples/my_method.py          # the contracts: eval untouched, gradients, compile, masks, ... on four models
dampen compare examples/plain_loop.py:train --methods "examples/my_method.py:QueryNoise(scale=0.2), drop_key(rate=0.3)"
"""

import math

import torch

import dampen


class QueryNoise(dampen.Regularizer):
    """Gaussian noise on the queries, relative to their size: attention that small changes of a query do not move."""

    def __init__(self, scale: float = 0.1) -> None:
        super().__init__()
        self.scheduled(
            "scale", scale, high=math.inf
        )  # a number, a schedule over depth and training, or one per layer

    def qkv(self, q, k, v, call):  # (B, H, N, D) each; the fused kernel stays
        size = q.detach().square().mean(-1, keepdim=True).sqrt()
        return q + self.scale * size * torch.randn_like(q), k, v


if __name__ == "__main__":
    from dampen.checking import check_regularizer

    outcomes = check_regularizer(
        QueryNoise, progress=True
    )  # raises with every contract that is broken
    kept = sum(outcome.state == "kept" for outcome in outcomes)
    print(f"{kept} contracts kept, {len(outcomes) - kept} not applicable")
