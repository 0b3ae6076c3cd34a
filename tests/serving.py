"""Starts servers of rl2.engine.serve, and sends them requests."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

from common import make_environment


class Served:
    """A server in a process of its own, on a free port or a given one. It is ready at `url`."""

    def __init__(self, *words, env=None, port=0):
        self.words = ["model_name=" + str(words[0]), f"port={port}", *map(str, words[1:])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rl2.engine.serve", *self.words],
            env=make_environment(env),
            stdout=subprocess.PIPE,
            text=True,
        )
        self._url = ""

    @property
    def url(self) -> str:
        while not self._url:
            line = self.process.stdout.readline()
            assert line, "the server has ended"
            if line.startswith("ready at "):
                self._url = line.split()[2]
        return self._url

    def ask(self, path, body=None, **headers):
        """(status, JSON) of a POST, or without a body of a GET. Bytes are sent as they are."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def end(self) -> int:
        """Ends it as `kill` does. Returns its status."""
        self.process.terminate()
        return self.process.wait(30)


@contextmanager
def serving(*words, count=1, **options):
    """`count` servers with these words: the model, then key=value."""
    servers = [Served(*words, **options) for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()
            server.process.stdout.close()
