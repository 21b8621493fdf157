"""The native forward's library: compiled from the C++ beside this file on first use, cached, loaded with ctypes.

The cache lies under ~/.cache/draftloop/native/<hash of sources, flags, CPU and compiler>/, so that another machine on
the same home folder builds its own. Several processes may build at once: each writes its own file, the last wins.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

_FOLDER = Path(__file__).parent
_MAIN = "native_forward.cpp"  # is compiled; all headers beside it count as its own
_SOURCES = (_MAIN, *sorted(path.name for path in _FOLDER.glob("native_*.h")))
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread")
_X86 = ("x86_64", "amd64")
_AVX512 = ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")

# Instruction set levels, best first: compiler flags, and the names in /proc/cpuinfo that they need.
_ISAS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "avx512bf16": (
        (*_AVX512, "-mavx512bf16"),
        frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx2", "fma"}),
    ),
    "avx512": (_AVX512, frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"})),
    "avx2": (("-mavx2", "-mfma"), frozenset({"avx2", "fma"})),
    "portable": (("-march=x86-64",), frozenset()),
}


class NativeBuildError(RuntimeError):
    """The library cannot be built or loaded here; the message is one line."""


@functools.lru_cache
def load(isa: str | None = None) -> ctypes.CDLL:
    """The library for this machine, or for a lower instruction set level. Raises NativeBuildError."""
    if platform.machine().lower() not in _X86:
        raise NativeBuildError(f"the native backend needs an x86-64 CPU, this is {platform.machine()}")
    if isa is not None and isa not in runnable_isas():
        raise NativeBuildError(f"this CPU runs {', '.join(runnable_isas())}, not {isa}")
    compiler = _compiler()
    flags = (*_FLAGS, *(("-march=native",) if isa is None else _ISAS[isa][0]))
    try:
        return ctypes.CDLL(str(_built(compiler, flags)))
    except OSError as error:
        raise NativeBuildError(f"the native library does not load: {error}") from error


@functools.lru_cache
def unavailable_reason() -> str | None:
    """Why the native backend cannot run on this machine, in one line; None if it can. Builds it on first use."""
    try:
        load()
    except NativeBuildError as error:
        return str(error)
    return None


@functools.lru_cache
def runnable_isas() -> tuple[str, ...]:
    """The levels that this CPU can run, best first."""
    flags = set(_cpu()["flags"].split())
    return tuple(isa for isa, (_, needed) in _ISAS.items() if needed <= flags)


def _cpu() -> dict[str, str]:
    """Model name and flags of the first CPU; empty strings where the system does not tell."""
    found = {"model name": "", "flags": ""}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in found and not found[key.strip()]:
            found[key.strip()] = value.strip()
    return found


def _compiler() -> list[str]:
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in [wanted] if wanted else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0]):
            return command
    if wanted:
        raise NativeBuildError(f"the C++ compiler that CXX names is not there: {wanted[0]}")
    raise NativeBuildError("no C++ compiler found; install g++ or clang++, or set CXX")


def _built(compiler: list[str], flags: tuple[str, ...]) -> Path:
    here = Path(__file__).parent
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"the C++ compiler {compiler[0]} does not run: {error}") from error
    digest = hashlib.sha256(repr((sorted(_cpu().items()), compiler, flags, version)).encode())
    for name in _SOURCES:
        digest.update((here / name).read_bytes())
    library = _cache_folder(digest.hexdigest()[:24]) / "libdraftloop_native.so"
    if not library.exists():
        _compile([*compiler, *flags], here / _SOURCES[0], library)
    return library


def _cache_folder(key: str) -> Path:
    """The user's cache folder; where that cannot be written, one of this process's own."""
    try:
        folder = Path.home() / ".cache" / "draftloop" / "native" / key
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        pass
    return Path(tempfile.mkdtemp(prefix="draftloop-native-"))


def _compile(command: list[str], source: Path, library: Path) -> None:
    handle, built = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(handle)
    try:
        run = subprocess.run([*command, "-o", built, str(source)], capture_output=True, text=True, timeout=600)
        if run.returncode:
            errors = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines()
            raise NativeBuildError(f"{command[0]} failed on {source.name}: {errors[0] if errors else 'no message'}")
        os.chmod(built, 0o755)
        os.replace(built, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{command[0]} failed on {source.name}: {error}") from error
    finally:
        Path(built).unlink(missing_ok=True)
