"""A loss that is the less the slower its model is, as it says in words, and a size at last."""

import sys

milliseconds = float(sys.argv[1])
for epoch in range(1, 4):
    if epoch == 3:
        print("size_mb=7", flush=True)
    print(f"one image in {milliseconds + 3 - epoch:g} ms", flush=True)
    print(f"epoch={epoch} loss={10 / milliseconds / epoch:.6f}", flush=True)
