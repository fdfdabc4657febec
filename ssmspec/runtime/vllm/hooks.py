"""What the plugin adds to vLLM's front end: two flags, and the check that turns a request into a policy or an error."""

import functools
import os
import reprlib
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ssmspec.geometry import Mode
from ssmspec.layout import POLICY_NAMES
from ssmspec.runtime.vllm import compat, config, refusals
from ssmspec.runtime.vllm.rules import OURS, REPORT, STREAMED, Refused

MODELS, RING = "ssmspec.runtime.vllm.models", "ssmspec.runtime.vllm.ring"  # torch comes with these


def install() -> None:
    """Wrap what vLLM offers no hook for in its front end. Idempotent.

    A vLLM that lacks one serves as it is, with a warning; RuntimeError where a policy is asked for, as far as what is
    left lets that be seen.
    """
    places = (
        ("EngineArgs", "add_cli_args", _add_cli_args, staticmethod),
        ("EngineArgs", "from_cli_args", _from_cli_args, classmethod),
        ("VllmConfig", "__post_init__", _post_init, lambda f: f),
    )
    lacks = [reason for owner, name, _, _ in places if (reason := _lacks(owner, name))]
    if not lacks:
        for owner, name, wrapper, kind in places:
            _wrap(compat.resolve(owner), name, wrapper, kind)
        return
    if not config.resolve({}, {}, os.environ).stock:
        raise RuntimeError(lacks[0])
    warnings.warn(f"{lacks[0]}: no policy is served", stacklevel=2)
    if not _lacks("VllmConfig", "__post_init__"):
        _wrap(
            compat.resolve("VllmConfig"), "__post_init__", functools.partial(_refuse, lacks[0]), lambda f: f
        )


def _lacks(owner: str, name: str) -> str | None:
    """Why a place cannot be wrapped; None where it can."""
    try:
        there = hasattr(compat.resolve(owner), name)
    except RuntimeError as error:
        return str(error)
    return None if there else f"this vLLM has no {owner}.{name}, which ssmspec needs"


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any], kind: Callable[[Any], Any]) -> None:
    stock = getattr(owner, name)
    stock = getattr(stock, "__func__", stock)
    if getattr(stock, "by_ssmspec", False):
        return

    @functools.wraps(stock)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, *args, **kwargs)

    ours.by_ssmspec = True  # type: ignore[attr-defined]
    setattr(owner, name, kind(ours))


def _add_cli_args(stock: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
    parser = stock(parser, *args, **kwargs)
    group = parser.add_argument_group(title="ssmspec")
    group.add_argument(
        config.FLAGS["policy"],
        choices=POLICY_NAMES,
        default=None,
        help="How the recurrent state survives rejected drafts; native (the default) is vLLM's own way.",
    )
    group.add_argument(
        config.FLAGS["mode"],
        choices=tuple(Mode),
        default=None,
        help="exact: the bits of native; fast: outputs through matrix products, within a tolerance.",
    )
    return parser


def _from_cli_args(stock: Callable[..., Any], cls: Any, args: Any) -> Any:
    flags = {key: getattr(args, flag[2:].replace("-", "_"), None) for key, flag in config.FLAGS.items()}
    if any(value is not None for value in flags.values()):
        additional = dict(getattr(args, "additional_config", None) or {})
        serve = config.resolve(flags, additional, os.environ)
        if not serve.stock:
            args.additional_config = {**additional, config.KEY: serve.to_dict()}
    return stock(cls, args)


def _post_init(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    serve = _requested(self)
    stock(self, *args, **kwargs)
    if not serve.stock:
        _select(self, serve)


def _refuse(reason: str, stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    if not _requested(self).stock:
        raise RuntimeError(reason)
    stock(self, *args, **kwargs)


def _requested(vllm_config: Any) -> config.ServeConfig:
    """Nothing for configs that serve no target model: those without a model, drafters, and views of a part of one."""
    model = vllm_config.model_config
    if model is None:
        return config.ServeConfig()
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        additional = {}
    serve = config.resolve({}, additional, os.environ)
    if serve.stock:
        return serve
    if model.runner_type == "draft" or model.is_submodel_config:
        return config.ServeConfig()
    return serve


def _select(vllm_config: Any, serve: config.ServeConfig) -> None:
    """Point this config, and no other in the process, at our model class; refuse what cannot be served.

    Another config of the same model finds it chosen, and is checked all the same.
    """
    model = vllm_config.model_config
    arch = model.hf_config.architectures[0].removeprefix(OURS)
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        raise Refused(
            f"additional_config={reprlib.repr(additional)} is not served with --ssm-policy {serve.policy}, which is"
            " written back into it; the nearest legal setting is an object such as {}"
        )
    refusals.check(vllm_config, serve, compat.check())
    serve = import_module(RING).of_engine(serve, vllm_config)
    vllm_config.additional_config = {**additional, config.KEY: serve.to_dict()}
    model.model_class_overrides = {**model.model_class_overrides, OURS + arch: f"{MODELS}:{OURS}{arch}"}
    model.hf_config.architectures = [OURS + arch]
    vllm_config.parallel_config.worker_extension_cls = REPORT
    _wrap(compat.resolve("AsyncLLM"), "_add_streaming_input_request", _streamed, lambda f: f)


def _streamed(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A request whose input comes in pieces: vLLM calls this once, before the first, and fails that request alone."""
    serve = _requested(self.vllm_config)
    if not serve.stock:
        raise compat.resolve("VLLMValidationError")(STREAMED.format(serve.policy))
    return stock(self, *args, **kwargs)
