"""Back ends of transformers' attention registry that hide the scores: they stay in training forwards where no method
needs a mask by query or the matrix, else SDPA runs. Eval runs what was requested, and nothing is left behind. Flex and
flash themselves need CUDA and are stood in for here."""

import copy
import io

import pytest
import torch
import transformers as tr
from torch.nn import functional as F
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import dampen
from dampen import DropHead, DropKey, DropPath, ExplicitDropout
from tests.families import PADDING, TEXT, graphs_of_a_step, output

_SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
HIDDEN = [
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "kernels-community/flash-attn2",
]


def llama(implementation="sdpa", **more):
    torch.manual_seed(0)
    config = tr.LlamaConfig(vocab_size=50, **_SIZES, num_key_value_heads=1, **more)
    return loaded(tr.LlamaForCausalLM(config).train(), implementation)


def bert(implementation="sdpa"):
    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return loaded(
        tr.BertModel(tr.BertConfig(vocab_size=50, **_SIZES, **none)).train(), implementation
    )


def mistral(implementation="sdpa"):
    torch.manual_seed(0)
    config = tr.MistralConfig(vocab_size=50, **_SIZES, num_key_value_heads=1, sliding_window=3)
    return loaded(tr.MistralForCausalLM(config).train(), implementation)


def gemma2(implementation="eager"):
    torch.manual_seed(0)
    config = tr.Gemma2Config(
        vocab_size=50, **_SIZES, num_key_value_heads=1, head_dim=8, attn_logit_softcapping=0.5
    )
    return loaded(tr.Gemma2Model(config).train(), implementation)


def gpt_oss(implementation="eager"):
    torch.manual_seed(0)
    config = tr.GptOssConfig(vocab_size=50, **_SIZES, num_key_value_heads=1, head_dim=8, num_local_experts=2,
                             num_experts_per_tok=1)  # fmt: skip
    return loaded(tr.GptOssModel(config).train(), implementation)


def loaded(model, implementation):
    """As a machine with the right hardware has it: the library refuses to load flash attention without its package."""
    model.config._attn_implementation = implementation
    return model


def step(model, method, seed=3):
    """One training step: output, penalties and gradients."""
    reg = dampen.regularize(model, method)
    torch.manual_seed(seed)
    out = output(model(input_ids=TEXT, attention_mask=PADDING))[PADDING.bool()]
    loss = out.square().mean() + reg.penalty()
    gradients = torch.autograd.grad(
        loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True
    )
    return reg, out.detach(), gradients


@pytest.mark.parametrize("implementation", HIDDEN)
@pytest.mark.parametrize("build", [llama, bert, mistral], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "method", [DropKey(0.4), ExplicitDropout(joint=0.1, form="inverted")], ids=("DropKey", "joint")
)
def test_training_is_the_sdpa_model_s(implementation, build, method):
    _, wanted, wanted_gradients = step(build(), method)
    model = build(implementation)
    reg, got, gradients = step(model, method)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=0, atol=0)
    assert model.config._attn_implementation == implementation
    assert implementation in repr(reg)


@pytest.mark.parametrize("build", [gemma2, gpt_oss], ids=lambda f: f.__name__)
def test_what_sdpa_has_no_place_for_is_run_eagerly(build):
    """A cap on scores and attention sinks would be lost in SDPA."""
    _, wanted, wanted_gradients = step(build(), DropKey(0.4))
    _, got, gradients = step(build("flex_attention"), DropKey(0.4))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=0, atol=0)


def stand_in(
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs
):
    """What flash attention computes, where the tests can count its calls. Padding is (B, M)."""
    stand_in.calls += 1
    heads, tokens = query.shape[1] // key.shape[1], key.shape[2]
    key, value = (t.repeat_interleave(heads, 1) for t in (key, value))
    far = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = (far >= 0) if module.is_causal else torch.ones(tokens, tokens, dtype=torch.bool)
    if sliding_window is not None:
        seen = seen & (far < sliding_window)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None].bool()
    out = F.scaled_dot_product_attention(query, key, value, seen, scale=scaling)
    return out.transpose(1, 2), None


