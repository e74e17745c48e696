"""What a number was measured on, without which it is no number, and the file that keeps both."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil


def machine_facts(packages: Iterable[str]) -> dict[str, object]:
    """Returns processor, memory, system and versions. No names of hosts or users."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: _version_of(name) for name in packages},
        "commit": _commit(),
    }


def load_average() -> float:
    """Returns the load average of the last minute: how busy others kept the machine, and we ourselves."""
    return round(os.getloadavg()[0], 2)


def write_result(path: Path, result: Mapping[str, object]) -> None:
    """Keep what a benchmark found, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    answer = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    return answer.stdout.strip() or "unknown"
