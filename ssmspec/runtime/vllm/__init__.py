"""The vLLM plugin. This module is what vLLM imports first: it names nothing heavy, neither torch nor vllm."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; vLLM calls it once per process, more often is harmless.

    It adds the selection flags and the check that acts on them. A server that asks for no policy is left alone.
    """
    from ssmspec.runtime.vllm import hooks

    hooks.install()