def flex_stand_in(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """What flex_attention computes: its padding is in a BlockMask."""
    stand_in.calls += 1
    mod, tokens = attention_mask.mask_mod, torch.arange(key.shape[2])
    heads = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(heads, 1) for t in (key, value))
    seen = torch.stack(
        [mod(torch.tensor(b), 0, tokens[:, None], tokens) for b in range(query.shape[0])]
    )[:, None]
    out = F.scaled_dot_product_attention(query, key, value, seen, scale=scaling)
    return out.transpose(1, 2), None


@pytest.fixture
def flash(monkeypatch):
    """flash_attention_2 in the registry as something that runs here."""
    stand_in.calls = 0
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", stand_in)
    assert ALL_ATTENTION_FUNCTIONS["flash_attention_2"] is stand_in
    return stand_in


STAYING = [DropHead(0.5), ExplicitDropout(query=0.2, value=0.1, output=0.1, ffn=0.1)]


@pytest.mark.parametrize("build", [llama, bert, mistral], ids=lambda f: f.__name__)
@pytest.mark.parametrize("method", STAYING, ids=lambda m: m.name)
def test_flash_attention_stays(flash, build, method):
    """The output, the penalties and the gradients are the SDPA model's, under padding too."""
    _, wanted, wanted_gradients = step(build(), method)
    assert flash.calls == 0
    model = build("flash_attention_2")
    reg, got, gradients = step(model, method)
    assert flash.calls == 2
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=0, atol=1e-6)
    assert "'flash_attention_2' stays in training forwards" in str(reg)
    assert "stand_in of the model (no method needs a mask by query or the matrix)" in str(reg)
    reg.remove()
    assert AttentionInterface._global_mapping["flash_attention_2"] is flash


@pytest.mark.parametrize("build", [llama, bert, mistral], ids=lambda f: f.__name__)
def test_whole_keys_are_hidden_inside_flash_attention(flash, build):
    plain = output(build()(input_ids=TEXT, attention_mask=PADDING)).detach()[PADDING.bool()]
    reg, got, _ = step(build("flash_attention_2"), DropKey(1e-9, unit="column"))
    torch.testing.assert_close(got, plain, rtol=0, atol=1e-6)
    assert flash.calls == 2
    assert "whole keys hidden by more channels" in str(reg)
    _, got, gradients = step(build("flash_attention_2"), DropKey(0.5, unit="column"))
    assert not torch.allclose(got, plain, atol=1e-3)
    assert all(g.isfinite().all() for g in gradients if g is not None)


@pytest.mark.parametrize(
    ("method", "stays"),
    [(DropHead(0.5), True), (DropKey(0.4, unit="column"), True), (DropKey(0.4), False),
     (ExplicitDropout(query=0.2, value=0.1), False)],
    ids=str,
)  # fmt: skip
def test_flex_attention_stays_where_no_method_asks_for_padding(monkeypatch, method, stays):
    monkeypatch.setitem(AttentionInterface._global_mapping, "flex_attention", flex_stand_in)
    build = masking_utils.create_block_mask  # the library compiles it, which takes long on a CPU
    monkeypatch.setattr(
        masking_utils, "create_block_mask", lambda _compile, **kwargs: build(**kwargs)
    )
    stand_in.calls = 0
    _, wanted, _ = step(llama(), method)
    _, got, _ = step(llama("flex_attention"), method)
    assert stand_in.calls == 2 * stays
    if method.name != "drop_key":
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_one_method_that_needs_the_matrix_switches_for_all(flash):
    model = llama("flash_attention_2")
    reg = dampen.regularize(model, [DropHead(0.5), DropKey(0.4)])
    model(input_ids=TEXT)
    assert flash.calls == 0
    assert "'flash_attention_2' runs as 'sdpa'" in str(reg)


def test_heads_too_wide_for_more_channels_switch(flash):
    model = llama("flash_attention_2", head_dim=256)
    dampen.regularize(model, DropKey(0.4, unit="column"))
    model(input_ids=TEXT)
    assert flash.calls == 0


