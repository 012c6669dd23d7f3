"""Every field of a network's or a codec's configuration is checked, and named when it is wrong."""

import dataclasses
import json
import math

import pytest

from maskless.codec.vq import PixelCodec, VQConfig
from maskless.nn.causal import CausalConfig
from maskless.nn.masked import MaskedConfig
from maskless.nn.maskgit import MaskGITConfig
from maskless.nn.partition import PartitionConfig

SIZES = {"vocab": 11, "length": 10, "width": 16, "heads": 2}
COMMON = {"vocab", "length", "width", "heads", "dropout"}
CONFIGS = {
    PartitionConfig: COMMON
    | {"neighbours", "encoder", "decoder", "condition", "never", "classes", "registers", "grid"},
    MaskedConfig: COMMON | {"layers", "condition", "mask", "always_full"},
    CausalConfig: COMMON | {"layers", "condition"},
    MaskGITConfig: COMMON | {"layers", "hidden", "mask", "classes", "grid"},
    VQConfig: {"codes", "code_width", "latent", "width", "multipliers", "blocks", "channels"},
}
NETWORKS = [PartitionConfig, MaskedConfig, CausalConfig, MaskGITConfig]
WRONG = {
    "dropout": (7.5, 1.0, -0.1, math.nan, "0.1", None),
    "never": (11, 10**9, -1, 1.0, True),
    "mask": (11, 10**9, -1, 1.0, None),
    "grid": (5, (3,), (3, 3, 1), (9, 1.0), (-3, -3), ((3,), 3)),
    "registers": (1, "yes", None),
    "neighbours": (-1, 17, 1.5, "2", True, None),
    "always_full": (1, "yes", None),
    "multipliers": (2, (1, 0), (1, 2.0), (1, "2"), None),
}
SIZE = (0, -1, 1.5, 2.0, "16", True, math.nan, [4])  # what no number of things is
OPTIONAL = ("never", "classes", "grid", "hidden")


def build(config: type, **changed: object) -> object:
    more = {MaskedConfig: {"mask": 10}, MaskGITConfig: {"mask": 10, "classes": 2}}.get(config, {})
    return config(**({} if config is VQConfig else SIZES | more) | changed)


@pytest.mark.parametrize(
    ("config", "name"), [(config, name) for config, names in CONFIGS.items() for name in sorted(names)], ids=str
)
def test_every_field_is_checked(config, name):
    build(config)
    for value in WRONG.get(name, (*SIZE, *([] if name in OPTIONAL else [None]))):
        with pytest.raises(ValueError, match=name):
            build(config, **{name: value})


def test_pixels_have_whole_levels_and_channels():
    for levels, channels in ((2.5, 1), (True, 1), ("4", 1), (4, 1.0), (4, True), (4, None), (1, 1), (256, 4), (2, 0)):
        with pytest.raises(ValueError, match=f"{levels} levels of {channels} channel"):
            PixelCodec(levels, channels)


GRID = {"grid": (3, 3)}  # of nine tokens, with a BOS ten


@pytest.mark.parametrize(
    ("configs", "change", "says"),
    [
        (list(CONFIGS), {"width": 0}, "width 0 is out of range: expected 1 or more"),
        (NETWORKS, {"heads": -16}, "heads -16 is out of range: expected 1 or more"),
        ([PartitionConfig], {"encoder": 0}, "encoder 0 is out of range: expected 1 or more"),
        ([PartitionConfig], {"decoder": -1}, "decoder -1 is out of range: expected 1 or more"),
        ([MaskedConfig, CausalConfig, MaskGITConfig], {"layers": 0}, "layers 0 is out of range: expected 1 or more"),
        (NETWORKS, {"heads": 3}, "width 16 does not split into 3 heads"),
        ([PartitionConfig], {"heads": 16}, "heads of even width"),
        ([MaskedConfig, MaskGITConfig], {"mask": 11}, "mask id 11 is outside the vocabulary of 11"),
        ([PartitionConfig, MaskGITConfig], {"classes": 0}, "classes 0 is out of range"),
        ([PartitionConfig], {"grid": (3, 4)}, "length 10 does not hold a BOS and a grid of 3 x 4"),
        ([MaskGITConfig], {"grid": (3, 4)}, r"length 10 does not hold a BOS and a grid of \(3, 4\) tokens"),
        ([PartitionConfig], {"rope": "3d"}, "unknown rope '3d': expected one of 1d, 2d"),
        ([PartitionConfig], {"rope": "2d"}, "rope 2d needs a grid"),
        ([PartitionConfig], {"rope": "2d", "heads": 8, **GRID}, "a multiple of 4"),
        ([PartitionConfig], {"queries": "median"}, "unknown queries 'median': expected one of position, mean, logsum"),
        ([PartitionConfig], {"context": "sorted"}, "unknown context 'sorted': expected one of full, ordered"),
    ],
    ids=str,
)
def test_sizes_that_are_none_or_contradict_each_other_are_named(configs, change, says):
    for config in configs:
        with pytest.raises(ValueError, match=says):
            build(config, **change)


@pytest.mark.parametrize("config", [PartitionConfig, MaskGITConfig])
def test_a_config_survives_json(config):
    made = build(config, **GRID)
    assert config(**json.loads(json.dumps(dataclasses.asdict(made)))) == made
