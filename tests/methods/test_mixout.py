"""Mixout against its paper's formula, and ExplicitMixout against the expectation that it stands for."""

import pytest
import torch
import transformers as tr
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import ExplicitMixout, Mixout, regularize
from dampen._torch import is_shared, shared_until_written
from dampen.regularizer import UnsupportedModel
from tests.oracles.stochastic import mixout


def vit(seed=0):
    torch.manual_seed(seed)
    return dampen.models.ViT(
        image_size=8, patch_size=4, classes=3, width=16, depth=2, heads=2, mlp=16
    )


X = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def move(model, by=0.1):
    """As if it had been trained for a while."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(by * torch.randn(p.shape, generator=generator))


class Seen(Mixout):
    """Keeps what each map really used."""

    def operands(self, x, weight, call):
        x, used = super().operands(x, weight, call)
        self.seen = {
            **getattr(self, "seen", {}),
            call.role: (weight, weight - self.distance(call), used),
        }
        return x, used


def test_equals_the_papers_formula():
    model = vit()
    start = model.blocks[1].mlp.fc1.weight.detach().clone()
    reg = regularize(model, Seen(0.7))
    move(model)
    model(X)
    w, u, used = reg.clones[1].seen["ffn_in"]
    torch.testing.assert_close(u, start)
    back = (used - u).abs() < (used - (w - 0.7 * u) / 0.3).abs()  # which of the two values it took
    torch.testing.assert_close(used, mixout(w, u, back, 0.7), rtol=1e-5, atol=1e-6)
    assert 0.5 < back.double().mean() < 0.9


def test_nothing_happens_before_the_weights_move_and_eval_is_plain():
    model = vit()
    plain = model(X)
    regularize(model, Mixout(0.9))
    torch.testing.assert_close(model(X), plain)
    move(model)
    assert not torch.equal(model(X), model(X))
    model.eval()
    assert torch.equal(model(X), model(X))


def test_the_mean_is_the_weight():
    method = Mixout(0.7)
    w, u = torch.randn(4, 5), torch.randn(4, 5)
    method.distance = lambda call: w - u
    torch.manual_seed(0)
    draws = torch.stack([method.operands(w, w, None)[1] for _ in range(4000)])
    sd = (w - u).abs() * (0.7 / 0.3) ** 0.5 / 4000**0.5
    assert ((draws.mean(0) - w).abs() < 4.5 * sd).all()


def test_only_the_chosen_maps_are_kept_and_the_handle_saves_them():
    model = vit()
    keys = list(model.state_dict())
    reg = regularize(model, Mixout(0.7, targets="ffn"))
    start = {n: p.clone() for n, p in reg.clones[0].saved().items()}
    assert sorted(p.shape for p in start.values()) == [(16, 16), (16, 16)]
    assert list(model.state_dict()) == keys
    assert reg.parameters() == []  # nothing to learn
    move(model)
    state = reg.state_dict()
    other = vit(seed=3)  # resumed in a process that started from other weights
    again = regularize(other, Mixout(0.7, targets="ffn"))
    again.load_state_dict(state)
    for name, value in again.clones[0].saved().items():
        assert torch.equal(value, start[name])


def test_optimizer_and_copies_leave_the_start_alone():
    import copy

    model = vit()
    reg = regularize(model, Mixout(0.5))
    before = [p.clone() for c in reg.clones for p in c.saved().values()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = [p for c in reg.clones for p in c.saved().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    twin = copy.deepcopy(reg)
    move(twin.model)
    torch.manual_seed(0)
    first = model(X)
    torch.manual_seed(0)
    assert torch.equal(model(X), first)


@pytest.mark.parametrize("move_by", ["optimizer", "data", "numpy", "load"])
def test_the_start_shares_memory_until_the_weight_moves(move_by):
    """No matter who writes: U stays, and only what was written to is copied."""
    model = vit()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.blocks[1].requires_grad_(False)
    reg = regularize(model, Mixout(0.5, targets="ffn"))
    model(X).square().sum().backward()
    maps = [m for block in model.blocks for m in (block.mlp.fc1, block.mlp.fc2)]
    starts = [p for c in reg.clones for p in c.saved().values()]
    assert all(
        is_shared(t) for t in [*starts, *(m.weight for m in maps)]
    )  # a forward and a backward only read
    if move_by == "optimizer":
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    elif move_by == "data":
        for m in maps[:2]:
            m.weight.data.add_(1.0)
    elif move_by == "numpy":
        for m in maps[:2]:
            m.weight.detach().numpy()[:] = 3.0
    else:
        model.blocks[0].load_state_dict(vit(seed=4).blocks[0].state_dict())
    assert [is_shared(m.weight) for m in maps] == [False, False, True, True]
    for start, name in zip(
        starts, ("0.mlp.fc1", "0.mlp.fc2", "1.mlp.fc1", "1.mlp.fc2"), strict=True
    ):
        assert torch.equal(start, before[f"blocks.{name}.weight"])
    assert not torch.equal(maps[0].weight, starts[0])


def test_weights_in_mapped_files_are_copied_at_once(tmp_path):
    """transformers maps a folder's safetensors, and memory that torch did not take itself cannot be shared."""
    from safetensors.torch import load_file, save_file

    save_file({"weight": torch.randn(8, 8), "bias": torch.zeros(8)}, tmp_path / "model.safetensors")
    mapped = load_file(tmp_path / "model.safetensors")["weight"]
    for given in (mapped, torch.from_numpy(mapped.numpy().copy())):
        kept, values = shared_until_written(given), given.clone()
        given.add_(1.0)
        assert torch.equal(kept, values)