def test_eval_and_removal_are_untouched(flash):
    model = llama("flash_attention_2").eval()
    plain = model(input_ids=TEXT).logits
    classes, keys = [type(m) for m in model.modules()], list(model.state_dict())
    flash.calls = 0
    reg = dampen.regularize(model, DropKey(0.4))
    assert torch.equal(model(input_ids=TEXT).logits, plain)
    assert flash.calls == 2
    model.train()(input_ids=TEXT)
    assert flash.calls == 2, "the training forward of a regularized model runs SDPA"
    assert list(model.state_dict()) == keys
    reg.remove()
    assert [type(m) for m in model.modules()] == classes
    assert not any(name.startswith("_dampen") for m in model.modules() for name in vars(m))
    assert torch.equal(model.eval()(input_ids=TEXT).logits, plain)
    assert model.config._attn_implementation == "flash_attention_2"


def test_forwards_without_a_method_at_work_keep_the_back_end(flash):
    model = llama("flash_attention_2")
    reg = dampen.regularize(model, DropKey(0.4))
    with reg.disable():
        model(input_ids=TEXT)
    assert flash.calls == 2
    reg.remove()
    dampen.regularize(
        model, DropPath(0.4)
    )  # it acts on branches: the kernel inside them is the model's own affair
    model(input_ids=TEXT)
    assert flash.calls == 4


def test_an_error_gives_the_back_end_back():
    model = llama("flex_attention")
    dampen.regularize(model, DropKey(0.4))
    with pytest.raises(IndexError):
        model(input_ids=TEXT + 100)
    assert model.config._attn_implementation == "flex_attention"


def test_a_part_that_prepares_masks_may_be_entered_and_others_say_so():
    model = llama("flex_attention")
    dampen.regularize(model, DropKey(0.4))
    torch.manual_seed(1)
    inner = model.model(input_ids=TEXT).last_hidden_state
    reference = llama()
    dampen.regularize(reference, DropKey(0.4))
    torch.manual_seed(1)
    assert torch.equal(inner, reference.model(input_ids=TEXT).last_hidden_state)
    x = torch.randn(2, 7, 16)
    position = model.model.rotary_emb(x, torch.arange(7)[None])
    with pytest.raises(
        RuntimeError,
        match=r"without the model around it, so its masks are those of 'flex_attention'",
    ):
        model.model.layers[0](x, position_embeddings=position)
    assert model.config._attn_implementation == "flex_attention"


def test_a_mask_of_flex_is_refused():
    from torch.nn.attention.flex_attention import create_block_mask

    model = llama("flex_attention")
    dampen.regularize(model, DropKey(0.4))
    mask = create_block_mask(lambda b, h, q, k: q >= k, 2, None, 7, 7, device="cpu")
    with pytest.raises(RuntimeError, match="got a BlockMask"):
        model(input_ids=TEXT, attention_mask=mask)


@pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning"
)  # new name in 5.x
def test_checkpointing_recomputes_with_the_same_back_end():
    _, wanted, wanted_gradients = step(llama("flash_attention_2"), DropKey(0.4))
    model = llama("flash_attention_2")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, got, gradients = step(model, DropKey(0.4))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=0, atol=0)
    assert model.config._attn_implementation == "flash_attention_2"


def test_copies_have_configs_of_their_own(flash):
    model = llama("flash_attention_2")
    dampen.regularize(model, DropKey(0.4))
    twin = copy.deepcopy(model)
    seen = []
    twin.model.layers[0].register_forward_hook(
        lambda *_: seen.append(
            (twin.config._attn_implementation, model.config._attn_implementation)
        )
    )
    twin(input_ids=TEXT)
    assert seen == [("sdpa", "flash_attention_2")]
    assert flash.calls == 0
    dampen.remove(twin)
    twin(input_ids=TEXT)
    assert flash.calls == 2


def test_saved_models_find_the_back_end_again(flash):
    model = llama("flash_attention_2")
    dampen.regularize(model, DropHead(0.4))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.load(file, weights_only=False)(input_ids=TEXT)
    assert flash.calls == 2


def test_a_back_end_of_the_user_s_own_is_entered_where_it_calls_sdpa(monkeypatch):
    """Only the library's own hidden back ends are switched: what a user has registered computes what it computes."""
    stand_in.calls = 0
    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", stand_in)
    model = llama("mine")
    reg = dampen.regularize(model, DropKey(0.4))
    model(input_ids=TEXT)
    assert stand_in.calls == 2
    assert reg.kernels()


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)  # dynamo's
def test_compiled_once():
    model = llama("flex_attention")
    assert graphs_of_a_step(model) == 1
    assert model.config._attn_implementation == "flex_attention"
