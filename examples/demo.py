"""Trains a model that is split over two workers, then the same model in one process: ``make demo``.

The parts of the model in the middle and at the end live on the workers (see demo_model.py); the first part,
the images and the labels stay here. The loop that trains is plain PyTorch, one and the same for both runs.

Two daemons are started on this machine. With GRADWIRE_WORKERS="host-a:50051,host-b:50051" it uses two that
run already: ``gradwire-server serve demo_model --torch-threads 1``.

Exits with 1 if the losses of the two runs differ at any step, or if the model did not learn.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import gradwire as gw
from demo_model import Head, Middle, Stem
from demo_report import Run, check, console, differences, draw, show_parts, show_side_by_side
from local_workers import workers_for

SEED = 0
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
EPOCHS, QUICK_EPOCHS = 10, 2
NEEDED_ACCURACY, QUICK_ACCURACY = 0.97, 0.8
ALLOWED_DIFFERENCE = 1e-5


class Digits:
    """scikit-learn's 1797 handwritten digits: a fifth is kept for testing."""

    def __init__(self) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        parts = train_test_split(
            images, torch.tensor(digits.target), test_size=0.2, stratify=digits.target, random_state=SEED
        )
        self.train_images, self.test_images, self.train_labels, self.test_labels = parts

    def shuffled(self, epoch: int) -> list[tuple[Tensor, Tensor]]:
        """The batches of an epoch, the same ones for both runs."""
        order = torch.randperm(len(self.train_labels), generator=torch.Generator().manual_seed(epoch))
        return [(self.train_images[some], self.train_labels[some]) for some in order.split(BATCH_SIZE)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, digits: Digits, run: Run) -> None:
    """Nothing in here knows where the parts of the model are."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.epochs)
    for epoch in range(run.epochs):
        model.train()
        for images, labels in digits.shuffled(epoch):
            with run.timed("forward"):
                loss = F.cross_entropy(model(images), labels)
            with run.timed("backward"):
                loss.backward()
            with run.timed("step"):
                optimizer.step()
                optimizer.zero_grad()
            run.add_step(loss.item(), len(images))
        schedule.step()
        run.add_epoch(accuracy(model, digits))


def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of the test images that the model reads right."""
    model.eval()
    with torch.no_grad():
        right = model(digits.test_images).argmax(dim=1) == digits.test_labels
    return float(right.float().mean())


def main(
    output: Annotated[
        Path, typer.Option("--output", "-o", envvar="GRADWIRE_DEMO_OUTPUT", help="Where to draw the picture.")
    ] = Path("demo.png"),
    workers: Annotated[
        str,
        typer.Option(envvar="GRADWIRE_WORKERS", help="Two workers that run already, with a comma between."),
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Train for a few seconds only.")] = False,
) -> None:
    """Train a model split over two workers, then in one process, and compare."""
    if not os.access(output.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"{output.absolute().parent} cannot be written to", param_hint="--output")
    torch.set_num_threads(1)  # as the workers do: sums are made in the same order everywhere
    torch.manual_seed(SEED)
    digits = Digits()
    whole = nn.Sequential(Stem(), Middle(), Head())
    epochs, needed_accuracy = (QUICK_EPOCHS, QUICK_ACCURACY) if quick else (EPOCHS, NEEDED_ACCURACY)

    with workers_for("demo_model", workers, names=("worker-a", "worker-b")) as addresses:
        a, b = gw.connect(addresses, connect_timeout=60)
        with console.status("placing the model"):
            split = nn.Sequential(Stem(), a.create("Middle"), b.create("Head"))
            split.load_state_dict(whole.state_dict())
            optimizer = gw.optim.DistributedOptimizer(torch.optim.AdamW, [split], lr=LEARNING_RATE)
        show_parts(split)
        with Run("split", epochs, len(digits.train_labels), workers=[a, b]) as split_run:
            train(split, optimizer, digits, split_run)
        trained = split.state_dict()

    with Run("whole", epochs, len(digits.train_labels)) as whole_run:
        train(whole, torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE), digits, whole_run)

    show_side_by_side(split_run, whole_run)
    in_losses = max(differences(split_run, whole_run))
    in_parameters = max(
        (trained[key] - value).abs().max().item() for key, value in whole.state_dict().items()
    )
    reached = split_run.accuracies[-1]
    results = [
        check(
            all(one <= ALLOWED_DIFFERENCE for one in differences(split_run, whole_run)),
            f"losses agree at all {len(split_run.losses)} steps: largest difference {in_losses:.1g}",
        ),
        check(
            in_parameters <= ALLOWED_DIFFERENCE,
            f"parameters agree after training: largest difference {in_parameters:.1g}",
        ),
        check(reached >= needed_accuracy, f"test accuracy {reached:.3f} (needed: {needed_accuracy})"),
    ]
    draw(output, split_run, whole_run)
    console.print(f"Loss, accuracy and time of both runs: {output.absolute()}", soft_wrap=True)
    raise typer.Exit(0 if all(results) else 1)


if __name__ == "__main__":
    try:
        typer.run(main)
    except gw.GradwireError as error:
        sys.exit(f"{type(error).__name__}: {error}")
