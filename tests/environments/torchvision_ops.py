"""Has torchvision's usual build imported beside a torch without CUDA: the operators that it would compile are declared.

Linked into each environment over .venv, which imports it as it starts; it acts once, when torchvision is looked for.
"""

import sys
from typing import Any


class _Declares:
    """A finder of modules that finds none."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            import torch

            if not torch.cuda.is_available():
                self.library = torch.library.Library("torchvision", "DEF")  # gone when nobody holds it
                for operator in ("nms", "qnms"):
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                torch.__dict__["_torchvision_operators"] = self.library


sys.meta_path.insert(0, _Declares())  # type: ignore[arg-type]
