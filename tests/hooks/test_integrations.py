"""The real libraries: every family is found, seen correctly at each socket, left alone in eval, and regularized in
training."""

import pytest
import timm
import torch
import transformers as tr
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import DropKey, FeedForwardDropout
from dampen.regularizer import ROLES, Regularizer
from tests.families import FAMILIES, FEATURES, IMAGES, MEMORY, PADDING, TEXT, output


class Watch(Regularizer):
    """Looks at every socket and changes nothing."""

    stochastic = False
    needs_valid = True
    roles = frozenset(ROLES)

    def __init__(self, branches=True):
        super().__init__()
        self.seen_maps, self.attentions, self.branches = [], [], []
        if not branches:
            self.stages = self.stages - {"branch"}

    def operands(self, x, weight, call):
        return x, weight

    def product(self, y, call):
        self.seen_maps.append(call)
        return y

    def qkv(self, q, k, v, call):
        self.attentions.append((q, k, v, call, {role: call.projection(role) for role in "qkv"}))
        return q, k, v

    def branch(self, b, call):
        self.branches.append((call.role, call.residual, b))
        return b


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def test_every_socket_is_seen(family):
    model = family.model()
    plain = output(model(**family.inputs)).detach()
    reg = dampen.regularize(model, Watch())
    got = output(model(**family.inputs)).detach()
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-5)  # watching changes nothing
    assert len(reg.layers) == family.layers
    last = reg.clones[-1]
    assert {c.role for c in last.seen_maps} == family.roles
    assert [role for role, _, _ in last.branches] == family.branches
    for clone in reg.clones:
        for call in clone.seen_maps:  # each map with its own input, weight and bias
            torch.testing.assert_close(
                call.output, F.linear(call.input, call.weight, call.bias), rtol=1e-4, atol=1e-5
            )
        for _q, _k, v, call, maps in clone.attentions:
            assert maps["q"].weight.shape[0] == call.shape[1] * call.head_size
            assert maps["k"].weight.shape == (maps["v"].weight.shape[0], maps["k"].input.shape[-1])
            bare = maps["v"].output.unflatten(-1, (-1, v.shape[3])).transpose(1, 2)
            if bare.shape[0] == v.shape[0]:  # not windows
                bare = bare.repeat_interleave(
                    v.shape[1] // bare.shape[1], 1
                )  # grouped values may come repeated
                torch.testing.assert_close(bare, v)  # the captured map is the one that makes v


def test_eval_is_bit_exact_and_remove_restores(family):
    model = family.model().eval()
    with torch.no_grad():
        plain = output(model(**family.inputs))
        keys = list(model.state_dict())
        reg = dampen.regularize(model, [Watch(), DropKey(0.3), FeedForwardDropout(0.3)])
        assert torch.equal(output(model(**family.inputs)), plain)
        assert list(model.state_dict()) == keys
        reg.remove()
        assert torch.equal(output(model(**family.inputs)), plain)


def test_training_is_regularized(family):
    model = family.model()
    plain = output(model(**family.inputs)).detach()
    reg = dampen.regularize(model, [DropKey(0.4), FeedForwardDropout(0.2)])
    got = output(model(**family.inputs))
    assert not torch.allclose(got, plain)
    got.float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert all(k.startswith(("fused", "plain")) for k in reg.kernels().values())
    attentions = sum(len(layer.kernels) for layer in reg.layers)
    assert attentions == len(reg.kernels()) >= family.layers


def test_rate_zero_is_the_identity(family):
    model = family.model()
    plain = output(model(**family.inputs)).detach()
    dampen.regularize(model, [DropKey(0.0), FeedForwardDropout(0.0)])
    torch.testing.assert_close(output(model(**family.inputs)), plain, rtol=1e-4, atol=1e-5)


# --- kinds and sites


