"""Training a codec: it learns, keeps its codes in use, sees no held-out images, and names what it cannot train on."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from codec_runs import blobs, complete, lines
from PIL import Image
from rich.console import Console

from maskless.codec.vq import to_images
from maskless.train.codec import CodecRun, configure, read_pictures
from maskless.train.codec_loop import Trainer, train_steps

CPU = torch.device("cpu")


# Learning


def test_a_codec_learns_to_reconstruct(quick, tmp_path):
    learning = {"steps": 40, "batch": 16, "learning_rate": 1e-3, "ema": 0.8, "adversarial_start": 0.8}
    folder = complete(tmp_path / "run", quick(**learning, evaluate_every=5, save_every=0))
    noted = lines(folder)
    measured = [line for line in noted if "psnr" in line]
    assert [line["step"] for line in measured] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert measured[-1]["psnr"] > measured[0]["psnr"] + 0.7  # of six seeds 1.5 to 3.5; without learning 0
    assert measured[-1]["l1"] < 0.92 * measured[0]["l1"]
    assert all(line["held_out"] and line["images"] == 2 for line in measured)  # one in twenty
    assert all(1 <= line["code_perplexity"] <= 24 * line["codes_used"] + 1e-9 for line in measured)
    assert measured[-1]["codes_used"] > 0.9
    trained = [line for line in noted if "loss" in line]
    assert [line["step"] for line in trained] == list(range(1, 41))
    first, last = (sum(line["pixels"] for line in part) for part in (trained[:5], trained[-5:]))
    assert last < 0.8 * first


def test_held_out_images_are_never_trained_on(quick, tmp_path):
    config = quick()
    run = CodecRun(tmp_path, config, *read_pictures(config, Console(quiet=True)))
    assert len(run.tested) == 2
    assert sorted([*run.tested, *run.trainer.rows]) == list(range(40))
    alone = CodecRun(tmp_path / "alone", config, blobs(1), np.zeros(1, dtype=bool))
    assert not alone.held_out
    assert alone.tested.tolist() == alone.trainer.rows.tolist() == [0]
    many = CodecRun(tmp_path / "many", config, blobs(3_000), np.arange(3_000) % 2 == 1)
    assert len(many.tested) == 1_024
    assert (many.tested % 2 == 1).all()
    assert many.tested[-1] > 2_900  # from the whole range


def test_data_with_a_split_of_its_own_is_trained_on_that(quick, tmp_path):
    np.savez(tmp_path / "own.npz", x_train=blobs(12), x_test=blobs(3))
    images, held_out = read_pictures(
        dataclasses.replace(quick(), images=(str(tmp_path / "own.npz"),)), Console(quiet=True)
    )
    assert images.shape == (15, 8, 8, 3)
    assert held_out.tolist() == [False] * 12 + [True] * 3


def test_the_adversarial_loss_comes_in_gently_and_moves_the_codec(quick):
    config = quick(adversarial_start=0.0, learning_rate=1e-3, warmup=0)
    after = {}
    for weight, share in ((1.0, 0.0), (0.0, 0.5), (1.0, 0.5)):
        changed = dataclasses.replace(config, adversarial=weight)
        trainer = Trainer(changed, blobs(8), np.arange(8), CPU)
        trainer.step(0, share, 1e-3)
        after[weight, share] = trainer.codec.decoder.conv_out.weight.detach()
    torch.testing.assert_close(after[1.0, 0.0], after[0.0, 0.5])  # its weight begins at zero
    assert (after[1.0, 0.5] - after[0.0, 0.5]).abs().max() > 1e-4


def test_half_of_the_images_are_flipped_and_all_come_once_in_an_epoch(quick):
    images = blobs(8)
    plain, flipped = (Trainer(quick(flip=flip), images, np.arange(8), CPU) for flip in (False, True))
    whole = torch.cat([plain.batch(0), plain.batch(1)])
    assert sorted(x.sum().item() for x in whole) == sorted(x.sum().item() for x in to_images(images))
    same = turned = 0
    for step in range(8):
        for one, other in zip(plain.batch(step), flipped.batch(step), strict=True):
            same, turned = same + one.equal(other), turned + one.flip(2).equal(other)
    assert same + turned == 32
    assert 6 < turned < 26


def test_dead_codes_are_revived_with_their_averages_and_moments(quick):
    trainer = Trainer(quick(steps=100, revive_after=3, adversarial=0), blobs(8), np.arange(8), CPU)
    weight = trainer.codec.quantize.embedding.weight
    place = [p is weight for p in trainer.codec.parameters()].index(True)
    with torch.no_grad():
        weight[4:] = weight[0]  # never chosen: the first of equals is
    trainer.ema.averages[place][4:] = 7.0
    steps = train_steps(trainer)
    next(steps), next(steps)
    assert trainer.use.used() <= 4 / 24
    kept, moments = weight[:4].detach().clone(), trainer.adam.state[weight]
    moments["exp_avg"][4:] = 1e-9
    dead = trainer.use.dead()
    next(steps)  # the third batch without them
    dead &= trainer.use.dead()
    assert dead[4:].all()
    assert weight[dead].equal(trainer.ema.averages[place][dead])
    torch.testing.assert_close(weight[dead].norm(dim=1), torch.ones(int(dead.sum())))
    assert (moments["exp_avg"][dead] == 0).all()
    assert (moments["exp_avg_sq"][dead] == 0).all()
    assert (weight[:4] - kept)[~dead[:4]].abs().max() < 0.1  # the living stay
    next(steps)
    revived = trainer.use.counts[3 % 3] > 0
    assert revived[4:].sum() > 4
    never = Trainer(quick(steps=3, revive_after=0), blobs(8), np.arange(8), CPU)
    with torch.no_grad():
        never.codec.quantize.embedding.weight[4:] = never.codec.quantize.embedding.weight[0]
    for _ in train_steps(never):
        pass
    assert never.use.used() <= 4 / 24


# Images


def test_images_are_read_as_the_data_readers_do(quick, tmp_path):
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    Image.new("RGB", (20, 10), (255, 0, 0)).save(folder / "deep" / "a.png")
    Image.new("L", (8, 8), 100).save(folder / "deep" / "b.bmp")
    (folder / "deep" / "broken.png").write_bytes((folder / "deep" / "a.png").read_bytes()[:40])
    told = io.StringIO()
    config = dataclasses.replace(quick(), images=(str(folder),), size=8)
    images, held_out = read_pictures(config, Console(file=told, width=1_000))
    assert images[:, 4, 4].tolist() == [[255, 0, 0], [100, 100, 100]]
    assert held_out.tolist() == [False, True]
    assert "1 image(s) skipped that cannot be read:" in told.getvalue()
    assert "broken.png" in told.getvalue()


@pytest.mark.parametrize(("side", "size"), [(9, 8), (12, 12), (200, 64)])
def test_the_size_is_that_of_the_first_image_unless_it_is_large(quick, tmp_path, side, size):
    np.save(tmp_path / "a.npy", blobs(2, side, side + 3))
    config = dataclasses.replace(quick(), images=(str(tmp_path / "a.npy"),))
    assert read_pictures(config, Console(quiet=True))[0].shape == (2, size, size, 3)


# Mistakes


def test_mistakes_leave_no_folder(quick, tmp_path):
    config = dataclasses.replace(quick(), images=(str(tmp_path / "absent"),))
    with pytest.raises(ValueError, match="absent: no such file or folder; expected a folder, an archive"):
        complete(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="images of 30 x 30 pixels: expected multiples of the codec's factor 4"):
        configure(tmp_path / "run", ["photos"], factor=4, size=30)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"factor": 3}, "factor 3 is out of range: expected one of 2, 4, 8"),
        ({"steps": 0}, "steps 0 is out of range: expected more than 0"),
        ({"adversarial": -1}, "adversarial -1 is out of range: expected 0 or more"),
        ({"adversarial_start": 2}, "adversarial_start 2 is out of range: expected 0 to 1"),
        ({"ema": 1.0}, "ema 1.0 is out of range"),
        ({"minutes": 0}, "minutes 0 is out of range"),
        ({"size": 0}, "size is 0: expected 1 or more pixels a side"),
    ],
)
def test_settings_out_of_range(changed, line, tmp_path):
    with pytest.raises(ValueError, match=line):
        configure(tmp_path, ["photos"], **changed)
    with pytest.raises(ValueError, match="what to train on"):
        configure(tmp_path, [])
