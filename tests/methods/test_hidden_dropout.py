"""HiddenDropout, the schedule of the last layer, HiddenKey, and R-Drop beyond classification."""

import pytest
import torch

import dampen
from dampen import DropKey, HiddenDropout, RDrop, hidden_key, last, regularize
from dampen.regularizer import BranchCall


def vit(depth=3):
    torch.manual_seed(0)
    return dampen.models.ViT(
        image_size=8, patch_size=4, classes=3, width=16, depth=depth, heads=2, mlp=16
    )


X = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_single_features_of_a_branch_at_the_stated_rate():
    torch.manual_seed(0)
    b = torch.ones(40, 20, 30)
    out = HiddenDropout(0.3).branch(b, BranchCall("ffn", b))
    zero = out == 0
    assert abs(zero.double().mean().item() - 0.3) < 4 * (0.21 / zero.numel()) ** 0.5
    torch.testing.assert_close(out[~zero], torch.full_like(out[~zero], 1 / 0.7))


def test_equals_the_models_own_hidden_dropout_in_law():
    """BERT's hidden_dropout_prob drops the same two places: the same spread of the output."""
    import transformers as tr

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    outputs = {}
    ids = torch.randint(1, 30, (64, 9), generator=torch.Generator().manual_seed(0))
    for own in (True, False):
        torch.manual_seed(0)
        config = tr.BertConfig(vocab_size=30, **sizes, hidden_dropout_prob=0.2 if own else 0.0,
                               attention_probs_dropout_prob=0.0)  # fmt: skip
        model = tr.BertModel(config).train()
        model.embeddings.dropout.p = 0.0
        if not own:
            regularize(model, HiddenDropout(0.2))
        torch.manual_seed(1)
        plain = model.eval()(ids).last_hidden_state
        model.train()
        outputs[own] = torch.cat(
            [(model(ids).last_hidden_state - plain).detach() for _ in range(4)]
        )
    assert outputs[True].std().item() == pytest.approx(outputs[False].std().item(), rel=0.02)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_last_layer_has_a_rate_of_its_own(depth):
    reg = regularize(vit(depth), HiddenDropout(last(0.3, rest=0.1)))
    assert [round(c.rate.item(), 6) for c in reg.clones] == [0.1] * (depth - 1) + [0.3]


def test_last_of_a_schedule_over_training():
    reg = regularize(vit(), HiddenDropout(last(dampen.linear(0.0, 0.4, along="progress"))))
    reg.progress(0.5)
    assert [round(c.rate.item(), 6) for c in reg.clones] == [0.0, 0.0, 0.2]
    assert reg.clones[0].always_idle
    assert not reg.clones[2].always_idle


def test_hidden_key_is_its_three_parts():
    model = vit()
    reg = regularize(model, hidden_key(0.2, 0.1, 0.5))
    assert [type(m) for m in reg.methods] == [DropKey, HiddenDropout, RDrop]
    assert reg.methods[0].unit == "column"
    loss, terms = reg.loss(lambda: model(X), lambda out: out.square().mean())
    loss.backward()
    assert terms["r_drop"] > 0
    assert reg.passes == 2
    assert len(hidden_key(weight=0)) == 2


def test_r_drop_for_regression_is_the_squared_distance():
    torch.manual_seed(0)
    model = vit()
    reg = regularize(model, [HiddenDropout(0.2), RDrop(0.7, distance="mse")])
    seen = []
    _, terms = reg.loss(
        lambda: seen.append(model(X)[:, :1]) or seen[-1], lambda out: out.square().mean()
    )
    torch.testing.assert_close(terms["r_drop"], 0.7 * (seen[0] - seen[1]).square().mean())
    assert terms["r_drop"] > 0


def test_r_drop_of_one_number_says_what_to_do():
    model = vit()
    reg = regularize(model, [HiddenDropout(0.2), RDrop()])
    with pytest.raises(ValueError, match=r"RDrop\(distance='mse'\)"):
        reg.loss(lambda: model(X)[:, :1], lambda out: out.square().mean())
    with pytest.raises(ValueError, match="'kl' .* or 'mse'"):
        RDrop(distance="l1")


@pytest.mark.parametrize("distance", ["kl", "mse"])
def test_r_drop_of_tokens_counts_valid_ones(distance):
    torch.manual_seed(0)
    a, b, valid = torch.randn(2, 5, 4), torch.randn(2, 5, 4), torch.ones(2, 5, dtype=torch.bool)
    valid[1, 2:] = False
    method = RDrop(1.0, distance=distance)
    method.outputs([a, b], valid)
    got = method.take_penalties()["r_drop"]
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    each = (
        (a - b).square().mean(-1)
        if distance == "mse"
        else ((p.exp() - q.exp()) * (p - q)).sum(-1) / 2
    )
    torch.testing.assert_close(got, each[valid].mean())


def test_a_rate_of_its_own_for_the_last_layer_as_text_and_for_the_head():
    """Written in a row of a table; the dropout before the head is the model's own and has a name."""
    import transformers as tr

    from dampen.studies.methods_text import build_methods, parse_rows

    (specs,) = parse_rows("hidden_dropout(rate=last(value=0.3, rest=0.1))").values()
    reg = regularize(vit(3), build_methods(specs))
    assert [round(c.rate.item(), 6) for c in reg.clones] == [0.1, 0.1, 0.3]

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = tr.RobertaForSequenceClassification(tr.RobertaConfig(vocab_size=20, **sizes))
    reg = regularize(model, HiddenDropout(0.1))
    reg.set_builtin_dropout(rate=0.4, target_modules="classifier.dropout")
    assert model.classifier.dropout.p == 0.4
    assert model.roberta.embeddings.dropout.p == 0.1
    reg.remove()
    assert model.classifier.dropout.p == 0.1
