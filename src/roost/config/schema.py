"""JSON Schemas of job files and cluster files, for editors; made from the declared keys."""

from __future__ import annotations

from roost.config import keys
from roost.source.keys import Schema
from roost.topology.keys import CLUSTER_FILE

__all__ = ["cluster_schema", "job_schema"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> Schema:
    """Return the JSON Schema of a job file."""
    head = {"$schema": _DIALECT, "$id": "urn:roost:schema:job", "title": "Roost job file"}
    definitions = {
        "cluster": keys.CLUSTER.schema(),
        "component": keys.COMPONENT.schema(),
        "layout": keys.LAYOUT.schema(),
        "placement": keys.PLACEMENT_SCHEMA,
    }
    return {**head, **keys.JOB.schema(), "$defs": definitions}


def cluster_schema() -> Schema:
    """Return the JSON Schema of a cluster file."""
    head = {"$schema": _DIALECT, "$id": "urn:roost:schema:cluster", "title": "Roost cluster file"}
    return {**head, **CLUSTER_FILE.schema()}
