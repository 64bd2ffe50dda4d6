"""Every method under what is neither a plain step nor a graph: inference mode, `torch.func`, second derivatives, traces."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import dampen
from dampen.checking.subjects import adapted, with_companion, with_example
from dampen.registry import methods

X = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def attached(name):
    torch.manual_seed(0)
    sizes = {"width": 16, "depth": 2, "heads": 2, "mlp": 16}
    model = dampen.models.ViT(image_size=8, patch_size=2, channels=1, **sizes).train()
    model = adapted(model, methods()[name]).train()
    chosen = with_companion([with_example(methods()[name])()])
    return model, dampen.regularize(model, chosen, strict=False)


OF_LOSS = {"anchor_kl", "confidence_penalty", "flooding", "z_loss"}
IN_FORWARD = [name for name in methods() if name not in OF_LOSS]  # `reg.loss` alone runs the others


@pytest.mark.parametrize("name", methods())
def test_inference_mode_computes_what_no_grad_does(name):
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        model, _ = attached(name)
        torch.manual_seed(1)
        with mode():
            found.append(model(X).clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("name", IN_FORWARD)
def test_torch_func_has_the_gradients_of_autograd(name, monkeypatch):
    """With the native kernels off, so that both draw the same: inside `torch.func` they never run."""
    monkeypatch.setenv("DAMPEN_NATIVE", "0")
    model, reg = attached(name)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    one_pass = reg.passes == 1

    def loss_of(values):
        out = torch.func.functional_call(model, values, (X,)).square().mean()
        return out + reg.penalty() if one_pass else out

    torch.manual_seed(1)
    found = torch.func.grad(loss_of)(parameters)
    torch.manual_seed(1)
    loss = model(X).square().mean()
    (loss + reg.penalty() if one_pass else loss).backward()
    for n, p in model.named_parameters():
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(
            found[n], expected, rtol=1e-4, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}"
        )


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", IN_FORWARD)
def test_vmap_gives_each_sample_its_own_gradient(name):
    model, reg = attached(name)
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss_of(values, x):
        out = torch.func.functional_call(model, values, (x[None],)).square().mean()
        return out + reg.penalty() if reg.passes == 1 else out

    each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0), randomness="different")
    found = each(parameters, X)
    assert all(g.isfinite().all() for g in found.values())
    if methods()[name].stochastic or reg.passes > 1:
        return  # what is drawn under vmap is drawn in no other way
    for i, x in enumerate(X):
        for n, g in torch.func.grad(loss_of)(parameters, x).items():
            torch.testing.assert_close(found[n][i], g, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", methods())
def test_vmap_in_eval_computes_what_a_batch_does(name):
    model, _ = attached(name)
    model.eval()
    found = torch.func.vmap(lambda x: model(x[None])[0])(X)
    torch.testing.assert_close(found, model(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", IN_FORWARD)
def test_second_derivatives_are_those_of_finite_differences(name, monkeypatch):
    """A backward through all gradients, as a gradient penalty makes one, beside the difference of two of them."""
    monkeypatch.setenv("DAMPEN_NATIVE", "0")
    model, reg = attached(name)
    model.double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = [torch.randn_like(p) for p in parameters]
    x, direction = X.double(), torch.randn_like(X.double())

    def along(x, create_graph=False):
        """The gradients of the parameters, weighted and summed up."""
        torch.manual_seed(1)
        loss = model(x).square().mean()
        loss = loss + reg.penalty() if reg.passes == 1 else loss
        options = {"create_graph": create_graph, "allow_unused": True}
        found = torch.autograd.grad(loss, parameters, **options)
        return sum((g * w).sum() for g, w in zip(found, weights, strict=True) if g is not None)

    with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention has no second derivative
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(along(leaf, True), leaf)
        step = 1e-5
        expected = (along(x + step * direction) - along(x - step * direction)) / (2 * step)
    torch.testing.assert_close((found * direction).sum(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", methods())
def test_a_trace_is_refused_in_training_and_exact_in_eval(name):
    model, reg = attached(name)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace cannot record"):
        torch.jit.trace(model, X, check_trace=False)
    with reg.disable():
        assert torch.jit.trace(model, X, check_trace=False)(X).isfinite().all()
    model.eval()
    traced = torch.jit.trace(model, X, check_trace=False)
    torch.testing.assert_close(traced(X), model(X))
