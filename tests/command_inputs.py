"""What the commands of the pages read: small texts, pictures, networks and tasks."""

import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import toy_text
from maskless.codec.text import byte_codec
from nn.reference import parameters, random_state


def text(path: Path) -> None:
    toy_text.write(path, 300, seed=0)


def documents(path: Path) -> None:
    lines = [json.dumps({"text": f"the {n} cats sat on the mat and ate all of the {n} fish . " * 4}) for n in range(60)]
    content = "\n".join(lines).encode()
    path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else content)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def photos(
    path: Path, names: Sequence[str] = ("cat", "dog"), count: int = 12, shape: tuple[int, ...] = (16, 16, 3)
) -> Path:
    """A folder with so many pictures of each class; those of an empty name have no class."""
    for seed, name in enumerate(names):
        (path / name).mkdir(parents=True)
        for number, pixels in enumerate(noise(count, *shape, seed=seed)):
            Image.fromarray(pixels).save(path / name / f"{number}.png")
    return path


def cifar10(path: Path) -> None:
    path.mkdir()
    for seed, name in enumerate(("data_batch_1", "test_batch")):
        planes = noise(20, 32, 32, 3, seed=seed).transpose(0, 3, 1, 2).reshape(20, 3072)
        labels = np.arange(20, dtype=np.uint8) % 10
        (path / f"{name}.bin").write_bytes(np.column_stack([labels, planes]).tobytes())


def picture(path: Path) -> None:
    Image.fromarray(noise(64, 64, 3)).save(path)


def mask(path: Path) -> None:
    """The left half stays."""
    Image.fromarray(np.repeat([[255, 0]], 32, 1).repeat(64, 0).astype(np.uint8)).save(path)


class Means(torch.nn.Module):
    """A feature network: what is light and what is dark in each channel, and three classes by that."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.cat([x.mean([2, 3]), x.amax([2, 3])], 1) / 64
        return found, found[:, :3]


def judge(path: Path) -> None:
    """A random causal model over bytes, as transformers keeps it."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'maskless[judge]'")
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=257, **sizes)).save_pretrained(path)
    ends = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=byte_codec().tokenizer, **ends).save_pretrained(path)


def released(path: Path) -> None:
    """A small checkpoint as the paper's authors keep theirs."""
    state = random_state(vocab=258, width=16, heads=2, condition=8, encoder=1, decoder=1)
    content = {
        "state_dict": {f"backbone.{name}": value for name, value in state.items()},
        "ema": {"shadow_params": parameters(state)},
        "hyper_parameters": {"config": {"model": {"length": 24, "swap": {"pre_query_mode": "learn+freqs"}}}},
    }
    torch.save(content, path)


def tasks(path: Path) -> None:
    """A question with options, as lm-eval reads it."""
    path.mkdir()
    question = {"ask": "the cat eats", "options": ["fish", "corn"], "right": 0}
    (path / "mine.jsonl").write_text(json.dumps(question) + "\n")
    task = {"task": "mine", "output_type": "multiple_choice", "dataset_path": "json", "test_split": "test"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(path / "mine.jsonl")}}, "doc_to_text": "{{ask}}"}
    task |= {"doc_to_choice": "{{options}}", "doc_to_target": "{{right}}", "metric_list": [{"metric": "acc"}]}
    (path / "mine.yaml").write_text(json.dumps(task))


INPUTS: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(("my.txt", "reviews.txt", "wikitext2_valid.txt"), text),
    **dict.fromkeys(("reviews.jsonl.xz", "stories.jsonl", "imdb.jsonl.xz", "novels.jsonl.xz"), documents),
    "photos": photos,
    "cifar-10-batches-bin": cifar10,
    "cat.png": picture,
    "mask.png": mask,
    "inception.pt": lambda path: torch.jit.script(Means()).save(path),
    "judge": judge,
    "pgm_8_8.ckpt": released,
    "my-tasks": tasks,
}
