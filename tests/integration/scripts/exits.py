import sys

print("epoch=1 loss=1.0", flush=True)
sys.exit("the data set is gone")
