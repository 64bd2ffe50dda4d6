"""LoRA before and after regularize: penalties of W + s B A against the merged model, values and gradients."""

import copy

import pytest
import torch

import dampen
from dampen import AroraDropout, DropKey, ExplicitDropout, Mixout, ProjectionDropout, hidden_key
from dampen.integrations.peft import connect, lora_dropout
from dampen.regularizer import UnsupportedModel
from tests.integrations.tiny import batch, bert, llama, sentences, texts

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*")
TARGETS = ["q_proj", "v_proj", "down_proj", "up_proj"]
INPUTS = batch(texts(4))


def config(**options):
    return peft.LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=TARGETS,
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        **options,
    )


def adapted(model, **options):
    torch.manual_seed(5)
    return peft.get_peft_model(model, config(**options)).train()


@pytest.mark.parametrize("form", ["paper", "exact", "inverted"])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("order", ["lora first", "regularize first"])
def test_penalties_are_those_of_the_merged_model(form, detach, dropout, order):
    """LoRA's own dropout is no part of the map: without it in the forward the numbers are those of the merged model."""
    terms = {"value": 1.0, "ffn": 1.0, "query": 1.0}

    def method():
        return ExplicitDropout(**terms, form=form, detach_inputs=detach)

    base = llama()
    if order == "lora first":
        model = adapted(base, lora_dropout=dropout)
        merged = copy.deepcopy(model).merge_and_unload().train()
        reg = dampen.regularize(model, method())
    else:
        reg = dampen.regularize(base, method())
        model = adapted(base, lora_dropout=dropout)
        assert connect(reg) == 2 * len(TARGETS)
        plain = adapted(llama(), lora_dropout=dropout)
        merged = plain.merge_and_unload().train()
    other = dampen.regularize(merged.requires_grad_(), method())  # peft left it frozen
    if (
        dropout
    ):  # switch the noise of the forward off, keeping its place: inputs of later layers must agree
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    _, got = reg.loss(lambda: model(**INPUTS), lambda out: out.loss)
    _, expected = other.loss(lambda: merged(**INPUTS), lambda out: out.loss)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)
    for terms in (got, expected):
        sum(v for n, v in terms.items() if n != "task").backward()
    maps = {n: m for n, m in model.base_model.model.named_modules() if hasattr(m, "lora_A")}
    assert len(maps) == 2 * len(TARGETS)
    for name, lora in maps.items():  # the chain rule through W' = W + s B A
        whole, s = merged.get_submodule(name).weight.grad, lora.scaling["default"]
        a, b = lora.lora_A["default"].weight, lora.lora_B["default"].weight
        size = whole.abs().max().item()
        torch.testing.assert_close(a.grad, s * b.t() @ whole, rtol=1e-3, atol=1e-4 * size)
        torch.testing.assert_close(b.grad, s * whole @ a.t(), rtol=1e-3, atol=1e-4 * size)
    assert any(m.lora_B["default"].weight.grad.abs().max() > 0 for m in maps.values())


def test_gradients_equal_those_through_the_merged_weight():
    """Of A and B of one value projection, against autograd through W + s B A."""
    model = adapted(llama())
    reg = dampen.regularize(
        model, ExplicitDropout(value=1.0, form="exact"), target_modules="*layers.0*"
    )
    lora = model.base_model.model.model.layers[0].self_attn.v_proj
    seen = []
    lora.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    value = reg.loss(lambda: model(**INPUTS), lambda out: out.loss)[1]["explicit_dropout.value"]
    a, b = lora.lora_A["default"].weight, lora.lora_B["default"].weight
    got = torch.autograd.grad(value, [a, b])
    w, x = lora.base_layer.weight + 3.0 * b @ a, seen[0].detach()
    valid, p = INPUTS["attention_mask"].bool(), 0.2
    y, power = (x @ w.t())[valid].square().sum(), x[valid].square().sum(0) @ w.square().sum(0)
    slow = 0.5 * (p * p * y + p * (1 - p) * power) / valid.sum()
    torch.testing.assert_close(value, slow, rtol=1e-5, atol=1e-7)
    for g, e in zip(got, torch.autograd.grad(slow, [a, b]), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-7)


def test_lora_dropout_does_not_enter_the_penalty():
    model = adapted(llama(), lora_dropout=0.5)
    reg = dampen.regularize(
        model, ExplicitDropout(value=1.0, form="exact"), target_modules="*layers.0*"
    )
    values = [
        reg.loss(lambda: model(**INPUTS), lambda out: out.loss)[1]["explicit_dropout.value"]
        for _ in range(2)
    ]
    torch.testing.assert_close(values[0], values[1])  # the first layer's input has no noise in it


