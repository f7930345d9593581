"""The repository itself: lock, licence, layers, targets and documentation stay as promised."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.__main__ import discover

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCKS = ("requirements.lock", "requirements-vendors.lock")


def locked(name: str) -> dict[str, str]:
    """Package (canonical name) → version of a lock file, which holds nothing else."""
    pins = {}
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.!]*)", line)
        assert match, f"{name}: {line!r} is not name==version"
        pins[canonicalize_name(match[1])] = match[2]
    return pins


def tracked_files() -> list[Path]:
    """What git knows of, or will: neither ignored nor deleted."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_lock_satisfies_every_declared_requirement() -> None:
    pins = locked("requirements.lock")
    extras = PROJECT["project"]["optional-dependencies"]
    vendors = pins | locked("requirements-vendors.lock")
    wanted = [(pins, r) for r in [*PROJECT["project"]["dependencies"], *extras["dev"]]]
    wanted += [(vendors, r) for r in extras["vendors"]]
    wanted += [(pins, r) for r in PROJECT["build-system"]["requires"]]
    for have, text in wanted:
        requirement = Requirement(text)
        pin = have.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{text} is not locked: run `make lock`"
        assert requirement.specifier.contains(pin), f"{text}, but {pin} is locked: run `make lock`"


def test_lock_holds_neither_torch_builds_nor_cuda_nor_echelon() -> None:
    pins = locked("requirements.lock")
    assert pins["torch"] == "2.13.0"
    assert "echelon" not in pins
    assert not [p for name in LOCKS for p in locked(name) if p.startswith(("nvidia", "triton"))]


def test_vendors_add_to_the_lock_and_never_contradict_it() -> None:
    assert not locked("requirements.lock").keys() & locked("requirements-vendors.lock").keys()


def test_running_environment_is_the_locked_one() -> None:
    differing = {
        name: (pin, version(name))
        for name, pin in locked("requirements.lock").items()
        if version(name).split("+")[0] != pin
    }
    assert not differing, "the environment does not match the lock: run `make venv`"


def test_shell_scripts_parse_and_stop_at_the_first_error() -> None:
    scripts = [ROOT / ".ci" / "run", *sorted((ROOT / "scripts").glob("*.sh"))]
    for path in scripts:
        subprocess.run(["bash", "-n", str(path)], check=True)
        text = path.read_text(encoding="utf-8")
        if text.startswith("#!"):
            assert "set -euo pipefail" in text, path.name
            assert path.stat().st_mode & 0o111, f"{path.name} is not executable"


