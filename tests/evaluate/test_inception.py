"""Feature networks: Inception-v3 has the values of torch-fidelity's, files are what they say, and errors are clear."""

import hashlib
import pickle
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maskless.evaluate import inception
from maskless.evaluate.images import Statistics, look
from maskless.evaluate.inception import Features, InceptionV3, features, resize
from maskless.evaluate.sets import Real

# Of FeatureExtractorInceptionV3 of torch-fidelity 0.4.0 with the weights of `waves`, for the images of `pictures`.
THEIR_FEATURES = {
    0: [7.256659, 2.510926, 0.292592, 0.392656, 3.754161, 12.11127, 2.067056, 2.977143],
    1: [6.13737, 1.997154, 0.236633, 0.325586, 3.131577, 9.903086, 1.809218, 2.392899],
}
THEIR_LOGITS = [-11.887055, -7.688276, -7.710594, 2.624792, -11.449184, -8.286021, -6.934028, -12.19605]


def waves(network: nn.Module) -> dict[str, Tensor]:
    """Weights that anyone can make again: digits of sines, at sizes that keep the activations alive."""
    state = {}
    for number, (name, value) in enumerate(sorted(network.state_dict().items())):
        angles = torch.arange(value.numel(), dtype=torch.float64) * 12.9898 + number
        wave = ((torch.sin(angles) * 43758.5453) % 2 - 1).view(value.shape).float()  # in [-1, 1)
        if name.endswith("num_batches_tracked"):
            continue
        if name.endswith(("bn.weight", "running_var")):
            state[name] = 1 + 0.3 * wave
        elif value.ndim > 1:
            state[name] = wave * 2.5 / value[0].numel() ** 0.5
        else:
            state[name] = 0.1 * wave
    return state


def pictures() -> Tensor:
    """(2, 20, 24, 3) of uint8"""
    x = torch.arange(2 * 20 * 24 * 3, dtype=torch.float64)
    return (127.5 + 127 * torch.sin(x * 0.11 + x.square() * 1e-4)).to(torch.uint8).view(2, 20, 24, 3)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("inception") / "waves.safetensors"
    save_file(waves(InceptionV3()), path)
    return path


@pytest.fixture(scope="module")
def network(weights) -> Features:
    return features(weights)


