"""Run sglang-router with the key from the environment: its option for the key would show it in the command line."""

import os
import sys


def main() -> None:
    """Run ``python -m sglang_router.launch_router`` with the key from ``ROOST_SERVER_KEY``."""
    from sglang_router.launch_router import launch_router, parse_router_args

    options = parse_router_args(sys.argv[1:])
    options.api_key = os.environ.pop("ROOST_SERVER_KEY")
    launch_router(options)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file: its modules would shadow others of the same name
    main()
