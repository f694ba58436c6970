"""`aws` of deploy/aws-account.sh: Amazon's Python library behind the words of Amazon's program.

It knows what the script uses, and refuses the rest. The library takes a second to import, so the
program asks this process, through a socket.
"""

import argparse
import json
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from botocore import xform_name
from botocore.exceptions import BotoCoreError, ClientError

SERVICES = {"s3api": "s3"}


PROGRAM = """#!/bin/sh
"exec" "{python}" "-S" "$0" "$@"
import json, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({socket!r})
with server.makefile("rw") as stream:
    print(json.dumps(sys.argv[1:]), file=stream, flush=True)
    error, answer = json.loads(stream.readline())
print(error or answer, file=sys.stderr if error else sys.stdout)
sys.exit(255 if error else 0)
"""


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        error = answer = ""
        try:
            answer = called(json.loads(self.rfile.readline()))
        except (BotoCoreError, ClientError) as exception:
            error = str(exception)
        self.wfile.write(json.dumps([error, answer]).encode() + b"\n")


@contextmanager
def played_aws(program: Path) -> Iterator[None]:
    """Write the program, and answer it."""
    path = f"{program}.socket"
    program.write_text(PROGRAM.format(python=sys.executable, socket=path))
    program.chmod(0o755)
    with socketserver.ThreadingUnixStreamServer(path, _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


def called(words: list[str]) -> str:
    """The one value of an operation's answer that `--query` asks for."""
    parser = argparse.ArgumentParser("aws", allow_abbrev=False)
    parser.add_argument("service")
    parser.add_argument("operation")
    parser.add_argument("--region")
    parser.add_argument("--query")
    parser.add_argument("--output", choices=["text"])
    options, rest = parser.parse_known_args(words)
    service = SERVICES.get(options.service, options.service)
    client = boto3.client(service, region_name=options.region)
    method = options.operation.replace("-", "_")
    model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[method])
    assert model.input_shape is not None
    members = {f"--{xform_name(name, '-')}": name for name in model.input_shape.members}
    arguments: dict[str, Any] = {}
    while rest:
        option = rest.pop(0)
        values: list[str] = []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        name = members[option]
        is_text = model.input_shape.members[name].type_name == "string"
        arguments[name] = values[0] if is_text else parsed(values)
    answer: Any = getattr(client, method)(**arguments)
    if not options.query:
        return ""
    for key in options.query.replace("[0]", ".0").split("."):
        # Where a list is empty, the program prints None.
        answer = (answer[:1] or [None])[0] if key == "0" else answer and answer[key]
    return str(answer)


def parsed(values: list[str]) -> Any:
    """JSON as it is; `A=b,C=d` as a dictionary; several of these as a list of filters."""
    if values[0].lstrip().startswith(("{", "[")):
        return json.loads(values[0])
    pairs = [dict(pair.split("=", 1) for pair in value.split(",")) for value in values]
    if "Name" in pairs[0]:
        return [{"Name": pair["Name"], "Values": [pair["Values"]]} for pair in pairs]
    return {key: {"true": True}.get(value, value) for key, value in pairs[0].items()}
