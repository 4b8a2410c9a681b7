"""A good loss and a latency that are reported seconds apart, then training that says no more.

The argument says which of the two comes first; with `never` the latency stays above its bound.
"""

import sys
import time

order = sys.argv[1]
said = ["loss=0.5", "latency_ms=15"]
if order == "latency":
    said.reverse()
print("epoch=1 loss=9 latency_ms=40", flush=True)
if order == "never":
    said = ["loss=0.1"]
for words in said:
    print(f"epoch=2 {words}", flush=True)
    time.sleep(4)
while True:
    time.sleep(1)
