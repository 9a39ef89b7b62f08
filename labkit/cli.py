"""The `labkit` command: open the laboratory; run, reproduce and build its labs; fetch assets; look around."""

import ast
import os
import shutil
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from labkit import labs
from labkit.errors import MissingAsset, MissingDependency

app = typer.Typer(
    name="labkit",
    help="Seven ICML 2026 papers you can touch. `labkit lab` opens the laboratory in the browser.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
assets_app = typer.Typer(help="Models and data: list them, fetch them into the cache, verify them.", no_args_is_help=True)
app.add_typer(assets_app, name="assets")

Number = Annotated[str, typer.Argument(metavar="NN", help="The lab's number, such as 01.", show_default=False)]


def main() -> None:
    """Run the command line; expected errors become one line on stderr and exit code 1."""
    # an exception, so that running notebooks are ended too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from labkit.run import NotebookError

    try:
        app()
    except (ValueError, MissingAsset, MissingDependency, NotebookError) as error:
        typer.secho(f"labkit: {' '.join(str(error).split())}", fg="red", err=True)
        sys.exit(1)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": ["--help"],
    }
)
def lab(
    context: typer.Context,
    copy: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Open a copy of the notebooks in DIR; files already there are kept."),
    ] = None,
) -> None:
    """Open JupyterLab on the first notebook.

    Other options go to `jupyter lab`, for example: labkit lab --no-browser --port 9000
    """
    folder = labs.notebook_dir() if copy is None else _copy_notebooks(copy)
    command, env = lab_command(folder, context.args)
    os.execve(command[0], command, env)


