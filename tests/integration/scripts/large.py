"""Reports what it was given: the sum of its numbers, or a number made of its long text."""

import hashlib
import os
import sys

given = {k: v for k, v in sorted(os.environ.items()) if k.startswith("HERMES_PARAM_")}
if sys.argv[1:]:
    (text,) = sys.argv[1:]
    assert given == {"HERMES_PARAM_PROMPT": text}
    value = float(int(hashlib.sha256(text.encode()).hexdigest()[:8], 16))
else:
    value = sum(float(v) for v in given.values())
print(f"epoch=1 loss={value!r}", flush=True)