@pytest.mark.parametrize("same", [True, False])
def test_torchs_own_attention(same):
    torch.manual_seed(0)
    sizes = {} if same else {"kdim": 12, "vdim": 10}
    model = nn.MultiheadAttention(16, 2, batch_first=True, **sizes).train()
    q, k, v = (
        torch.randn(2, 5, 16),
        torch.randn(2, 5, 16 if same else 12),
        torch.randn(2, 5, 16 if same else 10),
    )
    plain = model(q, k, v)[0]
    regularize(model, Mixout(0.5, targets=["q", "k", "v"]))
    torch.testing.assert_close(model(q, k, v)[0], plain)
    move(model)
    assert not torch.equal(model(q, k, v)[0], model(q, k, v)[0])


def test_gpt2_keeps_transposed_weights():
    torch.manual_seed(0)
    model = tr.GPT2Model(
        tr.GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0)
    )
    model.train()
    ids = torch.randint(0, 20, (2, 5))
    regularize(model, Mixout(0.5))
    move(model)
    assert not torch.equal(model(ids).last_hidden_state, model(ids).last_hidden_state)


def test_refuses_what_has_no_start():
    with torch.device("meta"):
        model = dampen.models.ViT(
            image_size=8, patch_size=4, classes=3, width=16, depth=1, heads=2, mlp=16
        )
    with pytest.raises(UnsupportedModel, match="Load the pre-trained weights first"):
        regularize(model, Mixout())


METHODS = {"mixout": lambda: Mixout(0.5), "explicit_mixout": lambda: ExplicitMixout(1.0, rate=0.5)}


@pytest.mark.parametrize("name", METHODS)
def test_the_lists_of_the_model_stay_as_they_were(name):
    """Counts, weight decay groups, noise or scaling over all parameters, and an EMA by zip must not see U."""
    plain, model = vit(), vit()
    reg = regularize(model, METHODS[name]())
    kept = sum(start.numel() for c in reg.clones for start in c.saved().values())
    assert kept == sum(
        m.weight.numel()
        for block in model.blocks
        for m in block.modules()
        if isinstance(m, nn.Linear)
    )
    assert [(n, p.shape) for n, p in model.named_parameters()] == [
        (n, p.shape) for n, p in plain.named_parameters()
    ]
    large = [n for n, b in model.named_buffers() if b.numel() > 1]
    assert large == [n for n, b in plain.named_buffers() if b.numel() > 1]
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        for average, p in zip(plain.parameters(), model.parameters(), strict=True):
            average.lerp_(p, 0.1)
        for p in model.parameters():
            p.mul_(1.1)
    if name == "explicit_mixout":
        model(X)
        assert reg.penalty() > 0


