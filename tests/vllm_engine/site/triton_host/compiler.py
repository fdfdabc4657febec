from triton.backends.compiler import BaseBackend


class Interpreted(BaseBackend):
    """Never compiles: under TRITON_INTERPRET=1 kernels run as Python."""


Interpreted.__abstractmethods__ = frozenset()
