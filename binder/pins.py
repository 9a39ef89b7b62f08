"""Rewrite constraints.txt and both copies of environment.yml from the packages in this environment.

Run it with the environment's own Python, after a new resolution has passed the tests: `make pins`.
"""

from importlib.metadata import distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
NOT_PINNED = {"labkit", "pip", "setuptools"}

CONSTRAINTS = """\
# Exact versions of all that labkit and its extras install, resolved together on Python 3.11 with a CPU build of
# torch. `make pins` rewrites this file.
"""
ENVIRONMENT = """\
# What Binder installs. Exact versions, the same as in constraints.txt; `make pins` rewrites this file.
# torch is conda's CPU build. labkit itself is installed by binder/postBuild.
name: labkit
channels:
  - conda-forge
dependencies:
  - python=3.11
  - pip
  - pytorch-cpu={torch}.*
  - pip:
"""


def installed_versions() -> dict[str, str]:
    """Name as its author spells it -> version without the build's local part, sorted by name."""
    found = {dist.name: dist.version.partition("+")[0] for dist in distributions()}
    pinned = {name: version for name, version in found.items() if canonicalize_name(name) not in NOT_PINNED}
    return dict(sorted(pinned.items(), key=lambda item: canonicalize_name(item[0])))


def needed_by(package: str, extras: frozenset[str], seen: set | None = None) -> set[str]:
    """Canonical names of all that `package[extras]` requires here, itself excluded."""
    seen = set() if seen is None else seen
    for text in distribution(package).requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            continue
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key not in seen:
            seen.add(key)
            needed_by(*key, seen)
    return {name for name, _ in seen} - {package}


def main() -> None:
    versions = installed_versions()
    lines = [f"{name}=={version}\n" for name, version in versions.items()]
    (ROOT / "constraints.txt").write_text(CONSTRAINTS + "".join(lines))
    runtime = needed_by("labkit", frozenset({"all"})) - {"torch"} - NOT_PINNED
    major_minor = ".".join(versions["torch"].split(".")[:2])
    text = ENVIRONMENT.format(torch=major_minor) + "".join(
        f"      - {line}" for line, name in zip(lines, versions, strict=True) if canonicalize_name(name) in runtime
    )
    for folder in (ROOT, ROOT / "binder"):
        (folder / "environment.yml").write_text(text)


if __name__ == "__main__":
    main()