def test_every_target_has_a_help_line_and_makes_its_environment() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):([^#\n]*)(## .+)?$", text, flags=re.MULTILINE)
    assert {"demo", "test", "check", "bench", "docs"} <= {name for name, _, _ in targets}
    for name, needs, described in targets:
        assert described, f"make {name} has no help line"
        free = name in ("help", "venv", "lock", "clean", "distclean")
        assert free or "venv" in needs.split(), f"make {name} does not make .venv"


def test_python_that_is_too_old_is_refused_with_a_remedy(tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    answer = subprocess.run(
        ["bash", "-c", ". scripts/python.sh && find_python"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(old)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1
    assert (
        f"Python 3.11 or newer with its venv and ensurepip modules; tried: {old}" in answer.stderr
    )
    assert "python3-venv" in answer.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a .venv whose pip only notes what it was asked for.

    Its lock is empty but for torch, so that what is tested is when and how the installer acts.
    """
    (tmp_path / "scripts").mkdir()
    for name in ("install.sh", "python.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    (tmp_path / "requirements.lock").write_text("# lock\ntorch==2.13.0\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    fake = tmp_path / "fake-python"
    fake.write_text(
        "#!/usr/bin/env bash\n"
        f'root="{tmp_path}"\n'
        'case "$*" in\n'
        '  "-m venv .venv") mkdir -p .venv/bin; cp "$root/fake-python" .venv/bin/python;;\n'
        '  "--version") echo "Python 3.11.0";;\n'
        '  "-m pip install"*) echo "${@:3}" >> "$root/pip.log"; [ ! -e "$root/offline" ];;\n'
        "esac\n"
    )
    fake.chmod(0o755)
    return tmp_path


def install(checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scripts/install.sh"],
        cwd=checkout,
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(checkout / "fake-python")},
        capture_output=True,
        text=True,
        check=False,
    )


def pip_calls(checkout: Path) -> list[str]:
    log = checkout / "pip.log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [line.removeprefix("install --quiet --quiet ") for line in lines]


def test_install_puts_torch_first_and_does_nothing_the_second_time(checkout: Path) -> None:
    assert install(checkout).returncode == 0
    assert pip_calls(checkout) == [
        "torch==2.13.0",
        "--requirement requirements.lock",
        "--no-deps --no-build-isolation --editable .",
    ]
    again = install(checkout)
    assert (again.returncode, again.stdout, pip_calls(checkout)) == (0, "", [])


def test_changed_lock_updates_the_environment_in_place(checkout: Path) -> None:
    install(checkout)
    (checkout / ".venv" / "kept").touch()
    (checkout / "requirements.lock").write_text("# lock\nother==1.0\ntorch==2.13.0\n")
    pip_calls(checkout)
    assert "bringing .venv up to requirements.lock" in install(checkout).stdout
    assert len(pip_calls(checkout)) == 3
    assert (checkout / ".venv" / "kept").exists()


def test_interrupted_installation_is_made_anew(checkout: Path) -> None:
    (checkout / "offline").touch()
    failed = install(checkout)
    assert failed.returncode == 1
    assert "installing failed" in failed.stderr
    assert not (checkout / ".venv" / ".stamp").exists()
    (checkout / "offline").unlink()
    (checkout / ".venv" / "half").touch()
    mended = install(checkout)
    assert mended.returncode == 0
    assert "the last installation was interrupted" in mended.stdout
    assert not (checkout / ".venv" / "half").exists()
    assert (checkout / ".venv" / ".stamp").exists()


def test_environment_that_was_made_elsewhere_is_made_anew(checkout: Path) -> None:
    install(checkout)
    stamp = checkout / ".venv" / ".stamp"
    stamp.write_text(stamp.read_text().replace(str(checkout), "/elsewhere"))
    assert ".venv was made elsewhere" in install(checkout).stdout
    assert str(checkout) in stamp.read_text()


def packages(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """scripts/packages.sh, without root and without Redis."""
    for name, body in {
        ".venv/bin/python": 'test "$2" = --fetch || echo redis-server',
        "bin/id": "echo 1000",
        "bin/apt-get": f"touch {tmp_path}/called",
    }.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "packages.sh", tmp_path / "scripts")
    return subprocess.run(
        [tmp_path / "scripts" / "packages.sh"],
        env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_missing_package_without_root_is_said_and_is_no_error(tmp_path: Path) -> None:
    answer = packages(tmp_path)
    assert answer.returncode == 0
    assert "the tests that need redis-server will be skipped" in answer.stdout
    assert "only root can install it" in answer.stdout
    assert not (tmp_path / "called").exists()


def test_missing_package_on_ci_is_an_error(tmp_path: Path) -> None:
    answer = packages(tmp_path, CI="true")
    assert answer.returncode == 1
    assert "the tests that need redis-server will fail" in answer.stdout


def test_benchmarks_are_found_by_their_main_without_being_imported(tmp_path: Path) -> None:
    (tmp_path / "speed.py").write_text(
        '"""How fast.\n\nMore."""\nraise RuntimeError\ndef main(): ...\n'
    )
    (tmp_path / "helper.py").write_text("def table(): ...\n")
    (tmp_path / "_private.py").write_text("def main(): ...\n")
    assert discover(tmp_path) == {"speed": "How fast."}


def test_benchmark_runner_refuses_an_unknown_name() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "bench", "no_such_benchmark"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 2
    assert "no benchmark no_such_benchmark" in answer.stderr


def test_no_file_names_this_machine_or_a_package_registry() -> None:
    registries = ("pypi" + ".org", "pythonhosted" + ".org", "download.pytorch" + ".org")
    local = ("/ro" + "ot/", "/ho" + "me/", "/work" + "/main", "/opt" + "/")
    for path in tracked_files():
        if path.suffix in (".png", ".parquet", ".gz", ".bin", ".npz", ".npy", ".ico"):
            continue
        text = path.read_bytes().decode("utf-8", errors="replace")
        found = [word for word in (*registries, *local) if word in text]
        assert not found, f"{path.relative_to(ROOT)} holds {found}"


def test_nothing_is_ever_unpickled() -> None:
    unsafe = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Import):
                names = {a.name.split(".")[0] for a in node.names}
            else:
                continue
            assert not names & unsafe, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_licence_is_the_declared_one_in_both_languages() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["project"]["license"] == "LicenseRef-Echelon-Research"
    assert text.startswith("Echelon Research Licence")
    assert "本项目仅供学术研究和教育用途。商业使用请联系作者获得授权。" in text
    assert "academic research, for teaching" in text
    assert "prior written permission" in text


def test_changelog_has_an_unreleased_section_with_entries() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = text.split("## [Unreleased]", 1)[1].split("\n## [", 1)[0]
    assert re.search(r"^### (Added|Changed|Fixed|Removed)\n- ", unreleased, flags=re.MULTILINE)


def test_documentation_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 10
    fetched = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"(?:https?:)?//|<link[^>]+href=\"https?://"
    )
    for page in pages:
        assert not fetched.search(page.read_text(encoding="utf-8")), page.name


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def leaves(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        items = node.values() if isinstance(node, dict) else node
        assert not isinstance(items, (str, type(None)))
        return [leaf for item in items for leaf in leaves(item)]  # type: ignore[attr-defined]

    docs = ROOT / "docs"
    assert sorted(leaves(config["nav"])) == sorted(
        str(page.relative_to(docs)) for page in docs.rglob("*.md")
    )


JSON_BY_HAND = {
    "monitoring/channels.py": "answers of services that are not ours",
    "files.py": "the one place that does",
    "config/load.py": "the text a configuration's hash is of",
    "cli/data.py": "a value as YAML of an override takes it",
    "report/pages.py": "data inside a page, in one line",
    "live/alpaca_api.py": "what a broker answers, taken apart with care",
    "live/brokers/sheet.py": "files that the user writes, judged line by line",
    "live/feeds/kafka.py": "options of its client, of a secret of the environment",
    "live/http.py": "bodies of requests and answers, bounded before",
    "live/feeds/messages.py": "a parser of its own: every number a float, and quickly",
    "data/datasets.py": "the text a dataset's name is of",
    "data/store.py": "the text a content hash is of; tables, whose damage it names",
    "data/importing.py": "pieces that it wrote a moment before, and what the store has verified",
    "data/sources/_ticks_read.py": "pieces that it wrote a moment before",
    "data/sources/_vendor.py": "the text a fingerprint is of",
    "data/sources/files.py": "the text a fingerprint is of",
    "data/sources/synthetic.py": "the text a fingerprint is of",
    "data/sources/ticks.py": "pieces that it wrote a moment before",
    "features/cache.py": "the text a MAC is of; what a Redis is sent",
    "features/prepared.py": "the text a hash of facts is of",
    "proving/worlds.py": "a file that it wrote a moment before",
}
"""Modules that may use `json` or read tables themselves, and why."""


def test_files_are_read_and_written_by_one_module() -> None:
    names = re.compile(
        r"^import json$|\bjson\.(loads?|dumps?)\(|\bread_parquet\(|\bnp\.load\(|\bload_file\(", re.M
    )
    source = ROOT / "src" / "echelon"
    others = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if names.search(path.read_text(encoding="utf-8"))
    }
    assert others == set(JSON_BY_HAND)
