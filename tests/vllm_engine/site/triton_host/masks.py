"""A mask that a kernel made from integers is an integer to the interpreter, which refuses it; a compiler would not."""

from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder


def install() -> None:
    """Cast masks of loads and stores to bool."""
    for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(InterpreterBuilder, name, _casting(getattr(InterpreterBuilder, name), position))


def _casting(stock: Any, position: int) -> Any:
    def call(self: Any, *args: Any) -> Any:
        mask = args[position]
        if mask.data.dtype != np.bool_:
            mask.data = mask.data.astype(np.bool_)
        return stock(self, *args)

    return call
