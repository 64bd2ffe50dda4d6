"""All maps of a small model summed in one function: the same values and gradients, and when it must not be."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dampen
from dampen.calls import Deferred, now
from dampen.functional.explicit import layers
from dampen.native import library

TERMS = {"value": 0.3, "ffn1": 0.2, "ffn2": 0.5}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("native")


@pytest.fixture(params=["torch", "native"])
def path(request, cache):
    if request.param == "torch":
        with library.torch_only("a test"):
            yield request.param
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAMPEN_CACHE", str(cache))
        try:
            library.build()
        except library.BuildError as error:
            pytest.skip(f"no native kernels here: {error}")
        yield request.param
    library.reset()


def vit(**options):
    torch.manual_seed(0)
    model = dampen.models.ViT(
        image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=2, mlp=24, **options
    )
    for p in model.parameters():  # biases that a slip would show
        nn.init.normal_(p, std=0.3)
    return model.train()


def gradients(model, reg, x, scale=1.0):
    model.zero_grad()
    terms = reg.loss(lambda: model(x), lambda out: F.cross_entropy(out, torch.arange(len(x))))[1]
    (terms["task"] + scale * sum(v for n, v in terms.items() if n != "task")).backward()
    return {n: v.detach() for n, v in terms.items()}, {
        n: p.grad for n, p in model.named_parameters()
    }


def nodes(value):
    seen, waiting = set(), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [n for n, _ in node.next_functions]
    return [type(n).__name__ for n in seen]


def test_equals_a_tap_per_map(path, monkeypatch):
    x = torch.randn(3, 1, 8, 8)
    model = vit()
    reg = dampen.regularize(model, dampen.ExplicitDropout(**TERMS))
    mine = gradients(model, reg, x, 0.7)
    monkeypatch.setattr(layers, "BATCHED_UP_TO", 0)
    theirs = gradients(model, reg, x, 0.7)
    for a, b in zip(mine, theirs, strict=True):
        assert set(a) == set(b)
        for name in a:
            torch.testing.assert_close(a[name], b[name], msg=lambda m, name=name: f"{name}: {m}")


class Padded(nn.Module):
    """Two encoder layers with a mask of padding, fused or separate projections."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.attn = PaddedAttention(fused)
            layer.fc1, layer.fc2 = nn.Linear(16, 24), nn.Linear(24, 16)
            self.layers.append(PaddedBlock(layer.attn, layer.fc1, layer.fc2))

    def forward(self, x, valid):
        for layer in self.layers:
            x = layer(x, valid)
        return x


class PaddedBlock(nn.Module):
    def __init__(self, attn, fc1, fc2):
        super().__init__()
        self.attn, self.fc1, self.fc2 = attn, fc1, fc2

    def forward(self, x, valid):
        x = x + self.attn(x, valid)
        return x + self.fc2(F.gelu(self.fc1(x)))


class PaddedAttention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.num_heads, self.fused = 2, fused
        if fused:
            self.qkv = nn.Linear(16, 48)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        self.proj = nn.Linear(16, 16)

    def forward(self, x, valid):
        b, n, d = x.shape
        if self.fused:
            made = self.qkv(x).chunk(3, -1)
        else:
            made = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (t.view(b, n, 2, d // 2).transpose(1, 2) for t in made)
        o = F.scaled_dot_product_attention(q, k, v, valid[:, None, None])
        return self.proj(o.transpose(1, 2).reshape(b, n, d))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "token_mean", "sum"])
