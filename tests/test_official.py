"""Released checkpoints: their logits come out, their sizes are found, and what does not fit is named."""

import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from maskless import official
from maskless.nn.masked import MaskedTransformer
from maskless.problems import partition
from nn.reference import parameters, partition_logits, random_state
from official_logits import LENGTH, MDLM, PGM, SIZES, difference, one_line, without

PARITY = Path(__file__).resolve().parents[2] / "shared" / "parity" / "text_learn_freqs.safetensors"


def stored_config(values, parent=None):
    """As OmegaConf pickles a configuration: objects of its own classes around the values."""
    package = sys.modules["absent_package"]
    node = package.DictConfig() if isinstance(values, dict) else package.AnyNode()
    node._parent, node._metadata = parent, package.Metadata("a name")
    if isinstance(values, dict):
        node._content = {key: stored_config(value, node) for key, value in values.items()}
    else:
        node._val = values
    return node


@pytest.fixture
def absent_package(monkeypatch):
    """A package that exists while a file is written and is gone when it is read."""
    package = types.ModuleType("absent_package")

    class Metadata:
        def __init__(self, name: str):
            self.name = name

        def __reduce__(self):
            return Metadata, (self.name,)

    classes = [type("DictConfig", (), {}), type("AnyNode", (), {}), type("Settings", (dict,), {}), Metadata]
    for one in classes:
        one.__module__, one.__qualname__ = "absent_package", one.__name__
        setattr(package, one.__name__, one)
    monkeypatch.setitem(sys.modules, "absent_package", package)
    return package


@pytest.fixture
def write(absent_package, tmp_path, monkeypatch):
    """write(state, ema=, config=, prefix=, legacy=): a file laid out like a released one."""

    def one(state, *, ema=None, config=None, prefix="backbone.", legacy=False, **more) -> Path:
        content = {"state_dict": {prefix + name: value for name, value in state.items()}, "epoch": 3, **more}
        content |= {"precision": torch.bfloat16}
        content["callbacks"] = absent_package.Settings(monitor=absent_package.Metadata("loss"))
        if config is not None:
            content["hyper_parameters"] = {"config": stored_config(config), "vocab_size": 13}
        if ema is not None:
            content["ema"] = {"decay": 0.9999, "num_updates": 7, "shadow_params": parameters(ema)}
        path = tmp_path / "released.ckpt"
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
        monkeypatch.delitem(sys.modules, "absent_package")
        return path

    return one


def config(mode: str, length: int = LENGTH) -> dict:
    return {"model": {"length": length, "hidden_size": 16, "swap": {"pre_query_mode": mode}}, "seed": 1}


ONE_HEAD = {"vocab": 7, "width": 24, "heads": 1, "condition": 16, "encoder": 1, "decoder": 3}
EIGHT_HEADS = {"vocab": 20, "width": 32, "heads": 8, "condition": 4, "encoder": 3, "decoder": 1}
MDLMS = {"2 blocks": MDLM, "4 blocks": {"vocab": 9, "width": 32, "heads": 4, "condition": 16, "blocks": 4}}


@pytest.mark.parametrize("mode", official.QUERY_NAMES)
@pytest.mark.parametrize(("sizes", "legacy"), [(PGM, True), (PGM, False), (ONE_HEAD, False), (EIGHT_HEADS, False)])
def test_a_released_pgm_gives_its_logits_with_averaged_and_with_raw_weights(write, mode, sizes, legacy):
    raw, ema = random_state(**sizes), random_state(**sizes, seed=1)
    path = write(raw, ema=ema, config=config(mode), legacy=legacy)
    assert difference(official.read(path), ema, mode) < 1e-5
    assert difference(official.read(path, weights="ema"), ema, mode) < 1e-5
    assert difference(official.read(path, weights="raw"), raw, mode) < 1e-5
    assert difference(official.read(path, weights="raw"), ema, mode) > 0.1


@pytest.mark.parametrize("sizes", MDLMS.values(), ids=MDLMS)
def test_a_released_mdlm_gives_its_logits_with_averaged_and_with_raw_weights(write, sizes):
    raw, ema = random_state(**sizes), random_state(**sizes, seed=1)
    path = write(raw, ema=ema, config={"model": {"length": LENGTH}})
    assert isinstance(official.read(path), MaskedTransformer)
    assert difference(official.read(path), ema) < 1e-5
    assert difference(official.read(path, weights="raw"), raw) < 1e-5


def test_a_plain_load_of_such_a_file_fails(write):
    path = write(random_state(**PGM), config=config("learn+freqs"))
    with pytest.raises(ModuleNotFoundError):
        torch.load(path, weights_only=False)


