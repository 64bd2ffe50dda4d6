"""A timm model on an image folder, compared with three regularizers by the lab's own trainer.

    python examples/timm_image_folder.py [--data FOLDER] [--model NAME] [--seeds 4] [--epochs 10]

FOLDER holds one folder of images per class (or train/, valid/, test/ with such folders). Without it, 300 of
scikit-learn's real handwritten digits are written to one, 8 x 8 pixels each: a few minutes on two cores.
The same from the shell: dampen compare --data FOLDER --model timm/NAME --methods "drop_key, drop_path, patch_dropout"
"""

import argparse
from pathlib import Path

import dampen

MODEL = "timm/vit_tiny_patch16_224(patch_size=2, depth=2, embed_dim=48, num_heads=4)"
METHODS = ["drop_key(rate=0.2)", "drop_path(rate=0.1)", "patch_dropout(rate=0.25)"]


def write_digits(folder: Path, count: int = 300) -> Path:
    """Real digits as PNG files, one folder per class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    for index, (image, label) in enumerate(zip(images[:count], labels[:count], strict=True)):
        place = folder / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image.reshape(8, 8) * 15.9).astype("uint8")).save(place / f"{index}.png")
    return folder


def compare(
    data: Path, model: str = MODEL, seeds: int = 4, epochs: int = 10, folder: str = "runs/timm"
) -> dampen.Study:
    """Number of classes, channels and image size come from the data; brackets go to `timm.create_model`."""
    settings = {"epochs": epochs, "batch_size": 32, "lr": 0.001}
    return dampen.compare(
        model=model, data=data, methods=METHODS, seeds=seeds, params=settings, folder=folder
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a folder of images, one folder per class")
    parser.add_argument("--model", default=MODEL, help="timm/NAME, with arguments in brackets")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    study = compare(
        options.data or write_digits(Path("digits")), options.model, options.seeds, options.epochs
    )
    print(study)
    study.report("timm.html")