def test_inception_has_the_names_and_the_values_of_torch_fidelity(network):
    assert (network.width, network.classes, network.standard) == (2048, 1008, False)
    assert network.name == "waves.safetensors"
    assert len(network.sha256) == 64
    found, logits = network(pictures())
    for row, expected in THEIR_FEATURES.items():
        torch.testing.assert_close(found[row, 3::256].cpu(), torch.tensor(expected), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(logits[0, ::126].cpu(), torch.tensor(THEIR_LOGITS), rtol=1e-4, atol=1e-3)


def test_without_the_last_layer_there_are_no_logits(weights, network, tmp_path):
    state = {name: value for name, value in load_file(weights).items() if not name.startswith("fc.")}
    torch.save(state, tmp_path / "body.pth")  # also as tensors in a .pth
    body = features(tmp_path / "body.pth")
    found, logits = body(pictures())
    assert logits is None
    assert (body.width, body.classes) == (2048, 0)
    assert found.equal(network(pictures())[0])


@pytest.mark.parametrize(("height", "width"), [(1, 1), (5, 7), (32, 32), (299, 299), (310, 450)])
def test_resizing_reads_pixel_i_at_i_times_the_ratio(height, width):
    images = torch.rand(1, 2, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = resize(images)
    assert out.shape == (1, 2, 299, 299)
    for i, j in [(0, 0), (298, 298), (17, 203), (150, 149)]:
        y, x = i * height / 299, j * width / 299
        top, left = int(y), int(x)
        bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
        a, b = y - top, x - left
        expected = (1 - a) * ((1 - b) * images[..., top, left] + b * images[..., top, right])
        expected = expected + a * ((1 - b) * images[..., bottom, left] + b * images[..., bottom, right])
        torch.testing.assert_close(out[..., i, j], expected, rtol=0, atol=1e-4)
    if (height, width) == (299, 299):
        assert out.equal(images)


class Means(nn.Module):
    """Three features: the mean of each channel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class Both(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.mean((2, 3)), x.mean((1, 2, 3))[:, None].expand(-1, 7)


class Optional(nn.Module):
    """With the signature of NVIDIA's network."""

    def forward(self, x: Tensor, return_features: bool = False) -> Tensor:
        return x.mean((2, 3)) if return_features else x.softmax(1)


class Loud(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) / 0


def scripted(module: nn.Module, path: Path) -> Path:
    torch.jit.script(module).save(str(path))
    return path


def test_torchscript_must_say_what_it_takes(tmp_path):
    path = scripted(Means(), tmp_path / "means.pt")
    with pytest.raises(ValueError, match=r"means.pt is TorchScript that does not say what it takes: expected --feat"):
        features(path)
    mean = pictures().double().mean((1, 2))
    torch.testing.assert_close(features(path, input="pixels")(pictures())[0].double().cpu(), mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(
        features(path, input="inception")(pictures())[0].double().cpu(), (mean - 128) / 128, rtol=0, atol=0.05
    )
    with pytest.raises(ValueError, match="unknown input 'floats': expected inception, pixels"):
        features(path, input="floats")


def test_torchscript_may_have_logits_or_the_signature_of_nvidia(tmp_path):
    both = features(scripted(Both(), tmp_path / "both.pt"), input="pixels")
    assert (both.width, both.classes) == (3, 7)
    nvidia = features(scripted(Optional(), tmp_path / "nvidia.pt"))
    assert (nvidia.width, nvidia.classes) == (3, 0)
    assert nvidia(pictures())[0].equal(features(tmp_path / "both.pt", input="pixels")(pictures())[0])


def test_a_known_file_is_named_and_taken_as_it_must_be(tmp_path, monkeypatch):
    path = scripted(Means(), tmp_path / "means.pt")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(inception.KNOWN, digest, ("means of channels", "inception"))
    network = features(path, input="pixels")  # the file is known better than that
    assert (network.name, network.sha256, network.standard) == ("means of channels", digest, True)
    assert network(pictures())[0].abs().max() < 1


def test_what_an_unknown_file_takes_is_part_of_what_it_is(weights, tmp_path):
    """Given otherwise it has other features, so neither statistics nor figures may be mixed."""
    path = scripted(Means(), tmp_path / "means.pt")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    pixels, scaled = (features(path, input=name, device="cpu") for name in ("pixels", "inception"))
    assert (pixels.sha256, scaled.sha256) == (f"{digest}, takes pixels", f"{digest}, takes inception")
    nvidia = scripted(Optional(), tmp_path / "nvidia.pt")
    assert features(nvidia).sha256 == features(nvidia, input="pixels").sha256
    assert (
        features(weights, input="pixels").sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()
    )  # it says itself
    look([pictures()], pixels).statistics.save(tmp_path / "kept.npz")
    kept = Real("kept.npz", statistics=Statistics.load(tmp_path / "kept.npz"))
    assert kept.seen(pixels, 8).statistics.n == 2
    short = digest[:12]
    with pytest.raises(ValueError) as error:
        kept.seen(scaled, 8)
    assert str(error.value) == (
        f"kept.npz holds statistics of another network (sha256 {short}, takes pixels) "
        f"than means.pt (sha256 {short}, takes inception)"
    )


def test_grey_images_are_images_of_three_equal_channels(tmp_path):
    network = features(scripted(Means(), tmp_path / "means.pt"), input="pixels")
    grey = pictures()[..., :1]
    assert network(grey)[0].equal(network(grey.expand(-1, -1, -1, 3).contiguous())[0])


@pytest.mark.parametrize(
    "images",
    [torch.zeros(2, 8, 8, 3), torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(8, 8, 3, dtype=torch.uint8)],
    ids=["floats", "channels first", "one image"],
)
def test_images_are_bytes_with_channels_last(images, tmp_path):
    network = features(scripted(Means(), tmp_path / "means.pt"), input="pixels")
    with pytest.raises(ValueError, match=r"images \(.*\) of (float32|uint8): expected uint8 \(N, H, W, 3\)"):
        network(images)


def test_convolutions_are_exact_and_cudnns():
    seen = []

    def body(images: Tensor) -> tuple[Tensor, None]:
        seen.append((torch.backends.cudnn.enabled, torch.backends.cudnn.allow_tf32))
        return images.float().mean((2, 3)), None

    before = torch.backends.cudnn.enabled, torch.backends.cudnn.allow_tf32
    Features(body, "toy", "", False, 3, 0, torch.device("cpu"))(pictures())
    assert seen == [(True, False)]
    assert (torch.backends.cudnn.enabled, torch.backends.cudnn.allow_tf32) == before


def test_features_must_be_numbers(tmp_path):
    with pytest.raises(ValueError, match=r"loud.pt gave features that are not finite numbers"):
        features(scripted(Loud(), tmp_path / "loud.pt"), input="pixels")


class Trap:
    """Code in a pickle: it must not run."""

    def __reduce__(self):
        return exec, ("raise SystemExit('the pickle ran')",)


def other_files(folder: Path) -> dict[str, Path]:
    paths = {name: folder / f"{name}.pth" for name in ("text", "empty", "trap", "layers", "list", "word", "digit")}
    paths["text"].write_text("not a network")
    paths["empty"].write_bytes(b"")
    paths["word"].write_text("hello")  # a KeyError of torch
    paths["digit"].write_text("0")  # an IndexError
    paths["trap"].write_bytes(pickle.dumps(Trap(), protocol=2))
    torch.save({"layer.weight": torch.zeros(2, 2)}, paths["layers"])
    torch.save([1, 2], paths["list"])
    paths["tensors"] = folder / "other.safetensors"
    save_file({"layer.weight": torch.zeros(2, 2)}, paths["tensors"])
    paths["broken"] = folder / "broken.safetensors"
    paths["broken"].write_bytes(b"\xff" * 100)
    paths["one number"] = scripted(nn.Flatten(0), folder / "flat.pt")
    paths["no such size"] = scripted(nn.Linear(7, 1), folder / "linear.pt")
    paths["no code"] = folder / "empty.pt"
    with zipfile.ZipFile(paths["no code"], "w") as archive:
        archive.writestr("empty/constants.pkl", b"")
    return paths


@pytest.mark.parametrize(
    "kind",
    [
        *("text", "empty", "word", "digit", "trap", "layers", "list", "tensors", "broken"),
        *("one number", "no such size", "no code"),
    ],
)
def test_what_is_not_a_network_is_one_clear_line(kind, tmp_path):
    path = other_files(tmp_path)[kind]
    with pytest.raises(ValueError, match=r"not a feature network") as error:
        features(path, input="pixels")
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)
    assert "weights_only" not in str(error.value)  # torch's advice is to run the code in the file
    if kind in ("text", "empty", "word", "digit", "trap"):
        assert str(error.value).endswith("under pytorch-fid's names (.safetensors, .pth), or TorchScript")


def test_a_missing_network_is_an_error_not_another_one(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no feature network at .*nowhere.pt: expected a file, or 'torch-fidelity'"):
        features(tmp_path / "nowhere.pt")
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    with pytest.raises(ValueError, match=r"'torch-fidelity' cannot be loaded .*maskless\[eval\]"):
        features("torch-fidelity")


class Stand(nn.Module):
    """What torch-fidelity's network takes and gives."""

    def __init__(self, name: str, wanted: list[str]):
        super().__init__()
        assert wanted == ["2048", "logits_unbiased"]
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert x.dtype == torch.uint8
        assert x.shape[1] == 3
        return x.float().mean((2, 3)) * self.scale, x.float().amax((2, 3))


def test_torch_fidelity_is_asked_for_features_and_logits(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "torch_fidelity", SimpleNamespace(FeatureExtractorInceptionV3=Stand, __version__="9")
    )
    network = features("torch-fidelity")
    assert (network.name, network.standard, network.width, network.classes) == ("torch-fidelity 9", True, 3, 3)
    torch.testing.assert_close(network(pictures())[0].cpu(), pictures().float().mean((1, 2)))

    def offline(*_: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(sys.modules["torch_fidelity"], "FeatureExtractorInceptionV3", offline)
    with pytest.raises(ValueError, match=r"could not get its weights \(no route to host\): name a file instead"):
        features("torch-fidelity")
