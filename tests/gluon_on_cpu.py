"""Runs Gluon kernels on the CPU, one program after another, on torch tensors: for logic, not for bits or races.

Every tensor is a torch tensor, layouts are ignored. Shared memory starts as NaN, and what an asynchronous copy is
on its way to is NaN until it is waited for.
"""

import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as real

TRITON = {getattr(torch, n): getattr(real, n) for n in ("int32", "int64", "float16", "bfloat16", "float32")}
TORCH = {str(d): t for t, d in TRITON.items()} | {"int1": torch.bool, "uint32": torch.int64}


def dtype_of(d: Any) -> torch.dtype:
    return TORCH[str(d)]


def plain(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


class Value:
    """A tensor or scalar of a kernel."""

    def __init__(self, data: Any) -> None:
        self.data = torch.as_tensor(data)
        self.type = types.SimpleNamespace(layout=None)

    def to(self, d: Any) -> "Value":
        return Value(self.data.to(dtype_of(d)))

    def __getitem__(self, index: Any) -> "Value":
        return Value(self.data[index])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> "Value":
        return Value(-self.data)


def _binary(op: Callable[[Any, Any], Any], swap: bool = False) -> Callable[[Value, Any], Any]:
    def apply(a: Value, b: Any) -> Any:
        if isinstance(b, Pointer):
            return NotImplemented
        x, y = (plain(b), a.data) if swap else (a.data, plain(b))
        return Value(op(x, y))

    return apply


def _floordiv(a: Any, b: Any) -> Any:
    return torch.div(torch.as_tensor(a), b, rounding_mode="floor")


OPERATORS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "mod": operator.mod,
    "and": operator.and_,
    "or": operator.or_,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "floordiv": _floordiv,
}
for _name, _op in OPERATORS.items():
    setattr(Value, f"__{_name}__", _binary(_op))
    setattr(Value, f"__r{_name}__", _binary(_op, swap=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _binary(getattr(operator, _name)))


class Pointer:
    """Elements of a tensor's storage."""

    def __init__(self, base: torch.Tensor, offset: Any = 0) -> None:
        self.base, self.offset = base, torch.as_tensor(offset)
        self.dtype = types.SimpleNamespace(element_ty=TRITON[base.dtype])

    @classmethod
    def of(cls, t: torch.Tensor) -> "Pointer":
        flat = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())  # type: ignore[call-overload]
        return cls(flat, t.storage_offset())

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.base, self.offset + plain(other))

    __radd__ = __add__

    def load(self, mask: Any, other: Any) -> Value:
        if mask is None:
            return Value(self.base[self.offset.long()])
        keep, at = torch.broadcast_tensors(torch.as_tensor(plain(mask)), self.offset)
        found = torch.full(at.shape, other, dtype=self.base.dtype)
        found[keep] = self.base[at[keep].long()]
        return Value(found)

    def store(self, value: Any, mask: Any) -> None:
        data = torch.as_tensor(plain(value)).to(self.base.dtype)
        keep = torch.as_tensor(True if mask is None else plain(mask))
        data, at, keep = torch.broadcast_tensors(data, self.offset, keep)
        self.base[at[keep].long()] = data[keep]


