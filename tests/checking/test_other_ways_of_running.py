"""Every method under what is neither a plain step nor a graph: inference mode, `torch.func`, traces."""

import pytest
import torch

import dampen
from dampen.checking.attached import with_companion, with_example
from dampen.registry import methods

X = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def attached(name):
    torch.manual_seed(0)
    sizes = {"width": 16, "depth": 2, "heads": 2, "mlp": 16}
    model = dampen.models.ViT(image_size=8, patch_size=2, channels=1, **sizes).train()
    chosen = with_companion([with_example(methods()[name])()])
    return model, dampen.regularize(model, chosen, strict=False)


@pytest.mark.parametrize("name", methods())
def test_inference_mode_computes_what_no_grad_does(name):
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        model, _ = attached(name)
        torch.manual_seed(1)
        with mode():
            found.append(model(X).clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("name", methods())
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
