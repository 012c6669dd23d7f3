"""What two processes see in the images of both, written to files. Started twice by test_images.py with a folder."""

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from test_images import TOY, pictures

from maskless.evaluate.images import look
from maskless.evaluate.sweep import sweep

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), PartialState(cpu=True).process_index
    torch.set_num_threads(1)
    mine = pictures(51)[rank::2].split(10 + 5 * rank)
    seen = look(mine, TOY, keep=True)
    real, sampled = look([pictures(40, 1)] if rank else [], TOY), []

    def sample(guidance: float):
        sampled.append(guidance)
        return pictures(50, int(guidance))[rank::2].split(8)

    (first,) = sweep(sample, [1.0], TOY, real, folder / "sweep.json")
    sampled.clear()
    points = [first, *sweep(sample, [0.0, 1.0, 2.0], TOY, real, folder / "sweep.json")]
    statistics = {"n": seen.statistics.n, "scatter": seen.statistics.scatter}
    figures = [(point.quality.fid, point.quality.inception_score) for point in points]
    found = {**statistics, "logits": seen.logits, "features": seen.features, "figures": figures, "sampled": sampled}
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()  # its threads would sometimes abort the process at its end