@pytest.mark.parametrize("name", ["decoder_post", "hf_t5", "hf_detr", "own_seq2seq"])
def test_self_and_cross_can_be_chosen(name):
    family = FAMILIES[name]
    everything = dampen.regularize(model := family.model(), DropKey(0.3))
    model(**family.inputs)
    of_kind = {}
    for kind in ("self", "cross"):
        reg = dampen.regularize(model := family.model(), DropKey(0.3), attention=kind)
        model(**family.inputs)
        of_kind[kind] = set(reg.kernels())
    assert of_kind["self"] | of_kind["cross"] == set(everything.kernels())
    assert not of_kind["self"] & of_kind["cross"]
    assert len(of_kind["cross"]) == 2


def test_roles_of_attention():
    seen = {}
    for name in ("own_vit", "own_language", "hf_llama", "decoder_post"):
        family = FAMILIES[name]
        reg = dampen.regularize(model := family.model(), Watch())
        model(**family.inputs)
        seen[name] = [call.role for _, _, _, call, _ in reg.clones[0].attentions]
    assert seen == {
        "own_vit": ["self"], "own_language": ["causal"], "hf_llama": ["causal"], "decoder_post": ["causal", "cross"]
    }  # fmt: skip


def test_detr_projections_have_their_own_inputs():
    """q and k read x + position, v reads x."""
    family = FAMILIES["hf_detr"]
    reg = dampen.regularize(model := family.model(), Watch())
    model(**family.inputs)
    maps = reg.clones[0].attentions[0][4]
    assert not torch.allclose(maps["q"].input, maps["v"].input)
    torch.testing.assert_close(maps["q"].input, maps["k"].input)


@pytest.mark.parametrize(
    "name", ["hf_bert", "hf_llama", "own_encoder", "encoder_post", "encoder_pre_seq_first"]
)
def test_padding_reaches_every_linear_map(name):
    """After the layer's attention, the feed-forward's maps know which tokens are padding."""
    family = FAMILIES[name]
    reg = dampen.regularize(model := family.model(), Watch())
    model(**family.inputs)
    for clone in reg.clones:
        for call in clone.seen_maps:
            if call.role.startswith("ffn"):
                expected = PADDING.bool()
                if name == "encoder_pre_seq_first":
                    expected = expected.t()
                assert torch.equal(call.valid.expand(call.input.shape[:2]), expected)
        assert torch.equal(clone.attentions[0][3].valid.expand(2, 7), PADDING.bool())


def test_projections_can_be_said():
    class OddAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.ask, self.tell, self.give = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            return F.scaled_dot_product_attention(self.ask(x), self.tell(x), self.give(x))

    with pytest.raises(ValueError, match=r"'0' has only other. Name the .*projections="):
        dampen.regularize(nn.Sequential(OddAttention()), Watch(branches=False))
    model = nn.Sequential(OddAttention()).train()
    said = {"q": "ask", "k": "tell", "v": "give"}
    watch = Watch(branches=False)
    reg = dampen.regularize(model, watch, projections=said)
    model(FEATURES)
    assert reg.clones[0].attentions[0][4]["v"].module is model[0].give


# --- errors


def test_cait_with_its_talking_heads():
    model = timm.create_model(
        "cait_xxs24_224", img_size=32, depth=2, num_classes=5, init_values=1.0
    ).train()
    plain = model(IMAGES)
    reg = dampen.regularize(model, DropKey(0.5))
    assert not torch.allclose(model(IMAGES), plain)
    kernels = reg.kernels()
    assert all(
        kernel.startswith("eager") for name, kernel in kernels.items() if name.startswith("blocks.")
    )
    assert "blocks.0.attn" in kernels


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # transformers' DeBERTa still scripts its helpers
def test_library_models_without_sdpa_or_registry():
    """XLNet keeps its projections as bare parameters and writes einsums, DeBERTa computes by hand: both are seen."""
    config = tr.XLNetConfig(vocab_size=50, d_model=16, n_layer=1, n_head=2, d_inner=16, dropout=0.0)
    xlnet = tr.XLNetModel(config).train()
    plain = xlnet(TEXT)[0]
    reg = dampen.regularize(xlnet, DropKey(0.0))
    assert torch.equal(xlnet(TEXT)[0], plain)
    reg.remove()
    reg = dampen.regularize(xlnet, DropKey(0.3))
    assert not torch.allclose(xlnet(TEXT)[0], plain)
    assert all(kernel.startswith("eager") for kernel in reg.kernels().values())
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = tr.DebertaModel(tr.DebertaConfig(vocab_size=50, **sizes)).train()
    reg = dampen.regularize(model, DropKey(0.1))
    model(TEXT)
    assert all(kernel.startswith("eager") for kernel in reg.kernels().values())


