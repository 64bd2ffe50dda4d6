"""Tiny models and synthetic data for the trainers' tests. No downloads."""

import torch
import transformers as tr

import dampen
from dampen import DropKey, ExplicitDropout, RDrop

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
METHODS = {
    "plain": lambda: None,
    "stochastic": lambda: [DropKey(dampen.linear(0.4, 0.1, along="progress"))],
    "penalty": lambda: [ExplicitDropout(value=3.0, ffn=dampen.linear(5.0, 1.0, along="progress"))],
    "two_pass": lambda: [DropKey(0.3), RDrop(2.0)],
}


def bert(labels=3, seed=0, **options):
    torch.manual_seed(seed)
    return tr.BertForSequenceClassification(
        tr.BertConfig(vocab_size=30, **SIZES, **OFF, num_labels=labels, **options)
    )


def llama(seed=0):
    torch.manual_seed(seed)
    config = tr.LlamaConfig(vocab_size=30, **SIZES, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
                            pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
    return tr.LlamaForCausalLM(config)


def sentences(count=24, length=7, labels=3, seed=1):
    """Synthetic: token ids, padded at the end, with a class each."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        mask = torch.ones(length, dtype=torch.long)
        mask[length - i % 3 :] = 0
        ids = torch.randint(1, 30, (length,), generator=generator) * mask
        rows.append(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "labels": torch.tensor(int(ids.sum()) % labels),
            }
        )
    return rows


def texts(count=24, length=7, seed=1):
    """Synthetic: token ids that are their own labels, padding ignored."""
    rows = sentences(count, length, seed=seed)
    return [
        {**row, "labels": row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)}
        for row in rows
    ]


def batch(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def weights(model):
    return {n: p.detach().clone() for n, p in model.state_dict().items()}


def same(a, b, tolerance=None):
    """Equal to the bit, or within a tolerance."""
    assert a.keys() == b.keys()
    for name in a:
        if tolerance is None:
            assert torch.equal(a[name], b[name]), (
                f"{name} differs by {(a[name] - b[name]).abs().max():.3g}"
            )
        else:
            torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)
