"""Compile csrc/ while the package is being built or installed."""

from __future__ import annotations

import functools
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# `pip install -v` shows each line at once; without -v pip keeps them.
_say = functools.partial(print, file=sys.stderr, flush=True)


class CustomBuildHook(BuildHookInterface):
    """Puts the library beside the package's sources (editable) or into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and say what was built; with no torch or compiler the package is installed without its library."""
        root = Path(self.root)
        sys.path.insert(0, str(root))
        import build_library

        package = Path("src", "kernel_pytorch", "cuda_ops")
        # A separate folder: another build with other settings may be running at the same time.
        self.output = None if version == "editable" else Path(tempfile.mkdtemp())
        output = self.output or root / package
        record = build_library.build(output, root / "csrc", root / "build", say=_say)
        self.app.display_info(build_library.summary(record))
        if version != "editable":
            products = [file for file in build_library.PRODUCTS if (output / file).exists()]
            build_data["force_include"].update({str(output / f): f"kernel_pytorch/cuda_ops/{f}" for f in products})
        if record["problem"] is None:
            # No CPython ABI and, through the stable ABI, no torch of one version: one wheel for every Python 3.
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what is in the wheel now."""
        if self.output is not None:
            shutil.rmtree(self.output)