def test_disabled_and_merged_adapters():
    model = adapted(llama())
    plain = dampen.regularize(other := llama().train(), ExplicitDropout(value=1.0))
    expected = plain.loss(lambda: other(**INPUTS), lambda out: out.loss)[1]
    reg = dampen.regularize(model, ExplicitDropout(value=1.0))
    whole = reg.loss(lambda: model(**INPUTS), lambda out: out.loss)[1]
    with model.disable_adapter(), torch.no_grad():
        got = reg.loss(lambda: model(**INPUTS), lambda out: out.loss)[1]
    torch.testing.assert_close(got["explicit_dropout.value"], expected["explicit_dropout.value"])
    model.merge_adapter()
    with torch.no_grad():
        got = reg.loss(lambda: model(**INPUTS), lambda out: out.loss)[1]
    torch.testing.assert_close(
        got["explicit_dropout.value"], whole["explicit_dropout.value"], rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_arora_and_hidden_key(dropout):
    """The sum of a map and its adapter is no residual addition, with LoRA's dropout or without."""
    model = adapted(llama(), lora_dropout=dropout)
    reg = dampen.regularize(model, [AroraDropout(value=1.0, ffn=1.0), *hidden_key(0.2, 0.1, 1.0)])
    loss, terms = reg.loss(
        lambda: model(**INPUTS), lambda out: out.loss, valid=INPUTS["attention_mask"].bool()
    )  # fmt: skip
    loss.backward()
    assert {"arora_dropout.value", "arora_dropout.ffn", "r_drop"} <= set(terms)
    assert terms["r_drop"] > 0


def test_what_cannot_be_read_is_refused():
    with pytest.raises(UnsupportedModel, match=r"LoRA"):
        dampen.regularize(adapted(llama()), ExplicitDropout(attended_value=1.0))
    with pytest.raises(UnsupportedModel, match="nothing to mix"):
        dampen.regularize(adapted(llama()), Mixout())
    model = adapted(llama(), use_dora=True)
    reg = dampen.regularize(model, ExplicitDropout(value=1.0))
    with pytest.raises(UnsupportedModel, match="no plain LoRA"):
        reg.loss(lambda: model(**INPUTS), lambda out: out.loss)
    with pytest.raises(ValueError, match="has no LoRA layers"):
        connect(dampen.regularize(bert(), DropKey(0.1)))


def test_lora_dropout_by_pattern():
    model = adapted(llama(), lora_dropout=0.1)
    assert lora_dropout(model, {"*.q_proj": 0.0, "*layers.1.*": 0.3}) == len(TARGETS) + 1
    layers = model.base_model.model.model.layers
    assert isinstance(layers[0].self_attn.q_proj.lora_dropout["default"], torch.nn.Identity)
    assert layers[1].self_attn.q_proj.lora_dropout["default"].p == 0.3
    assert layers[0].self_attn.v_proj.lora_dropout["default"].p == 0.1
    with pytest.raises(ValueError, match="no LoRA layer matches"):
        lora_dropout(model, {"*.k_proj": 0.1})


def test_adapters_save_alone():
    """What is saved of an adapted, regularized model is what peft saves."""
    model = adapted(llama())
    keys = set(peft.get_peft_model_state_dict(model))
    dampen.regularize(model, ExplicitDropout(value=1.0))
    assert set(peft.get_peft_model_state_dict(model)) == keys


@pytest.mark.parametrize("form", ["paper", "inverted"])
@pytest.mark.parametrize("term", ["output", "residual", "ffn2"])
def test_output_and_branches_are_those_of_the_merged_model(term, form):
    """BERT's output projection lies in a wrapper of the attention, and ends a branch as the second map does."""
    torch.manual_seed(5)
    lora = peft.LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["output.dense"],
        task_type="SEQ_CLS",
        init_lora_weights=False,
    )
    model = peft.get_peft_model(bert(), lora).train()
    merged = copy.deepcopy(model).merge_and_unload().train()
    inputs, values = batch(sentences(4)), []
    for m in (model, merged):
        reg = dampen.regularize(m, ExplicitDropout(**{term: 1.0}, form=form))
        values.append(
            reg.loss(lambda m=m: m(**inputs), lambda out: out.loss)[1][f"explicit_dropout.{term}"]
        )
    torch.testing.assert_close(values[0], values[1], rtol=1e-4, atol=1e-6)


def test_projection_dropout_stays_out_of_the_adapter():
    """One mask on the input of the frozen map; the two maps of LoRA beside it are not the output projection."""
    lora = peft.LoraConfig(
        r=2, target_modules=["output.dense"], task_type="SEQ_CLS", init_lora_weights=False
    )
    model = peft.get_peft_model(bert(), lora).train()
    dampen.regularize(model, ProjectionDropout(0.5))
    dense = model.base_model.model.bert.encoder.layer[0].attention.output.dense
    x = torch.randn(2, 3, 16)
    adapter = torch.nn.Sequential(dense.lora_A["default"], dense.lora_B["default"])
    assert torch.equal(adapter(x), adapter(x))
    assert not torch.equal(dense.base_layer(x), dense.base_layer(x))
