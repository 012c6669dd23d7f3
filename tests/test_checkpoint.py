"""Model folders load as they were saved, or say in one line why not; a failed save leaves what was there."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import maskless
from maskless import checkpoint
from maskless.checkpoint import Model
from maskless.codec.text import byte_codec, train_bpe
from maskless.problems import dense

KINDS = ["position", "mean", "logsumexp", "ordered", "masked", "causal"]
FILES = {"config.json", "model.safetensors", "README.md"}


@torch.no_grad()
def logits(model: Model) -> torch.Tensor:
    """At positions 3 to 5, after a prefix of 5 that every kind can read."""
    tokens = torch.tensor([[1, 2, 3, 4, 5], [5, 6, 7, 8, 9]])
    return model.predict(tokens, torch.arange(5).expand(2, 5), torch.tensor([[3, 4, 5]]).expand(2, 3))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_the_same_model(tiny, tmp_path, kind):
    model = Model(tiny(kind), layout="wrapped")
    model.save_pretrained(tmp_path / "new" / "folder")
    again = Model.from_pretrained(tmp_path / "new" / "folder")
    assert torch.equal(logits(again), logits(model))
    assert (again.config, again.kind, again.layout, again.codec) == (model.config, model.kind, "wrapped", None)
    assert not again.training
    assert names(tmp_path / "new" / "folder") == FILES


def test_the_tokenizer_travels_with_the_model(tiny, tmp_path):
    Model(tiny("position", vocab=257), byte_codec()).save_pretrained(tmp_path)
    again = Model.from_pretrained(tmp_path)
    assert names(tmp_path) == FILES | {"tokenizer.json"}
    assert again.codec.encode("naïve <|endoftext|>") == list("naïve <|endoftext|>".encode())
    assert again.codec.bos == 256


def test_other_weights_may_be_saved_in_place_of_the_networks_own(tiny, tmp_path):
    model, other = Model(tiny("position")), Model(tiny("position", seed=1))
    model.save_pretrained(tmp_path, other.network.state_dict())
    assert torch.equal(logits(Model.from_pretrained(tmp_path)), logits(other))


@pytest.fixture
def saved(tiny, tmp_path) -> Path:
    Model(tiny("position", vocab=257), byte_codec()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Model.from_pretrained(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.5, 0.999, None])
def test_a_truncated_file_of_weights_and_one_that_is_none_are_one_clear_line(saved, share):
    file, other = saved / "model.safetensors", b"weights are in another castle" * 99
    file.write_bytes(other if share is None else file.read_bytes()[: int(share * file.stat().st_size)])
    refused(saved, "is damaged or not a safetensors file")


def edit(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    save_file(change(state), folder / "model.safetensors")


def test_tensors_that_do_not_fit_are_named(saved):
    edit(saved, lambda state: state | {"swap.start": torch.zeros(2, 16)})
    refused(saved, r"'swap.start' is \(2, 16\), expected \(1, 16\)")
    edit(saved, lambda state: {name: value for name, value in state.items() if name != "swap.start"})
    refused(saved, r"'swap.start' is missing, expected \(1, 16\)")
    edit(saved, lambda state: state | {"swap.start": torch.zeros(1, 16), "surprise": torch.zeros(1)})
    refused(saved, "holds the unknown tensor 'surprise'")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "mamba", "network": {}, "layout": "packed"}', "mamba"),
        ('{"kind": "partition", "layout": "packed"}', "network"),
        ('{"kind": "partition", "network": {"vocab": 5, "length": 8, "wings": 2}, "layout": "packed"}', "wings"),
        ('{"kind": "partition", "network": {"vocab": 5}, "layout": "packed"}', "length"),
        ('{"kind": "partition", "network": [1], "layout": "packed"}', "not a maskless config"),
        ("[1, 2]", "not a maskless config"),
        ("{", "not a maskless config"),
        ("", "not a maskless config"),
        ('{"kind": "\udcff\udcfe"}', "not a maskless config"),  # not UTF-8
    ],
)
def test_a_config_that_is_none_is_one_clear_line(saved, text, message):
    (saved / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    refused(saved, message)


SIZES_OUT_OF_RANGE = [{"heads": 0}, {"width": 0}, {"width": 15}, {"condition": -5}]
ODD = [{"classes": 5}, {"classes": [1]}, {"layout": "foo"}, *({"network": sizes} for sizes in SIZES_OUT_OF_RANGE)]


@pytest.mark.parametrize("change", ODD, ids=str)
def test_a_config_with_odd_values_is_one_clear_line(saved, change):
    file = saved / "config.json"
    config = json.loads(file.read_text())
    network = config["network"] | change.get("network", {})
    file.write_text(json.dumps(config | change | {"network": network}))
    refused(saved, "not a maskless config")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "is not a model folder: it has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "is not a model folder: it has no model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0"}'), "not a tokenizer.json"),
        (train_bpe(["a b c abc"] * 9, 300).save, "the tokenizer has .* ids, the network only 257"),
    ],
    ids=["no config", "no weights", "damaged tokenizer", "large tokenizer"],
)
def test_a_folder_that_lacks_something_or_does_not_fit_is_one_clear_line(saved, spoil, message):
    spoil(saved)
    refused(saved, message)


@pytest.mark.parametrize("name", ["no such folder", "one/two/three"])
def test_a_name_that_is_neither_a_folder_nor_a_hub_id_is_refused(name):
    with pytest.raises(ValueError, match=f"'{name}' is neither a model folder nor a hub id"):
        Model.from_pretrained(name)


def test_a_folder_of_the_owner_alone_is_no_reason_to_refuse_a_hub_id(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: {"owner/name": str(saved)}[name])
    assert torch.equal(logits(Model.from_pretrained("owner/name")), logits(Model.from_pretrained(saved)))
    (tmp_path / "owner" / "name").mkdir()
    refused(Path("owner/name"), "owner/name is not a model folder")  # a folder that exists wins


def test_a_saved_model_has_a_card_for_the_hub_and_the_users_own_is_kept(saved, tiny, monkeypatch):
    card = (saved / "README.md").read_text()
    assert card.splitlines()[:3] == ["---", "library_name: maskless", "pipeline_tag: text-generation"]
    assert 'maskless.load("path/to/this/folder")' in card
    (saved / "README.md").write_text("mine")
    model = Model.from_pretrained(saved)
    model.save_pretrained(saved)
    assert (saved / "README.md").read_text() == "mine"
    sent = []

    class Hub:
        def create_repo(self, repo, **_):
            return f"https://hub/{repo}"

        def file_exists(self, repo, name):
            return repo == "me/old"

        def upload_folder(self, *, repo_id, folder_path, ignore_patterns):
            sent.append((repo_id, Path(folder_path, "README.md").read_text(), ignore_patterns))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert model.push_to_hub("me/new") == "https://hub/me/new"
    model.push_to_hub("me/old")
    assert [(repo, ignored) for repo, _, ignored in sent] == [("me/new", None), ("me/old", ["README.md"])]
    assert 'maskless.load("me/new")' in sent[0][1]


def test_a_mistyped_folder_is_named_with_those_that_are_here_and_the_hub_is_not_asked(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/my", "runs/other/model"):
        shutil.copytree(saved, tmp_path / name)

    def asked(name: str, **_: object) -> str:
        raise OSError("no connection\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", asked)
    there = re.escape("there is no folder ")
    for name, says in (
        ("runs/myy", "'runs/myy'; did you mean runs/my?"),
        ("runs/none", "'runs/none'; runs has my, other"),
        (f"{tmp_path}/runs/m", f"'{tmp_path}/runs/m'; did you mean {tmp_path}/runs/my?"),
        ("run/my", "'run/my', and loading it from the hub failed (no connection); did you mean runs/my?"),
        ("owner/name", "'owner/name', and loading it from the hub failed (no connection)"),
    ):
        with pytest.raises(ValueError, match=f"^{there}{re.escape(says)}$"):
            maskless.load(name)


def test_a_failed_save_leaves_the_earlier_model_and_nothing_else(tiny, saved, monkeypatch):
    before, files = logits(Model.from_pretrained(saved)), names(saved)

    def fails(state, path, metadata):
        Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fails)
    with pytest.raises(OSError, match="No space left"):
        Model(tiny("position", vocab=257, seed=1), byte_codec()).save_pretrained(saved)
    assert names(saved) == files
    assert torch.equal(logits(Model.from_pretrained(saved)), before)


@torch.no_grad()
def test_predict_answers_the_problems_of_its_rows(network):
    model, generator = Model(network), torch.Generator().manual_seed(0)
    tokens = torch.randint(10, (3, 4), generator=generator)
    places = torch.rand(3, 8, generator=generator).argsort(1)
    positions, targets, lengths = places[:, :4], places[:, 4:6], torch.tensor([4, 0, 2])
    for given in (None, lengths):
        answers = model.predict(tokens, positions, targets, given)
        assert answers.shape == (3, 2, 11)
        assert torch.equal(answers.flatten(0, 1), network(dense(tokens, positions, targets, given)))


def ids(*values: int) -> torch.Tensor:
    return torch.tensor([values])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((ids(1, 2), ids(0), ids(3)), r"of shapes .*: expected \(B, n\), \(B, n\), \(B, k\)"),
        ((ids(1, 2), ids(0, 1), torch.tensor([3])), "expected"),
        ((ids(1, 2), ids(0, 1), torch.tensor([[3], [4]])), "expected"),
        ((ids(1, 11), ids(0, 1), ids(3)), "a token is 11: expected 0 to 10"),
        ((ids(-1, 4), ids(0, 1), ids(3)), "a token is -1: expected 0 to 10"),
        ((ids(1, 2), ids(0, 8), ids(3)), "a position is 8: expected 0 to 7"),
        ((ids(1, 2), ids(0, 1), ids(8)), "a target is 8: expected 0 to 7"),
        ((ids(1, 2), ids(0, 1), ids(-1)), "a target is -1: expected 0 to 7"),
        ((ids(1, 2), ids(0, 1), ids(3), torch.tensor([3])), r"lengths \[3\] do not fit rows of 2 tokens"),
        ((ids(1, 2), ids(0, 1), ids(3), torch.tensor([-1])), r"lengths \[-1\] do not fit rows of 2 tokens"),
        ((ids(1, 2), ids(0, 1), ids(3), torch.tensor([1, 1])), "do not fit"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_the_value(tiny, args, message):
    with pytest.raises(ValueError, match=message):
        Model(tiny("position")).predict(*args)


def test_a_causal_model_predicts_after_prefixes_only(tiny):
    model = Model(tiny("causal"))
    with pytest.raises(ValueError, match="contexts must be prefixes"):
        model.predict(ids(1, 2), ids(1, 0), ids(2))