@pytest.mark.parametrize("name", METHODS)
def test_the_start_moves_with_the_model(name):
    model = vit()
    reg = regularize(model, METHODS[name]())
    move(model)
    model.double()
    assert {s.dtype for c in reg.clones for s in c.saved().values()} == {torch.float64}
    reg.loss(lambda: model(X.double()), lambda out: out.square().sum())[0].backward()
    model.to("meta")
    assert {s.device.type for c in reg.clones for s in c.saved().values()} == {"meta"}


def test_a_state_of_another_shape_is_refused():
    reg, other = (
        regularize(vit(), Mixout(0.5)),
        dampen.models.ViT(image_size=8, patch_size=4, width=32, depth=2, heads=2),
    )
    state = regularize(other, Mixout(0.5)).state_dict()
    with pytest.raises(ValueError, match="a starting weight of the shape"):
        reg.load_state_dict(state)


# --- the closed form


def test_explicit_is_half_the_expected_squared_change():
    """Monte Carlo over Mixout's masks: E ||x (W_used - W)^T||^2 / 2 per token."""
    torch.manual_seed(0)
    x, w, u, rate = torch.randn(7, 6), torch.randn(4, 6), torch.randn(4, 6), 0.6
    method = Mixout(rate)
    method.distance = lambda call: w - u
    changes = torch.stack(
        [F.linear(x, method.operands(x, w, None)[1] - w).square().sum() for _ in range(20000)]
    )
    expected = 0.5 * rate / (1 - rate) * (x.square().sum(0) @ (w - u).square().sum(0))
    assert abs(changes.mean() / 2 - expected) < 4 * changes.std() / 2 / 20000**0.5


@pytest.mark.parametrize("targets", ["all", "ffn", "attention"])
def test_explicit_on_a_model_equals_a_slow_reference(targets):
    model, start = vit(), vit()
    reg = regularize(model, ExplicitMixout(2.0, rate=0.3, targets=targets))
    move(model)
    maps = {"ffn": ("mlp.fc1", "mlp.fc2"), "attention": ("attn.qkv", "attn.proj")}
    wanted = maps.get(targets, maps["ffn"] + maps["attention"])
    seen = {}
    for i, block in enumerate(model.blocks):
        for name in wanted:
            module = block.get_submodule(name)
            module.register_forward_pre_hook(
                lambda m, args, key=(i, name): seen.update({key: args[0]})
            )
    loss, terms = reg.loss(lambda: model(X), lambda out: out.sum() * 0)
    expected = 0.0
    for (i, name), x in seen.items():
        gap = (
            model.blocks[i].get_submodule(name).weight - start.blocks[i].get_submodule(name).weight
        )
        expected = expected + 2.0 * 0.5 * 0.3 / 0.7 * (
            x.square().mean((0, 1)) @ gap.square().sum(0)
        )
    torch.testing.assert_close(terms["explicit_mixout"], expected)
    weights = [m.weight for m in model.blocks.modules() if isinstance(m, nn.Linear)]
    for got, want in zip(
        torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True),
        torch.autograd.grad(expected, weights, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_explicit_counts_valid_tokens_only():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = tr.BertModel(tr.BertConfig(vocab_size=20, **sizes, **off)).train()
    reg = regularize(model, ExplicitMixout(1.0))
    move(model)
    ids, mask = torch.randint(1, 20, (2, 5)), torch.ones(2, 5, dtype=torch.long)
    alone = reg.loss(
        lambda: model(ids, attention_mask=mask), lambda out: out.last_hidden_state.sum() * 0
    )[0]
    longer = F.pad(ids, (0, 3), value=9)
    padded = reg.loss(
        lambda: model(longer, attention_mask=F.pad(mask, (0, 3))),
        lambda out: out.last_hidden_state.sum() * 0,
    )[0]
    torch.testing.assert_close(alone, padded)
    assert alone > 0


def test_it_pulls_towards_the_start():
    model = vit()
    start = model.blocks[0].mlp.fc1.weight.detach().clone()
    reg = regularize(model, ExplicitMixout(1.0, targets="ffn", detach_inputs=True))
    move(model)
    before = (model.blocks[0].mlp.fc1.weight - start).norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        reg.loss(lambda: model(X), lambda out: out.sum() * 0)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model.blocks[0].mlp.fc1.weight - start).norm() < 0.7 * before
