"""The papers' experiments: recipes, official data sets, task models, metrics, results and pages. In no wheel.

This package is a plug-in of dampen (`dampen.studies.plugins`): recipes name it, and importing it registers what
they need. It uses public names of dampen alone.
"""

from pathlib import Path

from dampen.studies import plugins

HERE = Path(__file__).resolve().parent
SHARED = ("data", "models", "metrics", "pages")
"""Folders without recipes: their TOML files configure tools and pages."""

plugins.register(
    __name__,
    data={
        "cifar10": "reproductions.data.cifar:CIFAR10_SOURCE",
        "cifar100": "reproductions.data.cifar:CIFAR100_SOURCE",
        "digit_captions": "reproductions.data.digit_captions:DIGIT_CAPTIONS_SOURCE",
        "gtzan": "reproductions.data.gtzan:GTZAN_SOURCE",
        "fsdd": "reproductions.data.fsdd:FSDD_SOURCE",
        "thumos14": "reproductions.data.thumos:THUMOS14_SOURCE",
        "bccd": "reproductions.data.voc:BCCD_SOURCE",
        "voc": "reproductions.data.voc:VOC_SOURCE",
        "coco": "reproductions.data.coco:COCO_SOURCE",
        "multi30k": "reproductions.data.parallel:MULTI30K_SOURCE",
        "parallel": "reproductions.data.parallel:PARALLEL_SOURCE",
        "text": "reproductions.data.corpus:TEXT",
        "tinyshakespeare": "reproductions.data.corpus:SHAKESPEARE",
    },
    transforms={"noise": "reproductions.data.label_noise:LABEL_NOISE"},
    augmentations={"specaugment": "reproductions.data.spec_augment:SpecAugment"},
    models={
        "captions": "reproductions.models.caption:CaptionMatcher",
        "cnn": "reproductions.models.cnn:CNN",
        "convmixer": "reproductions.models.convmixer:ConvMixer",
        "detr": "reproductions.models.detr:DETR",
        "mae": "reproductions.models.mae:MaskedAutoencoder",
        "seq2seq": "reproductions.models.seq2seq:Seq2Seq",
    },
    tasks={
        "detection": "reproductions.metrics.tasks:DETECTION",
        "language": "reproductions.metrics.tasks:LANGUAGE",
        "objects": "reproductions.metrics.tasks:OBJECT_DETECTION",
        "reconstruction": "reproductions.metrics.tasks:RECONSTRUCTION",
        "translation": "reproductions.metrics.tasks:TRANSLATE",
    },
    diagnoses={
        "robustness": "reproductions.diagnostics.sections:ROBUSTNESS",
        "corruptions": "reproductions.diagnostics.sections:CORRUPTIONS",
        "attention_maps": "reproductions.diagnostics.sections:ATTENTION_MAPS",
    },
    figures={
        "grid": "reproductions.figures.grid:grid",
        "detections": "reproductions.figures.detections:detections",
        "conditioning": "reproductions.figures.conditioning:conditioning",
        "training": "reproductions.figures.conditioning:conditioning_over_training",
        "variance": "reproductions.figures.gradient_variance:gradient_variance",
        "attention": "reproductions.figures.attention_maps:attention_maps",
        "attacks": "reproductions.figures.robustness:attacks",
        "corruptions": "reproductions.figures.robustness:corruptions",
    },
    recipes={
        path.relative_to(HERE).with_suffix("").as_posix(): path
        for path in sorted(HERE.glob("*/*.toml"))
        if path.parent.name not in SHARED
    },
)
