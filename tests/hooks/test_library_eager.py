"""Models of transformers that were loaded with `eager`: their training forward takes the library's `sdpa` where both
compute the same; eval, the config and everybody who needs the matrix of weights keep `eager`. timm's `fused_attn`,
which is off in Swin or by the user, is on in training forwards likewise."""

import copy
import pickle

import pytest
import timm
import torch
import transformers as tr
from torch import nn
from transformers.modeling_utils import AttentionInterface

import dampen
from dampen import DropHead, DropKey, DropPath, ExplicitDropout, Regularizer
from tests.families import PADDING, TEXT, graphs_of_a_step, output

_SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
_KV = {"num_key_value_heads": 1, "head_dim": 8}
SWITCHED = {
    "bert": lambda: tr.BertModel(tr.BertConfig(**_SIZES)),
    "llama": lambda: tr.LlamaForCausalLM(tr.LlamaConfig(**_SIZES, num_key_value_heads=1)),
    "mistral": lambda: tr.MistralModel(
        tr.MistralConfig(**_SIZES, num_key_value_heads=1, sliding_window=3)
    ),
    "t5": lambda: tr.T5EncoderModel(
        tr.T5Config(
            vocab_size=50, d_model=16, d_kv=8, num_layers=2, num_heads=2, d_ff=24, dropout_rate=0.0
        )
    ),
}
KEPT = {
    "gemma2": lambda: tr.Gemma2Model(tr.Gemma2Config(**_SIZES, **_KV, attn_logit_softcapping=0.5)),  # a cap on scores
    "gpt_oss": lambda: tr.GptOssModel(
        tr.GptOssConfig(**_SIZES, **_KV, num_local_experts=2, num_experts_per_tok=1)  # attention sinks
    ),
    "gpt2": lambda: tr.GPT2Model(  # its own code does something else in eager
        tr.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, reorder_and_upcast_attn=True)
    ),
    "deberta": lambda: tr.DebertaModel(tr.DebertaConfig(**_SIZES)),  # has no SDPA
}  # fmt: skip


class Idle(Regularizer):
    """At work in every forward, and changes nothing."""

    stochastic = False

    def mask(self, q, k, call):
        return None

    def heads(self, o, call):
        return o


def eager(build):
    torch.manual_seed(0)
    model = build().train()
    model.set_attn_implementation("eager")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def step(model, **more):
    """One training step: what valid tokens give, and the gradients."""
    out = output(model(input_ids=TEXT, attention_mask=PADDING, **more))[PADDING.bool()]
    return out.detach(), torch.autograd.grad(
        out.square().mean(), list(model.parameters()), allow_unused=True
    )


@pytest.fixture
def calls(monkeypatch):
    """How often the library's sdpa entry is entered."""
    seen = []
    inner = AttentionInterface._global_mapping["sdpa"]

    def counted(*args, **kwargs):
        seen.append(args[0])
        return inner(*args, **kwargs)

    counted.__module__, counted.__wrapped__ = inner.__module__, inner
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", counted)
    return seen


@pytest.mark.parametrize("name", SWITCHED)
def test_training_runs_sdpa_and_computes_what_eager_does(name, calls):
    model = eager(SWITCHED[name])
    wanted = step(model)
    assert not calls
    reg = dampen.regularize(model, Idle())
    torch.testing.assert_close(step(model), wanted, rtol=1e-4, atol=1e-6)
    assert len(calls) == 2
    assert "'eager' runs as 'sdpa' in training forwards" in repr(reg)
    assert not any("computes its scores itself" in kernel for kernel in reg.kernels().values())
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", SWITCHED)
def test_rate_zero_is_the_plain_eager_model(name, calls):
    model = eager(SWITCHED[name])
    wanted = step(model)
    dampen.regularize(model, DropKey(0.0))
    torch.testing.assert_close(step(model), wanted, rtol=0, atol=0)
    assert not calls


