"""Released image checkpoints: the logits of the released code come out, and what does not fit is named."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from maskless import official
from maskless.nn.maskgit import MaskGITConfig
from maskless.nn.partition import PartitionConfig
from maskless.problems import dense, partition
from nn.reference import image_logits, random_maskgit, random_state
from official_logits import one_line, without

SHARED = Path(__file__).resolve().parents[2] / "shared"
FIXTURE, KEYS = SHARED / "parity" / "image_pgm" / "image_pgm.safetensors", SHARED / "official-keys"
PGM = {"vocab": 13, "width": 16, "heads": 2, "condition": 16, "encoder": 2, "decoder": 1, "classes": 4}
MASKGIT = {"vocab": 13, "width": 64, "places": 16, "classes": 4, "blocks": 2, "hidden": 40}

COMMON = {"length": 1025, "classes": 1000, "grid": (32, 32)}
RELEASED_PGM = {"vocab": 16_386, "width": 1024, "heads": 16, "condition": 1024, "never": 16_384, "registers": True}
RELEASED = {
    "img_pgm_12_12": PartitionConfig(**COMMON, **RELEASED_PGM, encoder=12, decoder=12),
    "maskgit": MaskGITConfig(**COMMON, vocab=16_385, mask=16_384, hidden=2816),
}


@pytest.fixture
def write(tmp_path):
    """write(state, prefix=): a file laid out like a released one."""

    def one(state: dict[str, Tensor], prefix: str = "") -> Path:
        content = {"iter": 5, "global_epoch": 1, "optimizer_state_dict": {"state": {}, "param_groups": []}}
        content["model_state_dict"] = {prefix + name: value for name, value in state.items()}
        torch.save(content, tmp_path / "images.ckpt")
        return tmp_path / "images.ckpt"

    return one


@pytest.mark.skipif(not KEYS.is_dir(), reason="names of the released tensors are not beside the repository")
@pytest.mark.parametrize("name", RELEASED)
def test_every_released_tensor_has_its_place(name):
    lines = [line.split("\t") for line in (KEYS / f"{name}.txt").read_text().splitlines()]
    shapes = {name: tuple(int(n) for n in shape.strip("()").split(",") if n.strip()) for name, shape, _ in lines}
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    make, config = official._sizes(state, None, None, None)
    assert config == RELEASED[name]
    with torch.device("meta"):
        network = make(config)
    names = official._names(config)
    assert list(names) == [name for name, _, kind in lines if kind.startswith("param")]
    fitting = official._fitting(Path("file"), state, names, network.state_dict())
    assert {ours: value.shape for ours, value in fitting.items()} == {
        ours: value.shape for ours, value in network.state_dict().items()
    }


@torch.no_grad()
@pytest.mark.skipif(not FIXTURE.exists(), reason="reference values of the released code are not beside the repository")
def test_the_released_code_gives_the_same_logits(write):
    values = load_file(FIXTURE)
    state = {name.removeprefix("state."): value.float() for name, value in values.items() if name.startswith("state.")}
    tokens, groups = values["train.tokens"], values["train.groups"]
    labels = values["train.labels"].masked_fill(values["train.drop"], 10)
    network = official.read(write(state), length=37).eval()
    assert (network.config.grid, network.config.never, network.config.classes) == ((6, 6), 50, 10)
    predicted = torch.arange(52) != 50

    groups_and_labels = (("train.logits", labels), ("train.logits_all_dropped", None))
    for name, given in groups_and_labels:
        problems, index = partition(tokens, groups.argsort(dim=1, stable=True), (groups == 0).sum(1), given)
        theirs = values[name].flatten(0, 1)[index]
        torch.testing.assert_close(network(problems)[:, predicted], theirs[:, predicted], atol=1e-4, rtol=0)
    for part in ("sample", "step0"):
        asked = [values[f"{part}.{name}"] for name in ("tokens", "clean_positions", "noisy_positions", "lengths")]
        ours = network(dense(*asked, labels)).unflatten(0, asked[2].shape)
        right, wrong = (values[f"{part}.logits_{kind}_length"][..., predicted] for kind in ("corrected", "official"))
        torch.testing.assert_close(ours[..., predicted], right, atol=1e-4, rtol=0)
        assert (ours[..., predicted] - wrong).abs().max() > 0.01  # the released samplers hide the last known token
    for name, split in (("train.logits", groups), ("train.logits_all_group1", torch.ones_like(groups))):
        reference = image_logits(state, tokens, split, labels, 4)
        torch.testing.assert_close(reference, values[name].double(), atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_stripped(write, prefix):
    plain, wrapped = official.read(write(random_state(**PGM))), official.read(write(random_state(**PGM), prefix))
    assert plain.config == wrapped.config
    ours, theirs = plain.state_dict(), wrapped.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_sizes_are_taken_from_the_tensors(write):
    found = official.read(write(random_state(**PGM)), weights="raw", length=26).config
    assert {name: getattr(found, name) for name in PGM} == PGM
    assert (found.never, found.length, found.grid, found.registers, found.rope) == (11, 26, (5, 5), True, "1d")
    assert official.read(write(random_state(**PGM))).config.length == 1025
    assert official.read(write(random_state(**PGM)), length=20).config.grid is None
    found = official.read(write(random_maskgit(**MASKGIT))).config
    sizes = found.vocab, found.width, found.length - 1, found.classes, found.layers, found.hidden
    assert sizes == tuple(MASKGIT.values())
    assert (found.mask, found.grid, found.heads) == (12, (4, 4), 1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (without(random_state(**PGM), "reg_tokens"), "'reg_tokens.weight' is missing, expected (2, 16)"),
        (without(random_state(**PGM), "vocab_embed"), "is not a released checkpoint"),
        (random_state(**PGM) | {"surprise": torch.zeros(2)}, "holds the tensor 'surprise', which no known image model"),
        (random_state(**PGM) | {"cls_embed.embedding_table.weight": torch.zeros(5)}, "embedding_table.weight' is (5,)"),
        (without(random_state(**PGM), "group_swap"), "'decoder.group_swap.base_embedding' is missing"),
        (without(random_maskgit(**MASKGIT), "1.attn.wk"), "layers.1.attn.wk.weight' is missing, expected (64, 64)"),
        (random_maskgit(**MASKGIT) | {"reg_tokens.weight": torch.zeros(2, 64)}, "is (2, 64), expected (1, 64)"),
        (without(random_maskgit(**MASKGIT), "pos_emb"), "'pos_emb.weight' is missing"),
        (random_maskgit(**MASKGIT) | {"in_proj.weight": torch.zeros(2)}, "holds the tensor 'in_proj.weight'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit_are_named(write, state, message):
    path = write(state)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        official.read(path)
    assert one_line(error, path)