@pytest.mark.parametrize(
    "prefix", ["", "backbone.", "backbone.backbone.", "backbone._orig_mod.", "_orig_mod.backbone."]
)
@pytest.mark.parametrize("sizes", [PGM, MDLM], ids=["pgm", "mdlm"])
def test_prefixes_of_wrappers_are_stripped(write, prefix, sizes):
    state = random_state(**sizes)
    assert difference(official.read(write(state, prefix=prefix), weights="raw", length=LENGTH), state) < 1e-5


def test_sizes_are_taken_from_the_tensors_and_the_length_from_the_configuration(write):
    sizes = {"vocab": 17, "width": 24, "heads": 3, "condition": 5}
    path = write(random_state(**sizes, encoder=3, decoder=2), config=config("learn+freqs+mean", length=40))
    found = official.read(path, weights="raw").config
    assert (found.encoder, found.decoder, found.queries, found.length) == (3, 2, "mean", 40)
    assert {name: getattr(found, name) for name in sizes} == sizes
    assert found.never == 16
    again = official.read(path, weights="raw", queries="logsumexp", length=30).config
    assert (again.queries, again.length) == ("logsumexp", 30)


def test_a_file_without_a_configuration_has_the_papers_length_and_queries(write):
    found = official.read(write(random_state(**PGM)), weights="raw").config
    assert (found.length, found.queries) == (1024, "position")


@pytest.mark.parametrize("sizes", [{"encoder": 1, "decoder": 1}, {"blocks": 1}], ids=["pgm", "mdlm"])
def test_the_mask_of_a_bert_vocabulary_is_not_its_last_id(write, sizes):
    network = official.read(write(random_state(**SIZES | sizes | {"vocab": 30_522})), weights="raw")
    assert (network.config.never if "encoder" in sizes else network.config.mask) == 103


@pytest.mark.parametrize(
    ("written", "asked", "message"),
    [
        ({"config": config("learn")}, {"weights": "raw"}, "learn"),
        ({}, {}, "holds no EMA weights: ask for weights='raw'"),
        ({"ema": without(random_state(**PGM), "output_layer.linear.bias")}, {}, "EMA tensors, expected"),
        ({}, {"weights": "best"}, "unknown weights 'best': expected ema or raw"),
    ],
    ids=["unknown queries", "no averages", "averages of another number", "unknown weights"],
)
def test_what_a_file_does_not_have_is_named(write, written, asked, message):
    with pytest.raises(ValueError, match=message):
        official.read(write(random_state(**PGM), **written), **asked)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: without(s, "encoder.blocks.0.norm1"), "'encoder.blocks.0.norm1.weight' is missing, expected"),
        (lambda s: without(s, "vocab_embed"), "is not a released checkpoint"),
        (lambda s: s | {"surprise": torch.zeros(2)}, "holds the tensor 'surprise'"),
        (lambda s: s | {"decoder.group_swap.output_linear.bias": torch.zeros(3)}, r"output_linear.bias' is \(3,\)"),
        (lambda s: s | {"vocab_embed.embedding": torch.zeros(5)}, "vocab_embed"),
        (lambda s: {}, "is not a released checkpoint"),
    ],
    ids=["missing", "no embedding", "unknown", "wrong shape", "flat embedding", "empty"],
)
def test_tensors_that_do_not_fit_are_named(write, change, message):
    path = write(change(random_state(**PGM)))
    with pytest.raises(ValueError, match=message) as error:
        official.read(path, weights="raw")
    assert one_line(error, path)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.001, 0.3, 0.6, 0.99, 0.99999])
def test_a_truncated_file_is_one_clear_line(write, legacy, share):
    path = write(random_state(**PGM), legacy=legacy)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole)) + (0 < share < 1e-4)])
    with pytest.raises(ValueError, match="damaged or not a checkpoint") as error:
        official.read(path, weights="raw")
    assert one_line(error, path)


@pytest.mark.skipif(not PARITY.exists(), reason="reference values of the released code are not beside the repository")
def test_the_reference_of_these_tests_agrees_with_the_released_code(write):
    values = load_file(PARITY)
    state = {name.removeprefix("state."): value for name, value in values.items() if name.startswith("state.")}
    tokens, groups = values["train.tokens"], values["train.groups"]
    theirs = values["train.logits"][..., :-1].double()
    reference = partition_logits(state, tokens, groups, 4)[..., :-1]
    torch.testing.assert_close(reference, theirs, atol=2e-5, rtol=0)
    alone = partition_logits(state, tokens, torch.ones_like(groups), 4)[..., :-1]
    torch.testing.assert_close(alone, values["train.logits_all_group1"][..., :-1].double(), atol=2e-5, rtol=0)
    network = official.read(write(state), weights="raw", length=tokens.shape[1]).eval()
    problems, index = partition(tokens, groups.argsort(dim=1, stable=True), (groups == 0).sum(1))
    with torch.no_grad():
        ours = network(problems)[:, :-1].double()
    torch.testing.assert_close(ours, theirs.flatten(0, 1)[index], atol=2e-5, rtol=0)
