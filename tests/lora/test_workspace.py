"""Scratch: sized by need, one buffer for each product at a time, none left over."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

from isotype.lora.weights import Workspace
from tests.lora.watched import held

CPU = torch.device("cpu")


def test_a_buffer_serves_one_product_after_another() -> None:
    workspace = Workspace()
    with workspace.borrow((4, 6), torch.float32, CPU) as large:
        address = large.data_ptr()
    with workspace.borrow((2, 3), torch.float32, CPU) as small:
        assert small.shape == (2, 3)
        assert small.data_ptr() == address
    assert held(workspace) == 4 * 6 * 4


def test_a_larger_buffer_takes_the_place_of_one_that_is_too_small() -> None:
    workspace = Workspace()
    for rows in (1, 5, 3):
        with workspace.borrow((rows, 8), torch.bfloat16, CPU):
            pass
    assert held(workspace) == 5 * 8 * 2


def test_what_is_borrowed_is_lent_to_nobody_else() -> None:
    workspace = Workspace()
    with (
        workspace.borrow((8,), torch.float32, CPU) as outer,
        workspace.borrow((8,), torch.float32, CPU) as inner,
    ):
        assert outer.data_ptr() != inner.data_ptr()
    with (
        workspace.borrow((8,), torch.float32, CPU) as one,
        workspace.borrow((16,), torch.bfloat16, CPU) as other,
    ):
        assert one.data_ptr() != other.data_ptr()


def test_threads_do_not_share() -> None:
    workspace, failures = Workspace(), []
    barrier = threading.Barrier(2)

    def work(value: float) -> None:
        for _ in range(50):
            with workspace.borrow((64,), torch.float32, CPU) as buffer:
                barrier.wait()
                buffer.fill_(value)
                barrier.wait()
                if not bool((buffer == value).all()):
                    failures.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert held(workspace) == 2 * 64 * 4


def test_released_after_the_backward() -> None:
    workspace = Workspace()

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            with workspace.borrow((4,), x.dtype, x.device):
                return x * 2

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            workspace.release_after_backward()
            assert held(workspace) == 16
            with workspace.borrow((4,), grads[0].dtype, grads[0].device):
                return grads[0] * 2

    x = torch.ones(4, requires_grad=True)
    for _ in range(2):
        Product.apply(Product.apply(x)).sum().backward()  # type: ignore[no-untyped-call]
        assert held(workspace) == 0


def test_a_backward_that_fails_does_not_keep_buffers_of_the_next_ones() -> None:
    """As one that has no room on a GPU, in a notebook whose user tries a smaller batch."""
    workspace, fails = Workspace(), [True, False]

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            workspace.release_after_backward()
            with workspace.borrow((4,), grads[0].dtype, grads[0].device):
                if fails.pop(0):
                    raise torch.OutOfMemoryError("no room")
            return grads[0] * 2

    x = torch.ones(4, requires_grad=True)
    loss = Product.apply(x).sum()  # type: ignore[no-untyped-call]
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    Product.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert held(workspace) == 0


def test_nothing_is_kept_for_a_forward_that_no_backward_follows() -> None:
    workspace = Workspace()
    with workspace.borrow((4,), torch.float32, CPU, keep=False):
        pass
    assert held(workspace) == 0


def test_a_copy_begins_empty() -> None:
    workspace = Workspace()
    with workspace.borrow((4,), torch.float32, CPU):
        pass
    for made in (copy.deepcopy(workspace), pickle.loads(pickle.dumps(workspace))):
        assert held(made) == 0
