"""Train a small network on handwritten digits with DistributedDataParallel, on any number of GPUs.

An ordinary script for `torchrun --nproc-per-node 2 train.py`. The batch size is that of all
processes together, so the curve hardly depends on their number. Rank 0 writes a checkpoint
after each epoch, and all do what SIGTERM asks for: they leave after the step that they are in. The
next start, with as many processes or with others, goes on in the middle of the epoch and sees each
sample of it once.
"""

import argparse
import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

PATH = Path(os.environ.get("HERMES_CHECKPOINT_DIR", ".")) / "state.pt"
told_to_stop = threading.Event()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of all processes")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="default: nccl with a GPU")
    return parser.parse_args()


def load_data():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16.0, dtype=torch.float32)
    labels = torch.tensor(labels)
    return TensorDataset(images[:1437], labels[:1437]), images[1437:], labels[1437:]


def batches_of(train, epoch, done, batch_size):
    """This process's batches of an epoch of which `done` samples have been seen."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
    rest = Subset(train, order[done:].tolist())
    sampler = DistributedSampler(rest, shuffle=False, drop_last=True)
    return DataLoader(rest, max(1, batch_size // dist.get_world_size()), sampler=sampler)


def save(model, optimizer, progress):
    """Write a checkpoint that is either complete or not there; rank 0 does it for all."""
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"progress": progress}, PATH.with_suffix(".tmp"))
        os.replace(PATH.with_suffix(".tmp"), PATH)


def evaluate(model, images, labels):
    with torch.no_grad():
        scores = model.module(images)
    loss = nn.functional.cross_entropy(scores, labels).item()
    return loss, (scores.argmax(1) == labels).float().mean().item()


def train_epoch(model, optimizer, batches, progress, device):
    """Train what is left of an epoch; False if it was left before its end."""
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        samples = len(labels) * dist.get_world_size()
        progress["done"] += samples
        progress["samples"] += samples
        if told_to_stop.is_set():
            return False
    return True


def train(arguments, device):
    torch.manual_seed(0)
    data, images, labels = load_data()
    images, labels = images.to(device), labels.to(device)
    layers = nn.Linear(64, arguments.hidden), nn.ReLU(), nn.Linear(arguments.hidden, 10)
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), arguments.lr, arguments.momentum)
    progress = {"epoch": 0, "done": 0, "samples": 0}
    if PATH.exists():
        state = torch.load(PATH, map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        progress = state["progress"]
    while progress["epoch"] < arguments.epochs:
        batches = batches_of(data, progress["epoch"], progress["done"], arguments.batch_size)
        if not train_epoch(model, optimizer, batches, progress, device):
            save(model, optimizer, progress)
            break
        progress["epoch"] += 1
        progress["done"] = 0
        loss, accuracy = evaluate(model, images, labels)
        if dist.get_rank() == 0:
            print(
                f"epoch={progress['epoch']} val_loss={loss:.6f} val_accuracy={accuracy:.4f} "
                f"samples={progress['samples']}",
                flush=True,
            )
        save(model, optimizer, progress)


def main():
    arguments = parse_arguments()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if has_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(arguments.backend or ("nccl" if has_gpu else "gloo"))
    signal.signal(signal.SIGTERM, lambda *_: told_to_stop.set())
    train(arguments, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
