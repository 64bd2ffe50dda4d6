"""The feature encoder, the encoder-decoder and the language model: masks, lengths, shapes."""

import pytest
import torch
from torch.nn import functional as F

from dampen.models import FeatureEncoder, LanguageModel
from dampen.models.block import Block, SeparateAttention
from reproductions.models.seq2seq import Seq2Seq, sinusoids


def encoder(**arguments):
    torch.manual_seed(0)
    sizes = {"features": 6, "classes": 5, "width": 16, "heads": 4, "mlp": 24, "max_tokens": 12}
    return FeatureEncoder(**{**sizes, **arguments}).eval()


def seq2seq(**arguments):
    torch.manual_seed(0)
    sizes = {
        "source_vocab": 11,
        "target_vocab": 13,
        "width": 16,
        "depth": 2,
        "heads": 4,
        "mlp": 24,
        "max_tokens": 12,
    }
    return Seq2Seq(**{**sizes, **arguments}).eval()


def language(**arguments):
    torch.manual_seed(0)
    return LanguageModel(
        **{"vocab": 13, "width": 16, "depth": 2, "heads": 4, "mlp": 24, "context": 12, **arguments}
    )


class TestFeatureEncoder:
    def test_shapes(self):
        x = torch.randn(3, 9, 6)
        assert encoder()(x).shape == (3, 5)
        assert encoder(per_token=True)(x).shape == (3, 9, 5)
        assert len(encoder().blocks) == 2

    @pytest.mark.parametrize("per_token", [False, True])
    @pytest.mark.parametrize("norm_first", [False, True])
    def test_padding_changes_nothing(self, per_token, norm_first):
        model = encoder(per_token=per_token, norm_first=norm_first)
        x, lengths = torch.randn(3, 9, 6), torch.tensor([4, 9, 1])
        padding = torch.arange(9) >= lengths[:, None]
        out = model(x, padding)
        other = model(torch.where(padding[..., None], 100 * torch.randn_like(x), x), padding)
        alone = [model(x[i : i + 1, :n])[0] for i, n in enumerate(lengths.tolist())]
        for i, n in enumerate(lengths.tolist()):
            part = slice(0, n) if per_token else slice(None)
            torch.testing.assert_close(out[i, part], other[i, part])
            torch.testing.assert_close(out[i, part], alone[i])

    def test_padding_alone_gives_finite_logits_and_gradients(self):
        model, x = encoder(), torch.randn(2, 4, 6, requires_grad=True)
        out = model(x, torch.ones(2, 4, dtype=torch.bool))
        torch.testing.assert_close(out, model.head.bias.expand(2, -1))
        out.square().sum().backward()
        assert torch.isfinite(x.grad).all()

    def test_errors(self):
        model, x = encoder(), torch.randn(2, 9, 6)
        with pytest.raises(ValueError, match="got 13 tokens, max_tokens is 12"):
            model(torch.randn(2, 13, 6))
        with pytest.raises(ValueError, match=r"\(batch, tokens, 6\): got shape \(2, 6, 9\)"):
            model(x.transpose(1, 2))
        with pytest.raises(TypeError, match=r"bool mask.*got dtype torch.float32"):
            model(x, torch.zeros(2, 9))
        with pytest.raises(ValueError, match=r"got shape \(2, 8\).*\(2, 9\)"):
            model(x, torch.zeros(2, 8, dtype=torch.bool))


