"""Load a text model, generate, fill gaps and score, in ten lines: python examples/ten_lines.py [MODEL]"""

import sys

import maskless

model = maskless.load(sys.argv[1] if len(sys.argv) > 1 else "stories")
for text in maskless.generate(model, n=2, seed=0, top_p=0.9):
    print("generated:", text)
filled = maskless.fill(model, "One day, Max saw a [4] and [6].", seed=1)
print("filled:   ", filled)
print("in order: ", filled.order)
print("nats:     ", float(maskless.log_likelihood(model, str(filled))))
