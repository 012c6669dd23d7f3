"""Model folders: config.json, model.safetensors, and tokenizer.json or codec/; files appear whole or not at all.

Nothing in a model folder is code, and nothing in it is executed when it is read.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from maskless import shipped
from maskless.codec.text import TextCodec
from maskless.codec.vq import ImageCodec, read_codec
from maskless.files import write_aside
from maskless.frame import Frame
from maskless.how import check_defaults
from maskless.mixture import Mixture
from maskless.nn.causal import CausalConfig, CausalTransformer
from maskless.nn.masked import MaskedConfig, MaskedTransformer
from maskless.nn.maskgit import MaskGIT, MaskGITConfig
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.nn.threads import threads_for_pass
from maskless.problems import dense
from maskless.weights import read_network

NETWORKS: dict[str, tuple[type[Any], type[nn.Module]]] = {
    "partition": (PartitionConfig, PartitionTransformer),
    "masked": (MaskedConfig, MaskedTransformer),
    "causal": (CausalConfig, CausalTransformer),
    "maskgit": (MaskGITConfig, MaskGIT),
}
LAYOUTS = ("packed", "wrapped", "padded", "image")
Numbers = Any  # a tensor, an array, or lists
CARD = Path(__file__).with_name("model_card.md")
FILES = ["config.json", "model.safetensors", "tokenizer.json", "codec/*"]


class Model(nn.Module):
    """A network with what is needed to use it: its tokenizer or codec, and how its sequences are laid out.

    layout: "packed" rows start anywhere, "wrapped" and "padded" ones with BOS, "image" ones are a BOS and a grid.
    classes: the names of the labels of an image model. mixture: the orders that a chain was trained on; None: it was
    trained on something else. defaults: choices of `How` that suit the model where a user says nothing; quality: how
    good its samples are with them, in a few words.
    """

    def __init__(
        self,
        network: nn.Module,
        codec: TextCodec | ImageCodec | None = None,
        layout: str = "packed",
        classes: Sequence[str] = (),
        mixture: Mixture | None = None,
        defaults: Mapping[str, Any] | None = None,
        quality: str | None = None,
    ):
        super().__init__()
        self.network = network
        self.codec = codec
        self.layout = layout
        self.classes = tuple(classes)
        self.mixture = mixture
        self.defaults, self.quality = check_defaults(dict(defaults or {})), quality

    @property
    def config(self) -> Any:
        return self.network.config

    @property
    def kind(self) -> str:
        return next(kind for kind, (_, network) in NETWORKS.items() if isinstance(self.network, network))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def text_codec(self) -> TextCodec:
        """The tokenizer; a ValueError where there is none."""
        if self.codec is None:
            raise ValueError("this model brings no tokenizer: name one with tokenizer= (gpt2, bert, bytes, or a file)")
        if not isinstance(self.codec, TextCodec):
            raise ValueError("this is an image model: expected a text model")
        return self.codec

    @property
    def frame(self) -> Frame:
        """What a sequence of this model looks like."""
        made = self.__dict__.get("_frame")
        if made is None or made[0] is not self.codec:  # a codec may come later
            made = self.__dict__["_frame"] = self.codec, Frame.of(self.codec, self.layout, self.config)
        return made[1]

    @property
    def lead(self) -> list[int]:
        """What every sequence of this model begins with."""
        return list(self.frame.lead)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.network(*args, **kwargs)

    def predict(
        self,
        tokens: Numbers,
        positions: Numbers,
        targets: Numbers,
        lengths: Numbers | None = None,
        labels: Numbers | None = None,
    ) -> Tensor:
        """Logits at the targets of each row, from its first `lengths` tokens; tensors, arrays or lists go in.

        tokens (B, n), positions (B, n), targets (B, k), lengths (B,) -> (B, k, V)
        For a model with ordered context, the order of a row's tokens is the order in which they became known.
        """
        tokens, positions, targets = whole("tokens", tokens), whole("positions", positions), whole("targets", targets)
        lengths = None if lengths is None else whole("lengths", lengths)
        labels = None if labels is None else whole("labels", labels)
        self._check_predict(tokens, positions, targets, lengths)
        if labels is not None:
            check_ids("label", labels, 1 + (getattr(self.config, "classes", None) or 0))
        problems = dense(tokens, positions, targets, lengths, labels)
        if isinstance(self.network, CausalTransformer):
            self.network.check(problems)
        problems = problems.to(self.device)
        with threads_for_pass(self.network, problems):
            return self.network(problems).unflatten(0, targets.shape)

    def _check_predict(self, tokens: Tensor, positions: Tensor, targets: Tensor, lengths: Tensor | None) -> None:
        if tokens.shape != positions.shape or tokens.ndim != 2 or targets.ndim != 2 or len(targets) != len(tokens):
            shapes = [tuple(x.shape) for x in (tokens, positions, targets)]
            raise ValueError(f"tokens, positions, targets of shapes {shapes}: expected (B, n), (B, n), (B, k)")
        n = tokens.shape[1]
        if lengths is not None and (len(lengths) != len(tokens) or not bool(((lengths >= 0) & (lengths <= n)).all())):
            raise ValueError(f"lengths {lengths.tolist()} do not fit rows of {n} tokens")
        for name, values, limit in (
            ("token", tokens, self.config.vocab),
            ("position", positions, self.config.length),
            ("target", targets, self.config.length),
        ):
            check_ids(name, values, limit)

    def save_pretrained(self, folder: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write the model folder; each file appears whole or not at all. weights: in place of the network's own."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = self.network.state_dict() if weights is None else weights
        state = {name: value.contiguous() for name, value in weights.items()}
        write_aside(folder / "model.safetensors", lambda path: save_file(state, path, {"format": "pt"}))
        if self.codec is not None:
            self.codec.save(folder if isinstance(self.codec, TextCodec) else folder / "codec")
        config = {"kind": self.kind, "network": dataclasses.asdict(self.config), "layout": self.layout}
        if self.classes:
            config["classes"] = list(self.classes)
        if self.mixture is not None:
            config["orders"] = str(self.mixture)
        if self.defaults:
            config["defaults"] = self.defaults
        if self.quality is not None:
            config["quality"] = self.quality
        write_aside(folder / "config.json", lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))
        if not (folder / "README.md").exists():  # which may be the user's own
            write_aside(folder / "README.md", lambda path: path.write_text(self.card("path/to/this/folder")))

    def card(self, name: str) -> str:
        """What the hub shows of the model: its library, what it makes and how it is loaded. name: where it is."""
        image = self.layout == "image"
        return CARD.read_text(encoding="utf-8").format(
            task="unconditional-image-generation" if image else "text-generation",
            kind=shipped.KINDS.get(self.kind, self.kind),
            title="An image model" if image else "A text model",
            about=f"{sum(p.numel() for p in self.network.parameters()) / 1e6:,.1f} M parameters",
            name=name,
            use=f"made = maskless.generate(model, n=1)[0]{'.image' * image}",
        )

    @classmethod
    def from_pretrained(cls, name: str | Path) -> Model:
        """A model from a model folder, from the name of a shipped model, or from a hub id ("owner/name").

        A model folder of that name wins over a shipped model; a folder with something else in it does not count.
        """
        folder = Path(name)
        if not (folder / "config.json").is_file():
            folder = shipped.find(str(name)) or (folder if folder.is_dir() else _download(str(name)))
        network, about, lender = _read_network(folder)
        codec: TextCodec | ImageCodec | None = None
        if (folder / "tokenizer.json").exists():
            codec = TextCodec.load(folder)
        elif lender is not None:
            codec = TextCodec.load(lender)
        elif (folder / "codec").is_dir():
            codec = read_codec(folder / "codec")
        model = cls(network, codec, **about).eval()
        if isinstance(codec, TextCodec) and codec.vocab > model.config.vocab:
            raise ValueError(f"{folder}: the tokenizer has {codec.vocab} ids, the network only {model.config.vocab}")
        return model

    def push_to_hub(self, repo: str, *, private: bool = False) -> str:
        """Upload the model folder to the Hugging Face hub; returns its address."""
        import tempfile

        from huggingface_hub import HfApi

        api = HfApi()
        address = api.create_repo(repo, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            Path(folder, "README.md").write_text(self.card(repo))
            own = api.file_exists(repo, "README.md")
            api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=["README.md"] if own else None)
        return str(address)


def digest(*modules: nn.Module) -> str:
    """The sha256 of all weights of some modules, by which figures know whose they are."""
    found = hashlib.sha256()
    for name, value in (item for module in modules for item in module.state_dict().items()):
        found.update(name.encode() + value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def whole(name: str, given: Numbers) -> Tensor:
    """Whole numbers as a tensor; a ValueError about anything else."""
    if not isinstance(given, Tensor):
        try:
            given = torch.from_numpy(np.array(given))  # a copy: what is mapped from a file cannot be written to
        except (ValueError, TypeError):
            kind = type(given).__name__
            raise ValueError(f"{name} is a {kind}: expected whole numbers, as many in each row") from None
    if given.is_floating_point() and given.numel():
        raise ValueError(f"{name} of {given.dtype}: expected whole numbers")
    return given.long()


def check_ids(name: str, values: Tensor, limit: int) -> None:
    """Raise a ValueError that names an id outside 0 to limit - 1."""
    wrong = values[(values < 0) | (values >= limit)]
    if len(wrong):
        raise ValueError(f"a {name} is {int(wrong[0])}: expected 0 to {limit - 1}")


def check_model(model: object) -> None:
    """Raise a ValueError about what is not a model, such as the name of one."""
    if not hasattr(model, "network"):  # what torch.compile makes of a model is none by its type
        given = repr(str(model)) if isinstance(model, str | Path) else f"a {type(model).__name__}"
        raise ValueError(f"model is {given}: expected what maskless.load gives")


def check_rows(model: Model, tokens: Tensor, known: Tensor, *, only_known: bool = False) -> None:
    if tokens.ndim != 2 or known.shape != tokens.shape:
        raise ValueError(f"tokens {tuple(tokens.shape)}, known {tuple(known.shape)}: expected (B, L) for both")
    if tokens.shape[1] > model.config.length:
        raise ValueError(f"rows of {tokens.shape[1]} tokens exceed the model's context of {model.config.length}")
    check_ids("token", tokens[known if only_known else ...], model.config.vocab)


def _read_network(folder: Path) -> tuple[nn.Module, dict[str, Any], Path | None]:
    """The network, what else `Model` is told, and the shipped model whose tokenizer it has, if it has not its own."""
    try:
        config = json.loads((folder / "config.json").read_text())
        kind, layout, classes = config["kind"], config["layout"], config.get("classes", [])
        mixture = Mixture.parse(config["orders"], image=layout == "image") if "orders" in config else None
        defaults, quality = check_defaults(config.get("defaults", {})), config.get("quality")
        lender = config.get("tokenizer")
        make_config, make_network = NETWORKS[kind]
        sizes = make_config(**config["network"])
        if layout not in LAYOUTS or not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
            raise TypeError(f"layout {layout!r}, classes {classes!r}")
        if quality is not None and not (isinstance(quality, str) and quality.isprintable() and len(quality) <= 80):
            raise TypeError(f"quality {quality!r}: expected a few words")
        if lender is not None and (lender := shipped.find(str(lender))) is None:
            raise ValueError(f"tokenizer {config['tokenizer']!r}: expected a shipped model")
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a model folder: it has no config.json") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / 'config.json'} is not a maskless config: {error!r}") from None
    network = read_network(folder / "model.safetensors", make_network, sizes, kind="model")
    about = {"layout": layout, "classes": classes, "mixture": mixture, "defaults": defaults, "quality": quality}
    return network, about, lender


def _download(name: str) -> Path:
    """The folder of a model from the hub; a name beside models that are here is meant for one of them."""
    path, hint = Path(name), shipped.nearest(name) or _nearest(Path(name))
    if path.parent != Path() and _models_in(path.parent):
        raise ValueError(f"there is no folder {name!r}{hint}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if "/" not in name:
        raise ValueError(f"{name!r} is neither a model folder nor a hub id (owner/name){hint}")
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except HFValidationError:
        raise ValueError(f"{name!r} is neither a model folder nor a hub id (owner/name){hint}") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"there is no folder {name!r}, and loading it from the hub failed ({reason}){hint}") from None


def _models_in(folder: Path) -> list[Path]:
    """The runs and models in a folder."""
    marks = ("config.json", "model/config.json", "run.json", "distill.json")
    found = {each.relative_to(folder).parts[0] for mark in marks for each in folder.glob(f"*/{mark}")}
    return sorted(folder / each for each in found)


def _nearest(path: Path) -> str:
    """A hint for a path that is almost that of a model here, or for one in a folder of models; or nothing."""
    beside = [each.name for each in _models_in(path.parent)]
    close = [path.parent / each for each in difflib.get_close_matches(path.name, beside, 3)] or _around(path)
    if close:
        return f"; did you mean {' or '.join(map(str, close))}?"
    return f"; {path.parent} has {', '.join(beside[:8])}" if beside else ""


def _around(path: Path) -> list[Path]:
    """Models of the same name in folders whose name is almost that of the path's: runs/my for run/my."""
    home = path.parent.parent
    folders = [each.name for each in home.iterdir() if each.is_dir()] if home.is_dir() else []
    close = difflib.get_close_matches(path.parent.name, folders, 3)
    return [model for each in close for model in _models_in(home / each) if model.name == path.name]
