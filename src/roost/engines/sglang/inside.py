"""What starts SGLang in its own interpreter, which may be of another environment: as a script, without Roost.

It is ``python -m sglang.launch_server`` with the key of its server from the environment variable ``ROOST_SERVER_KEY``:
every user of a machine can read command lines. SGLang 0.5 has no variable for it, and logs all of its settings.
"""

import logging
import os
import runpy
import sys


def main() -> None:
    """As ``python -m sglang.launch_server``, with a key."""
    key = os.environ.pop("ROOST_SERVER_KEY")
    keep_out_of_logs(key)
    sys.argv[1:1] = [f"--api-key={key}"]  # one word: a key may begin with "-", which would read as an option
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def keep_out_of_logs(key: str) -> None:
    """Replace the key in all records that this process logs from now on."""
    make = logging.getLogRecordFactory()

    def make_without_key(*args: object, **more: object) -> logging.LogRecord:
        record = make(*args, **more)
        try:
            text = record.getMessage()
        except Exception:  # a record that cannot be formatted: logging says so when it is written
            return record
        if key in text:
            record.msg, record.args = text.replace(key, "***"), ()
        return record

    logging.setLogRecordFactory(make_without_key)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file: its modules would be found before those of the same name elsewhere
    main()
