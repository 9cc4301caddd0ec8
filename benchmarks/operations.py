"""What the rows of the benchmark do: each operation is written once, for any contender."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.functions import MLP_WIDTH, WIDTH, TransformerLayers, touch
from benchmarks.runtimes.base import Runtime

MEGABYTE = 1 << 20
LAYERS, BATCH, TOKENS, VOCABULARY = 6, 16, 64, 1000
CROSSING_BYTES = 4 * BATCH * TOKENS * WIDTH
"""Of one activation of the transformer; four cross in a step: there and back, forward and backward."""
SPINNING_SECONDS = 0.2
"""How long a worker's busy thread goes on when it was started once."""

Outcome = Sequence[object]
"""What an operation comes to, results and gradients, to be compared with the same in one process."""
Operation = Callable[[], Outcome]
Preparation = Callable[[Runtime], Operation]
"""Does everything that is outside the measured time."""


def small_call(runtime: Runtime) -> Operation:
    x = torch.arange(16.0)
    return lambda: [runtime.call(0, "echo", x)]


def small_backward(runtime: Runtime) -> Operation:
    x = torch.arange(16.0).div(16).requires_grad_()

    def operation() -> Outcome:
        with runtime.training_pass() as one:
            y = runtime.call(0, "scale", x)
            one.backward(y.sum())
            return [y, *one.gradients([x])]

    return operation


def small_training(runtime: Runtime) -> Operation:
    x = torch.arange(8.0 * MLP_WIDTH).sin().view(8, MLP_WIDTH)
    model = runtime.create(0, "Mlp", 3)
    optimizer = runtime.optimizer([model], [], 0.05)

    def operation() -> Outcome:
        with runtime.training_pass(optimizer) as one:
            loss = (model(x) - 0.5).square().mean()
            one.backward(loss)
            one.step()
            return [loss]

    return operation


def calls_in_flight(calls: int) -> Preparation:
    def make(runtime: Runtime) -> Operation:
        x = torch.arange(16.0)

        def operation() -> Outcome:
            waits = [runtime.start(0, "echo", x) for _ in range(calls)]
            return [wait() for wait in waits]

        return operation

    return make


def echo(megabytes: float) -> Preparation:
    def make(runtime: Runtime) -> Operation:
        x = _large(megabytes)
        return lambda: [runtime.call(0, "echo", x)]

    return make


def memory_copies(copied_bytes: int, copies: int) -> Preparation:
    """What the bytes of a row cost to copy into memory that is there already."""

    def make(_: Runtime) -> Operation:
        source, target = torch.ones(copied_bytes // 4), torch.zeros(copied_bytes // 4)

        def operation() -> Outcome:
            for _ in range(copies):
                target.copy_(source)
            return [target]

        return operation

    return make


def large_backward(megabytes: float) -> Preparation:
    def make(runtime: Runtime) -> Operation:
        x, weight = _large(megabytes).requires_grad_(), _large(megabytes)

        def operation() -> Outcome:
            with runtime.training_pass() as one:
                # Not the plain sum, whose gradient is one number seen through strides of 0.
                loss = torch.dot(runtime.call(0, "double", x), weight)
                one.backward(loss)
                return [loss, *one.gradients([x])]

        return operation

    return make


def many_echo(count: int, megabytes: float) -> Preparation:
    """Many tensors there and back in one call."""

    def make(runtime: Runtime) -> Operation:
        tensors = _many(count, megabytes)
        return lambda: runtime.call(0, "echo", tensors)

    return make


def many_backward(count: int, megabytes: float) -> Preparation:
    """Forward and backward of many tensors in one call."""

    def make(runtime: Runtime) -> Operation:
        leaves = [tensor.requires_grad_() for tensor in _many(count, megabytes)]

        def operation() -> Outcome:
            with runtime.training_pass() as one:
                results = runtime.call(0, "double_each", leaves)
                one.backward(torch.stack(results).square().sum())
                return [*results, *one.gradients(leaves)]

        return operation

    return make


def chain(runtime: Runtime) -> Operation:
    x = torch.arange(16.0).div(16).requires_grad_()

    def operation() -> Outcome:
        with runtime.training_pass() as one:
            y = runtime.chain(x)
            one.backward(y.sum())
            return [y, *one.gradients([x])]

    return operation


def fan_out(runtime: Runtime) -> Operation:
    leaves = [torch.full((16,), index / 8).requires_grad_() for index in range(8)]

    def operation() -> Outcome:
        with runtime.training_pass() as one:
            waits = [runtime.start(index % 2, "scale", leaf) for index, leaf in enumerate(leaves)]
            results = [wait() for wait in waits]
            one.backward(torch.stack(results).sum())
            return [*results, *one.gradients(leaves)]

    return operation


def transformer(runtime: Runtime) -> Operation:
    torch.manual_seed(10)
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    near = TransformerLayers(12, LAYERS // 2)
    far = runtime.create(0, "TransformerLayers", 13, LAYERS // 2)
    optimizer = runtime.optimizer([far], [embedding, near, head], 0.05)

    def operation() -> Outcome:
        with runtime.training_pass(optimizer) as one:
            logits = head(far(near(embedding(tokens))))
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            one.backward(loss)
            one.step()
            return [loss]

    return operation


def one_way(megabytes: int) -> Preparation:
    def make(runtime: Runtime) -> Operation:
        x = _large(megabytes)
        return lambda: [runtime.call(0, "consume", x)]

    return make


def busy_thread(runtime: Runtime) -> Operation:
    """Keeps a thread of the worker busy in pure Python, for a while."""
    return lambda: [runtime.call(0, "spin", SPINNING_SECONDS)]


def cold_caches(runtime: Runtime) -> Operation:
    """Leaves nothing else in the processor's caches, at either end."""
    return lambda: [runtime.call(0, "touch"), touch()]


def _many(count: int, megabytes: float) -> list[Tensor]:
    elements = int(megabytes * MEGABYTE) // 4
    return [torch.full((elements,), index / count) for index in range(count)]


def _large(megabytes: float) -> Tensor:
    return torch.ones(int(megabytes * MEGABYTE) // 4)