def lab_command(folder: Path, options: list[str]) -> tuple[list[str], dict[str, str]]:
    """Command line and environment that open JupyterLab on `folder`.

    A configuration folder of labkit's own is searched first. It turns JupyterLab's news pop-up off.

    Raises:
        MissingDependency: JupyterLab is not installed.
    """
    if find_spec("jupyterlab") is None:
        raise MissingDependency('jupyterlab is not installed: pip install "labkit[lab]"', name="jupyterlab")
    first = labs.LABS["00"].notebook
    url = "/lab" if first is None else f"/lab/tree/{first.name}"
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url={url}",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # containers; JupyterLab refuses otherwise
    config = [str(Path(__file__).with_name("jupyter")), os.environ.get("JUPYTER_CONFIG_PATH", "")]
    return [*command, *options], os.environ | {"JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, config))}


def _copy_notebooks(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for notebook in labs.notebook_dir().glob("*.ipynb"):
        if not (folder / notebook.name).exists():
            shutil.copy(notebook, folder)
    return folder.resolve()


@app.command("list")
def list_labs() -> None:
    """List the labs: what they ask and what they need."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("lab", "title", "question", "time", "memory", "state"):
        table.add_column(column, no_wrap=column != "question")
    for entry in labs.LABS.values():
        state = "[green]ready[/]" if entry.ready else "[dim]in preparation[/]"
        needs = (f"{entry.minutes} min", f"{entry.memory_gb:g} GB")
        table.add_row(entry.number, entry.title, entry.question, *needs, state)
    Console().print(table)


@app.command()
def run(
    number: Number,
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="KEY=VALUE", help="A parameter, e.g. -p fast=False; repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the executed notebook (default: results/NN)."),
    ] = None,
    limit: Annotated[float, typer.Option(metavar="MINUTES", min=0.1, help="Stop the run after this time.")] = 180,
) -> None:
    """Execute a lab's notebook, with other parameters if you like."""
    from labkit.run import run_notebook

    entry = labs.find_ready(number)
    output = (out or Path("results", entry.number)) / entry.notebook.name
    seconds = round(60 * limit)
    done = run_notebook(
        entry.notebook,
        output,
        dict(map(_parameter, parameter or [])),
        cell_timeout=seconds,
        total_timeout=seconds,
        progress=True,
    )
    typer.echo(f"{done.output} ({done.seconds:.0f} s, {done.peak_memory / 1e9:.2f} GB)")


def _parameter(text: str) -> tuple[str, object]:
    """`key=value`; the value is a Python literal (true, false and none in any case), else plain text."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"parameter: got {text!r}, allowed is KEY=VALUE")
    words = {"true": True, "false": False, "none": None, "null": None}
    if value.lower() in words:
        return key, words[value.lower()]
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


@app.command()
def reproduce(
    number: Number,
    fast: Annotated[bool, typer.Option("--fast", help="Small sizes: a look at the tables in about a minute.")] = False,
    seeds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of seeds (default: the lab's own).")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the results (default: results/NN).")] = None,
) -> None:
    """Put a lab's method beside its baselines: tables, a verdict per claim, CSV and Markdown files.

    A claim that fails is printed as failing; the exit code is 0 unless the run itself broke.
    """
    entry = labs.find_ready(number)
    experiment = labs.experiment(entry)
    from labkit import report

    out = out or Path("results", entry.number)
    outcome = experiment.reproduce(fast=fast, seeds=seeds, out=out)
    report.show(outcome)
    files = report.write(outcome, out)
    typer.echo(f"written to {out}: {', '.join(file.name for file in files)}")


@app.command()
def build(
    number: Number,
    fast: Annotated[bool, typer.Option("--fast", help="Small sizes, to see that it works.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the results (default: the package's data).")
    ] = None,
) -> None:
    """Rebuild the results that a lab's notebook opens with. Interrupt it at will: finished parts are kept."""
    labs.experiment(labs.find_ready(number)).build(out=out, fast=fast)


@assets_app.command("list")
def list_assets() -> None:
    """List all assets: size, licence, which labs use them, whether they are here."""
    from labkit import assets

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("asset", "what", "MB", "licence", "labs", "state"):
        table.add_column(column, no_wrap=column in ("asset", "state"), justify="right" if column == "MB" else "left")
    for asset in assets.manifest().values():
        here = assets.is_present(asset.name)
        state = "[green]here[/]" if here else "[dim]optional[/]" if asset.optional else "[dim]not fetched[/]"
        size = f"{asset.size / 1e6:,.1f}"
        table.add_row(asset.name, asset.title, size, asset.licence, ", ".join(asset.labs), state)
    Console().print(table)
    typer.echo(f"cache: {assets.cache_root()}")


@assets_app.command("fetch")
def fetch_assets(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Assets by name.")] = None,
    number: Annotated[str | None, typer.Option("--lab", metavar="NN", help="All that one lab uses, optional or not.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All assets.")] = False,
) -> None:
    """Fetch assets into the cache; without names, what the ready labs cannot do without."""
    from labkit import assets

    if everything:
        names = list(assets.manifest())
    elif number:
        names = [*(names or []), *(asset.name for asset in assets.for_lab(labs.find(number).number))]
    elif not names:
        names = [name for entry in labs.LABS.values() if entry.ready for name in entry.assets]
    faults = []
    for name in dict.fromkeys(names):
        try:
            typer.echo(f"{name}: {assets.fetch(name)}")
            _prepare(name)
        except MissingAsset as error:  # the others may be there for the taking
            faults.append(str(error))
    if faults:
        raise MissingAsset("; ".join(faults))


def _prepare(name: str) -> None:
    """Convert now what the first notebook would otherwise wait for, where the packages are installed."""
    if find_spec("transformers") is None:
        return
    if name == "smollm2":
        from labkit import llm

        llm.prepare(name)
    elif name == "wikipedia":
        from labkit import corpora

        corpora.documents("wiki")


@assets_app.command("verify")
def verify_assets() -> None:
    """Hash every asset in the cache; exit code 1 if one is damaged."""
    from labkit import assets

    damaged = []
    for name in filter(assets.is_present, assets.manifest()):
        sound = assets.verify(name)
        typer.echo(f"{name}: {'sound' if sound else 'damaged'}")
        if not sound:
            damaged.append(name)
    if damaged:
        raise MissingAsset(f"damaged: {', '.join(damaged)}; to mend: labkit assets fetch {' '.join(damaged)}")


@app.command()
def doctor(
    timing: Annotated[
        bool, typer.Option("--time", help="Also run each notebook in fast mode: wall time, peak memory.")
    ] = False,
) -> None:
    """Check packages, widgets, memory, assets and programs; each problem comes with its one-line fix."""
    from labkit.doctor import checks

    found = checks()
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "what", "found", "fix"):
        table.add_column(column, overflow="fold")
    topic = None
    for check in found:
        if check.topic != topic:
            topic = check.topic
            table.add_row("", f"[bold]{topic}[/]", "", "")
        sign = "[green]ok[/]" if check.ok else "[dim]–[/]" if check.optional else "[bold red]!![/]"
        table.add_row(sign, check.name, escape(check.found), escape(check.fix))
    Console().print(table)
    if timing:
        _time_notebooks()
    broken = [check.name for check in found if not (check.ok or check.optional)]
    if broken:
        raise ValueError(f"needs attention: {', '.join(broken)}")


def _time_notebooks() -> None:
    from labkit.run import run_notebook

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("notebook", "wall time", "peak memory"):
        table.add_column(column, justify="left" if column == "notebook" else "right")
    with tempfile.TemporaryDirectory() as scratch:
        for entry in labs.LABS.values():
            if entry.ready:
                done = run_notebook(entry.notebook, Path(scratch, entry.notebook.name), progress=True)
                table.add_row(entry.notebook.name, f"{done.seconds:.1f} s", f"{done.peak_memory / 1e9:.2f} GB")
    Console().print(table)


if __name__ == "__main__":
    main()
