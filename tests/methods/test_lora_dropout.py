"""LoRADropout against W + s B A with masks written out, on peft's layers: values, gradients, means, refusals."""

import pytest
import torch
from torch import nn

import dampen
from dampen import ExplicitDropout, LoRADropout
from dampen.checking.subjects import SUBJECTS, subject_for
from dampen.regularizer import UnsupportedModel
from tests.integrations.tiny import batch, llama, texts

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*")
INPUTS = batch(texts(4))
P = 0.4


def adapted(model=None, targets=("q_proj", "down_proj"), **options):
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=list(targets), init_lora_weights=False, **options
    )
    return peft.get_peft_model(llama() if model is None else model, config).train()


def slow_masks(a, b, unit, drawn):
    """The masks (rank, in) of A and (out, rank) of B by loops, from the draws in their order: True drops."""
    keep_a, keep_b = torch.ones_like(a), torch.ones_like(b)
    if unit == "feature":
        columns, rows = drawn
        for j in range(a.shape[1]):
            keep_a[:, j] = 0.0 if columns[0, j] else 1 / (1 - P)
        for o in range(b.shape[0]):
            keep_b[o] = 0.0 if rows[o, 0] else 1 / (1 - P)
    elif unit == "rank":
        for r in range(a.shape[0]):
            keep_a[r] = 0.0 if drawn[0][r, 0] else 1 / (1 - P)
    else:
        keep_b[:] = 0.0 if drawn[0].item() else 1 / (1 - P)
    return keep_a, keep_b


@pytest.fixture
def draws(monkeypatch):
    """What the method draws, in order."""
    seen = []
    real = dampen.methods.lora_dropout.bernoulli

    def recorded(shape, rate, device=None):
        seen.append(real(shape, rate, device))
        return seen[-1]

    monkeypatch.setattr("dampen.methods.lora_dropout.bernoulli", recorded)
    return seen


