"""Every field of a network's or a codec's configuration is checked, and named when it is wrong."""

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
    PartitionConfig: COMMON | {"encoder", "decoder", "condition", "never", "classes", "registers", "grid"},
    MaskedConfig: COMMON | {"layers", "condition", "mask", "always_full"},
    CausalConfig: COMMON | {"layers", "condition"},
    MaskGITConfig: COMMON | {"layers", "hidden", "mask", "classes", "grid"},
    VQConfig: {"codes", "code_width", "latent", "width", "multipliers", "blocks", "channels"},
}
WRONG = {
    "dropout": (7.5, 1.0, -0.1, math.nan, "0.1", None),
    "never": (11, 10**9, -1, 1.0, True),
    "mask": (11, 10**9, -1, 1.0, None),
    "grid": (5, (3,), (3, 3, 1), (9, 1.0), (-3, -3), ((3,), 3)),
    "registers": (1, "yes", None),
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
    for levels, channels in ((2.5, 1), (True, 1), ("4", 1), (4, 1.0), (4, True), (4, None)):
        with pytest.raises(ValueError, match=f"{levels} levels of {channels} channel"):
            PixelCodec(levels, channels)
