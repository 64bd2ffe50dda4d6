"""Speech recognition with a Whisper-like model: a tiny one with random weights, on synthetic tones.

    dampen audit examples/speech_whisper.py:build
    dampen compare examples/speech_whisper.py:train --methods "drop_key(rate=0.1), drop_path(rate=0.1), layer_drop"

For real: `WhisperForConditionalGeneration.from_pretrained("openai/whisper-small")` in `small`, log-mel features of its
`WhisperProcessor` for `x`, and the tokens of your transcripts for `y`.
"""

import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

import dampen

MELS, FRAMES, LETTERS, LENGTH = 16, 48, 12, 4
START = LETTERS


def tones(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Synthetic: each letter is a bump at one mel band for a twelfth of a second, in noise."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(LETTERS, (count, LENGTH), generator=draw)
    bands = torch.arange(MELS).view(1, MELS, 1) - y.repeat_interleave(
        FRAMES // LENGTH, 1
    ).unsqueeze(1)
    return torch.exp(-bands.float().square()) + 0.3 * torch.randn(
        count, MELS, FRAMES, generator=draw
    ), y


def small() -> WhisperForConditionalGeneration:
    return WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=LETTERS + 1, num_mel_bins=MELS, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=FRAMES // 2, max_target_positions=8, dropout=0.1,
        pad_token_id=START, bos_token_id=START, eos_token_id=START, decoder_start_token_id=START,
    ))  # fmt: skip


def build(batch: int = 4) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """For the audit: the model, and a batch with its labels."""
    x, y = tones(batch, seed=0)
    return small(), {"input_features": x, "labels": y}


def train(trial: dampen.Trial) -> dict[str, dict[str, float]]:
    """The usual loop; curves for `dampen audit runs/...` are logged after each epoch."""
    model = small()
    reg = trial.regularize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.params.get("lr", 3e-3))
    (x, y), epochs = tones(128, seed=1), trial.params.get("epochs", 12)
    for epoch in range(epochs):
        model.train()
        for i, batch in enumerate(batches := torch.randperm(len(x)).split(16)):
            reg.progress((epoch + i / len(batches)) / epochs)
            loss, terms = reg.loss(
                lambda: model(input_features=x[batch], labels=y[batch]),  # noqa: B023
                lambda out: out.loss,
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trial.log(epoch=epoch + 1, train=terms, valid=measure(model, *tones(64, seed=2)))
    return {
        "test": measure(model, *tones(256, seed=3)),
        "valid": measure(model, *tones(64, seed=2)),
    }


@torch.no_grad()
def measure(model: torch.nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Share of letters that are right, and the mean loss."""
    model.eval()
    out = model(input_features=x, labels=y)
    return {"accuracy": (out.logits.argmax(-1) == y).float().mean().item(), "nll": out.loss.item()}
