"""Functions that launch kernels, as operators of torch: compiled code, tracers and transforms see one node each.

Where none of these looks, an operator is called as the function it is: torch's way to operators written in Python, and
back with gradients, takes some 100 microseconds a call, in which a GPU could have run a layer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .ops_reference import OPERATORS


class Operator:
    """A function of tensors as an operator of torch.

    Attributes:
        op: the operator.
        function: the function.
    """

    def __init__(self, name: str, function: Callable, mutates_args: Sequence[str], schema: str | None):
        declare = torch.library.custom_op(f"{OPERATORS}::{name}", mutates_args=mutates_args, schema=schema)
        self.function, self.op = function, declare(function)
        self._with_gradients: type[torch.autograd.Function] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling() or _watched():
            return self.op(*inputs)
        if not (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)):
            return self.function(*inputs)
        # Without gradients of its own the operator of torch says so, once somebody asks for them.
        return (self._with_gradients.apply if self._with_gradients else self.op)(*inputs)

    def register_fake(self, function: Callable) -> Callable:
        """What torch computes shapes and dtypes with: the same arguments, outputs without contents."""
        return self.op.register_fake(function)

    def register_autograd(self, backward: Callable, setup_context: Callable) -> None:
        """The gradients, by operators that have none: a second derivative is an error. See
        `torch.library.register_autograd`. For functions that get no lists of tensors."""
        self.op.register_autograd(backward, setup_context=setup_context)
        function = self.function

        class WithGradients(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                output = function(*inputs)
                setup_context(ctx, inputs, output)
                return output

            @staticmethod
            def backward(ctx: Any, *grads: Tensor | None) -> Any:
                return backward(ctx, *grads)

        self._with_gradients = WithGradients


def operator(name: str, mutates_args: Sequence[str] = (), schema: str | None = None) -> Callable[[Callable], Operator]:
    """Makes a function an `Operator` of this name."""
    return lambda function: Operator(name, function, mutates_args, schema)


def _watched() -> bool:
    """Whether something looks at the operators that are called: a tracer, fake tensors, a transform."""
    return bool(torch._C._len_torch_dispatch_stack() or transformed())


def transformed() -> str | None:
    """Where tensors that look plain may carry more, which a gradient of our own does not know, or None."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "inside of torch.func or of forward-mode differentiation"
    return None