@pytest.mark.parametrize("name", SWITCHED)
@pytest.mark.parametrize(
    "method", [DropKey(0.4), DropHead(0.5), ExplicitDropout(query=0.2, value=0.1)], ids=str
)
def test_stages_draw_as_in_the_eager_socket(name, method):
    """The same draws in the same places, whichever socket they meet."""
    results = []
    for more in ({}, {"output_attentions": True}):
        model = eager(SWITCHED[name])
        reg = dampen.regularize(model, method)
        torch.manual_seed(3)
        results.append((*step(model, **more), reg.penalty().detach()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)
    plain = step(eager(SWITCHED[name]))[0]
    assert results[0][2] > 0 or not torch.allclose(results[0][0], plain)


@pytest.mark.parametrize("name", KEPT)
def test_what_sdpa_does_not_compute_stays_eager(name, calls):
    model = eager(KEPT[name])
    wanted = step(model)
    reg = dampen.regularize(model, Idle())
    torch.testing.assert_close(step(model), wanted, rtol=1e-4, atol=1e-6)
    assert not calls
    assert "(library)" not in repr(reg)
    assert all("computes its scores itself" in kernel for kernel in reg.kernels().values())


def test_eval_and_removal_are_exact(calls):
    model = eager(SWITCHED["llama"]).eval()
    plain, classes, keys = (
        model(input_ids=TEXT).logits,
        [type(m) for m in model.modules()],
        list(model.state_dict()),
    )
    config = model.config.to_json_string()
    reg = dampen.regularize(model, DropKey(0.4))
    assert torch.equal(model(input_ids=TEXT).logits, plain)
    assert not calls
    model.train()(input_ids=TEXT)
    assert len(calls) == 2
    assert list(model.state_dict()) == keys
    assert model.config.to_json_string() == config
    assert torch.equal(model.eval()(input_ids=TEXT).logits, plain)
    reg.remove()
    assert [type(m) for m in model.modules()] == classes
    assert not any(name.startswith("_dampen") for m in model.modules() for name in vars(m))
    assert torch.equal(model(input_ids=TEXT).logits, plain)
    model.train()(input_ids=TEXT)
    assert len(calls) == 2
    assert model.config._attn_implementation == "eager"


def test_weights_that_are_asked_for_keep_eager(calls):
    model = eager(SWITCHED["bert"])
    dampen.regularize(model, DropKey(0.5))
    weights = model(input_ids=TEXT, output_attentions=True).attentions
    assert all((w == 0).any() for w in weights)
    model.config.output_attentions = True
    assert len(model(input_ids=TEXT).attentions) == 2
    model.config.output_attentions = False
    assert not calls
    model(
        input_ids=TEXT
    )  # the library's own hooks, which it leaves in place, are no reason to stay
    assert len(calls) == 2
    seen = []
    hook = model.encoder.layer[0].attention.self.register_forward_hook(
        lambda m, i, o: seen.append(o[1])
    )
    model(input_ids=TEXT)
    assert seen[0].shape == (2, 2, 7, 7)
    hook.remove()
    model(input_ids=TEXT)
    assert len(calls) == 4


def test_a_method_outside_attention_and_a_disabled_one_leave_it_alone(calls):
    model = eager(SWITCHED["llama"])
    reg = dampen.regularize(model, DropKey(0.4))
    with reg.disable():
        model(input_ids=TEXT)
    reg.remove()
    dampen.regularize(model, DropPath(0.4))
    model(input_ids=TEXT)
    assert not calls


def test_what_the_user_chooses_later_is_kept(calls):
    model = eager(SWITCHED["llama"])
    dampen.regularize(model, DropKey(0.4))
    model.set_attn_implementation("sdpa")
    model(input_ids=TEXT)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    model(input_ids=TEXT)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(IndexError):
        model(input_ids=TEXT + 100)
    assert model.config._attn_implementation == "eager"


def test_an_attention_alone_has_the_masks_of_eager(calls):
    model = eager(SWITCHED["llama"])
    x = torch.randn(2, 7, 16)
    position = model.model.rotary_emb(x, torch.arange(7)[None])
    plain = model.model.layers[0](
        x, position_embeddings=position
    )  # no mask: not causal in eager, causal in sdpa
    dampen.regularize(model, Idle())
    model(input_ids=TEXT)
    assert len(calls) == 2
    torch.testing.assert_close(model.model.layers[0](x, position_embeddings=position), plain)
    assert len(calls) == 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning"
)  # new name in 5.x
def test_checkpointing_recomputes_with_the_same_back_end(reentrant, calls):
    results = []
    for checkpointed in (False, True):
        model = eager(SWITCHED["llama"])
        if checkpointed:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": reentrant}
            )
            model.enable_input_require_grads()
        dampen.regularize(model, DropKey(0.4))
        torch.manual_seed(3)
        model(input_ids=TEXT).logits.square().mean().backward()
        results.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert len(calls) == 2 + 4  # once more in the backward pass
    assert model.config._attn_implementation == "eager"


