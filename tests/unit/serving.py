"""Helpers for tests that talk to servers: requests, and servers as processes of their own."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import roost
from roost import RolloutError
from roost.engines.keys import VARIABLE, headers_of

KEY = "the-key-of-these-tests"
SOURCES = [str(Path(roost.__file__).parents[1]), str(Path(__file__).parent)]


def ask(method, url, body=None, raw=None, key=KEY):
    """Status and answer, read as JSON where it is JSON."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers_of(key)}
    request = urllib.request.Request(url, data=data, method=method, headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode()


def post(url, **body):
    return ask("POST", url, body)


def start_server(*arguments):
    """``roost.engines.serve`` as a process."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES), VARIABLE: KEY}
    command = [sys.executable, "-m", "roost.engines.serve", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)


def url_of(process):
    """Its URL, once it is ready."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("ready "):
            return line.split()[1]
    raise AssertionError("".join(lines))


def deadline_in_flight(client, requests):
    """Return the error of requests whose deadline passed after they were sent.

    A busy machine may need longer than a short deadline to send them, so the deadline grows until they are in flight.
    """
    for timeout_s in (2.0, 10.0, 50.0):
        with pytest.raises(RolloutError) as caught:
            client.generate_all(requests, timeout_s=timeout_s)
        if "not sent" not in str(caught.value):
            break
    return str(caught.value)