# --- nn.MultiheadAttention


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"kdim": 12, "vdim": 10}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}],
)
@pytest.mark.parametrize(
    "masks", ["none", "bool", "float", "padding", "padding+bool", "three", "float_padding"]
)
def test_multihead_attention_is_a_drop_in(batch_first, need_weights, average, options, masks):
    """With nothing at work in it, our forward gives what nn.MultiheadAttention gives: output, weights, gradients."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, batch_first=batch_first, **options).train()
    query = FEATURES
    key, value = (MEMORY[..., : options.get(k, 16)] for k in ("kdim", "vdim"))
    if not batch_first:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    attn = torch.rand(7, 5) < 0.3
    attn[:, 0] = False  # no row is left without a key: there torch itself gives NaN
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    additive = torch.zeros(2, 5).masked_fill(padding, float("-inf"))
    given = {
        "none": {}, "bool": {"attn_mask": attn}, "float": {"attn_mask": torch.randn(7, 5)},
        "padding": {"key_padding_mask": padding}, "padding+bool": {"attn_mask": attn, "key_padding_mask": padding},
        "three": {"attn_mask": attn.expand(4, -1, -1)}, "float_padding": {"key_padding_mask": additive},
    }[masks]  # fmt: skip
    given = {**given, "need_weights": need_weights, "average_attn_weights": average}
    expected, expected_weights = model(query, key, value, **given)
    gradients = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    dampen.regularize(model, DropKey(0.0))
    got, weights = model(query, key, value, **given)
    torch.testing.assert_close(got, expected)
    if need_weights:
        torch.testing.assert_close(weights, expected_weights)
    else:
        assert weights is None
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), list(model.parameters())), gradients, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_multihead_attention_unbatched_and_causal():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2).train()
    x, mask = FEATURES[0], nn.Transformer.generate_square_subsequent_mask(7)
    given = {"attn_mask": mask, "is_causal": True, "need_weights": False}
    expected, alone = model(x, x, x, **given)[0], model(x, x, x)[1]
    dampen.regularize(model, DropKey(0.0))
    torch.testing.assert_close(model(x, x, x, **given)[0], expected)
    torch.testing.assert_close(model(x, x, x)[1], alone)


def test_multihead_attention_in_training_mode_drops():
    model = nn.MultiheadAttention(16, 2, batch_first=True).train()
    dampen.regularize(model, DropKey(0.5))
    assert not torch.equal(
        model(FEATURES, FEATURES, FEATURES)[0], model(FEATURES, FEATURES, FEATURES)[0]
    )


@pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning"
)  # new name in 5.x
def test_huggingface_gradient_checkpointing():
    """transformers' own checkpointing gives the same gradients, with the same draws."""
    family = FAMILIES["hf_llama"]
    gradients = []
    for checkpointing in (False, True):
        model = family.model()
        reg = dampen.regularize(model, [DropKey(0.3), FeedForwardDropout(0.2)])
        if checkpointing:
            # transformers 5 renamed it and warns about the older name
            enable = getattr(
                model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False})
        torch.manual_seed(1)
        loss, _ = reg.loss(
            lambda m=model: m(**family.inputs, use_cache=False),
            lambda out: out.logits.square().mean(),
        )
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_save_pretrained_knows_its_class(tmp_path):
    model = FAMILIES["hf_bert"].model()
    dampen.regularize(model, DropKey(0.1))
    model.save_pretrained(tmp_path)
    again = tr.BertForSequenceClassification.from_pretrained(tmp_path)
    assert list(again.state_dict()) == list(model.state_dict())
    assert model.config.architectures == ["BertForSequenceClassification"]
