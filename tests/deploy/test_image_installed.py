"""What the Dockerfile installs for the CPU, by its own commands into an empty environment; then the server, run as a
user nobody knows in a tree that it cannot write. All of the image but Debian itself.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.deploy.files import ROOT
from tests.deploy.test_image import ANY_UID, DOCKERFILE, ENTRYPOINT, STAGES

PLACES = {"/opt/ropewalk": "opt", "/usr/share/ropewalk": "share", "/usr/local/bin": "bin"}
"""Folders of the image, and where they are here."""
DEBIAN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        os.getuid() != 0 or not all(map(shutil.which, ("setpriv", "unshare", "g++"))),
        reason="takes root, setpriv, unshare and g++",
    ),
]


@dataclass(frozen=True)
class Tree:
    """The image's folders below one of this machine's."""

    root: Path

    def here(self, text: str) -> str:
        """A text of the Dockerfile with the places that are meant here."""
        for place, name in PLACES.items():
            text = text.replace(place, str(self.root / name))
        return text

    def variables(self, *stages: str) -> dict[str, str]:
        """What stages set, the first ones first."""
        lines = [line for stage in stages for line in re.findall(r"^ENV (.*)$", STAGES[stage], re.M)]
        pairs = [pair.split("=", 1) for line in lines for pair in line.split()]
        return {name: self.here(value).replace("$PATH", DEBIAN_PATH) for name, value in pairs}


@pytest.fixture(name="tree", scope="module")
def _tree() -> Iterator[Tree]:
    """The image's environment, filled."""
    if subprocess.run(["/usr/bin/python3", "-c", "import ensurepip"], capture_output=True, check=False).returncode:
        pytest.skip("takes Debian's python3-venv")
    with TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        tree.root.chmod(0o755)  # for every user, which pytest's folders are not
        source = tree.root / "src"
        source.mkdir()
        for name in {name for stage in ("build", "install-cpu") for name in copied(stage)}:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source / name)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ROPEWALK_", "PYTHON", "VIRTUAL_ENV"))}
        # Retries would only wait: a package is looked for at every index, one of which this machine may not reach.
        given = {**inherited, **tree.variables("build"), "PIP_RETRIES": "1"}
        given |= {**arguments("build"), **arguments("install-cpu")}
        for command in commands("build") + commands("install-cpu"):
            run(tree.here(command), source, given)
        shutil.rmtree(source)
        (tree.root / "bin").mkdir()
        shutil.copy(ENTRYPOINT, tree.root / "bin" / "ropewalk-entrypoint")
        yield tree


def copied(stage: str) -> list[str]:
    return [name for line in re.findall(r"^COPY (?!--from)(.*)$", STAGES[stage], re.M) for name in line.split()[:-1]]


def commands(stage: str) -> list[str]:
    """What a stage runs, apart from Debian's own packages."""
    return [command for command in re.findall(r"^RUN (.*)$", STAGES[stage], re.M) if "apt-get" not in command]


def arguments(stage: str) -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in re.findall(r"^ARG (.*)$", STAGES[stage], re.M))


def run(command: str, folder: Path, variables: Mapping[str, str]) -> None:
    done = subprocess.run(command, shell=True, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@contextmanager
def started(tree: Tree, cache: Path, **settings: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The image's entry point, as the image starts it under `--read-only --user 54321:0`; and its address."""
    (user,) = re.findall(r"^USER \d+:(\d+)$", DOCKERFILE, re.M)
    variables = tree.variables("runtime", "cpu")
    written = {name: value.replace("/var/cache/ropewalk", str(cache)) for name, value in variables.items()}
    command = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(tree.root)]
    command += ["setpriv", f"--reuid={ANY_UID}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
    command += ["--bounding-set=-all", str(tree.root / "bin" / "ropewalk-entrypoint"), "serve", "--port", "0"]
    with subprocess.Popen(
        command, env={**written, "ROPEWALK_HOST": "127.0.0.1", **settings}, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"ready: (http://\S+) takes requests", line):
                    break
            else:
                pytest.fail("".join(said))
            yield process, found[1]
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
        finally:
            process.kill()


def test_the_image_s_server_runs_as_any_user_in_a_tree_that_it_cannot_write(tree: Tree) -> None:
    with TemporaryDirectory() as volume:
        cache = Path(volume)
        os.chown(cache, 10001, 0)
        cache.chmod(0o2775)
        with started(tree, cache, ROPEWALK_OTEL="true", OTEL_SDK_DISABLED="true") as (process, url):
            with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
                assert client.get("/health").status_code == 200
                answer = client.post("/generate", json={"prompt": "The sea is", "max_tokens": 3, "ignore_eos": True})
                assert answer.json()["usage"]["completion_tokens"] == 3
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        assert re.search(rf"^Uid:\t{ANY_UID}\t", status, re.M)
        assert process.returncode == 0
        links = {path.name: path.readlink() for path in cache.rglob("*") if path.is_symlink()}
        assert links  # the model and the operators, which it found in the image
        assert all(str(target).startswith(str(tree.root / "share")) for target in links.values())
        assert [path for path in cache.rglob("*.safetensors") if not path.is_symlink()] == []


def test_the_environment_has_what_the_constraints_say_and_no_more_than_it_needs(tree: Tree) -> None:
    listed = subprocess.run(
        [str(tree.root / "opt" / "bin" / "pip"), "list", "--format", "freeze"],
        capture_output=True,
        text=True,
        check=True,
    )
    installed = dict(line.lower().split("==", 1) for line in listed.stdout.splitlines() if "==" in line)
    pinned = dict(
        line.lower().split("==", 1) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert installed["torch"] == f"{pinned['torch']}+cpu"
    assert "opentelemetry-sdk" in installed
    assert installed.keys().isdisjoint({"pytest", "mypy", "ruff", "hypothesis"})
    assert {name: version for name, version in installed.items() if pinned.get(name, version) != version} == {
        "torch": installed["torch"]
    }
