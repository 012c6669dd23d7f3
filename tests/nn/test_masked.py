"""The masked transformer: full length with mask ids, of which none is predicted."""

import torch

from maskless.nn.masked import MaskedConfig, MaskedTransformer
from maskless.problems import dense

SIZES = {"vocab": 11, "mask": 10, "width": 16, "heads": 2, "layers": 2, "condition": 8}
CONTEXT = torch.tensor([[1, 2, 10]]), torch.tensor([[0, 4, 7]])


@torch.no_grad()
def test_the_mask_is_never_predicted_and_a_new_network_predicts_nothing_yet(tiny):
    problems = dense(*CONTEXT, torch.tensor([[1, 5, 6]]))
    for network, is_new in ((tiny("masked"), False), (MaskedTransformer(MaskedConfig(length=8, **SIZES)), True)):
        logits = network(problems)
        assert (logits[:, -1] == -torch.inf).all()
        assert logits[:, :-1].isfinite().all()
        assert (logits[:, :-1] == 0).all() == is_new


def test_a_network_of_unknown_length_lays_problems_out_as_far_as_they_reach(tiny):
    known = tiny("masked", length=12)
    unknown = MaskedTransformer(MaskedConfig(length=64, always_full=False, **SIZES)).eval()
    unknown.load_state_dict(known.state_dict())
    problems, shorter = (dense(*CONTEXT, torch.tensor([targets])) for targets in ([1, 11], [1, 5]))
    torch.testing.assert_close(unknown(problems), known(problems))
    assert not torch.allclose(unknown(shorter)[:, :10], known(shorter)[:, :10])
