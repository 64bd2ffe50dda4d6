"""A ModernBERT-like encoder on a classification of sequences: a tiny one with random weights, on synthetic tokens.

    dampen audit examples/modernbert.py:build
    dampen compare examples/modernbert.py:train --methods "drop_key(rate=0.1), drop_head, r_drop + drop_key(rate=0.1)"

For real: `ModernBertForSequenceClassification.from_pretrained("answerdotai/ModernBERT-base", num_labels=...)` in
`small`, and the `input_ids` and `attention_mask` of its tokenizer in `texts`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import ModernBertConfig, ModernBertForSequenceClassification

import dampen

TOKENS, LENGTH = 64, 16


def texts(count: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Synthetic: the class is whether a text has more even tokens than odd ones. Texts differ in length."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, TOKENS, (count, LENGTH), generator=draw)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count, 1), generator=draw)
    mask = torch.arange(LENGTH) < lengths
    labels = ((ids % 2 == 0) & mask).sum(1) * 2 > lengths.squeeze(1)
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}, labels.long()


def small() -> ModernBertForSequenceClassification:
    return ModernBertForSequenceClassification(ModernBertConfig(
        vocab_size=TOKENS, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, global_attn_every_n_layers=3, local_attention=8, mlp_dropout=0.1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, num_labels=2,
        attn_implementation="sdpa", reference_compile=False,
    ))  # fmt: skip


def build(batch: int = 4) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """For the audit: the model, and a batch with padding and labels."""
    inputs, labels = texts(batch, seed=0)
    return small(), {**inputs, "labels": labels}


def train(trial: dampen.Trial) -> dict[str, dict[str, float]]:
    """The usual loop; curves for `dampen audit runs/...` are logged after each epoch."""
    model = small()
    reg = trial.regularize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.params.get("lr", 2e-3))
    (x, y), epochs = texts(512, seed=1), trial.params.get("epochs", 15)
    for epoch in range(epochs):
        model.train()
        for i, rows in enumerate(batches := torch.randperm(len(y)).split(32)):
            reg.progress((epoch + i / len(batches)) / epochs)
            given = {name: values[rows] for name, values in x.items()}
            loss, terms = reg.loss(
                lambda: model(**given),  # noqa: B023
                lambda out: F.cross_entropy(out.logits, y[rows]),  # noqa: B023
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trial.log(epoch=epoch + 1, train=terms, valid=measure(model, *texts(256, seed=2)))
    return {
        "test": measure(model, *texts(512, seed=3)),
        "valid": measure(model, *texts(256, seed=2)),
    }


@torch.no_grad()
def measure(model: torch.nn.Module, x: dict[str, Tensor], y: Tensor) -> dict[str, float]:
    """Accuracy and negative log-likelihood."""
    model.eval()
    logits = model(**x).logits
    nll = F.cross_entropy(logits, y).item()
    return {"accuracy": (logits.argmax(-1) == y).float().mean().item(), "nll": nll}
