"""Load a text model, generate, fill gaps and score, in ten lines: python examples/ten_lines.py runs/my"""

import sys

import maskless

if len(sys.argv) != 2:
    sys.exit("usage: ten_lines.py MODEL, a run or model folder: maskless train --text my.txt --out runs/my makes one")
model = maskless.load(sys.argv[1])
for text in maskless.generate(model, n=2, steps=16, seed=0, top_p=0.9):
    print("generated:", text)
filled = maskless.fill(model, "The [4] sat on [6].", seed=1)
print("filled:   ", filled)
print("in order: ", filled.order)
print("nats:     ", float(maskless.log_likelihood(model, str(filled))))
