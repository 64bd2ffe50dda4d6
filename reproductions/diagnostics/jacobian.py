"""How well conditioned the Jacobian of each residual branch is, without ever forming it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dampen.diagnostics.probing import Probe, call, in_float64, map_tensors, probed, unwrapped

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class JacobianCondition:
    """Extreme singular values of a Jacobian, as seen from a random Krylov space of `steps`
    dimensions.

    `largest` is a lower bound and `smallest` an upper bound of the true ones, so `kappa` is a lower
    bound; with as many steps as the Jacobian has columns all three are exact. `largest` is good
    after a few steps, `smallest` comes slowly.
    """

    largest: float
    smallest: float
    kappa: float
    frobenius: float  # estimate of the root of the sum of all squared singular values
    steps: int
    size: int  # columns of the Jacobian

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate_condition(
    multiply: Map, transposed: Map, size: int, steps: int = 32, seed: int = 0
) -> JacobianCondition:
    """Condition number of a matrix known by its products alone: Golub-Kahan-Lanczos
    bidiagonalization from a random start.

    With orthonormal V_k and U_k, A V_k = U_k B_k for a k x k bidiagonal B_k, so its singular values
    are those of A on the space of V_k. All vectors are kept orthogonal to all earlier ones. The
    Frobenius norm is Hutchinson's estimate from random signs.

    Args:
        multiply: v -> A v.
        transposed: u -> A^T u.
        size: length of v.
        steps: of the bidiagonalization, at most `size`.
        seed: of the random numbers; the global random state is restored.

    >>> a = torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64))
    >>> round(estimate_condition(lambda v: a @ v, lambda u: a.mT @ u, size=4, steps=4).kappa, 6)
    8.0
    """
    if size < 1 or steps < 1:
        raise ValueError(
            f"estimate_condition needs at least one column and one step, got size={size}, "
            f"steps={steps}."
        )
    generator = torch.Generator().manual_seed(seed)
    draws = min(8, max(1, steps // 4))
    signs = torch.randint(0, 2, (draws, size), generator=generator).double() * 2 - 1
    frobenius = torch.stack([multiply(z).square().sum() for z in signs]).mean().sqrt().item()
    v = torch.randn(size, generator=generator, dtype=torch.float64)
    vs: list[Tensor] = [v / v.norm()]
    us: list[Tensor] = []
    alphas: list[float] = []
    betas: list[float] = []
    scale = 0.0
    for _ in range(min(steps, size)):
        u = multiply(vs[-1])
        u = _orthogonal(u - (betas[-1] * us[-1] if betas else 0.0), us)
        alphas.append(u.norm().item())
        scale = max(scale, alphas[-1])
        # A V_k has lost rank: the smallest singular value is 0
        if alphas[-1] <= 1e-14 * scale:
            break
        us.append(u / alphas[-1])
        v = _orthogonal(transposed(us[-1]) - alphas[-1] * vs[-1], vs)
        beta = v.norm().item()
        scale = max(scale, beta)
        if beta <= 1e-14 * scale or len(vs) == min(steps, size):
            break
        betas.append(beta)
        vs.append(v / beta)
    k = len(alphas)
    b = torch.diag(torch.tensor(alphas, dtype=torch.float64))
    b += torch.diag(torch.tensor(betas[: k - 1], dtype=torch.float64), 1)
    s = torch.linalg.svdvals(b)
    floor = torch.finfo(torch.float64).eps * size
    largest, smallest = s[0].item(), s[-1].item()
    kappa = largest / max(smallest, floor * largest) if largest > 0 else 1 / floor
    return JacobianCondition(largest, smallest, kappa, frobenius, k, size)


class _GraphProbe(Probe):
    """Keeps each branch with the graph that leads to it from its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Tensor, Tensor]] = []

    def tokens(self, x: Tensor) -> Tensor:
        # so that a frozen model has a graph too
        return x.detach().requires_grad_()

    def branch(self, b: Tensor, call: Any) -> Tensor:
        self.found.append((call.role, b, call.residual))
        return b


def measure_jacobian(
    model: nn.Module,
    inputs: Any,
    *,
    sample: int = 0,
    steps: int = 32,
    seed: int = 0,
    double: bool = True,
) -> dict[str, dict[str, JacobianCondition]]:
    """For one sample, by layer: conditioning of d branch / d tokens, without the skip and with it
    (plus the identity).

    The tokens are the residual stream that the branch reads, its norm included: a pre-norm branch
    is exactly singular without its skip, because LayerNorm forgets each token's mean and length.
    Products with the Jacobian come from automatic differentiation, so attention runs unfused.

    Args:
        inputs: one batch, as for `measure_conditioning`; only `sample` of it is used.
        steps: dimensions of the random space; the cost is about four forwards of the layer per
            step.
        double: in a float64 copy of the model; float32 hides singular values below 1e-7 of the
            largest.

    >>> import dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp=8)
    >>> result = measure_jacobian(model, torch.randn(2, 3, 8, 8), steps=8)  # synthetic images
    >>> sorted(result["blocks.0"])
    ['attention', 'attention+skip', 'ffn', 'ffn+skip']
    """
    model = unwrapped(model)
    inputs = map_tensors(inputs, lambda t: t[sample : sample + 1])
    if double:
        model, inputs = in_float64(model, inputs)
    results: dict[str, dict[str, JacobianCondition]] = {}
    with probed(model, _GraphProbe) as probes, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        call(model, inputs)
        for plan, probe in probes:
            here = results.setdefault(plan.name, {})
            for role, branch, residual in probe.found:
                count = sum(name.rstrip("23456789") == role for name in here)
                name = role if not count else f"{role}{count + 1}"
                multiply, transposed = _products(branch, residual)
                here[name] = estimate_condition(multiply, transposed, residual.numel(), steps, seed)
                here[f"{name}+skip"] = estimate_condition(
                    lambda v, f=multiply: f(v) + v,  # type: ignore[misc]
                    lambda u, f=transposed: f(u) + u,  # type: ignore[misc]
                    residual.numel(),
                    steps,
                    seed,
                )
            probe.found.clear()
    return results


def _products(y: Tensor, x: Tensor) -> tuple[Map, Map]:
    """v -> J v and u -> J^T u for J = dy/dx, from one graph: the first is the derivative of the
    second by u."""
    u0 = torch.zeros_like(y, requires_grad=True)
    (backward,) = torch.autograd.grad(y, x, u0, create_graph=True)

    def multiply(v: Tensor) -> Tensor:
        (out,) = torch.autograd.grad(backward, u0, v.to(x).view_as(x), retain_graph=True)
        return out.detach().double().flatten().cpu()

    def transposed(u: Tensor) -> Tensor:
        (out,) = torch.autograd.grad(y, x, u.to(y).view_as(y), retain_graph=True)
        return out.detach().double().flatten().cpu()

    return multiply, transposed


def _orthogonal(x: Tensor, basis: list[Tensor]) -> Tensor:
    """x without its part in the span of an orthonormal basis, twice, because once leaves rounding
    errors."""
    if basis:
        q = torch.stack(basis)
        for _ in range(2):
            x = x - q.mT @ (q @ x)
    return x
