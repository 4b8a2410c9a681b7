"""An ordinary PyTorch DDP script: it trains a linear model, and pauses while a file exists."""

import os
import pathlib
import time

import torch
import torch.distributed as dist
from data_parallel import listed, parse_options  # type: ignore[import-not-found]

options = parse_options()
torch.set_num_threads(1)
torch.manual_seed(7)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
counter, trained = listed(rank, size).open("w"), 0

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