class TestSeq2Seq:
    source = torch.tensor([[3, 4, 5, 6, 0, 0], [1, 2, 3, 4, 5, 6]])
    target = torch.tensor([[1, 7, 8, 9, 10], [1, 2, 3, 0, 0]])

    def test_shapes_and_parts(self):
        model = seq2seq()
        logits = model(self.source, self.target)
        assert logits.shape == (2, 5, 13)
        memory, padding = model.encode(self.source)
        assert memory.shape == (2, 6, 16)
        assert padding.tolist() == (self.source == 0).tolist()
        assert torch.equal(model.decode(self.target, memory, padding), logits)

    @pytest.mark.parametrize("norm_first", [False, True])
    def test_the_future_changes_nothing(self, norm_first):
        model = seq2seq(norm_first=norm_first)
        logits = model(self.source, self.target)
        for t in range(1, 5):
            changed = self.target.clone()
            changed[:, t:] = torch.randint(1, 13, (2, 5 - t))
            torch.testing.assert_close(model(self.source, changed)[:, :t], logits[:, :t])
        changed = self.target.clone()
        changed[:, 1] = 12
        assert not torch.allclose(model(self.source, changed)[:, 1:], logits[:, 1:])

    def test_padding_of_the_source_changes_nothing(self):
        model = seq2seq()
        short = model(self.source[:1, :4], self.target[:1])
        torch.testing.assert_close(model(self.source[:1], self.target[:1]), short)

    def test_padding_of_the_target_is_hidden(self):
        model = seq2seq()
        logits = model(self.source, self.target)
        with torch.no_grad():
            model.target_embed.weight[0] += 5  # the padding token's own vector
        changed = model(self.source, self.target)
        real = F.linear(
            changed, torch.eye(13)[1:]
        )  # its logit does change: the output layer is tied
        valid = self.target != 0
        torch.testing.assert_close(real[valid], logits[..., 1:][valid])

    def test_fully_padded_source_is_finite(self):
        model = seq2seq()
        logits = model(torch.zeros(2, 4, dtype=torch.long), self.target)
        logits.sum().backward()
        assert torch.isfinite(logits).all()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())

    def test_tied_output_shares_one_weight(self):
        model = seq2seq()
        assert model.head.weight is model.target_embed.weight
        free = seq2seq(tied=False)
        assert free.head.weight is not free.target_embed.weight

    def test_errors(self):
        model = seq2seq()
        with pytest.raises(ValueError, match=r"source is longer.*got 13 tokens, max_tokens is 12"):
            model(torch.ones(1, 13, dtype=torch.long), self.target[:1])
        with pytest.raises(ValueError, match="target is longer"):
            model(self.source[:1], torch.ones(1, 13, dtype=torch.long))
        with pytest.raises(ValueError, match=r"source must be token ids.*got shape \(6,\)"):
            model.encode(self.source[0])
        with pytest.raises(ValueError, match="pad=12 with 11 source"):
            seq2seq(pad=12)
        with pytest.raises(ValueError, match="width=16, heads=3"):
            seq2seq(heads=3)

    def test_sinusoids_follow_the_formula(self):
        table = sinusoids(7, 5)
        assert table.shape == (7, 5)
        for t in range(7):
            for i in range(5):
                angle = torch.tensor(t / 10000 ** ((i - i % 2) / 5))
                expected = angle.cos() if i % 2 else angle.sin()
                torch.testing.assert_close(table[t, i], expected, atol=1e-5, rtol=1e-5)


class TestLanguageModel:
    def test_the_future_changes_nothing(self):
        model, tokens = language(), torch.randint(13, (2, 10))
        logits = model(tokens)
        assert logits.shape == (2, 10, 13)
        for t in range(1, 10):
            changed = tokens.clone()
            changed[:, t:] = (tokens[:, t:] + 1) % 13
            torch.testing.assert_close(model(changed)[:, :t], logits[:, :t])
            assert not torch.allclose(model(changed)[:, t], logits[:, t])

    def test_tied_or_not(self):
        tied, free = language(), language(tied=False)
        assert tied.head.weight is tied.token_embed.weight
        count = [sum(p.numel() for p in m.parameters()) for m in (tied, free)]
        assert count[1] - count[0] == 13 * 16

    def test_errors(self):
        with pytest.raises(ValueError, match="got 13 tokens, context is 12"):
            language()(torch.zeros(1, 13, dtype=torch.long))
        with pytest.raises(ValueError, match=r"ids of shape \(batch, length\): got shape \(13,\)"):
            language()(torch.zeros(13, dtype=torch.long))


def test_cross_attention_equals_the_formula():
    torch.manual_seed(0)
    attention = SeparateAttention(8, 2).double()
    x, memory = torch.randn(2, 3, 8, dtype=torch.double), torch.randn(2, 5, 8, dtype=torch.double)
    keep = torch.rand(2, 1, 1, 5) > 0.4
    keep[..., 0] = True
    q, k, v = attention.q_proj(x), attention.k_proj(memory), attention.v_proj(memory)
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
        s = (q[..., part] @ k[..., part].transpose(1, 2) / 2).masked_fill(~keep[:, 0], -torch.inf)
        heads.append(torch.softmax(s, dim=-1) @ v[..., part])
    torch.testing.assert_close(
        attention(x, memory, keep), attention.out_proj(torch.cat(heads, dim=-1))
    )


def test_block_refuses_a_causal_switch_it_does_not_have():
    with pytest.raises(ValueError, match="causal"):
        Block(8, 2, 8, causal=True, fused=False)
