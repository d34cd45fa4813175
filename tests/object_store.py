"""An S3-compatible object store on a loopback port (moto's server), for tests of banks on object stores."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

BUCKET = "banks"


@dataclass(slots=True)
class ObjectStore:
    """A running store. `requests` holds the method and path of every request that it answered."""

    endpoint: str
    requests: list[str] = field(default_factory=list)


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Start an empty store with a bucket, described by this process's environment until the end of the block.

    It answers one request at a time: moto does not check and store a conditional write in one step, as S3 does.
    """
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    asked = list[str]()

    class Handler(WSGIRequestHandler):
        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            asked.append(f"{self.command} {self.path}")

    server = make_server(
        "127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=False, request_handler=Handler
    )
    store = ObjectStore(f"http://127.0.0.1:{server.server_port}", asked)
    variables = {
        "AWS_ENDPOINT_URL": store.endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with mock.patch.dict(os.environ, variables):
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=BUCKET)
        yield store
    server.shutdown()
    thread.join(20)
    server.server_close()
