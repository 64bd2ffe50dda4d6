"""A `forward` that is an instance attribute hides the class's: it is entered, or refused, and given back."""

import copy

import pytest
import torch
from torch import nn

import dampen
from dampen import DropHead, DropKey, DropPath, ExplicitDropout, FeedForwardDropout, TokenGraying

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def vit():
    torch.manual_seed(0)
    return dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=2, heads=2, mlp=12).train()


def hooked(model):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))
    return model


def dispatched(model):
    from accelerate import dispatch_model
    from accelerate.utils import infer_auto_device_map

    return dispatch_model(model, infer_auto_device_map(model), force_hooks=True)


def offloaded(model):
    from accelerate import cpu_offload

    return cpu_offload(model, "cpu")


METHODS = [
    lambda: DropKey(0.5),
    lambda: DropHead(0.5),
    lambda: DropPath(0.5),
    lambda: FeedForwardDropout(0.5),
    lambda: ExplicitDropout(value=0.5, ffn=0.5),
    lambda: TokenGraying("dct", eps=0.5),
]


@pytest.mark.parametrize("make", METHODS, ids=lambda make: type(make()).__name__)
@pytest.mark.parametrize("how", [hooked, dispatched], ids=lambda f: f.__name__)
def test_accelerate_is_entered(make, how):
    """Under Accelerate's hooks a method does what it does without them."""
    plain, model = vit(), how(vit())
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    losses = []
    for m in (plain, model):
        reg = dampen.regularize(m, make())
        torch.manual_seed(3)
        _, terms = reg.loss(lambda m=m: m(X), lambda out: out.square().mean())
        losses.append({name: value.detach() for name, value in terms.items()})
    assert losses[0].keys() == losses[1].keys()
    for name, value in losses[0].items():
        torch.testing.assert_close(losses[1][name], value)
    assert losses[0]["task"] != vit()(X).square().mean() or len(losses[0]) > 1  # it did something
    reg.remove()
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        for key in ("forward", "_old_forward"):
            assert vars(module).get(key) is before[name].get(key)


def test_offloaded_weights_are_seen_where_they_are():
    """With weights on the meta device between forwards, a penalty reads them inside the hook."""
    model = offloaded(vit())
    reg = dampen.regularize(model, ExplicitDropout(value=0.5, ffn=0.5))
    plain = vit()
    other = dampen.regularize(plain, ExplicitDropout(value=0.5, ffn=0.5))
    with torch.no_grad():
        _, terms = reg.loss(lambda: model(X), lambda out: out.mean())
        _, expected = other.loss(lambda: plain(X), lambda out: out.mean())
    assert terms == expected


def wrapped(module):
    """A user's wrapper: counts, and calls what was there."""
    old, seen = module.forward, []

    def forward(*args, **kwargs):
        seen.append(1)
        return old(*args, **kwargs)

    module.forward = forward
    return seen


@pytest.mark.parametrize("make", METHODS, ids=lambda make: type(make()).__name__)
def test_a_wrapper_of_blocks_attentions_and_the_model_is_entered(make):
    plain, model = vit(), vit()
    seen = [wrapped(m) for m in (model, *model.blocks, *(b.attn for b in model.blocks))]
    outputs = []
    for m in (plain, model):
        reg = dampen.regularize(m, make())
        torch.manual_seed(3)
        outputs.append(m(X))
        reg.penalties()
    assert torch.equal(*outputs)
    assert all(len(s) == 1 for s in seen)
    forward = model._dampen_instance.forward
    reg.remove()
    assert vars(model)["forward"] is forward
    model(X)


def test_a_wrapper_of_a_linear_map_is_refused_and_nothing_changed():
    model = vit()
    wrapped(model.blocks[1].mlp.fc1)
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(
        ValueError, match=r"'blocks.1.mlp.fc1' \(Linear\) has a forward of its own.*target_modules="
    ):
        dampen.regularize(model, FeedForwardDropout(0.5))
    assert [type(m) for m in model.modules()] == kinds
    dampen.regularize(model, DropKey(0.5))  # which does not look at it


def test_a_wrapper_of_torch_attention_is_refused():
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    wrapped(model.self_attn)
    with pytest.raises(
        ValueError, match=r"'self_attn' \(MultiheadAttention\) has a forward of its own"
    ):
        dampen.regularize(model, DropKey(0.5))


def test_what_accelerate_leaves_behind_is_the_class_s_own_forward():
    from accelerate.hooks import remove_hook_from_module

    model = hooked(vit())
    remove_hook_from_module(model, recurse=True)
    assert "forward" in vars(model.blocks[0].mlp.fc1)
    reg = dampen.regularize(model, FeedForwardDropout(0.5))
    assert not torch.equal(model(X), model(X))
    reg.remove()
    assert torch.equal(model(X), vit()(X))


def test_hooks_put_on_later_and_copies():
    model = vit()
    reg = dampen.regularize(model, DropKey(0.5))
    hooked(model)
    assert not torch.equal(model(X), model(X))
    twin = hooked(vit())
    dampen.regularize(twin, DropKey(0.5))
    twin = copy.deepcopy(twin)
    assert not torch.equal(twin(X), twin(X))
    dampen.remove(twin)
    assert torch.equal(twin(X), vit()(X))
    assert reg.layers


class Int8Linear(nn.Linear):
    """As quantized loads keep a weight, for tests."""

    def __init__(self, old):
        super().__init__(old.in_features, old.out_features)
        self.weight = nn.Parameter(old.weight.detach().mul(20).to(torch.int8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) / 20, self.bias)


def test_quantized_weights_are_refused_where_they_are_read():
    model = vit()
    for block in model.blocks:
        block.mlp.fc1 = Int8Linear(block.mlp.fc1)
    with pytest.raises(
        ValueError, match=r"'blocks.0.mlp.fc1' \(Int8Linear\) keeps its weight as torch.int8"
    ):
        dampen.regularize(model, FeedForwardDropout(0.1))
    dampen.regularize(model, DropKey(0.5))
    assert not torch.equal(model(X), model(X))
