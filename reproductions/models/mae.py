"""A small masked autoencoder: pretrain a ViT by letting it guess hidden patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dampen.models import Block, ViT, initialize, patchify
from dampen.studies.plugins import Batch, Dataset, Split, derive


class Reconstruction(NamedTuple):
    """What a masked autoencoder returns."""

    loss: Tensor  # mean squared error on hidden patches, 0-d
    patches: (
        Tensor  # (B, N, C * ph * pw) guessed patches, in normalized pixels if the model normalizes
    )
    hidden: Tensor  # (B, N) bool, True where a patch was hidden


class MaskedAutoencoder(nn.Module):
    """Hide most patches, encode the rest with a ViT, guess the hidden pixels with a light decoder.

    After He et al. (arXiv 2111.06377): random hiding per image, the encoder sees visible patches
    only, the loss is the squared error on hidden patches, each patch normalized to zero mean and
    unit variance (`normalize=True`). Hiding draws from torch's global generator in training and in
    eval; give `noise` (B, N) to fix it: the patches with the largest noise are hidden.
    `to_classifier` takes the pretrained encoder into a `ViT` for fine-tuning.

    >>> import torch
    >>> encoder = {"width": 32, "depth": 1, "heads": 2, "mlp": 32}
    >>> decoder = {f"decoder_{key}": size for key, size in encoder.items()}
    >>> mae = MaskedAutoencoder(image_size=8, patch_size=2, channels=1, **encoder, **decoder)
    >>> loss, patches, hidden = mae(torch.rand(3, 1, 8, 8))
    >>> patches.shape, hidden.sum(dim=1).tolist()
    (torch.Size([3, 16, 4]), [12, 12, 12])
    >>> mae.to_classifier(classes=10)(torch.rand(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """

    task = "reconstruction"
    takes = ("image",)

    def __init__(
        self,
        image_size: int | tuple[int, int] = 32,
        patch_size: int | tuple[int, int] = 4,
        channels: int = 3,
        width: int = 192,
        depth: int = 6,
        heads: int = 6,
        mlp: int = 384,
        decoder_width: int = 96,
        decoder_depth: int = 2,
        decoder_heads: int = 3,
        decoder_mlp: int = 192,
        hide: float = 0.75,
        normalize: bool = True,
    ):
        super().__init__()
        self.encoder_arguments = {
            "image_size": image_size,
            "patch_size": patch_size,
            "channels": channels,
            "width": width,
            "depth": depth,
            "heads": heads,
            "mlp": mlp,
        }
        self.encoder = ViT(image_size, patch_size, channels, 0, width, depth, heads, mlp)
        n = self.encoder.patch_embed.num_patches or 0
        self.visible = n - round(n * hide)
        if not 0 < self.visible < n:
            raise ValueError(
                f"At least one patch must be hidden and one visible: got hide={hide} of {n} "
                "patches. "
                f"Choose hide between {1 / n:.3g} and {1 - 1 / n:.3g}."
            )
        self.normalize = normalize
        self.decoder_embed = nn.Linear(width, decoder_width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_width))
        self.decoder_pos = nn.Parameter(torch.zeros(1, n, decoder_width))
        self.decoder = nn.ModuleList(
            Block(decoder_width, decoder_heads, decoder_mlp) for _ in range(decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(decoder_width)
        ph, pw = self.encoder.patch_embed.patch_size
        self.pixels = nn.Linear(decoder_width, channels * ph * pw)
        for module in (self.decoder_embed, self.decoder, self.pixels):
            initialize(module)
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.normal_(self.decoder_pos, std=0.02)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Reconstruction:
        tokens = self.encoder.embed(images)
        b, n, _ = tokens.shape
        if noise is None:
            noise = torch.rand(b, n, device=tokens.device)
        elif noise.shape != (b, n):
            raise ValueError(
                f"noise must hold one number per patch, shape {(b, n)}: got {tuple(noise.shape)}."
            )
        order = noise.argsort(dim=1)
        rank = order.argsort(dim=1)  # rank[b, i]: place of patch i in the shuffled order
        hidden = rank >= self.visible

        x = self.encoder.encode(_pick(tokens, order[:, : self.visible]))
        patches = self._decode(x, rank)
        target = self.target(images)
        error = (patches.float() - target.float()).square().mean(dim=-1)  # (B, N)
        # Every image hides the same number of patches, so the masked mean needs no per-image count.
        loss = (error * hidden).sum() / (b * (n - self.visible))
        return Reconstruction(loss, patches, hidden)

    def target(self, images: Tensor) -> Tensor:
        """The patches to guess (B, N, C * ph * pw), normalized one by one unless switched off."""
        patches = patchify(images, self.encoder.patch_embed.patch_size)
        if not self.normalize:
            return patches
        mean, var = patches.mean(dim=-1, keepdim=True), patches.var(dim=-1, keepdim=True)
        return (patches - mean) / (var + 1e-6).sqrt()

    def prepare(self, data: Dataset) -> Dataset:
        """The same images, to be guessed. Validation and test hide the same patches every time."""
        patches = self.encoder.patch_embed.num_patches or 0
        valid, test = (
            FixedHiding(getattr(data, name), patches, name) for name in ("valid", "test")
        )
        return replace(data, task="reconstruction", loss="task", valid=valid, test=test)

    @staticmethod
    def load_encoder(classifier: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Copy the encoder out of an autoencoder's state into a `ViT` of the same shape; its head
        stays as it is.
        """
        encoder = {
            k.removeprefix("encoder."): v for k, v in weights.items() if k.startswith("encoder.")
        }
        fresh = {k: v for k, v in classifier.state_dict().items() if k.startswith("head.")}
        classifier.load_state_dict({**encoder, **fresh})

    def to_classifier(self, classes: int, pool: str = "cls") -> ViT:
        """A new `ViT` with this encoder's weights (copied) and a fresh head."""
        model = ViT(classes=classes, pool=pool, **self.encoder_arguments)  # type: ignore[arg-type]
        self.load_encoder(model, self.state_dict())
        return model.to(self.mask_token.device)

    def _decode(self, x: Tensor, rank: Tensor) -> Tensor:
        x = self.decoder_embed(x)
        prefix, seen = x[:, :1], x[:, 1:]
        unseen = self.mask_token.to(x.dtype).expand(x.shape[0], rank.shape[1] - self.visible, -1)
        patches = (
            _pick(torch.cat([seen, unseen], dim=1), rank) + self.decoder_pos
        )  # back in the image's order
        x = torch.cat([prefix.to(patches.dtype), patches], dim=1)
        for block in self.decoder:
            x = block(x)
        out: Tensor = self.pixels(self.decoder_norm(x[:, 1:]))
        return out


class FixedHiding(Split):
    """Images with the numbers that decide which of their patches are hidden."""

    def __init__(self, images: Split, patches: int, name: str):
        generator = torch.Generator().manual_seed(derive(0, "hide", name))
        self.images, self.noise = images, torch.rand(len(images), patches, generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def gather(self, indices: Tensor) -> Batch:
        batch = self.images.gather(indices)
        return {**batch, "inputs": (*batch["inputs"], self.noise[indices])}


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of x (B, N, D) at index (B, K): (B, K, D)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
