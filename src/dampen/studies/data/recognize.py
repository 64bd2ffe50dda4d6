"""What a path holds: which reader is meant when only `--data PATH` is said."""

from __future__ import annotations

from pathlib import Path

from dampen.studies.data.arrays import is_images, read_arrays
from dampen.studies.data.errors import MissingData
from dampen.studies.data.folder import holds as holds_images
from dampen.studies.data.hub import image_column, is_saved, open_saved
from dampen.studies.data.sets import DATASETS
from dampen.studies.data.texts import ENDINGS, table_files


def recognize(path: Path) -> str:
    """The name of the reader for a path, or an error that says what could be there."""
    if not path.exists():
        raise MissingData(f"There is no file or folder {path}, and no data set of that name (dampen data list).")
    if is_saved(path):
        return "hub_images" if image_column(open_saved(path)) else "hub_text"
    if table_files(path):
        return "table"
    if path.suffix.lower() == ".npz":
        x, _ = read_arrays(path)["train"]
        if x.ndim < 3:
            raise MissingData(
                f"{path}: the inputs have shape {x.shape}. The lab's models take images (n, height, width[, channels]) "
                "or sequences (n, tokens, features)."
            )
        return "image_arrays" if is_images(x) else "feature_arrays"
    for name, source in DATASETS.items():
        if source.chosen_by_path and source.holds is not None and source.holds(path):
            return name
    if path.is_dir() and holds_images(path):
        return "folder"
    raise MissingData(
        f"{path} is none of what is recognized: a folder with one folder of images per class, "
        "a table of texts "
        f"({', '.join(ENDINGS)}, or a folder with train.csv and test.csv), an npz file of arrays, a folder that "
        "Hugging Face datasets saved, or file.py:function."
    )
