"""Whether an optional package is there, asked by the name under which it is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement


def requires(package: str) -> None:
    """Raise ``ImportError`` unless a package is installed, in a version that fits: ``requires("peft>=0.18")``."""
    requirement = Requirement(package)
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        raise ImportError(f"{requirement.name} is not installed; pip install '{package}'") from None
    if not requirement.specifier.contains(found, prereleases=True):
        raise ImportError(f"{requirement.name} is installed as {found}, needed is {package}; pip install '{package}'")


def exists(package: str) -> bool:
    """Whether a package is installed, in a version that fits."""
    try:
        requires(package)
    except ImportError:
        return False
    return True
