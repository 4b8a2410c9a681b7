"""Train a small network on handwritten digits with PyTorch, with a checkpoint after each epoch.

An ordinary script: the accuracy is read from the output, and the state is kept in
$HERMES_CHECKPOINT_DIR, or beside the script where that is not set.
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    return parser.parse_args()


def load_data(batch_size, generator):
    images, labels = load_digits(return_X_y=True)
    data = train_test_split(images / 16.0, labels, random_state=0)
    x_train, x_test = (torch.tensor(x, dtype=torch.float32) for x in data[:2])
    y_train, y_test = (torch.tensor(y) for y in data[2:])
    train = TensorDataset(x_train, y_train)
    return DataLoader(train, batch_size, shuffle=True, generator=generator), x_test, y_test


def save(path, state):
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)  # a checkpoint is either complete or not there


def main():
    arguments = parse_arguments()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    order = torch.Generator().manual_seed(0)  # of the batches
    batches, x_test, y_test = load_data(arguments.batch_size, order)
    x_test, y_test = x_test.to(device), y_test.to(device)
    model = nn.Sequential(
        nn.Linear(64, arguments.hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(arguments.hidden, 10)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), arguments.lr, arguments.momentum)
    path = Path(os.environ.get("HERMES_CHECKPOINT_DIR", ".")) / "state.pt"
    epoch = 0
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        order.set_state(state["order"].cpu())
        torch.set_rng_state(state["random"].cpu())
        torch.cuda.set_rng_state_all([random.cpu() for random in state.get("random_gpu", [])])
        epoch = state["epoch"]
    while epoch < arguments.epochs:
        model.train()
        for inputs, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
            optimizer.step()
        epoch += 1
        model.eval()
        with torch.no_grad():
            scores = model(x_test)
        loss = nn.functional.cross_entropy(scores, y_test).item()
        accuracy = (scores.argmax(1) == y_test).float().mean().item()
        print(f"epoch={epoch} val_loss={loss:.6f} val_accuracy={accuracy:.4f}", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        state |= {"order": order.get_state(), "random": torch.get_rng_state()}
        save(path, state | {"random_gpu": torch.cuda.get_rng_state_all()})


if __name__ == "__main__":
    main()
