"""Odd and hostile checkpoints: no code in them is run, and what is no checkpoint is refused in one line."""

import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from maskless import official
from nn.reference import parameters, random_state
from official_logits import LENGTH, PGM, difference, one_line

NEITHER = ": neither an archive nor a pickle that torch wrote"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((content, NEITHER) for content in (b"First Citizen:\nBefore we proceed", b"(lp0\n.", b'{"a": 1}', b"")),
        *((content, "") for content in (b"hello, world", b"PK\x03\x04 but no archive", b"\x80\x04.")),
    ],
)
def test_a_file_of_something_else_is_one_clear_line(tmp_path, content, says):
    path = tmp_path / "file.ckpt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"file\.ckpt is damaged or not a checkpoint{says}") as error:
        official.read(path)
    assert one_line(error, path)


def test_a_file_that_does_not_exist_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        official.read(tmp_path / "nothing.ckpt")


@pytest.mark.parametrize(
    "odd",
    [
        {"hyper_parameters": None},
        {"hyper_parameters": [1, 2]},
        {"hyper_parameters": {"config": {"model": None}}},
        {"hyper_parameters": {"config": {"model": {"swap": None}}}},
        {"ema": [1, 2]},
        {"ema": {"shadow_params": [0.5] * len(parameters(random_state(**PGM)))}},
        {"state_dict": {5: torch.zeros(2)}},
        {"state_dict": [1, 2]},
        {"state_dict": random_state(**PGM) | {"encoder.blocks.99999999.norm1.weight": torch.zeros(2)}},
    ],
    ids=lambda odd: str(odd)[:60],
)
def test_odd_contents_load_or_are_a_value_error(tmp_path, odd):
    state, path = random_state(**PGM), tmp_path / "odd.ckpt"
    torch.save({"state_dict": state, "ema": {"shadow_params": parameters(state)}} | odd, path)
    try:
        assert difference(official.read(path, length=LENGTH), state) < 1e-5
    except ValueError as error:
        assert "odd.ckpt" in str(error)  # noqa: PT017


class Payload:
    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def payload(name: str, mark: Path) -> Payload:
    if name == "system":
        return Payload(os.system, f"touch '{mark}'")
    return Payload({"exec": exec, "eval": eval}[name], f"open({str(mark)!r}, 'w').close()")


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", ["system", "exec", "eval"])
def test_nothing_in_the_pickle_is_run(tmp_path, name, legacy):
    mark, path = tmp_path / "mark", tmp_path / "hostile.ckpt"
    state = {f"backbone.{key}": value for key, value in random_state(**PGM).items()}
    evil = payload(name, mark)

    def hide(content) -> Path:
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
        return path

    for content in ({"state_dict": state, "loops": evil}, {"state_dict": state | {"backbone.note": evil}}):
        assert difference(official.read(hide(content), weights="raw", length=LENGTH), random_state(**PGM)) < 1e-5
    for content in (evil, {"state_dict": evil}):
        with pytest.raises(ValueError, match="is not a released checkpoint"):
            official.read(hide(content), weights="raw")
    assert not mark.exists()
    torch.load(path, weights_only=False)  # the payload is real: an ordinary load runs it
    assert mark.exists()


def scripted_module(path: Path) -> bytes:
    class Talkative(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return x

        @torch.jit.export
        def __getstate__(self) -> tuple[Tensor, bool]:
            return self.weight, self.training

        @torch.jit.export
        def __setstate__(self, state: tuple[Tensor, bool]) -> None:
            self.weight, self.training = state[0], state[1]
            print("code from the file ran")

    torch.jit.save(torch.jit.script(Talkative()), path)
    return path.read_bytes()


def with_a_second_directory(archive: bytes) -> bytes:
    """A zip archive whose list of contents is read differently by those who go by its end and by its offset."""
    end = archive.rindex(b"PK\x05\x06")
    fields = struct.unpack("<4s4H2LH", archive[end : end + 22])
    size, start = fields[5:7]
    directory = archive[start : start + size]
    hidden = directory.replace(b"constants.pkl", b"constants.pk_")
    return archive[:start] + directory + hidden + struct.pack("<4s4H2LH", *fields)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("disguised", [False, True])
def test_no_code_of_a_torchscript_archive_is_run(tmp_path, capfd, disguised):
    path = tmp_path / "script.ckpt"
    archive = scripted_module(path)
    if disguised:
        path.write_bytes(with_a_second_directory(archive))
        assert not any("constants.pkl" in name for name in zipfile.ZipFile(path).namelist())
    with pytest.raises(ValueError):
        official.read(path)
    assert "code from the file ran" not in capfd.readouterr().out
    torch.jit.load(path)
    assert "code from the file ran" in capfd.readouterr().out


def test_a_file_cannot_change_the_functions_that_read_it(tmp_path):
    rebuild = torch._utils._rebuild_tensor_v2
    before = rebuild.__defaults__
    # The function itself, then an order to set attributes on it.
    hostile = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__(K\x07K\x08ts\x86b."
    good, bad = tmp_path / "good.ckpt", tmp_path / "bad.ckpt"
    torch.save({"a": 1}, good)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for name in source.namelist():
            target.writestr(name, hostile if name.endswith("data.pkl") else source.read(name))
    try:
        with pytest.raises(ValueError):
            official.read(bad)
        assert rebuild.__defaults__ == before
    finally:
        rebuild.__defaults__ = before