def test_padding_is_weighed_in_the_one_sum(path, fused, reduction):
    """Against the sum over valid tokens, written down layer by layer with plain autograd."""
    torch.manual_seed(0)
    model = Padded(fused).train()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    valid = torch.arange(6) < torch.tensor([[6], [4], [3]])
    x = torch.randn(3, 6, 16)
    method = dampen.ExplicitDropout(value=0.3, ffn1=0.2, ffn2=0.5, rate=0.5, reduction=reduction)
    reg = dampen.regularize(model, method)
    seen = []
    for name, module in model.named_modules():
        if name.rsplit(".")[-1] in ("qkv", "v_proj", "fc1", "fc2"):
            seen.append((name, module, []))
            module.register_forward_hook(lambda m, i, o, kept=seen[-1][2]: kept.append(i[0]))
    model(x, valid)
    assert all(isinstance(v, Deferred) for c in reg.clones for v in c._penalties.values())
    mine = reg.penalty()
    factors = {"qkv": 0.3, "v_proj": 0.3, "fc1": 0.2, "fc2": 0.5}
    share = {
        "mean": valid / valid.sum(),
        "token_mean": valid / valid.sum(1, keepdim=True),
        "sum": valid.float(),
    }[reduction]
    expected = torch.zeros(())
    for name, module, kept in seen:
        last = name.rsplit(".")[-1]
        weight = module.weight[32:] if last == "qkv" else module.weight
        squares = F.linear(kept[0], weight).square().sum(-1)
        expected = expected + factors[last] * 0.5 * 0.25 * (squares * share).sum()
    torch.testing.assert_close(mine, expected)
    parameters = dict(model.named_parameters())
    given = list(parameters.values())
    found = torch.autograd.grad(mine, given, retain_graph=True, allow_unused=True)
    wanted = torch.autograd.grad(expected, given, allow_unused=True)
    largest = max(g.abs().max().item() for g in wanted if g is not None)
    for a, b, name in zip(found, wanted, parameters, strict=True):
        a = torch.zeros(()) if a is None else a
        b = torch.zeros_like(a) if b is None else b
        torch.testing.assert_close(
            a, b, rtol=1e-4, atol=1e-6 * largest, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_equals_plain_autograd_of_the_papers_sum(path):
    """Bias untouched: the sum is written down without it."""
    model, x = vit(), torch.randn(3, 1, 8, 8)
    reg = dampen.regularize(model, dampen.ExplicitDropout(ffn1=1.0, rate=0.5))
    seen = []
    hooks = [
        b.mlp.fc1.register_forward_hook(lambda m, i, o: seen.append((i[0], m)))
        for b in model.blocks
    ]
    out = model(x)
    value = reg.penalties()["explicit_dropout.ffn1"]
    mine = torch.autograd.grad(
        value, list(model.parameters()), retain_graph=True, allow_unused=True
    )
    tokens = 3 * 5
    expected = sum(0.5 * 0.25 * F.linear(i, m.weight).square().sum() / tokens for i, m in seen)
    theirs = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(value, expected)
    for (name, _), a, b in zip(model.named_parameters(), mine, theirs, strict=True):
        a = a if a is not None else torch.zeros(())
        torch.testing.assert_close(
            a, torch.zeros_like(a) if b is None else b, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert len(hooks) == 2
    del out


def test_one_function_for_all_layers(path):
    model = vit()
    reg = dampen.regularize(model, dampen.ExplicitDropout(**TERMS))
    model(torch.randn(2, 1, 8, 8))
    assert all(isinstance(v, Deferred) for c in reg.clones for v in c._penalties.values())
    names = nodes(reg.penalty())
    assert names.count("_BatchedBackward") == 1
    assert not {"_TapBackward", "_LinearBackward"} & set(names)


def test_second_derivatives(path):
    model, x = vit(), torch.randn(2, 1, 8, 8)
    reg = dampen.regularize(model, dampen.ExplicitDropout(**TERMS))

    def norm():
        model(x)
        found = torch.autograd.grad(
            reg.penalty(), list(model.parameters()), create_graph=True, allow_unused=True
        )
        return sum(g.square().sum() for g in found if g is not None)

    mine = torch.autograd.grad(norm(), list(model.parameters()), allow_unused=True)
    before, layers.BATCHED_UP_TO = layers.BATCHED_UP_TO, 0
    try:
        theirs = torch.autograd.grad(norm(), list(model.parameters()), allow_unused=True)
    finally:
        layers.BATCHED_UP_TO = before
    for a, b in zip(mine, theirs, strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_model_that_goes_on_in_place(path, monkeypatch):
    """The output that was left behind is not what the map gave any more: it is made again from the map's input."""

    class Half(nn.Module):
        def forward(self, x):
            return x.relu_()

    x, found = torch.randn(3, 1, 8, 8), []
    for limit in (layers.BATCHED_UP_TO, 0):
        monkeypatch.setattr(layers, "BATCHED_UP_TO", limit)
        model = vit()
        for block in model.blocks:
            block.mlp.act = Half()
        reg = dampen.regularize(model, dampen.ExplicitDropout(**TERMS))
        found.append(gradients(model, reg, x))
    for a, b in zip(*found, strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], msg=lambda m, name=name: f"{name}: {m}")


def test_not_under_a_checkpoint_and_the_same_there(path):
    model, x = vit(), torch.randn(2, 1, 8, 8)
    reg = dampen.regularize(model, dampen.ExplicitDropout(**TERMS))
    expected = gradients(model, reg, x)[1]
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    out = model(x)
    assert not any(isinstance(v, Deferred) for c in reg.clones for v in c._penalties.values())
    model.zero_grad()
    (F.cross_entropy(out, torch.arange(2)) + reg.penalty()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])


def test_frozen_maps_go_by_a_tap(path):
    model = vit()
    reg = dampen.regularize(model, dampen.ExplicitDropout(**TERMS))
    for block in model.blocks:
        block.mlp.requires_grad_(False)
    model(torch.randn(2, 1, 8, 8))
    waits = {n for c in reg.clones for n, v in c._penalties.items() if isinstance(v, Deferred)}
    assert waits == {"explicit_dropout.value"}
    reg.penalty().backward()


def test_forwards_add_up_and_a_clone_gives_its_own(path):
    model, x = vit(), torch.randn(2, 1, 8, 8)
    reg = dampen.regularize(model, dampen.ExplicitDropout(**TERMS))
    model(x)
    once = reg.penalty().item()
    model(x)
    model(x)
    assert reg.penalty().item() == pytest.approx(2 * once, rel=1e-5)
    model(x)
    assert sum(v.item() for c in reg.clones for v in c.take_penalties().values()) == pytest.approx(
        once, rel=1e-5
    )


def test_threads_have_their_own(path):
    model, found = vit(), {}
    reg = dampen.regularize(model, dampen.ExplicitDropout(**TERMS))
    inputs = {
        i: torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)
    }

    def run(i):
        model(inputs[i])
        found[i] = reg.penalty().item()

    for i in inputs:
        run(i)
    alone = dict(found)
    threads = [threading.Thread(target=run, args=(i,)) for i in inputs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == pytest.approx(alone, rel=1e-6)


def test_a_penalty_that_is_left_out_is_still_told():
    model = vit()
    dampen.regularize(model, dampen.ExplicitDropout(**TERMS))
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="had not been taken"):
        model(torch.randn(2, 1, 8, 8))


def test_a_map_without_a_bias(path):
    model = vit()
    for block in model.blocks:
        block.mlp.fc1.bias = None
    reg = dampen.regularize(model, dampen.ExplicitDropout(**TERMS))
    terms, found = gradients(model, reg, torch.randn(3, 1, 8, 8))
    assert terms["explicit_dropout.ffn1"] > 0
    assert all(g is not None and g.isfinite().all() for g in found.values())


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 3, 7), (2, 3, 5, 7), (2, 1, 3, 5, 7)])
def test_maps_on_grids_of_tokens_are_rows(path, shape):
    """A map of timm's GCViT gives (B, height, width, out), and four axes are not heads there: the native sum wrote
    behind the bias."""
    torch.manual_seed(0)
    x = torch.randn(*shape, requires_grad=True)
    weight, bias = (torch.randn(*s, requires_grad=True) for s in ((6, 7), (6,)))
    y = F.linear(x, weight, bias)
    found = now(layers.wait(y, bias, 0.7, x, weight))
    expected = 0.7 * F.linear(x, weight).square().sum()
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, (x, weight, bias), retain_graph=True, materialize_grads=True),
        (*torch.autograd.grad(expected, (x, weight)), torch.zeros(6)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
