"""Tasks of one short row, their loss, where their targets stand, and whether a mean is near its truth."""

import torch
import torch.nn.functional as F
from torch import Tensor

from maskless.nn import Network
from maskless.objective import OBJECTIVES, Task, noise
from maskless.problems import Problems

L, V = 4, 3
ROW = torch.tensor([2, 0, 1, 1])
UNBIASED = ["pgm", "pgm-exact", "mdlm"]


def uniform_network(problems: Problems) -> Tensor:
    return torch.zeros(len(problems.targets), V)


def task_of(name: str, rows: int, seed: int = 0, valid: Tensor | None = None, length: int = L):
    t, u = noise(rows, length, seed=seed, step=0)
    tokens = ROW.repeat(rows, 1) if length == L else torch.zeros(rows, length, dtype=torch.long)
    return OBJECTIVES[name](tokens, t, u, torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid)


def loss(network: Network, task: Task) -> Tensor:
    """The weighted cost of a task, from all its logits at once."""
    costs = F.cross_entropy(network(task.problems).float(), task.answers, reduction="none")
    return (task.weights * costs).sum()


def place(name: str, problems: Problems) -> tuple[Tensor, Tensor]:
    """The row and the position of every target."""
    owner = problems.target_offsets.owner
    return (owner // 2 if name.startswith("pgm") else owner), problems.targets


def by_row(name: str, task, values: Tensor, rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.float64).index_add(0, place(name, task.problems)[0], values.double())


def near(values: Tensor, truth: float, errors: float = 4.0) -> bool:
    standard_error = float(values.std()) / len(values) ** 0.5
    return abs(float(values.mean()) - truth) < errors * standard_error + 1e-6 * abs(truth)
