"""What a codec is trained on: each loss at values that are known by hand."""

import math

import pytest
import torch

from maskless.codec.vq_losses import (
    CodebookUse,
    PatchDiscriminator,
    adaptive_weight,
    entropy_loss,
    hinge_loss,
    multiscale_loss,
    psnr,
    reconstruction_loss,
)

GREY = torch.zeros(2, 3, 32, 32)


def test_a_constant_difference_counts_once_at_each_scale_but_the_first():
    torch.testing.assert_close(reconstruction_loss(GREY + 0.5, GREY), torch.tensor(0.5 + 0.25))
    torch.testing.assert_close(multiscale_loss(GREY + 0.5, GREY), torch.tensor(0.5 * 3 / 4))
    assert multiscale_loss(GREY + 0.5, GREY + 0.5) == 0


def test_edges_count_at_every_scale_at_which_they_can_be_seen():
    stripes = torch.ones(2, 3, 32, 32)
    stripes[..., ::2] = -1
    # Neighbours differ by 2 across the stripes; averaged over 2 x 2 pixels nothing is left of them.
    torch.testing.assert_close(multiscale_loss(stripes, GREY), torch.tensor(2.0 / 4))
    wide = stripes[..., :16].repeat_interleave(2, 3)  # seen at full size and at half of it, where its values count too
    expected = (2 * 15 / 31 + 2 + 1) / 4
    torch.testing.assert_close(multiscale_loss(wide, GREY), torch.tensor(expected))


def test_small_images_have_fewer_scales():
    small = GREY[..., :4, :6]
    assert multiscale_loss(small + 0.5, small) == 0
    assert multiscale_loss(GREY[..., :8, :8] + 0.5, GREY[..., :8, :8]) == 0.25


def test_psnr_is_of_each_image_and_of_what_can_be_shown():
    images = torch.stack([torch.full((3, 4, 4), 0.9), torch.zeros(3, 4, 4)])
    out = images + torch.tensor([5.0, 0.2])[:, None, None, None]
    torch.testing.assert_close(psnr(out, images), torch.tensor([10 * math.log10(4 / 0.01), 20.0]), rtol=1e-4, atol=0)


def test_the_hinge_asks_for_a_margin_and_no_more():
    scores = torch.tensor([2.0, 1.0])
    assert hinge_loss(scores, -scores) == 0
    assert hinge_loss(-scores, scores) == 0.5 * (2.5 + 2.5)


def test_the_adaptive_weight_makes_both_gradients_equally_long():
    torch.manual_seed(0)
    last = torch.randn(5, requires_grad=True)
    one, other = (last**2).sum(), 1e3 * last.sin().sum()
    weight = adaptive_weight(one, other, last)
    assert not weight.requires_grad
    lengths = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in (one, weight * other)]
    torch.testing.assert_close(lengths[0], lengths[1])
    assert adaptive_weight(one, 0 * other, last) == 1e4


@pytest.mark.parametrize(("size", "patches"), [(8, 4), (16, 8), (32, 8), (64, 8), (128, 16)])
def test_a_judgement_is_of_patches_and_of_one_image_at_a_time(size, patches):
    torch.manual_seed(0)
    judge, images = PatchDiscriminator(3, size, width=32), torch.rand(2, 3, size, size)
    scores = judge(images)
    assert scores.shape == (2, 1, patches, patches)
    torch.testing.assert_close(judge(images[1:]), scores[1:], rtol=1e-4, atol=1e-5)


def test_the_use_of_codes_is_that_of_the_last_batches():
    use = CodebookUse(8, 2)
    assert use.used() == 0
    use.add(0, torch.arange(8).view(2, 2, 2))
    assert (use.used(), use.dead().sum()) == (1, 0)
    assert use.perplexity() == pytest.approx(8)
    use.add(1, torch.tensor([[[3, 3, 5, 5]]]))
    use.add(2, torch.tensor([[[3, 5, 5, 3]]]))  # in the place of the first
    assert use.used() == 2 / 8
    assert use.perplexity() == pytest.approx(2)
    assert use.dead().nonzero().flatten().tolist() == [0, 1, 2, 4, 6, 7]
    assert use.counts.sum(0)[[3, 5]].tolist() == [4, 4]


def test_the_entropy_loss_is_least_where_latents_are_sure_and_all_codes_are_used_alike():
    codes = torch.eye(8)
    sure, same, lost = codes.repeat(4, 1), codes[:1].expand(32, 8), torch.zeros(32, 8)
    assert entropy_loss(sure, codes).item() == pytest.approx(-math.log(8), abs=1e-5)
    assert entropy_loss(same, codes).item() == pytest.approx(0, abs=1e-5)  # sure, of one code
    assert entropy_loss(lost, codes).item() == pytest.approx(0, abs=1e-5)  # all codes, unsure
    random = torch.nn.functional.normalize(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    assert -math.log(8) < entropy_loss(random, codes) < 0


def test_of_many_latents_some_stand_for_all(monkeypatch):
    monkeypatch.setattr("maskless.codec.vq_losses.CHOICES", 8 * 16)
    codes = torch.eye(8)
    latents = codes.repeat_interleave(4, 0).requires_grad_()
    entropy_loss(latents, codes).backward()
    assert not latents.grad[1::2].any()
