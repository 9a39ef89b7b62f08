"""Beliefs that several tests share."""

import torch

from labkit.filtering import Clouds, LinearGaussianSSM, NestedParticleFilter, simulate, truth_generator

LG = LinearGaussianSSM()
SLOPE, SPREAD = 1.5, 0.1  # c and P of the closed form


def gaussian(num_params, num_states, seed=0, *, model=LG, slope=SLOPE, prior_sd=0.5, dtype=torch.float32):
    """Independent clouds of the closed form: θ ~ N(0, s²), x | θ ~ N(c θ, P)."""
    generator = torch.Generator().manual_seed(seed)
    theta = prior_sd * torch.randn(num_params, 1, generator=generator, dtype=dtype)
    x = slope * theta[:, None] + SPREAD**0.5 * torch.randn(num_params, num_states, 1, generator=generator, dtype=dtype)
    return Clouds(model, theta, x, None)


def filtered(model, num_params, num_states, steps, seed=0, **kwargs):
    """What a nested filter believes after some steps of the random policy."""
    designs = model.sample_designs(steps, torch.Generator().manual_seed(seed))
    _, ys = simulate(model, model.truth, designs, truth_generator(seed))
    nested = NestedParticleFilter(model, num_params, num_states, seed=seed, **kwargs)
    for design, y in zip(designs, ys, strict=True):
        nested.step(design, y)
    return nested.snapshot()