class Memory:
    """A shared-memory descriptor."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.dtype = TRITON[data.dtype]

    def index(self, i: Any) -> "Memory":
        return Memory(self.data[int(i)])

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "Memory":
        return Memory(self.data.view(shape))

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        assert self.data.shape == value.data.shape
        self.data.copy_(value.data)


POISON = {torch.int64: 1 << 60}


class Machine:
    """The language's functions, for one program at a time."""

    def __init__(self) -> None:
        self.program, self.grid = (0, 0), (1, 1)
        self.pending: list[tuple[Memory, Value]] = []

    def language(self) -> types.SimpleNamespace:
        names = {n: getattr(real, n) for n in dir(real) if not n.startswith("_")}
        names |= {
            "program_id": lambda axis: Value(torch.tensor(self.program[axis], dtype=torch.int32)),
            "num_programs": lambda axis: Value(torch.tensor(self.grid[axis], dtype=torch.int32)),
            "arange": lambda a, b, layout=None: Value(torch.arange(a, b, dtype=torch.int32)),
            "load": lambda p, mask=None, other=float("nan"): p.load(mask, other),
            "store": lambda p, v, mask=None, eviction_policy="": p.store(v, mask),
            "where": lambda c, a, b: Value(torch.where(plain(c), plain(a), plain(b))),
            "minimum": lambda a, b: Value(torch.minimum(*map(torch.as_tensor, (plain(a), plain(b))))),
            "fma": lambda a, b, c: Value((a.data.double() * b.data.double() + c.data.double()).float()),
            "sum": lambda x, axis: Value(x.data.sum(axis)),
            "max": lambda x, axis: Value(x.data.max(axis).values),
            "reshape": lambda x, shape: Value(x.data.reshape(shape)),
            "split": lambda x: (Value(x.data[..., 0]), Value(x.data[..., 1])),
            "convert_layout": lambda x, layout: x,
            "full": lambda shape, value, dtype, layout: Value(
                torch.full(shape, value, dtype=dtype_of(dtype))
            ),
            "exp": lambda x: Value(x.data.exp()),
            "log": lambda x: Value(x.data.log()),
            "rsqrt": lambda x: Value(x.data.rsqrt()),
            "static_range": range,
            "allocate_shared_memory": self._allocate,
            "inline_asm_elementwise": lambda *a, **k: Value(a[2][0].data.bfloat16().float()),
        }
        return types.SimpleNamespace(**names)

    def _allocate(self, dtype: Any, shape: list[int], layout: Any) -> Memory:
        d = dtype_of(dtype)
        return Memory(torch.full(shape, POISON.get(d, float("nan")), dtype=d))

    def async_load(self, memory: Memory, pointer: Pointer, mask: Any = None) -> None:
        poison = POISON.get(memory.data.dtype, float("nan"))
        assert memory.data.shape == torch.broadcast_shapes(pointer.offset.shape)
        self.pending.append((memory, pointer.load(mask, poison)))
        memory.data.fill_(poison)

    def wait_group(self, n: int) -> None:
        assert n == 0
        for memory, value in self.pending:
            memory.data.copy_(value.data)
        self.pending.clear()


class Kernel:
    """Stands in for a Gluon kernel: ``kernel[grid](*arguments, **options)`` runs it on CPU tensors."""

    def __init__(self, kernel: Any, modules: list[types.ModuleType]) -> None:
        self.machine = Machine()
        self.functions: dict[str, Any] = {}
        gl = self.machine.language()
        shared = {"gl": gl, "async_load": self.machine.async_load, "barrier": lambda: None}
        shared["async_copy"] = types.SimpleNamespace(
            commit_group=lambda: None, wait_group=self.machine.wait_group
        )
        for module in modules:
            own = {
                k: v.value if isinstance(v, real.constexpr) else v for k, v in vars(module).items()
            } | shared
            for name, value in vars(module).items():
                if hasattr(value, "fn") and isinstance(value.fn, types.FunctionType):
                    own[name] = types.FunctionType(value.fn.__code__, own, name, value.fn.__defaults__)
                    self.functions.setdefault(value.fn.__module__ + name, own[name])
            for name in list(own):
                value = vars(module).get(name)
                if hasattr(value, "fn"):
                    own[name] = self.functions[value.fn.__module__ + name]
        self.run = self.functions[kernel.fn.__module__ + kernel.fn.__name__]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.machine.grid = (*grid, 1)[:2]
            for i in range(grid[0]):
                for j in range(self.machine.grid[1]):
                    self.machine.program = (i, j)
                    self.run(*map(_pointers, arguments))

        return launch

    def warmup(self, *arguments: Any, **options: Any) -> Any:
        return types.SimpleNamespace(metadata=types.SimpleNamespace(shared=0))


def _pointers(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer.of(x)
    if isinstance(x, tuple):
        parts = [_pointers(y) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x