@pytest.mark.parametrize("unit", ["feature", "rank", "module"])
@pytest.mark.parametrize("fan", [False, True], ids=["linear", "conv1d"])
def test_the_map_is_w_plus_masked_b_a(unit, fan, draws):
    """One layer: y = (W + s B' A') x + bias, with the gradients of A, B and x."""
    if fan:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 19}
        gpt = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
        model = adapted(gpt, ["c_attn"], fan_in_fan_out=True)
        layer, inputs = model.base_model.model.transformer.h[0].attn.c_attn, torch.ones(3, 5).long()
    else:
        model = adapted()
        layer, inputs = model.base_model.model.model.layers[0].self_attn.q_proj, INPUTS["input_ids"]
    dampen.regularize(model, LoRADropout(P, unit=unit))
    seen = {}
    layer.register_forward_hook(lambda m, args, out: seen.update(x=args[0], y=out))
    first = len(draws)
    model(inputs)
    count = 2 if unit == "feature" else 1
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    keep_a, keep_b = slow_masks(a, b, unit, draws[first : first + count])
    w = layer.base_layer.weight.t() if fan else layer.base_layer.weight
    x = seen["x"].detach()
    expected = x @ (w + 2.0 * (keep_b * b) @ (keep_a * a)).t()
    if layer.base_layer.bias is not None:
        expected = expected + layer.base_layer.bias
    torch.testing.assert_close(seen["y"], expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(expected)
    got = torch.autograd.grad((seen["y"] * weights).sum(), [a, b])
    slow = torch.autograd.grad((expected * weights).sum(), [a, b])
    for g, e in zip(got, slow, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("unit", ["feature", "rank", "module"])
def test_the_mean_adapter_is_b_a_and_its_spread_that_of_the_unit(unit):
    """E[B' A'] = B A. One entry has variance sum_r (b a)^2 (c - 1) with c = 1 / (1-p) for ranks, and
    (b a)^2 (c - 1) of the whole sum for modules, (c^2 - 1) for features."""
    torch.manual_seed(0)
    method = LoRADropout(P, unit=unit)
    a, b = torch.randn(3, 5, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    x = torch.zeros(1, 5, dtype=torch.float64)
    made = []
    for _ in range(20000):
        masked = {"lora_a": a, "lora_b": b}
        for role in sorted(method.roles):
            call = dampen.regularizer.LinearCall(role, x, masked[role], None)
            masked[role] = method.operands(x, masked[role], call)[1]
        made.append(masked["lora_b"] @ masked["lora_a"])
    made, c = torch.stack(made), 1 / (1 - P)
    whole, parts = b @ a, torch.einsum("or,ri->ori", b, a)
    variance = {
        "feature": whole.square() * (c * c - 1),
        "rank": parts.square().sum(1) * (c - 1),
        "module": whole.square() * (c - 1),
    }[unit]
    error = (variance / len(made)).sqrt()
    assert ((made.mean(0) - whole).abs() < 5 * error + 1e-9).all()
    torch.testing.assert_close(made.var(0), variance, rtol=0.1, atol=1e-3)


def test_the_rank_of_an_adapter_stays_under_features_and_falls_under_ranks(draws):
    torch.manual_seed(1)
    a, b, x = torch.randn(3, 40), torch.randn(40, 3), torch.zeros(1, 40)
    ranks = {}
    for unit in ("feature", "rank"):
        method, masked = LoRADropout(0.5, unit=unit), {"lora_a": a, "lora_b": b}
        found = set()
        for _ in range(30):
            for role in sorted(method.roles):
                call = dampen.regularizer.LinearCall(
                    role, x, {"lora_a": a, "lora_b": b}[role], None
                )
                masked[role] = method.operands(x, call.weight, call)[1]
            found.add(int(torch.linalg.matrix_rank(masked["lora_b"] @ masked["lora_a"])))
        ranks[unit] = found
    assert ranks["feature"] == {3}
    assert min(ranks["rank"]) < 3


def test_layers_without_an_adapter_are_left_alone_and_merged_and_disabled_adapters_run():
    model = adapted(layers_to_transform=[1])
    reg = dampen.regularize(model, LoRADropout(P))
    assert [len(layer.clones) for layer in reg.layers] == [0, 1]
    plain = llama().train()
    expected = plain(**INPUTS).logits
    with model.disable_adapter():
        torch.testing.assert_close(model(**INPUTS).logits, expected)
    torch.manual_seed(0)
    first = model(**INPUTS).logits
    assert not torch.equal(model(**INPUTS).logits, first)
    model.merge_adapter()
    assert torch.equal(model(**INPUTS).logits, model(**INPUTS).logits)


def test_with_its_own_dropout_and_several_adapters():
    """LoRA's own dropout acts besides; each adapter at work draws for itself."""
    model = adapted(lora_dropout=0.1)
    model.add_adapter(
        "other",
        peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    reg = dampen.regularize(model, LoRADropout(P))
    model.base_model.set_adapter(["default", "other"])
    model(**INPUTS).logits.square().mean().backward()
    grads = [n for n, p in model.named_parameters() if "lora_" in n and p.grad is not None]
    assert any("other" in n for n in grads)
    assert any("default" in n for n in grads)
    assert reg.clones


def test_beside_a_penalty_which_reads_the_whole_adapter():
    """ExplicitDropout of the value projection is that of W + s B A without masks."""
    values = []
    for others in ([], [LoRADropout(0.9)]):
        model = adapted(targets=["v_proj"])
        reg = dampen.regularize(
            model, [ExplicitDropout(value=1.0), *others], target_modules="*layers.0*"
        )
        _, terms = reg.loss(lambda m=model: m(**INPUTS), lambda out: out.logits.square().mean())
        values.append(terms["explicit_dropout.value"])
    torch.testing.assert_close(*values)


def test_a_seed_fixes_the_masks_and_mc_average_is_the_papers_ensemble():
    model = adapted()
    reg = dampen.regularize(model, LoRADropout(P))
    outs = []
    for _ in range(2):
        torch.manual_seed(3)
        outs.append(model(**INPUTS).logits)
    assert torch.equal(*outs)
    model.eval()
    exact = model(**INPUTS).logits
    assert torch.equal(model(**INPUTS).logits, exact)
    torch.manual_seed(4)
    averaged = reg.mc_average(lambda: model(**INPUTS).logits, samples=4)
    assert not torch.equal(averaged, exact)


def test_penalties_of_a_fused_map_know_its_columns_beside_the_adapter():
    """A fused qkv with an adapter, alone and beside LoRADropout: the penalty is that of W + s B A merged."""
    values = []
    for others in ([], [LoRADropout(0.9)], None):
        model = subject_for(LoRADropout, SUBJECTS["vit"]).model()
        if others is None:
            for block in model.blocks:
                fused = block.attn.qkv
                merged = fused.lora_B["default"].weight @ fused.lora_A["default"].weight
                fused.base_layer.weight.data += 0.5 * merged.detach()
                block.attn.qkv = fused.base_layer
        methods = [ExplicitDropout(value=1.0, query=1.0), *(others or [])]
        reg = dampen.regularize(model, methods, target_modules="blocks.0*")
        model(**SUBJECTS["vit"].inputs())
        values.append(reg.penalties())
    for name in values[2]:
        torch.testing.assert_close(values[0][name], values[2][name])
        torch.testing.assert_close(values[1][name], values[2][name])


# --- what is refused


def test_a_model_without_adapters_says_to_add_them_first():
    with pytest.raises(UnsupportedModel, match="get_peft_model"):
        dampen.regularize(llama(), LoRADropout(P))
    with pytest.raises(ValueError, match="feature, rank, module, got 'row'"):
        LoRADropout(P, unit="row")


@pytest.mark.parametrize("kind", ["dora", "torch attention"])
def test_adapters_that_do_not_run_their_maps_are_refused(kind):
    if kind == "dora":
        model = adapted(use_dora=True)
    else:
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        targets = ["self_attn", "linear1"]
        model = adapted(nn.TransformerEncoder(layer, 2), targets)
    with pytest.raises(UnsupportedModel, match="no plain LoRA"):
        dampen.regularize(model, LoRADropout(P))


def test_the_contracts_adapt_their_models_for_it():
    """Without this the contracts would run on models that the method refuses."""
    subject = subject_for(LoRADropout, SUBJECTS["vit"])
    names = [n for n, _ in subject.model().named_parameters() if "lora_A" in n]
    assert len(names) == 8
    assert not any("lora_A" in n for n, _ in SUBJECTS["vit"].model().named_parameters())
