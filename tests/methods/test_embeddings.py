"""The stage embeddings: NEFTune and EmbeddingDropout on the output of the right module, in every library."""

import pytest
import timm
import torch
import transformers as tr
from torch import nn

import dampen
from dampen import EmbeddingDropout, NEFTune, regularize
from dampen.hooks.model import find_embeddings
from dampen.regularizer import Regularizer, UnsupportedModel
from tests.families import FAMILIES, IMAGES, PADDING, TEXT, output
from tests.oracles.stochastic import neftune_bound

EMBEDDINGS = {
    "own_vit": ["patch_embed"], "own_language": ["token_embed"], "own_seq2seq": ["source_embed", "target_embed"],
    "timm_vit": ["patch_embed"], "timm_swin": ["patch_embed"], "hf_vit": ["vit.embeddings.patch_embeddings"],
    "hf_bert": ["bert.embeddings.word_embeddings"], "hf_gpt2": ["transformer.wte"], "hf_llama": ["model.embed_tokens"],
}  # fmt: skip


class Watch(Regularizer):
    """Keeps what it was shown."""

    stochastic = False

    def __init__(self):
        super().__init__()
        self.seen = []

    def embeddings(self, x, valid=None):
        self.seen.append((x, valid))
        return x


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_the_embedding_is_found_and_seen(name):
    family = FAMILIES[name]
    model = family.model()
    assert list(find_embeddings(model)) == EMBEDDINGS[name]
    seen = []
    for where in EMBEDDINGS[name]:
        model.get_submodule(where).register_forward_hook(lambda m, args, out: seen.append(out))
    reg = regularize(model, Watch())
    model(**family.inputs)
    assert len(reg.clones[0].seen) == len(EMBEDDINGS[name])
    assert all(a[0] is b for a, b in zip(reg.clones[0].seen, seen, strict=True))
    valid = reg.clones[0].seen[0][1]
    if name in ("hf_bert", "hf_llama", "hf_gpt2"):
        assert torch.equal(valid, PADDING.bool())
    reg.remove()
    model(**family.inputs)
    assert len(seen) == 2 * len(EMBEDDINGS[name])


@pytest.mark.parametrize("name", [*EMBEDDINGS, "hf_t5", "hf_wav2vec2", "hf_albert", "own_encoder"])
@pytest.mark.parametrize("make", [NEFTune, lambda: EmbeddingDropout(0.4)])
def test_every_family_is_perturbed_in_training_and_plain_in_eval(name, make):
    family = FAMILIES[name]
    model = family.model()
    plain = output(model.eval()(**family.inputs)).detach()
    reg = regularize(model, make())
    assert torch.equal(output(model(**family.inputs)), plain)
    torch.manual_seed(0)
    with reg.mc_mode():
        assert not torch.allclose(output(model(**family.inputs)), plain)


def test_t5_knows_which_mask_is_whose():
    """Encoder and decoder of the same length, with paddings of their own."""
    model = FAMILIES["hf_t5"].model()
    other = torch.tensor([[1] * 3 + [0] * 4, [1] * 7])
    reg = regularize(model, Watch())
    model(
        input_ids=TEXT, attention_mask=PADDING, decoder_input_ids=TEXT, decoder_attention_mask=other
    )
    masks = [valid for _, valid in reg.clones[0].seen]
    assert len(masks) == 2
    assert torch.equal(masks[0], PADDING.bool())
    assert torch.equal(masks[1], other.bool())


def test_neftune_noise_has_the_papers_size_and_spares_padding():
    torch.manual_seed(0)
    x, valid = torch.randn(2, 50, 40), torch.ones(2, 50, dtype=torch.bool)
    valid[1, 20:] = False
    noise = NEFTune(5.0).embeddings(x, valid) - x
    bound = neftune_bound(5.0, valid, 40).unsqueeze(-1)
    assert (noise.abs() <= bound + 1e-6).all()
    assert (noise[1, 20:] == 0).all()
    for b in range(2):  # uniform: the norm is about alpha / sqrt(3)
        assert noise[b].norm().item() == pytest.approx(5 / 3**0.5, rel=0.05)
        assert (
            abs(noise[b][valid[b]].mean().item())
            < 4 * bound[b].max().item() / (3 * valid[b].sum() * 40) ** 0.5
        )


def transformers_own():
    """The hook of transformers itself, which older versions keep elsewhere."""
    try:
        from transformers.integrations.neftune import neftune_post_forward_hook
    except ModuleNotFoundError:
        from transformers.trainer_utils import neftune_post_forward_hook
    return neftune_post_forward_hook


def test_neftune_equals_transformers_own_without_padding():
    """The same law: same bound, and the same spread of the output."""
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 64)
    ids = torch.randint(0, 10, (8, 32))
    plain = embedding(ids)
    ours = NEFTune(7.0).embeddings(plain) - plain
    embedding.neftune_noise_alpha = 7.0
    theirs = transformers_own()(embedding, (ids,), plain) - plain
    assert ours.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=1e-2)
    assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.03)


def test_neftune_refuses_beside_transformers_own():
    model = FAMILIES["hf_llama"].model()
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = 5.0
    embedding.register_forward_hook(transformers_own())
    with pytest.raises(UnsupportedModel, match="neftune_noise_alpha"):
        regularize(model, NEFTune())


def test_embedding_dropout_rate_and_mean():
    torch.manual_seed(0)
    x = torch.ones(100, 30, 10)
    out = EmbeddingDropout(0.3).embeddings(x)
    assert abs((out == 0).double().mean().item() - 0.3) < 4 * (0.21 / 30000) ** 0.5
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / 0.7))


def test_positions_stay_whole():
    model = dampen.models.LanguageModel(20, context=8, width=16, depth=1, heads=2, mlp=16).train()
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    regularize(model, EmbeddingDropout(0.5))
    with torch.no_grad():
        model.token_embed.weight.fill_(1.0)
        model(torch.randint(0, 20, (4, 8)))
    rest = seen[0] - model.pos_embed.weight[:8]
    assert (
        torch.isclose(rest, torch.zeros(()))
        .logical_or(torch.isclose(rest, torch.full((), 2.0)))
        .all()
    )


def test_two_passes_differ_and_nothing_is_shared():
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=3,
    ).train()
    reg = regularize(model, [NEFTune(5.0), dampen.RDrop(1.0)])
    _, terms = reg.loss(lambda: model(IMAGES), lambda out: out.square().mean())
    assert terms["r_drop"] > 0
    assert "perturbs the input" in repr(reg)


def test_a_model_without_embedding_is_refused():
    """DETR's tokens come from a convolutional backbone; a bare block has none."""
    for model in (FAMILIES["hf_detr"].model(), nn.TransformerEncoderLayer(16, 2)):
        with pytest.raises(UnsupportedModel, match="no input embedding"):
            regularize(model, NEFTune())


def test_sentence_transformer_like_models_give_a_dict():
    """A wrapper that is called with a dict of features."""

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.auto_model = tr.BertModel(
                tr.BertConfig(
                    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
                )
            )

        def forward(self, features):
            return self.auto_model(**features).last_hidden_state

    model = Wrapper().train()
    reg = regularize(model, Watch())
    model({"input_ids": TEXT, "attention_mask": PADDING})
    assert torch.equal(reg.clones[0].seen[0][1], PADDING.bool())