def test_copies_are_independent(calls):
    model = eager(SWITCHED["llama"])
    dampen.regularize(model, DropKey(0.4))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before, seen = len(calls), []
        twin.model.layers[0].register_forward_hook(
            lambda *_, twin=twin, seen=seen: seen.append(
                (twin.config._attn_implementation, model.config._attn_implementation)
            )
        )
        twin(input_ids=TEXT)
        assert seen == [("sdpa", "eager")]
        assert len(calls) == before + 2
        dampen.remove(twin)
        twin(input_ids=TEXT)
        assert len(calls) == before + 2


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)  # dynamo's
def test_compiled_once():
    model = eager(SWITCHED["llama"])
    assert graphs_of_a_step(model) == 1
    assert model.config._attn_implementation == "eager"


def unfused(name):
    """A model of timm with fused_attn off everywhere, as timm.layers.set_fused_attn(False) makes it."""
    torch.manual_seed(0)
    sizes = {
        "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2},
        "eva02_tiny_patch14_224": {"img_size": 28, "patch_size": 7, "embed_dim": 24, "depth": 2, "num_heads": 2},
        "swin_tiny_patch4_window7_224": {"img_size": 32, "window_size": 4, "depths": (2, 2), "num_heads": (2, 4),
                                         "embed_dim": 16},
    }  # fmt: skip
    model = timm.create_model(name, num_classes=5, drop_path_rate=0.0, **sizes[name]).train()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    x = torch.randn(2, 3, sizes[name]["img_size"], sizes[name]["img_size"])
    return model, x


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224"],
    ids=lambda n: n[:5],
)
def test_timm_s_fused_attn_is_on_in_training_forwards_only(name):
    def train():
        out = model(x)
        return out.detach(), torch.autograd.grad(out.square().mean(), list(model.parameters()))

    model, x = unfused(name)
    attentions = [m for m in model.modules() if hasattr(m, "fused_attn")]
    wanted, plain = train(), model.eval()(x)
    model.train()
    reg = dampen.regularize(model, Idle())
    torch.testing.assert_close(train(), wanted, rtol=1e-4, atol=1e-6)
    assert not any("computes its scores itself" in kernel for kernel in reg.kernels().values())
    assert f"fused_attn=False of {len(attentions)} attentions is True in training forwards" in repr(
        reg
    )
    assert torch.equal(model.eval()(x), plain)
    assert not any(m.fused_attn for m in attentions)
    reg.remove()
    reg = dampen.regularize(model.train(), DropKey(0.4))
    assert not torch.allclose(model(x), wanted[0])
    reg.remove()
    torch.testing.assert_close(train(), wanted, rtol=0, atol=0)
    assert not any(m.fused_attn for m in attentions)
