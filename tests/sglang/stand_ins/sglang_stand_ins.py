"""The package index has torchvision built for CUDA: beside a CPU build of torch its import fails
for two operators that nobody here calls. They are declared when it is first imported, in every
process of this environment: a .pth file imports this one, since Python reads a single sitecustomize
and some systems have theirs."""

import sys
from importlib.abc import MetaPathFinder


class _Declare(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms") if torch.version.cuda is None else ():
                library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
            sys.torchvision_operators = library  # which lives as long as the process
        return None


sys.meta_path.insert(0, _Declare())
