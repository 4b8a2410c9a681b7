"""An ordinary PyTorch DDP script: it trains a linear model, and pauses while a file exists.

Each process writes what it is into the folder of the variable WORKERS_LOG, and beside that how many
batches it has trained.
"""

import argparse
import json
import os
import pathlib
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--slow-while", type=pathlib.Path, required=True)
parser.add_argument("--pause", type=float, default=4.0)
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(7)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
log = pathlib.Path(os.environ["WORKERS_LOG"], f"{os.getpid()}-{rank}.json")
facts = {
    "pid": os.getpid(), "trial": os.environ["HERMES_TRIAL"], "sweep": os.environ["HERMES_SWEEP"],
    "rank": rank, "size": size, "time_s": time.time(),
}  # fmt: skip
written = log.with_suffix(".new")
written.write_text(json.dumps(facts))
written.rename(log)
counter, trained = log.with_suffix(".batches").open("w"), 0

features = torch.randn(96, 8)
targets = features @ torch.randn(8, 1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), options.rate)
file = pathlib.Path(os.environ["HERMES_CHECKPOINT_DIR"]) / "state.pt"
epoch = 0
if file.exists():
    state = torch.load(file, weights_only=True)
    model.module.load_state_dict(state["model"])
    epoch = state["epoch"]
while epoch < options.epochs:
    for batch in torch.arange(96).split(24):
        mine = batch[rank::size]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(features[mine]), targets[mine]).backward()
        trained += 1
        counter.seek(0)
        counter.write(str(trained))
        counter.flush()
        optimizer.step()
    epoch += 1
    if rank == 0:
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(model.module(features), targets)
        print(f"epoch={epoch} loss={loss.item():.9f}", flush=True)
        torch.save({"model": model.module.state_dict(), "epoch": epoch}, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)
    if options.slow_while.exists():
        time.sleep(options.pause / size)
dist.destroy_process_group()
