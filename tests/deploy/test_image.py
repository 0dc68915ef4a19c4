"""The image as far as it can be judged unbuilt: what its Dockerfile promises, and its entry point, really run."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.deploy.files import DEPLOY, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
STAGES = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.M | re.S))
ENTRYPOINT = DEPLOY / "image" / "entrypoint.sh"
ANY_UID = 54321


def test_both_targets_are_there_and_the_cpu_is_the_default() -> None:
    assert {"cpu", "cuda"} < STAGES.keys()
    assert list(STAGES)[-1] == "cpu"
    for target in ("cpu", "cuda"):
        assert f"FROM runtime AS {target}\n" in DOCKERFILE
        assert f"ROPEWALK_DEVICE={target}" in STAGES[target]
        assert STAGES[target].count(f"--from=install-{target} ") == 2


def test_the_user_is_no_root_and_a_number() -> None:
    """A name would not do: Kubernetes cannot tell whether it is root."""
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.M) == ["10001:0"]
    assert "USER 10001:0" in STAGES["runtime"]


def test_what_is_written_is_a_volume_of_group_0() -> None:
    (folder,) = re.findall(r"^VOLUME (\S+)$", STAGES["runtime"], re.M)
    assert re.search(rf"install --directory --owner 10001 --group 0 --mode 2775 {folder}$", STAGES["runtime"], re.M)
    written = re.findall(r"\b(?:ROPEWALK_CACHE|HF_HOME|\w+_CACHE_DIR)=(\S+)", STAGES["runtime"])
    assert len(written) == 4
    assert all(path == folder or path.startswith(f"{folder}/") for path in written)


class Probed(BaseHTTPRequestHandler):
    """A server of which all that can be asked is its health."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(("status", "verdict"), [(200, 0), (503, 1)])
def test_the_health_check_asks_whether_it_lives(status: int, verdict: int) -> None:
    (text,) = re.findall(r"^HEALTHCHECK .*?CMD (\[.*\])$", STAGES["runtime"], re.M)
    program, *arguments = json.loads(text)
    assert program == "python"
    handler = type("Handler", (Probed,), {"status": status})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        variables = {"PATH": os.environ["PATH"], "ROPEWALK_PORT": str(server.server_port)}
        done = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, check=False)
        thread.join()
    assert done.returncode == verdict, done.stderr


def test_dependencies_are_those_of_the_constraints() -> None:
    installs = re.findall(r"^RUN .*?pip install (.*)$", DOCKERFILE, re.M)
    assert len(installs) >= 4
    assert all(arguments.startswith("--constraint constraints.txt ") for arguments in installs)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    sources = {
        source for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M) for source in line.split()[:-1]
    }
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in ignore if line.startswith("!")}
    assert ignore[0] == "*"
    assert sources >= {"model_patches", "service", "constraints.txt"}
    for source in sources:
        assert (ROOT / source).exists()
        assert any(source == name or source.startswith(f"{name}/") for name in kept), source
    assert all((ROOT / name).exists() for name in kept)


@pytest.fixture(name="image")
def _image() -> Iterator[Path]:
    """A tree as in the image: what it brings, the entry point, and in place of the server one that says how it was
    called. Every user may read it, which is not so of pytest's folders."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        (root / "share" / "models" / "Default-v1").mkdir(parents=True)
        (root / "share" / "models" / "Default-v1" / "config.json").write_text("new")
        (root / "share" / "operators-1-2").mkdir()
        (root / "share" / "operators-1-2" / "lib.so").write_text("code")
        (root / "bin").mkdir()
        shutil.copy(ENTRYPOINT, root / "bin" / "entrypoint")
        server = root / "bin" / "ropewalk"
        server.write_text('#!/bin/sh\necho "$$ $# $* $(id -u):$(id -g) $(umask)"\n')
        server.chmod(0o755)
        yield root


def environment(image: Path) -> dict[str, str]:
    return {
        "PATH": f"{image / 'bin'}:{os.environ['PATH']}",
        "IMAGE_CACHE": str(image / "share"),
        "ROPEWALK_CACHE": str(image / "cache"),
    }


def start(image: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, str(image / "bin" / "entrypoint"), *arguments]
    return subprocess.run(command, env=environment(image), capture_output=True, text=True, check=False)


def test_a_fresh_volume_gets_what_the_image_brings(image: Path) -> None:
    (image / "cache").mkdir()
    done = start(image, "serve")
    assert done.returncode == 0, done.stderr
    assert (image / "cache" / "models" / "Default-v1" / "config.json").read_text() == "new"
    assert (image / "cache" / "operators-1-2" / "lib.so").read_text() == "code"


def test_a_volume_of_an_older_image_keeps_what_it_has(image: Path) -> None:
    (image / "cache" / "models" / "Default-v1").mkdir(parents=True)
    (image / "cache" / "models" / "Default-v1" / "config.json").write_text("own")
    (image / "cache" / "operators-1-2").symlink_to("/gone")  # linked by an image that had it elsewhere
    (image / "cache" / "models" / "Default-v0").symlink_to("/gone")
    assert start(image, "serve").returncode == 0
    assert (image / "cache" / "models" / "Default-v1" / "config.json").read_text() == "own"
    assert len([*(image / "cache" / "models" / "Default-v1").iterdir()]) == 1
    assert (image / "cache" / "operators-1-2" / "lib.so").read_text() == "code"


def test_an_image_without_operators_starts_too(image: Path) -> None:
    shutil.rmtree(image / "share" / "operators-1-2")
    done = start(image, "serve")
    assert (done.returncode, done.stderr) == (0, "")
    assert [entry.name for entry in (image / "cache").iterdir()] == ["models"]


def test_the_server_takes_the_place_of_the_script(image: Path) -> None:
    """Else it would not get the signals."""
    command = [str(image / "bin" / "entrypoint"), "serve", "a b"]
    with subprocess.Popen(command, env=environment(image), stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate()
    pid, count, *rest = said.split()
    assert (int(pid), count, rest[:3]) == (process.pid, "2", ["serve", "a", "b"])


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="takes root, and setpriv")
def test_any_user_of_group_0_can_run_it_and_share_the_volume(image: Path) -> None:
    (image / "cache").mkdir()
    (image / "cache").chmod(0o2775)
    other = ("setpriv", f"--reuid={ANY_UID}", "--regid=0", "--clear-groups", "--no-new-privs", "--bounding-set=-all")
    done = start(image, "serve", prefix=other)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[-2:] == [f"{ANY_UID}:0", "0002"]
    assert (image / "cache" / "models").stat().st_mode & 0o070 == 0o070


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="takes root, and setpriv")
def test_a_cache_that_cannot_be_written_does_not_keep_the_server_from_starting(image: Path) -> None:
    (image / "cache").mkdir(mode=0o755)
    done = start(image, "serve", prefix=("setpriv", f"--reuid={ANY_UID}", "--regid=0", "--clear-groups"))
    assert done.returncode == 0
    assert done.stdout.split()[2] == "serve"
    assert "not linked" in done.stderr
