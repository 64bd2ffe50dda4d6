"""scikit-learn's handwritten digits: 1,797 real 8 x 8 images that come with the library, so they need no download."""

from __future__ import annotations

import torch

from dampen.studies.data.dataset import Dataset, DataSpec, Request
from dampen.studies.data.files import sha256
from dampen.studies.data.images import image_dataset

DIGITS = DataSpec(
    "digits",
    "image",
    "handwritten digits: 1,797 images, 8 x 8, 10 classes; embedded in scikit-learn, works offline",
    "comes with scikit-learn (`pip install 'dampen[studies]'`)",
    "none: part of scikit-learn",
)


def load_digits(
    ask: Request,
    *,
    test_fraction: float = 0.25,
    test_limit: int | None = None,
) -> Dataset:
    """The embedded digits, with a fixed quarter as test. Gray values 0 to 16 become 0 to 255 (times 15)."""
    from sklearn.datasets import load_digits as embedded

    bunch = embedded()
    images = torch.from_numpy(bunch.images * 15).round().to(torch.uint8)[:, None]
    labels = torch.from_numpy(bunch.target).long()
    info = {
        "layout": "embedded",
        "source": "scikit-learn",
        "sha256": {
            "images": sha256(images.numpy().tobytes()),
            "labels": sha256(labels.to(torch.uint8).numpy().tobytes()),
        },
    }
    return image_dataset(
        ask.spec,
        images,
        labels,
        [str(digit) for digit in range(10)],
        info,
        test=None,
        **ask.cuts,
        test_fraction=test_fraction,
        test_limit=test_limit,
        options={"test_fraction": test_fraction},
    )
