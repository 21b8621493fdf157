"""A real S3 server for tests: SeaweedFS on this machine, started and stopped at will."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import s3fs

KEY, SECRET, BUCKET = "testkey", "testsecret", "test"
PORT_RANGE = range(20_000, 22_760)  # systems hand out ports from 32,768 on, Ray its workers' below 20,000
START_S = 60.0  # it is usable after two seconds on an idle machine
PORTS = ("master.port", "volume.port", "filer.port", "s3.port", "metricsPort")


def free_ports(count: int) -> list[int]:
    """Ports that are free, and whose neighbours 10,000 above are too: the server's own protocol takes those.

    None of them is a port that the system hands out to others before the server starts.
    """
    found: list[int] = []
    start = 7 * os.getpid()  # test processes that begin together look in different places
    for place in range(len(PORT_RANGE)):
        port = PORT_RANGE[(start + place) % len(PORT_RANGE)]
        if len(found) == count:
            return found
        if all(_is_free(p) for p in (port, port + 10_000)):
            found.append(port)
    raise RuntimeError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def environment(port: int) -> dict[str, str]:
    """What programs are told of the server."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


class S3Server:
    """The server and its files; it keeps them when it is stopped."""

    def __init__(self, folder: Path, ports: list[int]):
        self.folder, self.ports = folder, dict(zip(PORTS, ports, strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        identity = {"name": "t", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
        identity["actions"] = ["Admin", "Read", "Write", "List", "Tagging"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @staticmethod
    def program() -> str | None:
        """Its path; None if it is not installed."""
        beside = Path(sys.executable).parent / "weed"
        return str(beside) if beside.exists() else shutil.which("weed")

    def start(self) -> None:
        """Start it and wait until a file can be written."""
        data, logs = self.folder / "data", self.folder / "logs"
        for folder in (data, logs):
            folder.mkdir(exist_ok=True)
        program = self.program()
        assert program is not None
        options = [f"-{name}={port}" for name, port in self.ports.items()]
        console = (logs / "console.txt").open("ab")
        self._process = subprocess.Popen(
            [
                program, f"-logdir={logs}", "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                f"-s3.config={self.folder / 's3.json'}", f"-bucket={BUCKET}", "-webdav=false", "-admin.ui=false",
                "-master.telemetry=false", *options,
            ],
            stdout=console,
            stderr=console,
            start_new_session=True,
        )  # fmt: skip
        console.close()
        deadline = time.monotonic() + START_S
        while not self._takes_files():
            assert time.monotonic() < deadline, f"no S3 server after {START_S:.0f} s; its logs are in {logs}"
            assert self._process.poll() is None, f"the S3 server ended by itself; its logs are in {logs}"
            time.sleep(0.3)

    def _takes_files(self) -> bool:
        fs = self.filesystem()
        try:
            fs.pipe_file(f"{BUCKET}/probe", b"here")
            return bool(fs.cat_file(f"{BUCKET}/probe") == b"here")
        except Exception:
            return False

    def filesystem(self) -> s3fs.S3FileSystem:
        return s3fs.S3FileSystem(
            key=KEY,
            secret=SECRET,
            endpoint_url=f"http://127.0.0.1:{self.ports['s3.port']}",
            config_kwargs={"s3": {"addressing_style": "path"}, "retries": {"max_attempts": 1}},
            skip_instance_cache=True,
            use_listings_cache=False,
        )

    def stop(self) -> None:
        """Kill it, as a power cut would."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=30)
            self._process = None
