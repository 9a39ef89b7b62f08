"""A generator, and the three models with a run of each."""

import pytest
import torch

from labkit.filtering import LinearGaussianSSM, MovingSource, TwoGroupSIR, simulate, truth_generator

MODELS = {
    "sir": TwoGroupSIR(),
    "sir4": TwoGroupSIR.seeded_outbreak(),
    "source": MovingSource(),
    "linear-gaussian": LinearGaussianSSM(),
}


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(params=MODELS, ids=str)
def model(request):
    """Each model in turn."""
    return MODELS[request.param]


@pytest.fixture
def run():
    """Designs (T, dξ), by default of the random policy, states (T + 1, dx) and observations (T, dy) of a model's own truth."""

    def make(model, steps, seed=0, design=None):
        generator = truth_generator(seed)
        designs = model.sample_designs(steps, generator) if design is None else torch.tensor([design]).expand(steps, -1)
        return designs, *simulate(model, model.truth, designs, generator)

    return make
