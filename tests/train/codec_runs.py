"""Pictures to train a codec on in no time, the settings of such a run, and what it noted."""

import io
from pathlib import Path

import numpy as np
from rich.console import Console

from maskless.train.codec import configure, train_codec
from maskless.train.codec_loop import CodecConfig
from maskless.train.report import read_metrics

TINY = {"codes": 24, "code_width": 4, "latent": 8, "width": 32, "blocks": 1}
QUICK = {"steps": 10, "batch": 4, "learning_rate": 2e-3, "warmup": 2, "ema": 0.5, "revive_after": 4, "seed": 5}
QUICK |= {"adversarial_start": 0.3, "entropy": 0.05, "evaluate_every": 0, "save_every": 3, "log_every": 1}


def blobs(count: int, height: int = 8, width: int = 8) -> np.ndarray:
    """A disc of one grey on another, anywhere."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    images = np.empty((count, height, width, 3), np.uint8)
    for image in images:
        inside = (y - random.uniform(0, height)) ** 2 + (x - random.uniform(0, width)) ** 2 < 9
        image[:] = np.where(inside, random.integers(0, 256), random.integers(0, 256))[..., None]
    return images


def quick_config(images: str, **changed) -> CodecConfig:
    return configure(Path("absent"), [images], factor=2, codec=TINY, **QUICK | changed)


def complete(folder: Path, config: CodecConfig) -> Path:
    train_codec(folder, config, Console(file=io.StringIO()))
    return folder


CLOCKED = ("seconds", "tokens_per_second_per_device", "tflops_per_device")


def lines(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in CLOCKED} for line in read_metrics(folder / "metrics.jsonl")]
